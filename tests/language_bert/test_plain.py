"""Hugging Face's model in a plain loop: one line for each saving, the same loss and gradients."""

import copy

import pytest
import torch

from common.errors import UserError
from language_bert.methods.chunked_head import chunk_head
from language_bert.methods.compile_layers import compile_layers
from language_bert.methods.fused_qkv import fuse_qkv
from language_bert.methods.last_layer_subset import compute_needed_tokens
from language_bert.methods.sparse_head import read_masked_tokens
from language_bert.methods.unpad import unpad
from tests.language_bert.test_parity import EXACT, gradients, make_batch, make_model

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # of torch's compiler


def tensors(lengths=(37, 4, 5, 12, 23)):
    batch = make_batch(lengths)
    return batch.inputs | batch.targets


def compiled(model):
    torch._dynamo.reset()
    compile_layers(model, backend="aot_eager")


STEPS = [fuse_qkv, read_masked_tokens, compute_needed_tokens, chunk_head, compiled]


@pytest.mark.parametrize("next_sentence", [False, True], ids=["mlm", "mlm+nsp"])
@pytest.mark.parametrize("num_steps", range(len(STEPS) + 1))
def test_the_model_is_called_as_before_and_returns_the_same_loss_and_gradients(num_steps, next_sentence):
    batch = tensors()
    if not next_sentence:
        del batch["next_sentence_label"]
    plain, model = make_model(next_sentence), unpad(make_model(next_sentence))
    for step in STEPS[:num_steps]:
        step(model)
    expected = plain(**batch).loss
    found = model(**batch)
    torch.testing.assert_close(found.loss, expected, **EXACT)
    assert len(found.logits) == len(found.labels)
    expected.backward()
    found.loss.backward()
    expected_gradients, found_gradients = gradients(plain), gradients(model)
    assert found_gradients.keys() == expected_gradients.keys()
    for name, gradient in expected_gradients.items():
        torch.testing.assert_close(found_gradients[name], gradient, **EXACT)


def test_a_copy_is_evaluated_with_its_own_weights_and_has_logits_again():
    model = unpad(make_model(False))
    for step in STEPS[1:4]:
        step(model)
    average = copy.deepcopy(model).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    batch = tensors()
    del batch["next_sentence_label"]
    found, expected = average(**batch), make_model(False).eval()(**batch)
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-10, atol=1e-10)
    is_masked = batch["labels"] != -100
    torch.testing.assert_close(found.logits, expected.logits[is_masked], rtol=1e-9, atol=1e-10)
    assert torch.equal(found.labels, batch["labels"][is_masked])


@pytest.mark.parametrize("num_steps", range(len(STEPS) + 1))
@pytest.mark.parametrize("is_padding", [False, True], ids=["none masked", "only padding masked"])
def test_a_batch_without_masked_tokens_is_refused(num_steps, is_padding):
    model, batch = unpad(make_model(False)), tensors((12, 5))
    for step in STEPS[:num_steps]:
        step(model)
    batch["labels"].fill_(-100)
    batch["labels"][0, 20:] = 3 if is_padding else -100
    with pytest.raises(UserError, match="labels: no token of the batch is masked; leave such batches out"):
        model(batch["input_ids"], batch["attention_mask"], batch["labels"])


def test_dropout_is_refused():
    model = make_model(False)
    model.config.hidden_dropout_prob = 0.1
    with pytest.raises(UserError, match="no dropout"):
        unpad(model)
