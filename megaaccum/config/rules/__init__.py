"""The rules of a configuration, one function each, by subject. config/batch.py has the arithmetic of the batch."""

from __future__ import annotations

from collections.abc import Iterator
from inspect import isfunction
from types import ModuleType

from megaaccum.config.rules import (
    data,
    fp8,
    model,
    moe,
    optimizer,
    parallel,
    pipeline,
    precision,
    sharding,
    step,
    values,
)  # fmt: skip
from megaaccum.config.rules.subject import Rule, Subject
from megaaccum.config.schema import Config

__all__ = ["RULES", "Rule", "Subject", "broken_rules", "data_problems"]


def _rules_of(module: ModuleType) -> Iterator[Rule]:
    """The public functions of a module that take a Subject alone, in the order of their definition."""
    for name, each in vars(module).items():
        if isfunction(each) and each.__module__ == module.__name__ and not name.startswith("_"):
            if list(each.__annotations__) == ["subject", "return"]:
                yield each


_MODULES = (values, model, moe, parallel, pipeline, precision, fp8, sharding, step, optimizer, data)
"""Missing keys first: the order of the messages."""

RULES: tuple[Rule, ...] = tuple(rule for module in _MODULES for rule in _rules_of(module))


def broken_rules(subject: Subject) -> list[str]:
    """One text per broken rule. A rule whose numbers are missing or not positive yields nothing: another one does."""
    return [text for rule in RULES for text in rule(subject)]


def data_problems(config: Config) -> list[str]:
    """One text per broken rule on data keys, for a configuration that is not resolved yet."""
    subject = Subject.from_config(config, written=config, world_size=1)
    return [text for rule in _rules_of(data) for text in rule(subject)]
