"""`megaaccum report`: a page that holds all it shows, of a run with restarts, of two runs, and errors in one line."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from megaaccum import cli
from megaaccum.lab.planner import expected
from megaaccum.pretrain.metrics import receipts
from megaaccum.pretrain.metrics.report.run import Run
from megaaccum.pretrain.metrics.run_log import RunLog
from megaaccum.pretrain.model.layers import choose
from tests.support.configs import plan
from tests.unit.pretrain.metrics.test_run_log import Clock


def make_run(folder: Path, *, steps: int = 6, **keys: object) -> Path:
    """A run that was killed after its steps, and went on from the one before the last two."""
    of = plan(4, pipeline_model_parallel_size=2, train_iters=40, output_dir=str(folder), **keys)
    clock = Clock()
    for start_step in (0, steps - 2):
        layers = choose(of.config, has_te=False, on_gpu=False)
        opening = receipts.opening(
            of, data_digest="abc", vocab_size=512, ranks=[receipts.this_rank(None, None)],
            predicted=expected.for_receipt(of, 512, layers, device=None, device_bytes=None), start_step=start_step,
        )  # fmt: skip
        opening["launched"] = clock.now
        clock.now += 7.0
        log = RunLog(
            of, is_writer=True, flops_per_step=1e9, peak_flops=None, start_step=start_step, opening=opening,
            clock=clock, now=clock,
        )  # fmt: skip
        for number in range(start_step + 1, start_step + steps + 1):
            clock.now += 2.0
            log.step(
                dict(step=number, loss=5.0 / number, grad_norm=1.0, lr=1e-3, seconds_per_step=2.0, seconds_data=0.5,
                     seconds_forward_backward=1.5, bytes_all_gather_dp_cp=1e6, memory_parameters_bytes=10**6,
                     skipped=number == 3, note="gradient <b> not finite" * (number == 3))
            )  # fmt: skip
        log.evaluation(dict(step=start_step + steps, loss=2.0))
        if start_step:
            log.event("alarm", 5, "rank 0 received 9.00 MiB")
            log.close()
    return folder


class Page(HTMLParser):
    """A page's text, and the addresses that it would load."""

    def __init__(self, path: Path):
        super().__init__()
        self.text, self.tags, self.loads, self.open = "", [], [], []
        self.feed(path.read_text(encoding="utf-8"))
        assert not self.open, f"not closed: {self.open}"

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.loads += [value for name, value in attrs if name in ("src", "href", "xlink:href", "data", "srcset")]
        self.loads += [value for _, value in attrs if value and re.search(r"url\((?!#)", value)]
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if self.open and self.open[-1] == tag:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data + "\n"


def test_the_page_of_a_run_with_restarts(tmp_path, capsys):
    run = make_run(tmp_path / "run")
    assert cli.main(["report", str(run)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"wrote {run}/report.html"
    page = Page(run / "report.html")
    assert page.tags.count("svg") == 7
    # 9 steps of 1.5 seconds beside the wait for data, of 2 starts of 7 seconds and 12 steps of 2.
    for words in (
        "35.5% of 0:38", "goodput", "no end was recorded", "Done", "restart", "continues after step 4",
        "gradient <b> not finite", "rank 0 received 9.00 MiB", "train_iters", "test.yaml", "1f1b with equal stages",
        "bytes from data-parallel ranks, a step", "device_batch_size = micro_batch_size 1",
    ):  # fmt: skip
        assert words in page.text, words
    assert not {"script", "link", "img", "iframe", "object", "b"} & set(page.tags)
    assert all(load.startswith("#") for load in page.loads)
    assert "default-src 'none'" in (run / "report.html").read_text()


def test_of_a_long_run_few_steps_are_held_and_numbers_are_of_all(tmp_path, monkeypatch):
    folder = make_run(tmp_path / "run", steps=30)
    whole = Run.read(folder)
    monkeypatch.setattr("megaaccum.pretrain.metrics.report.run.MOST_SHOWN", 5)
    few = Run.read(folder)
    steps = [each["step"] for each in few.train]
    assert [each["step"] for each in whole.train] == list(range(1, 59))
    assert steps == [1, 3, 12, 24, 36, 48, 58]  # the ends, the skipped one, every twelfth
    assert few.numbers == whole.numbers and len(few.numbers["mfu"]) == 0
    assert len(few.numbers["seconds_per_step"]) == 58 - 2  # without the first of each start
    assert few.goodput.seconds == whole.goodput.seconds


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """The page of a run beside itself, and beside one with other micro-batches."""
    folder, keys = tmp_path_factory.mktemp("pages"), dict(global_batch_size=48, pp_microbatches=None)
    one = make_run(folder / "one", reproducible="layout", **keys)
    two = make_run(folder / "two", reproducible="layout", micro_batch_size=2, **keys)
    for other in (one, two):
        assert cli.main(["report", str(one), str(other)]) == 0
    return one / "report_with_one.html", one / "report_with_two.html"


def test_marks_of_one_picture_are_not_anothers(pages):
    """Nor where both runs are the same."""
    pictures = pages[0].read_text().split("<svg ")[1:]
    marks = [set(re.findall(r'<clipPath id="(\w+)"', each)) for each in pictures]
    assert sum(map(len, marks)) == len(set().union(*marks)) > len(pictures)


def test_two_runs_beside_each_other_after_the_keys_that_differ(tmp_path):
    one = make_run(tmp_path / "one")
    two = make_run(tmp_path / "two", steps=8, hidden_size=128, pp_microbatches=8)
    output = tmp_path / "both.html"
    assert cli.main(["report", str(one), str(two), "--output", str(output)]) == 0
    text = Page(output).text
    differing = text[text.index("What differs") : text.index("Loss\n")]
    for words in ("model.hidden_size\n64\n128", "batch.pp_microbatches\n16\n8", "run.output_dir"):
        assert words in differing
    assert "num_layers" not in differing and "train_iters" not in differing
    assert text.count("Plan against measured") == 2


def test_two_runs_with_other_micro_batches_are_said_not_to_have_the_same_bits(pages):
    for page, is_named in zip(pages, (False, True), strict=True):
        text = Page(page).text
        assert ("micro_batch_size is 1 and 2: reproducible layout has the same bits" in text) is is_named


@pytest.mark.parametrize("log", ["missing", "empty"])
def test_a_run_that_took_no_step_has_a_page_and_is_told_so(tmp_path, capsys, log):
    run = make_run(tmp_path / "run")
    (run / "log.jsonl").unlink()
    if log == "empty":
        (run / "log.jsonl").touch()
    capsys.readouterr()
    assert cli.main(["report", str(run)]) == 0
    told, written = capsys.readouterr().out.splitlines()
    assert told.startswith(f"no step was recorded in {run / 'log.jsonl'}") and written.startswith("wrote")
    text = Page(run / "report.html").text
    assert "No step was recorded" in text and "never a finite number" not in text


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        ("none", "holds no receipts"),
        ("no folder", "is no folder"),
        ("later", "version 2"),
        ("damaged", "log.jsonl is damaged: line 2"),
        ("unwritable", "cannot be written"),
    ],
)
def test_what_cannot_be_reported_is_one_message_and_changes_nothing(tmp_path, capsys, spoil, words):
    run = make_run(tmp_path / "run")
    if spoil == "none":
        run = tmp_path
    elif spoil == "no folder":
        run = tmp_path / "other"
    elif spoil == "later":
        path = run / "receipts" / "start_2.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"version": 2}))
    elif spoil == "damaged":
        lines = (run / "log.jsonl").read_text().splitlines(keepends=True)
        (run / "log.jsonl").write_text("".join([lines[0], "x\n", *lines[1:]]))
    before = sorted(tmp_path.rglob("*"))
    more = ["--output", str(run / "log.jsonl" / "report.html")] if spoil == "unwritable" else []
    assert cli.main(["report", str(run), *more]) == 1
    error = capsys.readouterr().err
    assert words in error and "Traceback" not in error
    assert sorted(tmp_path.rglob("*")) == before
