"""Launches in generated code, the classes of kernels, and the model of a GPU."""

import importlib.util
import sys

import pytest

from common.measure.without_gpu import gpu_model
from common.measure.without_gpu.gpu_model import Shares, predict
from common.measure.without_gpu.kernels import (
    ATTENTION,
    CONVOLUTION,
    MATRIX,
    Tally,
    classify,
    classify_library,
    read_code,
)
from tests.command import ttt_here

CODE = """
# Topologically Sorted Source Nodes: [x], Original ATen: [aten.relu, aten.native_batch_norm]
triton_poi_fused_relu_0 = async_compile.triton('triton_poi_fused_relu_0', '''
    inductor_meta={'kernel_num_gb': 0.25}
    def call(args):
        triton_poi_fused_relu_0.run(1)
''', device_str='cuda')
def call(args):
    triton_poi_fused_relu_0.run(buf0, stream=stream0)
    extern_kernels.convolution(buf0)
    buf3 = torch.ops.torch_attn._varlen_attn.default(buf1)
    triton_poi_fused_relu_0.run(buf1, stream=stream0)
"""


def test_generated_code_states_launches_bytes_and_library_calls():
    code = read_code(CODE)
    assert code.kernels == {"triton_poi_fused_relu_0": ("normalisation", 0.25e9, 2)}
    assert code.library == {"convolution", "_varlen_attn"}


def test_code_of_an_unknown_format_is_refused():
    with pytest.raises(ValueError, match="triton_poi_fused_relu_0"):
        read_code(CODE.replace("kernel_num_gb", "gigabytes"))


@pytest.mark.parametrize(
    ("operators", "kind"),
    [
        (["native_layer_norm_backward", "_to_copy"], "normalisation"),
        (["gelu", "add"], "activation"),
        (["_to_copy"], "casts"),
        (["sum"], "other"),
        (["_fused_adamw_"], "optimizer"),
        (["nll_loss_forward"], "loss"),
        (["cat", "view"], "attention bookkeeping"),
    ],
)
def test_a_kernel_has_the_class_of_what_it_computes(operators, kind):
    assert classify(operators) == kind


@pytest.mark.parametrize(
    ("operator", "kind"),
    [
        ("convolution_backward", CONVOLUTION),
        ("addmm", MATRIX),
        ("_varlen_attn_backward", ATTENTION),
        ("convert_element_type", ""),
        ("comm", ""),
    ],
)
def test_a_library_call_is_known_by_its_operator(operator, kind):
    assert classify_library(operator) == kind


def test_launches_of_one_kernel_add_up():
    tally = Tally()
    tally.add("mm", MATRIX, num_bytes=1e9, flops=2e12)
    tally.add("mm", MATRIX, num_bytes=1e9, flops=2e12, count=2)
    assert tally.by_class() == {MATRIX: {"launches": 3, "gb": 3.0, "tflop": 6.0}}


def test_a_call_takes_as_long_as_its_bytes_or_its_flops():
    counts = {
        "classes": {
            MATRIX: {"launches": 2, "gb": 0, "tflop": 0},
            "casts": {"launches": 1, "gb": 20.39, "tflop": 0},
        },
        "library": [[MATRIX, "mm", 1, 0.0, 3.12], [MATRIX, "mm", 1, 20.39, 0.0]],
    }
    shares = Shares(bandwidth=1.0, convolution=1.0, matrix=1.0, fp8=1.0)
    found = predict(counts, 10, "A100", shares)
    launch_ms = gpu_model.load_rates()["assumed"]["launch_us"] / 1e3
    assert found.ms[MATRIX] == pytest.approx(10 + 10 + 2 * launch_ms)
    assert found.ms["casts"] == pytest.approx(10 + launch_ms)
    assert found.samples_per_s == pytest.approx(10 / found.step_ms * 1e3) and found.next_class == "casts"


def test_published_rates_are_predicted_and_those_held_out_too():
    checks = gpu_model.check_published()
    held_out = [check for check in checks if check.row["use"] == "check"]
    assert len(checks) >= 8 and len(held_out) >= 4
    assert all(0.5 < check.ratio < 2 for check in checks)
    assert gpu_model.compute_typical_factor(held_out) < 1.25
    assert all(check.row["source"] for check in checks)


def test_the_check_is_printed_as_predicted():
    done = ttt_here("compile", "--check-published")
    assert done.returncode == 0 and "predicted" in done.stdout and "held out" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["compile"], "benchmark"),
        (["compile", "langage_bert", "--for", "sm_90"], "language_bert"),
        (["compile", "language_bert"], "--for"),
        (["compile", "language_bert", "--for", "sm_91"], "sm_90"),
        (["compile", "language_bert", "fast", "--for", "sm_90"], "baseline"),
        (["compile", "image_classification", "baseline", "--for", "sm_90", "--shape", "7 px"], "7 px"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(arguments, word, tmp_path):
    done = ttt_here(*arguments, "--results", tmp_path)
    lines = done.stderr.strip().splitlines()
    assert done.returncode == 2 and len(lines) == 1 and lines[0].startswith("error: ") and word in lines[0]


def test_without_triton_the_command_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    done = ttt_here("compile", "language_bert", "--for", "sm_90")
    assert done.returncode == 2 and "Triton" in done.stderr


def test_without_torch_the_command_says_so(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *args: None if name == "torch" else find(name, *args)
    )
    done = ttt_here("compile", "language_bert", "--for", "sm_90")
    assert done.returncode == 2 and "PyTorch" in done.stderr
