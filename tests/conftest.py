"""Setting of every test: a machine without GPUs, as far as this process and its children see, and calm libraries."""

import gc
import itertools
import os
import signal
from collections import Counter
from pathlib import Path

import pytest

from megaaccum.distributed import preload
from megaaccum.platform import quiet

gc.disable()  # until the tests are collected: they bring a million objects, which stay
# Before any test module imports torch or DeepSpeed: both look at these when they are imported.
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
preload.prepare()
# Under nohup a hang-up is ignored, which children inherit; tests that send one begin as in a terminal.
signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_configure(config):
    """pytest has warning filters of its own, which come before the process'."""
    for message, category, module, _ in quiet.WARNINGS:
        config.addinivalue_line("filterwarnings", f"ignore:{message}:{category.__name__}:{module}")


def pytest_collection_finish(session):
    """Tests and libraries stay until the end: no later garbage collection need visit them."""
    preload.freeze_objects()
    gc.enable()


@pytest.fixture(scope="session")
def texts(tmp_path_factory):
    """The folder in which the first run builds the embedded text, which takes seconds, for all."""
    return tmp_path_factory.mktemp("texts")


def in_turns(items, folder):
    """The items of each file that no other process has taken, which a file of that number in `folder` says."""
    for number, (_, of_file) in enumerate(itertools.groupby(items, key=lambda item: item.path)):
        try:
            (Path(folder) / str(number)).touch(exist_ok=False)
        except FileExistsError:
            continue
        yield from of_file


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session):
    """Run the files that are left, beside the other processes of `make test`, which have collected the same ones."""
    folder = os.environ.get("TEST_TURNS")
    if not folder or session.testsfailed or session.config.option.collectonly:
        return None  # to pytest's own loop
    mine = in_turns(session.items, folder)
    item = next(mine, None)
    while item is not None and not session.shouldfail and not session.shouldstop:
        following = next(mine, None)
        session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        item = following
    return True


def pytest_terminal_summary(terminalreporter):
    """Tests that were skipped, and what to install or do so that it runs."""
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in terminalreporter.getreports("skipped"))
    if reasons:
        terminalreporter.section("not run on this machine")
    for reason, count in reasons.items():
        terminalreporter.line(f"{count} {'test' if count == 1 else 'tests'}: {reason}")
