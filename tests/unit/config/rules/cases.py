"""Keys that the tests of the rules begin with, and what derives them."""

from __future__ import annotations

import copy

from megaaccum.config.derive import derive
from megaaccum.config.rules import Subject
from megaaccum.config.schema import Config

Case = tuple[str, int, dict[str, object], list[str]]
"""A rule, the ranks, keys that break it, words of its text."""

EXPERTS = dict(num_experts=8, add_bias_linear=False)
COLD = EXPERTS | dict(cold_expert_offload=True)
SPREAD = EXPERTS | dict(expert_model_parallel_size=2)
OVERLAP = SPREAD | dict(overlap_moe_expert_parallel_comm=True, bf16=True)
BF16 = dict(bf16=True, optimizer_dtype="bf16")
TP2 = dict(tensor_model_parallel_size=2, sequence_parallel=True)
LATENT = dict(multi_latent_attention=True, position_embedding_type="rope", kv_lora_rank=16)
SAME = dict(reproducible="layout")
COLUMNS = SAME | dict(reproducible_tensor_blocks=2)
SEQUENCES = SAME | dict(reproducible_context_blocks=2)
PP2 = dict(pipeline_model_parallel_size=2)
FP8 = dict(fp8_format="hybrid", bf16=True)
EARLY = PP2 | dict(speculative_step=True, schedule="zbv", num_layers=4)
PACKED = dict(reset_attention_mask=True, transformer_impl="transformer_engine")
GLOBAL = dict(num_experts=4, add_bias_linear=False, moe_router_load_balancing_type="global_aux_loss")


def derived(written: Config, world_size: int = 1) -> Subject:
    """The subject of rules that `resolve` would make of `written`."""
    config = copy.deepcopy(written)
    derive(config, [])
    return Subject.from_config(config, written=written, world_size=world_size)
