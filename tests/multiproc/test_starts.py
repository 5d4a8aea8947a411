"""How a start begins and ends: by interval, from weights alone, with another schedule, on samples that are made up."""

import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from megaaccum.errors import CheckpointError, ConfigError
from megaaccum.lab.verification.testing import run_ranks
from megaaccum.pretrain.interop.load import load
from megaaccum.pretrain.metrics import receipts
from tests.multiproc.test_train import losses
from tests.support.data_samples import counting_pair
from tests.support.jail import require_bwrap
from tests.support.whole_runs import LAUNCHER

RUN = (
    "--num_layers 2 --hidden_size 32 --num_attention_heads 4 --seq_length 32 --train_iters 6 --num_threads 1 "
    "--micro_batch_size 1 --global_batch_size 4 --attention_dropout 0 --hidden_dropout 0 --eval_iters 0 "
    "--log_interval 1 --save_interval 1 --num_workers 0 --mock_data --vocab_size 64 --keep_last 1 "
)


def started(*starts: str) -> list[str]:
    """Starts in one process after another's end; returns what each was refused with."""
    from megaaccum import config
    from megaaccum.lab import advisor
    from megaaccum.pretrain.training import loop

    refusals = []
    for flags in starts:
        try:
            words = flags.split()
            path = None if words[0].startswith("-") else words.pop(0)
            world_size = int(os.environ["WORLD_SIZE"])
            loop.train(config.resolve(load(path, words), world_size=world_size), advisor)
            refusals.append("")
        except (CheckpointError, ConfigError) as error:
            refusals.append(str(error))
    return refusals


def start(*starts: str) -> list[str]:
    return [run_ranks(started, 1, each, init=False, timeout=120)[0][0] for each in starts]


def rows(folder):
    """The log's records of steps."""
    records = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [record for record in records if record["kind"] == "train"]


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


def interrupted(folder: str) -> None:
    """A run of which rank 1 alone gets a signal, after it has begun to listen for it."""

    def interrupt() -> None:
        while getattr(signal.getsignal(signal.SIGTERM), "__name__", "") != "_remember":
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    if os.environ["RANK"] == "1":
        threading.Thread(target=interrupt, daemon=True).start()
    started(f"{RUN}--lr 1e-2 --output_dir {folder} --train_iters 2000 --exit_interval 1500 --save_interval 0")


def outcome(folder: Path) -> str:
    return json.loads((folder / "receipts" / "start_1.json").read_text())["outcome"]["text"]


def test_a_signal_to_another_rank_is_what_stopped_the_run(tmp_path):
    run_ranks(interrupted, 2, str(tmp_path), init=False, timeout=120)
    assert outcome(tmp_path).startswith("Stopped by a signal after step")


def launched_an_hour_ago(flags: str) -> list[str]:
    os.environ[receipts.LAUNCHED] = repr(time.time() - 3600)
    return started(flags)


def test_the_minutes_of_a_start_begin_with_its_launch(tmp_path):
    """A job's time limit counts imports, the build of the model and the load of a checkpoint too."""
    flags = f"{RUN}--lr 1e-2 --output_dir {tmp_path} --exit_duration_in_mins 50"
    assert run_ranks(launched_an_hour_ago, 1, flags, init=False, timeout=120) == [[""]]
    assert outcome(tmp_path) == "Stopped by exit_interval or exit_duration_in_mins after step 1"


def test_a_start_ends_after_the_step_and_not_after_an_attempt_that_is_retried(tmp_path):
    flags = f"{RUN}--lr 1e-2 --output_dir {tmp_path} --exit_interval 1 --fp16 --skipped_samples retried"
    assert start(f"{flags} --initial_loss_scale 16777216") == [""]
    skipped = [row["skipped"] for row in rows(tmp_path) if row["step"] == 1]
    assert skipped[0] and skipped[-1] is False
    assert outcome(tmp_path) == "Stopped by exit_interval or exit_duration_in_mins after step 1"


def test_a_run_whose_last_step_is_one_to_exit_after_is_done(tmp_path):
    assert start(f"{RUN}--lr 1e-2 --output_dir {tmp_path} --train_iters 2 --exit_interval 2") == [""]
    assert outcome(tmp_path) == "Done"


@pytest.mark.parametrize("key", ["no_load_optim", "reset_iteration"])
def test_what_began_with_another_count_of_updates_goes_on_with_it(tmp_path, key):
    """Adam's count is of the moments that it has, and not of the run's steps."""
    run = f"{RUN}--lr 1e-2 --output_dir {tmp_path}/"
    other = f"--load {tmp_path}/first/checkpoints --{key} --save_interval 2 --train_iters 6"
    assert (
        start(
            f"{run}first --max_steps 2",
            f"{run}whole {other}",
            f"{run}parts {other} --max_steps 2",
            f"{run}parts",
        )
        == [""] * 4
    )
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")


@pytest.mark.parametrize("key", ["finetune", "reset_iteration"])
def test_the_same_command_goes_on_with_what_began_from_another_run(tmp_path, key):
    """A start that is made again keeps the steps of the one before it, and does not begin at step 0 again."""
    run = f"{RUN}--lr 1e-2 --output_dir {tmp_path}/"
    other = f"--load {tmp_path}/first/checkpoints --{key}"
    again = f"{run}parts {other}"
    assert start(f"{run}first --max_steps 2", f"{run}whole {other}", f"{again} --exit_interval 4", again) == [""] * 4
    assert [receipt["first_step"] for receipt in receipts.read_all(tmp_path / "parts")] == [1, 5]
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")


def test_a_run_that_is_over_has_nothing_to_verify(tmp_path):
    """No sample comes after its last one."""
    run = f"{RUN}--lr 1e-2 --output_dir {tmp_path} "
    other = f"{run}--seed 5 --override data"
    assert start(f"{run}--max_steps 2", other, f"{other} --verify_at_start true --eval_interval 0") == [""] * 3
    assert receipts.read_all(tmp_path)[-1]["outcome"]["text"] == "Nothing left to do after step 6 of 6"


def test_a_text_is_sampled_after_other_data(tmp_path):
    """The samples of a resumed run begin where it does, and its first has another number."""
    tokenizer = with_tokenizer(tmp_path / "words.json", "w")
    pair = counting_pair(tmp_path / "corpus", num_documents=10)
    run = RUN.replace("--mock_data --vocab_size 64 ", f"--data_path {pair} --split 100,0,0 --lr 1e-2 {tokenizer}")
    run += f"--output_dir {tmp_path}/run --sample_every 2 "
    assert start(f"{run}--max_steps 4", f"{run}--override data --seed 7") == ["", ""]
    records = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records if record["kind"] == "sample"] == [2, 4, 6]


def with_tokenizer(path, words: str) -> str:
    """A tokenizer file of 400 numbered words."""
    import tokenizers

    model = tokenizers.models.WordLevel({f"{words}{number}": number for number in range(400)}, unk_token=f"{words}0")
    tokenizers.Tokenizer(model).save(str(path))
    return f"--tokenizer_model {path} "


def test_weights_of_another_tokenizer_are_noted(tmp_path):
    pair = counting_pair(tmp_path / "corpus", num_documents=10)
    run = RUN.replace("--mock_data --vocab_size 64 ", f"--data_path {pair} --split 100,0,0 --lr 1e-2 ")
    ours, theirs = (with_tokenizer(tmp_path / f"{words}.json", words) for words in ("ours", "theirs"))
    tuned = f"{run}--finetune --load {tmp_path}/run/checkpoints --exit_interval 1 --output_dir {tmp_path}/"
    first = f"{run}{ours}--output_dir {tmp_path}/run --exit_interval 1"
    assert start(first, f"{tuned}same {ours}", f"{tuned}other {theirs}") == ["", "", ""]
    same, other = (receipts.read_all(tmp_path / name)[0]["events"] for name in ("same", "other"))
    (note,) = [event["text"] for event in other if event["kind"] == "resume"]
    assert note.startswith("vocabulary: 400 ids (") and note.endswith(
        "another word than the one that the weights learned"
    )
    assert not [event for event in same if event["kind"] == "resume"]


def test_what_differs_is_refused_with_both_sides_unless_it_is_asked_for(tmp_path):
    first = f"{RUN}--lr 1e-2 --output_dir {tmp_path}/run --save {tmp_path}/run/ck --exit_interval 2 "
    other = f"{RUN}--lr 5e-3 --seed 5 --output_dir {tmp_path}/other --load {tmp_path}/run/ck --exit_interval 4 "
    other = other.replace("--global_batch_size 4", "--global_batch_size 8 --norm_epsilon 1e-6 --apply-layernorm-1p")
    asked = f"{other}--override lr_schedule,batch,data,model"
    again = other.replace("run/ck", "other/checkpoints").replace("--exit_interval 4", "--exit_interval 5")
    _, batch, rest, none, goes_on = start(first, other, other + "--override batch", asked, again)
    assert "global_batch_size: 4 in the checkpoint, 8 in the configuration; set global_batch_size to 4" in batch
    assert "lr: the checkpoint was made with 0.01, the configuration says 0.005; set lr to 0.01" in rest
    assert "seed: 1234 in the checkpoint, 5 here; set seed back" in rest
    assert "norm_epsilon: the checkpoint was made with 1e-05, the configuration says 1e-06; set it to 1e-05" in rest
    assert "made with {}, the configuration says {'layernorm_zero_centered_gamma': True}" in rest
    assert rest.endswith("or set override to model,lr_schedule,data")
    assert (none, goes_on) == ("", ""), "asked for once, a difference is none in the starts after it"
    steps = {row["step"]: row for row in rows(tmp_path / "other")}
    assert {step: row["consumed_samples"] for step, row in steps.items()} == {3: 16, 4: 24, 5: 32}
    (noted,) = {
        event["text"] for event in receipts.read_all(tmp_path / "other")[0]["events"] if "seed" in event["text"]
    }
    assert noted == "override data: seed: 1234 in the checkpoint, 5 here"
    assert steps[3]["lr"] == pytest.approx(5e-3 * (1 - 8 / 40)), "the new schedule, at the samples of the old one"


SCRIPT = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 --lr 1e-2 "
    "--train-iters 2 --micro-batch-size 1 --global-batch-size 4 --attention-dropout 0 --hidden-dropout 0 "
    "--eval-iters 0 --log-interval 1 --num-workers 0 --mock-data --vocab-size 64 --tokenizer-type NullTokenizer "
)


def recorded_and_flags(folder) -> tuple[int, dict, dict]:
    """Exit code and losses of `train --record` of a script, and the losses of a run by its flags."""
    from megaaccum import cli

    for name in LAUNCHER:  # the harness has made this process a rank; a user's terminal is none
        os.environ.pop(name, None)
    os.chdir(folder)
    run = ["--num_threads", "1", "--output_dir", f"{folder}/script"]  # as many as in the run by flags: sums round alike
    code = cli.main(["train", "--record", *run, "--", "bash", "train.sh"])
    return code, losses(folder / "script"), losses(folder / "flags")


def test_a_recorded_script_trains_what_its_flags_train(tmp_path):
    require_bwrap()
    (tmp_path / "train.sh").write_text(f"ARGS=({SCRIPT})\ntorchrun --nproc_per_node 1 pretrain_gpt.py ${{ARGS[@]}}\n")
    (tmp_path / "flags.txt").write_text(SCRIPT)
    assert start(f"{tmp_path}/flags.txt --num_threads 1 --output_dir {tmp_path}/flags") == [""]
    ((code, script, flags),) = run_ranks(recorded_and_flags, 1, tmp_path, init=False, timeout=120)
    assert code == 0
    assert script == flags
    assert sorted(script) == [("train", 1), ("train", 2)]
