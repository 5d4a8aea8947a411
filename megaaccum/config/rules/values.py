"""Keys that must be there, and numbers out of range."""

from __future__ import annotations

from collections.abc import Iterator

from megaaccum.config.keys import all_keys, names_where, value
from megaaccum.config.load import UNREADABLE
from megaaccum.config.rules.subject import Rule, Subject


def required(subject: Subject) -> Iterator[str]:
    """Keys without which there is no model and no training."""
    for name in names_where(lambda facts: facts.required):
        number, facts = value(subject.config, name), all_keys()[name].facts
        if subject.own_model and name != "seq_length":
            continue
        if subject.written.origin.get(name) == UNREADABLE or (isinstance(number, int | float) and facts.allow(number)):
            continue
        if name in subject.given(name):
            yield f"{name} is {number}: it must be {facts.range}."
        else:
            yield f"{name} is required; add it to the file, or give --{name} on the command line."


def ranges(subject: Subject) -> Iterator[str]:
    """Numbers that make no sense whatever the others are."""
    for name in names_where(lambda facts: facts.range and not facts.required):
        # A value derived from a missing key would only repeat that it is missing.
        number, facts = value(subject.config, name) if subject.given(name) else None, all_keys()[name].facts
        if number is not None and not facts.allow(number):
            yield f"{name} is {number}: it must be {facts.range}."


def world_size(subject: Subject) -> Iterator[str]:
    """A run has ranks."""
    if subject.world_size < 1:
        yield f"the run has {subject.world_size} ranks: it needs at least 1."


RULES: tuple[Rule, ...] = (required, ranges, world_size)
