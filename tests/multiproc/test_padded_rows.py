"""Padding after a row's last token does not count where routers of experts count: a step on padded rows is that of one
process on the same rows without their padding."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megaaccum.lab.verification.testing import run_ranks
from tests.support import parity
from tests.support.distance import problems_with, relative_error
from tests.support.parity import SEQ, Case, Gradient, Rig

MOE = (
    "--num_layers 4 --num_experts 4 --moe_router_topk 2 --no_add_bias_linear --moe_ffn_hidden_size 32 "
    "--moe_z_loss_coeff 0.01 --moe_router_dtype fp64 --moe_aux_loss_coeff 0.1 "
)
AUX, SEQUENCE = (MOE + f"--moe_router_load_balancing_type {kind} " for kind in ("aux_loss", "seq_aux_loss"))
BIAS = AUX + "--moe_router_enable_expert_bias --moe_router_score_function sigmoid "
DOCUMENTS = AUX + "--reset_attention_mask "
MTP = AUX + "--mtp_num_layers 1 --position_embedding_type rope "
PP, TP = "--pipeline_model_parallel_size 2 ", "--tensor_model_parallel_size 2 --sequence_parallel "
CP, EP = "--context_parallel_size 2 ", "--expert_model_parallel_size 2 "
SIZE = "--pp_microbatches 4 --global_batch_size 16 "
CASES = {
    "dp": Case(2, SIZE, AUX, "fp64"),
    "dp, ep": Case(2, SIZE + EP, SEQUENCE, "fp64"),
    "tp": Case(2, SIZE + TP, AUX, "fp64"),
    "cp": Case(2, SIZE + CP, SEQUENCE, "fp64"),
    "pp": Case(2, SIZE + PP, AUX, "fp64"),
    "recomputed": Case(2, SIZE + "--recompute_granularity full --recompute_method uniform ", AUX, "fp64"),
    "tp, pp": Case(4, SIZE + TP + PP, AUX, "fp64"),
    "tp, pp, interleaved, ep": Case(
        4, SIZE + TP + PP + "--vpp 2 --expert_tensor_parallel_size 1 " + EP, SEQUENCE, "fp64"
    ),
    "cp, pp, zbv": Case(4, SIZE + CP + PP + "--schedule zbv ", AUX, "fp64"),
    "prediction, tp, pp": Case(4, SIZE + TP + PP, MTP, "fp64"),
    "rows": Case(2, SIZE + "--micro_batch_size 2 ", AUX, "fp64"),
    "rows, tp, pp": Case(4, SIZE + "--micro_batch_size 2 " + TP + PP, AUX, "fp64"),
    "documents": Case(2, SIZE + "--micro_batch_size 2 " + PP, DOCUMENTS, "fp64"),
    "packed": Case(2, SIZE + PP + "--attention_backend unfused ", DOCUMENTS, "fp64"),
    "packed rows": Case(2, SIZE + "--micro_batch_size 2 --attention_backend unfused ", DOCUMENTS, "fp64"),
    "packed, tp, pp": Case(4, SIZE + "--attention_backend unfused " + TP + PP, DOCUMENTS, "fp64"),
    "prediction, cp": Case(2, SIZE + CP, MTP, "fp64"),
}


def row(index: int) -> dict[str, torch.Tensor]:
    """Row `index` of the data, two documents long at most: the first token of each is a prompt's, and padding is token
    0."""
    made, draw = parity.sample(index), torch.Generator().manual_seed(index)
    is_padding = torch.arange(SEQ) >= int(torch.randint(2, SEQ + 1, (), generator=draw))
    starts = torch.arange(SEQ) == int(torch.randint(1, SEQ, (), generator=draw))
    starts[0] = True
    mask = torch.ones(SEQ).masked_fill(is_padding | starts, 0)
    made |= {name: made[name].masked_fill(is_padding, 0) for name in ("tokens", "labels")}
    return made | {"loss_mask": mask, "padding_mask": is_padding, "document_starts": starts}


def counted(chunks: list[Any]) -> dict[str, torch.Tensor]:
    """Tokens of each expert that this rank's routers counted for their bias."""
    from megaaccum.model import names

    buffers = ((chunk, *named) for chunk in chunks for named in chunk.named_buffers())
    name = "local_tokens_per_expert"
    return {names.global_name(chunk, each): found.double() for chunk, each, found in buffers if each.endswith(name)}


def padded(cases: list[Case], mask: bool = True) -> list[tuple[Gradient, dict[str, torch.Tensor]]]:
    """The gradient of a step of each case on padded rows, and the tokens of each expert that its bias would move by.
    mask: micro-batches have their padding mask."""
    found = []
    for case in cases:
        rig = Rig.of(case)
        plan, size, rank = rig.plan.batch, rig.plan.batch.micro_batch_size, rig.groups.dp.rank()
        places = [plan.sample_index(m, rank, in_runs=rig.plan.in_runs) for m in range(plan.num_microbatches)]
        batch = [stacked(range(place * size, (place + 1) * size), case.model) for place in places]
        for each in batch if not mask else ():
            del each["padding_mask"]
        for chunk in rig.chunks:
            chunk.packs_rows = "--attention_backend unfused" in case.layout
        gradient, _ = rig.watched(batch)
        tokens = counted(rig.chunks)
        for each in tokens.values():
            torch.distributed.all_reduce(each, group=rig.groups.collection.tp_dp_cp)
        found.append((gradient, tokens))
    return found


def stacked(rows: range, model: str) -> dict[str, torch.Tensor]:
    """The micro-batch of these rows, with their documents if the model keeps them apart."""
    made = [row(index) for index in rows]
    names = made[0].keys() - (set() if "--reset_attention_mask" in model else {"document_starts"})
    return {name: torch.stack([each[name] for each in made]) for name in names}


def unpadded(model: str, lane: str, size: int, count: int) -> tuple[parity.Reference, dict[str, torch.Tensor]]:
    """Gradient and tokens of one process on `count` rows without their padding, those of a micro-batch of `size` in one
    row, of documents."""
    from megaaccum.lab.verification.reference import add, norm_of

    chunk, plan = parity.one_process(model, lane)
    loop, grads, loss = parity.plain_loop(chunk, plan), {}, 0.0
    loop.forget_tokens()
    parts = []
    for at in range(0, count, size):
        batch = stacked(range(at, at + size), model)
        batch.setdefault("document_starts", torch.arange(SEQ).eq(0).repeat(size, 1))
        parts.append({name: each[~batch["padding_mask"]][None] for name, each in batch.items()})
    total = sum(float(each["loss_mask"].sum()) for each in parts)
    for each in parts:
        del each["padding_mask"]
        value, mine = loop.backward(each, total, len(parts))
        loss += value
        add(grads, mine)
    cuts = {n: parity.Cut(getattr(p, "partition_dim", -1), False) for n, p in parity.named(chunk)}
    return parity.Reference(Gradient(grads, norm_of(grads), loss, int(total)), cuts), counted([chunk])


@pytest.fixture(scope="module")
def references() -> dict[Any, tuple[parity.Reference, dict[str, torch.Tensor]]]:
    """By model, precision and size of a micro-batch."""
    return {}


def expected(references: Any, case: Case) -> tuple[parity.Reference, dict[str, torch.Tensor]]:
    batch = case.plan().batch
    key = case.model, case.lane, batch.micro_batch_size
    if key not in references:
        (references[key],) = run_ranks(unpadded, 1, *key, batch.global_batch_size, timeout=60)
    return references[key]


@pytest.fixture(scope="module")
def by_case() -> dict[str, list[tuple[Gradient, dict[str, torch.Tensor]]]]:
    """Results of each case, by rank."""
    found = {}
    for size in {case.world_size for case in CASES.values()}:
        mine = {name: case for name, case in CASES.items() if case.world_size == size}
        ranks = run_ranks(padded, size, [*mine.values()], timeout=120)
        found |= dict(zip(mine, zip(*ranks, strict=True), strict=True))
    return found


@pytest.mark.parametrize("name", CASES)
def test_a_padded_row_is_the_row_without_padding(by_case, references, name):
    exact, _ = expected(references, CASES[name])
    assert problems_with(CASES[name], [gradient for gradient, _ in by_case[name]], exact, exact) == []


def test_padding_that_counts_is_seen(references):
    case = CASES["dp"]
    exact, _ = expected(references, case)
    found = [gradient for ((gradient, _),) in run_ranks(padded, 2, [case], False, timeout=60)]
    routers = {name: part for name, part in found[0].parts.items() if "router" in name}
    assert min(relative_error(part, exact.gradient.parts[name]) for name, part in routers.items()) > 0.1


@pytest.mark.parametrize("layout", ["", TP + PP, CP])
def test_padding_does_not_move_a_bias(references, layout):
    """Megatron-core 0.19 took the mask for one of experts (Megatron-LM#6111)."""
    case = Case(4 if PP in layout else 2, SIZE + layout, BIAS, "fp64")
    _, tokens = expected(references, case)
    for ((_, found),) in run_ranks(padded, case.world_size, [case], timeout=60):
        assert found and all(torch.equal(each, tokens[name]) for name, each in found.items())


OVERLAP = "--grad_accum_steps 2 --pp_microbatches 2 " + EP


def test_forwards_and_backwards_of_experts_in_turns_change_no_bit():
    """Megatron-core 0.19's plans give their routers no mask."""
    apart, in_turns = (Case(2, OVERLAP + more, AUX, "bf16") for more in ("", "--overlap_moe_expert_parallel_comm "))
    for (plain, _), (found, _) in run_ranks(padded, 2, [apart, in_turns], timeout=60):
        assert found.norm == plain.norm
        assert all(torch.equal(part, plain.parts[name]) for name, part in found.parts.items())


BLOCKS = SIZE + "--reproducible layout --reproducible_context_blocks 2 "


def test_blocks_of_a_sequence_count_no_padding(references):
    for model in (AUX, SEQUENCE):
        cases = [Case(2, BLOCKS + cp, model) for cp in ("", CP)]
        exact, near = (expected(references, Case(2, SIZE, model, lane))[0] for lane in ("fp64", "fp32"))
        by_case = zip(*run_ranks(padded, 2, cases, timeout=60), strict=True)
        whole, cut = ([gradient for gradient, _ in ranks] for ranks in by_case)
        assert problems_with(cases[0], whole, exact, near) == []
        assert all(torch.equal(part, cut[0].parts[name]) for name, part in whole[0].parts.items())
