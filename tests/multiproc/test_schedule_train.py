"""A run in a V as a user starts it: it trains, writes its timeline, and goes on from its checkpoint under 1F1B."""

import json

import pytest

from tests.multiproc.test_train import finish, losses, start

STILL = ("--attention_dropout", "0", "--hidden_dropout", "0", "--nproc_per_node", "2", "--train_iters", "4")


def test_a_run_in_a_v_is_resumed_on_1f1b(tmp_path):
    cache = tmp_path / "cache"
    trace = tmp_path / "trace.json"
    in_a_v = ("--schedule", "dualpipev", "--save_interval", "2")
    finish(start(tmp_path / "whole", cache, *STILL, *in_a_v, "--schedule_trace", str(trace)))
    finish(start(tmp_path / "changed", cache, *STILL, *in_a_v, "--max_steps", "2"))
    out, _ = finish(start(tmp_path / "changed", cache, *STILL, "--schedule", "1f1b", "--save_interval", "2"))
    assert "resumed from" in out
    whole, changed = losses(tmp_path / "whole"), losses(tmp_path / "changed")
    assert ("train", 4) in whole and whole.keys() <= changed.keys()
    for at, loss in whole.items():
        assert changed[at] == pytest.approx(loss, rel=1e-6), at
    names = {e["args"]["name"] for e in json.loads(trace.read_text())["traceEvents"] if e["name"] == "process_name"}
    assert names == {"planned: dualpipev", "measured: dualpipev"}
