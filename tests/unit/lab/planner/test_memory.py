"""The planner's memory model: formulas from papers, schedules' micro-batches in flight, and how it moves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from megaaccum.config.schema import ModelConfig
from megaaccum.lab.planner import activations, pipeline
from megaaccum.lab.planner.activations import Kernels
from megaaccum.lab.planner.footprint import StateBytes, most_waiting, sums_of_runs
from megaaccum.lab.planner.hardware import load_hardware
from megaaccum.lab.planner.layouts import RECOMPUTE, SCHEDULES, SYNC_MODES, Layouts, from_rows
from megaaccum.lab.planner.memory import KINDS, MemoryModel, PipelineRank, Usage
from megaaccum.lab.planner.workload import Workload, make_workload
from megaaccum.pretrain.interop.load import load
from megaaccum.pretrain.metrics.layer_shapes import layer_elements
from tests.support.configs import plan

SEQ, MICRO, HIDDEN, HEADS = 2048, 4, 1024, 16
SBH = SEQ * MICRO * HIDDEN


def gpt(**keys: Any) -> ModelConfig:
    base = dict(num_layers=8, hidden_size=HIDDEN, num_attention_heads=HEADS, seq_length=SEQ)
    return plan(1, **(base | keys)).config.model


def layout(**row: int) -> Layouts:
    return from_rows([dict(micro_batch_size=MICRO) | row])


def per_layer(recompute: str = "none", *, flash: bool = False, **row: int) -> float:
    at = layout(recompute=RECOMPUTE.index(recompute), **row)
    return float(activations.kept_per_layer(gpt(), at, Kernels(flash=flash), moe=False)[0])


def test_a_layer_keeps_what_korthikanti_counts() -> None:
    """arXiv 2205.05198, equation 1: s b h (34 + 5 a s / h) bytes."""
    assert per_layer() == pytest.approx(SBH * (34 + 5 * HEADS * SEQ / HIDDEN), rel=0.01)


@pytest.mark.parametrize("tp", [2, 8])
def test_tensor_and_sequence_parallelism_divide_as_in_table_2(tp: int) -> None:
    """The same paper, table 2: tensor parallelism leaves 10 s b h whole; sequence parallelism divides all of it."""
    scores = 5 * HEADS * SEQ / HIDDEN
    assert per_layer(tp=tp) == pytest.approx(SBH * (10 + (24 + scores) / tp), rel=0.01)
    assert per_layer(tp=tp, sequence_parallel=1) == pytest.approx(SBH * (34 + scores) / tp, rel=0.01)


def test_recompute_keeps_less_as_in_table_2() -> None:
    """Selective keeps 34 s b h, full the layer's input alone: 2 s b h."""
    assert per_layer("selective") == pytest.approx(34 * SBH, rel=0.01)
    assert per_layer("full") == 2 * SBH


def test_fused_attention_keeps_no_scores() -> None:
    assert per_layer(flash=True) == pytest.approx(per_layer("selective", flash=False), rel=1e-6)


def test_context_parallelism_divides_tokens() -> None:
    assert per_layer(flash=True, cp=4) == pytest.approx(per_layer(flash=True) / 4)


@pytest.mark.parametrize(("tp", "cp"), [(1, 1), (4, 1), (2, 2)])
def test_logits_of_one_micro_batch_are_cut_over_tp_and_cp(tp: int, cp: int) -> None:
    """16-bit logits, their gradient and the FP32 softmax: 8 bytes for each token and entry."""
    small, large = (activations.loss(gpt(), rows, layout(tp=tp, cp=cp), Kernels())[0] for rows in (1000, 33000))
    assert large - small == SEQ * MICRO * 32000 * 8 / (tp * cp)


def test_eight_bit_inputs_are_half_as_large() -> None:
    at = layout()
    wide = activations.layer(gpt(), at, Kernels(), moe=False)
    narrow = activations.layer(gpt(), at, Kernels(matmul_element=1.0), moe=False)
    assert wide.mlp[0] - narrow.mlp[0] == SBH + 4 * SBH  # the inputs of both matrices, a byte each
    assert wide.norms[0] == narrow.norms[0]


def test_modules_of_selective_recompute() -> None:
    at = layout(recompute=RECOMPUTE.index("selective"))
    kept = {
        names: float(activations.kept_per_layer(gpt(), at, Kernels(recompute_modules=frozenset(names)), moe=False)[0])
        for names in (("core_attn",), ("mlp",), ("layernorm",))
    }
    assert kept["core_attn",] - kept["mlp",] == 2 * 4 * SBH * 2  # the first matrix' output and the second's input
    assert kept["core_attn",] - kept["layernorm",] == 2 * SBH * 2  # both norms' outputs


def test_latent_attention_gives_back_its_up_projections() -> None:
    """DeepSeek-V3 recomputes them (arXiv 2412.19437, section 3.2.3): what is left are the latents."""
    latent = dict(multi_latent_attention=True, q_lora_rank=256, kv_lora_rank=128, position_embedding_type="rope")
    model, at = gpt(**latent), layout(recompute=RECOMPUTE.index("selective"))
    kept = {
        name: float(activations.kept_per_layer(model, at, Kernels(recompute_modules=frozenset({name})), moe=False)[0])
        for name in ("core_attn", "mla_up_proj")
    }
    heads = HEADS * (2 * (128 + 64) + 128)
    assert kept["core_attn"] - kept["mla_up_proj"] == SEQ * MICRO * heads * 2


def test_experts_count_every_copy_of_a_token() -> None:
    model = gpt(num_experts=8, moe_router_topk=2, moe_ffn_hidden_size=512, add_bias_linear=False)
    more = gpt(num_experts=8, moe_router_topk=4, moe_ffn_hidden_size=512, add_bias_linear=False)
    at = layout()
    rows = 2 * SEQ * MICRO
    few, many = (activations.layer(one, at, Kernels(), moe=True).mlp[0] for one in (model, more))
    assert many - few == pytest.approx(rows * (2 * HIDDEN + 2 * 512) * 2)


def test_dispatch_buffers_follow_load_and_capacity() -> None:
    """A layer keeps, for every micro-batch in flight, the rows that its experts got and those that they return."""

    def rows(**keys: object) -> float:
        model = gpt(num_experts=8, moe_router_topk=2, moe_ffn_hidden_size=512, add_bias_linear=False, **keys)
        return float(activations.dispatched(model, layout(), Kernels())[0]) / (2 * HIDDEN * 2)

    assert rows() == 2 * SEQ * MICRO
    assert rows(moe_expected_imbalance=1.5) == 3 * SEQ * MICRO
    assert rows(moe_expected_imbalance=1.5, moe_expert_capacity_factor=1.25) == 2.5 * SEQ * MICRO
    capacity = {"moe_expert_capacity_factor": 2.0, "moe_pad_expert_input_to_capacity": True}
    assert rows(**capacity) == 4 * SEQ * MICRO, "filled up, whatever is routed"


# --- schedules -------------------------------------------------------------------------------------------------------


def held(name: str, *, pp: int, rank: int, m: int, vpp: int = 1) -> list[int]:
    return [int(n) for n in pipeline.in_flight(name, pp=pp, vpp=vpp, rank=rank, microbatches=m)]


def test_micro_batches_in_flight_of_the_papers() -> None:
    assert held("none", pp=1, rank=0, m=8) == [1]
    assert held("gpipe", pp=4, rank=2, m=8) == [8]
    assert [held("1f1b", pp=4, rank=r, m=8)[0] for r in range(4)] == [4, 3, 2, 1]
    assert held("1f1b", pp=4, rank=0, m=2) == [2]
    assert held("zb-h1", pp=4, rank=3, m=8) == [4]
    assert sum(held("zbv", pp=4, rank=0, m=16, vpp=2)) == 2 * 4
    assert sum(held("dualpipev", pp=4, rank=0, m=16, vpp=2)) == 2 * 4 + 1


@pytest.mark.parametrize(("pp", "vpp"), [(4, 2), (8, 3)])
def test_interleaving_holds_megatrons_penalty_more(pp: int, vpp: int) -> None:
    """Rank 0 holds p (1 + (p - 1) / (p v)) micro-batches' worth, Megatron's theoretical_memory_usage says."""
    worth = sum(held("interleaved", pp=pp, rank=0, m=8 * pp, vpp=vpp)) / vpp
    assert worth == pytest.approx(pp * (1 + (pp - 1) / (pp * vpp)), abs=1 / vpp)


def test_interleaving_never_holds_more_than_there_is() -> None:
    assert sum(held("interleaved", pp=4, rank=0, m=4, vpp=8)) <= 4 * 8


def test_bubbles_of_the_papers() -> None:
    """arXiv 2104.04473, section 2.2; arXiv 2401.10241, table 2; with F = I = W = 1."""
    seconds = {
        (name, vpp): float(pipeline.fill_seconds(name, pipeline.Pass(1.0, 1.0, 1.0), pp=4, vpp=vpp, m=8))
        for name, vpp in (("1f1b", 1), ("interleaved", 3), ("zb-h1", 1))
    }
    assert seconds == {
        ("1f1b", 1): 9.0,
        ("interleaved", 3): 3.0,
        ("zb-h1", 1): 3.0,
    }


# --- the whole -------------------------------------------------------------------------------------------------------


STREAMING = StateBytes(param=0, param_shard=2, grad=0, grad_shard=4, unit_param=2, unit_grad=4)


def model_of(**keys: Any) -> MemoryModel:
    states = {(3, 0): StateBytes(), (3, 1): STREAMING, (1, 0): StateBytes()}
    return MemoryModel(**(dict(model=gpt(num_layers=64), vocab_size=1000, states=states) | keys))


def pipelined(**row: int) -> Layouts:
    return layout(**(dict(pp=4, dp=2, pp_microbatches=8, schedule=SCHEDULES.index("1f1b")) | row))


def total(at: Layouts, **keys: Any) -> float:
    return float(model_of(**keys).peak(at).total[0])


@pytest.mark.parametrize(
    ("name", "vpp"), [("1f1b", 1), ("interleaved", 2), ("zb-h1", 1), ("zbv", 2), ("dualpipev", 2), ("v-half", 2)]
)
def test_no_rank_holds_more_than_the_most_loaded(name: str, vpp: int) -> None:
    """Ranks with equal chunks hold inputs that Transformer Engine gathers for W, the more the later they are."""
    row = dict(pp=8, tp=8, vpp=vpp, sequence_parallel=1, pp_microbatches=32, schedule=SCHEDULES.index(name))
    memory, model = model_of().peak(at := pipelined(**row)), model_of()
    each = [sum(kind[0] for kind in model.on_rank(at, rank).values()) for rank in range(8)]
    assert memory.total[0] == pytest.approx(max(each))
    assert each[memory.rank[0]] == pytest.approx(max(each))


def test_kinds_add_up_and_none_is_negative() -> None:
    memory = model_of(usage=Usage(runtime_bytes=1e9, fragmentation=0.1)).peak(pipelined())
    assert set(memory.by_kind) == set(KINDS)
    assert all(values[0] >= 0 for values in memory.by_kind.values())
    assert memory.total[0] == pytest.approx(sum(values[0] for values in memory.by_kind.values()))


def test_the_most_loaded_rank_is_found_not_assumed() -> None:
    """The first holds the most micro-batches; with a huge vocabulary and recompute the last one's logits are more."""
    assert model_of().peak(pipelined()).rank[0] == 0
    heavy = model_of(vocab_size=2_000_000, states={(3, 0): StateBytes(param=0, grad=0, optimizer_shard=0)})
    assert heavy.peak(pipelined(recompute=RECOMPUTE.index("full"))).rank[0] == 3


def test_what_saves_memory_saves_it() -> None:
    base = total(pipelined())
    assert total(pipelined(recompute=RECOMPUTE.index("full"))) < base
    assert total(pipelined(tp=2, sequence_parallel=1)) < base
    assert total(pipelined(dp=8)) < base
    assert total(pipelined(sync=SYNC_MODES.index("streaming"))) < base
    assert total(pipelined(micro_batch_size=1)) < base
    assert total(pipelined(pp_microbatches=4)) == base  # 1F1B holds pp of them, however many there are


def test_zero_shards_the_optimizer_over_all_that_hold_the_same() -> None:
    one = model_of().peak(pipelined(dp=1)).by_kind["optimizer"][0]
    assert model_of().peak(pipelined(dp=2, cp=2)).by_kind["optimizer"][0] == pytest.approx(one / 4)
    assert model_of(sharded_over_dp=False).peak(pipelined(dp=8)).by_kind["optimizer"][0] == pytest.approx(one)


def test_many_layouts_at_once_are_as_one_by_one() -> None:
    rows = [pipelined(dp=d, micro_batch_size=b).row(0) for d in (1, 2, 4) for b in (1, 2)]
    rows += [layout(dp=2).row(0), pipelined(pp=2, vpp=2, schedule=SCHEDULES.index("interleaved")).row(0)]
    together = model_of().peak(from_rows(rows)).total
    assert np.allclose(together, [total(from_rows([row])) for row in rows])


def test_fp8_keeps_narrow_inputs_and_two_narrow_copies_of_the_layers_weights() -> None:
    def of(*flags: str) -> Workload:
        words = "--bf16 --num_layers 8 --hidden_size 4096 --num_attention_heads 32 --seq_length 4096 --vocab_size 32000"
        config = load(None, [*f"{words} --global_batch_size 64 --swiglu --data_path none".split(), *flags])
        return make_workload(config, world_size=8, hardware=load_hardware("h100"))

    wide, narrow = of(), of("--fp8_format", "hybrid")
    at = layout(dp=8, zero_stage=3)
    states = [each.memory_model().on_rank(at, 0) for each in (wide, narrow)]
    layers = 8 * sum(layer_elements(wide.model, moe=False))
    assert states[1]["parameters"][0] - states[0]["parameters"][0] == 2 * layers
    assert states[1]["activations"][0] < states[0]["activations"][0]
    seconds = [each.time_model(each.memory_model()).step(at).total[0] for each in (wide, narrow)]
    assert seconds[1] < seconds[0]


def test_gradients_of_weights_that_wait_to_be_added() -> None:
    """A layer's largest, or the head's where it is larger; with Transformer Engine's fused sums one of every shape."""
    model = gpt(num_layers=64, swiglu=True, ffn_hidden_size=4 * HIDDEN)
    at = layout(dp=2)
    largest, attention = 2 * 4 * HIDDEN**2, 4 * HIDDEN**2

    def waiting(vocab_size: int, **kernels: Any) -> float:
        return float(
            model_of(model=model, vocab_size=vocab_size, kernels=Kernels(**kernels)).peak(at).by_kind["workspace"][0]
        )

    assert waiting(1000) == 2 * largest
    assert waiting(100_000) == 2 * 100_096 * HIDDEN
    assert waiting(1000, kept_weight_grads=True) == 2 * (1024 * HIDDEN + attention + 3 * 4 * HIDDEN**2)
    assert waiting(1000, local=True) == 0


def test_rotated_queries_and_keys_are_kept_beside_their_product() -> None:
    def kept(**keys: Any) -> float:
        return float(activations.kept_per_layer(gpt(**keys), layout(), Kernels(), moe=False)[0])

    rotated = kept(position_embedding_type="rope") - kept(position_embedding_type="none")
    assert rotated == 2 * SEQ * MICRO * 2 * HIDDEN


def test_inputs_that_are_gathered_until_w_count_whole() -> None:
    """The 4 - 1 other parts of two inputs per layer, for as many passes as rank 1 owes W of (16 of 64 layers)."""
    at = pipelined(schedule=SCHEDULES.index("zb-h1"), pp=4, tp=4, sequence_parallel=1, pp_microbatches=16)
    of_te, local = model_of(), model_of(kernels=Kernels(local=True))
    owed = pipeline.owed("zb-h1", pp=4, rank=1, microbatches=at.num_microbatches)
    chunks = [of_te.stages(4, 1)[1]]
    part = activations.tokens(of_te.model, at) * of_te.model.hidden_size * 2 / 4
    assert owed[0] >= 1
    here = PipelineRank("zb-h1", pp=4, vpp=1, rank=1)
    kept = of_te._gathered_until_w(at, here, chunks)
    assert kept == pytest.approx(owed * chunks[0].layers * 2 * 3 * part)
    assert local._gathered_until_w(at, here, chunks) == 0.0
    assert np.all(of_te._gathered_until_w(at, here._replace(name="1f1b"), chunks) == 0.0)


def test_an_engine_holds_the_ends_of_a_stage_that_are_activations() -> None:
    """The first stage's input are tokens, and the last one's output is a loss."""
    at = layout(pp=4, pp_microbatches=8, schedule=SCHEDULES.index("1f1b"))
    plain, engine = (MemoryModel(model=gpt(), vocab_size=1024, boundary_tensors=each) for each in (0.0, 1.0))
    more = [engine.on_rank(at, rank)["activations"] - plain.on_rank(at, rank)["activations"] for rank in range(4)]
    assert [int(each[0]) // (2 * SBH) for each in more] == [4 * 1, 3 * 2, 2 * 2, 1 * 1]


@pytest.mark.parametrize(
    ("each", "ranks", "sums"),
    [(4, 1, (1,)), (4, 4, (1, 1, 1, 1)), (4, 3, (2, 3, 2)), (16, 3, (3, 5, 3)), (4, 6, (2, 3, 2, 2, 3, 2))],
)
def test_sums_of_a_run(each: int, ranks: int, sums: tuple[int, ...]) -> None:
    """One if ranks are a power of two; both halves of six ranks are like three."""
    assert sums_of_runs(each, ranks) == sums


def test_the_most_sums_that_wait() -> None:
    """Four micro-batches have 2 sums that wait, eight have 3; one of three ranks has 3; in turns, a round adds up."""
    assert [most_waiting(each, 1, in_turns=False) for each in (1, 2, 4, 8)] == [0, 1, 2, 3]
    assert most_waiting(4, 3, in_turns=False) == 3
    assert [most_waiting(each, 4, in_turns=True) for each in (1, 2, 4)] == [0, 1, 2]


def test_finished_sums_that_stay_count_if_they_are_more() -> None:
    """10 elements, 2 waiting sums of a byte each; a finished sum has 4 bytes, and up to `waiting_totals` stay."""
    for totals, size in ((0.0, 20), (5.0, 30), (np.inf, 40)):
        per = StateBytes(waiting=1.0, waiting_totals=totals)
        assert per.partial_sums(np.array([10.0]), 2, 1)[0] == size
