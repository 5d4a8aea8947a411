"""Megatron's own train_step over the two objects of `wrap`: the gradient of one process on the whole batch."""

from __future__ import annotations

from unittest.mock import patch

import pytest

from megaaccum.lab.verification.testing import run_ranks
from tests.multiproc.test_engine import BACKENDS, FOUR, SCHEDULES
from tests.support.distance import problems, relative_error
from tests.support.megatron_loop import Loop, loop_gradient, loop_gradients, spoiled
from tests.support.parity import Case

PP2 = SCHEDULES["1f1b"]
TP2 = "--tensor_model_parallel_size 2 --sequence_parallel --pp_microbatches 8 "


def of_four(layout: str, model: str = "", lane: str = "fp32") -> Case:
    """A layout of four layers on four ranks."""
    return Case(4, layout, FOUR + model, lane)


def _loops() -> dict[str, Loop]:
    loops = {f"1f1b-{name}": Loop(of_four(PP2 + backend)) for name, backend in BACKENDS.items()}
    loops["1f1b-zero2"] = Loop(of_four(PP2 + "--zero_stage 2 "))
    loops |= {name: Loop(of_four(SCHEDULES[name])) for name in SCHEDULES if name != "1f1b"}
    loops["dualpipev-streaming"] = Loop(of_four(SCHEDULES["dualpipev"] + BACKENDS["streaming"]))
    # Embedding and head are one weight on two stages, which Megatron's own would sum too; and so would it over tp.
    theirs = {name: PP2 + BACKENDS[name] for name in ("zero3", "megatron", "ddp")}
    theirs["tp2"] = TP2
    loops |= {f"megatrons finalize-{name}": Loop(of_four(layout), "theirs") for name, layout in theirs.items()}
    # Without calculate_per_token_loss, which is Megatron's default.
    means = of_four(PP2, "--loss_norm microbatch ")
    loops |= {f"means-{name}": Loop(means, name, per_token=False) for name in ("ours", "theirs")}
    loops |= {lane: Loop(of_four(PP2, lane=lane)) for lane in ("bf16", "fp16")}
    loops |= {f"two flushes-{name}": Loop(of_four(PP2 + BACKENDS[name]), flushes=2) for name in ("zero3", "fsdp2")}
    return loops | {"two flushes-megatrons finalize": Loop(of_four(PP2), "theirs", flushes=2)}


LOOPS = _loops()


@pytest.fixture(scope="module")
def measured(request) -> dict[str, list]:
    """The gradients of all cells that are to run, by rank, from one start."""
    items = [item for item in request.session.items if getattr(item, "function", None) is test_train_step]
    names = [item.callspec.params["name"] for item in items]
    by_rank = run_ranks(loop_gradients, 4, [LOOPS[name] for name in names], timeout=60 + 5 * len(names))
    return {name: list(gradients) for name, gradients in zip(names, zip(*by_rank, strict=True), strict=True)}


@pytest.mark.parametrize("name", LOOPS)
def test_train_step(name, measured):
    assert problems(LOOPS[name].case, measured[name]) == []


# --- mistakes made on purpose ---------------------------------------------------------------------------------------


def with_a_second_division(loop: Loop):
    """Megatron's own wrapper, given 1 / N, multiplies gradients before the commit does."""
    from megaaccum.loop.contract import LoopStep

    plain = LoopStep.note_scaling

    def twice(self, factor):
        plain(self, factor)
        for _, _, grad in self._hidden:
            grad.mul_(factor)

    with patch.object(LoopStep, "note_scaling", twice):
        return loop_gradient(loop)


def test_a_second_division_is_seen():
    loop = Loop(of_four(PP2 + BACKENDS["ddp"]), finalize="theirs")
    (right, *_), (wrong, *_) = run_ranks(loop_gradient, 4, loop), run_ranks(with_a_second_division, 4, loop)
    assert wrong.norm == pytest.approx(right.norm / right.num_tokens, rel=1e-5)
    name = next(iter(right.parts))
    assert relative_error(wrong.parts[name], right.parts[name]) > 0.9


@pytest.mark.parametrize("backend", ["zero3", "megatron"])
def test_a_step_is_skipped_on_all_ranks(backend):
    """One rank's loss is not a number: no weight changes anywhere. The next step is taken."""
    skipping = Loop(of_four(PP2 + BACKENDS[backend] + "--nonfinite skip "))
    assert run_ranks(spoiled, 4, skipping) == [(1, False, 0, True)] * 4


def test_a_rank_that_judges_alone_is_seen():
    by_rank = run_ranks(spoiled, 4, Loop(of_four(PP2 + BACKENDS["ddp"])), alone=True)
    assert {changed for _, changed, _, _ in by_rank} == {True, False}
    assert [changed for _, changed, _, _ in by_rank].index(False) == 1
