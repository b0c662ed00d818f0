"""Prepare the data: for size `mini` embedded prose with its own vocabulary, for size `full` Wikipedia."""

import random
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import BertWordPieceTokenizer

from common.data import manifest, preparation
from common.errors import UserError
from language_bert.data import shards
from language_bert.data.corpus import documents
from language_bert.data.instances import Instance, InstanceSettings, create_instances, evenly_spaced
from language_bert.data.wikipedia import prepare_wikipedia
from language_bert.data.wordpiece import Tokenizer, read_documents

SPLIT_SEED = 12345  # as in the reference
HELD_OUT_FRACTION = 0.05
MIN_CHARACTER_COUNT = 10  # rarer ones become [UNK]
SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def prepare(directory: Path, config: Any, source: Path | None = None) -> str:
    """Prepare the data in `directory` unless they are intact; returns the fingerprint.

    The folder appears whole or not at all. Size `full` needs a `source`, see sources.py. Raises UserError for
    a folder with other files, and for a source that is incomplete, damaged or not the dump of 2020-01-01.
    """
    return preparation.prepare(
        directory,
        config,
        source,
        embedded=prepare_prose,
        full=prepare_wikipedia,
        name="Wikipedia",
        needs="MLCommons' text (results4, vocab.txt) or TFRecords",
    )


def prepare_prose(directory: Path, work: Path, config: Any) -> str:
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    data = config.data
    train_text, evaluation_text = split_documents(documents())
    train_vocabulary(train_text, config.model.vocab_size, work)
    tokenizer = Tokenizer(work / "vocab.txt")
    facts: dict[str, Any] = {"settings": config.prepared_with()}
    parts = {
        "train": (train_text, data.num_train_samples, data.masked_fraction, data.num_duplicates),
        "evaluation": (evaluation_text, data.num_evaluation_samples, data.evaluation_masked_fraction, 1),
    }
    for name, (texts, num_samples, masked_fraction, num_duplicates) in parts.items():
        settings = InstanceSettings(
            max_seq_length=data.max_seq_length,
            masked_fraction=masked_fraction,
            num_duplicates=num_duplicates,
        )
        instances = select_instances(texts, num_samples, tokenizer, settings)
        index = shards.write_shard(shards.shard_path(work, name, 0), 0, instances)
        np.save(shards.index_path(work, name), index, allow_pickle=False)
        facts |= shards.describe(name, index, settings)
    result = manifest.write_manifest(work, facts)
    manifest.put_in_place(work, directory)
    return result


def split_documents(texts: list[list[str]]) -> tuple[list[list[str]], list[list[str]]]:
    """Split documents into training and evaluation by a fixed seed."""
    order = random.Random(SPLIT_SEED).sample(range(len(texts)), len(texts))
    num_held_out = int(len(texts) * HELD_OUT_FRACTION)
    return [texts[i] for i in order[num_held_out:]], [texts[i] for i in order[:num_held_out]]


def train_vocabulary(texts: list[list[str]], vocab_size: int, directory: Path) -> None:
    """Train WordPiece on the text and write vocab.txt.

    The trainer gets every character in a fixed order, alone and as a continuation. Otherwise it numbers the
    continuations in the order of a hash table and breaks ties by number, differently in every process.
    """
    lines = [" ".join(text) for text in texts]
    trainer = BertWordPieceTokenizer(lowercase=True)
    counts = Counter(trainer.normalize("\n".join(lines)))
    alphabet = sorted(c for c, count in counts.items() if count >= MIN_CHARACTER_COUNT and not c.isspace())
    trainer.train_from_iterator(
        lines,
        vocab_size=vocab_size,
        show_progress=False,
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        special_tokens=[*SPECIAL_TOKENS, *alphabet, *(f"##{character}" for character in alphabet)],
    )
    if trainer.get_vocab_size() > vocab_size:
        raise UserError(
            f"the text alone needs {trainer.get_vocab_size()} tokens, found {vocab_size}",
            where="model.vocab_size",
        )
    trainer.save_model(str(directory))


def select_instances(
    texts: list[list[str]], num_samples: int, tokenizer: Tokenizer, settings: InstanceSettings
) -> list[Instance]:
    lines = (line for text in texts for line in [*text, ""])
    instances = create_instances(
        read_documents(lines, tokenizer), tokenizer.vocabulary, settings, random.Random(SPLIT_SEED)
    )
    if len(instances) < num_samples:
        what = f"the corpus gives {len(instances)} samples, fewer than {num_samples}"
        raise UserError(what, where="data.num_train_samples")
    return evenly_spaced(instances, num_samples)
