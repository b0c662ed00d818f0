"""Attention within sequences: in groups on a CPU, by the fused kernels of GPUs, here one of plain torch."""

import inspect
import itertools
from typing import get_args

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import _registry

from common.errors import UserError
from common.training.registry import build_methods
from common.training.step import DTYPES
from language_bert import attention
from language_bert.attention import plan_attention, varlen_attention
from language_bert.benchmark import Benchmark
from language_bert.methods import unpad
from language_bert.methods.alibi import alibi_slopes
from language_bert.probes import Probes
from tests.common.training import train_compiled
from tests.language_bert.configs import config_of, mini
from tests.language_bert.test_parity import (
    EXACT,
    MAX_LENGTH,
    METHODS,
    apply_methods,
    configuration,
    gradients,
    make_batch,
    make_model,
)


def attend_within_bounds(query, key, value, cu_q, cu_k, max_q, max_k):
    """Stand in for the fused kernel: rows beyond its grid are what the memory held."""
    assert cu_q.dtype == cu_k.dtype == torch.int32
    rows = torch.full_like(query, float("nan"))
    spans = zip(itertools.pairwise(cu_q.tolist()), itertools.pairwise(cu_k.tolist()), strict=True)
    for (first, last), (first_key, last_key) in spans:
        assert last_key - first_key <= max_k
        last = min(last, first + max_q)
        parts = query[first:last], key[first_key:last_key], value[first_key:last_key]
        attended = F.scaled_dot_product_attention(*(part.transpose(0, 1) for part in parts))
        rows = rows.index_copy(0, torch.arange(first, last), attended.transpose(0, 1))
    return rows


@pytest.fixture
def on_gpu(monkeypatch):
    """Return a function after which attention takes the path of GPUs, with this kernel."""

    def replace_kernel(kernel):
        monkeypatch.setattr(attention, "has_kernel", lambda device: True)
        monkeypatch.setattr(attention, "gpu_kernel", lambda name: kernel)

    return replace_kernel


def packed(lengths, dtype=torch.bfloat16, *, kernel="torch_flash"):
    """Return random query, key and value of sequences, and the plan of their attention."""
    torch.manual_seed(0)
    heads = [torch.randn(sum(lengths), 3, 5, dtype=dtype, requires_grad=True) for _ in "qkv"]
    return heads, plan_attention(torch.tensor(lengths), 37, kernel)


@pytest.mark.parametrize("lengths", [(1,), (1, 1, 2), (5, 1, 31, 8), (7,) * 11])
@pytest.mark.parametrize("num_groups", [1, 2, 3, 20])
def test_attention_equals_scaled_dot_product_attention_on_each_sequence(lengths, num_groups, monkeypatch):
    monkeypatch.setattr(attention, "NUM_GROUPS", num_groups)
    heads, plan = packed((*lengths, 0), torch.float64)
    attended = varlen_attention(*heads, plan)
    expected = attend_within_bounds(*heads, plan.cu_queries, plan.cu_seqlens, 37, 37)
    torch.testing.assert_close(attended, expected, **EXACT)
    weight = torch.randn_like(attended)
    one, other = (torch.autograd.grad(rows, heads, weight) for rows in (attended, expected))
    torch.testing.assert_close(one, other, **EXACT)


def test_a_gpu_kernel_gets_the_offsets_as_they_are(on_gpu):
    heads, plan = packed((5, 1, 0, 31, 8))
    expected = varlen_attention(*heads, plan)
    on_gpu(attend_within_bounds)
    attended = varlen_attention(*heads, plan)
    torch.testing.assert_close(attended, expected, rtol=0.05, atol=0.02)
    needed = torch.tensor([0, 3, 5, 7, 44])
    some = varlen_attention(heads[0][needed], *heads[1:], plan.select(needed))
    torch.testing.assert_close(some, attended[needed], rtol=0.05, atol=0.02)
    with pytest.raises(UserError, match="take bf16 or fp16"):
        varlen_attention(*(x.float() for x in heads), plan)


def test_flash_attention_gets_the_slopes(on_gpu):
    seen = []

    def kernel(query, *offsets, alibi_slopes):
        seen.append(alibi_slopes)
        return query

    on_gpu(kernel)
    heads, plan = packed((5,), kernel="flash_attn")
    varlen_attention(*heads, plan, alibi_slopes(2).bfloat16())
    assert seen[0].dtype == torch.float32 and seen[0].tolist() == [2**-4, 2**-8]


def test_torchs_own_kernel_has_the_arguments_that_it_is_called_with():
    from torch.nn.attention.varlen import varlen_attn

    names = list(inspect.signature(varlen_attn).parameters)[:7]
    assert names == ["query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k"]


@pytest.fixture
def machine(monkeypatch):
    """Return a function after which this machine has these packages and a GPU of this capability, or none."""

    def pretend(packages=(), capability=None, *, has_cudnn=False):
        monkeypatch.setattr(attention, "find_spec", lambda name: (name in ("torch", *packages)) or None)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
        monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900 if has_cudnn else None)

    return pretend


@pytest.fixture
def active(monkeypatch):
    """Torch's registry of flash kernels with a FlashAttention 3 of this test; returns the active ones."""
    names = []

    class Handle:
        def remove(self):
            names.remove("FA3")

    def activate():
        names.append("FA3")
        return Handle()

    monkeypatch.setitem(_registry._FLASH_ATTENTION_IMPLS, "FA3", activate)
    yield names
    attention.activate_flash_attention_3(False)
    assert not names


BOTH = ("flash_attn_interface", "flash_attn")


@pytest.mark.parametrize(
    ("packages", "capability", "needs_bias", "expected"),
    [
        (BOTH, (9, 0), False, "flash_attn_interface"),
        (BOTH, (9, 0), True, "flash_attn"),
        (BOTH, (8, 0), False, "flash_attn"),
        (("flash_attn_interface", "triton"), (8, 0), False, "torch_flash"),
        (("triton", "flash_attn"), (9, 0), False, "triton"),
        (("triton", "flash_attn"), (9, 0), True, "flash_attn"),
        ((), (9, 0), False, "torch_flash"),
        ((), None, False, "torch_flash"),
    ],
)
def test_auto_takes_the_first_kernel_that_is_there(
    packages, capability, needs_bias, expected, machine, active
):
    machine(packages, capability, has_cudnn=True)
    assert attention.choose_kernel("auto", needs_bias=needs_bias) == expected
    assert active == (["FA3"] if expected == "flash_attn_interface" else [])
    assert attention.choose_kernel("torch_flash") == "torch_flash" and active == []


def test_the_suites_own_kernel_is_taken_for_heads_of_its_sizes_only(machine):
    machine(("triton",), (9, 0))
    for num_heads, expected in ((16, "triton"), (4, "torch_flash")):  # heads of 64, of 256
        config = config_of("optimized-compile_layers", f"model.num_attention_heads={num_heads}")
        assert build_methods(config)[0].choose_kernel(torch.device("cuda")) == expected
    with pytest.raises(UserError, match="it takes heads of 16, 32, 64, 128 values, not of 256"):
        config_of("optimized", "model.num_attention_heads=4", "methods.unpad.attention=triton")


def test_models_with_different_kernels_take_turns(machine, active, monkeypatch):
    """Torch's switch holds in the whole process: each batch sets it for the kernel of its own model."""
    machine(BOTH, (9, 0))
    monkeypatch.setattr(unpad, "has_kernel", lambda device: True)
    methods = []
    for name in ("auto", "torch_flash"):
        methods.append(build_methods(mini("optimized", f"methods.unpad.attention={name}"))[0])
        methods[-1].model(make_model(False))
    for _ in range(2):
        for method, expected in zip(methods, (["FA3"], []), strict=True):
            plan = method.batch(make_batch((5, 8)), None).inputs["sequences"]
            assert active == expected and plan.kernel == method.kernel
    plan_attention(torch.tensor([5]), 8, "flash_attn_interface")
    assert active == [], "a plan switches nothing"


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_pieces_of_a_step_are_timed_in_its_precision(precision, monkeypatch):
    dtypes = []

    def attend(query, key, value, sequences):
        dtypes.append(query.dtype)
        return query + key + value

    monkeypatch.setattr("language_bert.probes.varlen_attention", attend)
    next(Probes(Benchmark(mini("baseline", f"precision={precision}"), seed=0)).bench_parts()).call()
    assert set(dtypes) == {DTYPES[precision]}


@pytest.mark.parametrize("name", ["flash_attn", "torch_flash"])
def test_the_pieces_of_a_step_and_the_preflight_take_the_kernel_of_the_run(name, machine, monkeypatch):
    machine(("flash_attn",), (8, 0))
    monkeypatch.setattr(attention, "has_kernel", lambda device: True)
    monkeypatch.setattr(unpad, "has_kernel", lambda device: True)
    monkeypatch.setattr("language_bert.probes.has_kernel", lambda device: True)
    monkeypatch.setattr(Benchmark, "device", torch.device("cpu"))
    monkeypatch.setattr(attention, "gpu_kernel", lambda name: pytest.fail(name))
    config = mini("optimized", f"methods.unpad.attention={name}")
    probes = Probes(Benchmark(config, seed=0))
    for call in (next(probes.bench_parts()).call, next(probes.kernel_pairs()).kernel):
        with pytest.raises(pytest.fail.Exception, match=f"^{name}$"):
            call()


@pytest.mark.parametrize(
    ("name", "packages", "capability", "message"),
    [
        ("flash_attn_interface", (), (9, 0), "not installed; there is auto, torch_flash"),
        ("flash_attn_interface", BOTH, (8, 0), "capability 9.0; there is auto, flash_attn"),
        ("flash_attn", (), (9, 0), "not installed; there is auto, torch_flash"),
        ("triton", ("triton",), (7, 5), "capability 8.0 or higher; there is auto, torch_flash"),
        ("torch_cudnn", (), (8, 0), "cannot be used: "),
        ("torch_cudnn", BOTH, None, "torch_cudnn needs a GPU; there is auto"),
        ("flash_attn_4", (), (9, 0), "flash_attn"),
    ],
)
def test_a_kernel_that_is_not_there_is_refused_in_one_line(name, packages, capability, message, machine):
    machine(packages, capability)
    with pytest.raises(UserError) as refusal:
        config = config_of("optimized", f"methods.unpad.attention={name}")
        build_methods(config)[0].model(make_model(False))
    assert "methods.unpad.attention" in str(refusal.value) and message in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_the_setting_names_every_kernel():
    names = get_args(unpad.Unpad.Config.model_fields["attention"].annotation)
    assert names == ("auto", *attention.KERNELS)


@pytest.mark.parametrize(
    ("device", "setting", "expected"),
    [
        ("cuda:0", "auto", "flash_attn"),
        ("cuda:0", "torch_flash", "torch_flash"),
        ("cpu", "auto", "batched products"),
    ],
)
def test_the_log_names_the_kernel(device, setting, expected, machine, monkeypatch):
    machine(("flash_attn",), (9, 0))
    monkeypatch.setattr(Benchmark, "device", torch.device(device))
    config = config_of("optimized", f"methods.unpad.attention={setting}")
    assert Benchmark(config, seed=0).backends()["attention"].name == expected


@pytest.fixture(scope="module")
def torchs_kernel():
    """Kernels of a CPU for torch's operator, in the place of FlashAttention."""
    train_compiled.register_kernels()


@pytest.mark.parametrize("compiler", [None, "aot_eager"])
def test_torchs_kernel_computes_what_groups_do(compiler, torchs_kernel, monkeypatch):
    heads, plan = packed((5, 1, 0, 31, 8))
    weight, outcomes = torch.randn(45, 3, 5).bfloat16(), []
    for is_on_gpu in (False, True):
        monkeypatch.setattr(attention, "has_kernel", lambda device, answer=is_on_gpu: answer)
        torch._dynamo.reset()
        attend = varlen_attention
        if compiler and is_on_gpu:
            attend = torch.compile(varlen_attention, fullgraph=True, backend=compiler)
        attended = attend(*heads, plan)
        outcomes.append((attended, *torch.autograd.grad(attended, heads, weight)))
    for one, other in zip(*outcomes, strict=True):
        assert (one.float() - other.float()).norm() < 0.02 * one.float().norm()
    assert not torch.equal(outcomes[0][0], outcomes[1][0]), "both are of the same kernel"


@pytest.mark.skipif(torch.__version__ < "2.12", reason="torch has no cuDNN attention for packed sequences")
def test_cudnn_is_asked_for_by_name(monkeypatch):
    monkeypatch.setattr(attention, "has_kernel", lambda device: True)
    heads, plan = packed((5,), kernel="torch_cudnn")
    with pytest.raises(RuntimeError, match="CUDNN_ATTENTION was requested"):
        varlen_attention(*heads, plan)


def test_every_query_is_computed_where_padding_gives_a_sequence_more_than_its_longest(on_gpu):
    lengths = (MAX_LENGTH,) * 6 + (12,)  # 38 masked tokens, two of them in the last sequence
    round_to = {"unpad": 2, "sparse_head": 37}  # 36 masked tokens are added, all to the last sequence

    def compute_gradients():
        model, config = make_model(False).bfloat16(), configuration(False, METHODS[4])
        model, batch, loss_of = apply_methods(config, model, make_batch(lengths), **round_to)
        assert len(batch.inputs["input_ids"]) == sum(lengths), "no padding takes the added tokens"
        assert batch.inputs["needed_sequences"].cu_queries.diff().max() > MAX_LENGTH
        loss_of(model.train()(**batch.inputs), batch.targets).backward()
        return torch.cat([gradient.float().flatten() for _, gradient in sorted(gradients(model).items())])

    expected = compute_gradients()
    on_gpu(attend_within_bounds)
    computed = compute_gradients()
    assert (computed - expected).norm() / expected.norm() < 0.05  # not a number where a row is unwritten
