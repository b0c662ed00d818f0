"""BERT on masked-language modelling: what the loop asks of this benchmark."""

from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn

from common import benchmark, fingerprint, sampler
from common.config import DataConfig, Fraction, RunConfig, Strict
from common.errors import UserError
from common.method import Batch
from language_bert.data.batches import IGNORED, padded_batch, random_record
from language_bert.data.shards import Record, Shards
from language_bert.data.weights import WEIGHTS, load_weights
from language_bert.model import bert_config, build_bert, spread_positions


class ModelConfig(Strict):
    """Hugging Face's names; `position_scale` starts the position embeddings as sines instead of noise."""

    vocab_size: int = Field(gt=0, le=65536)
    hidden_size: int = Field(gt=0)
    num_hidden_layers: int = Field(gt=0)
    num_attention_heads: int = Field(gt=0)
    intermediate_size: int = Field(gt=0)
    dropout: float = Field(ge=0, lt=1)
    initializer_range: float = Field(gt=0)
    start: Literal["random", "checkpoint"]
    position_scale: float = Field(ge=0)
    next_sentence: bool

    @model_validator(mode="after")
    def check_heads(self) -> "ModelConfig":
        """Refuse heads of unequal size."""
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size {self.hidden_size} is not a multiple of "
                f"num_attention_heads {self.num_attention_heads}"
            )
        return self


class TextDataConfig(DataConfig):
    """Lengths in tokens."""

    corpus: str = Field(pattern=r"^[a-z0-9-]+$")  # wikipedia-20200101 is checked against what is published
    max_seq_length: int = Field(ge=8, le=512)
    num_duplicates: int = Field(ge=1, le=100)
    masked_fraction: Fraction
    evaluation_masked_fraction: Fraction


class Config(RunConfig):
    """The keys of this benchmark."""

    model: ModelConfig
    data: TextDataConfig

    def prepared_with(self) -> dict[str, Any]:
        """Return also lengths, masking and the size of the vocabulary."""
        names = (
            "corpus",
            "max_seq_length",
            "num_duplicates",
            "masked_fraction",
            "evaluation_masked_fraction",
        )
        settings = {f"data.{name}": getattr(self.data, name) for name in names}
        return super().prepared_with() | settings | {"model.vocab_size": self.model.vocab_size}


class Benchmark(benchmark.Benchmark):
    """Quality is the official masked-LM accuracy: right masked tokens over all, whole evaluation set."""

    config: Config
    mlperf_name = "bert"
    samples_name = "sequences"
    quality_name = "masked-LM accuracy"
    counts_epochs = False

    def build_model(self) -> nn.Module:
        """Return Hugging Face's BERT, unmodified."""
        settings = self.config.model
        model = build_bert(bert_config(self.config), next_sentence=settings.next_sentence)
        if settings.position_scale:
            spread_positions(model, settings.position_scale)
        return model

    def load_weights(self, model: nn.Module) -> None:
        """Read the published checkpoint's weights where the configuration starts from it."""
        if self.config.model.start == "checkpoint":
            load_weights(model, self.directory / WEIGHTS, hint=self.config.prepared_hint)

    def loss(self, outputs: Any, targets: dict[str, Tensor]) -> Tensor:
        """Return the mean over masked tokens, plus the next-sentence loss where the model has that head."""
        loss = F.cross_entropy(
            outputs[0].flatten(0, -2).float(), targets["labels"].flatten(), ignore_index=IGNORED
        )
        if self.config.model.next_sentence:
            loss = loss + F.cross_entropy(outputs[1].float(), targets["next_sentence_label"])
        return loss

    def synthetic_batches(self) -> Iterator[Batch]:
        """Yield one batch of random tokens with lengths over the whole range."""
        rng = np.random.default_rng(0)
        data, size = self.config.data, self.config.global_batch_size
        records = [self.random_record(rng, length) for length in np.linspace(8, data.max_seq_length, size)]
        yield padded_batch(records, data.max_seq_length)

    def random_record(self, rng: np.random.Generator, length: float) -> Record:
        """Return random tokens with the configured share of masked ones."""
        return random_record(
            rng,
            length=int(length),
            vocab_size=self.config.model.vocab_size,
            num_masked=max(1, round(length * self.config.data.masked_fraction)),
        )

    def bench_batches(self, num_samples: int) -> dict[str, Batch]:
        """Return a batch of random tokens whose lengths have the real mean, half of the longest allowed."""
        rng, data = np.random.default_rng(0), self.config.data
        lengths = np.linspace(8, data.max_seq_length, num_samples).round().astype(int)
        records = [self.random_record(rng, length) for length in rng.permutation(lengths)]
        return {f"{data.max_seq_length} tokens": padded_batch(records, data.max_seq_length)}

    def work(self, shape: str) -> benchmark.Work:
        """Return the matrix products on real tokens of such a sample, forward and twice backward."""
        model, data = self.config.model, self.config.data
        lengths = np.linspace(8, data.max_seq_length, 1000)
        size, wide = model.hidden_size, model.intermediate_size
        layer = lengths * (8 * size**2 + 4 * size * wide) + 4 * lengths**2 * size
        head = lengths * data.masked_fraction * 2 * size * (size + model.vocab_size)
        return benchmark.Work(
            flops=3 * float((model.num_hidden_layers * layer + head).mean()), num_bytes=None
        )

    def train_batches(self) -> Iterator[Batch]:
        """Yield shuffled batches without end."""
        shards = self.shards("train", self.config.data.num_train_samples)
        for indices in sampler.batches(len(shards), self.config.global_batch_size, seed=self.seed):
            yield padded_batch([shards[index] for index in indices], self.config.data.max_seq_length)

    def evaluation_batches(self) -> Iterator[Batch]:
        """Yield the evaluation set in its order."""
        shards = self.shards("evaluation", self.config.data.num_evaluation_samples)
        size = self.config.evaluation_batch_size
        for first in range(0, len(shards), size):
            records = [shards[index] for index in range(first, min(first + size, len(shards)))]
            yield padded_batch(records, self.config.data.max_seq_length)

    def shards(self, name: str, num_samples: int) -> Shards:
        """Open a part of the data.

        Raises UserError unless it holds as many samples as the configuration says.
        """
        shards = Shards(self.directory, name)
        if len(shards) != num_samples:
            raise UserError(
                f"{len(shards)} samples, expected {num_samples}", where=f"{self.directory}: {name}"
            )
        return shards

    def count_correct(self, outputs: Any, targets: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Count masked tokens that are predicted right, and masked tokens."""
        labels = targets["labels"].flatten()
        is_masked = labels != IGNORED
        right = (outputs[0].flatten(0, -2).argmax(dim=-1) == labels) & is_masked
        return right.sum(), is_masked.sum()

    @property
    def num_evaluation_targets(self) -> int:
        """The masked tokens of the evaluation set, from the manifest."""
        return int(self.manifest()["facts"]["num_evaluation_masked_tokens"])

    def epoch_number(self, num_samples: int) -> int:
        """BERT logs samples where ResNet logs epochs."""
        return num_samples

    def fingerprint(self) -> str:
        """Return the fingerprint of the prepared data."""
        return str(self.manifest()["fingerprint"])

    def manifest(self) -> dict[str, Any]:
        """Return the manifest of the prepared data."""
        return fingerprint.read_manifest(self.directory, hint=self.config.prepared_hint)
