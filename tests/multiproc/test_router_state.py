"""The bias of experts moves as Megatron moves it, once per step that is taken; latent attention says what it lacks."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import patch

import pytest

from megaaccum.errors import ConfigError
from megaaccum.lab.verification.testing import run_ranks
from tests.support.parity import VOCAB, Case, Rig, microbatches, one_process

EXPERTS = (
    "--num_experts 4 --no_add_bias_linear --moe_router_topk 2 --moe_router_score_function sigmoid "
    "--moe_router_enable_expert_bias "
    "--moe_router_load_balancing_type global_aux_loss --moe_aux_loss_coeff 0.01 --num_layers 4 "
)
CASE = Case(4, "--pipeline_model_parallel_size 2 --grad_accum_steps 2 --pp_microbatches 4 --nonfinite skip", EXPERTS)


def biases(chunks) -> list[list[float]]:
    from megaaccum.model import names

    return [buffer.tolist() for name, buffer in names.named_buffers(chunks) if name.endswith("expert_bias")]


def moved_by_megatron(chunks, config) -> list[list[float]]:
    """The expert biases that Megatron's own function computes from the routers' token counts, on copies."""
    import torch
    from megatron.core.distributed.finalize_model_grads import _update_router_expert_bias

    def copy(router):
        module = torch.nn.Module()
        module.register_buffer("expert_bias", router.expert_bias.clone())
        module.register_buffer("local_tokens_per_expert", router.local_tokens_per_expert.clone())
        return module

    routers = [m for chunk in chunks for m in chunk.modules() if getattr(m, "expert_bias", None) is not None]
    copies = torch.nn.ModuleList(copy(router) for router in routers)
    _update_router_expert_bias([copies], config)
    return [module.expert_bias.tolist() for module in copies]


def steps() -> SimpleNamespace:
    """Three steps, the second one skipped: the biases after each, what Megatron makes of the tokens of each, and what
    a router has counted in those that were taken: tokens, and micro-batches for the global balancing loss."""
    from megaaccum.model import router_state

    rig = Rig.of(CASE)
    router = next(m for m in rig.chunks[0].modules() if getattr(m, "expert_bias", None) is not None)
    after, by_megatron, counted = [biases(rig.chunks)], [], []
    update = router_state.update_bias

    def watched(*args):
        by_megatron.append(moved_by_megatron(rig.chunks, rig.chunks[0].config))
        counted.append((int(router.local_tokens_per_expert.sum()), int(router.ga_steps)))
        update(*args)

    def step(number: int, weight: float = 1.0) -> bool:
        batches = rig.microbatches(16 * number)
        batches[0]["loss_mask"][0, 0] *= weight
        return rig.train_step.train(batches, step=number).skipped

    with patch.object(router_state, "update_bias", watched):
        skipped = [step(0)]
        after.append(biases(rig.chunks))
        skipped.append(step(1, weight=float("nan")))
        after.append(biases(rig.chunks))
        skipped.append(step(2))
        after.append(biases(rig.chunks))
    assert skipped == [False, True, False]
    return SimpleNamespace(after=after, by_megatron=by_megatron, counted=counted, stage=rig.groups.pp.rank())


def with_a_frozen_one() -> list[bool]:
    """Whether each bias has moved in a step, where the first is frozen."""
    rig = Rig.of(CASE)
    routers = [m for m in rig.chunks[0].modules() if getattr(m, "expert_bias", None) is not None]
    routers[0].frozen_expert_bias = True
    rig.train(step=1)
    return [bool(router.expert_bias.any()) for router in routers]


def test_a_frozen_bias_stays():
    assert run_ranks(with_a_frozen_one, 4) == [[False, True]] * 4


def test_the_bias_moves_as_megatron_moves_it_and_not_in_a_skipped_step():
    ranks = run_ranks(steps, 4)
    for rank in ranks:
        start, first, skipped, last = rank.after
        assert start == [[0.0] * 4] * 2
        assert [first, last] == rank.by_megatron
        assert first != start
        assert skipped == first
        # 8 micro-batches of 16 tokens on this rank, each with two experts: nothing of the skipped step is among them.
        assert rank.counted == [(8 * 16 * 2, 8)] * 2
    for stage in range(2):
        one, other = (rank.after for rank in ranks if rank.stage == stage)
        assert one == other


def counted_in_a_cast_model() -> list[float]:
    """A router's counts in a step of 8 micro-batches of 256 tokens, each with two experts, of a model cast to BF16, as
    Megatron's Float16Module is: of tokens for its bias and for the global balancing loss, and of micro-batches."""
    from megaaccum.distributed import groups
    from megaaccum.engine import initialize
    from megaaccum.pretrain.model import gpt
    from tests.support.engines import forward_step

    case = Case(1, "--micro_batch_size 16 --global_batch_size 128 --grad_accum_steps 8", EXPERTS, "bf16")
    plan = case.plan()
    built = groups.build(plan.layout, timeout_minutes=1)
    chunks = [chunk.bfloat16() for chunk in gpt.build_chunks(plan, built, vocab_size=VOCAB)]
    engine = initialize(plan, chunks, groups=built, forward_step_func=forward_step)
    engine.train_step(microbatches(plan, 0))
    router = next(m for m in chunks[0].modules() if getattr(m, "expert_bias", None) is not None)
    counts = router.local_tokens_per_expert.double(), router.global_tokens_per_expert.double(), router.ga_steps
    return [float(count.sum()) for count in counts]


def test_a_cast_model_counts_every_token():
    assert run_ranks(counted_in_a_cast_model, 1) == [[8 * 256 * 2, 8 * 256 * 2, 8]]


def build(flags: str) -> str:
    try:
        one_process(flags + " --num_layers 2", "fp32")
    except ConfigError as error:
        return str(error)
    return "was built"


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--num_experts 4", "was built"),
        ("--recompute_granularity selective --recompute_modules core_attn", "was built"),
        ("--recompute_granularity selective --recompute_modules core_attn layernorm", "layernorm, which needs Tran"),
    ],
)
def test_what_megatron_s_own_layers_cannot_do_is_refused_by_name(flags, named):
    (said,) = run_ranks(build, 1, flags)
    assert named in said
