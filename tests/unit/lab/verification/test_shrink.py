"""Every shipped configuration becomes a case of at most 8 ranks with the axes of the real one."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megaaccum.cli import verify as cli_verify
from megaaccum.config import Plan, precision, resolve
from megaaccum.lab.planner import sync_mode
from megaaccum.lab.planner.stages import layers_of_stages
from megaaccum.lab.verification.case import Case
from megaaccum.lab.verification.reference import lr_schedule
from megaaccum.lab.verification.shrink import MOST_RANKS, as_case
from megaaccum.lab.verification.verdict import lanes_of
from megaaccum.optim.lr_schedule import build
from megaaccum.pretrain.interop.load import load
from megaaccum.schedule import build as build_schedule
from megaaccum.schedule.table import write_csv
from megaaccum.units import GIB
from tests.support.configs import make, plan

FILES = sorted((Path(__file__).parents[4] / "configs").glob("*.yaml"))


def axes(of: Plan) -> dict[str, bool]:
    at = of.layout
    return {name: getattr(at, name) > 1 for name in ("tp", "pp", "vpp", "ep", "dp")} | {"v": at.placement == "v"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_shipped_configuration_keeps_its_axes(path):
    match = re.match(r"# world_size: (\d+)", path.read_text())
    assert match is not None
    config = load(path)
    real = resolve(config, world_size=int(match[1]))
    shrunk = as_case(config, real, shrink=True)
    small = shrunk.case.plan()
    assert small.layout.world_size <= MOST_RANKS
    assert axes(small) == axes(real)
    assert small.layout.schedule == real.layout.schedule
    assert shrunk.case.lane == (real.config.sharding.params_dtype or "fp32")
    assert shrunk.notes[0].startswith("shrunk: ")


def test_an_axis_without_room_is_named():
    keys = dict(tensor_model_parallel_size=2, pipeline_model_parallel_size=2, context_parallel_size=2, zero_stage=1)
    config = make(**keys)
    shrunk = as_case(config, resolve(config, world_size=16), shrink=True)
    assert shrunk.case.plan().layout.dp == 1
    assert any("data parallelism is left out" in note for note in shrunk.notes)


def test_patterns_name_layers_that_there_are():
    """A pattern of a layer that was left out would fit no parameter."""
    patterns = ["decoder.layers.0.*", "decoder.layers.7.*", "embedding.*"]
    config = make(num_layers=8, freeze=patterns, lr_mult=["*.layers.5.*=0.5"])
    shrunk = as_case(config, resolve(config, world_size=2), shrink=True)
    keys = shrunk.case.plan().config
    assert keys.model.num_layers == 2
    assert keys.optimizer.freeze == ["decoder.layers.0.*", "decoder.layers.1.*", "embedding.*"]
    assert keys.optimizer.lr_mult == ["*.layers.1.*=0.5"]
    named = [note for note in shrunk.notes if "in the layers and experts that there are" in note]
    assert [note.partition(",")[0] for note in named] == ["freeze", "lr_mult"]


def test_patterns_of_experts_and_ranges_name_what_there_is():
    patterns = ["decoder.layers.[4-7].*", "*.layers.[06].*", "*.experts.local_experts.7.*", "*fc[12]*", "*layers.5*"]
    lost = ["*experts.*7*", "*.layers.1?.*", "*.[2-3].mlp.*"]
    config = make(num_layers=8, num_experts=16, wd_mult=[f"{each}=0.5" for each in patterns + lost], freeze=lost)
    shrunk = as_case(config, resolve(config, world_size=2), shrink=True)
    keys = shrunk.case.plan().config
    assert (keys.model.num_layers, keys.model.num_experts) == (2, 4)
    there = ["decoder.layers.1.*", "*.layers.[01].*", "*.experts.local_experts.1.*", "*fc[12]*", "*layers.1*"]
    assert keys.optimizer.wd_mult == [f"{each}=0.5" for each in there]
    assert keys.optimizer.freeze == []
    assert f"freeze {', '.join(lost)} is left out: it may fit no parameter of the smaller model" in shrunk.notes


@pytest.mark.parametrize(("name", "chunks", "m"), [("zbv", 2, 7), ("interleaved", 3, 6), ("zb-h1", 1, 9)])
def test_a_table_keeps_its_pipeline_and_micro_batches(tmp_path, name, chunks, m):
    """A table, which `schedule --write` leaves, is of one number of stages and one number of micro-batches."""
    table = build_schedule(name, pp=3, num_microbatches=m, chunks=chunks)
    write_csv(table, tmp_path / "run.csv")
    config = make(
        num_layers=18, pipeline_model_parallel_size=3, tensor_model_parallel_size=4, schedule=f"{tmp_path}/run.csv",
        micro_batch_size=2, pp_microbatches=m, grad_accum_steps=1, zero_stage=3,
    )  # fmt: skip
    small = as_case(config, resolve(config, world_size=24), shrink=True).case.plan()
    assert (small.layout.pp, small.layout.vpp, small.batch.num_microbatches) == (3, chunks, m)
    assert small.layout.world_size <= MOST_RANKS


@pytest.mark.parametrize(
    ("keys", "layers"),
    [
        (dict(schedule="interleaved", pipeline_model_parallel_layout="E|(t|)*4L"), [0, 1, 1, 1, 1, 0]),
        (dict(schedule="1f1b", decoder_first_pipeline_num_layers=3), [3, 1]),
        (dict(schedule="interleaved", virtual_pipeline_model_parallel_size=2, microbatch_group_size_per_vp_stage=4),
         [1, 1, 1, 1]),
    ],
)  # fmt: skip
def test_a_whole_case_keeps_the_cut_of_the_layers(keys, layers):
    """Without it another layout was verified, or none: an interleaved schedule has its chunks from the cut."""
    config = make(
        num_layers=4, pipeline_model_parallel_size=2, micro_batch_size=1, pp_microbatches=8, grad_accum_steps=1, **keys
    )
    real = resolve(config, world_size=2)
    whole = as_case(config, real, shrink=False).case.plan()
    assert layers_of_stages(whole.config.model, whole.config.parallel) == layers
    assert (whole.layout, whole.batch) == (real.layout, real.batch)
    group = whole.config.parallel.microbatch_group_size_per_vp_stage
    assert group == real.config.parallel.microbatch_group_size_per_vp_stage


@pytest.mark.parametrize(("tp", "groups", "small"), [(8, 2, 4), (4, 2, 2), (2, 2, 2), (2, 8, 2)])
def test_fewer_query_groups_than_tp_ranks_stay_fewer(tp, groups, small):
    """Megatron gathers queries, keys and values over tp there: another path."""
    config = make(num_attention_heads=16, hidden_size=256, num_query_groups=groups, tensor_model_parallel_size=tp)
    case = as_case(config, resolve(config, world_size=8), shrink=True).case.plan()
    assert (case.config.model.num_query_groups or 0) == small
    assert (small < case.layout.tp) == (groups < tp)


def test_heads_keep_a_width_of_their_own():
    config = make(num_attention_heads=4, hidden_size=64, kv_channels=32)
    for shrink, channels in ((False, 32), (True, 16)):
        model = as_case(config, resolve(config, world_size=1), shrink=shrink).case.plan().config.model
        assert model.kv_channels == channels
        assert model.kv_channels * model.num_attention_heads != model.hidden_size


def test_groups_of_micro_batches_larger_than_the_pipeline_stay_larger():
    keys = dict(schedule="interleaved", virtual_pipeline_model_parallel_size=2, microbatch_group_size_per_vp_stage=8)
    config = make(num_layers=16, pipeline_model_parallel_size=4, pp_microbatches=16, grad_accum_steps=1, **keys)
    small = as_case(config, resolve(config, world_size=4), shrink=True).case.plan()
    assert small.config.parallel.microbatch_group_size_per_vp_stage > small.layout.pp


def test_cold_experts_are_cold_within_the_steps_that_are_verified():
    config = make(num_experts=4, add_bias_linear=False, cold_expert_offload=True)
    sharding = as_case(config, resolve(config, world_size=2), shrink=True).case.plan().config.sharding
    assert sharding.cold_expert_offload
    assert sharding.cold_expert_steps == 1
    assert sharding.cold_expert_tokens > 1_000_000


def test_the_sync_mode_that_fits_is_the_one_that_is_verified():
    config = make(num_layers=16, hidden_size=128, vocab_size=1000, reduce_bucket_size=1000)
    resident = sync_mode.Forecast(resolve(config, world_size=8), 1000)
    config.sharding.memory_gib = 0.9 * resident.predict(resident.plan.config.sharding).held / GIB
    args = cli_verify._parser().parse_args(["--world-size", "8"])
    keys = cli_verify._case(config, None, args).case.keys
    assert keys["sync"] == "streaming"


def test_what_a_smaller_model_leaves_out_is_said():
    keys = dict(pipeline_model_parallel_size=2, decoder_first_pipeline_num_layers=6, grad_norm_guard=4.0)
    config = make(num_layers=8, pp_microbatches=4, **keys)
    notes = as_case(config, resolve(config, world_size=2), shrink=True).notes
    assert "decoder_first_pipeline_num_layers, grad_norm_guard: left out, and not verified" in notes
    notes = as_case(config, resolve(config, world_size=2), shrink=False).notes
    assert "grad_norm_guard: left out, and not verified" in notes


def test_dropout_is_left_out_and_said():
    config = make(hidden_dropout=0.1)
    shrunk = as_case(config, resolve(config, world_size=1), shrink=False)
    assert shrunk.case.plan().config.model.hidden_dropout == 0
    assert any("dropout is 0" in note for note in shrunk.notes)


def test_a_schedule_in_samples_gives_way_to_the_case_s_own():
    config = make(lr_decay_samples=900, lr_warmup_samples=9, lr_decay_style="WSD", lr_wsd_decay_samples=5)
    case = as_case(config, resolve(config, world_size=1), shrink=True).case
    assert not [name for name in case.keys if name.endswith("_samples") and name.startswith("lr_")]
    assert case.plan().config.optimizer.lr_decay_iters == 10


def test_the_reference_has_the_engine_s_spans_in_samples():
    settled = plan(lr_decay_samples=901, lr_warmup_samples=9, lr_decay_style="WSD", lr_wsd_decay_samples=5)
    adam = torch.optim.SGD([{"params": [torch.nn.Parameter(torch.zeros(1))], "wd_mult": 1.0}], lr=1.0)
    theirs, ours = lr_schedule(adam, settled), build(SimpleNamespace(param_groups=[{}]), settled.config, settled.ramp)
    for _ in range(60):
        assert theirs.get_lr({}) == ours.lr
        theirs.step(increment=settled.batch.global_batch_size)
        ours.step(settled.batch.global_batch_size)


def test_the_configured_batch_is_kept_where_nothing_is_shrunk():
    config = make()
    case = as_case(config, resolve(config, world_size=1), shrink=False).case
    assert case.plan().batch.num_microbatches == plan().batch.num_microbatches


@pytest.mark.parametrize(
    ("keys", "lanes"),
    [
        (dict(), ["fp64", "fp32"]),
        (dict(bf16=True), ["fp64", "fp32", "bf16"]),
        (dict(backend="ddp"), ["fp64", "fp32"]),
        (dict(backend="fsdp2", params_dtype="fp64"), ["fp64", "fp32"]),
        (dict(bf16=True, num_experts=4, add_bias_linear=False), ["fp64", "fp32"]),
    ],
)
def test_precisions_that_are_compared(keys, lanes):
    """Experts in 16 bits are left out: rounding changes which expert a token goes to."""
    config = make(**keys)
    assert lanes_of(as_case(config, resolve(config, world_size=1), shrink=True).case) == lanes


def test_each_lane_has_its_precision_where_a_gpu_makes_bf16_the_default(monkeypatch):
    monkeypatch.setattr(precision, "compute_capability", lambda: (9, 0))
    keys = {
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 2,
        "seq_length": 16,
        "train_iters": 2,
        "lr": 1e-3,
    }
    keys |= {"vocab_size": 61, "data_path": ["none"], "micro_batch_size": 1, "pp_microbatches": 2}
    case = Case(keys=keys, world_size=1, device="gpu")
    assert (case.lane, lanes_of(case)) == ("bf16", ["fp64", "fp32", "bf16"])
    for lane in lanes_of(case):
        assert case.in_lane(lane).plan().config.sharding.params_dtype == lane
        assert case.one_process(lane).config.sharding.params_dtype == lane
