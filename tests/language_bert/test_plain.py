"""Hugging Face's model in a plain loop: one line for each saving, the same loss and gradients."""

import copy

import pytest
import torch
from torch import nn

from common.errors import UserError
from language_bert.methods.chunked_head import chunk_head
from language_bert.methods.compile_layers import compile_layers
from language_bert.methods.fp8 import use_fp8
from language_bert.methods.fused_qkv import fuse_qkv
from language_bert.methods.last_layer_subset import compute_needed_tokens
from language_bert.methods.sparse_head import read_masked_tokens
from language_bert.methods.unpad import unpad
from tests.language_bert.test_parity import (
    EXACT,
    WITH_AND_WITHOUT_PAIRS,
    gradients,
    make_batch,
    make_model,
)


def compiled(model):
    torch._dynamo.reset()
    compile_layers(model, backend="aot_eager")


STEPS = [fuse_qkv, read_masked_tokens, compute_needed_tokens, chunk_head, compiled]
AFTER_ANY_NUMBER_OF_STEPS = pytest.mark.parametrize("num_steps", range(len(STEPS) + 1))


def tensors(next_sentence, lengths=(37, 4, 5, 12, 23)):
    batch = make_batch(lengths)
    values = batch.inputs | batch.targets
    return {name: value for name, value in values.items() if next_sentence or name != "next_sentence_label"}


def packed(next_sentence, steps):
    model = unpad(make_model(next_sentence))
    for step in steps:
        step(model)
    return model


@WITH_AND_WITHOUT_PAIRS
@AFTER_ANY_NUMBER_OF_STEPS
def test_the_model_is_called_as_before_and_returns_the_same_loss_and_gradients(num_steps, next_sentence):
    plain, model = make_model(next_sentence), packed(next_sentence, STEPS[:num_steps])
    expected, outputs = (called(**tensors(next_sentence)) for called in (plain, model))
    assert len(outputs.logits) == len(outputs.labels)
    torch.testing.assert_close(outputs.loss, expected.loss, **EXACT)
    expected.loss.backward()
    outputs.loss.backward()
    torch.testing.assert_close(gradients(model), gradients(plain), **EXACT)


def test_a_copy_is_evaluated_with_its_own_weights_and_has_logits_again():
    model, batch = packed(False, STEPS[1:4]), tensors(False)
    average = copy.deepcopy(model).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    outputs, expected = average(**batch), make_model(False).eval()(**batch)
    torch.testing.assert_close(outputs.loss, expected.loss, rtol=1e-10, atol=1e-10)
    is_masked = batch["labels"] != -100
    torch.testing.assert_close(outputs.logits, expected.logits[is_masked], rtol=1e-9, atol=1e-10)
    assert torch.equal(outputs.labels, batch["labels"][is_masked])


@AFTER_ANY_NUMBER_OF_STEPS
@pytest.mark.parametrize("is_padding", [False, True], ids=["none masked", "only padding masked"])
def test_a_batch_without_masked_tokens_is_refused(num_steps, is_padding):
    batch = tensors(False, (12, 5))
    batch["labels"].fill_(-100)
    batch["labels"][0, 20:] = 3 if is_padding else -100
    with pytest.raises(UserError, match="labels: no token of the batch is masked"):
        packed(False, STEPS[:num_steps])(**batch)


def test_dropout_is_refused():
    model = make_model(False)
    model.config.hidden_dropout_prob = 0.1
    with pytest.raises(UserError, match="no dropout"):
        unpad(model)


@pytest.mark.parametrize("step", [*STEPS, use_fp8], ids=lambda step: step.__name__)
def test_a_step_on_a_model_that_is_not_packed_is_refused(step):
    with pytest.raises(UserError, match=r"needs unpad before it; model = unpad\(model\) comes"):
        step(make_model(False))


@pytest.mark.parametrize("step", [compute_needed_tokens, chunk_head])
def test_a_step_that_needs_a_sparse_head_says_so(step):
    with pytest.raises(UserError, match="read_masked_tokens"):
        step(packed(False, []))


def test_other_models_and_tensors_of_unequal_shapes_are_refused():
    with pytest.raises(UserError, match="Linear cannot be packed"):
        unpad(nn.Linear(2, 2))
    batch = tensors(False)
    with pytest.raises(UserError, match="one shape"):
        packed(False, [])(**batch | {"attention_mask": batch["attention_mask"][:, :5]})
