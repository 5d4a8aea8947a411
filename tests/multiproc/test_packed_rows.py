"""The rows of a micro-batch as one packed row, as Transformer Engine's attention takes documents: here on local layers,
whose gradient under a whole mask is the same."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch

from megaaccum.lab.verification.testing import run_ranks
from tests.support.distance import relative_error
from tests.support.parity import Case, Gradient, Rig

PP = "--pipeline_model_parallel_size 2 --pp_microbatches 4 --micro_batch_size 2 "
TP = "--tensor_model_parallel_size 2 --pp_microbatches 2 --micro_batch_size 3 "
WHOLE = "--num_layers 2 --attention_backend unfused "
ROPE = WHOLE + "--position_embedding_type rope --num_query_groups 2 "
LATENT = (
    "--multi_latent_attention --kv_lora_rank 8 --q_lora_rank 8 --qk_head_dim 8 --qk_pos_emb_head_dim 8 --v_head_dim 12 "
)
EXPERTS = "--num_experts 4 --no_add_bias_linear --moe_aux_loss_coeff 0.1 --moe_router_load_balancing_type "
CASES = {
    "1f1b": Case(2, PP, ROPE, "fp64"),
    "interleaved": Case(2, PP + "--vpp 2 ", ROPE.replace("2", "4", 1), "fp64"),
    "zb-h1": Case(2, PP + "--schedule zb-h1 ", ROPE, "fp64"),
    "tp": Case(2, TP + "--sequence_parallel ", WHOLE, "fp64"),
    "recomputed": Case(2, PP + "--recompute_granularity full --recompute_method uniform ", ROPE, "fp64"),
    "experts": Case(2, PP, ROPE + EXPERTS + "seq_aux_loss ", "fp64"),
    "experts, tp": Case(2, TP + "--sequence_parallel ", ROPE + EXPERTS + "aux_loss ", "fp64"),
    "latent": Case(2, PP, WHOLE + "--position_embedding_type rope " + LATENT, "fp64"),
}


def with_documents(rig: Rig) -> list[dict[str, torch.Tensor]]:
    """Its micro-batches, with documents that begin at random places."""
    made = []
    for number, batch in enumerate(rig.microbatches()):
        starts = torch.rand(batch["tokens"].shape, generator=torch.Generator().manual_seed(number)) < 0.2
        starts[:, 0] = True
        made.append(batch | {"document_starts": starts})
    return made


def masked(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same with a mask of Megatron's own form, True where nothing is attended to."""
    document = batch["document_starts"].cumsum(1)
    allowed = (document[:, :, None] == document[:, None, :]).tril()
    return batch | {"document_starts": ~allowed[:, None]}


def rig_of(case: Case, *, packs: bool) -> Rig:
    """packs: as with Transformer Engine's layers. Positions of a packed row begin again with each document; in FP32
    angles their differences are rounded."""
    rig = Rig.of(case)
    for chunk in rig.chunks:
        chunk.packs_rows = packs
        for module in chunk.modules():
            if hasattr(module, "inv_freq"):
                module.inv_freq = module.inv_freq.double()
    return rig


def under_a_mask(case: Case) -> Gradient:
    rig = rig_of(case, packs=False)
    return rig.watched([masked(each) for each in with_documents(rig)])[0]


def packed(case: Case) -> Gradient:
    rig = rig_of(case, packs=True)
    return rig.watched(with_documents(rig))[0]


def in_one_document_a_row(case: Case) -> Gradient:
    """By mistake, documents are not told to the packed row."""
    from megaaccum.pretrain.model import gpt_forward

    documents_of = gpt_forward.documents_of

    def rows(starts, *args, **more):
        return documents_of(gpt_forward.whole_rows(starts.shape), *args, **more)

    with patch.object(gpt_forward, "documents_of", rows):
        return packed(case)


def both(case: Case) -> tuple[Gradient, Gradient]:
    return packed(case), under_a_mask(case)


def apart(one: Gradient, other: Gradient) -> float:
    assert one.parts.keys() == other.parts.keys() and one.parts
    return max(relative_error(part, other.parts[name]) for name, part in one.parts.items())


@pytest.mark.parametrize("name", CASES)
def test_packed_rows_have_the_gradient_of_a_mask(name: str) -> None:
    found = run_ranks(both, 2, CASES[name], timeout=60)
    assert max(apart(*each) for each in found) <= 1e-12
    assert all(one.loss == pytest.approx(other.loss, rel=1e-12) for one, other in found)


def test_documents_that_see_each_other_are_seen() -> None:
    case = CASES["1f1b"]
    found, expected = (run_ranks(each, 2, case, timeout=60) for each in (in_one_document_a_row, under_a_mask))
    assert max(map(apart, found, expected)) > 1e-3
