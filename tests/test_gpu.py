"""The first stage of systems/gpu_day.sh: the kernels of this device, a GPU or a CPU, compute correctly."""

import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torchvision
from transformers import BertConfig

from common.config.schema import OptimizerConfig
from common.training.optim import build_optimizer
from common.training.probes import probes_of
from common.training.registry import build_methods
from common.training.step import to_device
from language_bert.attention import (
    KERNELS,
    choose_kernel,
    plan_attention,
    varlen_attention,
    varlen_self_attention,
    why_absent,
)
from language_bert.data.batches import random_batch, typical_lengths
from language_bert.kernels.quantize import Quantized, quantize
from language_bert.model import build_bert, masked_lm_loss
from tests.runs import make_benchmark

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BF16 = 0.03  # of the norm of gradients: products in bfloat16, 8 bits, sums in another order


def relative_error(tensors, references):
    one, other = (
        torch.cat([each.detach().double().flatten() for each in side]) for side in (tensors, references)
    )
    return float((one - other).norm() / other.norm())  # not a number where one is not


def poison_memory():
    """Leave NaN in the memory that the next tensors are given: many blocks of each size."""
    blocks = [
        torch.full((1 << size,), float("nan"), device=DEVICE) for size in range(6, 23) for _ in range(4)
    ]
    del blocks


@pytest.mark.parametrize("benchmark", ["image_classification", "language_bert"])
def test_kernels_equal_their_plain_forms(benchmark):
    for pair in probes_of(make_benchmark(benchmark, "optimized")).kernel_pairs():
        assert pair.error() <= pair.tolerance, pair.name


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    ("lengths", "num_queries"),
    [
        ((300, 0, 512, 1, 0), (60, 0, 600, 1, 0)),  # more queries than tokens, and empty rows
        ((512, 512), (0, 1023)),
        ((5, 1, 300, 512, 64), (5, 1, 300, 512, 64)),
    ],
)
def test_attention_writes_every_row_in_poisoned_memory(lengths, num_queries, kernel):
    """Queries may repeat a sequence's last token, as `sparse_head` rounds their number up."""
    if reason := why_absent(kernel):
        pytest.skip(reason)
    torch.manual_seed(0)
    offsets = [0, *itertools.accumulate(lengths)]
    needed = torch.cat(
        [
            (torch.arange(count) if count <= length else torch.arange(count).clamp(max=length - 1)) + first
            for first, length, count in zip(offsets, lengths, num_queries, strict=False)
        ]
    )
    plan = (
        plan_attention(torch.tensor(lengths), 512, choose_kernel(kernel))
        .select(needed, max_repeats=511)
        .to(DEVICE)
    )
    needed = needed.to(DEVICE)
    query, key, value = (
        torch.randn(sum(lengths), 16, 64, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
        for _ in "qkv"
    )
    poison_memory()
    attended = varlen_attention(query[needed], key, value, plan)
    weight = torch.randn_like(attended)
    poison_memory()
    gradients = torch.autograd.grad(attended, (query, key, value), weight)
    inputs = [x.detach().double().requires_grad_() for x in (query, key, value)]
    asked = inputs[0][needed].split(num_queries)
    parts = zip(asked, *(x.split(lengths) for x in inputs[1:]), strict=True)
    expected = torch.cat(
        [
            F.scaled_dot_product_attention(*(x.transpose(0, 1) for x in part)).transpose(0, 1)
            for part in parts
            if len(part[0])
        ]
    )
    assert relative_error([attended], [expected]) < 0.01
    assert relative_error(gradients, torch.autograd.grad(expected, inputs, weight.double())) < 0.02


def test_gradients_in_one_tensor_are_those_of_three():
    if reason := why_absent("triton"):
        pytest.skip(reason)
    lengths = (300, 0, 512, 1, 64)
    plan = plan_attention(torch.tensor(lengths), 512, choose_kernel("triton")).to(DEVICE)
    torch.manual_seed(0)
    qkv = torch.randn(sum(lengths), 3, 16, 64, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(sum(lengths), 16, 64, device=DEVICE, dtype=torch.bfloat16)
    poison_memory()
    results = varlen_self_attention(qkv, plan), varlen_attention(*qkv.unbind(1), plan)
    assert torch.equal(*results)
    assert torch.equal(*(torch.autograd.grad(result, qkv, weight)[0] for result in results))


@pytest.mark.parametrize("source", [torch.bfloat16, torch.float32])  # of activations, of weights
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize(("function", "num_parts"), [("copy", 3), ("gelu", 1), ("gelu_backward", 2)])
def test_the_kernel_rounds_to_8_bits_as_torch_does(function, num_parts, dtype, source):
    """On a GPU, compared with a CPU's operators; one value is NaN, one too large."""
    torch.manual_seed(0)
    parts = [torch.randn(1040, 256, dtype=source) for _ in range(num_parts)]
    parts[0][7, 9], parts[0][8, 9] = float("nan"), 1000.0
    scale = torch.tensor(3.0) / torch.finfo(dtype).max
    poison_memory()
    on_device = quantize([part.to(DEVICE) for part in parts], scale.to(DEVICE), dtype, function)
    result, expected = Quantized(*(x.cpu() for x in on_device)), quantize(parts, scale, dtype, function)
    assert torch.equal(result.columns.view(torch.uint8).t(), result.rows.view(torch.uint8))
    one, other = result.rows.float(), expected.rows.float()
    assert one[7, 9].isnan() and one[8, 9] == other[8, 9] and one.isnan().sum() == 1
    is_other = (one != other) & other.isfinite()
    step = torch.finfo(dtype).eps * other.abs() + torch.finfo(dtype).smallest_normal
    assert is_other.float().mean() < 0.01 and ((one - other).abs() <= step)[is_other].all()
    torch.testing.assert_close(result.sums, expected.sums, rtol=1e-3, atol=1e-2, equal_nan=True)


def test_optimized_bert_in_bf16_is_as_near_to_float64_as_hugging_face():
    """Three layers of BERT-large on a GPU, smaller ones on a CPU; lengths as Wikipedia's."""
    on_gpu = DEVICE.type == "cuda"
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=30522 if on_gpu else 500,
        hidden_size=1024 if on_gpu else 128,
        num_hidden_layers=3,
        num_attention_heads=16 if on_gpu else 2,
        intermediate_size=4096 if on_gpu else 256,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        hidden_act="gelu_pytorch_tanh",
        attn_implementation="sdpa",
    )
    model, longest = build_bert(config, next_sentence=False).to(DEVICE), 512 if on_gpu else 64
    rng, lengths = np.random.default_rng(0), typical_lengths(8, longest)
    batch = random_batch(rng, lengths, np.maximum(1, lengths // 5), config.vocab_size, longest)

    def gradients(model, batch, dtype):
        model.zero_grad()
        batch = to_device(batch, DEVICE)
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=dtype == torch.bfloat16):
            outputs = model(**batch.inputs)
        masked_lm_loss(outputs, batch.targets).backward()
        return {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}

    plain = gradients(model, batch, torch.bfloat16)
    exact = gradients(model.double(), batch, torch.float64)
    settings = ["precision=bf16", *(f"methods.{name}=false" for name in ("fused_qkv", "chunked_head"))]
    packed = model.float()
    for method in build_methods(make_benchmark("language_bert", "optimized", *settings).config):
        packed, batch = method.model(packed), method.batch(batch, None)
    ours = gradients(packed, batch, torch.bfloat16)
    assert ours.keys() == exact.keys()
    errors = [relative_error([each[name] for name in exact], exact.values()) for each in (ours, plain)]
    assert errors[0] < max(BF16, 1.2 * errors[1])


def test_resnet_in_bf16_is_as_near_to_float64_as_torchvision():
    """The configuration's model, channels last, on 64 pixels."""
    settings = [f"methods.{name}=false" for name in ("blurpool", "compile", "ema")]
    benchmark = make_benchmark("image_classification", "optimized", *settings)
    torch.manual_seed(0)
    model = benchmark.build_model()
    plain = torchvision.models.resnet18(num_classes=10)
    plain.load_state_dict(model.state_dict())
    for method in build_methods(benchmark.config):
        model = method.model(model)
    images, labels = torch.randn(32, 3, 64, 64, device=DEVICE), torch.arange(32, device=DEVICE) % 10

    def gradients(model, images):
        model.to(DEVICE).zero_grad()
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=images.dtype == torch.float32):
            logits = model(images)
        F.cross_entropy(logits.double(), labels).backward()
        return [each.grad.clone() for each in model.parameters()]

    ours = gradients(model, images.to(memory_format=torch.channels_last))
    theirs = gradients(plain, images)
    exact = gradients(plain.double(), images.double())
    assert relative_error(ours, exact) < 1.2 * relative_error(theirs, exact) < 1


@pytest.mark.parametrize("max_gradient_norm", [1.0, None])
def test_lamb_takes_the_steps_of_apex(max_gradient_norm):
    """20 steps with gradients of norms below and above the one that is clipped to."""
    if DEVICE.type != "cuda":
        pytest.skip("Apex needs a GPU")
    pytest.importorskip("apex.optimizers", reason="NVIDIA's Apex is not installed", exc_type=ImportError)

    def train(name):
        torch.manual_seed(0)
        layers = torch.nn.Embedding(100, 64), torch.nn.LayerNorm(64), torch.nn.Linear(64, 100)
        model = torch.nn.Sequential(*layers)
        settings = {"learning_rate": 0.01, "weight_decay": 0.01, "epsilon": 1e-6}
        config = OptimizerConfig(name=name, max_gradient_norm=max_gradient_norm, **settings)
        optimizer = build_optimizer(model.to(DEVICE), config)
        for step in range(20):
            for parameter in model.parameters():
                parameter.grad = torch.randn_like(parameter) * (1 if step % 2 else 1e-4)
            optimizer.step()
        return list(model.parameters())

    for value, expected in zip(train("lamb"), train("fused_lamb"), strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-6)
