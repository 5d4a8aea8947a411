"""Known noise is kept back; everything else is heard."""

import logging
import re
import subprocess
import sys
import warnings

import pytest

from megaaccum.platform import quiet


@pytest.mark.parametrize(
    ("message", "module", "kept_back"),
    [
        ("Transformer Engine and Apex are not installed. Falling back to Torch optimizers.", "megatron.core.x", True),
        ("Apex is not installed. Falling back to Torch Norm", "megatron.core.models.backends", True),
        ("Apex is not installed. Falling back to Torch Norm", "someone.else", False),
        ("The loss is not finite", "megatron.core.x", False),
    ],
)
def test_only_listed_warnings_are_kept_back(monkeypatch, message, module, kept_back):
    monkeypatch.delenv("MEGAACCUM_VERBOSE", raising=False)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        quiet.install()
        warnings.warn_explicit(message, UserWarning, "file.py", 1, module=module)
    assert (not heard) == kept_back


def test_only_listed_log_lines_are_kept_back(monkeypatch, caplog):
    monkeypatch.delenv("MEGAACCUM_VERBOSE", raising=False)
    quiet.install()
    logger = logging.getLogger("megatron.core.models.gpt.gpt_model")
    with caplog.at_level(logging.WARNING):
        logger.warning("GPTModel IS DEPRECATED. GPTModel is only accepting critical bug fixes")
        logger.warning("something new")
    assert [record.getMessage() for record in caplog.records] == ["something new"]


def test_installing_twice_filters_once():
    logger = logging.getLogger("torch.utils.cpp_extension")
    quiet.install()
    filters = list(logger.filters)
    quiet.install()
    assert filters and logger.filters == filters


def test_every_entry_has_a_reason_and_a_valid_pattern():
    for message, category, module, reason in quiet.WARNINGS:
        re.compile(message)
        re.compile(module)
        assert issubclass(category, Warning)
        assert reason.endswith(".")
    assert all(reason.endswith(".") for _, _, reason in quiet.LOG_LINES)


def test_verbose_keeps_nothing_back():
    code = (
        "import warnings; from megaaccum.platform import quiet; quiet.install();"
        "text = 'Apex is not installed. Falling back to'; module = 'megatron.core.x';"
        "warnings.warn_explicit(text, UserWarning, 'f', 1, module=module)"
    )
    for verbose in ("0", "1"):
        environment = {"MEGAACCUM_VERBOSE": verbose, "PYTHONPATH": ":".join(sys.path)}
        answer = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60, check=True
        )
        assert ("Apex is not installed" in answer.stderr) == (verbose == "1")
