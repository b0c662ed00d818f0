"""Prepare the data: for size `mini` an embedded text with its own vocabulary, for size `full` Wikipedia."""

import random
import shutil
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import BertWordPieceTokenizer

from common.data import preparation
from common.errors import UserError, nearest
from language_bert.data import shards
from language_bert.data.corpus import CORPORA, HELD_OUT_FRACTION
from language_bert.data.instances import SEED, InstanceSettings, create_instances, evenly_spaced
from language_bert.data.wikipedia import prepare_wikipedia
from language_bert.data.wordpiece import Tokenizer, read_documents

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
        embedded=prepare_embedded,
        full=prepare_wikipedia,
        name="Wikipedia",
        needs="the files of `ttt data fetch language_bert`, or MLCommons' TFRecords",
    )


def prepare_embedded(directory: Path, work: Path, config: Any) -> str:
    """Write vocabulary, shards, indexes and manifest; returns the fingerprint.

    Raises UserError for a `data.corpus` that is not embedded.
    """
    name = config.data.corpus
    if name not in CORPORA:
        what = f"size mini has no text '{name}'"
        raise UserError(what, where="data.corpus", hint=nearest(name, CORPORA))
    shutil.rmtree(work, ignore_errors=True)
    folder, data = work / "data", config.data
    folder.mkdir(parents=True)
    train_texts, held_out = split(CORPORA[name]())
    train_vocabulary(train_texts, config.model.vocab_size, folder)
    tokenizer = Tokenizer(folder / "vocab.txt")
    settings_of = partial(InstanceSettings, max_seq_length=data.max_seq_length)
    training = settings_of(masked_fraction=data.masked_fraction, num_duplicates=data.num_duplicates)
    evaluation = settings_of(masked_fraction=data.evaluation_masked_fraction, num_duplicates=1)
    facts: dict[str, Any] = {"settings": config.prepared_with()}
    for part, part_texts, num_samples, settings in (
        ("train", train_texts, data.num_train_samples, training),
        ("evaluation", held_out, data.num_evaluation_samples, evaluation),
    ):
        lines = (line for text in part_texts for line in [*text, ""])
        instances = create_instances(read_documents(lines, tokenizer), tokenizer.vocabulary, settings)
        if len(instances) < num_samples:
            what = f"the corpus gives {len(instances)} samples, fewer than {num_samples}"
            raise UserError(what, where=f"data.num_{part}_samples")
        chosen = evenly_spaced(instances, num_samples)
        index = shards.write_shard(shards.shard_path(folder, part, 0), 0, chosen)
        np.save(shards.index_path(folder, part), index, allow_pickle=False)
        facts |= shards.describe(part, index, settings)
    return preparation.finish(directory, work, facts)


def split(texts: list[list[str]]) -> tuple[list[list[str]], list[list[str]]]:
    """Return the documents of a text to train on, and those that are held out: every one is in one part."""
    order = random.Random(SEED).sample(range(len(texts)), len(texts))
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
    if (num_tokens := trainer.get_vocab_size()) > vocab_size:
        what = f"the text alone needs {num_tokens} tokens, found {vocab_size}"
        raise UserError(what, where="model.vocab_size")
    trainer.save_model(str(directory))
