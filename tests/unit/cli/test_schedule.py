"""`megaaccum schedule` and its pictures."""

import json
from pathlib import Path

import pytest

from megaaccum.cli import main
from megaaccum.config import resolve
from megaaccum.errors import ScheduleError
from megaaccum.executor.timeline import write_trace
from megaaccum.lab.planner.stages import layers_of_stages
from megaaccum.pretrain.interop.load import load
from megaaccum.pretrain.metrics.schedule_plots import figure, save, text
from megaaccum.schedule import Costs, build, read_csv, simulate


def run(capsys, command: str) -> str:
    assert main(command.split()) == 0
    return capsys.readouterr().out


def test_the_comparison(capsys):
    out = run(capsys, "schedule --pp 4 -m 8 --schedule dualpipev --compare 1f1b,zbv,zb-h1 --no-timeline")
    rows = [line.split() for line in out.splitlines()]
    head = "schedule chunks makespan bubble idle activations deferred W peak gap"
    assert rows[0] == head.split()
    assert rows[1] == ["dualpipev", "2", "25.5", "1.5", "5.88%", "4.5", "2", "4.5", "0.00%"]
    assert rows[2] == ["1f1b", "1", "33", "9", "27.27%", "4", "0", "4", "22.22%"]
    assert rows[3] == ["zbv", "2", "25.5", "1.5", "5.88%", "4", "3.5", "4", "0.00%"]
    assert rows[4] == ["zb-h1", "1", "27", "3", "11.11%", "4", "4", "4", "0.00%"]


@pytest.mark.parametrize("option", ["--vpp", "--group-size", "--iterations", "--width"])
def test_a_number_below_1_is_refused(option, capsys):
    """`--vpp 0` meant 2."""
    with pytest.raises(SystemExit, match="2"):
        main(["schedule", "--pp", "2", "-m", "4", "--schedule", "interleaved", option, "0"])
    assert f"argument {option}: 0: give a whole number of at least 1" in capsys.readouterr().err


def test_costs_beside_a_profile_are_refused(capsys):
    """They had no effect."""
    with pytest.raises(SystemExit, match="2"):
        main("schedule --pp 2 -m 4 --schedule zbv --cost 1,1,2 --profile layers.json".split())
    assert "--profile FILE has the costs of every layer: leave --cost out" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--vpp", "--group-size"])
def test_an_option_of_the_interleaved_schedule_alone_is_refused_for_others(option, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["schedule", "--pp", "2", "-m", "4", "--schedule", "zbv", "--compare", "1f1b", option, "2"])
    assert "--vpp and --group-size are the interleaved schedule's: name it" in capsys.readouterr().err


PROFILE = """{"pattern": "ETTTTTTTTL", "forward_ms": {"E": 1, "T": 2, "L": 5},
"backward_ms": {"E": 0.5, "T": 2.5, "L": 6},
"weight_ms": {"E": 0.0001, "T": 1.5, "L": 2}}"""


def test_cut_and_search(tmp_path, capsys):
    """An uneven model: the cut gives the head's stage less, and what is written is what the output says is taken."""
    (tmp_path / "p.json").write_text(PROFILE)
    words = f"schedule --pp 2 -m 6 --schedule zb-h1 --profile {tmp_path}/p.json --no-timeline"
    even = float(run(capsys, words).splitlines()[1].split()[2])
    words += f" --cut --search --memory-limit 2 --iterations 2000 --csv {tmp_path}/t.csv --png {tmp_path}/t.png"
    lines = run(capsys, words).splitlines()
    named, searched = float(lines[1].split()[2]), float(lines[2].split()[3])
    assert searched <= named < even
    assert "cut for zb-h1: 6-4 = ETTTTT|TTTL" in lines[3]
    taken = "searched order taken" in lines[4]
    stored = read_csv(tmp_path / "t.csv")
    assert (stored.items != build("zb-h1", pp=2, num_microbatches=6).items) == taken
    assert run(capsys, words) == "\n".join(lines) + "\n"  # the same seed, the same result


def test_a_search_leads_to_a_run(tmp_path, capsys, monkeypatch):
    """One command: the configuration has the searched table, the cut and the micro-batches, and check accepts it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.json").write_text(PROFILE)
    tiny = Path(__file__).parents[3] / "configs" / "tiny_cpu.yaml"
    (tmp_path / "tiny.yaml").write_text(tiny.read_text().replace("num_layers: 4", "num_layers: 8"))
    words = "schedule --pp 2 -m 6 --schedule zb-h1 --profile p.json --no-timeline --cut --search --memory-limit 3"
    out = run(capsys, words + " --iterations 2000 --config tiny.yaml --write out/run.yaml")
    assert "searched order taken" in out
    config = load("out/run.yaml")
    settled = resolve(config, world_size=4)
    assert settled.layout.schedule == str(tmp_path / "out" / "run.csv")
    assert layers_of_stages(settled.config.model, settled.config.parallel) == [5, 3]
    assert settled.config.parallel.pipeline_model_parallel_layout == "Ettttt|tttL"
    batch = settled.batch
    assert (batch.num_microbatches, batch.grad_accum_steps, batch.global_batch_size) == (6, 1, 24)
    assert read_csv("out/run.csv").items != build("zb-h1", pp=2, num_microbatches=6).items
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")  # the table is found from any folder
    assert "out/run.csv" in run(capsys, "check ../out/run.yaml")
    monkeypatch.chdir(tmp_path)
    # The name alone, and nothing beside the configuration, where no search was made or its order was left.
    run(capsys, "schedule --pp 2 -m 6 --schedule 1f1b --no-timeline --config tiny.yaml --write named.yaml")
    assert load("named.yaml").parallel.schedule == "1f1b"
    assert not Path("named.csv").exists()
    words = "schedule --pp 2 -m 8 --schedule interleaved --group-size 4 --no-timeline"
    run(capsys, words + " --config tiny.yaml --write groups.yaml")
    assert load("groups.yaml").parallel.microbatch_group_size_per_vp_stage == 4


def test_a_cut_of_the_file_stays_unless_another_is_searched(tmp_path, capsys):
    """Layers that do not divide evenly would else be refused with the advice to give the cut that the file has."""
    tiny = Path(__file__).parents[3] / "configs" / "tiny_cpu.yaml"
    uneven = tiny.read_text().replace("num_layers: 4", "num_layers: 5")
    uneven = uneven.replace("parallel:", "parallel:\n  pipeline_model_parallel_layout: Ettt|ttL", 1)
    (tmp_path / "cut.yaml").write_text(uneven)
    files = f"--config {tmp_path}/cut.yaml --write {tmp_path}/run.yaml"
    words = f"schedule --pp 2 -m 6 --schedule zb-h1 --no-timeline {files}"
    run(capsys, words)
    assert load(tmp_path / "run.yaml").parallel.pipeline_model_parallel_layout == "Ettt|ttL"
    assert main(words.replace("--pp 2", "--pp 4").split()) == 2
    assert "it has 2 stages, which is not divisible by pipeline_model_parallel_size 4" in capsys.readouterr().err
    four = uneven.replace("num_layers: 5", "num_layers: 4").replace("Ettt|ttL", "Ett|t|t|L")
    (tmp_path / "cut.yaml").write_text(four)
    run(capsys, words.replace("zb-h1", "interleaved"))
    assert load(tmp_path / "run.yaml").parallel.pipeline_model_parallel_layout == "Ett|t|t|L"


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zbv"])
def test_a_cut_predicts_further_tokens_with_the_head(schedule, tmp_path, capsys):
    """`check` refuses a cut with them on another stage, which would be faster here."""
    costs = '"forward_ms": {0}, "backward_ms": {0}, "weight_ms": {0}'.format('{"E": 1, "T": 2, "P": 9, "L": 9}')
    (tmp_path / "p.json").write_text(f'{{"pattern": "ETTTTPL", {costs}}}')
    tiny = Path(__file__).parents[3] / "configs" / "tiny_cpu.yaml"
    (tmp_path / "mtp.yaml").write_text(tiny.read_text().replace("model:", "model:\n  mtp_num_layers: 1"))
    words = f"schedule --pp 2 -m 6 --schedule {schedule} --profile {tmp_path}/p.json --cut --no-timeline"
    run(capsys, f"{words} --config {tmp_path}/mtp.yaml --write {tmp_path}/run.yaml")
    assert load(tmp_path / "run.yaml").parallel.pipeline_model_parallel_layout.endswith("mL")


def test_folders_of_what_is_written_are_made(tmp_path, capsys):
    files = [tmp_path / folder / f"out{end}" for folder, end in (("a", ".png"), ("b", ".csv"), ("c", ".json"))]
    png, csv, trace = map(str, files)
    run(capsys, f"schedule --pp 2 -m 4 --schedule zbv --no-timeline --png {png} --csv {csv} --trace {trace}")
    assert all(path.stat().st_size for path in files)


def test_a_run_that_check_would_refuse_is_not_written(tmp_path, capsys):
    tiny = Path(__file__).parents[3] / "configs" / "tiny_cpu.yaml"
    words = f"schedule --pp 4 -m 8 --schedule zbv --no-timeline --config {tiny} --write {tmp_path}/run.yaml"
    assert main(words.split()) == 2
    assert "num_layers 4" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
    run(capsys, f"schedule --pp 4 -m 8 --schedule zbv --no-timeline --csv {tmp_path}/run.csv")
    assert main(words.replace("zbv", f"{tmp_path}/run.csv").split()) == 2  # whose table stays as it was
    assert read_csv(tmp_path / "run.csv").items == build("zbv", pp=4, num_microbatches=8).items
    capsys.readouterr()
    with pytest.raises(SystemExit):
        main("schedule --pp 2 -m 4 --schedule 1f1b --write run.yaml".split())
    assert "--write needs --config" in capsys.readouterr().err


def test_the_fastest_that_fits(capsys):
    out = run(capsys, "schedule --pp 4 -m 16 --schedule auto --memory-limit 3 --no-timeline")
    assert [line.split()[0] for line in out.splitlines()[1:3]] == ["v-half", "v-min"]
    assert "zbv: it holds 4, over the limit" in out
    named = run(capsys, "schedule --pp 4 -m 16 --schedule zbv --compare v-half --memory-limit 3 --no-timeline")
    assert named.splitlines()[3:] == ["zbv: it holds 4, over the limit"]


def test_without_a_barrier_another_one_is_the_fastest(capsys):
    """A flush of ZB-V is the longer one here; from one to the next it is not."""
    words = "schedule --pp 4 -m 8 --schedule auto --cost 1,0.9,1 --no-timeline"
    first = {}
    for more in ("", " --no-barrier"):
        head, *lines = (line.split() for line in run(capsys, words + more).splitlines())
        first[more] = lines[0][0]
        assert head[-2:] == (["no", "barrier"] if more else ["peak", "gap"])
    lines = {line[0]: line for line in lines}
    assert float(lines["1f1b"][-1]) == float(lines["1f1b"][2])
    assert float(lines["zbv"][-1]) < float(lines["zbv"][2])
    assert first == {"": "dualpipev", " --no-barrier": "zbv"}


def test_what_cannot_be_compared_says_why(capsys):
    out = run(capsys, "schedule --pp 4 -m 10 --schedule dualpipev --compare interleaved --no-timeline")
    assert out.splitlines()[2].startswith("interleaved: 10 micro-batches in a flush leave a last group")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("-m 5 --schedule dualpipev", "needs at least 2 * 4 = 8 micro-batches in a flush, not 5: raise --microbatches"),
        ("-m 3 --schedule interleaved", "needs at least --pp 4 micro-batches in a flush, not 3: raise --microbatches."),
        ("-m 9 --schedule interleaved --group-size 3", "--group-size 3 must be between --pp 4 and the 9 micro-batches"),
        ("-m 10 --schedule interleaved --group-size 4", "8 or 12 micro-batches (--microbatches), or set --group-size"),
        ("-m 8 --schedule gpipe --profile layers.json", "cannot be cut into 4 stages: lower --pp or the chunks"),
        ("-m 8 --schedule auto --profile layers.json", "no schedule fits: 1f1b: 1 layers cannot be cut into 4 stages"),
    ],
)
def test_errors_name_the_options_of_the_command(capsys, monkeypatch, tmp_path, words, text):
    monkeypatch.chdir(tmp_path)
    costs = {name: dict.fromkeys("ETL", 1) for name in ("forward_ms", "backward_ms", "weight_ms")}
    Path("layers.json").write_text(json.dumps({"pattern": "ETL", **costs}))
    assert main(f"schedule --pp 4 {words} --no-timeline".split()) == 2
    assert text in capsys.readouterr().err


def test_costs_and_latency(capsys):
    out = run(capsys, "schedule --pp 2 -m 4 --schedule 1f1b --cost 2,3,1 --no-timeline")
    assert out.splitlines()[1].split()[2:4] == ["30", "6"]
    out = run(capsys, "schedule --pp 2 -m 4 --schedule 1f1b --cost 2,3,1 --p2p 0.5 --no-timeline")
    assert float(out.splitlines()[1].split()[2]) > 30


def test_the_timeline(capsys):
    out = run(capsys, "schedule --pp 2 -m 4 --schedule 1f1b --width 97")
    assert out.splitlines()[:2] == [
        "rank 0 F0----F1----............B0----------F2----B1----------F3----B2----------......B3----------",
        "rank 1 ......F0----B0----------F1----B1----------F2----B2----------F3----B3----------............",
    ]


def test_small_letters_are_odd_chunks():
    schedule = build("zbv", pp=2, num_microbatches=4)
    rows = text(schedule, simulate(schedule, Costs(forward=1, input_grad=1, weight_grad=1)), width=120).splitlines()
    assert rows[0].startswith("rank 0 F0-")
    assert set(rows[1]) > set("fiw")


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_pictures(ending, tmp_path, capsys):
    path = tmp_path / f"out.{ending}"
    out = run(capsys, f"schedule --pp 4 -m 8 --schedule dualpipev --no-timeline --png {path}")
    assert f"picture: {path}" in out
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG") if ending == "png" else b"<svg" in content
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


def test_a_picture_of_another_kind(tmp_path, capsys):
    assert main(f"schedule --pp 4 -m 8 --schedule zbv --png {tmp_path}/out.jpg".split()) == 2
    assert "ends in .png, .svg, .pdf" in capsys.readouterr().err
    schedule = build("zbv", pp=2, num_microbatches=4)
    simulation = simulate(schedule, Costs(forward=1, input_grad=1, weight_grad=1))
    with pytest.raises(ScheduleError):
        save(figure(schedule, simulation), tmp_path / "out")


def test_the_table_and_the_trace(tmp_path, capsys):
    words = f"schedule --pp 2 -m 5 --schedule zbv --no-timeline --csv {tmp_path}/new/t.csv --trace {tmp_path}/t.json"
    run(capsys, words)
    assert read_csv(tmp_path / "new" / "t.csv").items == build("zbv", pp=2, num_microbatches=5).items
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) == 2 * 2 * 5 * 3
    again = run(capsys, f"schedule --pp 2 -m 5 --schedule {tmp_path}/new/t.csv --no-timeline")
    assert again.splitlines()[1].split()[1:3] == ["2", "15.5"]


def test_plan_and_run_begin_together(tmp_path):
    schedule = build("1f1b", pp=2, num_microbatches=4)
    spans = simulate(schedule, Costs(forward=1, input_grad=1, weight_grad=1)).spans
    late = [[(start + 100, end + 100) for start, end in rank] for rank in spans]
    write_trace(tmp_path / "t.json", schedule, planned=spans, measured=late)
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    first = {event["pid"]: event for event in reversed(events) if event["ph"] == "X"}
    assert first[0]["ts"] == first[1]["ts"] == 0
    assert first[0]["dur"] == 1e6
    assert first[1]["name"] == "0F0"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--pp 4 -m 6 --schedule dualpipev", "needs at least 2 * 4 = 8 micro-batches"),
        ("--pp 4 -m 8 --schedule dualpipe", "did you mean dualpipev"),
        ("--pp 4 -m 8 --schedule zbv --compare 1f1b,dualpipe", "did you mean dualpipev"),
        ("--pp 4 -m 8 --schedule zbv --search --memory-limit 0.5", "rank 0 needs 1 (0 of it state)"),
        (
            "--pp 4 -m 8 --schedule auto --memory-limit 0.5",
            "no schedule fits in 0.5. The one that holds least is v-min, 2.",
        ),
        ("--pp 4 -m 8 --schedule zbv --memory-gib 3", "--memory-gib needs a --profile with the bytes"),
    ],
)
def test_errors(words, said, capsys):
    assert main(["schedule", *words.split()]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("cost", ["1,1", "1,x,1", "-1,1,1", "0,0,0"])
def test_bad_costs(cost, capsys):
    with pytest.raises(SystemExit):
        main(["schedule", "--pp", "4", "-m", "8", "--schedule", "zbv", f"--cost={cost}"])
    assert "--cost" in capsys.readouterr().err
    for time in ("-1", "nan"):
        with pytest.raises(SystemExit):
            main(["schedule", "--pp", "4", "-m", "8", "--schedule", "zbv", f"--p2p={time}"])
        assert "--p2p" in capsys.readouterr().err
