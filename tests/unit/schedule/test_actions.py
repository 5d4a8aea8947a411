"""Actions and tables: what prints parses, what is written is read, torch's files included."""

import pytest

from megaaccum.errors import ScheduleError
from megaaccum.schedule import Action, Pair, build, names, parse, read_csv, register, validate, write_csv
from megaaccum.schedule import build as build_function
from megaaccum.schedule.builders import one_forward_one_backward


@pytest.mark.parametrize("text", ["0F3", "1I0", "1W0", "0B2", "12F1023", "(0F4;1B2)"])
def test_what_prints_parses(text):
    assert str(parse(text)) == text


def test_torch_spelling_of_a_pair():
    assert parse("(0F4;1B2)OVERLAP_F_B") == Pair(Action("F", 0, 4), Action("B", 1, 2))


@pytest.mark.parametrize("text", ["", "F3", "0X3", "0F", "(0F4)", "(0B4;1F2)", "(0F4;1W2)", "0F3 1F3"])
def test_what_is_no_action(text):
    with pytest.raises(ScheduleError, match="not a"):
        parse(text)


@pytest.mark.parametrize("name", names())
def test_csv_there_and_back(name, tmp_path):
    schedule = build(name, pp=4, num_microbatches=8)
    write_csv(schedule, tmp_path / "table.csv")
    back = read_csv(tmp_path / "table.csv")
    assert back.items == schedule.items
    assert back.stages == schedule.stages
    assert back.num_microbatches == 8


def test_torch_reads_our_files_and_we_read_torchs(tmp_path):
    from torch.distributed.pipelining.schedules import _Action

    schedule = build("dualpipev", pp=2, num_microbatches=5)
    write_csv(schedule, tmp_path / "ours.csv")
    rows = [
        [_Action.from_str(cell) for cell in line.split(",")]
        for line in (tmp_path / "ours.csv").read_text().splitlines()
    ]
    theirs = "\n".join(",".join(["", "0UNSHARD", *map(str, row), "3SEND_B1"]) for row in rows)
    (tmp_path / "theirs.csv").write_text(theirs)
    assert read_csv(tmp_path / "theirs.csv").items == schedule.items


def test_files_that_count_chunks(tmp_path):
    path = tmp_path / "table.csv"
    path.write_text("0F0,0F1,0B0,0B1\n0F0,0B0,0F1,0B1\n")
    assert read_csv(path).stages == ((0,), (1,))
    both = "0F0,1F0,1B0,0B0\n0F0,1F0,1B0,0B0\n"
    path.write_text(both)
    with pytest.raises(ScheduleError, match="placement"):
        read_csv(path)
    path.write_text("# placement: v\n" + both)
    assert read_csv(path).stages == ((0, 3), (1, 2))
    assert read_csv(path).placement == "v"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("0F0,0B0\n1F0,1X0\n", "rank 1, cell 1"),
        ("0F0,0B0\n2F0,2B0\n", "exactly one row"),
        ("0F0,0B0\n1F0,1B0,2F0,2B0\n", "as many stages"),
        ("\n", "a row per rank"),
    ],
)
def test_files_that_are_no_table(text, said, tmp_path):
    (tmp_path / "table.csv").write_text(text)
    with pytest.raises(ScheduleError, match=said):
        read_csv(tmp_path / "table.csv")


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ScheduleError, match="cannot be read"):
        build(str(tmp_path / "none.csv"), pp=2, num_microbatches=4)


@pytest.fixture
def registry():
    from megaaccum.schedule.registry import _REGISTRY

    before = dict(_REGISTRY)
    yield
    _REGISTRY.clear()
    _REGISTRY.update(before)
    build_function.cache_clear()


@pytest.mark.usefixtures("registry")
def test_registering_a_function():
    register("mine", one_forward_one_backward)
    assert build("mine", pp=3, num_microbatches=6).items == build("1f1b", pp=3, num_microbatches=6).items
    with pytest.raises(ScheduleError, match="already"):
        register("mine", one_forward_one_backward)


@pytest.mark.usefixtures("registry")
def test_a_registered_schedule_is_validated():
    register("broken", lambda pp, m: [list(rank)[:-1] for rank in one_forward_one_backward(pp, m)])
    with pytest.raises(ScheduleError, match=r"0I5 .* is missing"):
        build("broken", pp=3, num_microbatches=6)


@pytest.mark.usefixtures("registry")
def test_registering_a_file(tmp_path):
    schedule = build("zbv", pp=2, num_microbatches=6)
    write_csv(schedule, tmp_path / "mine.csv")
    register("mine", tmp_path / "mine.csv")
    again = build("mine", pp=2, num_microbatches=6)
    assert (again.items, again.stages) == (schedule.items, schedule.stages)
    assert validate(again) == validate(schedule)
    with pytest.raises(ScheduleError, match="pp 2 and 6 micro-batches, not of pp 2 and 7"):
        build("mine", pp=2, num_microbatches=7)


def test_unknown_names():
    with pytest.raises(ScheduleError, match="did you mean dualpipev"):
        build("dualpipe", pp=2, num_microbatches=4)


@pytest.mark.parametrize(
    ("name", "m", "said"),
    [("zbv", 6, "2 \\* 4 - 1 = 7"), ("dualpipev", 7, "2 \\* 4 = 8"), ("interleaved", 9, "last group")],
)
def test_too_few_microbatches(name, m, said):
    with pytest.raises(ScheduleError, match=said):
        build(name, pp=4, num_microbatches=m)


def test_chunks_that_a_schedule_does_not_have():
    with pytest.raises(ScheduleError, match="2 model chunks per rank, not 3"):
        build("zbv", pp=4, num_microbatches=8, chunks=3)
