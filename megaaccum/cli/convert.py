"""`megaaccum convert`: write the configuration that Megatron's flags, a recorded script or a YAML file make, as YAML in
megaaccum's keys, with what was noted as comments.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

import yaml

from megaaccum.cli.arguments import command_parser, read_source
from megaaccum.config.schema import Config
from megaaccum.errors import ConfigError, printable
from megaaccum.lab.planner.layout_config import as_sections

_USAGE = """megaaccum convert FLAGS_FILE [--key value ...] > run.yaml
       megaaccum convert --record [--key value ...] -- bash train.sh ARGUMENTS > run.yaml"""


def main(argv: Sequence[str]) -> int:
    """Run `megaaccum convert`; returns the exit code. Raises ConfigError for a source with errors."""
    if not argv or argv[0] in ("-h", "--help"):
        command_parser("convert", __doc__, _USAGE).print_help()
        return 0 if argv else 2
    with read_source(argv).load() as loaded:
        print(as_yaml(loaded.checked(), loaded.name, loaded.world_size), end="")
    return 0


def as_yaml(config: Config, name: str, ranks: int | None = None) -> str:
    """The keys that were written, by section, with the notes as comments."""
    comments = [f"Converted from {name}{'' if ranks is None else f', which starts {ranks} ranks'}.", *config.notes]
    text = "".join(
        textwrap.fill(printable(note), 118, initial_indent="# ", subsequent_indent="#   ") + "\n" for note in comments
    )
    if not (sections := as_sections(config)):
        raise ConfigError(f"{name} has no key of a run: there is nothing to convert")
    return text + yaml.safe_dump(sections, sort_keys=False, default_flow_style=None, width=118)
