"""Megatron's pretraining loop over our objects on many models and layouts: it prints the losses and norms of Megatron's
own objects."""

from __future__ import annotations

import pytest

from megaaccum.lab.verification.testing import run_ranks
from tests.support.megatron_pretrain import EXPERTS, INTERLEAVED, TP2, Run, numbers, pretrained

ROUNDING = 1e-5
GATED = (
    "--position-embedding-type rope --no-rope-fusion --normalization RMSNorm --swiglu --no-bias-swiglu-fusion "
    "--disable-bias-linear --untie-embeddings-and-output-weights "
)
SHARDED = "--use-distributed-optimizer "
PLAIN = {
    "no pipeline": "--pipeline-model-parallel-size 1 ",
    "pp 4": "--pipeline-model-parallel-size 4 ",
    "tp 2": TP2,
    "tp 2, sequence parallel": TP2 + "--sequence-parallel ",
    "distributed optimizer": SHARDED,
    "gated": GATED,
    "gated, interleaved, distributed optimizer": GATED + INTERLEAVED + SHARDED,
    "grouped queries, qk norms": "--group-query-attention --num-query-groups 2 --qk-layernorm ",
    "experts": EXPERTS,
    "experts, no pipeline": EXPERTS + "--pipeline-model-parallel-size 1 ",
    "experts, interleaved": EXPERTS + INTERLEAVED,
    "experts over 2 ranks": EXPERTS + "--expert-model-parallel-size 2 ",
    "experts over 4 ranks": EXPERTS + "--expert-model-parallel-size 4 --pipeline-model-parallel-size 1 ",
    "experts, shared one, z loss": EXPERTS + "--moe-shared-expert-intermediate-size 32 --moe-z-loss-coeff 1e-3 ",
    "bf16": "--bf16 --accumulate-allreduce-grads-in-fp32 ",
    "bf16, gated, distributed optimizer": f"--bf16 --accumulate-allreduce-grads-in-fp32 {GATED}{SHARDED}",
    "recompute": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 ",
    "cosine, warm-up, no clipping": "--lr-decay-style cosine --lr-warmup-iters 2 --lr-decay-iters 6 --clip-grad 0 ",
    "mean per micro-batch": "--micro-batch-size 2 --global-batch-size 16 ",
}
OTHERWISE = {
    "gated, zbv": Run(GATED + INTERLEAVED, keys=dict(schedule="zbv")),
    "gated, v-half, fsdp2": Run(GATED + INTERLEAVED, keys=dict(schedule="v-half", backend="fsdp2")),
    "gated, zb-h1, streaming": Run(GATED, keys=dict(schedule="zb-h1", zero_stage=3, sync="streaming")),
    "gated, ZeRO-1": Run(GATED, keys=dict(zero_stage=1)),
    "gated, ddp": Run(GATED, keys=dict(backend="ddp")),
    "experts, dualpipev": Run(EXPERTS + INTERLEAVED, keys=dict(schedule="dualpipev")),
    "experts over 2 ranks, fsdp2": Run(EXPERTS + "--expert-model-parallel-size 2 ", keys=dict(backend="fsdp2")),
}
"""Schedules and backends that Megatron lacks, and the model whose numbers they have to print."""


def table() -> dict[tuple[str, bool], Run]:
    """Every run, by its name and whether it is over our objects."""
    runs = {(name, ours): Run(flags, ours=ours) for name, flags in PLAIN.items() for ours in (True, False)}
    return runs | {(name, True): run for name, run in OTHERWISE.items()}


@pytest.fixture(scope="module")
def printed() -> dict[tuple[str, bool], list[str]]:
    """The lines of each run of the table: 6 steps, two evaluations and a test."""
    runs = table()
    return dict(zip(runs, run_ranks(pretrained, 4, list(runs.values()), timeout=600)[-1], strict=True))


@pytest.mark.parametrize("name", [*PLAIN, *OTHERWISE])
def test_losses_and_norms_are_megatrons(printed, name):
    theirs = printed[name if name in PLAIN else name.split(",")[0], False]
    assert len(theirs) == 10
    rounding = 2.0**-8 if "bf16" in name else ROUNDING
    assert numbers(printed[name, True]) == pytest.approx(numbers(theirs), rel=rounding)
