"""Launches in generated code, the classes of kernels, and the model of a GPU."""

import json
import sys
from collections import Counter

import pytest

from common.evidence.intervals import error_factors
from common.evidence.page import fill_blocks
from common.measure import scaling
from common.measure.without_gpu import gpu_model, table
from common.measure.without_gpu.gpu_model import Shares, predict
from common.measure.without_gpu.kernels import (
    ATTENTION,
    CONVOLUTION,
    MATRIX,
    OPTIMIZER,
    Launch,
    classify,
    classify_library,
    read_code,
    sum_classes,
)
from common.repository import ROOT
from tests.command import one_line, ttt_here

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
    kernels, library = read_code(CODE)
    assert kernels == {Launch("triton_poi_fused_relu_0", "normalisation", 0.25e9): 2}
    assert library == {"convolution", "_varlen_attn"}
    with pytest.raises(ValueError, match="triton_poi_fused_relu_0"):
        read_code(CODE.replace("kernel_num_gb", "gigabytes"))


@pytest.mark.parametrize(
    ("classes", "operators", "kind"),
    [
        (classify, ["native_layer_norm_backward", "_to_copy"], "normalisation"),
        (classify, ["gelu", "add"], "activation"),
        (classify, ["_to_copy"], "casts"),
        (classify, ["sum"], "other"),
        (classify, [], "combined"),
        (classify, ["_fused_adamw_"], "optimizer"),
        (classify, ["nll_loss_forward"], "loss"),
        (classify, ["cat", "view"], "attention bookkeeping"),
        (classify_library, "convolution_backward", CONVOLUTION),
        (classify_library, "addmm", MATRIX),
        (classify_library, "_varlen_attn_backward", ATTENTION),
        (classify_library, "convert_element_type", ""),
        (classify_library, "comm", ""),
    ],
)
def test_a_launch_has_the_class_of_what_it_computes(classes, operators, kind):
    assert classes(operators) == kind


def test_a_call_takes_as_long_as_its_bytes_or_its_flops():
    launches = Counter({Launch("mm", MATRIX, 0.0, 3.12e12): 2, Launch("_to_copy", "casts", 20.39e9): 1})
    classes = sum_classes(launches)
    assert classes[MATRIX] == {"launches": 2, "gb": 0.0, "tflop": 6.24}
    library = [[MATRIX, "mm", 1, 0.0, 3.12], [MATRIX, "mm", 1, 20.39, 0.0]]
    figures = {"batch_size": 10, "training": {"a": {"classes": classes, "library": library}}}
    shares = Shares(bandwidth=1.0, convolution=1.0, matrix=1.0, fp8=1.0)
    predicted = predict(figures, "a", "A100", shares)
    launch_ms = gpu_model.load_rates()["assumed"]["launch_us"] / 1e3
    assert predicted.ms[MATRIX] == pytest.approx(10 + 10 + 2 * launch_ms)
    assert predicted.ms["casts"] == pytest.approx(10 + launch_ms)
    assert predicted.samples_per_s == pytest.approx(10 / predicted.step_ms * 1e3)
    assert predicted.next_class == "casts"


@pytest.mark.parametrize("device", ["A100", "H100", "H200"])
def test_an_optimizer_divided_among_eight_gpus_changes_a_step_by_little(device):
    """It saves 7 of 8 parts of the optimizer's bytes; each rank then gathers all parameters in float32."""
    sheet, parameters = gpu_model.load_rates()["devices"][device], gpu_model.load_rates()["parameters"]
    figures = gpu_model.load_counts(f"{sheet['architecture']}/language_bert-optimized-torch2.15.json")
    (shape,) = figures["training"]
    predicted = predict(figures, shape, device)
    links = scaling.Links(inside=scaling.INSIDE[sheet["inside"]], network=1.0)
    gathered_ms = scaling.exchange_s(4 * parameters["bert"], links, 1, 8) / 2 * 1e3  # half of an all-reduce
    gained_ms = predicted.ms[OPTIMIZER] * 7 / 8 - gathered_ms
    print(f"{device}: {gained_ms:.2f} of {predicted.step_ms:.1f} ms")
    assert abs(gained_ms) < 0.015 * predicted.step_ms


def test_published_rates_are_predicted_and_those_held_out_too():
    rows = gpu_model.check_published()
    assert Counter(row["use"] for row in rows) == {"fit": 10, "check": 20}
    assert all(0.5 < row["ratio"] < 2 and row["source"] for row in rows)
    assert error_factors(row["ratio"] for row in rows if row["use"] == "check")[0] < 1.25
    done = ttt_here("compile", "--check-published")
    assert done.returncode == 0 and "predicted" in done.stdout and "held out" in done.stdout
    refused = ttt_here("compile", "bert", "--for", "sm_90", "--check-published")
    assert refused.returncode == 2 and "all benchmarks and GPUs; name none" in refused.stderr


def test_rates_of_this_suite_are_those_that_a_gpu_measured():
    rows = [row for row in gpu_model.load_rates()["rates"] if row["name"].startswith("this suite")]
    for row in rows:
        record = json.loads((ROOT / row["source"]).read_text())
        rates, benchmark = record["figures"]["rates"], record["figures"]["benchmark"]
        (rate,) = (r for r in rates if round(r["samples_per_s"], 1) == row["samples_per_s"])
        assert (rate["shape"], rate["batch_size"]) == (row["shape"], row["batch"])
        ran = gpu_model.name_today(benchmark, rate["configuration"], record["commit"])
        assert gpu_model.load_counts(row["counts"])["configuration"] == ran
    assert len(rows) == 12


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["language_bert", "--for", "sm_90"], "Triton"),
        ([], "benchmark"),
        (["langage_bert", "--for", "sm_90"], "language_bert"),
        (["language_bert"], "--for"),
        (["language_bert", "--for", "sm_91"], "sm_90"),
        (["language_bert", "fast", "--for", "sm_90"], "baseline"),
        (["image_classification", "baseline", "--for", "sm_90", "--shape", "7 px"], "7 px"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(arguments, word, tmp_path, monkeypatch):
    if word == "Triton":
        monkeypatch.setitem(sys.modules, "triton", None)
    assert word in one_line(ttt_here("compile", *arguments, "--results", tmp_path))


def test_the_tables_of_methods_and_optimizers_are_those_of_the_committed_figures():
    text = table.PAGE.read_text(encoding="utf-8")
    assert fill_blocks(text, table.TABLES) == text and text.count("without `methods.") == 8


@pytest.mark.parametrize(
    ("benchmark", "name", "parameters"),
    [("language_bert", "lamb", "bert"), ("image_classification", "lars", "resnet")],
)
def test_the_bytes_of_an_optimizer_are_those_that_its_step_is_counted_to_move(benchmark, name, parameters):
    """The count reads and writes once what a kernel is given, also gradients that it could write."""
    file = f"sm_90/{benchmark}-baseline-optimizer.name-{name}-torch2.15.json"
    (counts,) = (shape["classes"][OPTIMIZER] for shape in gpu_model.load_counts(file)["training"].values())
    num_bytes = counts["gb"] * 1e9 / gpu_model.load_rates()["parameters"][parameters]
    assert 0 <= num_bytes - scaling.OPTIMIZER_BYTES[name] <= 12
