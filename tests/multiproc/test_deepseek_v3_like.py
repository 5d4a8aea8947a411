"""configs/deepseek_v3_like.yaml at toy size: every key of the file with smaller numbers, its gradient that of one
process, and a few steps of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import yaml

from megaaccum.lab.verification.testing import run_ranks
from tests.support.distance import check
from tests.support.parity import Case, Rig

CONFIG = Path(__file__).parents[2] / "configs" / "deepseek_v3_like.yaml"
SMALLER = {
    "num_layers": 7, "hidden_size": 32, "ffn_hidden_size": 64, "num_attention_heads": 4, "seq_length": 16,
    "vocab_size": None, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_head_dim": 8, "qk_pos_emb_head_dim": 8,
    "v_head_dim": 8, "num_experts": 4, "moe_layer_freq": "([0]*3+[1]*4)", "moe_ffn_hidden_size": 32,
    "moe_shared_expert_intermediate_size": 32, "moe_router_num_groups": 2, "moe_router_group_topk": 2,
    # Every token goes to all experts: in BF16 rounding would change which it goes to.
    "moe_router_topk": 4, "init_method_std": 0.1, "moe_aux_loss_coeff": 0.1,
    "pipeline_model_parallel_size": 2, "expert_model_parallel_size": 2,
    "pipeline_model_parallel_layout": "Ett|tt|tt|tmL", "global_batch_size": 8,
    # These modules are recomputed by Transformer Engine's layers alone, which need a GPU.
    "recompute_granularity": None, "recompute_modules": None,
}  # fmt: skip
NOT_HERE = {"data", "optimizer", "run"}
"""Sections that the test has itself: made-up sequences and a few steps."""


def flags(*sections: str) -> str:
    """The keys of sections of the file, in small, as command-line flags."""
    written = yaml.safe_load(CONFIG.read_text())
    assert written.keys() == {"model", "parallel", "batch", "sharding"} | NOT_HERE
    keys = {name: SMALLER.get(name, value) for section in sections for name, value in written[section].items()}
    return " ".join(f"--{name} {_word(value)}" for name, value in keys.items() if value is not None) + " "


def _word(value: object) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def toy(**more: object) -> Case:
    layout = flags("parallel", "batch", "sharding") + "".join(f"--{name} {value} " for name, value in more.items())
    return Case(4, layout, flags("model"), "bf16")


def test_its_gradient_is_that_of_one_process():
    plan = toy().plan()
    assert (plan.layout.schedule, plan.layout.ep, plan.config.sharding.zero_stage) == ("dualpipev", 2, 1)
    assert plan.config.parallel.overlap_moe_expert_parallel_comm
    check([toy()])


@dataclass(frozen=True)
class Steps:
    """Losses of a rank's steps, and whether each router's bias has moved."""

    losses: list[float]
    moved: list[bool]


def trained(case: Case) -> Steps:
    rig = Rig.of(case)
    losses = [rig.train(step=step).loss for step in range(4)]
    biases = [each.expert_bias for chunk in rig.chunks for each in chunk.modules() if hasattr(each, "expert_bias")]
    return Steps(losses, [bool(bias.any()) for bias in biases if bias is not None])


def test_it_learns_and_its_biases_move():
    """With top-2 of 4: a bias moves if its expert has another number of tokens than the mean."""
    case = toy(lr="1e-2")
    fewer = Case(4, case.layout, case.model.replace("--moe_router_topk 4", "--moe_router_topk 2"), "bf16")
    ranks = run_ranks(trained, 4, fewer, timeout=120)
    assert all(steps.losses[-1] < steps.losses[0] - 0.1 for steps in ranks)
    assert all(all(steps.moved) for steps in ranks)
    assert any(steps.moved for steps in ranks)
