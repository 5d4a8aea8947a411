"""Sentences of the documentation that name a limit, each held against the code that has it."""

from pathlib import Path

import pytest

from megaaccum import Plan
from megaaccum.config.megatron_arguments import listed, lists
from megaaccum.errors import ConfigError, ScheduleError
from megaaccum.schedule import build
from megaaccum.schedule.registry import BUILT_IN

DOCS = Path(__file__).parents[2] / "docs"
MODES = [("deepspeed", "resident"), ("deepspeed", "streaming"), ("fsdp2", "resident"), ("fsdp2", "streaming"),
         ("megatron", "resident"), ("ddp", "resident")]  # fmt: skip
LEAST = {"zbv": 7, "dualpipev": 8}
"""Micro-batches at pp 4, as schedules.md says: 2 * pp - 1 and 2 * pp."""


def claims(page: str) -> str:
    """The text of a page without line breaks."""
    return " ".join((DOCS / page).read_text().split())


@pytest.mark.parametrize("name", [name for name in BUILT_IN if name not in ("none", "interleaved")])
def test_a_table_needs_as_many_micro_batches_as_the_page_says(name):
    assert "one micro-batch, but ZB-V `2 * pp - 1` and DualPipeV `2 * pp`" in claims("guides/schedules.md")
    least = LEAST.get(name, 1)
    build(name, pp=4, num_microbatches=least)
    if least > 1:
        with pytest.raises(ScheduleError):
            build(name, pp=4, num_microbatches=least - 1)


def plan(schedule: str, backend: str, sync: str, **more: object) -> Plan:
    sharding = dict(backend=backend, sync=sync, bf16=True)
    layout = dict(pp=2, schedule=schedule) | ({"vpp": 2} if schedule == "interleaved" else {})
    batch = dict(micro_batch_size=1, seq_length=8, global_batch_size=16)
    return Plan.of(layout=layout, batch=batch, sharding=sharding, world_size=4, hidden_size=16, **more)


@pytest.mark.parametrize(("backend", "sync"), MODES)
@pytest.mark.parametrize("schedule", [name for name in BUILT_IN if name != "none"])
def test_every_sync_mode_has_a_plan_under_every_schedule(backend, sync, schedule):
    assert "runs under every schedule on Megatron's local layers" in claims("guides/sharding.md")
    assert plan(schedule, backend, sync).layout.schedule == schedule


@pytest.mark.parametrize("backend", ["fsdp2", "megatron", "ddp"])
def test_the_exception_of_split_schedules_is_named(backend):
    assert "Transformer Engine's layers and FP8 need `backend: deepspeed`" in claims("guides/sharding.md")
    with pytest.raises(ConfigError, match="needs backend deepspeed"):
        plan("zbv", backend, "resident", transformer_impl="transformer_engine")
    plan("1f1b", backend, "resident", transformer_impl="transformer_engine")


def test_fewer_micro_batches_than_the_plan_asks_for_are_accepted_by_the_key_that_the_page_names():
    few = dict(layout=dict(pp=4), batch=dict(micro_batch_size=1, seq_length=8, global_batch_size=4), world_size=4)
    with pytest.raises(ConfigError, match="allow_underfilled_pipeline"):
        Plan.of(**few, hidden_size=16)
    assert "unless `allow_underfilled_pipeline` is true" in claims("guides/schedules.md")
    Plan.of(**few, hidden_size=16, allow_underfilled_pipeline=True)


@pytest.mark.parametrize(
    "name", ["log_params_norm", "log_num_zeros_in_grad", "log_max_attention_logit", "profile", "use_pytorch_profiler"]
)
def test_what_is_not_measured_is_a_note(name):
    assert listed()[name].verdict == "note"


def test_reasons_of_verdicts_promise_nothing_for_every_run():
    """Backends differ in when they reduce, and `nonfinite` in what it does."""
    promises = [row.title for row in lists() if row.verdict == "note" and row.why.endswith("always")]
    assert promises == [] and "bucket by bucket" not in claims("reference/megatron-flags.md")


def test_a_ramp_that_the_run_does_not_finish_is_an_error_or_a_note_as_the_page_says():
    assert "for `batch_warmup_steps` that is an error, for the other two, which" in claims("guides/batch.md")
    batch = dict(micro_batch_size=1, seq_length=8)
    run, few = dict(train_iters=3), dict(world_size=1, hidden_size=16)
    with pytest.raises(ConfigError, match="shorten the ramp"):
        Plan.of(batch=batch | dict(grad_accum_steps=8, batch_warmup_steps=400), run=run, **few)
    for ramp in (dict(rampup_batch_size=[2, 2, 400]), dict(step_batch_size_schedule="0:2 4K:8")):
        made = Plan.of(batch=batch | dict(global_batch_size=8) | ramp, run=run, **few)
        assert any("in the middle of the ramp" in note for note in made.notes)


def test_keys_promise_nothing_that_other_keys_decide():
    """The floor of the loss scale: test_nonfinite and test_fp16. The order of sums over ranks: rules/sharding."""
    page = claims("reference/configuration.md")
    assert "on any backend" not in page and "overflows there ends the run" not in page


def test_a_shard_is_not_what_save_pretrained_writes():
    page = claims("migrating/huggingface.md")
    assert "`save_pretrained` | keep it" not in page and "Everything else" not in claims("migrating/megatron-loop.md")
