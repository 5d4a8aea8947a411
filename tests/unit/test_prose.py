"""README, docs, docstrings, comments and error texts are written as the field writes; other phrases are found here.

No file has a phrase of `FORBIDDEN`. Those of `REWRITTEN`, `OPENINGS` and `CONDITIONS` are being removed: a room has at
most the number that `ALLOWED` names, any other room none. `ALLOWED = {}` is the end state."""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FORBIDDEN = {
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
REWRITTEN = {
    r"(is|are) said to": "name who says it, or state the fact",
    r"(has|have) to say": "reports",
    r"comes? with": "has, returns, includes",
    r"goes on": "continues, resumes",
    r"stands? for": "is, means, replaces",
    r"has [\d,]+ [\w -]+, and (the|this|its|their) [\w -]+ (says?|is|are|has) ": "but, where the sentence turns",
    r"by whose": "two sentences",
    r"in what else": "name the things",
    r"with what to": "and how to",
    r"(brings?|brought) the": "installs, passes, carries",
    r"(one |the |that )?big batch('s)?": "the full global batch",
    r"nothing else (would|will) tell": "only this reveals it",
    r"(is|are) (looked|waited) (at|for) apart": "separately",
    r"as many times": "name the sum",
    r"takes? up": "loads, continues from",
    r"(is|are) the user's own": "the user provides",
}
"""Expression, and what to write instead."""
OPENINGS = r"(Of|Those|That (of|which)|The same (of|as)|As|In words|(On|In|By|To|From|With) wh(at|ich|ose)|What|Where) "
"""The first words of a docstring without a subject. A docstring begins with a verb or a noun phrase."""
CONDITIONS = r"(^|[.:;] )Where [^.:;|?]{3,90}, "
"""A sentence of a page or a docstring that begins with Where and means if or when."""
ALLOWED: dict[str, int] = {}
"""The most that a room has of REWRITTEN, OPENINGS and CONDITIONS together: none."""
GENERATED = {"docs/reference/megatron-flags.md"}
HISTORY = {"CHANGELOG.md"}
"""Pages whose older entries stay as they were written."""


def files() -> Iterator[Path]:
    patterns = ("*.md", "docs/**/*.md", "megaaccum/**/*.py", "tests/**/*.py", "benchmarks/*.py", "docs/*.py")
    for pattern in (*patterns, "examples/*.py"):
        for path in ROOT.glob(pattern):
            if path != Path(__file__) and name_of(path) not in GENERATED:
                yield path


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def room_of(path: Path) -> str:
    """The folder that an allowance is for, as megaaccum/step, megaaccum/pretrain/data, docs/guides, tests/unit. A page
    of the root is its own room."""
    parts = path.relative_to(ROOT).parts
    depth = 3 if parts[:2] in {("megaaccum", "pretrain"), ("megaaccum", "lab")} else 2
    return "/".join(parts[: min(depth, len(parts) - 1)]) or parts[0]


def problems(path: Path, text: str, words: dict[str, str] = FORBIDDEN) -> list[str]:
    """Each use of `words` in a file: where it is, and what to write instead."""
    found = []
    some = re.search(rf"\b(?:{'|'.join(words)})\b", text, re.IGNORECASE | re.MULTILINE)  # most files have none
    for number, line in enumerate(text.splitlines() if some else (), start=1):
        for expression, instead in words.items():
            if match := re.search(rf"\b({expression})\b", line, re.IGNORECASE):
                found.append(f"{name_of(path)}:{number}: {match[0]!r}: {instead}")
    return found


def unfinished(path: Path, text: str) -> list[str]:
    """What a file has of REWRITTEN, OPENINGS and CONDITIONS."""
    if name_of(path) in HISTORY:
        return []
    found = problems(path, text, REWRITTEN)
    docs = list(docstrings(text)) if path.suffix == ".py" else []
    for number, doc in docs:
        if match := re.match(OPENINGS, doc):
            found.append(f"{name_of(path)}:{number}: {match[0]!r}: a docstring begins with a verb or a noun phrase")
    for number, paragraph in docs or ([(1, text)] if path.suffix == ".md" else []):
        for match in re.finditer(CONDITIONS, paragraph, re.MULTILINE):
            line = number + paragraph[: match.start()].count("\n")
            found.append(f"{name_of(path)}:{line}: {match[0]!r}: if, or when")
    return found


def docstrings(text: str) -> Iterator[tuple[int, str]]:
    """(line, text) of the docstrings of a module's classes, functions and attributes."""
    nodes: list[ast.AST] = [ast.parse(text)]
    for node in nodes:  # which grows; expressions, nine tenths of a file, have no statements in them
        nodes += (child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.expr))
        for statement in getattr(node, "body", []):
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                if isinstance(statement.value.value, str):
                    yield statement.lineno, statement.value.value


@pytest.mark.parametrize("path", sorted(files()), ids=name_of)
def test_words(path):
    assert not problems(path, path.read_text(encoding="utf-8"))


@cache  # each process of `make test` collects this file, and one runs it
def found_by_room() -> dict[str, list[str]]:
    rooms = defaultdict(list)
    for path in sorted(files()):
        rooms[room_of(path)] += unfinished(path, path.read_text(encoding="utf-8"))
    return rooms


ROOMS = sorted({room_of(path) for path in files()})


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_has_no_more_than_it_is_allowed(room):
    found = found_by_room()[room]
    assert len(found) <= ALLOWED.get(room, 0), "\n".join(found)


def test_every_allowance_is_of_a_room():
    assert not ALLOWED.keys() - set(ROOMS)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("# the step behind this one", "behind"),
        ('raise ConfigError("needs backend ddp, and backend is fsdp2")', "needs backend ddp, and backend is"),
    ],
)
def test_the_words_are_seen(text, word):
    (problem,) = problems(ROOT / "megaaccum" / "example.py", text)
    assert word in problem


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ('"""What it does."""', "a verb or a noun"),
        ('def f():\n    """Of the plan."""', "a verb or a noun"),
        ('class C:\n    x: int\n    """By which it is found."""', "a verb or a noun"),
        ('"""A step.\n\nWhere it fails, ranks wait.\n"""', "if, or when"),
        ('raise E("the tp group has 2 ranks, and the plan says 4")', "but"),
        ("# equals the step on the one big batch", "full global batch"),
        ("# a run that goes on after a step", "resumes"),
    ],
)
def test_what_is_rewritten_is_seen(text, word):
    (problem,) = unfinished(ROOT / "megaaccum" / "example.py", text)
    assert word in problem


if __name__ == "__main__":  # python -m tests.unit.test_prose: ALLOWED as the tree is; with names of rooms: the places
    for name in sys.argv[1:]:
        print("\n".join(found_by_room()[name]))
    if not sys.argv[1:]:
        print("\n".join(f'    "{room}": {len(found)},' for room, found in sorted(found_by_room().items()) if found))
