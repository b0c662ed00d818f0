"""The embedded texts of size `mini`, which every CPython ships, as documents of sentences."""

import ast
import pydoc_data.topics
import re
import sys
import sysconfig
import unicodedata
from collections.abc import Callable
from pathlib import Path

HELD_OUT_FRACTION = 0.05  # of the documents, where a corpus has no evaluation set of its own
MIN_PARAGRAPH_CHARACTERS = 20
SENTENCE_END = re.compile(r"(?<=[.!?:])\s+(?=[A-Z\"'(*`])")
NOT_PROSE = ("test", "idlelib", "site-packages", "lib2to3", "turtledemo")
COLUMN = 16  # characters of a column of Unicode's charts


def standard_library_docstrings() -> list[str]:
    """Read the docstrings of the standard library, in the order of file name and line."""
    root = Path(sysconfig.get_path("stdlib"))
    texts = []
    for path in sorted(root.rglob("*.py")):
        if not set(NOT_PROSE).isdisjoint(path.relative_to(root).parts) or "tests" in path.parts:
            continue
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):  # templates, and files for another version of Python
            continue
        documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        nodes = [node for node in ast.walk(tree) if isinstance(node, documented)]
        nodes.sort(key=lambda node: getattr(node, "lineno", 0))
        texts += [text for node in nodes if (text := ast.get_docstring(node))]
    return texts


def documents() -> list[list[str]]:
    """Return the corpus as documents, each a list of sentences; a paragraph appears in one document only."""
    topics = [pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics)]
    seen: set[str] = set()
    corpus = []
    for text in topics + standard_library_docstrings():
        sentences = []
        for paragraph in re.split(r"\n\s*\n", text):
            words = " ".join(paragraph.split())
            if (
                len(words) < MIN_PARAGRAPH_CHARACTERS
                or words in seen
                or not any(character.isalpha() for character in words)
            ):
                continue
            seen.add(words)
            sentences += SENTENCE_END.split(words)
        if sentences:
            corpus.append(sentences)
    return corpus


def unicode_data() -> list[list[str]]:
    """Return the characters of Unicode 3.2: a document is a column of the charts, a sentence one character.

    A line has the name, the category, the combining class, the direction, and whether it is mirrored, as in
    the file UnicodeData. A name never changes, and every CPython has this version beside its own, so the text
    is always the same. No name stands in two documents.
    """
    database, columns = unicodedata.ucd_3_2_0, []
    for first in range(0, sys.maxunicode + 1, COLUMN):
        lines = []
        for character in map(chr, range(first, first + COLUMN)):
            if name := database.name(character, ""):
                category, direction = database.category(character), database.bidirectional(character)
                mirrored = "Y" if database.mirrored(character) else "N"
                lines.append(f"{name};{category};{database.combining(character)};{direction};{mirrored}")
        if lines:
            columns.append(lines)
    return columns


# by `data.corpus`
CORPORA: dict[str, Callable[[], list[list[str]]]] = {"python": documents, "unicode": unicode_data}
