"""Mutations of a file's content, drawn from a generator: numbers, words, values of JSON, lines and bytes."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Callable
from typing import Any

NUMBERS = (
    "0", "-1", "1e400", "-1e400", ".nan", "NaN", "Infinity", "9" * 18, "9" * 400, "9" * 5000, "1e-320", "4294967296",
    "9223372036854775808", "0x7fffffff", "1_0", "3.5", "1e18", "''", "null", "true", "1e300",
)  # fmt: skip
TEXTS = (
    "\x1b[31m", "\x1b]0;title\x07", "\\e[2J", '"\\x1b[1m"', "\u202egpj", "\0", "\ufeff", "x" * 100_000, "[" * 5000,
    "{" * 5000, "[" * 5000 + "]" * 5000, '{"a":' * 5000 + "1" + "}" * 5000, "- " * 3000, "? ", "&a [*a, *a]", "*a",
    "<<: *a", "2024-13-45", "!!python/object/apply:os.system [id]", "!!binary x", "!!timestamp 2024-99-99", "%s%n",
    "../../../etc/passwd", "/dev/zero", "/dev/stdin", "-", "--", "--help", "'", '"', "\\", "\n", "\r", "#", ",", ":",
    "{a: [1, {b: 2}]}", "<script>", "$(id)", "\u2028", "\ud83d", "${HOME}", "[[[]]]", "1F0,", "0F99999999", "0B0;",
)  # fmt: skip
MANY = (
    "".join(f"key_{i}: {i}\n" for i in range(30_000)),
    json.dumps({f"key_{i}": i for i in range(30_000)}),
    "\n".join(f"--flag-{i}\n{i}" for i in range(30_000)),
    "a: &a [x, x, x, x, x, x, x, x, x]\n"
    + "".join(f"{b}: &{b} [{', '.join(f'*{a}' for _ in range(9))}]\n" for a, b in itertools.pairwise("abcdefghijk")),
    "\n".join(f"host-{i} slots=8" for i in range(30_000)),
    "\n" * 1_000_000,
)
"""Whole files."""


def mutate(content: bytes, draw: random.Random) -> bytes:
    """One to four mutations of a file's content."""
    for _ in range(draw.choice((1, 1, 2, 4))):
        content = draw.choice(_MUTATIONS)(content, draw)
    return content


def token(draw: random.Random) -> bytes:
    return draw.choice(NUMBERS + TEXTS).encode("utf-8", "surrogatepass")


def _number(content: bytes, draw: random.Random) -> bytes:
    found = list(re.finditer(rb"[0-9][0-9.eE+-]*", content))
    if not found:
        return content
    at = draw.choice(found)
    return content[: at.start()] + draw.choice(NUMBERS).encode() + content[at.end() :]


def _word(content: bytes, draw: random.Random) -> bytes:
    found = list(re.finditer(rb"[A-Za-z_]+", content))
    if not found:
        return content
    at = draw.choice(found)
    return content[: at.start()] + token(draw) + content[at.end() :]


def _value(content: bytes, draw: random.Random) -> bytes:
    """A value anywhere in a JSON text is of another type, or gone."""
    try:
        tree = json.loads(content)
    except (ValueError, RecursionError):
        return _number(content, draw)
    spots: list[tuple[Any, Any]] = []
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        items = list(node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else [])
        spots += [(node, key) for key, _ in items]
        waiting += [each for _, each in items]
    if not spots:
        return content
    node, key = draw.choice(spots)
    if draw.random() < 0.2:
        del node[key]
    else:
        others: list[Any] = [
            None, True, -1, 0, 1.5, 10**18, 10**400, 1e308, "", "x", "\x1b[31m", [], {}, [[]], {"a": 1}, [None],
            float("nan"), "9" * 50, "a" * 10_000,
        ]  # fmt: skip
        node[key] = draw.choice(others)
    return json.dumps(tree).encode()


def _lines(content: bytes, draw: random.Random) -> bytes:
    lines = content.splitlines(keepends=True) or [b""]
    at, other = draw.randrange(len(lines)), draw.randrange(len(lines))
    change = draw.randrange(4)
    if change == 0:
        lines[at], lines[other] = lines[other], lines[at]
    elif change == 1:
        lines.insert(at, lines[other])
    elif change == 2:
        del lines[at]
    else:
        lines.insert(at, token(draw) + b"\n")
    return b"".join(lines)


_MUTATIONS: tuple[Callable[[bytes, random.Random], bytes], ...] = (
    _number, _number, _word, _value, _value, _lines,
    lambda content, draw: content[: draw.randrange(len(content) + 1)],
    lambda content, draw: bytes(b ^ (1 << draw.randrange(8)) if draw.random() < 0.01 else b for b in content[:100_000]),
    lambda content, draw: (lambda at: content[:at] + token(draw) + content[at:])(draw.randrange(len(content) + 1)),
    lambda content, draw: (lambda at: content[:at] + draw.randbytes(8) + content[at + 8 :])(
        draw.randrange(len(content) + 1)
    ),
)  # fmt: skip
