"""A step compiled for a GPU that is not there: its kernels, its FLOPs by hand, and the state restored."""

import json

import pytest
import torch
import torchvision

from common.commands.measure.compile import load_for_gpu
from common.machine import hardware
from common.measure.without_gpu.compile_for import (
    build_training,
    compile_training,
    count_graph_breaks,
    open_compiler,
)
from common.measure.without_gpu.kernels import (
    ATTENTION,
    BOOKKEEPING,
    CONVOLUTION,
    LIBRARY,
    MATRIX,
    NAMES,
    OPTIMIZER,
)
from common.measure.without_gpu.pretend import GPUS
from common.measure.without_gpu.report import keep
from common.training.probes import probes_of
from tests.command import ttt_here
from tests.runs import make_benchmark

pytestmark = [pytest.mark.on_demand, pytest.mark.filterwarnings("ignore")]
pytest.importorskip("triton")
NUM_SEQUENCES, SIZE, WIDE, HEADS = 8, 256, 1024, 4
SMALL = [
    f"global_batch_size={NUM_SEQUENCES}",
    "micro_batch_size=null",
    f"model.hidden_size={SIZE}",
    f"model.intermediate_size={WIDE}",
    f"model.num_attention_heads={HEADS}",
    "methods.last_layer_subset=false",
]


def small_bert(num_layers):
    """Return BERT-large's optimized configuration, small."""
    settings = [*SMALL, f"model.num_hidden_layers={num_layers}"]
    return make_benchmark("language_bert", "optimized", *settings, size="full")


@pytest.fixture(scope="module", params=sorted(GPUS))
def layers(request):
    """Compile an encoder of one layer, and of two."""
    with open_compiler(GPUS[request.param]) as compiler:
        (one,), (two,) = (list(compile_training(compiler, build_training(small_bert(n)))) for n in (1, 2))
        return compiler, one, two, count_graph_breaks()


def added(one, two, cost):
    """Return by class what the second layer adds to the launches, each counted with its cost."""
    sums = dict.fromkeys((*LIBRARY, *NAMES), 0)
    for sign, compiled in ((-1, one), (1, two)):
        for launch, count in compiled.tally.items():
            sums[launch.kind] += sign * count * cost(launch)
    return sums


def test_a_layer_is_compiled_once_and_each_of_its_calls_counts(layers):
    compiler, one, two, breaks = layers
    assert one.num_graphs == 6  # embedding, layer and head, forward and backward
    assert two.num_graphs == 0  # the same pieces
    assert not breaks and compiler.num_recompiles == 0
    launches = added(one, two, lambda launch: 1)  # backward: query, key, value apart
    assert (launches[MATRIX], launches[ATTENTION], launches[BOOKKEEPING]) == (4 + 12, 2, 0)
    assert one.kernels and all(0 < kernel.registers <= 255 for kernel in one.kernels)
    assert sum(launch.num_bytes for launch in one.tally if launch.kind == OPTIMIZER) > 0


def test_the_flops_of_a_layer_are_those_of_its_products(layers):
    _, one, two, _ = layers
    flops = added(one, two, lambda launch: launch.flops)
    (batch,) = probes_of(small_bert(1)).bench_batches(NUM_SEQUENCES).values()
    lengths = batch.inputs["attention_mask"].sum(dim=1)
    num_tokens = -(-int(lengths.sum()) // 512) * 512
    assert flops[MATRIX] == 3 * num_tokens * (8 * SIZE**2 + 4 * SIZE * WIDE)
    attended = 3.5 * 4 * float((lengths.double() ** 2).sum()) * SIZE
    padding = 3.5 * 4 * (num_tokens - int(lengths.sum())) ** 2 * SIZE  # a sequence of padding attends too
    assert attended <= flops[ATTENTION] <= attended + padding


def test_a_stage_of_resnet_compiles_without_a_gpu_which_is_gone_afterwards():
    before = torch.cuda.is_available(), torch.nn.Module.to, torch.autograd.grad
    batch, size = 4, 24
    with open_compiler(GPUS["sm_90"]) as compiler:
        assert torch.cuda.is_available()
        stage = torchvision.models.resnet50().layer1.to(memory_format=torch.channels_last).train()
        stage.compile(dynamic=False)
        images = torch.empty(batch, 64, size, size, requires_grad=True)
        images = images.to(memory_format=torch.channels_last).detach().requires_grad_()

        def step():
            with torch.autocast("cuda", torch.bfloat16):
                outputs = stage(images)
            assert outputs.device.type == "cuda" and outputs.dtype == torch.bfloat16
            outputs.float().sum().backward()

        compiled = compiler.compile("24 px", step)
    weights = sum(weight.numel() for weight in stage.parameters() if weight.ndim == 4)
    convolutions = [(one, count) for one, count in compiled.tally.items() if one.kind == CONVOLUTION]
    assert sum(one.flops * count for one, count in convolutions) == 3 * 2 * batch * size**2 * weights
    assert sum(count for _, count in convolutions) == 3 * 10
    assert any(kernel.kind == "normalisation" for kernel in compiled.kernels)
    assert (torch.cuda.is_available(), torch.nn.Module.to, torch.autograd.grad) == before
    with torch.autocast("cpu", torch.bfloat16):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).tolist() == [[2, 2], [2, 2]]


def test_combined_kernels_are_fewer_and_move_the_same_bytes():
    def branches(values):
        return [value.sum(dim=1) for value in values]

    num_launches, num_bytes = [], []
    with open_compiler(GPUS["sm_90"]) as compiler:
        values = [torch.empty(64, 100 + 20 * number) for number in range(4)]
        for is_combined in (False, True):
            call = torch.compile(branches, dynamic=False, options={"combo_kernels": is_combined})
            compiled = compiler.compile("x", lambda: call(values))  # noqa: B023
            num_launches.append(sum(compiled.tally.values()))
            num_bytes.append(sum(one.num_bytes * count for one, count in compiled.tally.items()))
            torch._dynamo.reset()
    assert num_launches == [4, 1]
    assert num_bytes[0] == pytest.approx(num_bytes[1], rel=1e-9) and num_bytes[0] > 0


OF_RESNET = ["blur_kernel", "crop_resize_kernel", "max_blur_backward_kernel", "max_blur_kernel"]
OF_BERT = ["cross_entropy_kernel", "quantize_kernel"]
ON_HOPPER = [
    "attention_backward_keys_kernel",
    "attention_backward_queries_kernel",
    "attention_kernel",
    *OF_BERT,
]


@pytest.mark.parametrize(
    ("architecture", "benchmark", "kernels"),
    [
        ("sm_80", "image_classification", OF_RESNET),
        ("sm_90", "image_classification", OF_RESNET),
        ("sm_80", "language_bert", OF_BERT[:1]),
        ("sm_90", "language_bert", ON_HOPPER),
    ],
)
def test_the_suites_own_kernels_compile_and_a_graph_break_is_counted(architecture, benchmark, kernels):
    def broken(values):
        values = values + 1
        torch._dynamo.graph_break()
        return values * 2

    with open_compiler(GPUS[architecture]) as compiler:
        compiler.add_own_kernels(make_benchmark(benchmark, "baseline"))
        own = list(compiler.kernels)
        torch.compile(broken)(torch.empty(64))
        assert sum(count_graph_breaks().values()) == 1 and compiler.num_graphs == 2
    assert sorted(kernel.name for kernel in own) == kernels
    assert all(kernel.registers > 0 and kernel.spilled_bytes == 0 for kernel in own)


def test_the_command_compiles_micro_batches_and_keeps_its_figures_with_the_commit(tmp_path):
    settings = [*SMALL, "model.num_hidden_layers=1", f"micro_batch_size={NUM_SEQUENCES // 2}"]
    sets = [part for setting in settings for part in ("--set", setting)]
    arguments = ["--for", "sm_90", "--batch-size", NUM_SEQUENCES, *sets, "--results", tmp_path, "--json"]
    done = ttt_here("compile", "language_bert", "optimized", *arguments)
    assert done.returncode == 0, done.stderr
    (path,) = (tmp_path / "compiled/sm_90").glob("language_bert-optimized-*-torch*.json")
    (figures,) = json.loads(done.stdout)
    assert json.loads(path.read_text()) == figures
    (training,) = figures["training"].values()
    assert training["classes"][ATTENTION]["launches"] == 2 * 2  # forward and backward of two micro-batches
    assert {kernel["name"] for kernel in figures["own_kernels"]} == set(ON_HOPPER)
    assert figures["commit"] and figures["versions"]["triton"] and not figures["graph_breaks"]
    assert str(tmp_path) not in path.read_text()
    mini = keep(figures | {"size": "mini"}, tmp_path)
    assert mini != path and path.is_file()  # figures of size mini do not replace those of size full


def test_size_mini_is_compiled_in_the_precision_of_the_gpu_that_is_not_here(monkeypatch):
    monkeypatch.setattr(hardware, "processor_flags", tuple)
    for typed in ("ema", "ema+precision=auto"):
        config = load_for_gpu("language_bert", f"optimized+{typed}", size="mini", batch_size=None)
        assert (config.precision, config.evaluation_precision) == ("bf16", "bf16")
    assert {"low_precision_layernorm", "ema"} <= config.methods.keys()
    assert (
        load_for_gpu("language_bert", "baseline+precision=fp16", size="mini", batch_size=8).precision
        == "fp16"
    )
