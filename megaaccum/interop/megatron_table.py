"""The table of Megatron's flags (megatron_flags.yaml): the form of each, and what megaaccum does with it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Literal

import yaml

Treatment = Literal["mapped", "rule", "ignored", "refused"]

_LINE = re.compile(
    r"(?P<names>--[\w-]+(?:/--[\w-]+)*)"
    r"(?: (?P<kind>int|float|str|bool|onoff)(?P<count>[?+*]?))?"
    r"(?: =(?P<default>\S+))?"
    r"(?: -> (?P<sets>\w+(?:=\w+)?(?:, \w+=\w+)*))?"
)


@dataclass(frozen=True, slots=True)
class Family:
    """Flags that megaaccum treats alike, for one reason."""

    title: str
    treatment: Treatment
    """mapped: sets keys; rule: megatron_rules.py decides; ignored: no effect; refused: a problem."""
    why: str = ""
    """The reason, for the reader of a note, a problem or the documentation."""
    instead: str = ""
    """What to write in place of a refused flag."""
    flags: list[Flag] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag as Megatron-LM or Megatron-DeepSpeed reads it."""

    names: tuple[str, ...]
    """As the parser spells them; of an on/off flag the second is the negation."""
    kind: Literal["switch", "onoff", "int", "float", "str", "bool"]
    count: Literal["none", "one", "?", "+", "*"]
    """How many values follow: '?' is none or one, '+' one or more, '*' any number."""
    default: str | None
    """Megatron's value where the flag is not given, for refused flags."""
    sets: tuple[tuple[str, str | None], ...]
    """Keys that a mapped flag sets, each with its constant, or None for the flag's own value."""
    family: Family

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def treatment(self) -> Treatment:
        return self.family.treatment


def spelling(name: str) -> str:
    """The form in which flags are looked up: dashes, no underscores (`--deepspeed_config`, `--local_rank`)."""
    return "--" + name.removeprefix("--").replace("_", "-")


@cache
def families() -> tuple[Family, ...]:
    """Every family, in the table's order."""
    text = resources.files("megaaccum.interop").joinpath("megatron_flags.yaml").read_text(encoding="utf-8")
    # The C loader is ten times as fast (7 ms), and PyYAML's wheels have it.
    return tuple(_family(row) for row in yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)))


@cache
def flags() -> dict[str, Flag]:
    """Every flag by each of its names, as `spelling` gives it."""
    table: dict[str, Flag] = {}
    for family in families():
        for flag in family.flags:
            for name in dict.fromkeys(map(spelling, flag.names)):
                assert name not in table, f"{name} is in the table twice"
                table[name] = flag
    return table


def _family(row: dict[str, str]) -> Family:
    family = Family(row["family"], row["treatment"], row.get("why", ""), row.get("instead", ""))  # type: ignore[arg-type]
    family.flags.extend(_flag(line, family) for line in row["flags"].splitlines())
    return family


def _flag(line: str, family: Family) -> Flag:
    match = _LINE.fullmatch(line.strip())
    assert match, f"not a line of the table: {line!r}"
    kind = match["kind"] or "switch"
    count = "none" if kind in ("switch", "onoff") else match["count"] or "one"
    pairs = [pair.partition("=") for pair in (match["sets"] or "").split(", ") if pair]
    sets = tuple((key, value if equals else None) for key, equals, value in pairs)
    return Flag(tuple(match["names"].split("/")), kind, count, match["default"], sets, family)  # type: ignore[arg-type]


# --- the page of the documentation ----------------------------------------------------------------------------------

_INTRODUCTION = """\
# Megatron flags

`megaaccum train CONFIG` also takes a file with the flags of Megatron-LM or Megatron-DeepSpeed: one or many per line,
or the shell script that you start training with, which is read and not executed. Flags on the command line work too.
Nothing is dropped in silence: each flag sets a key, is accepted without effect for the reason given here, or is a
problem that says what to write instead. A refused flag is accepted when it only repeats Megatron's default. megaaccum's
own keys can stand among the flags (`--grad-accum-steps 8`, `--schedule interleaved`).

This page is made from `megaaccum/config/megatron_flags.yaml` by
`python -m megaaccum.interop.megatron_table > docs/megatron-flags.md`.
"""

_HEADINGS: dict[Treatment, str] = {
    "mapped": "Flags that set a key",
    "rule": "Flags that work together",
    "ignored": "Accepted without effect",
    "refused": "Refused",
}


def as_markdown() -> str:
    """The page docs/megatron-flags.md."""
    parts = [_INTRODUCTION]
    for treatment, heading in _HEADINGS.items():
        parts.append(f"\n## {heading}\n")
        for family in families():
            if family.treatment == treatment:
                parts.append(_section(family))
    return "".join(parts)


def _section(family: Family) -> str:
    reason = f"{family.why[:1].upper()}{family.why[1:]}".rstrip(".") + "." if family.why else ""
    if family.instead:
        reason += f" Instead: {family.instead}."
    text = f"\n### {family.title}\n\n" + (f"{reason}\n\n" if reason else "")
    if family.treatment != "mapped":
        return text + ", ".join(f"`{' '.join(flag.names)}`" for flag in family.flags) + "\n"
    rows = [f"| `{' '.join(flag.names)}` | {_assignments(flag)} |\n" for flag in family.flags]
    return text + "| flag | key |\n| --- | --- |\n" + "".join(rows)


def _assignments(flag: Flag) -> str:
    return ", ".join(f"`{key}`" if value is None else f"`{key}: {value}`" for key, value in flag.sets)


if __name__ == "__main__":
    print(as_markdown(), end="")
