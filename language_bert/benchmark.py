"""BERT on masked-language modelling, as the training loop sees it."""

import itertools
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
from torch import Tensor, nn

from common.data import sampler
from common.data.manifest import read_manifest
from common.errors import UserError
from common.methods.compile import MAX_SHAPES
from common.training import benchmark
from common.training.benchmark import TRITON, Backend, Names
from common.training.method import Batch, Method
from common.training.registry import build_methods
from language_bert.attention import KERNELS, has_kernel
from language_bert.config import LENGTH_DEVIATION, MOST_DEVIATIONS, Config
from language_bert.data.batches import (
    IGNORED,
    padded_batch,
    random_batch,
    shift_lengths,
    typical_lengths,
    weigh_next_sentences,
)
from language_bert.data.shards import Shards
from language_bert.data.sources import WEIGHTS, WIKIPEDIA
from language_bert.methods.unpad import Unpad, resolve_rounding
from language_bert.model import bert_config, build_bert, load_weights, masked_lm_loss, spread_positions

EVALUATED = {
    "corpus": WIKIPEDIA,
    "max_seq_length": 512,
    "evaluation_masked_fraction": 0.15,
    "num_evaluation_samples": 10_000,
}
STARTING_ACCURACY = 0.34085  # of the published weights; source: README.md of the MLPerf reference
NUM_EVALUATION_FORMS = 2  # of a layer: of the last one, and of the others
STARTING_TOLERANCE = 0.001  # room for products in 16 bits: 428 of the 428,235 masked tokens


class Benchmark(benchmark.Benchmark):
    """Quality is the official masked-LM accuracy: correct over all masked tokens of the evaluation set."""

    config: Config
    names = Names(mlperf="bert", samples="sequences", quality="masked-LM accuracy")
    counts_epochs = False

    def build_model(self, *, from_scratch: bool = True) -> nn.Module:
        """Return Hugging Face's BERT, unmodified, with the checkpoint's weights if `model.start` says so."""
        settings = self.config.model
        model = build_bert(bert_config(self.config), next_sentence=settings.next_sentence)
        if settings.position_scale:
            spread_positions(model, settings.position_scale)
        if settings.start == "checkpoint" and not from_scratch:
            load_weights(model, self.directory / WEIGHTS, hint=self.config.prepared_hint)
        return model

    def loss(self, outputs: Any, targets: dict[str, Tensor]) -> Tensor:
        return masked_lm_loss(outputs, targets)

    def num_targets(self, batch: Batch) -> int:
        return int((batch.targets["labels"] != IGNORED).sum())

    def prepare_loader(self) -> None:
        """Raise UserError, before the clock runs, if training has more shapes than a compiler takes.

        A compiler compiles a layer for each number of sequences and of tokens, the last layer of
        `last_layer_subset` for each number of masked tokens too, and for evaluation both once.
        """
        if not self.compiles_layers:
            return
        is_on_cpu = self.device.type == "cpu"  # whose attention slices each sequence
        if is_on_cpu and "compile" in self.methods:
            what = "would compile every packed batch anew on a CPU, because their lengths differ"
            raise UserError(what, where="methods.compile", hint="use methods.compile_layers={} in its place")
        counts = [(len(lengths), lengths.sum(), masked.sum()) for lengths, masked in self.synthetic_counts()]
        shapes = np.array([-(-np.array(count) // [1, *self.rounding(count[0])]) for count in counts])
        num_forms = len(np.unique(shapes[:, :2], axis=0))
        if "last_layer_subset" in self.config.methods:
            num_forms += len(np.unique(shapes, axis=0))
        if num_forms + NUM_EVALUATION_FORMS > MAX_SHAPES:
            most = MAX_SHAPES - NUM_EVALUATION_FORMS
            what = f"a layer would be compiled in {num_forms} forms for training, more than {most}"
            hint = "raise it and methods.sparse_head.round_to, or lower micro_batch_size"
            raise UserError(what, where="methods.unpad.round_to", hint=hint)

    def synthetic_batches(self) -> Iterator[Batch]:
        """Yield random tokens of typical lengths; on a GPU, or compiled, in all shapes of the training.

        Raises UserError as `prepare_loader` does, before a warm-up compiles the first of them.
        """
        self.prepare_loader()
        yield from itertools.starmap(self.noise, self.synthetic_counts())

    def synthetic_evaluation_batch(self, num_samples: int) -> Batch:
        lengths = typical_lengths(num_samples, self.config.data.max_seq_length)
        return self.noise(lengths, np.maximum(1, (lengths * self.config.data.evaluation_masked_fraction)))

    def synthetic_counts(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield tokens and masked tokens of each sequence, (micro_batch_size,), of each synthetic batch."""
        longest = self.config.data.max_seq_length
        num_parts = self.rank_info.world_size * self.num_micro_batches
        for size in self.micro_batch_sizes:
            lengths = typical_lengths(size, longest)
            deviation = longest * LENGTH_DEVIATION * size**0.5  # of their sum
            if self.balances_parts:
                deviation /= num_parts**0.5  # the parts share the deviation of the whole batch
            most, least = (int(lengths.sum() + sign * MOST_DEVIATIONS * deviation) for sign in (1, -1))
            if self.compiles_layers:
                yield from self.counts_of_forms(lengths, most, least)
                continue
            on_gpu = self.device.type == "cuda"
            for num_tokens in (most, lengths.sum(), least) if on_gpu else (lengths.sum(),):
                moved = shift_lengths(lengths, num_tokens, longest)
                yield moved, self.num_masked(moved)

    def counts_of_forms(
        self, lengths: np.ndarray, most: int, least: int
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield a synthetic batch for each form between `most` and `least` tokens, the largest first.

        A form is a number of tokens and of masked tokens, rounded up as `unpad` and `sparse_head` do. Batches
        with equal tokens differ in masked tokens, because the number of each sequence is rounded.
        """
        longest, (tokens_to, masked_to) = self.config.data.max_seq_length, self.rounding(len(lengths))
        rounded = MOST_DEVIATIONS * 0.5 * len(lengths) ** 0.5  # most masked tokens that rounding adds
        for last in range(-(-most // tokens_to) * tokens_to, least, -tokens_to):
            upper, lower = (shift_lengths(lengths, num, longest) for num in (last, last - tokens_to + 1))
            masked = self.num_masked(upper)
            if "sparse_head" not in self.config.methods:  # no form depends on their number
                yield upper, masked
                continue
            most_masked = int(masked.sum() + rounded)
            least_masked = int(self.num_masked(lower).sum() - rounded)
            for last_masked in range(-(-most_masked // masked_to) * masked_to, least_masked - 1, -masked_to):
                num_masked = min(last_masked, most_masked)
                yield upper, shift_lengths(masked, num_masked, longest, shortest=1)

    @cached_property
    def methods(self) -> dict[str, Method]:
        return {method.name: method for method in build_methods(self.config)}

    @property
    def compiles_layers(self) -> bool:
        return "unpad" in self.methods and any(method.compiles for method in self.methods.values())

    def rounding(self, num_samples: int) -> list[int]:
        """Return the multiples to which tokens and masked tokens of so many sequences are rounded up."""
        names = ("unpad", "sparse_head")
        settings = [self.methods[name].settings.round_to if name in self.methods else 1 for name in names]
        return [resolve_rounding(setting, num_samples) for setting in settings]

    @property
    def balances_parts(self) -> bool:
        """True if a batch is partitioned by length: with `unpad`, unless its setting says otherwise."""
        return "unpad" in self.methods and bool(self.methods["unpad"].settings.balance_ranks)

    def num_masked(self, lengths: np.ndarray) -> np.ndarray:
        """Return the masked tokens of sequences of these lengths in training, see instances.py."""
        data = self.config.data
        most = int(data.max_seq_length * data.masked_fraction)
        return (lengths * data.masked_fraction).round().astype(np.int64).clip(1, most)

    def noise(self, lengths: np.ndarray, num_masked: np.ndarray) -> Batch:
        """Return a batch of random tokens; lengths and masked tokens are (num_samples,)."""
        vocab_size, longest = self.config.model.vocab_size, self.config.data.max_seq_length
        return random_batch(np.random.default_rng(0), lengths, num_masked, vocab_size, longest)

    def backends(self) -> dict[str, Backend]:
        parts, unpad = {}, self.methods.get("unpad")
        if isinstance(unpad, Unpad):
            kernel = unpad.choose_kernel(self.device)
            on_cpu = Backend("batched products", "torch")
            parts["attention"] = Backend(kernel, KERNELS[kernel]) if has_kernel(self.device) else on_cpu
        if "chunked_head" in self.methods:
            on_gpu = self.device.type == "cuda"
            parts["cross entropy"] = TRITON if on_gpu else Backend("operators", "torch")
        return parts

    def train_batches(self, start_step: int = 0) -> Iterator[Batch]:
        """Yield this rank's part of shuffled batches without end, with the masked tokens of all ranks."""
        shards = self.shards("train", self.config.data.num_train_samples)
        size, before = self.config.global_batch_size, time.perf_counter()
        for indices in sampler.batches(len(shards), size, seed=self.seed, start_step=start_step):
            members = self.rank_part(indices, shards.index["num_tokens"][indices])
            records = [shards[index] for index in members]
            batch = padded_batch(records, self.config.data.max_seq_length)
            num_targets = int(shards.index["num_masked"][indices].sum())
            if self.config.model.next_sentence:
                batch = weigh_next_sentences(batch, num_targets, size)
            loading_s = time.perf_counter() - before
            yield replace(batch, num_global_targets=num_targets, loading_s=loading_s)
            before = time.perf_counter()

    def rank_part(self, indices: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Return this rank's samples of a batch, ordered by micro-batch."""
        num_parts = self.num_micro_batches
        if not self.balances_parts or self.rank_info.world_size * num_parts == 1:
            return sampler.rank_part(indices, self.rank_info)
        members = sampler.balanced_part(np.arange(len(indices)), lengths, self.rank_info)
        return indices[members[np.concatenate(sampler.partition_by_load(lengths[members], num_parts))]]

    def evaluation_batches(self) -> Iterator[Batch]:
        shards = self.shards("evaluation", self.config.data.num_evaluation_samples)
        members, size = self.rank_evaluation_samples, self.rank_evaluation_batch_size
        for first in range(members.start, members.stop, size):
            records = [shards[index] for index in range(first, min(first + size, members.stop))]
            yield padded_batch(records, self.config.data.max_seq_length)

    def shards(self, name: str, num_samples: int) -> Shards:
        """Open a part of the data. Raises UserError for another number of samples, or a sample too long."""
        data, model = self.config.data, self.config.model
        shards = Shards(self.directory, name, max_seq_length=data.max_seq_length, vocab_size=model.vocab_size)
        if len(shards) != num_samples:
            what = f"{len(shards)} samples, expected {num_samples}"
            raise UserError(what, where=f"{self.directory}: {name}")
        return shards

    def count_correct(self, outputs: Any, targets: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        labels = targets["labels"].flatten()
        is_masked = labels != IGNORED
        right = (outputs[0].flatten(0, -2).argmax(dim=-1) == labels) & is_masked
        return right.sum(), is_masked.sum()

    def extra_metrics(self, num_correct: int, num_total: int) -> dict[str, float]:
        """Return the accuracy as MosaicML's published runs counted it, for Wikipedia only.

        In each sample with fewer masked tokens than the maximum, they counted one more, always correct.
        """
        if self.config.data.corpus != WIKIPEDIA:
            return {}
        num_free = int(self.manifest["facts"]["num_evaluation_short"])
        return {"mlm_accuracy_mosaic": (num_correct + num_free) / (num_total + num_free)}

    def check_initial_quality(self, quality: float) -> str:
        """Warn of published weights that miss STARTING_ACCURACY on the published evaluation set."""
        model, data = self.config.model, self.config.data
        is_evaluated = all(getattr(data, name) == value for name, value in EVALUATED.items())
        is_published = is_evaluated and model.start == "checkpoint"
        is_changed = model.activation != "gelu_pytorch_tanh" or "position_rows" in self.config.methods
        if not is_published or is_changed or abs(quality - STARTING_ACCURACY) <= STARTING_TOLERANCE:
            return ""
        return (
            f"the published weights have {quality:.5f} before the first step, expected {STARTING_ACCURACY} "
            f"within {STARTING_TOLERANCE}: they are read or evaluated otherwise than published"
        )

    @property
    def num_evaluation_targets(self) -> int:
        return int(self.manifest["facts"]["num_evaluation_masked_tokens"])

    @cached_property
    def manifest(self) -> dict[str, Any]:
        """The manifest of the prepared data; it is not read before the clock runs."""
        return read_manifest(self.directory, hint=self.config.prepared_hint)
