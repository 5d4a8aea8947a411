"""A run in a V: it trains, writes its timeline, and resumes from its checkpoint under 1F1B."""

import json

import pytest

from megaaccum.lab.verification.testing import run_ranks
from megaaccum.pretrain.interop.load import load
from tests.multiproc.test_train import losses

RUN = (
    "--num_layers 4 --hidden_size 32 --num_attention_heads 4 --seq_length 32 --train_iters 4 --lr 1e-2 --num_threads 1 "
    "--pipeline_model_parallel_size 2 --pp_microbatches 4 --attention_dropout 0 --hidden_dropout 0 --eval_interval 4 "
    "--eval_iters 1 --log_interval 1 --save_interval 2 --num_workers 0"
)


def trained(flags: str) -> None:
    """One start of a run, as each of its ranks sees it."""
    from megaaccum import config
    from megaaccum.lab import advisor
    from megaaccum.pretrain.training import loop

    loop.train(config.resolve(load(None, flags.split()), world_size=2), advisor)


def test_a_run_in_a_v_is_resumed_on_1f1b(tmp_path):
    trace = tmp_path / "trace.json"
    for output, flags in (
        ("whole", f"--schedule dualpipev --schedule_trace {trace}"),
        ("changed", "--schedule dualpipev --max_steps 2"),
        ("changed", "--schedule 1f1b"),
    ):
        places = f"--output_dir {tmp_path / output} --data_cache_path {tmp_path / 'cache'}"
        run_ranks(trained, 2, f"{RUN} {places} {flags}", init=False, timeout=150)
    whole, changed = losses(tmp_path / "whole"), losses(tmp_path / "changed")
    assert ("train", 4) in whole and whole.keys() <= changed.keys()
    for at, loss in whole.items():
        assert changed[at] == pytest.approx(loss, rel=1e-6), at
    names = {e["args"]["name"] for e in json.loads(trace.read_text())["traceEvents"] if e["name"] == "process_name"}
    assert names == {"planned: dualpipev", "measured: dualpipev"}
