"""`megaaccum keys [NAME]`: the keys of a configuration by section, or all that is known of one of them."""

from __future__ import annotations

import ast
import dataclasses
import textwrap
import typing
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from megaaccum.config import schema
from megaaccum.config.keys import ALIASES, SECTIONS, all_keys, canonical, choices
from megaaccum.config.source import nearest_keys
from megaaccum.errors import ConfigError


def main(argv: Sequence[str]) -> int:
    """Print the list, or the keys or sections that are named. Raises ConfigError for a name that is neither."""
    if any(word in ("-h", "--help") for word in argv):
        print("usage: megaaccum keys [NAME ...]\n\n" + (__doc__ or "").strip())
        return 0
    print("\n\n".join(map(describe, argv)) if argv else listing())
    return 0


def listing() -> str:
    """The names of all keys, by section."""
    told = "`megaaccum keys NAME` says what a key means; --no-NAME sets a boolean to false."
    return "\n".join([*map(_section, SECTIONS), "", told])


def _section(name: str) -> str:
    return f"{name}:\n" + _wrapped(" ".join(field.name for field in dataclasses.fields(SECTIONS[name])))


def describe(written: str) -> str:
    """A key's section, values, default, other names and meaning; of a section, its keys."""
    if written in SECTIONS and canonical(written) is None:
        return _section(written)
    if (name := canonical(written.removeprefix("--"))) is None:
        raise ConfigError(f"there is no key {written}{nearest_keys(written)}: `megaaccum keys` lists them.")
    key = all_keys()[name]
    cls = SECTIONS[key.section]
    field = next(each for each in dataclasses.fields(cls) if each.name == name)
    default = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
    facts = {
        "section": key.section,
        "values": ", ".join(filter(None, [" | ".join(choices(name)) or type_name(key.annotation), key.facts.range])),
        "default": "required" if key.facts.required else "derived, or none" if default is None else str(default),
        "also": ", ".join(alias for alias, of in ALIASES.items() if of == name),
        "needs": key.facts.needs,
    }
    shown = [f"  {title:<9}{text}" for title, text in facts.items() if text]
    meaning = " ".join(field_docs()[cls.__name__][name].split())
    return "\n".join([name, *shown, _wrapped(meaning)])


def _wrapped(text: str) -> str:
    return textwrap.fill(text, 100, initial_indent="  ", subsequent_indent="  ")


def type_name(annotation: object) -> str:
    """The type of a key's values: 'int', 'list[int]', without the None of one that is derived."""
    text = annotation.__name__ if isinstance(annotation, type) and not typing.get_args(annotation) else str(annotation)
    return text.removesuffix(" | None")


@cache
def field_docs() -> dict[str, dict[str, str]]:
    """The text under each field of the schema's classes, by class and field."""
    docs: dict[str, dict[str, str]] = {}
    for path in sorted(Path(schema.__file__).parent.glob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                docs[node.name] = {
                    field.target.id: str(text.value.value)
                    for field, text in zip(node.body, node.body[1:], strict=False)
                    if isinstance(field, ast.AnnAssign)
                    and isinstance(field.target, ast.Name)
                    and isinstance(text, ast.Expr)
                    and isinstance(text.value, ast.Constant)
                }
    return docs
