"""Reading a configuration: a file, overridden by the command line."""

from __future__ import annotations

import os
from collections.abc import Sequence, Set
from functools import partial

from megaaccum.config import batch_ramp
from megaaccum.config.coerce import NotOfType, coerce
from megaaccum.config.keys import all_keys, unmet_need, value
from megaaccum.config.schema import Config
from megaaccum.config.source import COMMAND_LINE, Source, read_command_line, read_text, read_yaml
from megaaccum.errors import ConfigError, raise_problems, shortened

UNREADABLE = "unreadable"
"""The origin of a key whose value could not be read, so that it is not reported as missing too."""

RIVALS: tuple[frozenset[str], ...] = tuple(
    frozenset(group.split())
    for group in (
        "lr_warmup_iters lr_warmup_samples lr_warmup_fraction",
        "lr_decay_iters lr_decay_samples",
        "lr_wsd_decay_iters lr_wsd_decay_samples",
        "bf16 fp16 params_dtype",
        "virtual_pipeline_model_parallel_size num_layers_per_virtual_pipeline_stage pipeline_model_parallel_layout",
        "data_path train_data_path",
        " ".join(batch_ramp.KEYS),
        "total_batch_size global_batch_size",
        "lr_reference_batch_size lr_reference_tokens",
    )
)
"""Groups of keys for one thing: one of them on the command line sets aside the others of a file."""


def load(path: str | os.PathLike[str] | None = None, overrides: Sequence[str] = ()) -> Config:
    """The configuration of a run in megaaccum's own keys, as written: nothing is derived yet (see `resolve`).

    `megaaccum.pretrain.interop.load.load` also reads the flags, scripts and JSON of other programs.

    Args:
        path: a YAML or JSON file of keys (flat, or under their section's name).
        overrides: command-line arguments, which outrank the file.

    Raises:
        ConfigError: with every key that is unknown, repeated or of the wrong type, in both sources.
    """
    sources = [read_yaml(read_text(path), os.path.basename(path))] if path is not None else []
    if overrides:
        sources.append(read_command_line(overrides))
    config, problems = assemble(sources)
    raise_problems(problems)
    return config


def assemble(sources: Sequence[Source]) -> tuple[Config, list[str]]:
    """The configuration of the sources, of which the last one outranks the others, and their problems."""
    config = Config()
    problems: list[str] = []
    for source in sources:
        problems += source.problems
        problems += [unknown.problem() for unknown in source.unknown[: ConfigError.MOST_SHOWN]]
        if (more := len(source.unknown) - ConfigError.MOST_SHOWN) > 0:
            problems.append(f"{source.name}: {more} unknown keys more.")
        config.notes += source.notes
        problems += _apply(config, source)
        if source.name == COMMAND_LINE:
            _set_aside(config, source.values.keys())
    return config, problems


def _apply(config: Config, source: Source) -> list[str]:
    problems = []
    for name, written in source.values.items():
        key = all_keys()[name]
        try:
            typed = coerce(written, key.annotation)
        except NotOfType as error:
            config.origin[name] = UNREADABLE
            problems.append(f"{source.places[name]}: {name} must be {error}, not {shortened(repr(written), 80)}.")
        else:
            setattr(getattr(config, key.section), name, typed)
            config.origin[name] = source.name
    return problems


def _set_aside(config: Config, written: Set[str]) -> None:
    """Put keys of a file back for which the command line gives others, or which have no effect with what it gives."""
    givers = {name: name for name in written}
    for group in RIVALS:
        for loser in (group - written) & config.origin.keys() if group & written else ():
            givers[loser] = min(group & written)
            reset(config, loser)  # before what needs it is looked for
    needs = {key: unmet_need(key, partial(value, config)).partition(" ")[0] for key in config.origin.keys() - written}
    givers |= {key: givers[needed] for key, needed in needs.items() if needed in givers}
    for loser in sorted(givers.keys() - written):
        reset(config, loser)
        config.notes.append(f"{loser} of the file is set aside: the command line gives {givers[loser]}.")


def reset(config: Config, name: str) -> None:
    """Put a key back to its default, as if it had not been written."""
    section = getattr(config, all_keys()[name].section)
    setattr(section, name, getattr(type(section)(), name))
    config.origin.pop(name, None)


def given(config: Config, name: str) -> bool:
    """Whether this key was written: `load` read it, or its value in a Config built in code is not the default."""
    section = getattr(config, all_keys()[name].section)
    return name in config.origin or bool(getattr(section, name) != getattr(type(section)(), name))
