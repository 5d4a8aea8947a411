"""Engines of two layouts in one process: each has the gradient of one process on the full batch, whatever the other
does between its calls."""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache
from unittest.mock import patch

import pytest

from megaaccum.lab.verification.testing import run_ranks
from tests.support.distance import problems
from tests.support.parity import VOCAB, Case, Gradient, Rig

PIPELINE = Case(4, "--pipeline_model_parallel_size 2 --pp_microbatches 8 ", "--num_layers 4 ")
REWARD = Case(4, "--pp_microbatches 8 --backend fsdp2 ", "--num_layers 2 ")
TENSOR = Case(4, "--tensor_model_parallel_size 2 --pp_microbatches 8 --sync streaming ", "--num_layers 2 ")
V = Case(4, "--pipeline_model_parallel_size 4 --pp_microbatches 8 --schedule zbv --zero_stage 1 ")


def rig_of(case: Case) -> Rig:
    """An engine beside those that there are, over chunks of its own groups."""
    from megaaccum import build_groups, initialize
    from megaaccum.pretrain.model import gpt
    from tests.support.engines import forward_step

    plan = case.plan()
    built = build_groups(plan)
    chunks = gpt.build_chunks(plan, built, vocab_size=VOCAB)
    engine = initialize(plan, chunks, groups=built, forward_step_func=forward_step)
    rig = Rig(case, plan, engine.groups, engine.chunks, engine.backend, engine.train_steps)
    rig.engine = engine
    return rig


def in_turns(cases: tuple[Case, ...], switch: bool = True) -> list[Gradient]:
    """The gradients of two engines' first steps, whose calls alternate."""
    from megaaccum.distributed.groups import Groups
    from tests.support.engines import stacked

    with nullcontext() if switch else patch.object(Groups, "current", lambda self: nullcontext()):
        rigs = [rig_of(case) for case in cases]
        seen: list[dict] = [{} for _ in rigs]
        for rig, found in zip(rigs, seen, strict=True):
            rig.backend.step = lambda rig=rig, found=found: found.update(rig.assemble())
        for part in (slice(0, 3), slice(3, 8)):
            for rig in rigs:
                total = float(sum(batch["loss_mask"].sum() for batch in stacked(rig.engine)))
                rig.engine.forward_backward(rig.microbatches()[part], total_weight=total)
                rig.engine.evaluate(rig.microbatches()[:4])
        results = [rig.engine.optim_step() for rig in rigs]
    return [
        Gradient(found, result.grad_norm, result.loss, result.num_tokens, rig.groups.tp.rank())
        for rig, found, result in zip(rigs, seen, results, strict=True)
    ]


EXPERTS = "--num_layers 2 --num_experts 4 --moe_router_topk 2 --moe_ffn_hidden_size 32 --no_add_bias_linear "
EP4, EP2 = (Case(4, f"--expert_model_parallel_size {ep} --pp_microbatches 8 --zero_stage 1 ", EXPERTS) for ep in (4, 2))


@pytest.mark.parametrize(
    "cases", [(PIPELINE, REWARD), (TENSOR, V), (REWARD, TENSOR), (EP4, EP2)], ids=["actor", "tp", "rows", "experts"]
)
def test_each_engine_has_the_gradient_of_one_process(cases):
    by_rank = run_ranks(in_turns, 4, cases, timeout=100)
    for number, case in enumerate(cases):
        assert problems(case, [gradients[number] for gradients in by_rank]) == []


def trained(cases: tuple[Case, ...]) -> list[list[tuple[float, float]]]:
    """(loss, gradient norm) of three steps of each engine, step by step in turns."""
    rigs = [rig_of(case) for case in cases]
    found: list[list[tuple[float, float]]] = [[] for _ in rigs]
    for _ in range(3):
        for rig, steps in zip(rigs, found, strict=True):
            result = rig.engine.train_step(rig.microbatches())
            steps.append((result.loss, result.grad_norm))
    return found


@cache
def alone(case: Case) -> list[tuple[float, float]]:
    return run_ranks(trained, case.world_size, (case,), timeout=100)[0][0]


def test_steps_in_turns_are_the_steps_of_each_engine_alone():
    """Two DeepSpeed engines, whose library keeps the groups of the last one in a global of its own."""
    for tensor, v in run_ranks(trained, 4, (TENSOR, V), timeout=100):
        assert [tensor, v] == [alone(TENSOR), alone(V)] and len(set(tensor)) == 3


@pytest.mark.parametrize("keys", ["--reproducible layout", "--deterministic", "--optimizer muon"])
def test_engines_of_megatrons_reduce_each_in_its_own_way(keys):
    """Its reduce-scatter is a global of the module, which each engine sets."""
    cases = tuple(Case(3, f"--backend megatron --pp_microbatches 8 {each}", "--num_layers 2 ") for each in (keys, ""))
    for order in (1, -1):
        found = run_ranks(trained, 3, cases[::order], timeout=100)[0]
        for steps, case in zip(found[::order], cases, strict=True):
            due = [each for step in alone(case) for each in step]
            assert [each for step in steps for each in step] == pytest.approx(due)


def own_modules(switch: bool = True) -> list[list]:
    """[loss, pipeline ranks, those that parallel_state has in the forwards] of engines over plain modules, made
    without a word on groups: of pp 2, of pp 1, of the first once more."""
    import torch
    from megatron.core import parallel_state

    from megaaccum import Plan, initialize
    from megaaccum.distributed.groups import Groups

    asked: set[int] = set()

    def stage(number: int, stages: int) -> torch.nn.Module:
        module = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(2 // stages)])
        for index, layer in enumerate(module):
            torch.nn.init.constant_(layer.weight, 0.01 * (1 + index + number))
            torch.nn.init.zeros_(layer.bias)
        module.name_in_model, module.received = f"{number}.", None
        module.set_input_tensor = lambda given: setattr(module, "received", given[0] if given else None)
        return module

    def forward_step(data_iterator, chunk):
        asked.add(parallel_state.get_pipeline_model_parallel_world_size())
        given = next(data_iterator)
        return chunk(given if chunk.received is None else chunk.received), lambda out: (out.square().sum(), 4.0, {})

    def engine(pp: int):
        batch = dict(micro_batch_size=1, seq_length=4, global_batch_size=16)
        plan = Plan.of(layout=dict(pp=pp), batch=batch, sharding=dict(backend="ddp"), hidden_size=8, world_size=4)
        chunks = [stage(number, pp) for number in plan.layout.stages(torch.distributed.get_rank())]
        return initialize(plan, chunks, forward_step_func=forward_step, optimizer=torch.optim.SGD)

    found: list[list] = []
    actor, reward = engine(2), engine(1)
    with nullcontext() if switch else patch.object(Groups, "current", lambda self: nullcontext()):
        for each in (actor, reward, actor):
            asked.clear()
            loss, _ = each.evaluate([torch.ones(4, 1, 8) for _ in range(each.batch.num_microbatches)])
            found.append([loss, each.groups.pp.size(), *asked])
    assert parallel_state.get_pipeline_model_parallel_world_size() == 1, "outside, the groups that were built last"
    return found


def test_a_user_says_nothing_about_groups():
    for found in run_ranks(own_modules, 4, timeout=60):
        losses = {loss for loss, *_ in found}
        assert len(losses) == 1 and [sizes for _, *sizes in found] == [[2, 2], [1, 1], [2, 2]]


def test_without_the_switch_code_that_asks_parallel_state_sees_the_engine_that_was_made_last():
    for found in run_ranks(own_modules, 4, False, timeout=60):
        assert [sizes for _, *sizes in found] == [[2, 1], [1, 1], [2, 1]]


def weights_in_turns(switch: bool = True) -> tuple[list[set[int]], set[int], list[bool]]:
    """Streams of two engines' weights, taken in turns. Returns the tensor-parallel sizes that parallel_state has inside
    each, those outside, and whether each has the tensors that it has alone."""
    import torch
    from megatron.core import parallel_state

    from megaaccum.checkpoint import whole
    from megaaccum.distributed.groups import Groups

    rigs, copy = [rig_of(TENSOR), rig_of(V)], whole.copy_runs
    alone = [dict(rig.engine.whole_weights()) for rig in rigs]
    inside: list[set[int]] = [set(), set()]
    outside: set[int] = set()
    found: list[dict] = [{}, {}]
    with nullcontext() if switch else patch.object(Groups, "current", lambda self: nullcontext()):
        streams = [rig.engine.whole_weights() for rig in rigs]
        left = [0, 1]
        while left:
            for number in list(left):

                def seen(*args, number=number, **options):
                    inside[number].add(parallel_state.get_tensor_model_parallel_world_size())
                    return copy(*args, **options)

                with patch.object(whole, "copy_runs", seen):
                    item = next(streams[number], None)
                outside.add(parallel_state.get_tensor_model_parallel_world_size())
                left.remove(number) if item is None else found[number].update([item])
    same = [
        each.keys() == other.keys() and all(torch.equal(each[name], other[name]) for name in each)
        for each, other in zip(alone, found, strict=True)
    ]
    return inside, outside, same


def test_whole_weights_of_two_engines_in_turns():
    found = run_ranks(weights_in_turns, 4, timeout=60)
    for _, outside, same in found:
        assert same == [True, True] and outside == {1}, "outside, the groups that were built last"
    assert [set().union(*(inside[number] for inside, _, _ in found)) for number in (0, 1)] == [{2}, {1}]


def test_without_the_switch_a_stream_sees_the_engine_that_was_made_last():
    assert {1} in [inside[0] for inside, _, _ in run_ranks(weights_in_turns, 4, False, timeout=60)]
