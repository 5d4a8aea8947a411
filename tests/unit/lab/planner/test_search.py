"""The legal space, the ranking, and the configurations that come out of a plan."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megaaccum.config import Config, resolve
from megaaccum.errors import ConfigError
from megaaccum.lab.planner import layout_config, sync_mode
from megaaccum.lab.planner.candidates import AXES, Limits
from megaaccum.lab.planner.hardware import Hardware, load_hardware
from megaaccum.lab.planner.layouts import RECOMPUTE
from megaaccum.lab.planner.search import MEASURED, NEAR_FASTEST, Ranked, fit_probability, search
from megaaccum.lab.planner.why_not import parse_axes, why_not
from megaaccum.lab.planner.workload import Workload, make_workload
from megaaccum.pretrain.interop.load import load
from megaaccum.units import GIB
from tests.support.configs import make

CONFIGS = Path(__file__).parents[4] / "configs"
SHAPE: dict[str, Any] = dict(
    num_layers=32, hidden_size=4096, num_attention_heads=32, num_query_groups=8, ffn_hidden_size=14336, swiglu=True,
    seq_length=8192, vocab_size=128256, position_embedding_type="rope", normalization="RMSNorm", add_bias_linear=False,
    attention_dropout=0.0, hidden_dropout=0.0, bf16=True, global_batch_size=512,
    pp_microbatches=None, micro_batch_size=None,
)  # fmt: skip


def workload(gpus: int = 64, gpu: str = "h100", hbm_gib: float | None = None, **keys: Any) -> Workload:
    hardware = load_hardware(gpu)
    if hbm_gib is not None:
        hardware = replace(hardware, hbm_bytes=hbm_gib * 2**30)
    return make_workload(make(**(SHAPE | keys)), world_size=gpus, hardware=hardware)


@pytest.fixture(scope="module")
def ranked() -> Ranked:
    return search(workload())


EXPERTS = dict(
    num_experts=8, moe_ffn_hidden_size=14336, global_batch_size=256, moe_aux_loss_coeff=1e-2, swiglu=True,
)  # fmt: skip
WORKLOADS: dict[str, Callable[[], Workload]] = {
    "dense": workload,
    "experts": lambda: workload(gpus=64, gpu="b200", **EXPERTS),
    "ends": lambda: workload(gpus=48, num_layers=30, global_batch_size=96 * 4),
    "prediction": lambda: workload(gpus=32, mtp_num_layers=1),
    "short flushes": lambda: workload(gpus=256, global_batch_size=128, allow_underfilled_pipeline=True),
    "local": lambda: workload(gpus=16, transformer_impl="local", seq_length=2048),
}


@cache
def ranking_of(name: str, rank: str = "default") -> Ranked:
    return search(WORKLOADS[name](), rank=rank)


@pytest.mark.parametrize("name", WORKLOADS)
def test_every_emitted_plan_passes_check(name: str) -> None:
    """All of them where there are few, else a spread of sixty over the whole ranking."""
    found = ranking_of(name)
    for index in np.unique(np.linspace(0, len(found) - 1, 60).astype(int)):
        at = found.name_of(int(index))
        plan = layout_config.checked(found.workload, at)
        layout, batch = plan.layout, plan.batch
        assert (layout.tp, layout.cp, layout.pp, layout.vpp, layout.dp) == tuple(
            at[axis] for axis in ("tp", "cp", "pp", "vpp", "dp")
        )
        sizes = (batch.micro_batch_size, batch.device_batch_size, batch.grad_accum_steps)
        assert sizes == (at["mbs"], at["dbs"], at["ga"])
        assert batch.global_batch_size == found.workload.global_batch_size


@pytest.mark.parametrize("backend", ["fsdp2", "megatron", "ddp"])
def test_every_backend_is_planned(backend: str) -> None:
    """A ZeRO stage is DeepSpeed's key alone; torch DDP sums whole gradients and steps whole parameters."""
    small = dict(num_layers=4, hidden_size=1024, ffn_hidden_size=4096, global_batch_size=64)
    found, zero = (search(workload(8, **small, backend=name), Limits(fixed=dict(tp=1, cp=1, pp=1)), rank="time")
                   for name in (backend, "deepspeed"))  # fmt: skip
    at = found.name_of(0)
    assert "zero_stage" not in layout_config.planned_keys(found.workload, at)
    assert layout_config.checked(found.workload, at).config.sharding.backend == backend
    part, usual = (each.time.by_part["optimizer"][0] for each in (found, zero))
    assert part == pytest.approx(usual * (8 if backend == "ddp" else 1))
    assert ("streaming" in {found.name_of(index)["sync"] for index in range(len(found))}) == (backend == "fsdp2")


@pytest.mark.parametrize("backend", ["deepspeed", "fsdp2", "megatron", "ddp"])
def test_every_schedule_holds_what_check_says(backend: str) -> None:
    """Under a split backward only DeepSpeed keeps Transformer Engine's layers; the file's own schedule says nothing."""
    small = dict(num_layers=8, hidden_size=1024, ffn_hidden_size=4096, global_batch_size=64, backend=backend)
    work = workload(8, **small, schedule="zbv")
    found = search(work, Limits(fixed=dict(pp=2, recompute="none")))
    rows = {(at["schedule"], at["tp"]): (index, at) for index in range(len(found)) for at in [found.name_of(index)]}
    assert {"1f1b", "interleaved", "zb-h1", "zbv", "dualpipev"} <= {name for name, _ in rows}
    for index, at in rows.values():
        plan = layout_config.checked(work, at)
        forecast = sync_mode.Forecast(plan, work.vocab_size, usage=work.hardware.usage)
        held = forecast.predict(plan.config.sharding).memory
        assert {kind: size[index] for kind, size in found.memory.by_kind.items()} == pytest.approx(held), at


def test_experts_may_be_cut_over_fewer_ranks_than_tp() -> None:
    work = workload(16, **EXPERTS)
    found = search(work, Limits(fixed=dict(tp=4, etp=2, pp=1, cp=1)), rank="time")
    assert {found.name_of(index)["etp"] for index in range(len(found))} == {2}
    assert layout_config.checked(work, found.name_of(0)).layout.etp == 2


def test_replicas_hold_what_check_says_and_divide_their_ranks() -> None:
    """fsdp2 shards over the ranks of one replica; layouts whose ranks have no such replicas are no rows."""
    small = dict(num_layers=4, hidden_size=1024, ffn_hidden_size=4096, backend="fsdp2", data_parallel_replicas=2)
    work = workload(8, **EXPERTS | small | dict(moe_ffn_hidden_size=512, global_batch_size=64))
    found = search(work, rank="time")
    held = found.memory.by_kind["optimizer"] / GIB
    for index in range(0, len(found), 10):
        at = found.name_of(index)
        plan = layout_config.checked(work, at)
        of_check = sync_mode.Forecast(plan, work.vocab_size, work.layers(at["schedule"])).predict(plan.config.sharding)
        assert held[index] == pytest.approx(of_check.memory["optimizer"] / GIB), at


def test_parameters_that_stay_gathered_count_as_in_check() -> None:
    small = dict(num_layers=4, hidden_size=1024, ffn_hidden_size=4096, global_batch_size=64, vocab_size=1024)
    for live in (0, 30_000_000):
        work = workload(8, **small, max_live_parameters=live)
        found = search(work, Limits(fixed=dict(cp=1, sync="streaming")))
        rows = {(at["tp"], at["pp"]): (index, at) for index in range(len(found)) for at in [found.name_of(index)]}
        assert {(1, 1), (2, 1), (4, 1), (2, 2)} <= rows.keys()
        for index, at in rows.values():
            plan = layout_config.checked(work, at)
            of_check = sync_mode.Forecast(plan, work.vocab_size, work.layers()).predict(plan.config.sharding)
            assert found.memory.by_kind["parameters"][index] == pytest.approx(of_check.memory["parameters"]), at


def test_a_written_plan_is_read_back_as_it_was(ranked: Ranked, tmp_path: Path) -> None:
    path = tmp_path / "configs" / "out.yaml"
    layout_config.write(ranked.workload, ranked.name_of(3), path, comment="the fourth")
    assert load(path).run.world_size == 64
    settled = resolve(load(path), world_size=64)
    assert settled.digest() == layout_config.checked(ranked.workload, ranked.name_of(3)).digest()
    assert path.read_text(encoding="utf-8").startswith("# the fourth\n")


def test_more_chunks_than_anybody_runs_are_looked_at_if_they_are_asked_for() -> None:
    deep = workload(num_layers=80)
    limits = dict(pp=2, tp=8, cp=1, schedule="interleaved")
    found = search(deep, Limits(fixed=limits))
    assert max(found.name_of(index)["vpp"] for index in range(len(found))) == 20
    asked = search(deep, Limits(fixed=limits | {"vpp": 40}))
    assert {asked.name_of(index)["vpp"] for index in range(len(asked))} == {40}


def test_what_the_file_said_of_the_layout_is_set_aside() -> None:
    found = search(workload(tensor_model_parallel_size=2, recompute_granularity="full", pp_microbatches=4))
    assert {found.name_of(i)["tp"] for i in range(len(found))} > {1, 2}
    plan = layout_config.checked(found.workload, found.name_of(0))
    assert plan.config.model.recompute_granularity is None


def figures(found: Ranked) -> list[tuple[float, float]]:
    """(seconds, GiB) as the table shows them, by rank."""
    return [(float(f"{s:.3g}"), round(b / 2**30, 1)) for s, b in zip(found.time.total, found.memory.total, strict=True)]


@pytest.mark.parametrize(
    ("name", "rank"), [*((name, "default") for name in WORKLOADS), ("dense", "time"), ("dense", "memory")]
)
def test_no_row_is_shown_that_another_beats(name: str, rank: str) -> None:
    """In time and memory both, of all that fit, nor two rows of the same figures; and every other layout is beaten."""
    found = ranking_of(name, rank)
    of_all = figures(found)
    shown, fastest_in = of_all[: found.num_unbeaten], {}
    for seconds, held in of_all:
        fastest_in[held] = min(seconds, fastest_in.get(held, np.inf))
    assert len(set(shown)) == len(shown)
    for seconds, held in shown:
        assert not any(s < seconds for h, s in fastest_in.items() if h <= held)
        assert not any(s <= seconds for h, s in fastest_in.items() if h < held)
    for seconds, held in set(of_all[found.num_unbeaten :]):
        assert any(s <= seconds and h <= held for s, h in shown)


def test_of_layouts_that_count_as_equal_the_least_of_everything_is_first() -> None:
    """cp, then tp, pp, ep, recompute; larger device batches, of which a cp group has one; then headroom."""
    for name in WORKLOADS:
        found = ranking_of(name)
        shown, seconds = range(found.num_unbeaten), [seconds for seconds, _ in figures(found)]
        near = [i for i in shown if seconds[i] <= NEAR_FASTEST * min(seconds)]
        assert near == list(range(len(near))), name

        def key(i: int, found: Ranked = found) -> tuple:
            at, recompute = found.name_of(i), RECOMPUTE.index(found.name_of(i)["recompute"])
            return (*(at[axis] for axis in ("cp", "tp", "pp", "ep")), recompute, -at["dbs"] / at["cp"])

        assert [key(i) for i in near] == sorted(key(i) for i in near), name
        rest = [found.time.total[i] for i in shown[len(near) :]]
        assert rest == sorted(rest), name


def test_llama_8b_on_64_gpus_needs_no_context_parallelism(ranked: Ranked) -> None:
    assert ranked.name_of(0)["cp"] == 1


@pytest.mark.parametrize("gpus", [2, 8])
def test_a_program_is_one_layout_whatever_it_is_called(gpus: int) -> None:
    """Streaming is resident if no rank shares a parameter with another: it gathers nothing."""
    found = search(workload(gpus=gpus, num_layers=8))
    names = [found.name_of(index) for index in range(len(found))]
    alone = [at for at in names if at["dp"] * at["cp"] == 1]
    assert alone and {at["sync"] for at in alone} == {"resident"}
    assert {at["sync"] for at in names if at["dp"] > 1} == {"resident", "streaming"}


def test_other_rankings() -> None:
    by_time, by_memory = (ranking_of("dense", rank) for rank in ("time", "memory"))
    for found, column in ((by_time, by_time.time.total), (by_memory, by_memory.memory.total)):
        assert (np.diff(column[: found.num_unbeaten]) >= 0).all()
    assert len(by_time) == len(by_memory)


def deepseek(gpu: str = "h200", **keys: Any) -> Workload:
    config = load(CONFIGS / "deepseek_v3_like.yaml", [f"--{name}={value}" for name, value in keys.items()])
    return make_workload(config, world_size=2048, hardware=load_hardware(gpu))


def test_the_shipped_layout_of_deepseek_v3_is_seen() -> None:
    """61 layers in a V of 32 stages, with the file's own modules recomputed: cut as the file cuts them."""
    fixed = dict(tp=1, cp=1, pp=16, ep=64, mbs=1, recompute="selective", schedule="dualpipev")
    found = search(deepseek(memory_gib=200), Limits(fixed=fixed))
    keys = layout_config.planned_keys(found.workload, found.name_of(0))
    assert keys["pipeline_model_parallel_layout"] == "Et|(tt|)*30mL"
    plan = layout_config.checked(found.workload, found.name_of(0))
    assert plan.config.model.recompute_modules == ["layernorm", "mla_up_proj"]
    assert plan.layout.dp == 128


@pytest.mark.parametrize("precision", [{"bf16": False}, {"params_dtype": "fp32", "bf16": None}])
def test_fp32_is_planned_with_the_layers_that_run_it_exactly(precision: dict[str, Any]) -> None:
    """`transformer_impl: auto` chooses them too: Transformer Engine multiplies FP32 in TF32."""
    found = search(workload(gpus=64, **precision))
    plan = layout_config.checked(found.workload, found.name_of(0))
    assert plan.config.sharding.params_dtype == "fp32"
    assert plan.config.model.transformer_impl == "local"


@pytest.mark.parametrize("overlap", ["true", "false"])
def test_the_advice_for_deepseek_v3_spreads_experts(overlap: str) -> None:
    """Not a pipeline of two ranks with dozens of chunks, whole experts on each rank, and large micro-batches."""
    first = search(deepseek(overlap_moe_expert_parallel_comm=overlap)).name_of(0)
    assert first["pp"] >= 4 and first["ep"] >= 4 and first["mbs"] <= 4 and first["vpp"] <= 4, first


def test_more_memory_never_makes_a_fitting_plan_unfit() -> None:
    def fitting(gib: float) -> set[tuple]:
        found = search(workload(hbm_gib=gib))
        return {tuple(found.name_of(i).values()) for i in range(len(found))}

    sizes = [fitting(gib) for gib in (48, 64, 80, 141)]
    assert all(small <= large for small, large in pairwise(sizes))
    assert len(sizes[0]) < len(sizes[-1])


@pytest.mark.parametrize("gpus", [32, 64, 128])
def test_doubling_dp_at_a_fixed_device_batch_halves_the_steps(gpus: int) -> None:
    fixed = dict(tp=2, pp=4, cp=1, mbs=1, dbs=8, schedule="1f1b", recompute="full")
    one, two = (search(workload(gpus=n), Limits(fixed=fixed)).name_of(0) for n in (gpus, 2 * gpus))
    assert two["dp"] == 2 * one["dp"]
    assert one["ga"] == 2 * two["ga"]


def test_every_rule_of_the_space(ranked: Ranked) -> None:
    at = ranked.layouts
    assert (at.world_size == 64).all()
    assert (at.tp <= 8).all()
    assert (at.device_batch_size * at.grad_accum_steps * at.dp == 512).all()
    assert ((at.pp == 1) | (at.num_microbatches >= 2 * at.pp)).all()
    assert (8192 % (2 * at.cp) == 0).all()


def test_a_flush_has_as_many_microbatches_as_the_file_allows() -> None:
    fixed = Limits(fixed=dict(cp=1, tp=8, pp=16))
    with pytest.raises(ConfigError, match=r"has the 2 \* pp micro-batches .* raise global_batch_size to 64, or"):
        search(workload(gpus=256, global_batch_size=32), fixed)
    with pytest.raises(ConfigError, match=r"has the 2 \* pp micro-batches .* raise global_batch_size to 32, or"):
        search(workload(gpus=256, global_batch_size=31), Limits(fixed=dict(tp=8, pp=16)))  # cp 2 leaves dp 1
    work = workload(gpus=256, global_batch_size=32, allow_underfilled_pipeline=True)
    found = search(work, fixed)
    assert set(found.layouts.num_microbatches) == {16}
    assert not {"dualpipev"} & {found.name_of(index)["schedule"] for index in range(len(found))}
    # ZB-V takes one micro-batch less than 2 * pp, but not two less.
    work = workload(gpus=2, hbm_gib=400, global_batch_size=6, allow_underfilled_pipeline=True)
    found = search(work, Limits(fixed=dict(pp=2, schedule="zbv")))
    assert set(found.layouts.num_microbatches) == {3, 6}


def test_muon_is_planned_without_the_tensor_parallelism_that_check_refuses() -> None:
    """Ranks that have parts of keys and values, of which Muon wants whole matrices."""
    found = search(workload(gpus=8, num_query_groups=2, optimizer="muon"), Limits(fixed=dict(pp=1, cp=1)))
    assert set(found.layouts.tp) == {1, 2}


def test_memory_gib_is_what_a_layout_has_to_fit_into(ranked: Ranked) -> None:
    small = search(workload(memory_gib=30.0))
    assert small.memory.total.max() <= 30 * 2**30 < ranked.memory.total.max()
    assert len(small) < len(ranked)


def test_limits_bound_the_space() -> None:
    found = search(workload(), Limits(most=dict(pp=2, tp=2), fixed=dict(cp=1, schedule="1f1b")))
    at = found.layouts
    assert (at.pp.max(), at.tp.max(), at.cp.max()) == (2, 2, 1)
    assert {found.name_of(i)["schedule"] for i in range(len(found))} == {"1f1b"}


@pytest.mark.parametrize(
    ("axis", "value"),
    [("vpp", 2), ("mbs", 2), ("dbs", 8), ("ga", 2), ("recompute", "full"), ("sync", "streaming"), ("zero", 2)],
)
def test_every_row_has_the_value_of_an_axis_that_is_held(axis: str, value: object) -> None:
    found = search(workload(gpus=32), Limits(fixed={axis: value}, most=dict(tp=2, pp=4)))
    assert {found.name_of(index)[axis] for index in range(len(found))} == {value}


def test_tensor_parallelism_stays_in_a_node() -> None:
    hardware = load_hardware("h100", gpus_per_node=2)
    found = search(replace(workload(), hardware=hardware))
    assert found.layouts.tp.max() == 2


def test_a_model_that_fits_nowhere_is_told_the_closest_miss() -> None:
    huge = dict(num_layers=128, hidden_size=16384, num_attention_heads=128, ffn_hidden_size=53248)
    with pytest.raises(ConfigError) as caught:
        search(workload(gpus=8, **huge))
    text = str(caught.value)
    assert re.search(r"the closest of [\d,]+, tp=.* lacks \d+\.\d GiB \((optimizer|gradients) ", text)
    assert "fits with probability 0%" in text
    enough = int(re.search(r"(\d+) of these GPUs fit it", text)[1])
    assert len(search(workload(gpus=enough, **huge))) > 0
    with pytest.raises(ConfigError, match=rf"{enough} of these GPUs fit it"):
        search(workload(gpus=enough // 2, **huge))


def test_a_key_that_makes_it_fit_is_named() -> None:
    """5e9 parameters with 12 bytes each of optimizer state, which the host can hold."""
    large = dict(num_layers=24, hidden_size=4096, num_attention_heads=32, ffn_hidden_size=16384)
    with pytest.raises(ConfigError, match=r"on 1, offload_optimizer cpu does"):
        search(workload(gpus=1, **large))
    assert len(search(workload(gpus=1, offload_optimizer="cpu", **large))) > 0


def test_the_probability_of_a_fit() -> None:
    """It is how often the runs' measured peaks were no more over their predictions."""
    sizes = np.array([0.5, 0.99, 1.0, 1.05, 1.5])
    odds = fit_probability(sizes, 1.0)
    assert (np.diff(odds) <= 0).all()
    assert (odds[0], odds[-1]) == (1.0, 0.0)
    assert 0.4 < odds[2] < 0.7
    assert fit_probability(1 / MEASURED[10], 1.0) == pytest.approx(0.5)


def test_a_batch_that_nothing_divides_is_told_the_nearest() -> None:
    with pytest.raises(ConfigError) as caught:
        search(workload(gpus=64, global_batch_size=509), Limits(most=dict(pp=1), fixed=dict(cp=1)))
    text = str(caught.value)
    assert "global_batch_size 509 divides over no data-parallel size that 64 GPUs allow (8, 16, 32, 64)" in text
    assert "set it to 504 or 512" in text


def test_a_batch_is_told_what_it_lacks_though_a_pipeline_that_cannot_be_cut_would_take_it() -> None:
    """24 layers have no split over 7 stages: the batch has to divide over 7 replicas."""
    with pytest.raises(ConfigError, match=r"data-parallel size that 7 GPUs allow \(7\): set it to 63 or 70"):
        search(workload(gpus=7, num_layers=24, global_batch_size=64))
    with pytest.raises(ConfigError, match=r"keeps pp=7 and cuts 24 layers into .*: legal are tp 1; cp 1; pp 1, 7\."):
        search(workload(gpus=7, num_layers=24, global_batch_size=64), Limits(fixed=dict(pp=7)))


@pytest.mark.parametrize(
    ("fixed", "legal"),
    [
        (dict(tp=3), "of tp take 1, 2, 4, 8"), (dict(cp=3), "of cp take 1, 2, 4, 8"), (dict(mbs=3), "of mbs take 1, 2"),
        (dict(pp=1, schedule="zbv"), "of pp take 2, 4, 8, 16"), (dict(dp=5, tp=2), "of dp take 1, 2, 4, 8, 16, 32"),
        (dict(ep=2), "of ep take 1."), (dict(vpp=5), "of vpp take 1, 2, 4, "),
    ],
)  # fmt: skip
def test_an_axis_that_leaves_nothing_is_told_its_legal_values(fixed: dict[str, Any], legal: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(legal)):
        search(workload(), Limits(fixed=fixed))
    with pytest.raises(ConfigError, match=r"keeps max_tp=0: legal are tp 1, 2, 4, 8; cp 1, 2, 4, 8; pp 1, 2, 4, 8, 16"):
        search(workload(), Limits(most=dict(tp=0)))


@pytest.mark.parametrize(
    ("wanted", "told"),
    [
        ("tp=3", "num_attention_heads 32 is not divisible by tensor_model_parallel_size 3"),
        ("tp=16", "more than the 8 GPUs of a node"),
        ("pp=5", "world size 64 is not divisible by"),
        ("pp=8,vpp=5", "num_layers 32 is not divisible by"),
        ("tp=8,pp=8,ga=3", "grad_accum_steps"),
        ("tp=1,pp=1,cp=1,mbs=8,recompute=none", "is legal: no layout fits"),
        ("tp=8,pp=8", "fits, and its fastest layout, tp8pp8"),
    ],
)
def test_why_not(ranked: Ranked, wanted: str, told: str) -> None:
    assert told in why_not(ranked.workload, parse_axes(wanted), Limits(), ranked, rank="default")


def test_the_first_is_told_to_be_the_first(ranked: Ranked) -> None:
    text = why_not(ranked.workload, ranked.name_of(0), Limits(), ranked, rank="default")
    assert f"is the first of {len(ranked)} layouts by default" in text


def test_why_not_quotes_the_fastest_and_names_the_terms_that_decide(ranked: Ranked) -> None:
    text = why_not(ranked.workload, dict(tp=4, recompute="full"), Limits(), ranked, rank="default")
    meant = ranked.find(dict(tp=4, recompute="full"))
    index = int(meant[np.argmin(ranked.time.total[meant])])
    more = {name: seconds[index] - seconds[0] for name, seconds in ranked.time.by_part.items()}
    less = {kind: (size[index] - size[0]) / 2**30 for kind, size in ranked.memory.by_kind.items()}
    assert f"is number {index + 1} of {len(ranked)}" in text
    assert f"{ranked.time.total[meant].min():.3g} s per step" in text
    assert max(more, key=lambda name: abs(more[name])) == "compute"
    assert f"Time: compute {more['compute']:+.3g} s; memory: activations {less['activations']:+.3g} GiB." in text


def test_why_not_of_a_file_with_recomputed_modules_names_the_axis_alone(ranked: Ranked) -> None:
    experts = dict(num_experts=256, moe_ffn_hidden_size=2048, moe_router_topk=8, num_query_groups=32)
    recompute = dict(recompute_granularity="selective", recompute_modules=["moe"])
    of_96 = workload(96, **experts, **recompute, global_batch_size=384)
    assert why_not(of_96, dict(ep=64), Limits(), ranked, rank="default") == (
        "ep=64 is out: world size 96 is not divisible by expert_tensor_parallel_size 1 * expert_model_parallel_size 64"
        " * pipeline_model_parallel_size 1 = 64: set the world size to 64 or 128, or expert_model_parallel_size to 32."
    )


def test_why_not_of_a_layout_that_counts_as_equal_names_what_is_less(ranked: Ranked) -> None:
    text = why_not(ranked.workload, dict(tp=2), Limits(), ranked, rank="default")
    assert "In time both count as equal, and less wins: tp 2, not 1" in text


def test_why_not_of_a_beaten_layout_names_the_one_that_beats_it(ranked: Ranked) -> None:
    """And not that it has less of something, though in time both count as equal."""
    near = ranked.time.total <= NEAR_FASTEST * ranked.time.total.min()
    index = next(i for i in range(ranked.num_unbeaten, len(ranked)) if near[i])
    text = why_not(ranked.workload, ranked.name_of(index), Limits(), ranked, rank="default")
    assert text.endswith(" beats it in both.") and "less wins" not in text


@pytest.mark.parametrize(
    ("name", "value"), [("hybrid_layer_pattern", "M*-"), ("attention_output_gate", True), ("moe_latent_size", 512)]
)
def test_layers_without_costs_are_not_planned(name: str, value: object) -> None:
    config = copy.deepcopy(workload().config)
    config.megatron[name] = value
    with pytest.raises(ConfigError, match=f"{name}: the planner knows no costs"):
        make_workload(config, world_size=64, hardware=load_hardware("h100"))


@pytest.mark.parametrize(
    "text", ["nope=1", "tp", "tp=", "tp=0", "tp=two", "schedule=pipedream", "recompute=some", "zero=7"]
)
def test_axes_that_cannot_be_read(text: str) -> None:
    with pytest.raises(ConfigError, match=rf"'{text}'"):
        parse_axes(text)
    with pytest.raises(ConfigError, match=r"'tp=4' must read axis=value, .*, each once"):
        parse_axes("tp=2,tp=4")
    assert parse_axes("tp=4, recompute=full") == {"tp": 4, "recompute": "full"}
    names = dict(recompute="full", schedule="1f1b", sync="streaming")
    assert set(parse_axes(",".join(f"{a}={names.get(a, 1)}" for a in AXES))) == set(AXES)


def test_unknown_hardware_is_told_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean h100 or h800 or h200"):
        load_hardware("h100x")
    file = tmp_path / "mine.yaml"
    entries = (
        "mine: {like: h100, hbm_gib: 40, source: here}",
        "odd: {like: h100, colour: red, ~: 1}",
        "lone: {hbm_gib: 1}",
        "H100: {like: h100, hbm_gib: 70, source: in place of the package's}",
        "my-box: {like: H100, source: of the file's}",
    )
    file.write_text("\n".join(entries))
    mine = load_hardware("mine", file=file)
    assert isinstance(mine, Hardware)
    assert mine.hbm_bytes == 40 * 2**30
    assert mine.device == load_hardware("h100").device
    assert load_hardware("h100", file=file).hbm_bytes == load_hardware("My-Box", file=file).hbm_bytes == 70 * 2**30
    for name, problem in (("odd", "unknown keys None, colour"), ("lone", "lacks")):
        with pytest.raises(ConfigError, match=problem):
            load_hardware(name, file=file)


@pytest.mark.parametrize(
    ("entry", "told"),
    [
        ("{like: h100, peak_tflops: fast}", "mine: peak_tflops is 'fast'"),
        ("{like: h100, efficiency: {gemm: 0}}", "mine: gemm is 0, and has to be above 0"),
        ("{like: h100, efficiency: {launch: -1}}", "mine: launch is -1, and has to be at least 0"),
        ("{like: h100, net_gb_per_s: .nan}", "mine: net_gb_per_s is nan"),
        ("{like: h100, efficiency: 3}", "mine: efficiency is 3"),
        ("{like: mine}", "is like 'mine', which is no other entry"),
        ("{efficiency: }", "mine: efficiency is None"),
        ("{like: other}\nother: {like: mine}", "is like 'mine', which is no other entry"),
    ],
)
def test_a_hardware_file_with_a_wrong_value_is_told_which(entry: str, told: str, tmp_path: Path) -> None:
    file = tmp_path / "hardware.yaml"
    file.write_text(f"mine: {entry}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=re.escape(told)):
        load_hardware("mine", file=file)


def test_a_plan_needs_no_learning_rate_but_a_run_does() -> None:
    found = search(workload(lr=None, train_iters=None), Limits(fixed=dict(tp=1, pp=1, cp=1)))
    with pytest.raises(ConfigError, match="lr is required"):
        layout_config.checked(found.workload, found.name_of(0))


def test_what_is_missing_to_plan_is_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        make_workload(Config(), world_size=0, hardware=load_hardware("h100"))
    assert len(caught.value.problems) == 6  # four sizes, the batch, the GPUs


@pytest.mark.parametrize(
    ("layers", "hidden", "heads", "gpus", "batch", "tp", "pp"),
    [
        (24, 2048, 16, 48, 192, 1, 1),
        (30, 4096, 32, 96, 192, 2, 1),
        (32, 6144, 48, 192, 192, 4, 1),
        (92, 10240, 80, 1536, 768, 8, 4),
        (96, 12288, 96, 2304, 1152, 8, 6),
        (96, 16384, 128, 3072, 1536, 8, 8),
        (112, 18432, 144, 6144, 3072, 8, 16),
    ],
)
def test_megatrons_published_layouts_are_among_the_best_tenth(
    layers: int, hidden: int, heads: int, gpus: int, batch: int, tp: int, pp: int
) -> None:
    """By time, without context parallelism: the weak-scaling table of Megatron-LM's README (H100, 4,096 tokens)."""
    shape = dict(num_layers=layers, hidden_size=hidden, num_attention_heads=heads, num_query_groups=None, swiglu=None)
    batch_and_words = dict(ffn_hidden_size=None, seq_length=4096, vocab_size=131072, global_batch_size=batch)
    work = workload(gpus=gpus, **shape, **batch_and_words, untie_embeddings_and_output_weights=True)
    found = search(work, Limits(fixed=dict(cp=1)), rank="time")
    assert found.find(dict(tp=tp, pp=pp))[0] < max(1, 0.1 * len(found))


def test_llama_405b_on_16384_gpus_is_ranked_whole() -> None:
    """The published layout's pipeline, 16 ranks of 8 chunks, is among the best by time for its constraints (no context
    parallelism): arXiv 2407.21783, table 4."""
    config = load(CONFIGS / "llama3_405b.yaml")
    config.batch.global_batch_size = 4096
    work = make_workload(config, world_size=16384, hardware=load_hardware("h100"))
    assert search(work, rank="time").num_legal > 1000
    found = search(work, Limits(fixed=dict(cp=1, schedule="interleaved", mode="resident")), rank="time")
    assert found.find(dict(tp=8, pp=16))[0] <= 2
