"""A step compiled for a GPU that is not there: its kernels, its FLOPs by hand, and what is put back."""

import json

import pytest
import torch
import torchvision

from common.errors import UserError
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
from common.measure.without_gpu.pretend import GPUS, find_gpu
from common.measure.without_gpu.report import keep
from common.repository import benchmark_module
from common.training.load import load_config
from common.training.method import Batch
from common.training.probes import probes_of
from tests.command import ttt_here

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
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


def bert(*settings):
    """Return BERT-large's optimized configuration, small."""
    config = load_config("language_bert", "optimized", size="full", settings=[*SMALL, *settings]).config
    return benchmark_module("language_bert").Benchmark(config, seed=0)


def compiled_bert(compiler, num_layers):
    run = build_training(bert(f"model.num_hidden_layers={num_layers}"))
    (compiled,) = compile_training(compiler, run)
    return compiled


@pytest.fixture(scope="module", params=sorted(GPUS))
def layers(request):
    """Compile an encoder of one layer, and of two."""
    with open_compiler(GPUS[request.param]) as compiler:
        return compiler, compiled_bert(compiler, 1), compiled_bert(compiler, 2), count_graph_breaks()


def added(name, one, two, *kinds):
    """Return what the second layer adds to each class of launches."""

    def total(compiled, kind):
        return sum(getattr(launches, name) for launches in compiled.tally.of([kind]))

    return {kind: total(two, kind) - total(one, kind) for kind in kinds}


def test_a_layer_is_compiled_once_and_each_of_its_calls_counts(layers):
    compiler, one, two, breaks = layers
    assert one.num_graphs == 6  # embedding, layer and head, forward and backward
    assert two.num_graphs == 0  # the same pieces
    assert not breaks and compiler.num_recompiles == 0
    assert added("count", one, two, MATRIX, ATTENTION, BOOKKEEPING) == {
        MATRIX: 12,
        ATTENTION: 2,
        BOOKKEEPING: 1,
    }  # 4 products; gradients of query, key and value


def test_the_flops_of_a_layer_are_those_of_its_products(layers):
    _, one, two, _ = layers
    flops = added("flops", one, two, MATRIX, ATTENTION)
    benchmark = bert()
    (batch,) = probes_of(benchmark).bench_batches(NUM_SEQUENCES).values()
    lengths = batch.inputs["attention_mask"].sum(dim=1)
    num_tokens = -(-int(lengths.sum()) // 512) * 512
    assert flops[MATRIX] == 3 * num_tokens * (8 * SIZE**2 + 4 * SIZE * WIDE)
    attended = 3.5 * 4 * float((lengths.double() ** 2).sum()) * SIZE
    padding = 3.5 * 4 * (num_tokens - int(lengths.sum())) ** 2 * SIZE  # a sequence of padding attends too
    assert attended <= flops[ATTENTION] <= attended + padding


def test_every_kernel_has_registers_and_bytes(layers):
    _, one, _, _ = layers
    assert one.kernels and all(0 < kernel.registers <= 255 for kernel in one.kernels)
    assert {each.kind for each in one.tally.launches.values()} <= {*LIBRARY, *NAMES}
    assert sum(each.num_bytes for each in one.tally.of([OPTIMIZER])) > 0


def test_a_stage_of_resnet_compiles_without_a_gpu():
    batch, size = 4, 24
    with open_compiler(GPUS["sm_90"]) as compiler:
        stage = torchvision.models.resnet50().layer1.to(memory_format=torch.channels_last).train()
        stage.compile(dynamic=False)
        images = torch.empty(batch, 64, size, size, requires_grad=True)
        images = images.to(memory_format=torch.channels_last).detach().requires_grad_()

        def step():
            with torch.autocast("cuda", torch.bfloat16):
                outputs = stage(images)
            assert outputs.device.type == "cuda" and outputs.dtype == torch.bfloat16
            outputs.float().sum().backward()

        found = compiler.compile("24 px", Batch(inputs={}, targets={}, num_samples=batch), step)
    weights = sum(weight.numel() for weight in stage.parameters() if weight.ndim == 4)
    convolutions = found.tally.of([CONVOLUTION])
    assert sum(each.flops for each in convolutions) == 3 * 2 * batch * size**2 * weights
    assert sum(each.count for each in convolutions) == 3 * 10
    assert any(each.kind == "normalisation" for each in found.kernels)


@pytest.mark.parametrize("architecture", sorted(GPUS))
def test_the_suites_own_kernels_compile(architecture):
    config = load_config("image_classification", "baseline", size="mini", settings=[]).config
    with open_compiler(GPUS[architecture]) as compiler:
        compiler.add_own_kernels(benchmark_module("image_classification").Benchmark(config, seed=0))
    (kernel,) = compiler.kernels
    assert kernel.name == "crop_resize_kernel" and kernel.registers > 0 and kernel.spilled_bytes == 0


def test_a_graph_break_is_counted():
    def broken(values):
        values = values + 1
        torch._dynamo.graph_break()
        return values * 2

    with open_compiler(GPUS["sm_80"]) as compiler:
        torch.compile(broken)(torch.empty(64))
        assert sum(count_graph_breaks().values()) == 1 and compiler.num_graphs == 2


def test_the_gpu_is_gone_afterwards():
    before = torch.cuda.is_available(), torch.nn.Module.to, torch.autograd.grad
    with open_compiler(GPUS["sm_90"]):
        assert torch.cuda.is_available()
    assert (torch.cuda.is_available(), torch.nn.Module.to, torch.autograd.grad) == before
    with torch.autocast("cpu", torch.bfloat16):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).tolist() == [[2, 2], [2, 2]]


def test_the_command_keeps_its_figures_with_the_commit(tmp_path):
    sets = [part for setting in (*SMALL, "model.num_hidden_layers=1") for part in ("--set", setting)]
    arguments = ["--for", "sm_90", "--batch-size", NUM_SEQUENCES, *sets, "--results", tmp_path, "--json"]
    done = ttt_here("compile", "language_bert", "optimized", *arguments)
    assert done.returncode == 0, done.stderr
    (path,) = (tmp_path / "compiled/sm_90").glob("language_bert-optimized-*-torch*.json")
    (figures,) = json.loads(done.stdout)
    assert json.loads(path.read_text()) == figures
    assert figures["commit"] and figures["versions"]["triton"] and not figures["graph_breaks"]
    assert str(tmp_path) not in path.read_text()


def test_a_gpu_that_is_not_known_is_named():
    with pytest.raises(UserError, match="sm_90"):
        find_gpu("sm_91")


def test_figures_of_size_mini_do_not_replace_those_of_size_full(tmp_path):
    figures = {"architecture": "sm_90", "benchmark": "language_bert", "configuration": "optimized"}
    paths = {keep(figures | {"size": size}, tmp_path) for size in ("mini", "full")}
    assert len(paths) == 2 and all(path.is_file() for path in paths)
