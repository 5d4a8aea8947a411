"""Parameters per stage and rank against Megatron's own model, built rank by rank on the meta device."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from megaaccum.config import Plan, RankLayout, resolve
from megaaccum.lab.planner.stages import Stage, chunks_of_rank, layout_text, rank_kinds, split_layers, stages_of
from megaaccum.lab.planner.weights import rank_parameters
from megaaccum.pretrain.interop.load import load
from megaaccum.pretrain.metrics.param_count import count_parameters
from megaaccum.schedule.actions import stage_map
from tests.support.configs import plan

CONFIGS = sorted((Path(__file__).parents[4] / "configs").glob("*.yaml"))
VOCAB_SIZE = 250
SMALL: dict[str, dict[str, Any]] = {
    "tied over stages": dict(pipeline_model_parallel_size=4),
    "tp and chunks": dict(
        pipeline_model_parallel_size=2,
        virtual_pipeline_model_parallel_size=2,
        tensor_model_parallel_size=4,
        num_query_groups=4,
        swiglu=True,
        qk_layernorm=True,
    ),
    "experts": dict(
        num_experts=4,
        expert_model_parallel_size=2,
        moe_layer_freq=2,
        moe_shared_expert_intermediate_size=32,
        add_bias_linear=False,
        tensor_model_parallel_size=2,
        expert_tensor_parallel_size=1,
        sequence_parallel=True,
        pipeline_model_parallel_size=2,
    ),
    "prediction": dict(mtp_num_layers=1, position_embedding_type="rope", pipeline_model_parallel_size=2),
}


def world_size(path: Path) -> int:
    return int(path.read_text(encoding="utf-8").splitlines()[0].split(":")[1])


@pytest.fixture(scope="module")
def _world():
    """A world of one rank, without which Megatron takes every group for one of size 1."""
    import torch.distributed as dist

    from megaaccum.platform import cpu

    cpu.install()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    from megatron.core import parallel_state

    yield
    parallel_state.set_pipeline_model_parallel_rank(None)
    parallel_state.set_pipeline_model_parallel_world_size(None)
    parallel_state.set_virtual_pipeline_model_parallel_world_size(None)
    dist.destroy_process_group()


@pytest.mark.usefixtures("_world")
@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_rank_of_every_config_has_megatrons_parameters(path: Path) -> None:
    settled = resolve(load(path), world_size=world_size(path))
    compare(settled, settled.config.model.vocab_size or VOCAB_SIZE)


@pytest.mark.usefixtures("_world")
@pytest.mark.parametrize("name", SMALL)
def test_every_rank_of_a_small_model_has_megatrons_parameters(name: str) -> None:
    keys = SMALL[name]
    at_least = keys.get("tensor_model_parallel_size", 1) * keys.get("pipeline_model_parallel_size", 1)
    compare(plan(at_least * keys.get("expert_model_parallel_size", 1), **keys), VOCAB_SIZE)


def compare(settled: Plan, vocab_size: int) -> None:
    """The closed form against the model of every pipeline rank (tp rank 0: all tp ranks hold equal shapes)."""
    layout, stages = settled.layout, stages_of(settled.config)
    for rank in range(layout.pp):
        chunks = chunks_of_rank(stages, rank, pp=layout.pp, schedule=layout.schedule)
        here = rank_parameters(settled.config.model, chunks, vocab_size, layout)
        experts, others = megatron_parameters(settled, rank, vocab_size)
        assert (here.plain, here.expert) == (others, experts), f"pipeline rank {rank}"


@dataclass
class Group:
    """A process group, as far as Megatron's modules use one when they are built."""

    at: int
    of: int

    def rank(self) -> int:
        return self.at

    def size(self) -> int:
        return self.of


def megatron_parameters(settled: Plan, rank: int, vocab_size: int) -> tuple[int, int]:
    """(elements of routed experts, all others) of GPTModel on one pipeline rank."""
    params = [p for chunk in megatron_chunks(settled, rank, vocab_size) for p in chunk.parameters()]
    experts = sum(p.numel() for p in params if not getattr(p, "allreduce", True))
    return experts, sum(p.numel() for p in params) - experts


def megatron_chunks(settled: Plan, rank: int, vocab_size: int) -> list[Any]:
    import torch
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_decoder_block_spec,
        get_gpt_decoder_layer_specs,
        get_gpt_mtp_block_spec,
    )
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    from megaaccum.model.sizes import padded_vocab_size
    from megaaccum.pretrain.model.gpt import transformer_config
    from megaaccum.pretrain.model.layer_specs import replaced
    from megaaccum.pretrain.model.local_norm import Norm

    config, model, layout = transformer_config(settled), settled.config.model, settled.layout
    # Some of Megatron's constructors ask its global state instead of the collection they are given.
    parallel_state.set_pipeline_model_parallel_world_size(layout.pp)
    parallel_state.set_virtual_pipeline_model_parallel_world_size(layout.vpp if layout.vpp > 1 else None)
    config.moe_grouped_gemm = False  # Transformer Engine's; the same shapes
    chunks = []
    for stage in stage_map(layout.placement or "loop", pp=layout.pp, chunks=layout.vpp)[rank]:
        # Megatron deals stages out in rounds; those of a V's rank are other ranks' there.
        vp_stage, pp_rank = stage // layout.pp if layout.vpp > 1 else None, stage % layout.pp
        parallel_state.set_pipeline_model_parallel_rank(pp_rank)
        block = get_gpt_decoder_block_spec(config, False, vp_stage=vp_stage, pp_rank=pp_rank)
        spec = replaced(block, WrappedTorchNorm, Norm)
        if model.multi_latent_attention:
            # Megatron's local attention kernel does not construct under MLA; it has no parameters to count.
            for layer in spec.layer_specs:
                layer.submodules.self_attention.submodules.core_attention = torch.nn.Identity
        last = stage == layout.num_stages - 1
        mtp = None
        if model.mtp_num_layers:
            # Like the model's last layer, which need not be in this chunk.
            layer = get_gpt_decoder_layer_specs(config, False)[-1]
            layer.submodules.self_attention.submodules.core_attention = torch.nn.Identity
            mtp = get_gpt_mtp_block_spec(config, layer, False, vp_stage=vp_stage, pp_rank=pp_rank)
        with torch.device("meta"):
            chunks.append(
                GPTModel(
                    config,
                    spec,
                    vocab_size=padded_vocab_size(settled.config, vocab_size),
                    max_sequence_length=model.max_position_embeddings or model.seq_length,
                    pre_process=stage == 0,
                    post_process=last,
                    position_embedding_type=model.position_embedding_type,
                    share_embeddings_and_output_weights=not model.untie_embeddings_and_output_weights,
                    mtp_block_spec=mtp,
                    pg_collection=collection(layout, pp_rank),
                    vp_stage=vp_stage,
                )
            )
    return chunks


def collection(layout: RankLayout, rank: int) -> Any:
    from megatron.core.process_groups_config import ProcessGroupCollection

    one = Group(0, 1)
    sizes = dict(tp=layout.tp, cp=layout.cp, ep=layout.ep, expt_tp=layout.etp, tp_ep=layout.ep * layout.etp)
    sizes |= dict(tp_cp=layout.tp * layout.cp, tp_dp_cp=layout.tp * layout.cp * layout.dp)
    groups = {name: Group(0, size) for name, size in sizes.items()} | dict(pp=Group(rank, layout.pp))
    return ProcessGroupCollection(**groups, embd=None, dp=one, dp_cp=one, expt_dp=one, hcp=[])


def test_ranks_together_hold_the_model_once() -> None:
    """Without tied weights and tensor parallelism nothing is held twice."""
    settled = plan(4, pipeline_model_parallel_size=4, untie_embeddings_and_output_weights=True)
    stages = stages_of(settled.config)
    ranks = [chunks_of_rank(stages, r, pp=4, schedule="1f1b") for r in range(4)]
    total = sum(rank_parameters(settled.config.model, r, VOCAB_SIZE, settled.layout).total for r in ranks)
    assert total == count_parameters(settled.config, VOCAB_SIZE).total


def test_llama_405b_has_layers_for_128_stages() -> None:
    """arXiv 2407.21783, section 3.3.2: one layer less on the first and on the last stage."""
    layers = split_layers(126, 128)
    assert layers is not None
    assert (layers[0], layers[1], layers[-1]) == (0, 1, 0)
    assert layout_text(layers) == "E|(t|)*126L"
    assert layout_text([3] + [4] * 30 + [3]) == "Ettt|(tttt|)*30tttL"
    assert layout_text([2, 2]) == "Ett|ttL"


def test_layers_that_balance_on_no_split_have_none() -> None:
    assert split_layers(61, 32) == [1, *[2] * 30, 0]  # as DeepSeek-V3 is cut
    assert split_layers(60, 32) is None
    assert split_layers(8, 4) == [2, 2, 2, 2]
    assert split_layers(7, 4) == [2, 2, 2, 1]


@pytest.mark.parametrize("schedule", ["1f1b", "dualpipev"])
def test_the_ends_of_a_kind_of_rank_stand_for_all_of_it(schedule: str) -> None:
    """Its first rank, and the last where backwards are split, which owes the most weight gradients."""
    stages = [Stage(1, 0, embedding=True), *[Stage(2, 0)] * 6, Stage(1, 0, head=True)]
    kinds = rank_kinds(stages, pp=4, schedule=schedule)
    assert list(kinds) == [0, 1, 3]
    assert (kinds[1] == kinds[3]) == (schedule == "dualpipev")
    both_ends = [stages[0], stages[-1]] if schedule == "dualpipev" else [stages[0], stages[4]]
    assert kinds[0] == both_ends
