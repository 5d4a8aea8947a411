"""Mistakes that accumulation has been shipped with, each made again on purpose: the parity check sees every one.

They are made on the ranks by replacing one function of the package, before the same step and the same comparison
that test_parity.py makes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import pytest

from megaaccum.lab.verification.testing import run_ranks
from tests.support.distance import problems
from tests.support.parity import Case, Gradient, gradient

PIPELINE = "--pipeline_model_parallel_size 2 --grad_accum_steps 2 --pp_microbatches 4 "
TENSOR = "--tensor_model_parallel_size 2 --sequence_parallel --grad_accum_steps 2 --pp_microbatches 4 "
GA, NUM_CHUNKS = 2, 4
UNTIED = "--untie_embeddings_and_output_weights"


def no_mistake() -> Iterator[None]:
    yield


def division_per_stage() -> Iterator[None]:
    """Every stage multiplies the gradient of what it returned by 1/GAS, as outputs of DeepSpeed's engine.forward do."""
    from megatron.core.models.gpt import GPTModel

    forward = GPTModel.forward

    def with_hook(*args, **kwargs):
        output = forward(*args, **kwargs)
        output.register_hook(lambda grad: grad / GA)
        return output

    with patch.object(GPTModel, "forward", with_hook):
        yield


def division_by_chunks_only() -> Iterator[None]:
    """The mean over the micro-batches of one round, added up over the rounds."""
    yield from _with_factor(GA)


def division_by_ranks_twice() -> Iterator[None]:
    """Data-parallel averaging on top of a divisor that counts all ranks."""
    yield from _with_factor(1 / 2)


def _with_factor(factor: float) -> Iterator[None]:
    from dataclasses import replace

    from megaaccum.step.loss import Divisor

    known = Divisor.known

    def with_another(*args, **keys):
        right = known(*args, **keys)
        return replace(right, in_loss=right.in_loss * factor)

    with patch.object(Divisor, "known", with_another):
        yield


def mean_of_means() -> Iterator[None]:
    """Every micro-batch weighs the same, however many tokens it has."""
    from megaaccum.model.gpt_forward import GptForwardStep

    init = GptForwardStep.__init__
    with patch.object(GptForwardStep, "__init__", lambda self, groups, _norm: init(self, groups, "microbatch")):
        yield


def mean_over_own_tokens() -> Iterator[None]:
    """Each rank divides by the tokens that it has itself, and the ranks are averaged."""
    from megaaccum.step import train_step

    def own(weights, count, groups, places):
        return lambda: (sum(weights) * groups.dp.size(), count * groups.dp.size())

    with patch.object(train_step, "post_total_weight", own):
        yield


def norm_per_stage() -> Iterator[None]:
    """The norm is summed over the data-parallel ranks of a stage, and not over stages."""
    from megatron.core import parallel_state

    yield from _with_norm_over(parallel_state.get_data_parallel_group)


def _with_norm_over(group: Callable) -> Iterator[None]:
    from megaaccum.step import grad_norm

    real = grad_norm.sums_over_ranks
    with patch.object(grad_norm, "sums_over_ranks", lambda parts: real(parts, group())):
        yield


def reduction_in_every_microbatch() -> Iterator[None]:
    """no_sync is ignored: each backward hands its gradient over, and the step keeps the last one's."""
    from contextlib import nullcontext

    from megaaccum.sharding.deepspeed import DeepSpeedBackend

    gather = DeepSpeedBackend.begin_step

    def syncing(self):
        gather(self)
        self._set_syncing(True)

    with patch.multiple(DeepSpeedBackend, begin_step=syncing, no_sync_func=lambda self: nullcontext()):
        yield


def dividing_again_in_every_microbatch() -> Iterator[None]:
    """The running sum is divided after every micro-batch, so that early ones count less and less."""
    from megaaccum.sharding.deepspeed import DeepSpeedBackend
    from megaaccum.upstream import pytorch

    init = DeepSpeedBackend.__init__

    def halve(param):
        if param.grad is not None:  # None: already handed over
            param.grad.div_(2)

    def with_division(self, *args, **kwargs):
        init(self, *args, **kwargs)
        for param in self.parts.params:
            pytorch.on_gradient(param, halve)

    with patch.object(DeepSpeedBackend, "__init__", with_division):
        yield


def tied_copy_not_summed() -> Iterator[None]:
    """Embedding and head keep a gradient each."""
    yield from _without("is_tied")


def tied_copy_counted_twice() -> Iterator[None]:
    """The norm counts the embedding on the first stage, and its copy on the last."""
    yield from _without("is_tied_copy")


def sequence_parallel_norms_not_summed() -> Iterator[None]:
    """Each tp rank keeps the gradient of its part of the sequence."""
    yield from _without("is_partial_over_tp")


def _without(predicate: str) -> Iterator[None]:
    from megaaccum.model import names

    with patch.object(names, predicate, lambda *_: False):
        yield


def last_round_only() -> Iterator[None]:
    """Gradients are cleared between the rounds of accumulation."""
    from megaaccum.sharding.deepspeed import DeepSpeedBackend

    set_last_flush = DeepSpeedBackend.set_last_flush

    def clearing(self, last):
        set_last_flush(self, last)
        for param in self.parts.params:
            param.grad = None

    with patch.object(DeepSpeedBackend, "set_last_flush", clearing):
        yield


# (mistake, layout, model, what the check has to complain about)
MISTAKES = [
    (no_mistake, PIPELINE, "", None),
    (no_mistake, TENSOR, UNTIED, None),
    (division_per_stage, PIPELINE, "", "error"),
    (division_by_chunks_only, PIPELINE, "--loss_norm microbatch", "error"),
    (division_by_ranks_twice, PIPELINE, "", "error"),
    (mean_of_means, PIPELINE, "", "error"),
    (mean_over_own_tokens, PIPELINE, "", "error"),
    (norm_per_stage, PIPELINE, UNTIED, "norm"),
    (reduction_in_every_microbatch, PIPELINE, "", "error"),
    (dividing_again_in_every_microbatch, PIPELINE, "", "error"),
    (tied_copy_not_summed, PIPELINE, "", "error"),
    (tied_copy_not_summed, PIPELINE + "--zero_stage 2", "", "error"),
    (tied_copy_counted_twice, PIPELINE, "", "norm"),
    (last_round_only, PIPELINE + "--flush per_round", "", "error"),
    (sequence_parallel_norms_not_summed, TENSOR, UNTIED, "error"),
]


def with_mistakes(made: list[tuple[Callable, Case]]) -> list[Gradient]:
    """The gradient of each case on this rank, with its mistake made."""
    results = []
    for mistake, case in made:
        with ExitStack() as stack:
            stack.enter_context(contextmanager(mistake)())
            results.append(gradient(case))
    return results


@pytest.fixture(scope="module")
def seen() -> list[list[str]]:
    """What the parity check says of each row of MISTAKES."""
    made = [(mistake, Case(4, layout, model)) for mistake, layout, model, _ in MISTAKES]
    by_rank = run_ranks(with_mistakes, 4, made, timeout=200)
    return [problems(case, list(ranks)) for (_, case), ranks in zip(made, zip(*by_rank, strict=True), strict=True)]


@pytest.mark.parametrize("row", range(len(MISTAKES)), ids=lambda i: f"{i}-{MISTAKES[i][0].__name__}")
def test_the_parity_check_sees(row, seen):
    complaint = MISTAKES[row][3]
    if complaint is None:
        assert seen[row] == []
    else:
        assert any(complaint in problem for problem in seen[row]), seen[row]
