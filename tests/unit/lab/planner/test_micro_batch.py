"""The micro-batch of a plan that leaves it open: the fastest predicted of those that fit."""

from __future__ import annotations

import pytest

from megaaccum.errors import ConfigError
from megaaccum.lab.planner import auto_schedule, expected, sync_mode
from megaaccum.pretrain.model.layers import Layers
from megaaccum.units import GIB
from tests.support.check import run
from tests.support.configs import plan

OPEN = dict(
    vocab_size=1000, reduce_bucket_size=1000, num_layers=8, hidden_size=512, seq_length=512, micro_batch_size=None,
    pp_microbatches=None, global_batch_size=64, bf16=True, sync="resident",
)  # fmt: skip
PP2 = dict(pipeline_model_parallel_size=2)


def of(world_size: int = 2, **keys: object):
    return plan(world_size, **(OPEN | keys))


def held(made) -> float:
    """GiB."""
    return sync_mode.Forecast(made, 1000).predict(made.config.sharding).held / GIB


def test_without_a_limit_it_is_one_sequence_and_the_note_says_why() -> None:
    settled = auto_schedule.choose_micro_batch(of())
    assert settled.batch.micro_batch_size == 1
    assert "micro_batch_size 1: none is given, and no limit of memory is known" in settled.notes[-1]


@pytest.mark.parametrize("layout", [{}, PP2], ids=["no pipeline", "pipeline"])
def test_it_is_the_fastest_of_those_that_fit(layout) -> None:
    sizes = (1, 2, 4, 8, 16, 32)
    plans = {size: of(micro_batch_size=size, **layout) for size in sizes if size * 2 * 2 <= 64 or not layout}
    seconds = {size: expected.seconds(each, 1000, None, auto_schedule.PRICED_ON) for size, each in plans.items()}
    for limit in (1.01 * held(plans[1]), 1.01 * held(plans[4]), 100.0):
        settled = auto_schedule.choose_micro_batch(of(memory_gib=limit, **layout))
        fitting = [size for size, each in plans.items() if held(each) <= limit]
        assert settled.batch.micro_batch_size == min(fitting, key=seconds.__getitem__)
        assert settled.batch.global_batch_size == 64
        assert held(settled) <= limit
        assert f"of those that fit, {', '.join(map(str, fitting))}" in settled.notes[-1]
    tight = auto_schedule.choose_micro_batch(of(memory_gib=1.01 * held(plans[4]), **layout))
    assert tight.batch.micro_batch_size <= 4
    assert "8 would not fit" in tight.notes[-1]
    assert "Seconds are those on a100_80, whichever GPU runs it: set micro_batch_size where" in tight.notes[-1]


def test_what_fits_depends_on_the_layers_that_run() -> None:
    """At 1.5 GiB: with 8 sequences of 512 tokens, scores that are kept take another GiB."""
    kept, fused = (Layers(impl="local", fused_attention=each) for each in (False, True))
    given, free = of(micro_batch_size=8, memory_gib=1.5), of(memory_gib=1.5)
    assert auto_schedule.choose_micro_batch(given, layers=fused).batch.micro_batch_size == 8
    with pytest.raises(ConfigError, match="lower micro_batch_size"):
        auto_schedule.choose_micro_batch(given, layers=kept)
    most = [auto_schedule.choose_micro_batch(free, layers=each).notes[-1] for each in (kept, fused)]
    assert "8 would not fit" in most[0] and "8 would not fit" not in most[1]


def test_the_memory_of_the_device_is_a_limit_too() -> None:
    assert auto_schedule.choose_micro_batch(of(), 80 * GIB).batch.micro_batch_size > 1


def test_what_is_given_stays() -> None:
    given = [dict(micro_batch_size=1), dict(device_batch_size=4, pp_microbatches=2), dict(reproducible="layout")]
    for keys in given:
        before = of(memory_gib=100.0, **keys)
        assert auto_schedule.choose_micro_batch(before).batch == before.batch


def test_the_batches_of_a_ramp_stay() -> None:
    """Batches of 6 and 10 sequences on 2 ranks leave a micro-batch of 1."""
    ramped = of(memory_gib=100.0, global_batch_size=30, rampup_batch_size=[6, 4, 600])
    settled = auto_schedule.choose_micro_batch(ramped)
    assert settled.ramp.intervals == ramped.ramp.intervals
    assert settled.batch.micro_batch_size == 1


def test_where_not_even_one_fits_the_error_is_that_of_the_sync_mode() -> None:
    with pytest.raises(ConfigError, match="lower micro_batch_size"):
        auto_schedule.choose_micro_batch(of(memory_gib=0.001))


def test_check_prints_it() -> None:
    words = [word for key, value in (OPEN | dict(num_attention_heads=8, lr=1e-3, train_iters=10)).items()
             if value is not None for word in (f"--{key}", str(value))]  # fmt: skip
    text = run(None, [*words, "--memory_gib", "100"])
    assert "micro_batch_size 1 *" not in text
    assert "the fastest predicted of those that fit" in text
