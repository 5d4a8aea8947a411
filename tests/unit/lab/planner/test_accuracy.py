"""benchmarks/planner_accuracy.py on small tables of its own: what it counts, leaves out and promises."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import planner_accuracy
from benchmarks.frameworks import layout_of, measured_bytes, memory_model, states_of
from benchmarks.published import LeftOut, Row, model_of
from benchmarks.timing import cases_of, in_fit_half
from megaaccum.lab.planner.memory import Usage
from megaaccum.units import GIB

RUN: dict[str, Any] = dict(
    row_id="mine-001", source_set="mine", model="Llama3-8B", layers=32, hidden=4096, ffn=14336, heads=32, kv_heads=8,
    vocab=128256, seq_len=8192, gpu="H100-80GB", num_gpus=8, precision="bf16", tp=1, cp=1, pp=1, dp=8, gbs=128, mbs=1,
    num_microbatches=16, schedule="none", framework="Megatron-Bridge", iter_time_s=14.0, status="ok", task="pretrain",
    recompute="full", mem_value=40, mem_kind="peak",
)  # fmt: skip


def row(**values: Any) -> Row:
    return Row({name: str(value) for name, value in (RUN | values).items()})


def write(folder: Path, name: str, rows: list[dict[str, Any]]) -> None:
    with (folder / name).open("w", newline="") as file:
        out = csv.DictWriter(file, fieldnames=list(RUN))
        out.writeheader()
        out.writerows([RUN | values for values in rows])


def test_a_report_counts_every_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, "measured_training.csv", [{}, dict(row_id="mine-002", iter_time_s=""), dict(row_id="mine-003")])
    write(tmp_path, "measured_memory.csv", [{}, dict(row_id="mine-002", mem_value=1000)])
    out = tmp_path / "out.json", tmp_path / "out.csv"
    code = planner_accuracy.main(["--tables", str(tmp_path), "--json", str(out[0]), "--csv", str(out[1])])
    text = capsys.readouterr().out
    assert code == 0
    assert "left out: 1 of mine: no step time published" in text
    assert "mine-002 is predicted -" in text and "NO REASON KNOWN" in text
    told = json.loads(out[0].read_text())
    assert told["tables"]["training"]["groups"]["(all)"]["rows"] == 2
    assert {line["name"] for line in told["summary"]} >= {"memory, median, all rows"}
    rows = [r for r in csv.DictReader(out[1].open()) if r["source"] == "mine"]
    assert len(rows) == 5
    assert [r["reason"] for r in rows if r["row_id"] == "mine-002" and r["table"] == "training"] == [
        "left out: no step time published"
    ]


def test_a_v_has_two_chunks_where_a_table_names_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    v = dict(schedule="ZB-V", pp=4, dp=2, num_microbatches=64)
    assert int(layout_of(row(**v)).vpp[0]) == 2
    for table in ("measured_training.csv", "measured_memory.csv"):
        write(tmp_path, table, [{}, dict(row_id="mine-002") | v])
    assert planner_accuracy.main(["--tables", str(tmp_path)]) == 0
    assert capsys.readouterr().out.count("(all)") == 3  # and the rows of this package


def test_rows_of_one_run_that_cannot_both_be_right_are_named(tmp_path: Path) -> None:
    rows = [
        dict(row_id="mine-001", mbs=1, mem_value=40), dict(row_id="mine-002", mbs=2, mem_value=50),
        dict(row_id="mine-003", mbs=2, mem_value=46), dict(row_id="mine-004", mbs=2, mem_value=40),
        dict(row_id="mine-005", mbs=4, mem_value=49), dict(row_id="mine-006", mbs=4, mem_value=30, tp=2),
    ]  # fmt: skip
    write(tmp_path, "measured_memory.csv", rows)
    told = {
        one.row.name: one.contradicts
        for one in planner_accuracy.compare_memory(planner_accuracy.rows_of(tmp_path)["memory"]).compared
    }
    assert told == {
        "mine-001": "", "mine-002": "mine-004", "mine-003": "mine-004", "mine-004": "mine-002",
        "mine-005": "mine-002", "mine-006": "",
    }  # fmt: skip


def test_the_page_has_every_source_in_both_halves(tmp_path: Path) -> None:
    names = [f"mine-{number:03d}" for number in range(1, 9)]
    fitted = [name for name in names if in_fit_half(row(row_id=name))]
    slow = [dict(row_id=name, iter_time_s=17.0 * (8 if name == names[-1] else 1)) for name in names]
    write(tmp_path, "measured_training.csv", slow)
    page = tmp_path / "page.md"
    assert planner_accuracy.main(["--tables", str(tmp_path), "--page", str(page)]) == 0
    (line,) = [line for line in page.read_text().splitlines() if line.startswith("| mine |")]
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert (cells[1], cells[4]) == (str(len(fitted)), str(8 - len(fitted)))
    assert cells[7].startswith(names[-1])
    assert "the same run took 0.12 of it" in cells[8]
    assert "Calculon: 3.65 %" in page.read_text()


@pytest.mark.parametrize(
    ("values", "unit", "share"),
    [
        (dict(mem_unit="GB"), 1e9, 0.0),  # Megatron-Bridge prints what tensors hold, over 10^9
        (dict(mem_unit="GB", framework="Megatron-LM fork"), 1e9, 0.0),
        (dict(mem_unit="GB", framework="Megatron-DeepSpeed", mem_kind="nvidia-smi"), GIB, 0.06),
        (dict(mem_unit="GiB", framework="torchtitan FSDP"), GIB, 0.06),
    ],
)
def test_a_peak_is_read_in_the_unit_and_kind_that_its_program_prints(
    values: dict[str, Any], unit: float, share: float
) -> None:
    one = row(**values)
    assert measured_bytes(one) == 40 * unit
    assert memory_model(one, Usage(fragmentation=0.06))[0].usage.fragmentation == share


def test_zero_bubble_ran_in_fp16_whose_gradients_stay_so() -> None:
    assert states_of(row(source_set="zero_bubble_table4", framework="Megatron-LM fork")).grad == 2
    assert states_of(row(framework="Megatron-LM")).grad == 4


def test_an_empty_folder_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert planner_accuracy.main(["--tables", str(tmp_path)]) == 2
    assert "give --tables DIR" in capsys.readouterr().err


def test_statistics_are_signed_where_they_should_be() -> None:
    import numpy as np

    told = planner_accuracy.statistics(np.array([-0.3, 0.1, 0.2]))
    assert told["median"] == pytest.approx(0.2)
    assert told["mape"] == pytest.approx(0.2)
    assert told["worst"] == pytest.approx(-0.3)
    assert told["bias"] == pytest.approx(0.0)


def test_a_prediction_moves_with_its_row() -> None:
    """Nothing of a row's own measurement enters its prediction."""
    cases, _ = cases_of([row(), row(iter_time_s=28.0), row(gbs=256, num_microbatches=32)])
    one, same, twice = planner_accuracy.Predictor(cases).seconds(planner_accuracy.load_hardware)
    assert one == same
    assert twice == pytest.approx(2 * one, rel=0.1)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (dict(task="LoRA"), "LoRA"),
        (dict(gpu="TPU v5p"), "no hardware entry for TPU v5p"),
        (dict(status="OOM"), "status OOM"),
        (dict(schedule="PipeDream", pp=2), "schedule PipeDream unknown"),
        (dict(tp=""), "tp not published"),
        (dict(model="Secret", hidden=""), "shape not published"),
        (dict(notes="sec/it and TFLOPs look swapped"), "swapped"),
    ],
)
def test_rows_that_cannot_be_predicted_say_why(values: dict[str, Any], reason: str) -> None:
    assert reason in cases_of([row(**values)])[1][0][1]


def test_published_layouts_are_read() -> None:
    at = layout_of(row(tp=4, pp=8, vpp=5, dp=2, num_microbatches=64, schedule="interleaved-1F1B")).row(0)
    assert (at["tp"], at["pp"], at["vpp"], at["pp_microbatches"], at["sequence_parallel"]) == (4, 8, 5, 64, 1)
    with pytest.raises(LeftOut):
        layout_of(row(dp=""))


def test_layers_that_are_not_told_follow_from_the_parameters() -> None:
    model, vocab = model_of(
        row(
            source_set="bigscience_x",
            model="BLOOM",
            layers="",
            hidden=14400,
            heads="",
            kv_heads="",
            vocab=250000,
            params_b=200,
        )
    )
    assert (model.num_layers, vocab) == (79, 250000)


def test_the_fitted_half_is_about_a_half_and_always_the_same() -> None:
    halves = [in_fit_half(row(row_id=f"x-{i}")) for i in range(1000)]
    assert 400 < sum(halves) < 600
    assert halves[:5] == [in_fit_half(row(row_id=f"x-{i}")) for i in range(5)]
