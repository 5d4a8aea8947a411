"""The healthy cases in which mistakes are made: small models under the layouts that the mistakes need."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megaaccum.lab.verification.case import Case, Keys, UserModel
from tests.bank import models

_MODEL: Keys = {
    "num_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "seq_length": 16, "vocab_size": 61,
    "make_vocab_size_divisible_by": 16, "init_method_std": 0.1, "attention_dropout": 0.0, "hidden_dropout": 0.0,
    "micro_batch_size": 1, "clip_grad": 0.0, "weight_decay": 0.1, "lr": 1e-2, "min_lr": 1e-3, "adam_eps": 1e-2,
    "lr_decay_style": "linear", "lr_decay_iters": 10, "train_iters": 20, "data_path": ["none"],
    "untie_embeddings_and_output_weights": True,
}  # fmt: skip
_FP64: Keys = {"backend": "ddp", "params_dtype": "fp64"}
_SPLIT: Keys = {"grad_accum_steps": 2, "pp_microbatches": 4}
_PP: Keys = {"pipeline_model_parallel_size": 2} | _SPLIT
_TP: Keys = {"tensor_model_parallel_size": 2, "sequence_parallel": True} | _SPLIT
_CP: Keys = {"context_parallel_size": 2}
_TIED: Keys = {"untie_embeddings_and_output_weights": None}
_CLIP: Keys = {"clip_grad": 0.5}
_EXPERTS: Keys = {
    "num_experts": 4, "add_bias_linear": False, "moe_ffn_hidden_size": 32, "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 0.1, "moe_router_dtype": "fp64",
}  # fmt: skip
_OF_SEQUENCES: Keys = {"moe_router_load_balancing_type": "seq_aux_loss", "micro_batch_size": 2}
_Z: Keys = {"moe_aux_loss_coeff": None, "moe_router_load_balancing_type": "none", "moe_z_loss_coeff": 0.1}
_BIAS: Keys = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
_PREDICTION: Keys = {"mtp_num_layers": 1, "mtp_loss_scaling_factor": 0.5, "position_embedding_type": "rope"}
_EP: Keys = {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
_FP16: Keys = {"fp16": True, "initial_loss_scale": 1024.0, "hysteresis": 1}
_ZERO3: Keys = {"backend": "deepspeed", "reduce_bucket_size": 5000}


_INTERLEAVED: Keys = {"schedule": "interleaved", "virtual_pipeline_model_parallel_size": 2}
_RECOMPUTE: Keys = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
_MUON: Keys = {"optimizer": "muon", "muon_fp32_matmul_prec": "highest", "muon_extra_scale_factor": 0.2}
_DROPOUT: Keys = {"hidden_dropout": 0.2, "attention_dropout": 0.2, "rng": "sample"}


def _case(*keys: Keys, ranks: int = 4, **fields: object) -> Case:
    merged: Keys = {}
    for each in keys:
        merged |= each
    return Case(keys={name: value for name, value in merged.items() if value is not None}, world_size=ranks, **fields)  # type: ignore[arg-type]


def _own(build: Callable[[int, int], Any], *keys: Keys, ranks: int = 4) -> Case:
    own = UserModel(build=build, forward_step_func=models.forward_step, data=models.batches)
    return _case(_MODEL, {"lr_decay_style": "constant", "min_lr": 1e-2}, *keys, ranks=ranks, user_model=own)


CASES: dict[str, Case] = {
    "pipeline": _case(_MODEL, _FP64, _PP),
    "pipeline, tied": _case(_MODEL, _FP64, _PP, _TIED),
    "pipeline, clipped": _case(_MODEL, _FP64, _PP, _CLIP),
    "pipeline, tied and clipped": _case(_MODEL, _FP64, _PP, _TIED, _CLIP),
    "micro-batch means": _case(_MODEL, _FP64, _PP, {"loss_norm": "microbatch"}),
    "tensor parallel": _case(_MODEL, _FP64, _TP),
    "tensor parallel, gated": _case(_MODEL, _FP64, _TP, {"swiglu": True}),
    "tensor parallel, clipped": _case(_MODEL, _FP64, _TP, _CLIP),
    "tensor parallel, norms of queries": _case(_MODEL, _FP64, _TP, {"sequence_parallel": None, "qk_layernorm": True}),
    "zbv": _case(_MODEL, _FP64, _PP, {"schedule": "zbv"}),
    "zbv, tied": _case(_MODEL, _FP64, _PP, _TIED, {"schedule": "zbv"}),
    "interleaved": _case(_MODEL, _FP64, _PP, _INTERLEAVED),
    "zb-h1": _case(_MODEL, _FP64, _PP, {"schedule": "zb-h1"}),
    "dualpipev": _case(_MODEL, _FP64, _PP, {"schedule": "dualpipev"}),
    "recompute": _case(_MODEL, _FP64, _PP, {"recompute_granularity": "full", "schedule": "zb-h1"}),
    "recompute, dropout": _case(_MODEL, _FP64, _PP, _RECOMPUTE, _DROPOUT),
    "context parallel": _case(_MODEL, _FP64, _PP, _CP),
    "experts": _case(_MODEL, _FP64, _PP, _EXPERTS),
    "experts, padded": _case(_MODEL, _FP64, _SPLIT, _EXPERTS, ranks=2, masks="padded"),
    "experts, padded, tensor parallel": _case(_MODEL, _FP64, _TP, _EXPERTS, ranks=2, masks="padded"),
    "experts, padded, context parallel": _case(_MODEL, _FP64, _SPLIT, _EXPERTS, _CP, ranks=2, masks="padded"),
    "experts, padded, of sequences": _case(_MODEL, _FP64, _TP, _EXPERTS, _OF_SEQUENCES, ranks=2, masks="padded"),
    "experts, z loss": _case(_MODEL, _FP64, _PP, _EXPERTS, _Z),
    "experts, context parallel": _case(_MODEL, _FP64, _PP, _EXPERTS, _CP),
    "experts, recompute": _case(_MODEL, _FP64, _PP, _EXPERTS, _BIAS, {"recompute_granularity": "full"}),
    "experts, bias": _case(_MODEL, _FP64, _PP, _EXPERTS, _BIAS),
    "experts, tensor parallel": _case(_MODEL, _FP64, _TP, _EXPERTS),
    "experts, micro-batch means": _case(_MODEL, _FP64, _PP, _EXPERTS, {"loss_norm": "microbatch"}),
    "spread experts": _case(_MODEL, _SPLIT, _ZERO3, _EXPERTS, _EP),
    "spread experts, clipped": _case(_MODEL, _SPLIT, _ZERO3, _EXPERTS, _EP, _CLIP),
    "spread experts, one rank each": _case(_MODEL, _SPLIT, _ZERO3, _EXPERTS, _EP, ranks=2),
    "spread experts, FSDP2": _case(_MODEL, _SPLIT, {"backend": "fsdp2", "params_dtype": "fp64"}, _EXPERTS, _EP),
    "whole experts": _case(_MODEL, _FP64, _TP, _EXPERTS, {"expert_tensor_parallel_size": 1}),
    "spread experts, tensor parallel, clipped": _case(_MODEL, _ZERO3, _TP, _EXPERTS, _EP, _CLIP),
    "prediction": _case(_MODEL, _FP64, _PP, _PREDICTION),
    "prediction, tensor parallel": _case(_MODEL, _FP64, _TP, _PREDICTION),
    "prediction, recompute": _case(_MODEL, _FP64, _TP, _PREDICTION, _RECOMPUTE),
    "own, frozen": _own(models.frozen, _FP64, _PP),
    "own, quantized": _own(models.quantized, _FP64, _PP, _INTERLEAVED, ranks=2),
    "ZeRO-3": _case(_MODEL, _PP, _ZERO3),
    "ZeRO-3, clipped": _case(_MODEL, _PP, _ZERO3, _CLIP),
    "ZeRO-3, tied": _case(_MODEL, _PP, _ZERO3, _TIED),
    "ZeRO-3, rounds": _case(_MODEL, _PP, _ZERO3, {"flush": "per_round"}),
    "ZeRO-3, streaming": _case(_MODEL, _PP, _ZERO3, {"sync": "streaming"}),
    "ZeRO-2, tied": _case(_MODEL, _PP, _ZERO3, _TIED, {"zero_stage": 2}),
    "ZeRO-3, BF16": _case(_MODEL, _PP, _ZERO3, {"bf16": True}),
    "FSDP2": _case(_MODEL, _PP, {"backend": "fsdp2", "params_dtype": "fp64"}),
    "FSDP2, replicas": _case(_MODEL, _SPLIT, {"backend": "fsdp2", "params_dtype": "fp64", "data_parallel_replicas": 2}),
    "Megatron": _case(_MODEL, _PP, {"backend": "megatron"}),
    "Muon, micro-batches": _case(_MODEL, _FP64, _SPLIT, _MUON, ranks=2),
    "Muon, tensor parallel": _case(_MODEL, _FP64, _TP, _MUON),
    "Muon, FSDP2": _case(_MODEL, _SPLIT, {"backend": "fsdp2", "params_dtype": "fp64"}, _MUON, ranks=2),
    "Muon, FP16": _case(_MODEL, _PP, _ZERO3, _FP16, _MUON, {"muon_momentum": 0.5}, overflow=(1, 3)),
    "FP16": _case(_MODEL, _PP, _ZERO3, _FP16, overflow=(0, 3)),
    "FP16, no overflow": _case(_MODEL, _PP, _ZERO3, _FP16),
    "FP16, clipped": _case(_MODEL, _PP, _ZERO3, _FP16, _CLIP),
}
"""By name. Each passes as it is."""
