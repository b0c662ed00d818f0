"""Make the embedded data of size `mini`: prose, a WordPiece vocabulary, training and evaluation instances."""

import random
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

from tokenizers import BertWordPieceTokenizer

from common import fingerprint
from common.errors import UserError
from language_bert.data.corpus import documents
from language_bert.data.instances import (
    Document,
    Instance,
    InstanceSettings,
    Vocabulary,
    create_instances,
)
from language_bert.data.shards import write_shard

SPLIT_SEED = 12345  # as in the reference
HELD_OUT_FRACTION = 0.05
MIN_CHARACTER_COUNT = 10  # rarer ones become [UNK]
SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def prepare(directory: Path, config: Any, source: Path | None = None) -> str:
    """Write train and evaluation shards, vocabulary and manifest below `directory`; returns the fingerprint.

    The folder appears whole or not at all. Raises UserError for a `source`, for size `full`, and for a folder
    that holds something else.
    """
    if source is not None:
        raise UserError(f"{config.benchmark} is not prepared from a source", where=f"--source {source}")
    if config.size != "mini":
        raise UserError(
            "the Wikipedia set cannot be made from here yet",
            where=f"{config.benchmark} --size full",
            hint="use --size mini",
        )
    fingerprint.refuse_to_replace(directory)
    partial = directory.with_name(f".{directory.name}.part")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    train_text, evaluation_text = split(documents())
    tokenizer = train_tokenizer(train_text, config.model.vocab_size, partial)
    facts: dict[str, Any] = {"settings": config.prepared_with(), "tokens": list(SPECIAL_TOKENS)}
    wanted = {
        "train": (train_text, config.data.num_train_samples),
        "evaluation": (evaluation_text, config.data.num_evaluation_samples),
    }
    for name, (part, num_samples) in wanted.items():
        instances = draw(tokenized(part, tokenizer), num_samples, tokenizer, config)
        write_shard(partial / name, instances)
        num_tokens = sum(len(instance.input_ids) for instance in instances)
        facts[f"num_{name}_masked_tokens"] = sum(len(instance.masked_ids) for instance in instances)
        facts[f"{name}_valid_fraction"] = round(num_tokens / (num_samples * config.data.max_seq_length), 4)
    result = fingerprint.write_manifest(partial, facts)
    fingerprint.put_in_place(partial, directory)
    return result


def split(texts: list[list[str]]) -> tuple[list[list[str]], list[list[str]]]:
    """Return training and held-out documents, drawn by a fixed seed."""
    order = random.Random(SPLIT_SEED).sample(range(len(texts)), len(texts))
    num_held_out = int(len(texts) * HELD_OUT_FRACTION)
    return [texts[i] for i in order[num_held_out:]], [texts[i] for i in order[:num_held_out]]


def train_tokenizer(texts: list[list[str]], vocab_size: int, directory: Path) -> BertWordPieceTokenizer:
    """Train WordPiece on the text, write vocab.txt and return the tokenizer that reads it.

    Every character is given to the trainer in a fixed order, alone and as a continuation: it would number the
    continuations in the order of a hash table, and break ties by number, differently in every process.
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
    return BertWordPieceTokenizer(str(directory / "vocab.txt"), lowercase=True)


def tokenized(texts: list[list[str]], tokenizer: BertWordPieceTokenizer) -> list[Document]:
    """Return documents of sentences of token ids, without empty ones."""
    tokens = [
        [each.ids for each in tokenizer.encode_batch(text, add_special_tokens=False) if each.ids]
        for text in texts
    ]
    return [document for document in tokens if document]


def draw(
    texts: list[Document], num_samples: int, tokenizer: BertWordPieceTokenizer, config: Any
) -> list[Instance]:
    """Return `num_samples` instances, evenly spaced over as many duplicates as are needed."""
    vocabulary = Vocabulary(
        num_tokens=tokenizer.get_vocab_size(),
        cls_id=tokenizer.token_to_id("[CLS]"),
        sep_id=tokenizer.token_to_id("[SEP]"),
        mask_id=tokenizer.token_to_id("[MASK]"),
    )
    for num_duplicates in (1, 2, 5, 10, 20):
        settings = InstanceSettings(
            max_seq_length=config.data.max_seq_length,
            max_predictions=config.data.max_predictions,
            masked_fraction=config.data.masked_fraction,
            num_duplicates=num_duplicates,
        )
        instances = create_instances(list(texts), vocabulary, settings, random.Random(SPLIT_SEED))
        if len(instances) >= num_samples:
            return [instances[i * len(instances) // num_samples] for i in range(num_samples)]
    raise UserError(
        f"the corpus gives {len(instances)} samples, fewer than {num_samples}", where="data.num_train_samples"
    )
