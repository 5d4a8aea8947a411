"""A step that hangs ends every rank, within the limit and a grace, with what each was doing."""

from __future__ import annotations

import os
import time
from pathlib import Path
from unittest.mock import patch

from megaaccum.lab.verification.testing import run_ranks, try_ranks
from megaaccum.pretrain.launch.watchdog import EXIT_CODE
from tests.multiproc.test_transaction import SMALL


def hangs(folder: Path, *, rank: int, microbatch: int) -> None:
    """`megaaccum train` in which `rank` falls asleep in its forward of a micro-batch of step 2."""
    from megaaccum.cli.train import main
    from megaaccum.pretrain.launch import watchdog
    from megaaccum.pretrain.model.gpt import GPTModel

    forward, calls = GPTModel.forward, []

    def may_sleep(self, *args, **kwargs):
        calls.append(1)
        if os.environ["RANK"] == str(rank) and len(calls) == 4 + microbatch + 1:
            time.sleep(120)
        return forward(self, *args, **kwargs)

    with patch.object(GPTModel, "forward", may_sleep), patch.object(watchdog, "GRACE_SECONDS", 1.0):
        main([*f"{SMALL} --step_timeout_seconds 8".split(), "--output_dir", str(folder)])


def test_every_rank_says_what_it_was_doing_and_ends(tmp_path):
    outcomes = try_ranks(hangs, 2, tmp_path / "run", rank=1, microbatch=2, init=False, timeout=60)
    for rank, outcome in enumerate(outcomes):
        assert (outcome.status, outcome.ended_by_harness) == (EXIT_CODE, False)
        said = (tmp_path / "run" / "hang" / f"rank_{rank}.txt").read_text()
        assert said in outcome.output
        assert f"rank {rank}: step 2 takes" in said
        assert "more than step_timeout_seconds 8" in said
        assert "In forward_backward for" in said
    asleep, waiting = (outcomes[rank].output for rank in (1, 0))
    assert "last action F chunk 0 micro-batch 2" in asleep
    assert "may_sleep" in asleep
    assert "not done" in waiting
    assert "may_sleep" not in waiting


def quick(seconds: float) -> list[str]:
    """A step within the limit, and how its rank sees itself then."""
    from megaaccum.distributed.breadcrumbs import Trace
    from megaaccum.pretrain.launch.watchdog import Watchdog

    trace = Trace()
    for limit in (0.0, 30.0):
        with Watchdog(limit, rank=0, folder=Path("unused"), trace=trace).step(1):
            time.sleep(seconds)
            trace.enter("gather")
    return [str(trace), str(Path("unused").exists())]


def test_a_step_within_the_limit_goes_on():
    ((text, written),) = run_ranks(quick, 1, 0.01, init=False, timeout=20)
    assert text == "In gather for 0 s, last action none, last P2P none"
    assert written == "False"
