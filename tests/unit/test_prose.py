"""README, docs, docstrings, comments and error texts keep to plain words: the worst of the others are found here."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WORDS = {
    r"in front of": "time is before and after",
    r"behind": "time is before and after",
    r"so (many|few)": "this many, or the name of the number",
    r"whoever|nobody|somebody|anybody": "name the reader, the caller, the process",
    r"(comes?|coming) along": "is in the package, is shipped",
    r"(goes|go|going) with": "is for, cannot be used with",
    r"anew": "again",
    r"by (itself|themselves)": "alone, or leave it out",
    r"(is|are|was|were) told": "programs report, log, raise, print; functions are called with",
    r"needs [^.:;,]{3,60}, and [\w ]+ is": "but, where the sentence turns",
}
"""Expression, and what to write instead."""
GENERATED = {"docs/reference/megatron-flags.md"}


def files() -> Iterator[Path]:
    for pattern in ("*.md", "docs/**/*.md", "megaaccum/**/*.py", "tests/**/*.py", "benchmarks/*.py", "docs/*.py"):
        for path in ROOT.glob(pattern):
            if path != Path(__file__) and name_of(path) not in GENERATED:
                yield path


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def problems(path: Path, text: str) -> list[str]:
    found = []
    for number, line in enumerate(text.splitlines(), start=1):
        for expression, instead in WORDS.items():
            if match := re.search(rf"\b({expression})\b", line, re.IGNORECASE):
                found.append(f"{name_of(path)}:{number}: {match[0]!r}: {instead}")
    if path.suffix == ".py" and "megaaccum" in path.relative_to(ROOT).parts:
        found += [f"{name_of(path)}:{number}: a docstring starts with a verb or a noun" for number in starts(text)]
    return found


def starts(text: str) -> Iterator[int]:
    """Lines of docstrings that start with What."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            doc = ast.get_docstring(node)
            if doc and doc.startswith("What "):
                yield node.body[0].lineno


@pytest.mark.parametrize("path", sorted(files()), ids=name_of)
def test_words(path):
    assert not problems(path, path.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("# the step behind this one", "behind"),
        ('raise ConfigError("needs backend ddp, and backend is fsdp2")', "needs backend ddp, and backend is"),
        ('def f():\n    """What it does."""', "a verb or a noun"),
    ],
)
def test_the_words_are_seen(text, word):
    (problem,) = problems(ROOT / "megaaccum" / "example.py", text)
    assert word in problem
