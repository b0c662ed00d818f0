"""Text to ids as the reference does it."""

import pytest

from common.errors import UserError
from language_bert.data.wordpiece import Tokenizer, read_documents

WORDS = """[PAD] [UNK] [CLS] [SEP] [MASK] the cat ##s sat un ##aff ##able runs , . ! 中 e a ##e cafe i $ [ ]
 mask sep ' don t ς ##ος οδ ##ο s"""
TOKENS = WORDS.split()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    path = tmp_path_factory.mktemp("vocabulary") / "vocab.txt"
    path.write_text("\n".join(TOKENS) + "\n")
    return Tokenizer(path)


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("The cats sat, unaffable!", "the cat ##s sat , un ##aff ##able !"),
        ("  The\tcat\r\n sat\u00a0. ", "the cat sat ."),  # blanks of every kind
        ("CAFÉ cafe\u0301", "cafe cafe"),  # one character or two
        ("the\u200bcat\x00s\ufffd", "[UNK]"),  # format and control characters vanish, words join
        ("cat\x07s", "cat ##s"),
        ("a中e", "a 中 e"),
        ("don't $ i", "don ' t $ i"),
        ("İ", "i"),  # lowered first, then without its dot
        ("ΟΔΟΣ", "οδ ##ος"),  # the final sigma
        ("ΟΔΟΣ.", "οδ ##ος ."),
        ("the zebra", "the [UNK]"),
        ("[MASK] [SEP]", "[ mask ] [ sep ]"),  # never special in a text
        ("\u2014the\u2026cat", "[UNK] the [UNK] cat"),  # dashes and dots of Unicode stand alone
        ("", ""),
    ],
)
def test_a_text_becomes_the_references_tokens(tokenizer, text, tokens):
    assert [TOKENS[number] for number in tokenizer.ids(text)] == tokens.split()


def test_a_word_has_at_most_200_characters(tokenizer):
    assert len(tokenizer.ids("a" + "e" * 199)) == 200
    assert tokenizer.ids("a" + "e" * 200) == [TOKENS.index("[UNK]")]


def test_ascii_prose_has_the_ids_of_the_tokenizers_library(tokenizer):
    from tokenizers import BertWordPieceTokenizer

    other = BertWordPieceTokenizer({token: number for number, token in enumerate(TOKENS)}, lowercase=True)
    text = " ".join(chr(a) + chr(b) + "cats" for a in range(32, 127) for b in range(32, 127))
    assert tokenizer.ids(text) == other.encode(text, add_special_tokens=False).ids


def test_documents_are_divided_by_blank_lines_and_empty_ones_dropped(tokenizer):
    lines = ["\n", "The cat\n", "sat.\n", "  \n", "\n", "\x00\n", "\n", "cats\n"]
    the, cat, sat, dot, s = (TOKENS.index(token) for token in ("the", "cat", "sat", ".", "##s"))
    assert read_documents(lines, tokenizer) == [[[the, cat], [sat, dot]], [[cat, s]]]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"the\ncat\n", r"has no token \[CLS\]"),
        (b"\xff\n", "cannot be read"),
        (b"[UNK]\n[CLS]\n[SEP]\n[MASK]\n[CLS]\n", "has a token twice"),
    ],
)
def test_what_is_no_vocabulary_is_refused(tmp_path, content, message):
    (tmp_path / "vocab.txt").write_bytes(content)
    with pytest.raises(UserError, match=message):
        Tokenizer(tmp_path / "vocab.txt")
