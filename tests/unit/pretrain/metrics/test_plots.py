"""The picture of a run: what it shows, and that drawing it disturbs nothing."""

from __future__ import annotations

import logging
import os
import subprocess
import sys

import numpy as np
import pytest

from megaaccum.pretrain.metrics.plots import _figure, draw, smoothed, token_unit


def train(step: int, loss: float | None, **values) -> dict:
    return {"kind": "train", "step": step, "loss": loss, "lr": 1e-3 * step, "skipped": False} | values


RECORDS = [
    train(1, 8.0),
    train(2, None, skipped=True),
    train(3, 6.0),
    train(4, 5.0),
]
VALID = [{"kind": "valid", "step": 0, "loss": 8.5}, {"kind": "valid", "step": 4, "loss": 5.5}]


def test_the_picture_is_a_png_of_a_readable_size(tmp_path):
    draw([*RECORDS, *VALID], tmp_path / "loss.png", tokens_after=lambda step: 4096 * step, title="a run")
    data = (tmp_path / "loss.png").read_bytes()
    width, height = (int.from_bytes(data[at : at + 4], "big") for at in (16, 20))
    assert (data[:8], width, height) == (b"\x89PNG\r\n\x1a\n", 1350, 900)
    assert os.listdir(tmp_path) == ["loss.png"]


def test_it_shows_losses_rate_and_skipped_steps_with_their_units():
    figure = _figure(RECORDS, VALID, lambda step: 4096 * step, "a run")
    upper, lower = figure.axes
    curves = {line.get_label(): line.get_xydata().tolist() for line in upper.get_lines()}
    assert curves["training, each step"] == [[1, 8.0], [3, 6.0], [4, 5.0]]
    assert curves["validation"] == [[0, 8.5], [4, 5.5]]
    assert [x for x, _ in curves["skipped (1)"]] == [2]
    assert lower.get_lines()[0].get_xydata().tolist() == [[n, 1e-3 * n] for n in range(1, 5)]
    assert (upper.get_ylabel(), lower.get_xlabel()) == ("loss (nats per token)", "optimizer step")
    (tokens,) = upper.child_axes
    assert tokens.get_xlabel() == "tokens (thousands)"
    figure.draw_without_rendering()
    assert tokens.get_xlim() == pytest.approx([x * 4.096 for x in upper.get_xlim()])


def test_a_run_whose_loss_never_was_finite_is_drawn(tmp_path):
    draw([train(1, None, skipped=True)], tmp_path / "loss.png", tokens_after=int, title="a run")
    assert (tmp_path / "loss.png").exists()


def test_a_picture_of_no_steps_is_our_mistake(tmp_path):
    with pytest.raises(AssertionError, match="no steps"):
        draw(VALID, tmp_path / "loss.png", tokens_after=int, title="a run")


def test_a_folder_that_is_not_there_is_an_os_error(tmp_path):
    with pytest.raises(OSError, match="No such file"):
        draw(RECORDS, tmp_path / "none" / "loss.png", tokens_after=int, title="a run")


def test_smoothing_keeps_a_straight_line_straight_and_a_constant_constant():
    values = [10.0 - step for step in range(9)]
    assert smoothed(values, span=3)[1:-1] == pytest.approx(values[1:-1])
    assert smoothed([2.0] * 5, span=100) == [2.0] * 5
    assert smoothed(values, span=1) == values
    assert smoothed([1.0, 2.0, 6.0], span=3) == pytest.approx([1.5, 3.0, 4.0])
    assert smoothed([], span=3) == []


@pytest.mark.parametrize(
    ("tokens", "unit"), [(999, (1, "")), (1e3, (1e3, "thousands")), (2.5e9, (1e9, "billions")), (0, (1, ""))]
)
def test_the_unit_of_the_token_axis(tokens, unit):
    assert token_unit(tokens) == unit


def test_matplotlibs_loggers_are_left_as_they_were(tmp_path):
    logger = logging.getLogger("matplotlib")
    logger.setLevel(logging.INFO)
    draw(RECORDS, tmp_path / "loss.png", tokens_after=int, title="a run")
    assert logger.level == logging.INFO
    logger.setLevel(logging.NOTSET)


def test_a_first_drawing_without_a_home_says_nothing(tmp_path):
    """No display, a backend that needs one, no font cache and no folder to keep it in: none of it is worth a word."""
    code = (
        "from pathlib import Path\nfrom megaaccum.pretrain.metrics.plots import draw\n"
        "draw([dict(kind='train', step=1, loss=1.0, lr=1.0)], Path('loss.png'), tokens_after=int, title='')\n"
        "import sys; assert 'matplotlib.pyplot' not in sys.modules\n"
    )
    (tmp_path / "file").write_text("")
    home = str(tmp_path / "file" / "home")
    env = {k: v for k, v in os.environ.items() if k not in ("MPLCONFIGDIR", "XDG_CACHE_HOME", "XDG_CONFIG_HOME")}
    env |= {"HOME": home, "MPLBACKEND": "TkAgg", "PYTHONPATH": os.pathsep.join(sys.path), "DISPLAY": ""}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert (tmp_path / "loss.png").exists()


def test_tokens_over_steps_bend_with_a_ramp(tmp_path):
    figure = _figure(RECORDS, [], lambda step: 1000 * step * step, "a run")
    (axis,) = figure.axes[0].child_axes
    to_tokens, to_steps = axis._functions
    assert [float(each) for each in to_tokens(np.array([0, 1, 2, 4]))] == [0, 1, 4, 16]
    assert [float(each) for each in to_steps(to_tokens(np.array([-1, 0.5, 3, 5])))] == pytest.approx([-1, 0.5, 3, 5])
