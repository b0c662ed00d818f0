"""BERT: Hugging Face's module as the baseline, and the same parameters computed on packed tokens.

The baseline is `BertForMaskedLM` or `BertForPreTraining` as it is, on batches padded to S. `PackedBert` takes
over its parameters under the same names, so weights, optimizer and checkpoints are the same, and computes
only what the loss depends on: the tokens of a batch are concatenated to (T, D), every layer is applied to
them row by row, and only attention has to know where sequences begin (attention.py). Rows that no head reads
need not be computed: heads read masked tokens and, for next sentences, the first token of each sequence.
Methods switch the savings on; tests/language_bert/test_parity.py compares loss and gradients in float64.

Shapes: B sequences, S padded length, T packed tokens, M masked tokens, K needed tokens of the last layer,
D hidden size, N heads, H head size, V vocabulary.
"""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from common.errors import UserError
from common.training.method import autocast_dtype
from language_bert.attention import Sequences, takes_qkv, varlen_attention, varlen_self_attention
from language_bert.data.batches import IGNORED

NEXT_SENTENCE = ("bert.pooler.", "cls.seq_relationship.")  # weights that a model without that head ignores
LONGEST_PERIOD = 100.0  # positions per radian; with 1000 a model of 128 positions learned more slowly


class Predictions(NamedTuple):
    """Logits (T or M, V) of the vocabulary, and (B, 2) of the next-sentence head if there is one.

    With `transform_only`, in training, `prediction_logits` is the input of the product with the vocabulary,
    (M, D).
    """

    prediction_logits: Tensor
    seq_relationship_logits: Tensor | None = None


def at_least_float32(logits: Tensor) -> Tensor:
    return logits.float() if logits.element_size() < 4 else logits


def next_sentence_loss(outputs: Any, targets: dict[str, Tensor]) -> Tensor:
    """Return the mean over sequences; with weights, the weighted sum over the number of masked tokens."""
    logits, labels = at_least_float32(outputs[1]), targets["next_sentence_label"]
    if "next_sentence_weight" not in targets:
        return F.cross_entropy(logits, labels)
    losses = F.cross_entropy(logits, labels, reduction="none") * targets["next_sentence_weight"]
    return losses.sum() / (targets["labels"] != IGNORED).sum()


def masked_lm_loss(outputs: Any, targets: dict[str, Tensor]) -> Tensor:
    """Return the mean over masked tokens, plus the next-sentence loss where the model has that head."""
    logits = at_least_float32(outputs[0].flatten(0, -2))
    loss = F.cross_entropy(logits, targets["labels"].flatten(), ignore_index=IGNORED)
    return loss if len(outputs) < 2 or outputs[1] is None else loss + next_sentence_loss(outputs, targets)


def bert_config(config: Any) -> Any:
    """Return Hugging Face's configuration of the model."""
    from transformers import BertConfig  # slow to import

    settings = config.model
    return BertConfig(
        vocab_size=settings.vocab_size,
        hidden_size=settings.hidden_size,
        num_hidden_layers=settings.num_hidden_layers,
        num_attention_heads=settings.num_attention_heads,
        intermediate_size=settings.intermediate_size,
        max_position_embeddings=config.data.max_seq_length,
        hidden_dropout_prob=settings.dropout,
        attention_probs_dropout_prob=settings.dropout,
        initializer_range=settings.initializer_range,
        hidden_act=settings.activation,
        layer_norm_eps=1e-12,
        attn_implementation=settings.attention,
    )


def build_bert(config: Any, *, next_sentence: bool) -> Any:
    from transformers import BertForMaskedLM, BertForPreTraining  # slow to import

    return (BertForPreTraining if next_sentence else BertForMaskedLM)(config)


def check_shapes(tensors: Mapping[str, Any], model: nn.Module, *, where: str, hint: str = "") -> None:
    """Raise UserError for a parameter of the model that is missing in `tensors` or has another shape."""
    for name, parameter in model.named_parameters():
        if name not in tensors or tensors[name].shape != parameter.shape:
            actual = tuple(tensors[name].shape) if name in tensors else "missing"
            raise UserError(f"{name} is {actual}, expected {tuple(parameter.shape)}", where=where, hint=hint)


def read_weights(path: Path, *, hint: str = "") -> dict[str, Tensor]:
    """Read the tensors of a file by name. Raises UserError where it is missing or damaged."""
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"no starting weights ({error})", where=str(path), hint=hint) from error


def load_weights(model: nn.Module, path: Path, *, hint: str) -> None:
    """Load the starting weights of a model. Raises UserError if the file is missing or of another model."""
    tensors = read_weights(path, hint=hint)
    check_shapes(tensors, model, where=str(path), hint=hint)
    names = {name for name, _ in model.named_parameters()}
    if extra := [name for name in tensors if name not in names and not name.startswith(NEXT_SENTENCE)]:
        raise UserError(f"{extra[0]} is not of this model", where=str(path), hint=hint)
    model.load_state_dict({name: tensors[name] for name in names}, strict=False)


@torch.no_grad()
def spread_positions(model: Any, scale: float) -> None:
    """Set position embeddings (S, D) to sines times `scale`; double query weights and copy them to keys.

    A small model trained from scratch (size mini) then attends to near and to equal tokens from the first
    step and learns within its minute. Source of the sines: https://arxiv.org/abs/1706.03762.
    """
    weight = model.bert.embeddings.position_embeddings.weight
    num_positions, size = weight.shape
    period = torch.exp(torch.arange(0, size, 2) / size * math.log(LONGEST_PERIOD))
    angle = torch.arange(num_positions)[:, None] / period
    weight[:, 0::2], weight[:, 1::2] = scale * angle.sin(), scale * angle.cos()
    for layer in model.bert.encoder.layer:
        attention = layer.attention.self
        attention.query.weight.mul_(2)
        attention.key.weight.copy_(attention.query.weight)


class PackedBert(nn.Module):
    """The parameters of a Hugging Face BERT, under their names, computed on T packed tokens.

    Raises UserError for another model, and for one with dropout: packing would change which random numbers
    meet which token.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        config = getattr(model, "config", None)
        if not (hasattr(model, "bert") and hasattr(model, "cls")) or getattr(config, "is_decoder", False):
            hint = "it takes BertForMaskedLM or BertForPreTraining of transformers, with is_decoder=False"
            raise UserError(f"{type(model).__name__} cannot be packed", where="unpad", hint=hint)
        if config.hidden_dropout_prob or config.attention_probs_dropout_prob:
            raise UserError("the packed encoder has no dropout", where="model.dropout", hint="set it to 0")
        self.config = config
        self.bert, self.cls = model.bert, model.cls
        self.masked_tokens_only = False
        self.masked_round_to: int | str = 1  # sparse_head rounds their number up to a multiple of this
        self.transform_only = False  # in training the loss computes the product with the vocabulary
        self.compiled: dict[str, Callable[..., Any]] = {}  # PIECES of compile_layers, by name
        self.compiled_for_evaluation: dict[str, Callable[..., Any]] = {}

    def forward(
        self,
        input_ids: Tensor,
        token_type_ids: Tensor,
        position_ids: Tensor,
        masked_tokens: Tensor,
        first_tokens: Tensor,
        sequences: Sequences,
        needed: Tensor | None = None,
        needed_places: Tensor | None = None,
        needed_sequences: Sequences | None = None,
    ) -> Predictions:
        """Return `prediction_logits` (T or M, V) and, with a next-sentence head, its logits (B, 2).

        `input_ids`, `token_type_ids`, `position_ids` are (T,); `masked_tokens` (M,) and `first_tokens` (B,)
        are indices into T. `needed` (K,) are the tokens that the last layer computes, in ascending order;
        `needed_places` are the indices into K of the masked and then of the first tokens, None if all K are
        masked.
        """
        compiled = self.compiled if self.training else self.compiled_for_evaluation
        embed_tokens, layer_of = compiled.get("embed", embed), compiled.get("layer", encoder_layer)
        head_of = compiled.get("head", apply_module)
        slopes = getattr(self.bert.encoder, "alibi_slopes", None)
        hidden = embed_tokens(self.bert.embeddings, input_ids, token_type_ids, position_ids)
        *layers, last = self.bert.encoder.layer
        for layer in layers:
            hidden = layer_of(layer, hidden, sequences, None, slopes)
        last_sequences = sequences if needed_sequences is None or slopes is not None else needed_sequences
        hidden = layer_of(last, hidden, last_sequences, needed, slopes)
        if needed is not None:
            hidden = hidden if needed_places is None else hidden[needed_places]
            predicted, first = hidden[: len(masked_tokens)], hidden[len(masked_tokens) :]
        else:
            predicted = hidden.index_select(0, masked_tokens) if self.masked_tokens_only else hidden
            first = hidden[first_tokens]
        head = self.cls.predictions
        if self.transform_only and self.training:
            transformed = head_of(head.transform, predicted)
            logits = transformed.to(autocast_dtype(transformed))
        else:
            logits = head_of(head, predicted)
        if not self.has_next_sentence:
            return Predictions(logits)
        pooled = self.bert.pooler.activation(self.bert.pooler.dense(first))
        return Predictions(logits, self.cls.seq_relationship(pooled))

    @property
    def has_next_sentence(self) -> bool:
        return hasattr(self.cls, "seq_relationship")


def embed(embeddings: Any, input_ids: Tensor, token_type_ids: Tensor, position_ids: Tensor) -> Tensor:
    embedded = embeddings.word_embeddings(input_ids)
    embedded = embedded + embeddings.token_type_embeddings(token_type_ids)
    return embeddings.LayerNorm(embedded + embeddings.position_embeddings(position_ids))


def apply_module(module: nn.Module, hidden: Tensor) -> Any:
    return module(hidden)


def encoder_layer(
    layer: nn.Module,
    hidden: Tensor,
    sequences: Sequences,
    needed: Tensor | None,
    slopes: Tensor | None = None,
) -> Tensor:
    """Apply one post-norm layer to `hidden` (T, D); with `needed` (K,) only for those tokens, (K, D).

    With ALiBi's `slopes` (N,) attention is computed for all tokens: its kernels derive distances from their
    order.
    """
    attention = layer.attention
    attended = attend(attention.self, hidden, sequences, needed if slopes is None else None, slopes)
    if needed is not None:
        attended = attended if slopes is None else attended.index_select(0, needed)
        hidden = hidden.index_select(0, needed)
    hidden = attention.output.LayerNorm(attention.output.dense(attended) + hidden)
    return layer.output.LayerNorm(getattr(layer, "feed_forward", feed_forward)(layer, hidden) + hidden)


def feed_forward(layer: Any, hidden: Tensor) -> Tensor:
    """Return the feed-forward network of a layer; `fp8` gives layers a `feed_forward` of their own."""
    result: Tensor = layer.output.dense(layer.intermediate(hidden))
    return result


def attend(
    attention: nn.Module,
    hidden: Tensor,
    sequences: Sequences,
    needed: Tensor | None,
    slopes: Tensor | None,
) -> Tensor:
    """Return the attention of all or the needed tokens to all, (T or K, D), before the output projection."""
    is_whole = needed is None and slopes is None and hasattr(attention, "qkv")
    if is_whole and takes_qkv(sequences, hidden.device):
        shape = (3, attention.num_attention_heads, attention.attention_head_size)
        return varlen_self_attention(attention.qkv(hidden).unflatten(1, shape), sequences).flatten(1)
    return varlen_attention(*project_qkv(attention, hidden, needed), sequences, slopes).flatten(1)


def project_qkv(attention: nn.Module, hidden: Tensor, needed: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return query (T or K, N, H) of all or the needed tokens, and key and value (T, N, H) of all."""
    rows = hidden if needed is None else hidden.index_select(0, needed)
    if not hasattr(attention, "qkv"):
        parts = attention.query(rows), attention.key(hidden), attention.value(hidden)
    elif needed is not None:
        size, weight, bias = hidden.shape[1], attention.qkv.weight, attention.qkv.bias
        query = F.linear(rows, weight[:size], bias[:size])
        parts = query, *split_linear(hidden, weight[size:], bias[size:], num_parts=2)
    elif type(attention.qkv) is nn.Linear:
        parts = split_linear(hidden, attention.qkv.weight, attention.qkv.bias, num_parts=3)
    else:  # of fp8
        parts = attention.qkv.split(hidden, 3)
    query, key, value = (
        part.unflatten(1, (attention.num_attention_heads, attention.attention_head_size)) for part in parts
    )
    return query, key, value


class SplitProduct(torch.autograd.Function):
    """x (T, D) times the transpose of weight (P * D, D) plus bias, as P parts (T, D); x is given P times.

    One product computes the parts. The backward pass multiplies the gradient of each part alone and returns
    it for one x of the P: autograd adds these gradients as those of P layers, and a compiler fuses the
    additions into the products. Plain autograd would first copy the parts' gradients into one tensor, which
    takes longer than the larger product saves.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, bias: Tensor, x: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(weight, x)
        return F.linear(x, weight, bias).chunk(1 + len(others), dim=-1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        weight, x = ctx.saved_tensors
        for_weight = torch.cat([gradient.t() @ x for gradient in gradients])
        for_bias = torch.cat([gradient.sum(dim=0) for gradient in gradients])
        parts = zip(gradients, weight.chunk(len(gradients)), strict=True)
        return for_weight, for_bias, *(gradient @ part for gradient, part in parts)


def split_linear(x: Tensor, weight: Tensor, bias: Tensor, *, num_parts: int) -> tuple[Tensor, ...]:
    """Split F.linear(x, weight, bias), in the dtype of autocast, into equal parts of each row."""
    dtype = autocast_dtype(x)
    weight, bias, x = weight.to(dtype), bias.to(dtype), x.to(dtype)
    if not torch.is_grad_enabled():  # then Dynamo of torch 2.11 gives SplitProduct.forward no `ctx`
        return F.linear(x, weight, bias).chunk(num_parts, dim=-1)
    views = [x.view_as(x) for _ in range(num_parts)]  # Dynamo takes no tensor twice
    apply: Any = SplitProduct.apply
    parts: tuple[Tensor, ...] = apply(weight, bias, *views)
    return parts
