"""Compute real tokens only.

What. Concatenates the sequences of a batch without padding: the encoder runs on the T real tokens instead
of B x S places, for B sequences padded to length S; attention stays within each sequence.
Effect on quality. None: loss and gradients equal the padded model's up to rounding.
Effect on time. Padding is about half of the tokens (0.50 in the Wikipedia set and in size mini).
Relieves. Forward pass, backward pass, evaluation: compute and memory traffic.
When not. Batches of equal length; models with dropout (the random numbers would meet other tokens).
Use. With the model: `model = unpad(model)`.
Source. https://arxiv.org/abs/2208.08124 (ByteTransformer); MLPerf Training v2.1, NVIDIA and MosaicML.
Unlike Composer. Composer 0.7 has no such method.
"""

from collections.abc import Callable
from functools import partial, reduce
from typing import Any, Literal, NamedTuple, cast

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from common.config.schema import CountOrAuto, RunConfig, Strict
from common.errors import UserError
from common.training.method import Batch, Method, Progress
from common.training.step import to_device
from language_bert.attention import (
    activate_flash_attention_3,
    choose_kernel,
    has_kernel,
    head_size,
    plan_attention,
)
from language_bert.data.batches import IGNORED
from language_bert.model import PackedBert, masked_lm_loss

PLAIN_CALLS = {"unpad": "model = unpad(model)", "sparse_head": "read_masked_tokens(model)"}  # of methods

ROUND_TO, ROUNDED_SAMPLES = 512, 56  # `auto` rounds tokens up to this multiple, for so many sequences


def resolve_rounding(round_to: int | str, num_samples: int) -> int:
    """Return the multiple for a micro-batch of `num_samples` sequences.

    `auto` is 512 up to 56 sequences, and doubles when their number doubles: the share of padding and the
    number of distinct shapes then stay about the same.
    """
    if not isinstance(round_to, str):
        return round_to
    return ROUND_TO << (-(-num_samples // ROUNDED_SAMPLES) - 1).bit_length()


def unpad_batch(batch: Batch, *, round_to: int = 1, kernel: str = "torch_flash") -> Batch:
    """Return a padded batch (B, S) as the packed batch that PackedBert takes, targets included.

    T is rounded up to a multiple of `round_to`, so that kernels and compiled graphs see few distinct shapes.
    The padding tokens form sequences behind the real ones: as many in every batch, none longer than S, some
    of length 0. `labels` becomes (T,). `kernel` is that of `plan_attention`.
    """
    is_token = batch.inputs["attention_mask"].bool()
    max_length = is_token.shape[1]
    lengths = is_token.sum(dim=1)
    first_tokens = lengths.cumsum(0) - lengths
    place = is_token.flatten().nonzero()[:, 0]
    labels = batch.targets["labels"].flatten()[place]
    num_padding = -len(place) % round_to
    num_rows = -(-(round_to - 1) // max_length)
    ends = torch.arange(1, num_rows + 1, device=lengths.device) * max_length
    padding = (num_padding - (ends - max_length)).clamp(0, max_length)
    of_tokens = {name: batch.inputs[name].flatten()[place] for name in ("input_ids", "token_type_ids")}
    of_tokens["position_ids"] = place % max_length
    return Batch(
        inputs={
            **{name: F.pad(values, (0, num_padding)) for name, values in of_tokens.items()},
            "masked_tokens": (labels != IGNORED).nonzero()[:, 0],
            "first_tokens": first_tokens,
            "sequences": plan_attention(torch.cat([lengths, padding]), max_length, kernel),
        },
        targets=batch.targets | {"labels": F.pad(labels, (0, num_padding), value=IGNORED)},
        num_samples=batch.num_samples,
    )


class Unpadded(NamedTuple):
    """The loss of a batch, the logits (T or M, V) of its real or masked tokens, their labels (T or M,)."""

    loss: Tensor
    logits: Tensor
    labels: Tensor


class UnpaddedBert(PackedBert):
    """A packed encoder that is called like Hugging Face's model, with padded tensors (B, S).

    The batch is packed on the host, so tensors on the host are the fastest. Methods extend `packing` and
    `training_loss`: `read_masked_tokens`, `compute_needed_tokens`, `chunk_head`.
    """

    def __init__(self, model: Any, round_to: int) -> None:
        super().__init__(model)
        needs_bias = hasattr(self.bert.encoder, "alibi_slopes")
        kernel = choose_kernel("auto", needs_bias=needs_bias, head_size=head_size(model.config))
        self.packing: list[Callable[[Batch], Batch]] = [
            partial(unpad_batch, round_to=round_to, kernel=kernel)
        ]
        self.training_loss: Callable[..., Tensor] | None = None  # (model, outputs, targets) -> scalar

    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        labels: Tensor,
        token_type_ids: Tensor | None = None,
        next_sentence_label: Tensor | None = None,
    ) -> Unpadded:
        """Return the loss, next-sentence loss included where the model has that head, logits and labels.

        Raises UserError for tensors of unequal shapes, and for a batch without a masked token, whose mean
        loss is undefined.
        """
        if not input_ids.shape == attention_mask.shape == labels.shape:
            shapes = f"{[*input_ids.shape]}, {[*attention_mask.shape]}, {[*labels.shape]}"
            raise UserError(f"input_ids, attention_mask, labels: expected one shape, not {shapes}")
        device = self.cls.predictions.decoder.weight.device
        types = torch.zeros_like(input_ids) if token_type_ids is None else token_type_ids
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "token_type_ids": types}
        targets = {"labels": labels, "next_sentence_label": next_sentence_label}
        batch = Batch(
            inputs={name: value.cpu() for name, value in inputs.items()},
            targets={name: value.cpu() for name, value in targets.items() if value is not None},
            num_samples=len(input_ids),
        )
        batch = reduce(lambda packed, pack: pack(packed), self.packing, batch)
        if (batch.targets["labels"] == IGNORED).all():
            raise UserError("no token of the batch is masked", where="labels", hint="leave such batches out")
        batch = to_device(batch, device)
        outputs = super().forward(**batch.inputs)
        if self.training and self.training_loss:
            loss = self.training_loss(self, outputs, batch.targets)
        else:
            loss = masked_lm_loss(outputs, batch.targets)
        return Unpadded(loss, outputs[0], batch.targets["labels"])


def unpad(model: Any, round_to: int = 1) -> UnpaddedBert:
    """Return a model with the same parameters and inputs that computes real tokens only."""
    return UnpaddedBert(model, round_to)


def check_packed(model: nn.Module, caller: Method | str, *, has_sparse_head: bool = False) -> PackedBert:
    """Return the model as PackedBert; `caller` is a method, or the name of a function of a plain loop.

    Raises UserError unless `unpad` (and, with `has_sparse_head`, `sparse_head`) comes before the caller.
    """
    missing = [] if isinstance(model, PackedBert) else ["unpad"]
    if has_sparse_head and not getattr(model, "masked_tokens_only", False):
        missing.append("sparse_head")
    if missing:
        what = f"needs {missing[0]} before it"
        if isinstance(caller, Method):
            caller.refuse(what, hint=f"write NAME+{'+'.join([*missing, caller.name])}")
        raise UserError(what, where=caller, hint=f"{PLAIN_CALLS[missing[0]]} comes before {caller}(model)")
    return cast(PackedBert, model)


class Unpad(Method):
    is_exact = True

    class Config(Strict):
        round_to: CountOrAuto = Field(
            default=64,
            description="tokens of a micro-batch are rounded up to a multiple of this; auto: 512 up "
            "to 56 sequences, 1,024 up to 112, 2,048 up to 224, and so on",
        )
        balance_ranks: bool = Field(
            default=True,
            description="partition a batch by length, so that ranks and micro-batches have equal tokens",
        )
        attention: Literal[
            "auto", "flash_attn_interface", "triton", "flash_attn", "torch_flash", "torch_cudnn"
        ] = Field(
            default="auto",
            description="the kernel of attention on a GPU: of FlashAttention 3, the suite's own, of "
            "FlashAttention 2, of torch, or of cuDNN; auto is the first that is there, the suite's own on "
            "Hopper only, and never cuDNN's",
        )

    kernel, switches = "torch_flash", False

    def configure(self, config: RunConfig) -> RunConfig:
        """Raises UserError for a model with dropout, and for a kernel that this machine lacks."""
        if config.model_dump()["model"]["dropout"]:
            self.refuse("the packed encoder has no dropout", hint="--set model.dropout=0.0")
        if torch.cuda.is_available():
            self.choose_kernel(torch.device("cuda"))
        return config

    def choose_kernel(self, device: torch.device) -> str:
        """Return the kernel that the setting names. Raises UserError where this machine lacks it."""
        name, size = self.settings.attention, head_size(self.config.model)  # type: ignore[attr-defined]
        if name != "auto" and not has_kernel(device):
            self.refuse(f"{name} needs a GPU", setting="attention", hint="there is auto")
        try:
            return choose_kernel(name, needs_bias="alibi" in self.config.methods, head_size=size)
        except UserError as error:
            self.refuse(error.what, setting="attention", hint=error.hint)

    def model(self, model: nn.Module) -> nn.Module:
        device = next(model.parameters()).device
        self.kernel, self.switches = self.choose_kernel(device), has_kernel(device)
        return PackedBert(model)

    def batch(self, batch: Batch, progress: Progress | None) -> Batch:
        if self.switches:  # another model of this process may have another kernel
            activate_flash_attention_3(self.kernel == "flash_attn_interface")
        round_to = resolve_rounding(self.settings.round_to, batch.num_samples)
        return unpad_batch(batch, round_to=round_to, kernel=self.kernel)
