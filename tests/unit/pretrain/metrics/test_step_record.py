"""The log's names for the measurements of a step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from megaaccum.config.schema.run import RunConfig
from megaaccum.observe.traffic import Count
from megaaccum.pretrain.metrics.progress import last_step
from megaaccum.pretrain.metrics.step_record import bytes_by_collective, bytes_by_kind
from megaaccum.pretrain.training.training_run import log_step
from megaaccum.step.result import StepResult


def test_bytes_are_named_after_what_they_are():
    assert bytes_by_kind({"optimizer": 5}) == {"memory_optimizer_bytes": 5}
    lanes = {
        "send/pp/bfloat16": Count(1, 2.0),
        "send/pp/float32": Count(1, 4.0),
        "all_reduce/tp/float32": Count(2, 8.0),
    }
    assert bytes_by_collective(lanes) == {"bytes_send_pp": 6.0, "bytes_all_reduce_tp": 8.0}


def test_the_log_has_what_a_step_reports():
    """The noise scale comes as a report; the count of tokens stays a whole number."""
    recorded: list[dict[str, Any]] = []
    log: Any = SimpleNamespace(step=recorded.append, step_note=lambda *_: None)
    engine: Any = SimpleNamespace(
        consumed_samples=8, plan=SimpleNamespace(config=SimpleNamespace(sharding=SimpleNamespace(fp16=False)))
    )
    reports = {"noise_scale_sequences": 13.5, "num_tokens": 256.0}
    result = StepResult(step=3, loss=2.5, weight=256.0, grad_norm=1.0, skipped=False, reports=reports)
    log_step(log, engine, result, SimpleNamespace(global_batch_size=8))  # type: ignore[arg-type]
    assert (recorded[0]["step"], recorded[0]["noise_scale_sequences"], recorded[0]["loss"]) == (3, 13.5, 2.5)
    assert repr(recorded[0]["num_tokens"]) == "256"


def test_a_start_ends_with_the_run_or_after_its_own_steps():
    assert last_step(RunConfig(train_iters=10), 4) == 10
    assert [last_step(RunConfig(train_iters=10, max_steps=3), start) for start in (0, 4, 9)] == [3, 7, 10]
