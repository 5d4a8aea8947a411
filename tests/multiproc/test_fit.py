"""`sync: auto` and `memory_gib` in whole runs: what is chosen is what runs; what cannot fit is refused first."""

import json

from tests.multiproc import whole_runs
from tests.multiproc.whole_runs import make_data, train


def test_a_policy_that_cannot_fit_is_refused_before_a_model_is_built(tmp_path):
    make_data(tmp_path)
    ended = train(tmp_path, worker=whole_runs.builds_no_model.__name__, memory_gib=1e-5, reduce_bucket_size=1000)
    assert ended.code == 2, ended.output
    (line,) = ended.errors()
    assert "deepspeed zero-3 streaming needs" in line
    assert "memory_gib 1e-05" in line


def test_auto_streams_where_memory_is_short_and_says_so(tmp_path):
    """Between what streaming and resident parameters of this model hold: 0.30 and 0.56 MiB on the first stage."""
    make_data(tmp_path)
    ended = train(tmp_path, memory_gib=0.0009, reduce_bucket_size=1000, sync="auto", train_iters=2)
    assert ended.code == 0, ended.output
    assert "sync auto: streaming" in ended.output
    records = [json.loads(text) for text in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert all(record["memory_gradients_whole_bytes"] < record["memory_optimizer_bytes"] / 3 for record in records)
