"""Every backend and policy takes the same step: the gradient of one process on the whole batch. Backends without any
policy are in test_backend_table.py."""

from itertools import pairwise

import pytest
import torch

from megaaccum.lab.verification.testing import run_ranks, try_ranks
from tests.support.distance import cells, problems
from tests.support.parity import Case, Rig

PP = "--pipeline_model_parallel_size 2 "
VPP = PP + "--virtual_pipeline_model_parallel_size 2 "
SPLIT = "--grad_accum_steps 2 --pp_microbatches 4 "
STREAM = SPLIT + "--sync streaming "
FSDP2 = SPLIT + "--backend fsdp2 "
MEGATRON = SPLIT + "--backend megatron "
TP = "--tensor_model_parallel_size 2 --sequence_parallel "
UNTIED = "--untie_embeddings_and_output_weights "
FULL, REPLICAS = "--recompute_granularity full ", "--data_parallel_replicas 2 "
ORDERED, SAME = "--deterministic ", "--reproducible layout "
LLAMA = "--swiglu --normalization RMSNorm --qk_layernorm --position_embedding_type rope --num_query_groups 2 "


def four_layers(world_size: int, layout: str, model: str = "", lane: str = "fp32") -> Case:
    return Case(world_size, layout, "--num_layers 4 " + model, lane)


def fp64(layout: str, model: str = "") -> Case:
    return four_layers(4, layout + "--params_dtype fp64 ", model, "fp64")


@cells(
    four_layers(4, PP + STREAM + "--flush per_round", UNTIED),
    four_layers(4, VPP + STREAM, LLAMA),
    four_layers(4, TP + STREAM),
    four_layers(4, PP + STREAM + "--max_live_parameters 16000"),
    four_layers(4, PP + STREAM + "--offload_optimizer cpu"),
)
def test_streaming_zero3(case, parity):
    parity(case)


@cells(
    four_layers(4, PP + STREAM + FULL, LLAMA),
    four_layers(4, PP + STREAM + FULL + "--recompute_method uniform --recompute_num_layers 2", LLAMA),
    four_layers(4, PP + STREAM, LLAMA, "bf16"),
)
def test_streaming_zero3_with_recompute_and_in_bf16(case, parity):
    parity(case)


@cells(
    four_layers(2, PP + STREAM),
    four_layers(2, PP + SPLIT + "--deterministic"),
    four_layers(2, PP + MEGATRON),
    four_layers(2, PP + FSDP2 + "--params_dtype fp64", "", "fp64"),
)
def test_one_data_parallel_rank(case, parity):
    parity(case)


@cells(
    fp64(FSDP2 + "--sync streaming " + REPLICAS),
    fp64(PP + FSDP2 + "--flush per_round "),
    fp64(VPP + FSDP2, LLAMA),
    fp64(VPP + FSDP2 + "--sync streaming ", UNTIED),
    fp64(TP + FSDP2),
)
def test_fsdp2_float64(case, parity):
    parity(case)


@cells(
    four_layers(4, PP + FSDP2),
    four_layers(4, PP + FSDP2 + "--sync streaming", LLAMA),
    four_layers(4, PP + FSDP2, LLAMA, "bf16"),
    four_layers(4, FSDP2 + "--data_parallel_replicas 2", "", "bf16"),
)
def test_fsdp2_engine(case, parity):
    parity(case)


@cells(
    *(four_layers(4, "--pp_microbatches 1 " + each) for each in ("", "--sync streaming", "--backend megatron")),
    *(four_layers(4, "--pp_microbatches 1 --backend fsdp2 " + each) for each in ("", "--sync streaming", REPLICAS)),
)
def test_one_microbatch(case, parity):
    """Nothing has gone forward yet when its backward is announced as the last."""
    parity(case)


@cells(
    four_layers(4, PP + MEGATRON + "--flush per_round", UNTIED),
    four_layers(4, VPP + MEGATRON, LLAMA),
    four_layers(4, TP + MEGATRON),
    four_layers(4, PP + MEGATRON, UNTIED, "bf16"),
)
def test_megatron(case, parity):
    parity(case)


@cells(
    four_layers(4, PP + SPLIT + ORDERED),
    four_layers(4, SPLIT + ORDERED + "--offload_optimizer cpu"),
    four_layers(4, PP + SPLIT + "--zero_stage 1 " + ORDERED),
    four_layers(4, SPLIT + "--zero_stage 2 " + ORDERED),
    four_layers(4, STREAM + ORDERED),
    four_layers(4, MEGATRON + ORDERED, LLAMA),
    fp64(FSDP2 + ORDERED),
    fp64(SPLIT + ORDERED),
)
def test_sums_in_rank_order(case, parity):
    parity(case)


@cells(
    four_layers(4, PP + SPLIT + "--backend ddp", UNTIED, "bf16"),
    four_layers(4, VPP + SPLIT + "--backend ddp", LLAMA, "bf16"),
    four_layers(4, PP + SPLIT + "--backend ddp --schedule zbv", "", "bf16"),
    four_layers(4, SPLIT + "--backend ddp " + ORDERED, "", "bf16"),
)
def test_ddp_in_bf16_adds_in_fp32(case, parity):
    parity(case)


class Ones(torch.nn.Module):
    """The gradient of every element is 1 in each micro-batch."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(8, 8, dtype=torch.bfloat16))

    def forward(self, batch):
        return self.weight * batch


def mean_of_ones(backends: list[dict]) -> dict[str, float]:
    """The gradient's root mean square, by backend: of 301 micro-batches on each rank, in BF16."""
    return {str(keys): _mean_of_ones(keys) for keys in backends}


def _mean_of_ones(keys: dict) -> float:
    from megaaccum import Plan, initialize
    from megaaccum.distributed import groups

    def forward_step(data_iterator, chunk):
        return chunk(next(data_iterator)), lambda out: (out.sum(), out.new_tensor(1.0, dtype=torch.float32), {})

    groups.destroy()
    batch = dict(micro_batch_size=1, seq_length=1, grad_accum_steps=301)
    plan = Plan.of(batch=batch, sharding=dict(bf16=True, **keys), world_size=torch.distributed.get_world_size())
    engine = initialize(plan, Ones(), forward_step_func=forward_step, optimizer=torch.optim.AdamW)
    return engine.train_steps.gradient([torch.ones(8, 8, dtype=torch.bfloat16)] * 301)[1].norm / 8


def test_sums_in_bf16_are_made_in_fp32():
    others = (dict(backend=each) for each in ("fsdp2", "megatron", "ddp"))
    backends = [*(dict(zero_stage=stage) for stage in (1, 2, 3)), *others]
    wrong = dict(grad_accum_dtype="bf16")
    for seen in run_ranks(mean_of_ones, 2, [*backends, wrong], timeout=120):
        assert seen.pop(str(wrong)) == pytest.approx(256 / 301, rel=0.01)  # 256 + 1 is 256
        assert list(seen.values()) == pytest.approx([1.0] * len(backends), abs=1e-6)


@cells(
    four_layers(4, PP + SPLIT + SAME),
    four_layers(4, SPLIT + "--zero_stage 1 " + SAME),
    four_layers(4, STREAM + SAME),
    four_layers(4, FSDP2 + "--sync streaming " + SAME, LLAMA),
    fp64(PP + FSDP2 + SAME),
    fp64(PP + SPLIT + SAME),
)
def test_sums_in_one_order(case, parity):
    parity(case)


def kept_in(case: Case) -> set[str]:
    """Precisions of master weights and moments after one step that moved every weight of this rank."""
    import torch

    from tests.support.faults import weights

    rig = Rig.of(case)
    before = weights(rig.backend, rig.chunks)
    rig.train(step=0)
    after = weights(rig.backend, rig.chunks)
    assert all(not torch.equal(before[name], after[name]) for name in before)
    return {str(tensor.dtype) for piece in rig.backend.state() for tensor in piece.tensors.values()}


@cells(
    *(
        four_layers(2, f"{backend}--lr 0.1 --optimizer_dtype {precision}", UNTIED, "bf16")
        for precision in ("fp32", "bf16")
        for backend in (SPLIT, FSDP2)
    )
)
def test_the_precision_of_the_optimizer(case, parity):
    dtype = "torch.bfloat16" if case.layout.endswith("bf16") else "torch.float32"
    assert run_ranks(kept_in, 2, case) == [{dtype}] * 2
    parity(case)


def starting_late(cases: list[Case], delays: dict[int, float], threads: int = 1) -> list[dict]:
    """For each case, every part of the gradient of a step to which some ranks come late, and its norm and loss, in
    processes of `threads` torch threads."""
    import time

    import torch

    from tests.support.parity import gradient

    torch.set_num_threads(threads)
    found = []
    for case in cases:
        torch.distributed.barrier()
        time.sleep(delays.get(torch.distributed.get_rank(), 0.0))
        seen = gradient(case)
        found.append(seen.parts | {"norm": torch.tensor(seen.norm).double(), "loss": torch.tensor(seen.loss).double()})
    return found


REPEATED = [four_layers(4, layout + ORDERED) for layout in (SPLIT, STREAM, SPLIT + "--zero_stage 1 ")]


@pytest.fixture(scope="module")
def twice():
    """Gradients of each rank in two starts of ranks, which come at other times."""
    return [run_ranks(starting_late, 4, REPEATED, delays, timeout=90) for delays in ({}, {0: 0.5, 2: 0.2})]


@pytest.mark.parametrize("number", range(len(REPEATED)), ids=map(str, REPEATED))
def test_sums_in_rank_order_repeat_to_the_bit(number, twice):
    for first, again in zip(*twice, strict=True):
        assert all(part.equal(again[number][name]) for name, part in first[number].items())


WIDE = "--hidden_size 256 --num_layers 2 --micro_batch_size 8 "
"""Large enough for kernels to share a sum among threads."""


def test_the_number_of_threads_changes_sums_unless_they_are_to_repeat():
    def repeats(layout: str) -> bool:
        case = Case(1, WIDE + "--pp_microbatches 2 " + layout)
        one, two = (run_ranks(starting_late, 1, [case], {}, threads)[0][0] for threads in (1, 2))
        return all(part.equal(two[name]) for name, part in one.items())

    assert not repeats("")
    assert repeats("--deterministic")
    assert repeats(SAME)


# --- what streaming holds at a time -----------------------------------------------------------------------------------


def most_held(cases: list[Case]) -> list[tuple[int, int, int]]:
    """For a step of each case on this rank: peak elements of whole parameters, peak elements of whole gradients, and
    elements of the two largest neighbouring units."""
    results = []
    for case in cases:
        rig = Rig.of(case)
        rig.train(step=0)
        with Watch(rig.backend) as watch:
            rig.train(step=1)
        sizes = [unit.numel for unit in rig.backend.units]
        results.append((watch.params, watch.grads, max(map(sum, pairwise(sizes)))))
    return results


class Watch:
    """High-water marks of a streaming backend, looked at whenever it gathers, releases or reduces."""

    def __init__(self, bound):
        self.bound, self.params, self.grads = bound, 0, 0

    def __enter__(self):
        zero, reducer = self.bound._zero, self.bound._reducer
        self.undo = [(zero, "start_gather", zero.start_gather), (reducer, "add", reducer.add)]
        self.undo += [(zero, "add_gradient", zero.add_gradient)]
        for owner, name, method in self.undo:
            setattr(owner, name, self._looking(method))
        return self

    def __exit__(self, *error):
        for owner, name, method in self.undo:
            setattr(owner, name, method)

    def _looking(self, method):
        def call(*args):
            self._look()
            result = method(*args)
            self._look()
            return result

        return call

    def _look(self) -> None:
        params = self.bound._zero.params
        self.params = max(self.params, sum(p.ds_numel for p in params if p.ds_status.name != "NOT_AVAILABLE"))
        self.grads = max(self.grads, sum(p.grad.numel() for p in params if p.grad is not None))


def test_streaming_holds_two_units_whatever_is_in_flight():
    streaming = PP + "--sync streaming "
    cases = [four_layers(2, streaming + f"--pp_microbatches {chunks}", UNTIED) for chunks in (4, 16)]
    cases += [
        four_layers(2, streaming + f"--pp_microbatches {chunks} --schedule {schedule}", UNTIED)
        for schedule in ("zbv", "dualpipev")
        for chunks in (4, 16)
    ]
    cases += [
        four_layers(2, streaming + FULL + f"--pp_microbatches 4 --schedule {schedule}", UNTIED)
        for schedule in ("1f1b", "zbv")
    ]
    for rank in run_ranks(most_held, 2, cases):
        for few, many in zip(rank[0:6:2], rank[1:6:2], strict=True):
            assert few == many
        for params, grads, two_units in rank:
            assert 0 < params <= two_units
            assert 0 < grads <= two_units


# --- broken on purpose ------------------------------------------------------------------------------------------------


def reduced_twice(case: Case):
    """A unit's gradients enter its partitions twice."""
    from megaaccum.sharding.reduction import PartitionReducer
    from tests.support.parity import gradient

    add = PartitionReducer.add

    def twice(self, shares):
        kept = [None if param.grad is None else param.grad.clone() for param, _ in shares]
        add(self, shares)
        for (param, _), grad in zip(shares, kept, strict=True):
            param.grad = grad
        add(self, shares)

    PartitionReducer.add = twice
    return gradient(case)


def replicas_forgotten(case: Case):
    """The sum over replicas is left out."""
    from megaaccum.sharding.fsdp2 import Fsdp2Backend
    from tests.support.parity import gradient

    expect = Fsdp2Backend.expect_last_backward

    def without(self, root):
        expect(self, root)
        root.set_requires_all_reduce(False)

    Fsdp2Backend.expect_last_backward = without
    return gradient(case)


def test_a_gradient_that_is_reduced_twice_is_wrong():
    case = four_layers(4, PP + STREAM)
    assert problems(case, run_ranks(reduced_twice, 4, case))


def test_a_sum_over_replicas_that_is_left_out_ends_every_rank():
    ends = try_ranks(replicas_forgotten, 4, fp64(FSDP2 + "--data_parallel_replicas 2 "))
    assert all(end.failed for end in ends)
    assert any(end.error and "embedding.word_embeddings.weight has no gradient" in end.error.text for end in ends)


def dropped_too_early(case: Case):
    """The unit is released before its backward: its memory is another's by then."""
    from megaaccum.sharding.streaming import StreamingBackend
    from tests.support.parity import gradient

    before = StreamingBackend.before_unit_backward

    def dropped(self, unit, microbatch):
        before(self, unit, microbatch)
        for param in unit.params:
            param.data.zero_()

    StreamingBackend.before_unit_backward = dropped
    return gradient(case)


def test_a_backward_without_its_parameters_is_wrong():
    case = four_layers(2, STREAM)
    found = problems(case, run_ranks(dropped_too_early, 2, case))
    assert [each for each in found if "norm" in each] and not [each for each in found if "loss" in each], found
