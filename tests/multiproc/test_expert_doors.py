"""Experts in a model that comes from outside the configuration: Megatron's `pretrain`, chunks of a user's own in
`initialize` and in `wrap`. What the plan does not describe is refused on every rank."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import patch

import pytest

from megaaccum.lab.verification.testing import run_ranks
from tests.multiproc.test_expert_ranks import EP, MODEL, MODES, TP, WHOLE, cell
from tests.support.distance import problems
from tests.support.engines import Calls, all_in_calls
from tests.support.megatron_loop import Loop, loop_gradients
from tests.support.megatron_pretrain import Run, numbers, pretrained
from tests.support.parity import Case

ROUNDING = 1e-6
"""Seven digits are printed of a loss, of a norm three."""
FLAGS = (
    "--train-iters 3 --eval-iters 0 --pipeline-model-parallel-size 1 --disable-bias-linear --num-experts 4 "
    "--moe-router-topk 2 --moe-token-dispatcher-type alltoall --moe-aux-loss-coeff 1e-2 --lr 1e-2 "
)
CUT = FLAGS + "--tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size "
LAYOUTS = {
    "whole beside cut matrices": CUT + "1 ",
    "spread": FLAGS + "--expert-model-parallel-size 2 ",
    "spread and cut": CUT + "2 --expert-model-parallel-size 2 ",
}
KEYS = {
    "ZeRO-1": dict(zero_stage=1),
    "ZeRO-3 resident": {},
    "ZeRO-3 streaming": dict(sync="streaming"),
    "FSDP2 resident": dict(backend="fsdp2"),
    "Megatron": dict(backend="megatron"),
    "DDP": dict(backend="ddp"),
}


RUNS = [("whole beside cut matrices", mode) for mode in KEYS]
RUNS += [("spread", "ZeRO-3 resident"), ("spread and cut", "FSDP2 resident"), ("spread and cut", "Megatron")]


@pytest.fixture(scope="module")
def printed() -> dict[tuple[str, str], list[str]]:
    """Lines that each run prints, by layout and backend; Megatron's own objects are backend "theirs"."""
    runs = {(name, "theirs"): Run(flags, ours=False) for name, flags in LAYOUTS.items()}
    runs |= {(name, mode): Run(LAYOUTS[name], keys=KEYS[mode]) for name, mode in RUNS}
    env = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}  # Megatron insists on it under tp
    found = run_ranks(pretrained, 4, list(runs.values()), timeout=200, env=env)[-1]
    return dict(zip(runs, found, strict=True))


@pytest.mark.parametrize(("layout", "mode"), RUNS)
def test_pretrain_prints_what_megatrons_own_objects_print(printed, layout, mode):
    assert len(printed[layout, "theirs"]) == 3
    assert numbers(printed[layout, mode]) == pytest.approx(numbers(printed[layout, "theirs"]), rel=ROUNDING)


WIDE = (WHOLE, EP + TP, EP)
LATE = "--moe_z_loss_coeff 0 "
"""A loop says how many tokens a step has when they are over. A side loss cannot wait for that, and the router rounds
its scores to FP32."""


def test_chunks_of_a_users_own_in_an_engine():
    known = Calls((1, 3), known="total")  # a side loss is then weighed as in one process
    cells = [(cell(mode, 4, layout), known) for mode, layout in zip(MODES, WIDE * 3, strict=False)]
    for (case, _), ranks in zip(cells, zip(*run_ranks(all_in_calls, 4, cells, timeout=150), strict=True), strict=True):
        assert problems(case, list(ranks)) == [], case


def test_chunks_of_a_users_own_in_megatrons_train_step():
    cases = [cell(mode, 4, layout, LATE, exact=False) for mode, layout in zip(MODES, WIDE[1:] * 4, strict=False)]
    loops = [Loop(case) for case in cases]
    for loop, ranks in zip(loops, zip(*run_ranks(loop_gradients, 4, loops, timeout=150), strict=True), strict=True):
        assert problems(loop.case, list(ranks)) == [], loop.case


# --- what does not fit together --------------------------------------------------------------------------------------


def refused(case: Case, spoil: Callable, **layout) -> str:
    """The error of `initialize` with chunks of `case`, that `spoil(chunks)` has changed, and a plan of another
    layout."""
    from megaaccum import Plan, initialize
    from megaaccum.distributed import groups
    from megaaccum.errors import MegaaccumError
    from megaaccum.pretrain.model import gpt
    from tests.support.parity import VOCAB

    plan = case.plan()
    groups.destroy()
    built = groups.build(plan.layout, timeout_minutes=1)
    chunks = gpt.build_chunks(plan, built, vocab_size=VOCAB)
    spoil(chunks)
    experts = {"num_experts": 4, "moe_router_topk": 2} if layout.pop("experts", True) else {}
    batch, step = dict(micro_batch_size=1, seq_length=16, grad_accum_steps=4), layout.pop("step", {})
    other = Plan.of(layout=layout, batch=batch, step=step, optimizer=dict(lr=1e-3), **experts)
    try:
        initialize(other, chunks, groups=built.collection)
    except MegaaccumError as error:
        return str(error)
    return ""


def all_refused() -> list[str]:
    import torch

    whole = dict(tensor_model_parallel_size=2, sequence_parallel=True, expert_tensor_parallel_size=1)
    spread, cut = Case(2, EP, MODEL), Case(2, WHOLE, MODEL)

    def fewer(chunks) -> None:
        chunks[0].config.moe_router_topk = 5

    def quantiles(chunks) -> None:
        chunks[0].config.moe_router_load_balancing_type = "quantile_balancing"

    def counts(chunks) -> None:
        chunks[0].config.moe_router_enable_expert_bias = True

    def unmarked(chunks) -> None:
        for param in chunks[0].parameters():
            param.allreduce = True

    def on_one_rank(chunks) -> None:
        if torch.distributed.get_rank() == 0:
            del chunks[0].decoder.layers[3].mlp.experts

    def keep(chunks) -> None: ...

    return [
        refused(spread, keep, experts=False),
        refused(spread, keep),
        refused(cut, keep, **(whole | {"expert_tensor_parallel_size": 2})),
        refused(cut, fewer, **whole),
        refused(cut, quantiles, **whole),
        refused(cut, counts, **whole, step=dict(short_batch="pad")),
        refused(cut, unmarked, **whole),
        refused(cut, on_one_rank, **whole),
    ]


WORDS = [
    ["built with 4 experts", "num_experts of the plan is None", "give Plan.of num_experts=4"],
    ["expert_model_parallel_size", "is 2, but the plan's is 1", "allreduce = False"],
    ["expert_tensor_parallel_size", "is 1, but the plan's is 2", "allreduce = False"],
    ["moe_router_topk 5", "4 experts"],
    ["quantile_balancing", "no step moves its bias"],
    ["routers of the chunks count the tokens", "short_batch to error"],
    ["linear_fc1.weight is not marked", "ep 1, etp 1, tp 2"],
    ["pipeline rank 0 has experts on some ranks only", "ranks [0] hold", "ranks [1] hold", "same layers"],
]


def test_what_the_plan_does_not_describe_is_refused_on_every_rank():
    first, second = run_ranks(all_refused, 2, timeout=60)
    assert first == second
    for text, words in zip(first, WORDS, strict=True):
        assert all(word in text for word in words), text


def without_marks(loop: Loop):
    """The gradients of experts are summed over the ranks of dense matrices, whatever the marks say."""
    from megaaccum.model import names
    from tests.support.megatron_loop import loop_gradient

    with patch.object(names, "dp_group", lambda param, groups: groups.dp_cp):
        return loop_gradient(loop)


def test_experts_over_the_ranks_of_dense_matrices_are_seen():
    loop = Loop(cell("DDP", 2, WHOLE))
    assert any("experts" in text for text in problems(loop.case, run_ranks(without_marks, 2, loop)))
