"""`schedule: auto`: the fastest predicted of the schedules that the rules allow and that fit."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megaaccum.config.plan import Plan
from megaaccum.errors import ConfigError
from megaaccum.lab.planner import auto_schedule, sync_mode
from megaaccum.schedule.registry import entry
from megaaccum.step import chunk_config
from megaaccum.units import GIB
from tests.support.check import run
from tests.support.configs import plan

AUTO = dict(
    vocab_size=1000, num_layers=8, hidden_size=512, seq_length=512, bf16=True, sync="resident",
    reduce_bucket_size=1000, schedule="auto", pipeline_model_parallel_size=4,
)  # fmt: skip
PLANNED = ("1f1b", "interleaved", "gpipe", "zb-h1", "zbv", "dualpipev", "v-half", "v-min")


def of(**keys: object) -> Plan:
    return plan(8, **(AUTO | keys))


def named(name: str, **keys: object) -> Plan:
    vpp = dict(virtual_pipeline_model_parallel_size=2) if name == "interleaved" else {}
    return of(schedule=name, **vpp, **keys)


def gib(each: Plan) -> float:
    return float(sync_mode.peak(each).total[0]) / GIB


def test_left_out_it_is_megatrons_and_nobody_is_told_of_a_choice() -> None:
    for keys, name in (({}, "1f1b"), (dict(virtual_pipeline_model_parallel_size=2), "interleaved")):
        settled = auto_schedule.choose_schedule(of(schedule=None, **keys))
        assert settled.layout.schedule == name
        assert not any("schedule auto" in note for note in settled.notes)


@pytest.mark.parametrize("keys", [{}, dict(speculative_step=True)], ids=["barrier", "no barrier"])
def test_it_is_the_fastest_of_those_that_fit_at_any_limit(keys) -> None:
    """Megatron's own are refused with speculative_step, and the others are chosen from all the same."""
    names = [name for name in PLANNED if not keys or name not in ("1f1b", "interleaved")]
    every = {name: named(name, **keys) for name in names}
    seconds = {name: round(auto_schedule.seconds(each, None), 9) for name, each in every.items()}
    chosen = []
    limits = sorted({gib(each) * 1.001 for each in every.values()})
    for limit in limits if not keys else (limits[0], limits[-1]):
        settled = auto_schedule.choose_schedule(of(memory_gib=limit, **keys))
        fitting = [name for name in names if gib(every[name]) <= limit]
        assert settled.layout.schedule == min(fitting, key=seconds.__getitem__)
        assert settled.layout.vpp == (entry(settled.layout.schedule).chunks or 2)
        assert gib(settled) <= limit
        note = settled.notes[-1]
        assert note.startswith(f"schedule auto: {settled.layout.schedule}")
        assert set(re.findall(r"([\w-]+) needs", note)) <= set(names) - set(fitting)
        chosen.append(settled.layout.schedule)
    assert chosen[0] == "v-min"
    assert chosen[-1] == "zbv"
    assert len(set(chosen)) >= 2 + (not keys)


def test_the_memory_of_the_device_is_a_limit_too() -> None:
    plain, tight = (auto_schedule.choose_schedule(of(), size) for size in (80 * GIB, None))
    assert plain.layout == tight.layout
    with pytest.raises(ConfigError, match="no schedule fits"):
        auto_schedule.choose_schedule(of(), 0.1 * GIB)


def test_nothing_fits() -> None:
    with pytest.raises(ConfigError) as error:
        auto_schedule.choose_schedule(of(memory_gib=0.1))
    text = str(error.value)
    for name in PLANNED:
        assert re.search(rf"\b{name} needs \d+\.\d+ MiB on pipeline rank \d, of 102\.40 MiB", text)
    assert "zb-h1 needs 170" not in text or "on pipeline rank 3" in text  # the head is there
    assert "at least" in text


def test_what_is_given_bounds_the_choice() -> None:
    chunks = {2: {"interleaved", "zbv", "dualpipev"}, 1: {"1f1b", "gpipe", "zb-h1"}}
    for vpp, names in chunks.items():
        settled = auto_schedule.choose_schedule(of(virtual_pipeline_model_parallel_size=vpp))
        shown = settled.notes[-1]
        assert settled.layout.vpp == vpp
        assert {name for name in PLANNED if re.search(rf"[\s(]{name}\b", shown)} - {"1f1b"} == names - {"1f1b"}
    fused = dict(backend="megatron", reduce_bucket_size=None, gradient_accumulation_fusion=True)
    settled = auto_schedule.choose_schedule(of(**fused, virtual_pipeline_model_parallel_size=1))
    assert settled.layout.schedule == "1f1b"
    assert settled.notes[-1] == "schedule auto: 1f1b, the fastest predicted, and what Megatron takes without the key."


def test_without_a_pipeline_there_is_none() -> None:
    settled = auto_schedule.choose_schedule(of(pipeline_model_parallel_size=1))
    assert settled.layout.schedule == "none"
    assert not auto_schedule.is_open(settled)


def test_the_micro_batch_is_chosen_with_it() -> None:
    opened = dict(micro_batch_size=None, pp_microbatches=None, global_batch_size=64)
    plans = [of(**opened, virtual_pipeline_model_parallel_size=1, memory_gib=0.3) for _ in range(2)]
    first, second = map(auto_schedule.choose_schedule, plans)
    assert first.batch.micro_batch_size > 1
    assert gib(first) <= 0.3
    assert first.digest() == second.digest()  # of two ranks


def test_stages_of_unequal_length_are_priced_as_they_are() -> None:
    """A last stage three times as long: what fills and drains the pipeline is its rank, not a mean one."""
    even, uneven = of(schedule="1f1b"), of(schedule="1f1b", pipeline_model_parallel_layout="Et|t|t|tttttL")
    wait = 12 * sum(_layer(even))  # of 16 micro-batches, by the 3 layers that the longest rank has more
    assert auto_schedule.seconds(uneven, None) - auto_schedule.seconds(even, None) > wait


def _layer(each: Plan) -> list[float]:
    from megaaccum.lab.planner import expected
    from megaaccum.lab.planner.hardware import names

    model, at = expected.time_model(each, 1000, None, names()[0])
    layer = model.passes(at)["dense"]
    return [float(seconds[0]) for seconds in (layer.forward, layer.input_grad, layer.weight_grad)]


def test_chunks_of_ones_own_need_a_name() -> None:
    with pytest.raises(ConfigError, match="name a schedule"):
        chunk_config.prepare(of(), None, [])  # type: ignore[arg-type]


def test_check_prints_it(tmp_path: Path) -> None:
    words = [word for key, value in (AUTO | dict(micro_batch_size=1, pp_microbatches=16, num_attention_heads=8, lr=1e-3,
             train_iters=10)).items() for word in (f"--{key}", str(value))]  # fmt: skip
    text = run(None, words)
    assert "ZB-V: pp 4" in text
    assert "schedule auto: zbv with 2 model chunks per rank, the fastest predicted (then" in text
    at = words.index("--vocab_size")
    words[at : at + 2] = ["--data_path", str(tmp_path / "absent")]
    without = run(None, words)
    assert "schedule auto: 1f1b is shown, as the vocabulary is not known yet." in without
