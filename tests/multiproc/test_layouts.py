"""`reproducible: layout`: one loss, norm, gradient and model, to the bit, in every layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from unittest.mock import patch

import pytest

from benchmarks import layouts
from megaaccum.lab.verification.testing import run_ranks
from tests.support.distance import check
from tests.support.layouts import MODEL, OWN, Outcome, outcomes, outcomes_by_case
from tests.support.parity import Case

SAME = "--reproducible layout "
STEPS = 3
PP = "--pipeline_model_parallel_size 2 "


def row(world_size: int, layout: str, model: str = "", mode: str = SAME) -> Case:
    return Case(world_size, layout + mode, MODEL + model)


TWELVE = "--global_batch_size 12 "
BF16 = "--bf16 "
HALF = "--grad_reduce_dtype bf16 "
EXPERTS = "--num_experts 4 --moe_aux_loss_coeff 0.01 --moe_z_loss_coeff 0.001 --add_bias_linear false "
NORM = "--normalization RMSNorm "
RMS = BF16 + NORM
MTP = "--mtp_num_layers 2 --untie_embeddings_and_output_weights true --position_embedding_type rope " + NORM
EP2, EP4 = "--expert_model_parallel_size 2 ", "--expert_model_parallel_size 4 "
TP2, CP2 = "--tensor_model_parallel_size 2 ", "--context_parallel_size 2 "
BLOCKS, PADDED = "--reproducible_tensor_blocks 2 --reproducible_context_blocks 2 ", "--make_vocab_size_divisible_by 32 "
CUT = BLOCKS + PADDED
"""A model that computes by two blocks of columns and two of each sequence."""
TWO = "--num_layers 2 "
"""Layers of a model of which no rank has several chunks: one before the other."""
LEAVES = "--global_batch_size 8 "
"""Blocks take four times as long, experts and prediction layers twice: eight leaves and more in a tree."""
EIGHT = TWO + LEAVES
SHARED = "--moe_shared_expert_intermediate_size 64 --moe_router_load_balancing_type seq_aux_loss "
COLUMNS = "--reproducible_tensor_blocks 2 --make_vocab_size_divisible_by 32 --swiglu --ffn_hidden_size 64 "
ROWS = [  # tests/long/test_layout_table.py has more
    row(4, "--pp_microbatches 4 "),
    row(4, "--pp_microbatches 2 --grad_accum_steps 2 --sync streaming "),
    row(4, PP + "--pp_microbatches 4 --grad_accum_steps 2 --flush per_round --zero_stage 2 "),
    row(4, PP + "--virtual_pipeline_model_parallel_size 2 --pp_microbatches 8 --backend ddp "),
    row(4, PP + "--schedule zbv --pp_microbatches 8 --backend fsdp2 --sync streaming "),
    row(4, PP + "--schedule dualpipev --pp_microbatches 8 --backend megatron "),
    row(4, "--pipeline_model_parallel_size 4 --schedule zb-h1 --pp_microbatches 16 --recompute_granularity full "),
    row(4, PP + "--pp_microbatches 6 --sync streaming ", TWELVE),
    row(4, "--pp_microbatches 4 --backend fsdp2 ", BF16),
    row(4, PP + "--schedule v-half --pp_microbatches 8 --zero_stage 1 ", BF16),
    row(4, "--pp_microbatches 4 ", HALF),
    row(4, PP + "--schedule zbv --pp_microbatches 8 --sync streaming ", HALF),
    row(4, PP + "--schedule dualpipev --pp_microbatches 4 --sync streaming ", EXPERTS + LEAVES),
    row(4, "--pp_microbatches 4 ", RMS + TWO),
    row(4, "--pp_microbatches 4 --backend fsdp2 ", RMS + TWO),
    row(4, PP + "--schedule dualpipev --pp_microbatches 4 --zero_stage 1 --recompute_granularity full ", MTP + LEAVES),
    row(4, PP + "--pp_microbatches 4 --backend megatron ", MTP + BF16 + LEAVES),
    row(4, "--pp_microbatches 2 --backend fsdp2 ", MTP + BF16 + LEAVES),  # a head that is used three times
    row(4, PP + "--schedule zbv --pp_microbatches 4 --zero_stage 1 " + EP2, EXPERTS + LEAVES),
    row(4, "--pp_microbatches 4 " + EP4, EXPERTS + BF16 + TWO),
    row(4, "--pp_microbatches 4 --backend fsdp2 " + TP2, CUT + EIGHT),
    row(4, PP + "--schedule zbv --pp_microbatches 4 ", CUT + LEAVES),
    row(4, "--pp_microbatches 4 --sync streaming " + TP2, COLUMNS + EIGHT),
    row(4, "--pp_microbatches 2 " + TP2, COLUMNS + EIGHT + "--micro_batch_size 2 "),
    row(4, "--pp_microbatches 4 --zero_stage 1 " + CP2, CUT + BF16 + EIGHT),
    row(4, "--pp_microbatches 8 --recompute_granularity full " + TP2 + CP2, CUT + BF16 + EIGHT),
    row(4, "--pp_microbatches 4 --backend fsdp2 " + CP2, CUT + NORM + EIGHT),
    row(4, "--pp_microbatches 4 " + TP2 + EP2, CUT + EXPERTS + EIGHT),
    row(4, "--pp_microbatches 4 --zero_stage 2 " + CP2 + EP4, CUT + EXPERTS + BF16 + EIGHT),
]
OWN_ROWS = [
    row(4, "--pp_microbatches 4 ", OWN + TWO),
    row(4, "--pp_microbatches 4 --sync streaming ", OWN + BF16),
    row(4, "--pp_microbatches 4 --zero_stage 2 ", OWN + BF16),
    row(4, "--pp_microbatches 4 --backend fsdp2 ", OWN + BF16),
    row(4, "--pp_microbatches 4 --backend ddp ", OWN + BF16),
    row(4, "--pp_microbatches 4 --backend megatron ", OWN + BF16),
    row(4, PP + "--schedule dualpipev --pp_microbatches 8 --backend fsdp2 ", OWN + BF16),
]
"""A model of one's own with biases, RMSNorm, a weight that nothing reads and one that some micro-batches read."""
THREE = [
    row(3, "--pp_microbatches 4 ", TWELVE),
    row(3, "--pp_microbatches 4 ", TWELVE + HALF + TWO),
    row(3, "--pp_microbatches 4 --backend fsdp2 --sync streaming ", TWELVE + BF16 + TWO),
    row(3, "--pp_microbatches 4 --backend megatron ", TWELVE + BF16 + TWO),
    row(3, "--pp_microbatches 4 --backend ddp ", TWELVE + BF16 + TWO),
    row(3, "--pp_microbatches 4 ", TWELVE + EXPERTS + TWO),
]
"""The runs of three ranks are no subtrees."""


# --- mistakes --------------------------------------------------------------------------------------------------------


def ranks_one_by_one() -> Iterator[None]:
    """Ranks' sums are added in rank order."""
    from megaaccum.sharding.sum_tree import Runs, in_rank_order

    with patch.object(Runs, "add", lambda self, rows, dtype: in_rank_order(rows, dtype)):
        yield


def averages() -> Iterator[None]:
    """torch DDP's hook averages; the step takes the division back."""
    from megaaccum.sharding import ddp

    summed, init = ddp.all_reduce_in_one_order, ddp.DdpBackend.__init__

    def average(order, sums, group, bucket):
        return summed(order, sums, group, bucket).then(lambda done: done.value() / group.size())

    def divided(self, *args, **keys):
        init(self, *args, **keys)
        self.reduction_divisor = self._groups.dp_cp.size()

    with patch.object(ddp, "all_reduce_in_one_order", average), patch.object(ddp.DdpBackend, "__init__", divided):
        yield


def as_they_come() -> Iterator[None]:
    """Micro-batches are added one after the other, as autograd does."""
    from megaaccum.sharding.sum_tree import SumTree

    def add(self, leaf, tensor, *, lent=False):
        self.came = getattr(self, "came", 0) + 1
        held = self._nodes.pop(self._root, None)
        self._nodes[self._root] = tensor.clone() if held is None else held.add_(tensor)
        return self.came == self._root[1]

    with patch.object(SumTree, "add", add):
        yield


def rounded_once() -> Iterator[None]:
    """A rank's sum is rounded for its message only."""
    from megaaccum.sharding.sum_tree import MicrobatchSums, Runs

    def unrounded(cls, plan, groups):
        return cls(runs=Runs(1, groups.dp_cp.size()), rank=groups.dp_cp.rank())

    with patch.object(MicrobatchSums, "from_plan", classmethod(unrounded)):
        yield


def late() -> Iterator[None]:
    """No mistake: each rank comes to its exchanges of gradients at times of its own."""
    import random
    import time

    import torch.distributed as dist

    delays, exchange = random.Random(dist.get_rank()), dist.all_to_all_single

    def exchanged(*args, **keys):
        time.sleep(delays.random() / 100)
        return exchange(*args, **keys)

    with patch.object(dist, "all_to_all_single", exchanged):
        yield


def turns() -> Iterator[None]:
    """Ranks take turns at the micro-batches, as without `reproducible`."""
    from megaaccum.config import Plan

    with patch.object(Plan, "in_runs", property(lambda _: False)):
        yield


def fused_kernel() -> Iterator[None]:
    """The optimizer's kernel treats a tensor's last elements otherwise."""
    import torch

    adamw = torch.optim.AdamW
    with patch.object(torch.optim, "AdamW", lambda *args, **keys: adamw(*args, **keys | {"fused": True})):
        yield


def norm_of_shards() -> Iterator[None]:
    """Squares are added shard by shard, then over the ranks."""
    from megaaccum.step import grad_norm

    with patch.object(grad_norm, "exact_square", grad_norm._square):
        yield


def one_weight_for_two_uses() -> Iterator[None]:
    """The gradients of embedding and head are added in each micro-batch, where one stage has both."""
    from megaaccum.pretrain.model import gpt

    with patch.object(gpt, "copy_for_head", lambda chunk: None):
        yield


def hidden_states_in_three_terms() -> Iterator[None]:
    """A prediction layer's norm adds two terms to the gradient of its input, one after the other."""
    from megaaccum.pretrain.model import gpt

    with patch.object(gpt, "sum_before_prediction", lambda chunk: None):
        yield


def linear_of_deepspeed() -> Iterator[None]:
    """ZeRO-3 computes nn.Linear by DeepSpeed's function."""
    import torch
    from deepspeed.runtime.zero.linear import zero3_linear_wrap

    with patch.object(torch.nn.functional, "linear", zero3_linear_wrap):
        yield


def rounded_on_arrival() -> Iterator[None]:
    """A micro-batch's gradient is rounded to BF16 as it arrives, and then added in FP32."""
    from megaaccum.sharding.sum_tree import SumTree

    add = SumTree.add
    with patch.object(SumTree, "add", lambda self, at, grad, **keys: add(self, at, grad.bfloat16().float(), **keys)):
        yield


def embedding_read_twice() -> Iterator[None]:
    """The gradients of a stage's embedding from its first layer and from prediction layers are added in each
    micro-batch, where one stage has both."""
    from megaaccum.pretrain.model import gpt

    with patch.object(gpt, "copy_for_prediction", lambda chunk: None):
        yield


def unfinished_sums_are_dropped() -> Iterator[None]:
    """A parameter that not all micro-batches read is reduced without its sum."""
    from megaaccum.sharding.fsdp2 import Fsdp2Backend

    with patch.object(Fsdp2Backend, "_rest_of", lambda self, param: None):
        yield


def experts_at_once() -> Iterator[None]:
    """An expert multiplies the tokens of all ranks of its ep group at once."""
    from megaaccum.sharding import experts

    with patch.object(experts, "multiply_apart", lambda chunks: None):
        yield


def blocks_for_sources() -> Iterator[None]:
    """Two ranks send an expert the tokens of two blocks, whose gradients are those of two ranks' first blocks."""
    from megaaccum.sharding import experts

    call, swapped = experts.multiply_for, (0, 2, 1, 3)
    with patch.object(experts, "multiply_for", lambda expert, number, *args: call(expert, swapped[number], *args)):
        yield


def weights_over_columns() -> Iterator[None]:
    """An expert multiplies its columns by the weights of tokens, as Megatron's does, whose gradient then is a sum over
    the columns of a rank."""
    from megaaccum.executor import blocks

    with patch.object(blocks, "weighted", lambda forward, tokens, weights: forward(tokens, weights)):
        yield


def balanced_by_block() -> Iterator[None]:
    """The balancing loss of a block counts the tokens of a rank's block alone."""
    from megaaccum.executor import blocks

    with patch.object(blocks, "balanced", lambda cut, router, forward, *args, **keys: forward(*args, **keys)):
        yield


def columns_at_once() -> Iterator[None]:
    """A rank multiplies all its columns at once."""
    from megaaccum.executor import blocks

    with patch.object(blocks, "cut_columns", lambda *_: None):
        yield


def sequences_at_once() -> Iterator[None]:
    """A rank multiplies all its tokens of a sequence at once."""
    from megaaccum.executor import blocks

    with patch.object(blocks, "cut_sequences", lambda *_: None):
        yield


def masks_of_the_rank() -> Iterator[None]:
    """A rank draws the masks of all its blocks one after the other."""
    from megaaccum.distributed import rng

    with patch.object(rng, "branched", lambda **_: nullcontext()):
        yield


# --- tests -----------------------------------------------------------------------------------------------------------


MISTAKES = [
    (ranks_one_by_one, ROWS[0], "gradient"),
    (ranks_one_by_one, THREE[0], "gradient"),
    (averages, row(3, "--pp_microbatches 4 --backend ddp ", TWELVE), "gradient"),
    (rounded_once, row(4, "--pp_microbatches 4 ", HALF), "gradient"),
    (as_they_come, ROWS[0], "gradient"),
    (turns, ROWS[0], "gradient"),
    (fused_kernel, ROWS[0], "state"),
    (norm_of_shards, ROWS[0], "norms"),
    (one_weight_for_two_uses, row(1, "--pp_microbatches 16 "), "gradient"),
    (linear_of_deepspeed, row(4, "--pp_microbatches 4 ", OWN + BF16), "gradient"),
    (rounded_on_arrival, row(4, "--pp_microbatches 4 ", RMS + TWO), "gradient"),
    (embedding_read_twice, row(1, "--pp_microbatches 8 --backend ddp ", MTP + LEAVES), "gradient"),
    (hidden_states_in_three_terms, row(1, "--pp_microbatches 8 --backend ddp ", MTP + LEAVES), "gradient"),
    (unfinished_sums_are_dropped, row(4, "--pp_microbatches 4 --backend fsdp2 ", OWN + BF16), "gradient"),
    (experts_at_once, row(2, "--pp_microbatches 4 " + EP2, EXPERTS + LEAVES), "gradient"),
    (blocks_for_sources, row(2, "--pp_microbatches 4 " + EP2, CUT + EXPERTS + EIGHT), "gradient"),
    (weights_over_columns, row(1, "--pp_microbatches 8 ", CUT + EXPERTS + EIGHT), "gradient"),
    (balanced_by_block, row(2, "--pp_microbatches 4 ", CUT + EXPERTS + EIGHT), "gradient"),
    (columns_at_once, row(1, "--pp_microbatches 8 ", CUT + EIGHT), "gradient"),
    (sequences_at_once, row(1, "--pp_microbatches 8 ", CUT + EIGHT), "gradient"),
    (masks_of_the_rank, row(2, "--pp_microbatches 8 " + TP2, CUT + EIGHT), "losses"),
]
"""Each with a case, and what of its outcome is another."""
LATE = [
    *ROWS[:2],
    THREE[0],
    *(row(ranks, f"--pp_microbatches {8 // ranks} ", CUT + EXPERTS + EIGHT) for ranks in (1, 2)),
]
"""Sums of the rank's own, one or several, those of all ranks' micro-batches, and blocks on one and on two ranks."""
LOOSE = [row(1, "--pp_microbatches 16 ", mode=""), row(4, "--pp_microbatches 4 ", mode="--deterministic ")]
Cell = tuple[Callable[[], Iterator[None]], Case]


def run(cells: list[Cell]) -> list[Outcome]:
    found = []
    for change, case in cells:
        with contextmanager(change)():
            found += outcomes([case], STEPS)
    return found


def alone(model: str) -> Case:
    """One process with the same micro-batches."""
    batch = Case(1, SAME, model).plan().batch
    count = batch.global_batch_size // batch.micro_batch_size
    return row(1, f"--pp_microbatches {count} ", model.removeprefix(MODEL))


@pytest.fixture(scope="module")
def measured() -> dict[Case, Outcome]:
    models = dict.fromkeys(case.model for case in (*ROWS, *OWN_ROWS, *THREE, *(case for _, case, _ in MISTAKES)))
    one_process = [alone(model) for model in models]
    return outcomes_by_case([(4, ROWS + LOOSE[1:]), (4, OWN_ROWS), (3, THREE), (1, one_process + LOOSE[:1])], STEPS)


@pytest.fixture(scope="module")
def changed() -> dict[Cell, Outcome]:
    """Outcomes with a mistake, then of ranks that come late, in which a mistake that stayed would be seen."""
    cells, found = [*((mistake, case) for mistake, case, _ in MISTAKES), *((late, case) for case in LATE)], {}
    for size in (4, 3, 2, 1):
        mine = [(change, case) for change, case in cells if case.world_size == size]
        found |= zip(mine, run_ranks(run, size, mine, timeout=60 + 10 * len(mine))[0], strict=True)
    return found


@pytest.mark.parametrize("case", ROWS + OWN_ROWS + THREE, ids=str)
def test_every_layout_is_one_process_to_the_bit(case, measured):
    assert measured[case] == measured[alone(case.model)]


@pytest.mark.parametrize(("mistake", "case", "what"), MISTAKES)
def test_a_mistake_is_seen(mistake, case, what, changed, measured):
    assert getattr(changed[mistake, case], what) != getattr(measured[alone(case.model)], what)


def test_blocks_and_spread_experts_have_the_gradient_of_one_process():
    """In FP32, against one process in float64 that knows no blocks."""
    model, untied = "--num_layers 2 " + PADDED, "--num_layers 4 --untie_embeddings_and_output_weights "
    check(
        [
            Case(4, "--pp_microbatches 4 " + TP2 + CP2 + SAME + BLOCKS, model),
            Case(4, "--pp_microbatches 4 " + SAME + BLOCKS, model + NORM + "--swiglu --ffn_hidden_size 64 "),
            Case(4, PP + "--schedule zb-h1 --pp_microbatches 4 " + TP2 + SAME + BLOCKS, model + untied),
            Case(4, "--pp_microbatches 4 " + EP2 + SAME, "--num_layers 2 " + EXPERTS),
            Case(4, "--pp_microbatches 4 " + TP2 + EP2 + SAME + BLOCKS, model + EXPERTS),
            Case(4, "--pp_microbatches 4 " + CP2 + EP2 + SAME + BLOCKS, model + EXPERTS + SHARED),
        ]
    )


def test_six_ranks_in_two_stages_are_one_process_to_the_bit(measured):
    case = row(6, PP + "--schedule zbv --pp_microbatches 4 ", TWELVE)
    assert run_ranks(outcomes, 6, [case], STEPS)[0] == [measured[alone(case.model)]]


@pytest.mark.parametrize("case", LATE, ids=str)
def test_ranks_that_come_late_change_no_bit(case, changed, measured):
    assert changed[late, case] == measured[alone(case.model)]


def test_without_it_every_layout_has_bits_of_its_own(measured):
    one, four = (measured[case] for case in LOOSE)
    assert one.gradient != four.gradient and one.state != four.state
    assert one.losses == pytest.approx(four.losses, rel=1e-5)


def squares(dtype: str) -> tuple[float, float, float]:
    """The exact sum of the squares of both ranks' numbers, cut in two ways, and its relative error, on rank 0."""
    from fractions import Fraction

    import torch

    from megaaccum.step.grad_norm import exact_square

    rank, generator = torch.distributed.get_rank(), torch.Generator().manual_seed(1)
    values = torch.randn(3 * 2**12, generator=generator) * 2.0 ** torch.randint(
        -40, 9, (3 * 2**12,), generator=generator
    )
    values = values.to(getattr(torch, dtype))
    halves = [list(values.chunk(2)[rank].split(1000)), list(values[rank::2].split(7))]
    first, second = (float(exact_square(half)) for half in halves)
    exact = sum(Fraction(value) ** 2 for value in values.tolist())
    return first, second, float(Fraction(first or 1) / exact - 1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_the_norm_is_that_of_the_numbers_whoever_holds_them(dtype):
    (first, second, error), other = run_ranks(squares, 2, dtype)
    assert first == second and abs(error) < 2**-52
    assert other[:2] == (0.0, 0.0)  # so that a sum over ranks is rank 0's


def squares_with(bad: float) -> list[float]:
    """The exact sum of the squares where `bad` is on the first rank, and where it is on the second."""
    import torch

    from megaaccum.step.grad_norm import exact_square

    rank = torch.distributed.get_rank()
    return [float(exact_square([torch.tensor([1.0, bad if rank == at else 2.0])])) for at in (0, 1)]


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_number_that_is_not_finite_is_so_in_the_norm_of_every_rank(bad):
    """A rank that took the largest of the others' for the largest of all would wait for sums that they do not make."""
    assert run_ranks(squares_with, 2, bad, timeout=30) == [[float("inf")] * 2] * 2


def test_the_benchmark_s_rows_are_runs_over_the_package_s_own_data(tmp_path):
    """`python -m benchmarks layouts` has all, of ten steps."""
    rows = [layouts.ROWS[number] for number in (0, 8)]
    found = []
    for count, ranks, layout in rows:
        flags = f"{layouts.MODEL} {layout} --global_batch_size {count} {SAME} --output_dir {tmp_path}"
        found.append(run_ranks(layouts.train, ranks, flags, 1, timeout=90)[0])
    assert found[0] == found[1]
