"""Megatron's kernel that adds a weight gradient to the FP32 sum, by a stand-in: the gradient is the same as without."""

from __future__ import annotations

import pytest

from megaaccum.lab.verification.testing import run_ranks

PER_LAYER = 4
"""Matrices: attention's two and the MLP's two."""


def of_gpt(pp: int, sharding: dict, times: float | None, bf16: bool = False, tied: bool = False) -> tuple[dict, int]:
    """{name: this rank's part of a step's gradient} of a GPT of Megatron's, and calls of the kernel. times: what the
    kernel adds, of what it should; None: without it. tied: the head's matrix is the embedding's."""
    from contextlib import nullcontext
    from unittest.mock import patch

    import torch
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel import layers, model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig

    from megaaccum import Plan, initialize
    from megaaccum.distributed import groups
    from megaaccum.observe.memory import Activations

    calls = []

    class Kernel:
        @staticmethod
        def wgrad_gemm_accum_fp32(x, grad, main_grad):
            calls.append(1)
            main_grad.add_(grad.float().t() @ x.float(), alpha=times)

        wgrad_gemm_accum_fp16 = None

    def forward_step(data_iterator, model):
        batch = next(data_iterator)
        tokens, labels = batch[:, :-1], batch[:, 1:]
        output = model(tokens, torch.arange(16).expand_as(tokens), None, labels=labels)
        return output, lambda losses: (losses.sum(), losses.numel(), {})

    groups.destroy()
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=pp)
    model_parallel_cuda_manual_seed(1)
    dtype = torch.bfloat16 if bf16 else torch.float32
    sizes = dict(num_layers=2, hidden_size=32, num_attention_heads=4, hidden_dropout=0.0, attention_dropout=0.0)
    with patch.object(layers, "_grad_accum_fusion_available", True):
        config = TransformerConfig(
            **sizes,
            pipeline_model_parallel_size=pp,
            pipeline_dtype=dtype,
            params_dtype=dtype,
            bf16=bf16,
            gradient_accumulation_fusion=times is not None,
        )
        first, last = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
        torch.manual_seed(3)
        model = GPTModel(
            config, get_gpt_layer_local_spec(), vocab_size=64, max_sequence_length=16, pre_process=first,
            post_process=last, share_embeddings_and_output_weights=tied,
        )  # fmt: skip
    model.to(dtype)
    sharding = sharding | (dict(params_dtype="bf16") if bf16 else {})
    batch = dict(micro_batch_size=2, seq_length=16, global_batch_size=16 // pp)
    plan = Plan.of(layout=dict(pp=pp), batch=batch, sharding=sharding, optimizer=dict(lr=1e-2))
    engine = initialize(plan, [model], forward_step_func=forward_step)
    dp = engine.groups.dp
    data = torch.randint(0, 64, (4, dp.size(), 2, 17), generator=torch.Generator().manual_seed(0))[:, dp.rank()]
    # On a CPU the activations are counted by hooks on what autograd saves, which gives Megatron's backward another
    # object than the weight that has `main_grad`. A GPU is asked for its memory.
    uncounted = patch.object(Activations, "watching", lambda *_: nullcontext())
    kernel = patch.object(layers, "fused_weight_gradient_mlp_cuda", Kernel, create=True)
    with kernel, uncounted:
        for part in (data[:2], data):  # the second finds nothing of the first
            with engine.trial(list(part)):
                found = {shard.name: shard.grad.clone().float() for shard in engine.backend.shards()}
        for part in (data[:2], data[2:]):
            engine.forward_backward(list(part))
        found["norm in two calls"] = torch.tensor(engine.optim_step().grad_norm)
    return found, len(calls)


def of_each(pp: int, sharding: dict, **more: bool) -> list[tuple[dict, int]]:
    """Without the kernel, with it, and with one that adds twice."""
    return [of_gpt(pp, sharding, times, **more) for times in (None, 1.0, 2.0)]


BACKENDS = [dict(backend="megatron"), *({"backend": "deepspeed", "zero_stage": stage} for stage in (1, 2, 3))]


@pytest.mark.parametrize("more", [{}, dict(bf16=True), dict(tied=True)], ids=str)
@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("sharding", BACKENDS, ids=lambda each: "-".join(map(str, each.values())))
def test_the_kernel_adds_to_the_gradient(sharding, pp, more):
    for (plain, none), (fused, calls), (twice, _) in run_ranks(of_each, 2, pp, sharding, **more):
        assert none == 0
        assert calls >= 10 * 2 // pp * PER_LAYER
        assert plain.keys() == fused.keys()
        far = {name: float((fused[name] - plain[name]).norm()) for name in plain}
        wrong = {name: float((twice[name] - plain[name]).norm()) for name in plain}
        size = sum(float(each.norm()) for each in plain.values())
        assert sum(far.values()) < (2e-3 if more.get("bf16") else 1e-6) * size  # the kernel does not round a product
        assert sum(wrong.values()) > 0.1 * size, "a kernel that adds twice is seen"
