"""Verdicts on Megatron's arguments that are neither a key of megaaccum's nor a field of Megatron's model
configuration."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Literal

import yaml

Verdict = Literal["run", "note", "refuse"]
VERDICTS: tuple[Verdict, ...] = ("run", "note", "refuse")


@dataclass(frozen=True, slots=True)
class Listed:
    """Arguments that share a verdict and its reason."""

    title: str
    verdict: Verdict
    why: str
    """The reason, for the reader of a note, a problem or the documentation."""
    instead: str
    """The replacement for a refused argument."""
    names: tuple[str, ...]
    """argparse destinations."""


@cache
def _tables() -> dict:
    text = resources.files("megaaccum.pretrain.interop.megatron").joinpath("verdicts.yaml").read_text(encoding="utf-8")
    return yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))


@cache
def lists() -> tuple[Listed, ...]:
    """Every list, in the order of verdicts.yaml."""
    return tuple(
        Listed(row["title"], verdict, row["why"], row.get("instead", ""), tuple(row["names"].split()))
        for verdict in VERDICTS
        for row in _tables()[verdict]
    )


@cache
def listed() -> dict[str, Listed]:
    """The list of each listed argument, by destination."""
    return {name: row for row in lists() for name in row.names}


def fork_flags() -> dict[str, tuple[str, ...]]:
    """Destinations of Megatron-DeepSpeed's own flags, by kind of value (switch, int, float, str, words)."""
    return {kind: tuple(names.split()) for kind, names in _tables()["fork"].items()}
