"""The two copies of a tied embedding, on the first and on the last stage, hold the same bits after every step: with
three data-parallel ranks, whose sum depends on the order."""

from typing import Any
from unittest.mock import patch

import pytest
import torch

from megaaccum.lab.verification.testing import run_ranks
from tests.support import user_models
from tests.support.distance import problems
from tests.support.parity import Case, Gradient, Rig

PP = "--pipeline_model_parallel_size 2 --pp_microbatches 4 "
MODEL = "--num_layers 4 "
CLIP = "--weight_decay 0.1 --clip_grad 0.05 "
PREDICTS = MODEL + "--position_embedding_type rope --mtp_num_layers 1 --mtp_loss_scaling_factor 0.5 "


def case(layout: str, lane: str = "fp32", model: str = MODEL) -> Case:
    return Case(6, PP + layout, model, lane)


CASES = [
    case("--zero_stage 1"),
    case("--zero_stage 2"),
    case("--zero_stage 3"),
    case("--zero_stage 1", "bf16"),
    case("--zero_stage 2", "fp16"),
    case("--zero_stage 1 --offload_optimizer cpu"),
    case("--zero_stage 2 --schedule zbv"),
    case("--zero_stage 2", model=PREDICTS),
    case("--zero_stage 1 " + CLIP),
    case("--zero_stage 2 --decoupled_lr 1e-2 " + CLIP),
    case("--sync streaming"),
    case("--backend fsdp2"),
    case("--backend megatron"),
    case("--backend ddp", "bf16"),
]

Held = dict[tuple[bool, str], torch.Tensor]
"""(whether it is the head's copy, which tensor of it): the weight that forwards read (but for FSDP2, which gathers
another parameter), and a shard's weight and moments."""


def after_steps(cases: list[Case]) -> list[tuple[Gradient, int, list[Held]]]:
    """For each case on this rank: the gradient of the first step, its data-parallel rank, and its part of the tied
    matrix after each step."""
    results = []
    for each in cases:
        rig = Rig.of(each)
        gradient, _ = rig.watched()
        samples, held = rig.plan.batch.global_batch_size, []
        for step in range(3):
            rig.train(step=step, first=step * samples)
            held.append(tied(rig))
        results.append((gradient, rig.groups.dp.rank(), held))
    return results


def tied(rig: Rig) -> Held:
    from megaaccum.model import names

    held = {}
    with rig.backend.whole():
        rig.backend.gather()
        for _, param in names.named_parameters(rig.chunks):
            if names.is_tied(param):
                held[names.is_tied_copy(param), "whole"] = param.detach().clone()
    for piece in rig.backend.state():
        if names.is_tied(piece.param):
            for kind, tensor in piece.tensors.items():
                held[names.is_tied_copy(piece.param), f"{kind} from {piece.start}"] = tensor.detach().clone()
    return held


@pytest.fixture(scope="module")
def seen():
    """By case, what each rank had."""
    return dict(zip(CASES, zip(*run_ranks(after_steps, 6, CASES, timeout=200), strict=True), strict=True))


def differing(ranks: list[tuple[Gradient, int, list[Held]]]) -> list[str]:
    """Differences of the two copies after any step, on the same data-parallel rank of the two stages."""
    found = []
    for dp_rank in range(3):
        stages = [held for _, rank, held in ranks if rank == dp_rank]
        for step in zip(*stages, strict=True):
            held = {key: tensor for each in step for key, tensor in each.items()}
            originals = {what: tensor for (of_head, what), tensor in held.items() if not of_head}
            copies = {what: tensor for (of_head, what), tensor in held.items() if of_head}
            assert originals.keys() == copies.keys()
            assert {what.split()[0] for what in copies} >= {"param", "exp_avg", "exp_avg_sq"}
            found += [what for what, tensor in originals.items() if not torch.equal(tensor, copies[what])]
    return found


@pytest.mark.parametrize("case", CASES, ids=str)
def test_both_copies_have_the_same_bits(case, seen):
    assert differing(seen[case]) == []


@pytest.mark.parametrize("case", [case for case in CASES if CLIP not in case.layout], ids=str)
def test_the_gradient_is_that_of_one_process(case, seen):
    assert problems(case, [gradient for gradient, _, _ in seen[case]]) == []


def in_one_flat_run(cases: list[Case]) -> list[tuple[Gradient, int, list[Held]]]:
    """The same with the copies among the other parameters, where ZeRO-3 cuts them alike all the same."""
    from megaaccum.sharding import deepspeed

    with patch.object(deepspeed, "separate_tied_copies", lambda optimizer: None):
        return after_steps(cases)


def test_an_optimizer_rounds_the_last_elements_of_a_flat_run_otherwise():
    alone = run_ranks(in_one_flat_run, 6, [case("--zero_stage 3")], timeout=60)
    assert differing([results[0] for results in alone])


class OwnStage(user_models.Stage):
    """A stage of a user's own whose head is the embedding: one object on one stage, else a copy of its name."""

    def __init__(self, stage: int, stages: int):
        super().__init__(stage, stages)
        self.eval()
        for layer in self.layers:
            layer.attention = torch.nn.Identity()  # whose rounding steps would multiply
        if self.post_process:
            table = user_models.Stage(0, 1).embedding.weight if self.embedding is None else self.embedding.weight
            self.head = torch.nn.Linear(*reversed(table.shape), bias=False)
            self.head.weight = table
        if self.post_process and self.embedding is None:
            self.embedding, table.shared = self.head, True
            del self.head
            vars(self)["head"] = self.embedding  # no second name
        if stages > 1 and self.embedding is not None:
            self.embedding.weight.shared_embedding = True


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01, weight_decay=0.1, eps=1e-3)


OWN = [
    (dict(pp=2), dict(zero_stage=3)),
    (dict(pp=2, schedule="zbv"), dict(backend="fsdp2")),
    (dict(pp=2, vpp=2), dict(backend="megatron")),
    (dict(pp=2, schedule="dualpipev"), dict(sync="streaming")),
    (dict(pp=2, schedule="zbv"), dict(zero_stage=1)),
]
"""A step is taken in each layout, from the checkpoint of the one before."""


def own_steps(folder: str) -> dict[str, torch.Tensor]:
    """Weights after a step in each layout."""
    from megaaccum import Plan, initialize
    from megaaccum.distributed import groups

    batch = dict(micro_batch_size=user_models.ROWS, seq_length=user_models.SEQ, global_batch_size=16 * user_models.ROWS)
    for step, (layout, sharding) in enumerate(OWN):
        optimizer = dict(clip_grad=0.5)
        plan = Plan.of(layout=layout, batch=batch, sharding=sharding, optimizer=optimizer, hidden_size=32)
        groups.destroy()
        chunks = [OwnStage(at, plan.layout.num_stages) for at in plan.layout.stages(torch.distributed.get_rank())]
        engine = initialize(plan, chunks, forward_step_func=user_models.forward_step, optimizer=adam)
        assert engine.load(folder) == (step > 0)
        engine.train_step(user_models.batches(step)[engine.groups.dp.rank() :: 2])
        engine.save(folder)
    return dict(engine.whole_weights())


def test_a_users_own_copies_are_one_weight(tmp_path):
    whole = OwnStage(0, 1)
    whole.set_input_tensor(None)
    optimizer = adam(whole.parameters())
    for step in range(len(OWN)):
        optimizer.zero_grad()
        calls = [user_models.forward_step(iter([each]), whole) for each in user_models.batches(step)]
        sums, weights, _ = zip(*(loss(output) for output, loss in calls), strict=True)
        (sum(sums) / sum(weights)).backward()
        torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.5)
        optimizer.step()
    for found in run_ranks(own_steps, 4, str(tmp_path), timeout=90):
        assert found.keys() == dict(whole.named_parameters()).keys()
        for name, weight in whole.named_parameters():
            torch.testing.assert_close(found[name], weight.detach(), rtol=1e-4, atol=1e-6)
