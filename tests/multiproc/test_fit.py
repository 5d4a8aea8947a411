"""`sync: auto` and `memory_gib` in whole runs: what is chosen is what runs; what cannot fit is refused first."""

from dataclasses import replace

from megaaccum import config
from megaaccum.lab.planner import sync_mode
from megaaccum.pretrain.interop.load import load
from megaaccum.pretrain.metrics import journal, receipts
from megaaccum.pretrain.model.layers import choose
from megaaccum.units import GIB
from tests.support import whole_runs
from tests.support.whole_runs import VOCAB, flags, make_data, train


def test_a_policy_that_cannot_fit_is_refused_before_a_model_is_built(tmp_path):
    make_data(tmp_path)
    ended = train(tmp_path, worker=whole_runs.builds_no_model.__name__, memory_gib=1e-5, reduce_bucket_size=1000)
    assert ended.code == 2, ended.output
    (line,) = ended.errors()
    assert "deepspeed zero-3 streaming needs" in line
    assert "memory_gib 1e-05" in line


def test_auto_streams_where_memory_is_short_and_says_so(tmp_path):
    make_data(tmp_path)
    keys = dict(num_layers=16, hidden_size=32, reduce_bucket_size=1000, train_iters=1, pipeline_model_parallel_size=1)
    limit = between_streaming_and_resident(flags(tmp_path, **keys))
    ended = train(tmp_path, memory_gib=limit, sync="auto", **keys)
    assert ended.code == 0, ended.output
    assert "sync auto: streaming" in ended.output
    (record,) = journal.read(tmp_path / "run" / "log.jsonl")
    assert 0 < record["memory_gradients_whole_bytes"] < record["memory_gradients_shard_bytes"] / 2


def test_auto_takes_the_schedule_that_fits_and_a_restart_chooses_again(tmp_path):
    """The second start has less memory, and resumes from the first one's checkpoint under another schedule."""
    make_data(tmp_path)
    keys = dict(num_layers=4, hidden_size=32, reduce_bucket_size=1000, sync="resident", train_iters=4, schedule="auto")
    words = flags(tmp_path, **keys)
    starts = [train(tmp_path, **keys, memory_gib=limit, max_steps=2) for limit in (1.0, 1.001 * needed(words, "1f1b"))]
    assert [ended.code for ended in starts] == [0, 0], [ended.output for ended in starts]
    took = []
    for ended, receipt in zip(starts, receipts.read_all(tmp_path / "run"), strict=True):
        chosen = receipt["configuration"]["parallel"]["schedule"]
        assert chosen["from"] == "the planner"
        assert f"schedule auto: {chosen['value']}" in ended.output
        assert any(f"schedule auto: {chosen['value']}" in note for note in receipt["plan"]["notes"])
        took.append(chosen["value"])
    assert len(set(took)) == 2
    assert [row["step"] for row in journal.read(tmp_path / "run" / "log.jsonl") if "loss" in row] == [1, 2, 3, 4]


def needed(words: list[str], schedule: str) -> float:
    """GiB."""
    words = [*words]
    words[words.index("auto")] = schedule
    plan = config.resolve(load(None, words), world_size=2)
    return float(sync_mode.peak(plan, None, choose(plan.config, has_te=False, on_gpu=False)).total[0]) / GIB


def between_streaming_and_resident(words: list[str]) -> float:
    """GiB: the mean of what the two hold."""
    plan = config.resolve(load(None, words), world_size=2)
    made_of = choose(plan.config, has_te=False, on_gpu=False)
    forecast, resident = sync_mode.Forecast(plan, VOCAB, made_of), plan.config.sharding
    rows = [forecast.predict(replace(resident, sync=sync)) for sync in ("resident", "streaming")]
    return sum(row.held for row in rows) / 2 / GIB
