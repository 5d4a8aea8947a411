"""Weights that a user changes in place between steps: in force, or an error on every rank where a step would lose them.

`evaluated`: after an evaluation ZeRO-3 (`sync: resident`) has whole parameters, before it parts of them.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from megaaccum import Plan, initialize
from megaaccum.errors import StepError
from megaaccum.lab.verification.testing import run_ranks
from tests.multiproc.test_changed_models import BACKENDS, batches

OPTIMIZER = partial(torch.optim.AdamW, lr=0.05)
WORDS = "changed in place since the last step or load, which the next step loses"
RELEASED = {("zero-3", False), ("zero-3 streaming", False), ("zero-3 streaming", True)}
"""Parameters without elements, in which a change of all changes nothing."""


def forward_step(data_iterator: Any, chunk: Any) -> tuple[Any, Any]:
    rows = next(data_iterator).to(chunk.dtype)
    return chunk(rows), lambda out: (out.float().square().sum(), torch.tensor(float(len(out))), {})


def network(dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    layers = torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3)
    model = torch.nn.Sequential(*layers).to(dtype)
    model.dtype = dtype  # type: ignore[assignment]
    return model


class Run:
    """A model of which a step has been taken, its engine, and the gradients of the steps after it."""

    def __init__(self, backend: str, *, bf16: bool = False, evaluated: bool = False):
        self.model, self.grads = network(torch.bfloat16 if bf16 else torch.float32), dict[Any, torch.Tensor]()
        batch, sharding = dict(micro_batch_size=4, seq_length=1, grad_accum_steps=2), BACKENDS[backend] | {"bf16": bf16}
        plan = Plan.of(batch=batch, sharding=sharding, optimizer=dict(clip_grad=0.0), world_size=2)
        self.engine = initialize(plan, self.model, forward_step_func=forward_step, optimizer=OPTIMIZER)
        self.engine.train_step(batches(0))
        if evaluated:
            self.engine.evaluate(batches(0))
        self.engine.train_steps.before_update = self.note

    def note(self) -> None:
        self.grads = {(each.name, each.start): each.grad.clone() for each in self.engine.backend.shards()}

    def weights(self) -> dict[str, torch.Tensor]:
        return dict(self.engine.whole_weights(dtype=torch.float32))

    def step(self) -> str:
        """The error of the next step, if any."""
        try:
            self.engine.train_step(batches(1))
        except StepError as error:
            return str(error)
        return ""

    def is_like(self, grads: dict[str, torch.Tensor], weights: dict[str, torch.Tensor], bf16: bool) -> bool:
        """Whether the last step had these whole gradients, and made these weights."""
        near: dict[str, float] = dict(rtol=0, atol=2e-2 if bf16 else 1e-6)
        mine, now = self.grads.items(), self.weights()
        parts = [(grad, grads[name].reshape(-1)[start:][: len(grad)]) for (name, start), grad in mine]
        parts += [(now[name], weights[name]) for name in weights]
        return all(torch.allclose(a, b.to(a), **near) for a, b in parts)


def change(model: Any, factor: float) -> None:
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(factor)


def one_process(factor: float) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """(gradients of the second step, weights after it), if the weights are multiplied by `factor` before it."""
    model = network()
    optimizer = OPTIMIZER(model.parameters())
    for step in range(2):
        rows = torch.randn(4, 4, 5, generator=torch.Generator().manual_seed(step)).view(16, 5)
        change(model, factor if step else 1.0)
        optimizer.zero_grad()
        (model(rows).square().sum() / 16).backward()
        optimizer.step()
    grads = {name: param.grad for name, param in model.named_parameters()}
    return grads, {name: param.detach() for name, param in model.named_parameters()}


def fates(bf16: bool, evaluated: bool) -> dict[str, tuple[str, bool, bool]]:
    """(the error of a step after a change, whether the change is in force in the end, whether each step before was
    refused) by backend. A change that is refused is given to load_weights."""
    found, due = {}, one_process(0.5)
    for backend in BACKENDS:
        run = Run(backend, bf16=bf16, evaluated=evaluated)
        halves = {name: weight / 2 for name, weight in run.weights().items()}
        change(run.model, 0.5)
        error, again = run.step(), True
        if error:
            again = run.step() == error
            with pytest.raises(StepError, match=WORDS):
                run.weights()
            run.engine.load_weights(halves)
            assert run.step() == ""
        found[backend] = error, run.is_like(*due, bf16), again
    return found


@pytest.mark.parametrize("evaluated", [False, True])
@pytest.mark.parametrize("bf16", [False, True])
def test_a_change_in_place_is_in_force_or_refused_on_every_rank(bf16, evaluated):
    """In force: gradient and weights are those of one process that makes the same change."""
    copied = {"zero-1", "zero-3", "zero-3 streaming", *(("ddp", "megatron") if bf16 else ())}
    for found in run_ranks(fates, 2, bf16, evaluated, timeout=120):
        for backend, (error, is_in_force, again) in found.items():
            is_lost = backend in copied and (backend, evaluated) not in RELEASED
            assert (WORDS in error, again) == (is_lost, True), (backend, error)
            assert is_in_force == ((backend, evaluated) not in RELEASED), backend
            assert not is_lost or "weight" in error


def without_the_check() -> dict[str, tuple[bool, bool]]:
    """(whether the step's gradient is that of the change, whether its weights are those without a change) by backend,
    where no step compares weights."""
    found, halved, same = {}, one_process(0.5), one_process(1.0)
    for backend in ("zero-1", "zero-3"):
        run = Run(backend, evaluated=True)
        run.engine.backend.edited = lambda: ()  # type: ignore[method-assign, assignment]
        change(run.model, 0.5)
        assert run.step() == ""
        now = run.weights()
        without, with_it = (
            sum(float((now[name] - each[1][name]).abs().sum()) for name in now) for each in (same, halved)
        )
        found[backend] = run.is_like(halved[0], {}, bf16=False), without < with_it / 5
    return found


def test_without_the_check_the_gradient_has_a_change_that_the_update_loses():
    for found in run_ranks(without_the_check, 2, timeout=60):
        assert set(found.values()) == {(True, True)}, found


def swapped(bf16: bool) -> dict[str, tuple[bool, bool]]:
    """(whether an evaluation saw other weights, whether the next step is as if there had been none) by backend, where a
    program puts halves in for an evaluation, and then the weights back."""
    import deepspeed

    found = {}
    for backend in BACKENDS:
        plain, run = (Run(backend, bf16=bf16, evaluated=True) for _ in range(2))
        before, _ = plain.engine.evaluate(batches(1))
        losses = []
        for factor in (0.5, 2.0):
            if backend == "zero-3 streaming":
                with deepspeed.zero.GatheredParameters(list(run.model.parameters()), modifier_rank=0):
                    change(run.model, factor)
            else:
                change(run.model, factor)
            losses.append(run.engine.evaluate(batches(1))[0])
        assert (plain.step(), run.step()) == ("", "")
        due, mine = plain.weights(), run.weights()
        is_same = all(torch.equal(run.grads[key], grad) for key, grad in plain.grads.items())
        is_same &= all(torch.equal(mine[name], due[name]) for name in due)
        found[backend] = (losses[0] < before / 2 and losses[1] == before), is_same
    return found


@pytest.mark.parametrize("bf16", [False, True])
def test_other_weights_for_an_evaluation_may_be_put_in_and_taken_out(bf16):
    for found in run_ranks(swapped, 2, bf16, timeout=120):
        assert found == dict.fromkeys(BACKENDS, (True, True))


def in_one_copy() -> list[str]:
    """Errors after changes that GatheredParameters gives to all ranks."""
    import deepspeed

    found = []
    for backend in ("zero-3", "zero-3 streaming"):
        run = Run(backend)
        with deepspeed.zero.GatheredParameters([run.model[0].weight], modifier_rank=1), torch.no_grad():
            run.model[0].weight[0] = 1.0  # the first rank's
        found.append(run.step())
    return found


def test_a_change_that_deepspeed_gives_to_all_ranks_is_refused():
    for found in run_ranks(in_one_copy, 2, timeout=60):
        assert ["0.weight changed" in text for text in found] == [True] * 2


def of_one_rank(bf16: bool) -> dict[str, tuple[str, bool]]:
    """(the error of a step after a change on rank 1 alone, of what rank 0 owns under ZeRO; whether the step after the
    change was set back is that without it) by backend."""
    found = {}
    for backend in BACKENDS:
        plain, run = (Run(backend, bf16=bf16, evaluated=True) for _ in range(2))
        errors = []
        for factor in (8.0, 1 / 8):
            with torch.no_grad():
                changed = backend not in SHARDED and torch.distributed.get_rank() == 1
                for param in run.model.parameters() if changed else ():
                    param.view(-1)[:1].mul_(factor)
            errors.append(run.step())
            if not errors[0]:
                break
        is_same = plain.step() == errors[-1] == ""
        is_same &= all(torch.equal(run.grads[key], grad) for key, grad in plain.grads.items())
        due, now = plain.weights(), run.weights()
        is_same &= all(torch.equal(now[name], due[name]) for name in due)
        found[backend] = errors[0], is_same
    return found


SHARDED = ("zero-3 streaming", "fsdp2", "fsdp2 streaming")
"""Backends of which no rank has another's weights between steps."""


@pytest.mark.parametrize("bf16", [False, True])
def test_a_change_on_one_rank_alone_is_refused_on_every_rank(bf16):
    """Without the check ddp's and Megatron's ranks train weights of their own from then on."""
    for found in run_ranks(of_one_rank, 2, bf16, timeout=120):
        for backend, (error, is_same) in found.items():
            assert is_same, backend
            assert ("changed in place" in error and "rank 1: " in error) == (backend not in SHARDED), (backend, error)


def loaded_after(folder: str) -> dict[str, bool]:
    """Whether a load after a change in place gives the step without the change, by backend."""
    found = {}
    for backend in BACKENDS:
        plain, run = (Run(backend, evaluated=True) for _ in range(2))
        run.engine.save(f"{folder}/{backend}")
        change(run.model, 0.5)
        assert run.engine.load(f"{folder}/{backend}") and plain.step() == run.step() == ""
        due, now = plain.weights(), run.weights()
        found[backend] = all(torch.equal(run.grads[key], grad) for key, grad in plain.grads.items())
        found[backend] &= all(torch.equal(now[name], due[name]) for name in due)
    return found


def test_a_load_after_a_change_in_place_replaces_it(tmp_path):
    for found in run_ranks(loaded_after, 2, str(tmp_path), timeout=120):
        assert found == dict.fromkeys(BACKENDS, True)
