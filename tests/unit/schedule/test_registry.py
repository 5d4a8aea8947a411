"""A schedule's name has one owner: what is registered is built, validated, simulated, drawn and planned."""

import ast
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

import megaaccum
from megaaccum.cli import main
from megaaccum.config.schema import ParallelConfig
from megaaccum.errors import ScheduleError
from megaaccum.lab.planner import candidates, layouts, pipeline
from megaaccum.schedule import Action, Costs, build, names, register, simulate, validate
from megaaccum.schedule.registry import BUILT_IN, by_executor, entry
from tests.support.configs import plan


def two_then_two(pp, num_microbatches):
    """Micro-batches in pairs: two forwards, then their two backwards, on every rank."""
    pairs = [range(at, min(at + 2, num_microbatches)) for at in range(0, num_microbatches, 2)]
    return [[Action(kind, 0, m) for pair in pairs for kind in "FB" for m in pair]] * pp


@pytest.fixture(scope="module", autouse=True)
def _toy():
    register("toy", two_then_two)


def test_a_registered_schedule_is_built_validated_and_simulated():
    schedule = build("toy", pp=2, num_microbatches=4)
    assert max(validate(schedule).in_flight) == 2
    # Rank 0 waits from 2 to 4 for the first gradient of a pair, and has done its backwards at 8.
    assert simulate(schedule, Costs(forward=1, input_grad=1, weight_grad=1)).makespan == 16
    assert "toy" in names() and by_executor("toy") and "toy" not in BUILT_IN


def test_it_is_a_legal_key_and_its_name_is_taken():
    assert plan(2, schedule="toy", pipeline_model_parallel_size=2, pp_microbatches=4).layout.schedule == "toy"
    with pytest.raises(ScheduleError, match="there is a schedule 'toy' already"):
        register("toy", two_then_two)


@pytest.mark.parametrize("name", ["none", "auto"])
def test_what_the_key_means_otherwise_is_taken(name):
    """A schedule of that name was never run: `auto` took 1F1B."""
    with pytest.raises(ScheduleError, match=f"there is a schedule '{name}' already"):
        register(name, two_then_two)


def test_the_command_line_compares_and_draws_it(tmp_path, capsys):
    picture = tmp_path / "toy.png"
    assert main(f"schedule --pp 2 -m 4 --schedule toy --compare 1f1b --png {picture}".split()) == 0
    assert "toy" in capsys.readouterr().out and picture.read_bytes().startswith(b"\x89PNG")


def test_the_planner_prices_it_by_its_table():
    assert pipeline.is_simulated("toy")
    assert pipeline.in_flight("toy", pp=2, vpp=1, rank=0, microbatches=8) == [2]
    makespan = simulate(build("toy", pp=2, num_microbatches=8), Costs(forward=1, input_grad=1, weight_grad=1)).makespan
    assert pipeline.fill_seconds("toy", pipeline.Pass(1, 1, 1), pp=2, vpp=1, m=8) == [makespan - 8 * 3]


def test_keys_and_planner_have_the_registrys_names():
    hint = get_type_hints(ParallelConfig)["schedule"]
    (written,) = [get_args(each) for each in get_args(hint) if get_args(each)]
    assert written == ("auto", "none", *BUILT_IN)
    assert {"none", *BUILT_IN} <= set(layouts.SCHEDULES)
    assert set(candidates.schedules()) <= {"none", *BUILT_IN}
    assert all(entry(name).title for name in BUILT_IN)


def test_no_other_module_lists_names():
    """A list, set or mapping with three built-in names, outside of the registry's module."""
    root = Path(megaaccum.__file__).parent
    found = []
    for path in root.rglob("*.py"):
        if "bank" in path.parts:  # cases of its own that are called like the schedule they run
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            parts = {ast.Dict: "keys", ast.List: "elts", ast.Set: "elts", ast.Tuple: "elts"}.get(type(node))
            values = [each.value for each in getattr(node, parts) if isinstance(each, ast.Constant)] if parts else []
            if len(set(BUILT_IN) & {value for value in values if isinstance(value, str)}) > 2:
                found.append(f"{path.relative_to(root)}:{node.lineno}")
    assert found == []
