"""Runs of launch/pretrain_gpt.py against Megatron's own loop, from the same flags: loss, gradient norm, learning rate.

The same for many real command lines: `python -m benchmarks megatron_train`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.megatron_train import REFERENCE, TOLERANCE, Shrunk, differences, steps_of

BASE = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32"
    " --micro-batch-size 2 --global-batch-size 16 --train-iters 3 --lr 1e-3 --min-lr 1e-5 --lr-decay-style cosine"
    " --lr-decay-iters 8 --lr-warmup-fraction 0.1 --weight-decay 0.1 --clip-grad 1.0"
    " --split 949,50,1 --eval-iters 0 --save-interval 9"
    " --tokenizer-type NullTokenizer --vocab-size 128 --attention-dropout 0 --hidden-dropout 0"
)
SCALED = "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --group-query-attention"
SCALED += " --num-query-groups 2 --position-embedding-type rope --swiglu --normalization RMSNorm --use-rope-scaling"
SCALED += " --seq-length 512 --max-position-embeddings 512 --micro-batch-size 1 --global-batch-size 4"
SCALED += " --init-method-std 0.1"
"""Only far tokens see the scaled rotations, where attention is not the same for all of them."""
LATENT = "--tensor-model-parallel-size 2 --multi-latent-attention --q-lora-rank 16 --kv-lora-rank 16 --qk-head-dim 16"
LATENT += " --qk-pos-emb-head-dim 8 --v-head-dim 12 --normalization RMSNorm --position-embedding-type rope"
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 1e-2 --expert-model-parallel-size 2"
EXPERTS += " --disable-bias-linear --moe-token-dispatcher-type alltoall --use-distributed-optimizer"
PREDICTION = "--pipeline-model-parallel-size 2 --mtp-num-layers 1 --position-embedding-type rope"
PREDICTION += " --untie-embeddings-and-output-weights --calculate-per-token-loss"


def run(flags: str, megatrons: str | None = None) -> Shrunk:
    """Two ranks of BASE with these flags; megatrons: other ones for the reference."""
    theirs = f"{BASE} {flags if megatrons is None else megatrons}"
    return Shrunk(tuple(f"{BASE} {flags}".split()), (*theirs.split(), *REFERENCE), 2)


@pytest.mark.parametrize(
    "flags",
    [f"{SCALED} --rope-scaling-factor 4.0", LATENT, EXPERTS, PREDICTION],
    ids=["interleaved-gqa-rope_scaling", "tp-latent", "experts", "pp-prediction"],
)
def test_a_run_is_megatrons_own(flags: str, tmp_path: Path) -> None:
    found = differences(*steps_of(run(flags), tmp_path))
    assert all(value <= TOLERANCE for value in found.values()), found


def test_another_factor_of_the_rope_is_another_run(tmp_path: Path) -> None:
    """Megatron converts every --rope-scaling-factor to the same value; the comparison detects that."""
    made = run(f"{SCALED} --rope-scaling-factor 4.0", f"{SCALED} --rope-scaling-factor 8.0")
    assert differences(*steps_of(made, tmp_path))["grad_norm"] > 10 * TOLERANCE
