"""`sync: auto`, and the refusal of what does not fit: numbers from the plan alone."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from megaaccum.config import resolve
from megaaccum.errors import ConfigError
from megaaccum.lab.planner import sync_mode
from megaaccum.lab.planner.footprint import mode_name
from megaaccum.lab.planner.hardware import usual_usage
from megaaccum.pretrain.model import layers
from megaaccum.units import GIB
from tests.support.configs import make, plan

SMALL = dict(vocab_size=1000, reduce_bucket_size=1000, pipeline_model_parallel_size=2, num_layers=16, hidden_size=128)


def small(world_size: int = 8, **keys: object):
    buckets = {"reduce_bucket_size": None} if keys.get("backend", "deepspeed") != "deepspeed" else {}
    return plan(world_size, **(SMALL | buckets | keys))


def held(of, **keys: object) -> float:
    """GiB that `of` holds with these keys of its sharding instead."""
    mode = replace(of.config.sharding, **keys)
    return sync_mode.Forecast(of, 1000).predict(mode).held / GIB


def settled(memory_gib: float, **keys: object):
    return sync_mode.choose_sync_mode(small(memory_gib=memory_gib, **keys))


def test_without_a_limit_parameters_are_resident() -> None:
    settled = sync_mode.choose_sync_mode(small())
    assert settled.config.sharding.sync == "resident"
    assert "no limit of memory is known" in settled.notes[-1]


def test_what_fits_with_the_least_bytes_is_taken() -> None:
    resident, streaming = held(small()), held(small(), sync="streaming")
    assert streaming < resident
    roomy, tight = settled(1.01 * resident), settled(1.01 * streaming)
    assert roomy.config.sharding.sync == "resident"
    assert tight.config.sharding.sync == "streaming"
    assert "resident would hold" in tight.notes[-1]
    for each in (roomy, tight):
        assert held(each) <= each.config.sharding.memory_gib
        assert re.search(r"holds .* of .* \(memory_gib .*\) and moves", each.notes[-1])


def test_the_memory_that_is_left_keeps_parameters_gathered() -> None:
    resident, streaming = held(small()), held(small(), sync="streaming")
    between = settled((resident + streaming) / 2)
    assert between.config.sharding.sync == "streaming"
    assert between.config.sharding.max_live_parameters > 0
    forecast = sync_mode.Forecast(between, 1000)
    without = replace(between.config.sharding, max_live_parameters=0)
    assert forecast.predict(between.config.sharding).moved.total < forecast.predict(without).moved.total
    assert held(between) <= between.config.sharding.memory_gib


def test_every_rank_chooses_the_same() -> None:
    limit = 1.01 * held(small(), sync="streaming")
    assert len({settled(limit).digest() for _ in range(3)}) == 1


def test_the_device_is_the_limit_where_no_key_is() -> None:
    """The limit is the free memory less the libraries' buffers and the allocator's gaps."""
    usage = usual_usage()
    assert usage.runtime_bytes > GIB
    for sync, chosen in (("resident", "resident"), ("streaming", "streaming")):
        plan = small(sync=sync)
        needed = sync_mode.Forecast(plan, 1000, usage=usage).predict(plan.config.sharding).held
        assert needed >= held(plan) * GIB + usage.runtime_bytes
        assert sync_mode.choose_sync_mode(small(), needed + 1).config.sharding.sync == chosen
    with pytest.raises(ConfigError, match=f"runtime {usage.runtime_bytes / GIB:.4g} GiB"):
        sync_mode.choose_sync_mode(small(), 1.01 * held(plan) * GIB)
    assert sync_mode.choose_sync_mode(small(memory_gib=100.0), 1.0).config.sharding.sync == "resident"


def test_nothing_fits() -> None:
    with pytest.raises(ConfigError) as error:
        settled(1e-4)
    text = str(error.value)
    assert "deepspeed zero-3 resident needs" in text
    assert "deepspeed zero-3 streaming needs" in text
    for words in ("there are 104.86 KiB (memory_gib 0.0001)", "optimizer", "gradients", "micro_batch_size", "at least"):
        assert words in text


def test_a_named_policy_that_does_not_fit_names_one_that_does() -> None:
    limit = 1.01 * held(small(), sync="streaming")
    with pytest.raises(ConfigError, match=r"zero-3 resident needs .* would hold .*: set ") as error:
        settled(limit, sync="resident")
    asked = dict(re.findall(r"(\w+) to (\w+)", str(error.value).rpartition("set ")[2]))
    keys = {key: int(value) if value.isdecimal() else value for key, value in asked.items()}
    assert sync_mode.choose_sync_mode(small(memory_gib=limit, **keys)).config.sharding.sync == asked["sync"]


def test_a_schedule_that_no_streaming_follows_has_one_choice() -> None:
    keys = dict(schedule="zbv", num_layers=16)
    with pytest.raises(ConfigError) as error:
        settled(1e-3, **keys)
    assert "resident needs" in str(error.value)
    assert "set sync" not in str(error.value)


def test_fsdp2_streams_without_live_parameters() -> None:
    limit = 1.01 * held(small(backend="fsdp2"), sync="streaming")
    chosen = settled(limit, backend="fsdp2").config.sharding
    assert (chosen.sync, chosen.max_live_parameters) == ("streaming", 0)


def test_a_limit_below_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="memory_gib is 0"):
        resolve(make(memory_gib=0.0), world_size=1)


def test_experts_are_held_and_moved_by_their_own_ranks() -> None:
    """Spread over all ranks, an expert is on one rank and no bytes of it cross data-parallel ranks."""
    keys = dict(num_experts=4, add_bias_linear=False, pipeline_model_parallel_size=1, num_layers=4)
    spread, dense = small(4, expert_model_parallel_size=4, **keys), small(4, **keys)
    apart, together = (sync_mode.Forecast(each, 1000).predict(each.config.sharding) for each in (spread, dense))
    assert apart.moved.total < 0.5 * together.moved.total
    shared = sync_mode.Forecast(spread, 1000).elements(0)
    assert apart.memory["optimizer"] == pytest.approx(12 * (shared.plain / 4 + shared.expert))


def test_every_policy_has_a_row_and_the_chosen_one_is_among_them() -> None:
    for keys in ({}, {"backend": "fsdp2", "data_parallel_replicas": 2}, {"zero_stage": 1}, {"backend": "ddp"}):
        each = small(**keys)
        names = [mode_name(row.mode) for row in sync_mode.Forecast(each, 1000).every()]
        assert len(names) == len(set(names)) == 10
        assert mode_name(each.config.sharding) in names


def test_a_step_on_an_h200_took_what_is_predicted() -> None:
    """docs/benchmarks/gpu.jsonl, case `memory 1.2B resident`, in Megatron's local layers."""
    shape = dict(num_layers=24, hidden_size=2048, num_attention_heads=16, seq_length=4096, vocab_size=61, swiglu=True)
    shape |= dict(normalization="RMSNorm", position_embedding_type="rope", add_bias_linear=False)
    shape |= dict(hidden_dropout=0.0, attention_dropout=0.0)
    keys = shape | dict(untie_embeddings_and_output_weights=True, micro_batch_size=2, bf16=True)
    keys |= dict(pp_microbatches=8, reduce_bucket_size=50_000_000, sync="resident")
    on_gpu = layers.Layers(impl="local", fused_attention=True, on_gpu=True)
    found = plan(1, **keys)
    predicted = sync_mode.Forecast(found, 61, layers=on_gpu).predict(found.config.sharding)
    assert predicted.held == pytest.approx(41_606_505_472, rel=1e-3)
    on_cpu = sync_mode.Forecast(found, 61, layers=replace(on_gpu, on_gpu=False)).predict(found.config.sharding)
    assert on_cpu.held > 1.1 * predicted.held, "a CPU's kernels keep more"


def test_the_memory_that_a_refusal_asks_for_is_enough() -> None:
    for width in (128, 136, 152, 184):
        with pytest.raises(ConfigError) as error:
            settled(0.001, hidden_size=width)
        (least,) = re.findall(r"at least ([\d.]+):", str(error.value))
        (smallest,) = re.findall(r"The smallest sync mode, (\S+ \S+)", str(error.value))
        backend = smallest.split()[0]
        fits = settled(float(least), hidden_size=width, backend=backend)
        assert held(fits) <= float(least)
