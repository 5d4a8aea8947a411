"""The rules that a configuration has to keep, one function each, by subject. Batch arithmetic is config/batch.py's."""

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
)
from megaaccum.config.rules.subject import Rule, Subject

RULES: tuple[Rule, ...] = (
    *values.RULES,
    *model.RULES,
    *moe.RULES,
    *parallel.RULES,
    *pipeline.RULES,
    *precision.RULES,
    *fp8.RULES,
    *sharding.RULES,
    *step.RULES,
    *optimizer.RULES,
    *data.RULES,
)
"""Every rule, in the order in which a reader wants to hear of them: what is missing first."""


def broken_rules(subject: Subject) -> list[str]:
    """One text per broken rule. A rule whose numbers are missing or not positive stays silent: another speaks."""
    return [text for rule in RULES for text in rule(subject)]


__all__ = ["RULES", "Rule", "Subject", "broken_rules"]
