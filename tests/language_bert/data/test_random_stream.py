"""The instances of a text are those of the reference's algorithm, draw by draw.

instances.json has a digest of all instances for several settings, and the first instance. A second
implementation of the algorithm, written from a description of `create_pretraining_data.py`, gave the same
instances; it is in the history of this file.
"""

import hashlib
import json
import random
from pathlib import Path

import pytest

from language_bert.data.instances import InstanceSettings, create_instances
from language_bert.data.wordpiece import Tokenizer, read_documents

GOLDEN = json.loads(Path(__file__).with_name("instances.json").read_text())
VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"word{number}" for number in range(300))]


def make_lines():
    """Return documents of one and of many sentences, of one and of many words."""
    rng, lines = random.Random(7), []
    for size in (1, 1, 2, 3, 5, 8, 13, 21, 34, 55):
        for _ in range(size):
            lines.append(
                " ".join(f"word{rng.randrange(300)}" for _ in range(rng.choice((1, 2, 5, 9, 14, 40))))
            )
        lines.append("")
    return lines


def as_list(instance):
    arrays = (instance.input_ids, instance.masked_positions, instance.masked_ids)
    return [*map(list, arrays), instance.num_a_tokens, instance.is_random_next]


@pytest.mark.parametrize("expected", GOLDEN, ids=lambda expected: str(expected["settings"]))
def test_instances_are_those_of_the_reference(tmp_path, expected):
    (tmp_path / "vocab.txt").write_text("\n".join(VOCABULARY) + "\n")
    tokenizer = Tokenizer(tmp_path / "vocab.txt")
    documents = read_documents(make_lines(), tokenizer)
    settings = InstanceSettings(**expected["settings"])
    instances = create_instances(documents, tokenizer.vocabulary, settings, random.Random(12345))
    values = [as_list(instance) for instance in instances]
    assert values[0] == expected["first"]
    assert len(values) == expected["num_instances"]
    assert hashlib.sha256(json.dumps(values).encode()).hexdigest() == expected["sha256"]
