"""ALiBi: linear biases in place of position embeddings.

What. Subtracts slope times distance from each attention score, with another slope for each head; position
embeddings start at zero and stay there. In an encoder the distance counts in both directions. Training cuts
each sequence into segments of `train_sequence_length_scaling` of the full length, further rows of the batch;
evaluation sees whole sequences.
Effect on quality. Published for language models: equal or better perplexity, also on sequences longer than
those trained on (Press 2021; Composer trains GPT-2 on 256 tokens for 1024); significantly worse when these
have 128 tokens or fewer, and not recommended up to 256 (Composer's method card). MosaicBERT (2023) trains
encoders with it. Segments after the first have no [CLS].
Effect on time. Published: GPT-2 1.16 to 1.19 times faster, by training on a quarter of the length (Composer's
method card); no token is lost, attention becomes cheaper. The bias matrix of each head is memory traffic in
attention, unless a fused kernel adds it (flash-attn does).
Relieves. Forward pass, backward pass: attention over shorter sequences; nothing with a scaling of 1.
When not. Segments of 256 tokens or fewer: at 512 tokens the default of 0.25 leaves 128, so choose 1 there. A
compiler or a next-sentence loss, unless the scaling is 1 (refused); weights that were trained with position
embeddings; on a GPU `unpad` without flash-attn, as torch's own kernel takes no bias. With `last_layer_subset`
the attention of the last layer stays whole.
Use. With the model: `apply_alibi(model)`. Each batch: `batch = shorten(batch, 128, "segment")`.
Source. Press, Smith and Lewis 2021, Train Short, Test Long, https://arxiv.org/abs/2108.12409; MosaicML
Composer 0.7, algorithms/alibi; in both directions as MosaicBERT, https://arxiv.org/abs/2312.17482.
Unlike Composer. Same default (0.25) and slopes. Composer's biases are for causal models, of one direction.
Rows that hold only padding are dropped here. `max_sequence_length` (8192) is left out: evaluation is no
longer than the data. Its other arguments name the layers of a model; here they are those of BERT.
"""

import math
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn

from common.config.schema import RunConfig, Strict
from common.errors import UserError, refuse_twice
from common.training.method import Batch, Method, Progress
from common.training.registry import refuse_compiled
from language_bert.attention import why_absent
from language_bert.methods.seq_length_warmup import (
    move_before_packing,
    refuse_next_sentence,
    shorten_batch,
)

MIN_LENGTH = 8  # tokens of a segment
UNSCALED = "--set methods.alibi.train_sequence_length_scaling=1"


def alibi_slopes(num_heads: int) -> Tensor:
    """Return the slopes (num_heads,) float32: 2^(-8 h / num_heads) for h = 1 ... num_heads.

    For a number of heads that is not a power of two: the slopes of the power of two below it, then every
    second slope of the power above it.
    """
    power = 2 ** math.floor(math.log2(num_heads))
    slopes = 2 ** (-8 / power * torch.arange(1, power + 1, dtype=torch.float64))
    between = 2 ** (-4 / power * torch.arange(1, 2 * power + 1, 2, dtype=torch.float64))
    return torch.cat([slopes, between[: num_heads - power]]).float()


@torch.no_grad()
def apply_alibi(model: nn.Module) -> int:
    """Bias the attention of a Hugging Face BERT, packed or not, in place; returns the number of layers.

    Position embeddings become 0 and are not trained. `eager` and `sdpa` attention take the bias; the
    kernels of `flash_attention_2` would not see it.
    """
    bert = find_bert(model, "apply_alibi")
    refuse_twice(hasattr(bert.encoder, "alibi_slopes"), "apply_alibi")
    weight = bert.embeddings.position_embeddings.weight
    weight.zero_().requires_grad_(False)
    slopes = alibi_slopes(bert.config.num_attention_heads)
    bert.encoder.register_buffer("alibi_slopes", slopes.to(weight), persistent=False)
    bert.encoder.register_forward_pre_hook(biased_mask, with_kwargs=True)  # a packed model does not call it
    return len(bert.encoder.layer)


def find_bert(model: nn.Module, function: str) -> Any:
    """Return the part of a Hugging Face BERT without its heads. Raises UserError for another model."""
    bert = getattr(model, "bert", model)
    if not hasattr(getattr(bert, "encoder", None), "layer"):
        raise UserError(f"{type(model).__name__} is not a BERT of Hugging Face", where=function)
    return bert


def biased_mask(encoder: Any, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the encoder's arguments with -slope * |i - j| in the attention mask (batch, heads, seq, seq)."""
    hidden = args[0] if args else named["hidden_states"]
    mask = args[1] if len(args) > 1 else named.get("attention_mask")
    place = torch.arange(hidden.shape[1], device=encoder.alibi_slopes.device)
    distance = (place[:, None] - place).abs()
    bias = (-encoder.alibi_slopes[:, None, None] * distance).to(hidden.dtype)[None]
    if mask is not None and mask.dtype == torch.bool:
        bias = bias.masked_fill(~mask, torch.finfo(bias.dtype).min)
    elif mask is not None:
        bias = bias + mask
    if len(args) > 1:
        return (hidden, bias, *args[2:]), named
    return args, named | {"attention_mask": bias}


def check_from_scratch(config: Any, method: Method) -> None:
    if config.model.start != "random":
        hint = "--set model.start=random, with a schedule for training from random weights"
        method.refuse("the starting weights were trained without it", hint=hint)


class Alibi(Method):
    """Biases every layer and shortens training batches, before `unpad` packs them."""

    class Config(Strict):
        train_sequence_length_scaling: float = Field(
            default=0.25, gt=0, le=1, description="length of training segments over that of the sequences"
        )

    @property
    def scaling(self) -> float:
        return float(self.settings.train_sequence_length_scaling)

    def configure(self, config: RunConfig) -> RunConfig:
        check_from_scratch(config, self)
        is_packed_on_gpu = "unpad" in config.methods and torch.cuda.is_available()
        if is_packed_on_gpu and why_absent("flash_attn", needs_bias=True):
            what = "with unpad it needs flash-attn on a GPU: torch's own kernel takes no bias"
            self.refuse(what, hint="install it, or leave unpad out")
        if self.scaling == 1:
            return config
        refuse_next_sentence(config, self, hint=UNSCALED)
        refuse_compiled(config, self.name)
        if self.segment_length(config) < MIN_LENGTH:
            self.refuse(f"leaves less than {MIN_LENGTH} tokens", setting="train_sequence_length_scaling")
        return move_before_packing(config, self.name)

    def segment_length(self, config: RunConfig) -> int:
        return int(config.model_dump()["data"]["max_seq_length"] * self.scaling)

    def model(self, model: nn.Module) -> nn.Module:
        apply_alibi(model)
        return model

    def batch(self, batch: Batch, progress: Progress | None) -> Batch:
        if progress is None or self.scaling == 1:
            return batch
        return shorten_batch(batch, self.segment_length(self.config), "segment")
