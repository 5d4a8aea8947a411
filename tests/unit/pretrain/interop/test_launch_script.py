"""Scripts recorded while they run: what they would have started. `test_jail` attacks the jail."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from megaaccum import cli
from megaaccum.cli import convert
from megaaccum.cli.arguments import Source, read_source
from megaaccum.config import resolve
from megaaccum.errors import ConfigError
from megaaccum.pretrain.interop import jail
from megaaccum.pretrain.interop.launch_script import recorded, world_size
from megaaccum.pretrain.interop.load import load, read
from tests.support.jail import require_bwrap

LAUNCH = "torchrun --nproc_per_node 4 pretrain_gpt.py --num-layers 4 --hidden-size 64"


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Write a script into an empty project and go there; returns what records it."""
    require_bwrap()
    (tmp_path / ".git").mkdir()
    monkeypatch.chdir(tmp_path)

    def run(text: str, *arguments: str):
        (tmp_path / "train.sh").write_text("#!/bin/bash\n" + text)
        return recorded(["bash", "train.sh", *arguments])

    return run


def refusal(context) -> str:
    with pytest.raises(ConfigError) as caught, context:
        pass
    (text,) = caught.value.problems
    return text


@pytest.mark.parametrize(
    ("text", "ranks"),
    [
        (LAUNCH, 4),
        ("torchrun --nproc_per_node=4 --nnodes=2 pretrain_gpt.py --num-layers 4 --hidden-size 64", 8),
        ("deepspeed --num_gpus 2 --num_nodes 3 pretrain_gpt.py --num-layers 4 --hidden-size 64", 6),
        ("python3.11 -m torch.distributed.run --nproc-per-node 2 a.py --num-layers 4 --hidden-size 64", 2),
        ("exec python -m torch.distributed.run --nproc-per-node 2 pretrain_gpt.py --num-layers 4 --hidden-size 64", 2),
        ('srun -l --container-image x bash -c "python -u pretrain_gpt.py --num-layers 4 --hidden-size 64"', None),
        ("sbatch <<EOF\nsrun python pretrain_gpt.py --num-layers 4 --hidden-size 64\nEOF", None),
        ('if [ -z "$SLURM_JOB_ID" ]; then sbatch "$0"; exit; fi\npython a.py --num-layers 4 --hidden-size 64', None),
        ("set -e\nulimit -n 99999999 -l unlimited\npython a.py --num-layers 4 --hidden-size 64", None),
        ("mpirun -np 8 -x PATH python pretrain_gpt.py --num-layers 4 --hidden-size 64", None),
        ('A=(--num-layers $((2 * 2)))\nfor w in 64; do A+=(--hidden-size $w); done\npython a.py "${A[@]}"', None),
    ],
)  # fmt: skip
def test_what_a_script_would_start_is_recorded(script, text, ranks):
    with script(text) as launch:
        assert launch.argv == ["--num-layers", "4", "--hidden-size", "64"]
        assert launch.world_size == ranks


HEADER = "#SBATCH --nodes=2 -c 6\n#SBATCH --ntasks-per-node 1\n#SBATCH --gres=gpu:a100:4\n"
JOB = "torchrun --nnodes $SLURM_NNODES --nproc_per_node $SLURM_GPUS_ON_NODE a.py --num-layers $SLURM_CPUS_PER_TASK"


@pytest.mark.parametrize(
    ("text", "ranks"),
    [
        (f"{HEADER}{JOB} --hidden-size $((SLURM_NTASKS * SLURM_NTASKS_PER_NODE))", 8),
        (
            f'{HEADER}[ "$SLURM_JOB_ID" ] || exec sbatch -N3 --nodes 2 "$0" -n 9\n{JOB} --hidden-size $SLURM_NPROCS',
            8,
        ),
        (f"{HEADER}export SLURM_NNODES=5\n{JOB} --hidden-size 2", 20),
        ("torchrun --nnodes ${SLURM_NNODES:-3} a.py --nproc 1 --num-layers 6 --hidden-size 2", None),
    ],
)
def test_the_header_of_a_job_gives_it_slurms_variables(script, text, ranks):
    with script(text) as launch:
        assert launch.argv[-4:] == ["--num-layers", "6", "--hidden-size", "2"]
        assert launch.world_size == ranks


def test_arguments_python_and_files_that_it_writes(script, tmp_path):
    text = """
    cat > ds.json <<EOF
{"train_batch_size": $1}
EOF
    sed -i s/7/8/ ds.json
    echo '{"steps_per_print": 3}' > /elsewhere.json
    """
    with script(text + f"{LAUNCH} --deepspeed_config $PWD/ds.json", "7") as launch:
        assert launch.path("ds.json").read_text() == '{"train_batch_size": 8}\n'
        assert launch.path(f"{tmp_path}/ds.json").exists()
        assert launch.path("/elsewhere.json").exists()
        config, _ = read(launch=launch)
        assert config.deepspeed == {"train_batch_size": 8}
    assert not (tmp_path / "ds.json").exists()
    assert not Path("/elsewhere.json").exists()


@pytest.mark.parametrize("text", ["while :; do :; done", "while ! read answer; do :; done"])
def test_a_script_that_does_not_end_is_ended_with_a_message(script, text, monkeypatch):
    monkeypatch.setattr(jail, "SECONDS", 1)
    threads = threading.active_count()
    assert "did not end in 1 seconds" in refusal(script(text))
    assert threading.active_count() == threads


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("echo nothing; nothing-here", ["starts no training", "nothing-here"]),
        ("python tools/preprocess.py --input x", ["starts no training", "python tools/preprocess.py"]),
        (f"{LAUNCH}\n{LAUNCH} --lr 2", ["starts training 2 times"]),
        ("torchrun --num-layers 4", ["names no Python program"]),
    ],
)
def test_a_script_without_one_launch_says_so(script, text, words):
    told = refusal(script(text))
    assert all(word in told for word in words), told


def test_the_same_launch_twice_is_one(script):
    with script(f"{LAUNCH} || {LAUNCH}; {LAUNCH}") as launch:
        assert launch.program == "pretrain_gpt.py"


def test_launchers_say_how_many_ranks():
    assert world_size(["torchrun", "--nproc_per_node", "gpu"]) is None
    assert world_size(["torchrun", "--nproc_per_node=8", "--nnodes", "1:4"]) == 8
    assert world_size(["torchrun", "--nproc_per_node=8", "--nnodes=2:4"]) == 16


def test_the_command_stands_after_two_dashes():
    command = ["bash", "t.sh", "--record"]
    assert read_source(["--record", "--lr", "1", "--", *command]) == Source(None, ["--lr", "1"], command)
    assert read_source(["run.yaml", "--bf16"]) == Source("run.yaml", ["--bf16"])
    assert read_source(["--bf16", "--config", "run.yaml"]) == Source("run.yaml", ["--bf16"])
    with pytest.raises(ConfigError, match="-- bash"):
        read_source(["--record", "bash", "t.sh"])


def test_an_option_is_read_before_two_dashes_alone(capsys):
    command = ["b", "--config", "2"]
    assert read_source(["--record", "--config=1", "--lr", "2", "--", *command]) == Source("1", ["--lr", "2"], command)
    assert read_source(["--config=1", "a", "--", "b"]) == Source("1", ["a", "--", "b"])
    with pytest.raises(SystemExit):
        read_source(["--record", "--config", "--", "b"])
    assert "argument --config: expected one argument" in capsys.readouterr().err


WHOLE = (
    f"echo '{{\"steps_per_print\": 3}}' > ds.json\n{LAUNCH}"
    " --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 --micro-batch-size 1 --lr 1e-3"
    " --global-batch-size 16 --train-samples 170 --vocab-size 128 --tokenizer-type NullTokenizer --mock-data"
    " --position-embedding-type rope --use-rope-scaling --pipeline-model-parallel-size 2 --deepspeed_config ds.json"
)
"""A script that can be trained."""


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["check"], "loss_norm: microbatch"),
        (["plan", "--gpus", "4", "--gpu", "h100"], "h100"),
        (["convert"], "# Converted from train.sh, which starts 4 ranks."),
    ],
    ids=lambda given: given[0] if isinstance(given, list) else "",
)
def test_every_command_takes_a_recorded_script(script, capsys, command, words):
    with script(WHOLE):
        pass
    assert cli.main([*command, "--record", "--", "bash", "train.sh"]) == 0
    assert words in capsys.readouterr().out


def test_a_recorded_script_and_its_conversion_make_the_same_plan(script, tmp_path):
    with script(WHOLE):
        pass
    with Source(None, ["--lr", "2e-3"], ["bash", "train.sh"]).load() as loaded:
        first = resolve(loaded.checked(), world_size=4)
        text = convert.as_yaml(loaded.config, loaded.name)
    assert (first.config.optimizer.lr, first.config.run.train_iters) == (2e-3, 10)
    assert "# --train-samples 170: train_iters 10, whole batches of 16 samples." in text
    (tmp_path / "run.yaml").write_text(text)
    again = resolve(load(tmp_path / "run.yaml"), world_size=4)
    assert again.facts() == first.facts()
    assert os.listdir(tmp_path) and again.config.megatron == {"rope_scaling": True}


def test_paths_of_a_script_are_those_of_the_folder_in_which_it_starts(script, tmp_path):
    """A run that resumes from `ckpt` would begin at step 0, and write another one."""
    paths = " --save-interval 5 --save ckpt --load ckpt --data-path 0.5 a 0.5 /data/b --tensorboard-dir /tb"
    launch = WHOLE.replace(" --mock-data", paths)
    for moves, folder in (("", ""), ("mkdir -p work\ncd work\n", f"{tmp_path}/work/")):
        with script(moves + launch) as found:
            config = load(launch=found, overrides=["--tokenizer_model", "mine"])
        assert [config.run.save, config.run.load] == [f"{folder}ckpt"] * 2 and config.run.tensorboard_dir == "/tb"
        assert config.data.data_path == ["0.5", f"{folder}a", "0.5", "/data/b"]
        assert config.data.tokenizer_model == "mine", "the command line is this folder's"


# --- habits of clusters ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line",
    ["source /etc/profile", "source ~/.bashrc", ". ~/.bash_profile", "module purge; module load cuda/12.4",
     'python -c "import no_such_module_here"', 'N=$(python -c "print(4)"); [ $N = 4 ]'],
)  # fmt: skip
def test_a_script_that_prepares_its_environment_goes_on(script, line):
    with script(f"set -e\n{line}\n{LAUNCH}") as launch:
        assert launch.world_size == 4


def test_a_program_that_fails_for_another_reason_fails(script):
    assert "starts no training" in refusal(script(f'set -e\npython -c "raise SystemExit(3)"\n{LAUNCH}'))


def test_flags_with_underscores_are_training(script):
    with script("python a.py --num_layers 4 --hidden_size=64") as launch:
        assert launch.argv == ["--num_layers", "4", "--hidden_size=64"]


def test_msrun_says_how_many_ranks(script):
    with script("msrun --worker_num 8 --local_worker_num 4 pretrain_gpt.py --num-layers 4") as launch:
        assert (launch.program, launch.world_size) == ("pretrain_gpt.py", 8)


def test_what_is_hidden_from_a_script_is_said(script, tmp_path):
    told = refusal(script(f"set -e\nls /data/corpus\n{LAUNCH}"))
    assert f"It sees the system's programs and {tmp_path}: data elsewhere and the home folder are hidden." in told
