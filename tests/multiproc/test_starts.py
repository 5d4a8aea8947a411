"""How a start begins and ends: by interval, from weights alone, with another schedule, on samples that are made up."""

import json

import pytest

from megaaccum.errors import CheckpointError
from megaaccum.interop.load import load
from megaaccum.testing import run_ranks
from tests.multiproc.test_train import losses

RUN = (
    "--num_layers 2 --hidden_size 32 --num_attention_heads 4 --seq_length 32 --train_iters 6 --num_threads 1 "
    "--micro_batch_size 1 --global_batch_size 4 --attention_dropout 0 --hidden_dropout 0 --eval_iters 0 "
    "--log_interval 1 --save_interval 1 --num_workers 0 --mock_data --vocab_size 64 --keep_last 1 "
)


def started(*starts: str) -> list[str]:
    """Starts in one process after another's end; returns what each was refused with."""
    from megaaccum import config
    from megaaccum.training import loop

    refusals = []
    for flags in starts:
        try:
            loop.train(config.resolve(load(None, flags.split()), world_size=1))
            refusals.append("")
        except CheckpointError as error:
            refusals.append(str(error))
    return refusals


def start(*starts: str) -> list[str]:
    return [run_ranks(started, 1, each, init=False, timeout=120)[0][0] for each in starts]


def rows(folder):
    """Those of steps."""
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [line for line in lines if "lr" in line]


def test_a_start_ends_by_interval_and_begins_from_what_it_is_given(tmp_path):
    run = f"{RUN}--lr 1e-2 --output_dir {tmp_path}/run --save {tmp_path}/run/ck --load {tmp_path}/run/ck "
    other = f"{RUN}--lr LR --output_dir {tmp_path}/OTHER --load {tmp_path}/run/ck --exit_interval 1 "
    other += f"--save {tmp_path}/OTHER/ck "
    assert (
        start(
            run + "--exit_interval 2 --save_retain_interval 2",
            run + "--exit_interval 4 --save_retain_interval 2",
            other.replace("OTHER", "tuned").replace("LR", "1e-2") + "--finetune",
            other.replace("OTHER", "reset").replace("LR", "1e-2") + "--reset_iteration",
            other.replace("OTHER", "fresh").replace("LR", "1e-2") + "--no_load_optim",
            other.replace("OTHER", "kept").replace("LR", "5e-3") + "--use_checkpoint_opt_param_scheduler",
            other.replace("OTHER", "new").replace("LR", "5e-3") + "--override_opt_param_scheduler",
            f"{RUN}--lr 1e-2 --output_dir {tmp_path}/timed --exit_duration_in_mins 1e-6",
        )
        == [""] * 8
    )
    (refusal,) = start(other.replace("OTHER", "refused").replace("LR", "5e-3"))
    assert "set lr to 0.01" in refusal
    kept = sorted(path.name for path in (tmp_path / "run" / "ck").glob("step_*"))
    assert kept == ["step_0000002", "step_0000004"]
    last = {name: rows(tmp_path / name)[-1] for name in ("run", "tuned", "reset", "fresh", "kept", "new", "timed")}
    steps = dict(run=4, tuned=1, reset=1, fresh=5, kept=5, new=5, timed=1)
    assert {name: row["step"] for name, row in last.items()} == steps
    assert last["kept"]["lr"] == 2 * last["new"]["lr"]
    first = losses(tmp_path / "run")["train", 1]
    for name in ("tuned", "reset"):
        assert losses(tmp_path / name)["train", 1] == pytest.approx(last["tuned"]["loss"])
        assert losses(tmp_path / name)["train", 1] < first
    assert last["kept"]["loss"] == pytest.approx(last["fresh"]["loss"])
