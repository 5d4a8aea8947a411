"""Engine's table of states: what each method does to an engine that is idle, has an open step, or has failed."""

from __future__ import annotations

from typing import Any

from megaaccum.lab.verification.testing import run_ranks
from tests.multiproc.test_engine_inputs import batches, chunk_of, engine, said

ZERO3 = dict(batch=dict(micro_batch_size=1, seq_length=16, pp_microbatches=4), sharding=dict(zero_stage=3))


def on_zero3():
    """An engine over two ZeRO-3 ranks, with the same weights each time."""
    return engine(lambda rank: chunk_of(0, 1), keys=ZERO3)


def weights(made) -> list:
    return [piece.tensors["param"].clone() for piece in made.backend.state()]


def are_equal(some: list, others: list) -> bool:
    import torch

    return all(map(torch.equal, some, others))


def ends(result) -> tuple[int, float, float]:
    return result.step, result.loss, result.grad_norm


def try_on(made, data):
    """Enter a trial, and give the norm of its gradient."""
    with made.trial(data) as attempt:
        return attempt.norm


def dies(data_iterator, chunk):
    raise RuntimeError("a kernel died")


def try_dying(made, data) -> str:
    try:
        made.forward_backward(data, forward_step_func=dies)
    except RuntimeError as error:
        return str(error)
    return ""


def own_batches() -> list:
    """This rank's micro-batches of a step."""
    import torch

    torch.manual_seed(7 + torch.distributed.get_rank())
    return batches()


def idle(folder: str) -> dict[str, Any]:
    data = own_batches()
    made = on_zero3()
    start = weights(made)
    seen: dict[str, Any] = {"optim_step": said(made.optim_step), "load": made.load(f"{folder}/nothing")}
    seen["evaluate"], seen["forward"] = made.evaluate(data)[1], len(made.forward(data))
    norm = try_on(made, data)
    made.save(f"{folder}/idle")
    seen["as it was"] = are_equal(start, weights(made)) and made.step == 0
    made.gather_ahead()
    result = made.train_step(data)
    seen["trial"] = norm == result.grad_norm
    seen["train_step"] = not are_equal(start, weights(made)) and made.step == 1
    seen["load a step back"] = made.load(f"{folder}/idle") and are_equal(start, weights(made)) and made.step == 0
    seen["train_step again"] = ends(made.train_step(data)) == ends(result)
    return seen


def open_step(folder: str) -> dict[str, Any]:
    data = own_batches()
    made = on_zero3()
    made.forward_backward(data[:1])
    made.forward_backward(data[1:])
    expected, after = ends(made.optim_step()), weights(made)

    made = on_zero3()
    start = weights(made)
    made.forward_backward(data[:1])
    seen: dict[str, Any] = {
        "train_step": said(lambda: made.train_step(data)),
        "trial": said(lambda: try_on(made, data)),
        "forward": len(made.forward(data)),
        "evaluate": made.evaluate(data)[1],
        "save": made.save(f"{folder}/open").exists(),
    }
    made.gather_ahead()
    made.forward_backward(data[1:])
    seen["ends as without these calls"] = ends(made.optim_step()) == expected and are_equal(after, weights(made))
    made.forward_backward(data[:1])
    seen["load"] = made.load(f"{folder}/open")
    seen["holds the state before the step"] = are_equal(start, weights(made)) and made.step == 0
    seen["optim_step after load"] = said(made.optim_step)
    made.forward_backward(data[:1])
    made.forward_backward(data[1:])
    seen["the dropped gradients are gone"] = ends(made.optim_step()) == expected and are_equal(after, weights(made))
    return seen


def failed(folder: str) -> dict[str, Any]:
    data = own_batches()
    made = on_zero3()
    start = weights(made)
    made.forward_backward(data[:1])
    seen: dict[str, Any] = {"first error": try_dying(made, data[1:])}
    calls = {
        "train_step": lambda: made.train_step(data),
        "forward_backward": lambda: made.forward_backward(data[:1]),
        "optim_step": made.optim_step,
        "forward": lambda: made.forward(data),
        "evaluate": lambda: made.evaluate(data),
        "trial": lambda: try_on(made, data),
        "gather_ahead": made.gather_ahead,
    }
    seen |= {name: said(call) for name, call in calls.items()}
    seen["save"] = made.save(f"{folder}/failed").exists()
    seen["load"] = made.load(f"{folder}/failed") and are_equal(start, weights(made)) and made.step == 0
    seen["train_step after load"] = said(lambda: made.train_step(data))
    fresh = on_zero3()
    fresh.train_step(data)
    seen["a new engine"] = fresh.load(f"{folder}/failed") and are_equal(start, weights(fresh))
    return seen


OPEN = "StepError: step 1 is open"
NO_GRADIENT = "StepError: step 1 has no gradient: call forward_backward before optim_step"
FAILED = "StepError: the engine failed before (RuntimeError: a kernel died)"


def test_an_idle_engine(tmp_path):
    for seen in run_ranks(idle, 2, str(tmp_path), timeout=90):
        assert (seen.pop("optim_step"), seen.pop("load")) == (NO_GRADIENT, False)
        assert (seen.pop("evaluate"), seen.pop("forward")) == (32.0, 4)
        assert set(seen.values()) == {True}, seen


def test_an_open_step(tmp_path):
    for seen in run_ranks(open_step, 2, str(tmp_path), timeout=90):
        assert seen.pop("train_step").startswith(OPEN) and seen.pop("trial").startswith(OPEN)
        assert (seen.pop("evaluate"), seen.pop("forward")) == (32.0, 4)
        assert seen.pop("optim_step after load") == NO_GRADIENT
        assert set(seen.values()) == {True}, seen


def test_a_failed_engine(tmp_path):
    for seen in run_ranks(failed, 2, str(tmp_path), timeout=90):
        assert seen.pop("first error") == "a kernel died"
        assert [seen.pop(name) for name in ("save", "load", "a new engine")] == [True] * 3
        assert len(seen) == 8 and all(text.startswith(FAILED) for text in seen.values()), seen
