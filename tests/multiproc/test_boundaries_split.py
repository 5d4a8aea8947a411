"""Every boundary and policy under schedules that split the backward: the gradient of one process on the whole batch."""

import pickle

import pytest

from megaaccum.testing import try_ranks
from tests.multiproc.distance import check, problems
from tests.multiproc.parity import Case

PP = "--pipeline_model_parallel_size 2 --num_chunks 5 "
STREAM = "--sync streaming "
UNTIED = "--untie_embeddings_and_output_weights "
LLAMA = "--swiglu --normalization RMSNorm --qk_layernorm --position_embedding_type rope --num_query_groups 2 "
RECOMPUTE = "--recompute_granularity full "


def split(schedule: str, flags: str = "", model: str = "", lane: str = "fp32", ranks: int = 4) -> Case:
    return Case(ranks, f"{PP}--grad_accum_steps 1 --schedule {schedule} {flags}", model, lane)


def test_streaming_zero3():
    every_round = "--grad_accum_steps 2 --num_chunks 4 --flush per_round "
    check(
        [
            split("gpipe", STREAM),
            split("zb-h1", STREAM + RECOMPUTE),
            split("zbv", STREAM + "--max_live_parameters 30000", UNTIED),
            split("zbv", STREAM + RECOMPUTE + "--recompute_method uniform --recompute_num_layers 2", LLAMA),
            split("zbv", STREAM + every_round + "--offload_optimizer cpu"),
            split("dualpipev", STREAM + "--deterministic", LLAMA),
            split("dualpipev", STREAM, LLAMA, "bf16"),
            split("dualpipev", STREAM + "--tensor_model_parallel_size 2 --sequence_parallel"),
        ]
    )


# --- broken on purpose ------------------------------------------------------------------------------------------------


def last_weight_gradients_forgotten(case: Case):
    """What is left of a W when its last gradient has come is not reduced."""
    from megaaccum.boundary.streaming import StreamingBoundary
    from tests.multiproc.parity import gradient

    StreamingBoundary.after_weight_grad = lambda self, chunk: None
    return gradient(case)


@pytest.mark.parametrize(("mistake", "case"), [(last_weight_gradients_forgotten, split("dualpipev", STREAM, ranks=2))])
def test_a_mistake_is_seen(mistake, case):
    ends = try_ranks(mistake, case.world_size, case)
    assert not any(end.failed for end in ends)
    assert problems(case, [pickle.loads(end.result) for end in ends])
