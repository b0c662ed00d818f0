"""Text to token ids exactly as in the MLPerf reference: lower case, no accents, WordPiece.

The ids must be the same: one token more or less in a document changes every random draw after it
(instances.py). Source: `tokenization.py` of the MLPerf Training BERT reference. The normalizer of the
`tokenizers` library is not used, because it lowers case character by character; Python and the reference do
it by context (the final sigma of Greek).
"""

import unicodedata
from collections.abc import Iterable
from pathlib import Path

from tokenizers.models import WordPiece

from common.errors import UserError
from language_bert.data.instances import Document, Vocabulary

MAX_WORD_CHARACTERS = 200  # a longer word is [UNK]; the library's default is 100
CJK = (
    (0x4E00, 0x9FFF),
    (0x3400, 0x4DBF),
    (0x20000, 0x2A6DF),
    (0x2A700, 0x2B73F),
    (0x2B740, 0x2B81F),
    (0x2B820, 0x2CEAF),
    (0xF900, 0xFAFF),
    (0x2F800, 0x2FA1F),
)


class Cleaning(dict[int, str]):
    """A table for str.translate: drops control characters, makes blanks spaces and CJK characters words."""

    def __missing__(self, code: int) -> str:
        character = chr(code)
        category = unicodedata.category(character)
        if character in "\t\n\r" or category == "Zs":
            self[code] = " "
        elif code in (0, 0xFFFD) or category in ("Cc", "Cf"):
            self[code] = ""
        elif any(first <= code <= last for first, last in CJK):
            self[code] = f" {character} "
        else:
            self[code] = character
        return self[code]


class Splitting(dict[int, str]):
    """A table for str.translate: drops accents, makes punctuation words. ASCII symbols are punctuation."""

    def __missing__(self, code: int) -> str:
        character = chr(code)
        category = unicodedata.category(character)
        is_symbol = 33 <= code <= 126 and not character.isalnum()
        self[code] = "" if category == "Mn" else character
        if is_symbol or category.startswith("P"):
            self[code] = f" {character} "
        return self[code]


class Pieces(dict[str, list[int]]):
    def __init__(self, ids: dict[str, int]) -> None:
        super().__init__()
        self.model = WordPiece(ids, unk_token="[UNK]", max_input_chars_per_word=MAX_WORD_CHARACTERS)

    def __missing__(self, word: str) -> list[int]:
        self[word] = [token.id for token in self.model.tokenize(word)]
        return self[word]


class Tokenizer:
    """A vocabulary and the function from text to its ids."""

    def __init__(self, path: Path) -> None:
        """Read vocab.txt, one token a line. Raises UserError if it is not a vocabulary."""
        try:
            tokens = path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"cannot be read ({error})", where=str(path)) from error
        ids = {token.strip(): number for number, token in enumerate(tokens)}
        if missing := {"[UNK]", "[CLS]", "[SEP]", "[MASK]"} - ids.keys():
            raise UserError(f"has no token {min(missing)}", where=str(path))
        if len(ids) != len(tokens):
            raise UserError("has a token twice", where=str(path))
        special = {"cls_id": ids["[CLS]"], "sep_id": ids["[SEP]"], "mask_id": ids["[MASK]"]}
        self.vocabulary = Vocabulary(num_tokens=len(ids), **special)
        self.pieces = Pieces(ids)
        self.cleaning, self.splitting = Cleaning(), Splitting()

    def ids(self, text: str) -> list[int]:
        """Return the token ids of a text, without special tokens."""
        lowered = unicodedata.normalize("NFD", text.translate(self.cleaning).lower())
        return [token for word in lowered.translate(self.splitting).split() for token in self.pieces[word]]


def read_documents(lines: Iterable[str], tokenizer: Tokenizer) -> list[Document]:
    """Tokenize a text with one sentence a line and a blank line between documents."""
    documents: list[list[list[int]]] = [[]]
    for line in lines:
        line = line.strip()
        if not line:
            documents.append([])
        elif ids := tokenizer.ids(line):
            documents[-1].append(ids)
    return [document for document in documents if document]
