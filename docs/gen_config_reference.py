"""Writes docs/reference/configuration.md, every key, from the docstrings of the configuration's dataclasses.

python docs/gen_config_reference.py          writes the file
python docs/gen_config_reference.py --check  exits with 1 if the file is not what would be written
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

from megaaccum.cli.keys import field_docs, type_name
from megaaccum.config.facts import Facts
from megaaccum.config.keys import ALIASES, SECTIONS, Key, all_keys, choices

PAGE = Path(__file__).parent / "reference" / "configuration.md"

HEAD = """\
# Configuration

<!-- Written by docs/gen_config_reference.py from megaaccum/config/schema/. Change that, then run it. -->

A configuration is a YAML (or JSON) file of the keys below, flat or under the name of their section; a file of Megatron
flags is read as well, and a script that holds them is recorded while it runs (`--record -- bash train.sh`). Names are
Megatron-LM's where it has one.

```yaml
model:
  num_layers: 4        # under its section ...
lr: 2.0e-3             # ... or flat
deepspeed: ds.json     # a DeepSpeed JSON beside this file, or its keys as a block
```

Any key can be given on the command line too, where it outranks the file: `--lr 1e-4`, `--lr=1e-4`, `--bf16`,
`--no-bf16`, with dashes or underscores. Without a file `--num_layers` begins a run in these keys; with `--num-layers`,
in Megatron's spelling, the line is [a run of Megatron's](../migrating/megatron-lm.md#flags) and has its defaults.

`megaaccum check CONFIG` prints what becomes of it all, or every error at once.

## How the batch follows

```
device_batch_size = micro_batch_size * pp_microbatches
num_microbatches  = grad_accum_steps * pp_microbatches
global_batch_size = device_batch_size * grad_accum_steps * data_parallel_size
data_parallel_size = world / (tensor * context * pipeline_model_parallel_size)
```

Give any of the five sizes that are keys; the others follow. What they leave open is `micro_batch_size: 1`, one
accumulation step, and as many chunks as the rest asks for. Sizes of one file that contradict each other are an error.

A size on the command line outranks sizes in the file: `device_batch_size`, `grad_accum_steps` and `global_batch_size`
say how large the batch is, and of the file's sizes those are kept that still fit, `micro_batch_size` first;
`micro_batch_size` and `pp_microbatches` alone say how it is cut, and the file's `global_batch_size` stays. `check`
reports which were recomputed.

## The DeepSpeed block

What a DeepSpeed JSON says about batch, precision, clipping, ZeRO, optimizer and scheduler is taken over where no key
says it, and must agree where one does; `"auto"` leaves it to the key. Clipping and precision of which it says nothing
are DeepSpeed's defaults, none and FP32, with a note. Keys that cannot be honoured are errors that name what to write
instead. A file that `convert`, `train --record` or `plan --write` writes has all this as keys, and in the block what no
key holds. `megaaccum check CONFIG --json` prints what DeepSpeed is given in the end.

"""


def page() -> str:
    """The whole page as text."""
    docs = field_docs()
    sections = [_section(name, cls, docs[cls.__name__]) for name, cls in SECTIONS.items()]
    return HEAD + "\n".join(sections) + "\n" + _aliases()


def _section(name: str, cls: type, docs: dict[str, str]) -> str:
    rows = [_row(field, all_keys()[field.name], docs[field.name]) for field in dataclasses.fields(cls)]
    about = (cls.__doc__ or "").splitlines()[0]
    return "\n".join(
        [f"## `{name}`", "", about, "", "| key | type | default | meaning |", "| --- | --- | --- | --- |", *rows, ""]
    )


def _row(field: dataclasses.Field, key: Key, doc: str) -> str:
    values = [_type(key.name, key.annotation), key.facts.range]
    cells = [f"`{field.name}`", ", ".join(filter(None, values)), _default(field, key.facts), " ".join(doc.split())]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _type(name: str, annotation: object) -> str:
    """`Literal['a', 'b'] | None` as 'a, b'; other types by Python's name. The default says what None means."""
    if words := choices(name):
        return ", ".join(f"`{word}`" for word in words)
    return f"`{type_name(annotation)}`"


def _default(field: dataclasses.Field, facts: Facts) -> str:
    if facts.required:
        return "required"
    value = field.default
    if field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    return "derived, or none" if value is None else f"`{value}`"


def _aliases() -> str:
    rows = [f"| `{alias}` | `{key}` |" for alias, key in ALIASES.items()]
    return "\n".join(["## Other names", "", "| also written | key |", "| --- | --- |", *rows, ""])


def main(argv: list[str]) -> int:
    """Write the page, or with --check only compare it."""
    text = page()
    if "--check" in argv:
        return 0 if PAGE.exists() and PAGE.read_text(encoding="utf-8") == text else 1
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
