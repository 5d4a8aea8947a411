"""The page docs/reference/megatron-flags.md: what becomes of every argument of Megatron-LM and Megatron-DeepSpeed.

python -m megaaccum.pretrain.interop.megatron.page > docs/reference/megatron-flags.md
"""

from __future__ import annotations

from megaaccum.pretrain.interop.megatron.keys import CONSTANTS, RENAMED, verdict_of
from megaaccum.pretrain.interop.megatron.parser import parser
from megaaccum.pretrain.interop.megatron.verdicts import lists

_INTRODUCTION = """\
# Megatron flags

Flags of Megatron-LM and Megatron-DeepSpeed are read by Megatron's own parser (`megatron.training.arguments` of the
installed megatron-core) and checked by its `validate_args`. Nothing is dropped in silence: an argument is a key of
megaaccum's, or a field of Megatron's model configuration that reaches Megatron's builder as it is, or is in one of
three lists: it runs, it runs with a note, or it is refused with what to write instead. A refused argument is accepted
when it only repeats Megatron's default.

This page is made by `python -m megaaccum.pretrain.interop.megatron.page > docs/reference/megatron-flags.md`.
"""

_HEADINGS = {"run": "Run", "note": "Run with a note", "refuse": "Refused"}


def as_markdown() -> str:
    """The page."""
    options: dict[str, list[str]] = {}
    for action in parser()._actions:
        options.setdefault(action.dest, []).extend(action.option_strings)
    by_verdict: dict[str, list[str]] = {}
    for name in sorted(options):
        by_verdict.setdefault(verdict_of(name), []).append(name)

    def flags(names: list[str] | tuple[str, ...]) -> str:
        return ", ".join(f"`{options[name][0]}`" for name in names)

    same = [name for name in by_verdict["key"] if name not in RENAMED and name not in CONSTANTS]
    parts = [_INTRODUCTION, "\n## Keys of megaaccum's\n\nUnder the same name:\n\n", flags(same), "\n\n"]
    parts += ["| flag | key |\n| --- | --- |\n"]
    parts += [f"| {flags([name])} | `{key}` |\n" for name, key in sorted(RENAMED.items())]
    parts += [f"| {flags([name])} | `{key}: {value}` |\n" for name, (key, value) in sorted(CONSTANTS.items())]
    parts += ["\nTogether with other flags, by a rule:\n\n", flags(by_verdict["rule"]), "\n"]
    parts += ["\n## Fields of Megatron's model configuration\n\nAlso in a YAML file, under `model:`.\n\n"]
    parts += [flags(by_verdict["model"]), "\n"]
    for verdict, heading in _HEADINGS.items():
        parts.append(f"\n## {heading}\n")
        for row in lists():
            if row.verdict == verdict:
                instead = f" Instead: {row.instead}." if row.instead else ""
                parts.append(
                    f"\n### {row.title}\n\n{row.why[:1].upper()}{row.why[1:]}.{instead}\n\n{flags(row.names)}\n"
                )
    return "".join(parts)


if __name__ == "__main__":
    print(as_markdown(), end="")
