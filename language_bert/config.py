"""The keys of a configuration of this benchmark."""

from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from common.config.schema import DataConfig, Fraction, RunConfig, Strict
from common.errors import UserError
from language_bert import closed
from language_bert.data.sources import WEIGHTS

LENGTH_DEVIATION = 183 / 512  # standard deviation of Wikipedia's lengths, as a share of the longest
MOST_DEVIATIONS = 4.5  # standard deviations that 7 of a million micro-batches exceed
# Bytes per token and hidden unit that a packed layer with an MLP 4 times as wide saves for the backward pass,
# by bits of the residual; `fp8` saves fewer. tests/language_bert/test_memory.py counts them on fake tensors.
SAVED_BYTES = {16: 32, 32: 38}
LOGIT_BYTES = 10  # of a logit that is stored: in 16 bits, in float32, and its gradient in float32
STATE_BYTES = 18  # of a parameter: itself, gradient and two averages in float32, and a copy in 16 bits


class ModelConfig(Strict):
    """Hugging Face's names; `position_scale` starts the position embeddings as sines instead of noise."""

    vocab_size: int = Field(gt=0, le=65536)
    hidden_size: int = Field(gt=0)
    num_hidden_layers: int = Field(gt=0)
    num_attention_heads: int = Field(gt=0)
    intermediate_size: int = Field(gt=0)
    dropout: float = Field(ge=0, lt=1)
    initializer_range: float = Field(gt=0)
    attention: Literal["sdpa", "eager"]  # of Hugging Face's module
    activation: Literal["gelu_pytorch_tanh", "gelu"]  # the reference's, and the exact form
    start: Literal["random", "checkpoint"]
    position_scale: float = Field(ge=0)
    next_sentence: bool

    @model_validator(mode="after")
    def check_heads(self) -> "ModelConfig":
        if self.hidden_size % self.num_attention_heads:
            heads = f"num_attention_heads {self.num_attention_heads}"
            raise ValueError(f"hidden_size {self.hidden_size} is not a multiple of {heads}")
        return self


class TextDataConfig(DataConfig):
    """Lengths in tokens."""

    corpus: str = Field(pattern=r"^[a-z0-9-]+$")  # wikipedia-20200101 is checked against what is published
    max_seq_length: int = Field(ge=8, le=512)
    num_duplicates: int = Field(ge=1, le=100)
    masked_fraction: Fraction
    evaluation_masked_fraction: Fraction

    @model_validator(mode="after")
    def check_masked(self) -> "TextDataConfig":
        for name in ("masked_fraction", "evaluation_masked_fraction"):
            if int(self.max_seq_length * getattr(self, name)) < 1:
                raise ValueError(f"{name} masks no token of max_seq_length {self.max_seq_length}")
        return self


class Config(RunConfig):
    model: ModelConfig
    data: TextDataConfig
    closed_rules: ClassVar = closed.RULES

    def prepared_with(self) -> dict[str, Any]:
        names = [name for name in TextDataConfig.model_fields if name not in DataConfig.model_fields]
        settings = {f"data.{name}": getattr(self.data, name) for name in names}
        return super().prepared_with() | settings | {"model.vocab_size": self.model.vocab_size}

    def training_bytes(self, num_samples: int) -> int:
        """Return STATE_BYTES of all parameters and `layer_bytes` of the most tokens computed together.

        One layer more is counted, for temporary tensors of the backward pass. Raises UserError for padded
        batches.
        """
        if "unpad" not in self.methods:
            hint = "--set micro_batch_size=N"
            raise UserError("auto: not known for padded batches", where="micro_batch_size", hint=hint)
        from language_bert.data.batches import typical_lengths  # torch, which preparation does without

        longest = self.data.max_seq_length
        spread = MOST_DEVIATIONS * longest * LENGTH_DEVIATION * num_samples**0.5
        num_tokens = min(num_samples * longest, typical_lengths(1000, longest).mean() * num_samples + spread)
        of_token = self.layer_bytes * (self.model.num_hidden_layers + 1)
        if "chunked_head" not in self.methods:
            share = self.data.masked_fraction if "sparse_head" in self.methods else 1.0
            of_token += int(LOGIT_BYTES * self.model.vocab_size * share)
        return STATE_BYTES * self.num_weights + of_token * int(num_tokens)

    @property
    def num_weights(self) -> int:
        """The number of parameters of word embeddings and layers' matrices: nearly all of the model."""
        model, width = self.model, self.model.hidden_size
        mlp = 3 * self.gated_width if "gated_linear_units" in self.methods else 2 * model.intermediate_size
        return (model.vocab_size + model.num_hidden_layers * (4 * width + mlp)) * width

    @property
    def layer_bytes(self) -> int:
        """The bytes per token that a packed layer saves for the backward pass."""
        num_bits = 16 if "low_precision_layernorm" in self.methods else 32
        of_layer = SAVED_BYTES[num_bits] * self.model.hidden_size
        if "gated_linear_units" in self.methods:  # four tensors in 16 bits instead of two
            of_layer += 8 * self.gated_width - 4 * self.model.intermediate_size
        return of_layer

    @property
    def gated_width(self) -> int:
        from language_bert.methods.gated_linear_units import GatedLinearUnits, gated_width  # loads torch

        settings = GatedLinearUnits.Config(**self.methods["gated_linear_units"])
        return gated_width(self.model.intermediate_size, settings.width_factor, settings.round_to)

    def prepared_files(self) -> set[str]:
        """Name the indexes, the vocabulary of size mini, and the starting weights."""
        names = {f"{part}.index.npy" for part in ("train", "evaluation")}
        names |= {"vocab.txt"} if self.size == "mini" else set()
        return names | ({WEIGHTS} if self.model.start == "checkpoint" else set())
