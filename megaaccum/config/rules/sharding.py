"""Rules of who holds and sums what: the boundary, its policy, and the order of sums."""

from __future__ import annotations

from collections.abc import Iterator

from megaaccum.config.rules.subject import Rule, Subject


def streaming(subject: Subject) -> Iterator[str]:
    """Layers can come and go only where each rank holds a part of every parameter: at ZeRO-3."""
    sharding = subject.sharding
    if sharding.sync != "streaming":
        if sharding.max_live_parameters:
            yield (
                f"max_live_parameters {sharding.max_live_parameters} says what sync streaming keeps gathered, and sync"
                f" is {sharding.sync}, which keeps everything: set sync to streaming, or leave max_live_parameters out."
            )
        return
    if sharding.boundary == "deepspeed" and sharding.zero_stage != 3:
        yield (
            f"sync streaming gathers parameters layer by layer, and at zero_stage {sharding.zero_stage} every rank"
            " holds them whole: set zero_stage to 3, or sync to resident."
        )


def deterministic(subject: Subject) -> Iterator[str]:
    """Sums in rank order are made by megaaccum itself, where it hands DeepSpeed finished partitions: at ZeRO-3."""
    sharding = subject.sharding
    if sharding.deterministic and sharding.boundary == "deepspeed" and sharding.zero_stage != 3:
        yield (
            f"deterministic needs zero_stage 3, as DeepSpeed itself sums at zero_stage {sharding.zero_stage}: set"
            " zero_stage to 3, or deterministic to false."
        )


RULES: tuple[Rule, ...] = (streaming, deterministic)
