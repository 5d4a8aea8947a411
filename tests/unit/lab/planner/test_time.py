"""The planner's time model: collectives and products against their formulas, and how a step moves."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import batched
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megaaccum.lab.planner import activations, comm, compute, expected
from megaaccum.lab.planner.comm import Group, Links
from megaaccum.lab.planner.compute import Gemm
from megaaccum.lab.planner.hardware import load_hardware, names
from megaaccum.lab.planner.layouts import RECOMPUTE, SCHEDULES, SYNC_MODES, Layouts, from_rows
from megaaccum.lab.planner.memory import MemoryModel
from megaaccum.lab.planner.time import BIASED_ROW_PASSES, UNFUSED_KERNELS, Software, TimeModel
from megaaccum.lab.planner.workload import make_workload
from megaaccum.pretrain.interop.load import load
from megaaccum.schedule.registry import BUILT_IN, is_v_shaped
from megaaccum.units import GIB
from tests.support.configs import plan

LINKS = Links(gpus_per_node=8, node_bandwidth=300e9, node_latency=5e-6, net_bandwidth=25e9, net_latency=20e-6)


def test_a_ring_moves_its_share_of_the_bytes() -> None:
    """nccl-tests: an all-gather moves (K - 1) / K * S per rank, an all-reduce twice that."""
    inside = Group(8, 8)
    assert comm.ring(GIB, inside, LINKS) == pytest.approx(comm.START + 7 * 5e-6 + 7 / 8 * GIB / 300e9)
    assert comm.all_reduce(GIB, inside, LINKS) <= 2 * comm.ring(GIB, inside, LINKS)


def test_a_group_that_crosses_nodes_has_the_links_of_all_its_ranks() -> None:
    across = Group.strided(16, 1, LINKS)
    assert (across.per_node, bool(across.crosses_nodes())) == (8, True)
    assert comm.bandwidth(across, LINKS) == 8 * 25e9
    alone = Group.strided(16, 8, LINKS)
    assert (alone.per_node, float(comm.bandwidth(alone, LINKS))) == (1, 25e9)
    assert not Group.strided(4, 2, LINKS).crosses_nodes()


def test_small_messages_over_many_ranks_take_the_tree() -> None:
    many = Group(512, 1)
    assert comm.all_reduce(1e3, many, LINKS) < 2 * comm.ring(1e3, many, LINKS)
    assert comm.all_reduce(1e3, many, LINKS) == pytest.approx(comm.tree(1e3, many, LINKS), rel=0.2)


def test_one_rank_needs_no_communication() -> None:
    alone = Group(1, 1)
    for collective in (comm.gather, comm.all_reduce, comm.all_to_all):
        assert collective(GIB, alone, LINKS) == 0


@pytest.mark.parametrize("ranks", [8, 64, 512])
def test_the_documented_example_of_a_ring(ranks: int) -> None:
    """2e9 parameters of 2 bytes at 25 GB/s take 2 (K - 1) / K S / B."""
    size, bandwidth = 2e9 * 2, 25e9
    links = replace(LINKS, node_bandwidth=bandwidth, net_bandwidth=bandwidth, node_latency=0, net_latency=0, start=0)
    ring = float(2 * comm.ring(size, Group(ranks, 1), links))
    assert ring == pytest.approx(2 * (ranks - 1) / ranks * 0.16)


def test_a_product_is_slower_where_a_side_is_short() -> None:
    device = load_hardware("h100").device
    large = compute.gemm_seconds(Gemm(8192, 8192, 8192), device)
    assert large > 2 * 8192**3 / device.peak
    thin = compute.gemm_seconds(Gemm(8192, 256, 8192), device)
    assert thin > large / 32 * 1.2
    assert compute.gemm_seconds(Gemm(8192, 8192, 8192), device, "fp8") < large


def test_a_product_is_slower_whose_rows_are_no_multiple_of_16_bytes() -> None:
    device = load_hardware("a100_80").device
    padded, odd = (compute.gemm_seconds(Gemm(4096, rows, 2048), device) for rows in (50264, 50257))
    assert odd == pytest.approx(compute.UNALIGNED * padded, rel=1e-3)
    unfused, fused = (heads_of(225, flash=flash) / heads_of(224, flash=flash) for flash in (False, True))
    assert unfused > 3
    assert fused == pytest.approx(225 / 224)


def test_fp32_has_a_peak_of_its_own_without_tf32(tmp_path: Path) -> None:
    device = load_hardware("a100_80").device
    assert device.rate("16 bit") / device.rate("fp32") == pytest.approx(312 / 19.5)
    half = replace(time_model(), hardware=load_hardware("a100_80"))
    whole, at = replace(half, software=Software(precision="fp32")), from_rows([BASE])
    (short, head), (long, long_head) = ([each.passes(at)[k] for k in ("dense", "head")] for each in (half, whole))
    assert long.weight_grad[0] > 14 * short.weight_grad[0] and long_head.weight_grad[0] > 14 * head.weight_grad[0]
    assert long.forward[0] > 10 * short.forward[0]
    file = tmp_path / "mine.yaml"
    file.write_text("mine: {like: a100_80, peak_tflops: 2}")  # measured, in FP32 on a CPU
    slow = load_hardware("mine", file=file).device
    assert slow.rate("fp32") == slow.rate("16 bit")


@pytest.mark.parametrize(
    ("keys", "precision"), [("--bf16 true", "16 bit"), ("--bf16 false", "fp32"), ("--params_dtype fp64", "fp32")]
)
def test_the_precision_of_products_is_that_of_parameters(keys: str, precision: str) -> None:
    model = "--num_layers 4 --hidden_size 512 --num_attention_heads 8 --seq_length 512 --vocab_size 1000"
    config = load(None, [*model.split(), "--global_batch_size", "8", *keys.split()])
    work = make_workload(config, world_size=1, hardware=load_hardware("h100"))
    assert work.time_model(work.memory_model()).software.precision == precision


def heads_of(channels: int, *, flash: bool) -> float:
    """Seconds of the attention of heads of `channels` channels."""
    model = plan(1, num_attention_heads=4, hidden_size=4 * channels, kv_channels=channels).config.model
    at = from_rows([dict(tp=1)])
    return float(compute.attention_seconds(model, at, load_hardware("a100_80").device, flash=flash)[0])


def test_kept_scores_of_an_odd_number_of_heads_take_more_kernels() -> None:
    """A host-bound layer with tp 8 and 16 heads: two heads of one sequence, but four of two."""
    model = replace(time_model(num_attention_heads=16, hidden_size=512, seq_length=256), software=Software(flash=False))
    one, two = (model.passes(from_rows([dict(tp=8, micro_batch_size=size)]))["dense"].forward[0] for size in (1, 2))
    assert one == pytest.approx(UNFUSED_KERNELS * two, rel=0.02)


def time_model(**keys: Any) -> TimeModel:
    keys = dict(num_layers=8, hidden_size=4096, num_attention_heads=32, seq_length=4096) | keys
    model = plan(1, **keys).config.model
    stages = MemoryModel(model=model, vocab_size=50000).stages
    return TimeModel(model=model, vocab_size=50000, hardware=load_hardware("h100"), stages=stages)


def step(row: dict[str, int], **keys: Any) -> float:
    return float(time_model(**keys).step(from_rows([row])).total[0])


BASE = dict(dp=8, pp_microbatches=8, micro_batch_size=1)
PIPELINE = dict(dp=2, pp=4, pp_microbatches=16, schedule=SCHEDULES.index("1f1b"))


def test_parts_add_up() -> None:
    time = time_model().step(from_rows([BASE, PIPELINE]))
    assert np.allclose(time.total, np.sum(list(time.by_part.values()), axis=0))
    assert all((seconds >= 0).all() for seconds in time.by_part.values())


def test_twice_the_micro_batches_take_twice_the_compute() -> None:
    one, two = (time_model().step(from_rows([BASE | dict(pp_microbatches=n)])) for n in (8, 16))
    assert two.by_part["compute"][0] == pytest.approx(2 * one.by_part["compute"][0])
    assert two.by_part["gather"][0] == pytest.approx(one.by_part["gather"][0])  # resident: once per step


def test_full_recompute_costs_about_a_forward() -> None:
    ratio = step(BASE | dict(recompute=RECOMPUTE.index("full"))) / step(BASE)
    assert 1.2 < ratio < 1.4


def test_a_last_stage_that_recomputes_nothing_is_not_the_slowest() -> None:
    every = replace(time_model(), vocab_size=8000)
    keeps = replace(every, software=Software(last_recomputes=False))
    full = dict(recompute=RECOMPUTE.index("full"))
    at = from_rows([PIPELINE | full])
    layer = every.passes(at)["dense"].whole[0]
    kept, head = (every.passes(from_rows([PIPELINE]))[kind].whole[0] for kind in ("dense", "head"))
    assert 0 < head < 2 * (layer - kept)
    one, other = (model.step(at).by_part for model in (every, keeps))
    assert one["compute"][0] == pytest.approx(16 * (2 * layer + head))
    assert other["compute"][0] == pytest.approx(16 * 2 * layer)
    assert one["bubble"][0] - other["bubble"][0] == pytest.approx(3 / 4 * 2 * (layer - kept))
    alone = from_rows([BASE | full])
    assert keeps.step(alone).total == every.step(alone).total


def test_a_bubble_is_as_long_as_the_formula_says() -> None:
    time = time_model(untie_embeddings_and_output_weights=True).step(from_rows([PIPELINE | dict(pp_microbatches=64)]))
    assert time.bubble[0] == pytest.approx(3 / 67, abs=0.02)
    fewer = time_model().step(from_rows([PIPELINE]))
    assert fewer.bubble[0] > time.bubble[0]


def test_interleaving_shortens_the_bubble() -> None:
    plain = time_model().step(from_rows([PIPELINE]))
    chunks = time_model().step(from_rows([PIPELINE | dict(vpp=2, schedule=SCHEDULES.index("interleaved"))]))
    assert chunks.by_part["bubble"][0] < plain.by_part["bubble"][0]


def test_streaming_pays_for_every_micro_batch_and_resident_once() -> None:
    """With micro-batches too short to hide a layer's gather, streaming over a network is slower."""
    short = BASE | dict(dp=64, pp_microbatches=16)
    slow = step(short | dict(sync=SYNC_MODES.index("streaming")), seq_length=256)
    assert slow > step(short, seq_length=256)


def test_tensor_parallelism_over_nodes_is_what_it_costs() -> None:
    hardware = load_hardware("a100_80")
    slow = replace(hardware, links=replace(hardware.links, net_bandwidth=5e9))
    model = replace(time_model(), hardware=slow)
    rows = [dict(tp=tp, pp_microbatches=8, sequence_parallel=1) for tp in (8, 16)]
    inside, across = model.step(from_rows(rows)).exposed
    assert across > 3 * inside


def test_fewer_query_groups_than_ranks_gather_their_product() -> None:
    """Megatron gathers queries, keys and values of all heads in each pass and cuts the rank's own out of them."""
    row = from_rows([dict(tp=8, pp_microbatches=8, sequence_parallel=1)])
    few, enough = (time_model(num_query_groups=groups) for groups in (2, 8))
    product = 4096 * (32 + 2 * 2) * 128
    assert activations.regrouped(few.model, row)[0] == product and activations.regrouped(enough.model, row)[0] == 0
    once = comm.gather(2.0 * product, Group(8, 8), few.hardware.links)
    more = few.step(row).exposed[0] - enough.step(row).exposed[0]
    assert more == pytest.approx(8 * 8 * 2 * float(once))


# --- context and expert parallelism ----------------------------------------------------------------------------------


def test_context_parallelism_is_not_free() -> None:
    """The same tokens per rank, cut over more ranks: a ring takes its hops, and attends to shorter pieces at a time."""
    rows = [dict(dp=8 // cp, cp=cp, pp_microbatches=8, micro_batch_size=cp) for cp in (1, 2, 4, 8)]
    seconds = time_model(seq_length=8192).step(from_rows(rows)).total
    assert (np.diff(seconds) > 0).all()


def test_a_ring_is_hidden_as_far_as_its_attention_lasts() -> None:
    """Over a slow network its hops are seen; long sequences hide them: attention grows with the square."""
    model = time_model(seq_length=8192)
    slow = replace(model.hardware, links=replace(model.hardware.links, net_bandwidth=2e9))
    row = from_rows([dict(cp=16, pp_microbatches=8)])
    shown = [float(replace(time_model(seq_length=s), hardware=slow).step(row).exposed[0]) for s in (8192, 1 << 20)]
    hop = replace(model, hardware=slow).step(row).exposed[0] - model.step(row).exposed[0]
    assert hop > 0.5 * shown[0]
    longer = replace(time_model(seq_length=1 << 20), hardware=slow).step(row).total[0]
    assert shown[0] / replace(model, hardware=slow).step(row).total[0] > 3 * shown[1] / longer


EXPERTS = dict(num_experts=64, moe_router_topk=8, moe_ffn_hidden_size=1024)


def experts(ep: int, *, hidden: int = 2048, **software: Any) -> float:
    model = replace(time_model(hidden_size=hidden, **EXPERTS), software=Software(**{"host": 0.0} | software))
    return float(model.step(from_rows([dict(dp=64, ep=ep, pp_microbatches=8)])).total[0])


def test_copies_of_a_token() -> None:
    """Eight experts anywhere on 64 ranks of 8 nodes: each for itself, or one copy per rank and node."""
    group = Group.strided(64, 1, LINKS)
    inside, away = comm.copies(group, 8)
    assert (inside, away) == (8 * 7 / 64, 8 * 7 / 8)
    once = comm.copies(group, 8, once=True)
    assert once == pytest.approx((7 * (1 - (63 / 64) ** 8), 7 * (1 - (7 / 8) ** 8)))
    assert comm.copies(Group(1, 1), 8, once=True) == (0.0, 0.0)
    sent = comm.all_to_all(GIB, group, LINKS)
    assert sent == pytest.approx(7 / 8 * GIB / 25e9 + 20e-6 + 5e-6)


def test_experts_far_away_cost_what_their_exchange_does() -> None:
    near, far = experts(8), experts(64)
    assert far > near
    assert experts(64, fused_dispatch=True) < far
    assert experts(64, ep_overlap=True) < far
    assert experts(64, imbalance=1.5) > far
    assert experts(64, row_passes=2.0) < far


def test_experts_with_biases_move_more_bytes() -> None:
    """Rows of T tokens for topk experts, 2 bytes an element, both ways through each of the layers."""
    keys = "num_layers 4 hidden_size 1024 num_attention_heads 8 seq_length 2048 vocab_size 1024 global_batch_size 8"
    words = [f"--{name}={value}" for name, value in (*batched(keys.split(), 2), *EXPERTS.items())]
    row, seconds = from_rows([dict(dp=1, pp_microbatches=8)]), []
    for has_bias in ("true", "false"):
        config = load(None, [*words, "--bf16=true", f"--add_bias_linear={has_bias}"])
        work = make_workload(config, world_size=1, hardware=load_hardware("h100"))
        software = replace(work.time_model(work.memory_model()).software, host=0.0)
        model = replace(work.time_model(work.memory_model()), software=software)
        seconds.append(float(model.step(row).total[0]))
    device = load_hardware("h100").device
    moved = 4 * 8 * 2 * 2048 * 8 * 1024 * 2.0 * BIASED_ROW_PASSES
    assert seconds[0] - seconds[1] == pytest.approx(moved / device.hbm_bandwidth / device.efficiency.memory, rel=0.02)


def test_few_tokens_per_expert_are_bound_by_the_weights() -> None:
    """Half of the tokens take more than half of the time in grouped products, since all weights are read."""
    device = load_hardware("b200").device
    seconds = []
    for rows in (64, 128):
        products = [Gemm(rows, 4096, 7168, 256, grouped=True)]
        seconds.append(compute.gemm_seconds(products[0], device) + compute.weight_seconds(products, device, 2.0))
    assert seconds[0] > 0.6 * seconds[1]
    assert compute.weight_seconds([Gemm(64, 4096, 7168)], device, 2.0) == 0


def test_casts_to_8_bit_take_their_bytes() -> None:
    device = load_hardware("h100").device
    products = [Gemm(8192, 4096, 2048)]
    forward, backward = (compute.cast_seconds(products, device, backward=each) for each in (False, True))
    assert forward == pytest.approx(4 * 8192 * 2048 / (device.hbm_bandwidth * device.efficiency.memory))
    assert backward == pytest.approx(2 * forward)


def test_graphs_lift_the_hosts_floor() -> None:
    small = time_model(hidden_size=256, num_attention_heads=4, seq_length=64)
    graphs = replace(small, software=Software(host=0.0))
    row = from_rows([BASE])
    assert graphs.step(row).total[0] < 0.2 * small.step(row).total[0]


def test_every_entry_of_the_hardware_table_can_be_loaded() -> None:
    for name in names():
        hardware = load_hardware(name)
        efficiency = hardware.device.efficiency
        assert 0 < efficiency.gemm < 1
        assert hardware.hbm_bytes > 30 * GIB
        assert math.isfinite(step_of(hardware.name))


def step_of(name: str) -> float:
    model = replace(time_model(), hardware=load_hardware(name))
    return float(model.step(from_rows([BASE])).total[0])


def test_a_layout_of_every_schedule_has_a_time() -> None:
    rows = [
        PIPELINE | dict(schedule=SCHEDULES.index(name), vpp=2 if name == "interleaved" or is_v_shaped(name) else 1)
        for name in BUILT_IN
    ]
    time = time_model().step(from_rows(rows))
    assert (time.total > 0).all()
    assert isinstance(from_rows(rows), Layouts)


def test_the_addition_of_a_gradient_takes_its_bytes() -> None:
    fused, apart = time_model(), replace(time_model(), software=Software(added_bytes=10.0))
    at, device = from_rows([BASE]), fused.hardware.device
    grown = apart.passes(at)["dense"].weight_grad - fused.passes(at)["dense"].weight_grad
    products = [*compute.attention_products(fused.model, at), *compute.mlp_products(fused.model, at, 4 * 4096)]
    elements = sum(each.n * each.k for each in products)
    assert grown == pytest.approx(10 * elements / (device.hbm_bandwidth * device.efficiency.memory))
    assert apart.passes(at)["head"].weight_grad > fused.passes(at)["head"].weight_grad


def test_a_plan_of_torch_ddp_steps_whole_parameters() -> None:
    """On every rank, where ZeRO steps an eighth."""
    seconds = {}
    for backend in ("ddp", "deepspeed"):
        model, at = expected.time_model(plan(8, backend=backend), 1000, None, "h100")
        seconds[backend] = float(model.step(at).by_part["optimizer"][0])
    assert seconds["ddp"] == pytest.approx(8 * seconds["deepspeed"])
