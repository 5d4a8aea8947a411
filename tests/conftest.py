"""Setting of every test: a machine without GPUs, as far as this process and its children see, and calm libraries."""

import gc
import os
import signal
from collections import Counter

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


def pytest_terminal_summary(terminalreporter):
    """Tests that were skipped, and what to install or do so that it runs."""
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in terminalreporter.getreports("skipped"))
    if reasons:
        terminalreporter.section("not run on this machine")
    for reason, count in reasons.items():
        terminalreporter.line(f"{count} {'test' if count == 1 else 'tests'}: {reason}")
