"""Sharding backends and policies under schedules that split the backward: what test_backend_table.py leaves out."""

from importlib.metadata import version

import pytest

from megaaccum.lab.verification.testing import run_ranks, try_ranks
from tests.support.distance import cells, problems
from tests.support.parity import Case, Rig

PP = "--pipeline_model_parallel_size 2 --pp_microbatches 5 --grad_accum_steps 1 "
EVERY_ROUND = "--grad_accum_steps 2 --pp_microbatches 4 --flush per_round "
STREAM, FSDP2, MEGATRON = "--sync streaming ", "--backend fsdp2 ", "--backend megatron "
TP = "--tensor_model_parallel_size 2 --sequence_parallel "
SMALL = "--num_layers 4 "
UNTIED = SMALL + "--untie_embeddings_and_output_weights "
LLAMA = SMALL + "--swiglu --normalization RMSNorm --qk_layernorm --position_embedding_type rope --num_query_groups 2 "
RECOMPUTE = "--recompute_granularity full "
BY_TWO = RECOMPUTE + "--recompute_method uniform --recompute_num_layers 2 "
BEFORE_2_15 = pytest.mark.skipif(
    tuple(map(int, version("torch").split(".")[:2])) >= (2, 15),
    reason="needs torch 2.13 or 2.14: later ones make these zeros in the precision of the sums",
)


def split(schedule: str, flags: str = "", model: str = SMALL, lane: str = "fp32", ranks: int = 4) -> Case:
    return Case(ranks, f"{PP}--schedule {schedule} {flags}", model, lane)


def fp64(schedule: str, flags: str, model: str = SMALL) -> Case:
    return split(schedule, flags + "--params_dtype fp64 ", model, "fp64")


@cells(
    split("gpipe", STREAM),
    split("zb-h1", STREAM + RECOMPUTE),
    split("zb-h1", STREAM, LLAMA + "--mtp_num_layers 1 "),
    split("zbv", STREAM + "--max_live_parameters 30000 ", UNTIED),
    split("zbv", STREAM + BY_TWO, LLAMA.replace(SMALL, "--num_layers 8 ")),
    split("zbv", STREAM + EVERY_ROUND + "--offload_optimizer cpu "),
    split("dualpipev", STREAM + "--deterministic ", LLAMA),
    split("dualpipev", STREAM, LLAMA, "bf16"),
    split("dualpipev", STREAM + TP),
)
def test_streaming_zero3(case, parity):
    parity(case)


@cells(
    fp64("zbv", FSDP2 + STREAM + RECOMPUTE, LLAMA),
    fp64("zb-h1", FSDP2 + STREAM + EVERY_ROUND, UNTIED),
    fp64("zbv", FSDP2 + EVERY_ROUND),
    fp64("gpipe", FSDP2 + "--deterministic "),
    fp64("dualpipev", FSDP2 + TP),
    split("zbv", FSDP2, lane="bf16"),
    split("dualpipev", FSDP2 + STREAM, LLAMA, "bf16"),
)
def test_fsdp2(case, parity):
    parity(case)


@cells(
    split("zbv", MEGATRON + "--deterministic ", LLAMA),
    split("zb-h1", MEGATRON + EVERY_ROUND, LLAMA, "bf16"),
    split("gpipe", MEGATRON, UNTIED),
    split("dualpipev", MEGATRON + TP),
    split("1f1b", MEGATRON + "--deterministic "),
)
def test_megatron(case, parity):
    """The first of a process adds in rank order, which must not be the others' way too."""
    parity(case)


def calls_of_a_hook(cases: list[Case]) -> list[int]:
    """Calls of a hook of the user's on the gradient of a matrix, in a step of each case."""
    found = []
    for case in cases:
        rig, seen = Rig.of(case), []
        weights = [param for chunk in rig.chunks for name, param in chunk.named_parameters() if "fc1.weight" in name]
        weights[0].register_hook(seen.append)
        rig.train()
        found.append(len(seen))
    return found


def test_a_hook_on_a_matrix_is_called_in_each_weight_gradient():
    """A W may add its product to the sum itself only if no hook reads it."""
    cases = [split("zb-h1", "--backend ddp ", lane="bf16", ranks=2), split("zb-h1", MEGATRON, ranks=2)]
    assert run_ranks(calls_of_a_hook, 2, cases, timeout=90) == [[5, 5]] * 2


# --- broken on purpose ------------------------------------------------------------------------------------------------


def last_weight_gradients_forgotten(case: Case):
    """Gradients that a W has left after its last one are not reduced."""
    from megaaccum.sharding.streaming import StreamingBackend
    from tests.support.parity import gradient

    StreamingBackend.after_weight_grad = lambda self, chunk: None
    return gradient(case)


def reduced_after_the_last_input_gradient(case: Case):
    """FSDP2 is left to its own hooks, which see no W."""
    from megaaccum.upstream import fsdp2
    from tests.support.parity import gradient

    fsdp2.UnitWeightGrads.finish = lambda self: None
    return gradient(case)


def both_chunks_when_one_is_done(case: Case):
    """Megatron's DDP reduces both chunks of a rank when the first of them has its gradients."""
    from megaaccum.sharding.megatron import MegatronBackend
    from tests.support.no_gradient import second_gradient

    complete = MegatronBackend.complete

    def reduce_all(self, param):
        complete(self, param)
        if self._bucket[id(param)].grad_reduce_handle is not None:
            for group in dict.fromkeys(self._bucket.values()):
                group.start_grad_sync()

    MegatronBackend.complete = reduce_all
    return second_gradient(case)  # the first step reduces at its end


def sums_of_two_precisions(case: Case):
    """Parameters of a unit that have no gradient in a W get zeros as torch makes them."""
    from megaaccum.upstream import fsdp2
    from tests.support.parity import gradient

    fsdp2.even_out = lambda unit: None
    return gradient(case)


@pytest.mark.parametrize(
    ("mistake", "case"),
    [
        (last_weight_gradients_forgotten, split("dualpipev", STREAM, ranks=2)),
        (both_chunks_when_one_is_done, split("zbv", MEGATRON)),
    ],
)
def test_a_mistake_makes_a_wrong_gradient(mistake, case):
    assert problems(case, run_ranks(mistake, case.world_size, case))


@pytest.mark.parametrize(
    ("mistake", "case"),
    [
        (reduced_after_the_last_input_gradient, fp64("zbv", FSDP2)),
        pytest.param(sums_of_two_precisions, split("zbv", FSDP2 + STREAM, lane="bf16"), marks=BEFORE_2_15),
    ],
)
def test_a_mistake_ends_every_rank(mistake, case):
    assert all(end.failed for end in try_ranks(mistake, case.world_size, case))
