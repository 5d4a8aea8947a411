"""`verify_at_start`: healthy runs of every backend start as if nothing had been verified; a mistake made on purpose
ends the start on every rank, by its numbers."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megaaccum.errors import StepError
from megaaccum.lab.verification import at_start
from megaaccum.lab.verification.testing import run_ranks
from megaaccum.pretrain.training.evaluation import loader_of
from tests.support import whole_runs
from tests.support.parity import VOCAB, Case
from tests.support.restarts import Run, Samples

DP2 = "--pp_microbatches 4 --clip_grad 1 --verify_at_start"
PP2 = "--pipeline_model_parallel_size 2 --pp_microbatches 8 --clip_grad 1 --verify_at_start"
SMALL = "--num_layers 2 "
HALVED = SMALL + "--micro_batch_size 2"
MOE = SMALL + "--num_experts 4 --no_add_bias_linear --moe_router_topk 2 --moe_ffn_hidden_size 32"
DROPOUT = "--num_layers 4 --attention_dropout 0.1 --hidden_dropout 0.1"
FOUR = "--num_layers 4"
MTP = " --mtp_num_layers 1 --position_embedding_type rope --untie_embeddings_and_output_weights"

HEALTHY = [
    Case(2, DP2, HALVED),
    Case(2, DP2 + " --sync streaming", SMALL),
    Case(2, DP2 + " --zero_stage 1", HALVED, "bf16"),
    Case(2, DP2 + " --zero_stage 2", SMALL, "fp16"),
    Case(2, DP2 + " --zero_stage 1 --initial_loss_scale 2e8", SMALL, "fp16"),  # some elements overflow, and become 0
    Case(2, DP2 + " --backend fsdp2 --sync streaming", HALVED),
    Case(2, DP2 + " --backend megatron --flush per_round --grad_accum_steps 2", SMALL),
    Case(2, DP2, HALVED, "fp64"),
    Case(2, DP2 + " --tensor_model_parallel_size 2 --sequence_parallel", HALVED),
    Case(2, DP2 + " --context_parallel_size 2 --zero_stage 1", SMALL),
    Case(2, DP2 + " --expert_model_parallel_size 2", MOE + " --moe_aux_loss_coeff 0.1"),
    Case(2, DP2 + " --reproducible layout", HALVED + MTP),
    Case(4, PP2, HALVED),
    Case(4, PP2 + " --virtual_pipeline_model_parallel_size 2 --recompute_granularity full", DROPOUT),
    Case(4, PP2 + " --schedule zbv", FOUR),
    Case(4, PP2 + " --schedule dualpipev --untie_embeddings_and_output_weights", FOUR),
]

FIRST = "the first in the order of the model is embedding.word_embeddings.weight"
MISTAKES = {
    "mean over own tokens": (Case(2, DP2, HALVED), [FIRST, "the weight N is"]),
    "last microbatch left out": (Case(2, DP2, SMALL), [FIRST]),
    "ranks not reduced": (Case(2, DP2 + " --backend ddp", SMALL), [FIRST]),
    "buffer left over": (Case(2, DP2 + " --backend megatron", SMALL), [FIRST]),
    "activation of another microbatch sent": (Case(2, PP2 + " --schedule zbv", FOUR), [FIRST]),
    "weight gradient of another microbatch": (Case(2, PP2 + " --schedule zb-h1", SMALL), [".weight, "]),
    "flushes divide": (Case(2, DP2, HALVED), [FIRST, "x 2 of that", "2 times the micro-batches"]),
}
"""The case in which each mistake is made, and texts that its error must have."""


@contextmanager
def made(name: str, case: Case) -> Iterator[None]:
    """Make a mistake of the bank (tests/bank), or one of these."""
    from megatron.core.distributed import DistributedDataParallel

    from megaaccum.step.forward_step import ForwardStep
    from tests.bank import entries

    if name == "buffer left over":
        with patch.object(DistributedDataParallel, "zero_grad_buffer", lambda self: None):
            yield
    elif name == "flushes divide":
        divided = ForwardStep.scaled_loss

        def again(self: Any, index: int, at: Any, loss_func: Any) -> Any:
            by = divided(self, index, at, loss_func)
            return lambda output: (by(output)[0] / len(self._batch), *by(output)[1:])

        with patch.object(ForwardStep, "scaled_loss", again):
            yield
    else:
        with entries.made(name, case.plan()):
            yield


def digest_of(run: Run) -> str:
    """Digest of weights, optimizer state, buffers, random states and counters on this rank."""
    from megaaccum.distributed import rng

    found = hashlib.sha256(repr(run.engine.state() | {"verified": ""}).encode())
    pieces = [piece.tensors[kind] for piece in run.backend.state() for kind in sorted(piece.tensors)]
    for tensor in (*pieces, *run.engine.buffers.values(), *rng.snapshot().values()):
        found.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def verified(run: Run) -> str:
    """The line of the log, or the error."""
    data: Any = SimpleNamespace(train=Samples(), vocabulary=SimpleNamespace(size=VOCAB, eod=None))
    loader = loader_of(run.engine, data.train, data, consumed_samples=run.engine.consumed_samples)
    assert at_start.is_due(run.engine)
    try:
        line = at_start.verify_start(run.engine, data, loader)
    except StepError as error:
        return f"{error.printed_by}: {error}" * at_start.is_due(run.engine)
    return line * (not at_start.is_due(run.engine))


def healthy(cases: list[Case]) -> list[tuple[str, bool]]:
    """For each case, before its second step: the line of the log, and whether nothing has changed."""
    found = []
    for case in cases:
        run = Run.of(case)
        run.step()
        before = digest_of(run)
        found.append((verified(run), digest_of(run) == before))
    return found


def mistaken(cases: dict[str, Case]) -> list[str]:
    """The error of each mistake at the start of a run."""
    found = []
    for name, case in cases.items():
        with made(name, case):
            found.append(verified(Run.of(case)))
    return found


@pytest.fixture(scope="module")
def starts() -> dict[str, list[tuple[str, bool]]]:
    """By case, of each rank."""
    found = {}
    for world in (2, 4):
        cases = [case for case in HEALTHY if case.world_size == world]
        ranks = run_ranks(healthy, world, cases, timeout=240)
        found |= dict(zip(map(str, cases), zip(*ranks, strict=True), strict=True))
    return found


@pytest.mark.parametrize("case", HEALTHY, ids=str)
def test_a_healthy_run_starts_as_it_was(case, starts):
    for line, untouched in starts[str(case)]:
        assert line.startswith("verify_at_start: "), line
        assert untouched


@pytest.fixture(scope="module")
def errors() -> dict[str, list[str]]:
    """By mistake, of each rank."""
    ranks = run_ranks(mistaken, 2, {name: case for name, (case, _) in MISTAKES.items()}, timeout=240)
    return dict(zip(MISTAKES, zip(*ranks, strict=True), strict=True))


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_ends_the_start_on_every_rank(name, errors):
    for error in errors[name]:
        assert error.startswith("rank 0: verify_at_start: the step depends on how its samples are split"), error
        for words in MISTAKES[name][1]:
            assert words in error


def test_a_run_is_verified_once_in_each_layout(tmp_path):
    """A restart in another layout is verified again, one in the same layout is not."""
    whole_runs.make_data(tmp_path)
    changes: list[dict[str, Any]] = [{}, {}, {"pp_microbatches": 2, "pipeline_model_parallel_size": 1}]
    runs = [whole_runs.train(tmp_path, max_steps=1, verify_at_start="true", **change) for change in changes]
    lines = [run.output.count("verify_at_start: ") for run in runs]
    assert (lines, [run.code for run in runs]) == ([1, 0, 1], [0, 0, 0]), runs
