"""A run in a V: it trains, writes its timeline, and resumes from its checkpoint under 1F1B."""

import json
from pathlib import Path

import pytest

from megaaccum.cli import main
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


def test_a_run_in_a_v_is_resumed_on_1f1b(tmp_path, texts):
    trace = tmp_path / "trace.json"
    for output, flags in (
        ("whole", f"--schedule dualpipev --schedule_trace {trace}"),
        ("changed", "--schedule dualpipev --max_steps 2"),
        ("changed", "--schedule 1f1b"),
    ):
        places = f"--output_dir {tmp_path / output} --data_cache_path {texts}"
        run_ranks(trained, 2, f"{RUN} {places} {flags}", init=False, timeout=150)
    whole, changed = losses(tmp_path / "whole"), losses(tmp_path / "changed")
    assert ("train", 4) in whole and whole.keys() <= changed.keys()
    for at, loss in whole.items():
        assert changed[at] == pytest.approx(loss, rel=1e-6), at
    names = {e["args"]["name"] for e in json.loads(trace.read_text())["traceEvents"] if e["name"] == "process_name"}
    assert names == {"planned: dualpipev", "measured: dualpipev"}


def trained_from(path: str, flags: str) -> str:
    """The schedule of a run of a written configuration, as each of its ranks resolves it."""
    from megaaccum import config
    from megaaccum.lab import advisor
    from megaaccum.pretrain.training import loop

    plan = config.resolve(load(path, flags.split()), world_size=2)
    loop.train(plan, advisor)
    return plan.layout.schedule


def test_a_search_leads_to_a_run(tmp_path, texts):
    """`schedule --write` makes one file, with its table beside it, that trains to the losses of 1F1B on that batch."""
    profile, run = tmp_path / "profile.json", tmp_path / "run.yaml"
    kinds = {kind: dict(forward=f, input_grad=i, weight_grad=w) for kind, f, i, w in
             (("E", 1, 0.5, 0), ("T", 2, 2.5, 1.5), ("L", 5, 6, 2))}  # fmt: skip
    profile.write_text(json.dumps({"pattern": "ETTTTL", "kinds": kinds}))
    tiny = Path(__file__).parents[2] / "configs" / "tiny_cpu.yaml"
    words = "schedule --pp 2 -m 6 --schedule zb-h1 --cut --search --memory-limit 3 --iterations 2000 --no-timeline"
    assert main([*words.split(), *f"--profile {profile} --config {tiny} --write {run}".split()]) == 0
    small = "--hidden_size 32 --seq_length 32 --nproc_per_node 2 --num_threads 1 --max_steps 2 --log_interval 1"
    small += f" --eval_interval 0 --save_interval 0 --num_workers 0 --data_cache_path {texts}"
    searched, named = tmp_path / "searched", tmp_path / "named"
    told = run_ranks(trained_from, 2, str(run), f"{small} --output_dir {searched}", init=False, timeout=150)
    assert told == [str(run.with_suffix(".csv"))] * 2
    more = f"{small} --output_dir {named} --schedule 1f1b"
    run_ranks(trained_from, 2, str(run), more, init=False, timeout=150)
    found, expected = losses(searched), losses(named)
    assert ("train", 2) in expected and found == {at: pytest.approx(loss, rel=1e-6) for at, loss in expected.items()}
