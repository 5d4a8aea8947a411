"""Megatron's kernel that adds a weight gradient to the FP32 sum, by a stand-in: the gradient is the same as without."""

from __future__ import annotations

import pytest

from megaaccum.lab.verification.testing import run_ranks

PER_LAYER = 4
"""Matrices: attention's two and the MLP's two."""


def of_gpt(pp: int, backend: str, times: float | None) -> tuple[dict, int]:
    """{name: this rank's part of a step's gradient} of a GPT of Megatron's, and calls of the kernel. times: what the
    kernel adds, of what it should; None: without it."""
    from contextlib import nullcontext
    from unittest.mock import patch

    import torch
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel import layers, model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig

    from megaaccum import Plan, initialize
    from megaaccum.observe.memory import Activations

    calls = []

    class Kernel:
        @staticmethod
        def wgrad_gemm_accum_fp32(x, grad, main_grad):
            calls.append(1)
            main_grad.add_(grad.t() @ x, alpha=times)

    def forward_step(data_iterator, model):
        batch = next(data_iterator)
        tokens, labels = batch[:, :-1], batch[:, 1:]
        output = model(tokens, torch.arange(16).expand_as(tokens), None, labels=labels)
        return output, lambda losses: (losses.sum(), losses.numel(), {})

    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=pp)
    model_parallel_cuda_manual_seed(1)
    sizes = dict(num_layers=2, hidden_size=32, num_attention_heads=4, hidden_dropout=0.0, attention_dropout=0.0)
    with patch.object(layers, "_grad_accum_fusion_available", True):
        config = TransformerConfig(
            **sizes,
            pipeline_model_parallel_size=pp,
            pipeline_dtype=torch.float32,
            gradient_accumulation_fusion=times is not None,
        )
        first, last = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
        torch.manual_seed(3)
        model = GPTModel(
            config, get_gpt_layer_local_spec(), vocab_size=64, max_sequence_length=16, pre_process=first,
            post_process=last,
        )  # fmt: skip
    batch = dict(micro_batch_size=2, seq_length=16, global_batch_size=16 // pp)
    plan = Plan.of(layout=dict(pp=pp), batch=batch, sharding=dict(backend=backend), optimizer=dict(lr=1e-2))
    engine = initialize(plan, [model], forward_step_func=forward_step)
    dp = engine.groups.dp
    data = torch.randint(0, 64, (4, dp.size(), 2, 17), generator=torch.Generator().manual_seed(0))[:, dp.rank()]
    # On a CPU the activations are counted by hooks on what autograd saves, which gives Megatron's backward another
    # object than the weight that has `main_grad`. A GPU is asked for its memory.
    uncounted = patch.object(Activations, "watching", lambda *_: nullcontext())
    kernel = patch.object(layers, "fused_weight_gradient_mlp_cuda", Kernel, create=True)
    with kernel, uncounted, engine.trial(list(data)):
        found = {shard.name: shard.grad.clone() for shard in engine.backend.shards()}
    return found, len(calls)


@pytest.mark.parametrize("pp", [1, 2])
def test_the_kernel_adds_to_the_gradient(pp):
    runs = {times: run_ranks(of_gpt, 2, pp, "megatron", times) for times in (None, 1.0, 2.0)}
    for (plain, none), (fused, calls), (twice, _) in zip(*runs.values(), strict=True):
        assert none == 0
        assert calls >= 4 * 2 // pp * PER_LAYER
        assert plain.keys() == fused.keys()
        far = {name: float((fused[name] - plain[name]).norm()) for name in plain}
        wrong = {name: float((twice[name] - plain[name]).norm()) for name in plain}
        size = sum(float(each.norm()) for each in plain.values())
        assert sum(far.values()) < 1e-6 * size
        assert sum(wrong.values()) > 0.1 * size, "a kernel that adds twice is seen"
