"""Batch warm-up: which batch each step has, against Megatron's own calculator, and what is rounded or refused."""

from __future__ import annotations

import pytest
from megatron.core.num_microbatches_calculator import StepBatchsizeNumMicroBatchesCalculator

from megaaccum.config.batch_ramp import BatchRamp
from megaaccum.errors import ConfigError
from tests.support.configs import plan


def sizes(ramp: BatchRamp, steps: int) -> list[int]:
    """Sequences of each of the first steps, walked one by one."""
    found, consumed = [], 0
    for _ in range(steps):
        found.append(ramp.at(consumed).global_batch_size)
        consumed += found[-1]
    return found


def counts(ramp: BatchRamp, steps: int) -> list[int]:
    consumed, found = 0, []
    for _ in range(steps):
        batch = ramp.at(consumed)
        found.append(batch.grad_accum_steps)
        consumed += batch.global_batch_size
    return found


def test_accumulation_grows_from_an_eighth_in_whole_steps() -> None:
    ramp = plan(pp_microbatches=1, grad_accum_steps=16, batch_warmup_steps=7).ramp
    assert counts(ramp, 9) == [2, 4, 6, 8, 10, 12, 14, 16, 16]
    assert counts(plan(pp_microbatches=1, grad_accum_steps=5, batch_warmup_steps=2).ramp, 4) == [1, 3, 5, 5]


def test_without_warm_up_every_step_has_the_batch() -> None:
    settled = plan(grad_accum_steps=3)
    assert settled.ramp.is_constant
    assert settled.ramp.at(10**9) == settled.batch


@pytest.mark.parametrize("steps", [1, 2, 3, 6, 7, 50])
def test_steps_and_samples_are_one_walk(steps) -> None:
    ramp = plan(pp_microbatches=2, grad_accum_steps=12, batch_warmup_steps=6).ramp
    walked = sizes(ramp, steps)
    assert ramp.samples_after(steps) == sum(walked)
    assert ramp.steps_within(sum(walked)) == steps
    assert ramp.steps_within(sum(walked) - 1) == steps - 1
    assert ramp.num_steps == 6


SCHEDULES = ["0:8 1000:16 3K:64", "0:4, 700:12, 64K:24", "0:64 1M:8 2M:64"]


@pytest.mark.parametrize("text", SCHEDULES)
def test_step_batch_size_schedule_is_megatron_s(text) -> None:
    theirs = StepBatchsizeNumMicroBatchesCalculator(
        micro_batch_size=1, data_parallel_size=4, decrease_batch_size_if_needed=False, rank=1, schedule=text,
        seq_length=64,
    )  # fmt: skip
    ours = plan(4, pp_microbatches=None, step_batch_size_schedule=text, train_iters=10**5)
    assert ours.batch.global_batch_size == theirs.schedule[-1][1]
    consumed = 0
    for _ in range(2000):
        theirs.update(consumed, True)
        batch = ours.ramp.at(consumed)
        assert (batch.global_batch_size, batch.num_microbatches) == (
            theirs.current_global_batch_size,
            theirs.num_micro_batches,
        )
        consumed += batch.global_batch_size


@pytest.mark.parametrize("ramp", [dict(step_batch_size_schedule="0:8 1M:64"), dict(rampup_batch_size=[8, 8, 10**4])])
def test_a_run_may_end_in_the_middle_of_a_ramp(ramp) -> None:
    settled = plan(1, pp_microbatches=None, global_batch_size=64, train_iters=10, **ramp)
    assert settled.ramp.size_at(0) == 8
    assert any("in the middle of the ramp" in note for note in settled.notes)


def rampup(start: int, increment: int, samples: int, size: int, consumed: int) -> int:
    """Megatron-LM's batch while it had --rampup-batch-size (megatron-core 0.12 and before)."""
    if samples == 0 or consumed > samples:
        return size
    return start + int(consumed / (samples / ((size - start) // increment))) * increment


@pytest.mark.parametrize(("start", "increment", "samples"), [(4, 4, 300), (16, 8, 3000), (32, 32, 100), (8, 8, 0)])
def test_rampup_batch_size_is_megatron_s(start, increment, samples) -> None:
    keys = dict(pp_microbatches=None, global_batch_size=64, train_iters=10**5)
    ramp = plan(4, **keys, rampup_batch_size=[start, increment, samples]).ramp
    consumed = 0
    for _ in range(99):
        assert ramp.at(consumed).global_batch_size == rampup(start, increment, samples, 64, consumed)
        consumed += ramp.at(consumed).global_batch_size


def test_a_span_that_one_step_overshoots_has_no_steps() -> None:
    ramp = BatchRamp(((0, 10), (3, 20), (5, 40)), {})
    assert [(rung.first_step, rung.num_steps, rung.size) for rung in ramp.rungs()] == [(1, 1, 10), (2, None, 40)]


# --- rules on the way -------------------------------------------------------------------------------------------------


def test_a_count_that_leaves_the_pipeline_empty_is_rounded_up_with_a_note() -> None:
    settled = plan(4, pipeline_model_parallel_size=4, pp_microbatches=2, grad_accum_steps=16, batch_warmup_steps=4)
    assert counts(settled.ramp, 5) == [4, 5, 9, 12, 16]
    assert [note for note in settled.notes if "4 sequences are rounded up to 8" in note and "2 * 4 = 8" in note]


def test_an_interleaved_group_rule_holds_on_the_way() -> None:
    keys = dict(
        pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2, pp_microbatches=None,
        microbatch_group_size_per_vp_stage=4, global_batch_size=16, rampup_batch_size=[4, 1, 300],
    )  # fmt: skip
    settled = plan(2, **keys)
    # A last group of one would leave stages waiting: 5, 9 and 13 become 6, 10 and 14.
    assert set(settled.ramp.batches) == {4, 6, 7, 8, 10, 11, 12, 14, 15, 16}
    assert any("5 sequences are rounded up to 6" in note for note in settled.notes)


def test_steps_of_rounded_batches_take_more_samples_with_a_note() -> None:
    keys = dict(pp_microbatches=None, global_batch_size=32, rampup_batch_size=[4, 4, 100], train_iters=40)
    asked, rounded = plan(4, **keys), plan(8, **keys)
    more = rounded.ramp.samples_after(40) - asked.ramp.samples_after(40)
    assert more > 0
    note = f"rampup_batch_size: with batches rounded up, train_iters 40 take {more} samples more."
    assert note in rounded.notes
    assert not any("samples more" in each for each in asked.notes)


def test_ranks_that_do_not_divide_round_up() -> None:
    settled = plan(8, pp_microbatches=None, global_batch_size=32, rampup_batch_size=[4, 4, 100])
    assert sorted(settled.ramp.batches) == [8, 16, 24, 32]
    assert any("not divisible by micro_batch_size * data_parallel_size = 8" in note for note in settled.notes)


def test_one_flush_per_round_keeps_its_size() -> None:
    settled = plan(2, flush="per_round", pp_microbatches=4, global_batch_size=32, rampup_batch_size=[2, 2, 90])
    assert {batch.pp_microbatches for batch in settled.ramp.batches.values()} == {4}
    assert settled.ramp.flush_sizes() == [4]


def test_a_schedule_of_the_executor_is_asked_what_it_takes() -> None:
    keys = dict(
        pipeline_model_parallel_size=4, schedule="dualpipev", pp_microbatches=1, allow_underfilled_pipeline=True
    )
    settled = plan(4, grad_accum_steps=16, batch_warmup_steps=4, **keys)
    assert settled.ramp.flush_sizes()[0] == 8
    assert any("dualpipev" in note for note in settled.notes)


REFUSED = [
    (dict(rampup_batch_size=[8, 12, 100]), "never reaches global_batch_size 64: 64 - 8 is no multiple of 12"),
    (dict(rampup_batch_size=[128, 8, 100]), "never reaches global_batch_size 64"),
    (dict(rampup_batch_size=[8, 8]), "needs three numbers"),
    (dict(rampup_batch_size=[0, 8, 100]), "START and INCREMENT must be at least 1"),
    (dict(batch_warmup_steps=100), "after 100 steps, but the run ends after train_iters 100"),
    (dict(batch_warmup_steps=-1), "batch_warmup_steps is -1: it must be at least 0"),
    (dict(batch_warmup_steps=5, rampup_batch_size=[8, 8, 100]), "each give the growth of the batch"),
    (dict(step_batch_size_schedule="0:8 1K:32"), "ends with 32 sequences, but global_batch_size is 64"),
    (dict(step_batch_size_schedule="64:8 1K:64"), "thresholds must grow from 0"),
    (dict(step_batch_size_schedule="0:8 10:64"), "thresholds must grow from 0, in whole samples of seq_length 64"),
    (dict(step_batch_size_schedule="0:8 1K"), "'1K' is not TOKENS:SEQUENCES"),
    (dict(step_batch_size_schedule="0:8 1e999:64"), "'1e999:64' is not TOKENS:SEQUENCES"),
]


@pytest.mark.parametrize(("keys", "text"), REFUSED, ids=[text[:30] for _, text in REFUSED])
def test_a_ramp_that_cannot_be_is_one_message(keys, text) -> None:
    batch = dict(pp_microbatches=1, grad_accum_steps=64) if "batch_warmup_steps" in keys else dict(pp_microbatches=None)
    with pytest.raises(ConfigError) as raised:
        plan(1, **(dict(global_batch_size=64) | batch | keys))
    (problem,) = raised.value.problems
    assert text in problem


# --- going on at another number of ranks ------------------------------------------------------------------------------


def test_a_resumed_ramp_is_the_one_that_was_saved_whatever_the_ranks() -> None:
    keys = dict(pp_microbatches=2, global_batch_size=48, batch_warmup_steps=5)
    saved, elsewhere = plan(2, **keys), plan(1, **keys)
    assert saved.ramp.intervals != elsewhere.ramp.intervals  # in accumulation steps, these round otherwise
    again = elsewhere.continued(saved.ramp_state(), 20)
    assert again.ramp.intervals == saved.ramp.intervals
    assert again.ramp.at(1000) == elsewhere.batch
    (_, one, two, *_) = saved.ramp.rungs()
    assert again.ramp.at(two.consumed_samples).global_batch_size == two.size > one.size


def test_only_what_lies_ahead_has_to_fit_the_new_ranks() -> None:
    keys = dict(pp_microbatches=None, global_batch_size=32, rampup_batch_size=[4, 4, 64])
    saved, wide = plan(1, **keys).ramp_state(), plan(8, **keys)
    with pytest.raises(ConfigError, match=r"steps of 12 sequences still to come.*data_parallel_size 8 = 8 cannot make"):
        wide.continued(saved, 20)
    assert wide.continued(saved, 64).ramp.at(64).num_microbatches == 4


def test_another_ramp_than_the_checkpoint_s_is_refused() -> None:
    keys = dict(pp_microbatches=2, global_batch_size=48)
    saved = plan(2, **keys, batch_warmup_steps=5).ramp_state()
    with pytest.raises(ConfigError, match="batch_warmup_steps: 5 in the checkpoint, 8 in the configuration; set"):
        plan(2, **keys, batch_warmup_steps=8).continued(saved, 0)
    unchanged = plan(2, **keys)
    assert unchanged.continued({}, 100) is unchanged  # a checkpoint from before ramps
    without = dict(pp_microbatches=24, global_batch_size=48)  # one accumulation step, which cannot grow
    with pytest.raises(ConfigError, match="batch_warmup_steps: 5 in the checkpoint, 0 in the configuration; set"):
        plan(2, **without).continued(plan(2, **without, batch_warmup_steps=5).ramp_state(), 0)


def test_other_micro_batches_than_the_checkpoint_s_are_named_where_sums_are_the_same_in_every_layout() -> None:
    keys = dict(pp_microbatches=None, global_batch_size=48, reproducible="layout")
    saved = plan(2, **keys).ramp_state()
    assert plan(4, **keys, backend="fsdp2").ramp_differences(saved) == {}
    other = plan(2, **keys, micro_batch_size=2)
    ((text, remedy),) = other.ramp_differences(saved).items()
    assert text.startswith("micro_batch_size: 1 in the checkpoint, 2 in the configuration, but reproducible layout")
    assert remedy == "set micro_batch_size to 1"
    loose = plan(2, **keys | dict(reproducible="none"), micro_batch_size=2)
    assert loose.ramp_differences(saved) == other.ramp_differences(loose.ramp_state()) == {}


def test_another_ramp_holds_from_the_checkpoint_on_when_asked_for() -> None:
    keys = dict(pp_microbatches=2, global_batch_size=48)
    saved = plan(2, **keys, batch_warmup_steps=5).ramp_state()
    asked = plan(2, **keys, batch_warmup_steps=8, override=["batch"])
    ramp = asked.continued(saved, 64).ramp
    assert [ramp.size_at(at) for at in (0, 4, 16, 36, 63)] == [4, 12, 20, 28, 28], "as it was"
    assert [ramp.size_at(at) for at in (64, 68, 96, 1000)] == [24, 28, 36, 48], "as it is asked for"
    again = plan(2, **keys, batch_warmup_steps=8).continued(asked.continued(saved, 64).ramp_state(), 88)
    assert again.ramp.intervals == ramp.intervals, "the next start continues the ramp"


def test_an_earlier_checkpoint_than_the_one_first_continued_brings_its_own_batches() -> None:
    """The later one was damaged, or a loop loads twice."""
    keys = dict(pp_microbatches=None, global_batch_size=6, rampup_batch_size=[3, 3, 6])
    saved, one = plan(2, **keys).ramp_state(), plan(1, **keys)
    assert saved["intervals"] == [[0, 4], [6, 6]] and saved["intervals"] != one.ramp_state()["intervals"]
    assert one.continued(saved, 14).continued(saved, 4).ramp.at(4).num_microbatches == 4
    asked = plan(1, **keys | dict(global_batch_size=9), override=["batch"])
    ramp = asked.continued(saved, 14).continued(saved, 4).ramp
    assert [ramp.at(at).num_microbatches for at in (4, 8, 14)] == [6, 9, 9], "the new keys, from sample 4 on"
