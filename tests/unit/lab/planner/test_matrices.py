"""Muon's matrices in closed form: every weight of a layer but norms, biases and routers."""

from __future__ import annotations

import pytest

from megaaccum.config import resolve
from megaaccum.lab.planner import expected, footprint, matrices
from megaaccum.lab.planner.hardware import load_hardware
from megaaccum.lab.planner.stages import chunks_of_rank, stages_of
from megaaccum.lab.planner.sync_mode import Forecast
from megaaccum.optim.owners import assign, balance
from megaaccum.pretrain.interop.load import load
from megaaccum.pretrain.metrics.layer_shapes import layer_elements
from tests.support.check import run
from tests.support.parity import merged

BASE = (
    "--num_layers 4 --hidden_size 64 --num_attention_heads 4 --seq_length 16 --vocab_size 61 --train_iters 4 --lr 1e-3"
    " --micro_batch_size 1 --data_path none --no_add_bias_linear --normalization RMSNorm --optimizer muon"
)
GQA = "--num_query_groups 2 --swiglu"
MOE = "--num_experts 8 --moe_router_topk 2 --moe_ffn_hidden_size 32 --moe_shared_expert_intermediate_size 48"
MLA = "--multi_latent_attention --q_lora_rank 24 --kv_lora_rank 16 --qk_head_dim 16 --qk_pos_emb_head_dim 8"
MLA += " --v_head_dim 16"


def plan(flags: str, world_size: int = 1):
    return resolve(load(None, merged(BASE, flags)), world_size=world_size)


@pytest.mark.parametrize("flags", ["", GQA, f"{GQA} {MOE}", f"{MLA} --position_embedding_type rope"])
def test_they_are_all_weights_but_norms_and_routers(flags):
    made = plan(flags)
    config = made.config
    chunks = chunks_of_rank(stages_of(config), 0, pp=1, schedule="none")
    found = list(matrices.stage_matrices(config.model, chunks))
    moe = config.model.num_experts is not None
    router = 64 * (config.model.num_experts or 0)
    wanted = 4 * (sum(layer_elements(config.model, moe=moe)) - 2 * 64 - router)
    assert sum(matrix.numel for matrix in found) == wanted
    assert matrices.rank_matrices(config.model, chunks, made.layout).total == wanted
    assert len(set(found)) == len(found)


def test_one_momentum_in_place_of_two_moments():
    adam = resolve(load(None, merged(BASE, f"{GQA} --grad_accum_steps 2 --optimizer adam")), world_size=4)
    with_muon = plan(f"{GQA} --grad_accum_steps 2", 4)
    for mode in footprint.every(with_muon):
        held = [Forecast(each, 61).predict(mode).memory["optimizer"] for each in (adam, with_muon)]
        chunks = chunks_of_rank(stages_of(with_muon.config), 0, pp=1, schedule="none")
        numel = matrices.rank_matrices(with_muon.config.model, chunks, with_muon.layout).total
        if mode.backend == "ddp":
            assert held[0] - held[1] == pytest.approx(4 * numel)
        else:  # the rank that keeps the most momenta
            owned = matrices.most_owned(with_muon, chunks)
            assert numel / 4 <= owned <= 1.1 * numel / 4
            assert held[0] - held[1] == pytest.approx(8 * numel / (4 // mode.data_parallel_replicas) - 4 * owned)


LLAMA_3_8B = (
    "--num_layers 32 --hidden_size 4096 --ffn_hidden_size 14336 --num_attention_heads 32 --num_query_groups 8 --swiglu"
    " --seq_length 8192 --vocab_size 128256 --bf16 --untie_embeddings_and_output_weights --grad_accum_steps 2"
)


@pytest.mark.parametrize("world_size", [8, 64])
def test_owners_of_llama_3_8b_are_even(world_size):
    assert matrices.forecast(plan(LLAMA_3_8B, world_size)).balance <= 1.10


def test_check_says_what_muon_costs():
    text = run(None, merged(BASE, LLAMA_3_8B), world_size=8)
    assert "Muon: 224 matrices of a stage over 8 owners (tp 1 * cp 1 * dp 8), the busiest with 1.00 times" in text
    assert "to owners and" in text


def test_the_forecast_is_the_assignment_of_the_stage_with_the_most_work():
    made = plan(f"{LLAMA_3_8B} --pipeline_model_parallel_size 2 --pp_microbatches 4", 16)
    found = matrices.forecast(made)
    chunks = chunks_of_rank(stages_of(made.config), 0, pp=2, schedule=made.layout.schedule)
    assert found.balance == balance(assign(matrices.stage_matrices(made.config.model, chunks), 8))
    numel = sum(matrix.numel for matrix in matrices.stage_matrices(made.config.model, chunks))
    assert (found.at_owners, found.to_owners, found.back) == (True, 0, numel * 2 * 7 / 64)
    in_shards = matrices.forecast(plan(f"{LLAMA_3_8B} --reproducible layout", 8))
    numel = sum(matrix.numel for matrix in matrices.stage_matrices(made.config.model, chunks)) * 2
    assert (in_shards.at_owners, in_shards.to_owners, in_shards.back) == (False, numel * 4 * 7 / 64, numel * 2 * 7 / 64)


QWEN3_30B_A3B = (
    "--num_layers 48 --hidden_size 2048 --ffn_hidden_size 6144 --num_attention_heads 32 --num_query_groups 4"
    " --kv_channels 128 --swiglu --num_experts 128 --moe_router_topk 8 --moe_ffn_hidden_size 768 --seq_length 4096"
    " --vocab_size 151936 --bf16 --untie_embeddings_and_output_weights --grad_accum_steps 2"
)


@pytest.mark.parametrize("world_size", [8, 64])
@pytest.mark.parametrize("ep", [1, 8])
def test_owners_of_qwen3_30b_a3b_are_even(world_size, ep):
    found = matrices.forecast(plan(f"{QWEN3_30B_A3B} --expert_model_parallel_size {ep}", world_size))
    assert found.count == 48 * (4 + 3 * 128)
    assert found.balance <= 1.10


def test_an_owner_of_an_expert_holds_it():
    made = plan(f"{GQA} {MOE} --grad_accum_steps 2 --expert_model_parallel_size 2", 4)
    chunks = chunks_of_rank(stages_of(made.config), 0, pp=1, schedule="none")
    owned = matrices.owners_of(made, matrices.stage_matrices(made.config.model, chunks))
    for rank, mine in enumerate(owned):
        experts = {int(each.name.split()[1]) for each in mine if each.name.startswith("expert")}
        assert experts and all(number // 4 == rank % 2 for number in experts)


def test_the_step_takes_longer_by_the_busiest_owners_iterations():
    made = plan(LLAMA_3_8B, 64)
    adam = resolve(load(None, merged(BASE, f"{LLAMA_3_8B} --optimizer adam")), world_size=64)
    seconds = [expected.seconds(each, 128256, None, "h100") for each in (adam, made)]
    (device,) = {load_hardware("h100").device}
    assert seconds[1] - seconds[0] == pytest.approx(matrices.forecast(made).flops / device.rate("16 bit"), rel=0.1)
