"""Launch scripts: what is read out of them, against what bash itself would pass to the training program."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from megaaccum.interop.megatron_args import read_argument_file
from megaaccum.interop.megatron_reading import Unresolved
from megaaccum.interop.shell import ShellError, read_words

DATA = Path(__file__).parent / "data"
BASH = shutil.which("bash")

# What launchers do with their own arguments is not of interest: everything after the program is printed.
STUB = """#!{bash}
while [ $# -gt 0 ]; do case "$1" in *.py) shift; break ;; esac; shift; done
for word in "$@"; do printf '%s\\0' "$word"; done > "$RECORD"
"""


def bash_words(script: Path, tmp_path: Path) -> list[str]:
    """The flags that the script passes when bash runs it with an empty environment and launchers that only record."""
    tools, record = tmp_path / "tools", tmp_path / "record"
    tools.mkdir()
    for name in ("torchrun", "deepspeed", "python", "srun"):
        (tools / name).write_text(STUB.format(bash=BASH))
        (tools / name).chmod(0o755)
    environ = {"PATH": f"{tools}:{os.environ['PATH']}", "RECORD": str(record), "MASTER_ADDR": "node0"}
    subprocess.run([str(BASH), str(script)], env=environ, cwd=tmp_path, timeout=30, check=True, capture_output=True)
    return record.read_bytes().decode().split("\0")[:-1]


SCRIPTS = {
    "arrays": """
        A=(--lr 1e-4 --data-path "a b" 'c $d')
        A+=(--seed 1)
        B=() ; B+=("${A[@]}")
        torchrun --nnodes 2 train.py "${B[@]}" "${EMPTY[@]}" --bf16
    """,
    "unquoted arrays are split": """
        A=("--lr 1e-4" "--split '98,2,0'")
        torchrun train.py ${A[@]}
    """,
    "strings": """
        opts=" \\
            --lr 1e-4 \\
            --save out/${name:-run}_$((2 * 3))"
        opts="${opts} --bf16"
        opts+=" --seed 2"
        python -u train.py $opts
    """,
    "eval": """
        opts="--data-path 'a b'"
        cmd="deepspeed --num_gpus 2 train.py ${opts} --lr 1 &> log"
        echo ${cmd}
        eval ${cmd}
    """,
    "a command in a variable": """
        cmd="torchrun train.py --lr 1"
        $cmd --bf16 2>/dev/null
    """,
    "arithmetic": """
        A=7; B=$((A / 2)); C=$(( -A / 2 )); D=$((A % 4 ** 1)); E=$(( (A + 1) * ${B} )); F=$((A > 3 && B == 3))
        torchrun train.py --lr $A --min-lr $B --seed "$C$D" --num-layers $E --eval-iters $F
    """,
    "conditions": """
        TP=2; MODE="big"
        if [ $TP -gt 1 ]; then A="--sequence-parallel"; fi
        if [[ "$MODE" == "small" ]]; then A="$A --seed 1"; elif [[ $MODE != small && $TP -eq 2 ]]; then A="$A --seed 2"
        else A="$A --seed 3"; fi
        [ -z "$UNSET" ] && A="$A --lr 1"
        [ -n "$UNSET" ] && A="$A --lr 2"
        [ -n "$MODE" ] || A="$A --lr 3"
        if ! [ "$TP" = 2 ] || false; then A=""; fi
        if (( TP == 2 )); then A="$A --eval-iters 1"; fi
        if test "$MODE" = big -a $TP -le 2; then A="$A --eval-interval 1"; fi
        torchrun train.py $A
    """,
    "case": """
        SIZE=7B
        case $SIZE in
            1B|2B) L=8 ;;
            7*) L=32
                H=4096 ;;
            *) L=0 ;;
        esac
        torchrun train.py --num-layers $L --hidden-size $H
    """,
    "functions": """
        run() {
            local lr=$1
            torchrun train.py --lr $lr "${@}" --seed ${2:-5}
        }
        function unused { torchrun train.py --lr never; }
        run 1e-3 --bf16
    """,
    "loops that do not run": """
        while [[ $# -gt 0 ]]; do case $1 in -z) Z=$2; shift ;; esac; shift; done
        until true; do Z=1; done
        torchrun train.py --lr ${Z:-1}
    """,
    "defaults": """
        A=${A:-"x y"} ; B=${B-z} ; : ${C:=c} ; E="" ; F=${E:-e} ; G=${E-g} ; H=${A:+set} ; I=${NONE:+set}
        torchrun train.py --save "$A" --load $B --data-path $C $F "$G" $H "$I" ${J:-$B/j}
    """,
    "comments, redirections, here-documents": """
        # torchrun train.py --lr never
        cat <<EOT > config.json
        torchrun train.py --lr never  "unclosed
EOT
        torchrun train.py --lr 1 `# nothing` --seed 2 > /dev/null 2>&1   # --bf16
    """,
    "quotes": """
        torchrun train.py --a'b'"c"  --x \\"y\\" --z "a\\$b\\\\c" --e '' --t \\
            --u "two
lines" --dollar $ --tilde=a~b
    """,
    "exports and prefixes": """
        export A=1 B="2 3"
        declare -r C=4
        OMP_NUM_THREADS=1 CUDA=x torchrun train.py --lr $A --save "$B" --seed $C && echo done
    """,
    "bash -c": """
        cmd="torchrun train.py --lr 1 --bf16"
        bash -c "cd . && ${cmd}"
    """,
    "groups and pipes": """
        { A=1; }
        ( B=2; torchrun train.py --lr $A --seed $B ) | tee log
    """,
}


@pytest.mark.skipif(BASH is None, reason="bash not found: apt-get install bash")
@pytest.mark.parametrize("name", SCRIPTS)
def test_the_same_flags_as_bash(name, tmp_path):
    script = tmp_path / "run.sh"
    script.write_text(SCRIPTS[name])
    expected = bash_words(script, tmp_path)
    assert expected
    words = read_words(SCRIPTS[name])
    assert words == expected
    assert not any(isinstance(word, Unresolved) for word in words)


@pytest.mark.skipif(BASH is None, reason="bash not found: apt-get install bash")
@pytest.mark.parametrize("name", ["megatron_lm_gpt.sh", "megatron_deepspeed_gpt.sh"])
def test_the_same_flags_as_bash_in_whole_scripts(name, tmp_path):
    assert read_argument_file(DATA / name) == bash_words(DATA / name, tmp_path)


def reasons(script: str) -> list[str]:
    """Why words of the script are not known."""
    return [reason for word in read_words(script) if isinstance(word, Unresolved) for reason in word.reasons]


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("torchrun t.py --save $1", "$1 on line 1 is an argument of the script"),
        ("\ntorchrun t.py --save $HOME/x", "$HOME on line 2 is not set in the file"),
        (
            "source env.sh\ntorchrun t.py --save $X",
            "$X on line 2 is not set in the file (it sources env.sh, which is not read)",
        ),
        ("torchrun t.py --save $(pwd)/x", "$(pwd) on line 1 is known only when the script runs"),
        ("torchrun t.py --save `pwd`", "`pwd` on line 1 is known only when the script runs"),
        ("D=$(date)\ntorchrun t.py --save run-$D", "$(date) on line 1 is known only when the script runs"),
        ("A=abc\ntorchrun t.py --save ${A%c}", "${A%c} on line 2 is a form that is not followed here"),
        ("torchrun t.py --seed $((N + 1))", "$((N + 1)) on line 1 cannot be computed without running the script"),
        ("read N\ntorchrun t.py --seed $N", "$N is read on line 1 when the script runs"),
        (
            "if [ -d x ]; then A=1; else A=2; fi\ntorchrun t.py --seed $A",
            "$A depends on the condition on line 1, which only running the script tells",
        ),
        (
            "for i in 1 2; do torchrun t.py --seed $i; done",
            "$i changes in the loop on line 1",
        ),
        (
            "case $(hostname) in a) A=1 ;; esac\ntorchrun t.py --seed $A",
            "$A depends on the case on line 1, which only running the script tells",
        ),
        ("A[0]=1\ntorchrun t.py --seed $A", "$A is set element by element on line 1, which is not followed here"),
    ],
)
def test_what_only_execution_would_tell_is_named(script, reason):
    assert reasons(script) == [reason]


def test_what_a_doubtful_branch_adds_leaves_the_rest_known():
    script = (
        'A="--lr 1"\nif [ -d x ]; then A="$A --bf16"; fi\nB=(--seed 2)\n[ -d y ] && B+=(--x)\ntorchrun t.py $A ${B[@]}'
    )
    words = read_words(script)
    assert [word for word in words if not isinstance(word, Unresolved)] == ["--lr", "1", "--seed", "2"]
    assert len(reasons(script)) == 2


def test_nothing_is_executed(tmp_path):
    witness = tmp_path / "witness"
    read_words(
        f"touch {witness}; A=$(touch {witness}) B=`touch {witness}`\ntorchrun t.py --save $A$B; eval touch {witness}"
    )
    assert not witness.exists()


def test_settings_without_a_command_give_their_lists_of_flags():
    script = """
        LAUNCH="--nproc_per_node 8"
        MODEL_ARGS=" --num-layers 4 "
        DATA_ARGS=(--split 1,0,0)
        NAME=x
        ALL="$MODEL_ARGS --bf16"
    """
    assert read_words(script) == ["--split", "1,0,0", "--num-layers", "4", "--bf16"]


def test_the_training_command_is_found_among_others():
    script = "python prepare.py --input x\ntorchrun t.py --num-layers 4\npython plot.py --output y"
    assert read_words(script) == ["--num-layers", "4"]


def test_a_plain_list_knows_no_shell_operators():
    text = "# flags\n--num-layers 4 \\\n--moe-layer-freq ([0]*1+[1]*3)\r\n--split\n'1,0,0' # end\n"
    text += "--layout a|b\n--save $DIR/x"
    words = read_words(text)
    assert words[:-2] == [
        "--num-layers",
        "4",
        "--moe-layer-freq",
        "([0]*1+[1]*3)",
        "--split",
        "1,0,0",
        "--layout",
        "a|b",
    ]
    assert words[-1] == "$DIR/x"
    assert isinstance(words[-1], Unresolved)


@pytest.mark.parametrize(
    ("script", "part"),
    [
        ("", "no command"),
        ("echo hello", "no command"),
        ("--save 'x", "line 1: ' is not closed"),
        ('torchrun t.py --save "x', 'line 1: " is not closed'),
        ("A=(1 2\ntorchrun t.py --lr 1", "line 1: the array's parenthesis is not closed"),
        ("A=${B\n", "line 1: { is not closed"),
        ("if true; then A=1\n", "line 1: if has no elif or else or fi"),
        ("for i in 1; do A=1\n", "line 1: a loop has no done"),
        ("case x in a", "line 1: case has no esac"),
        ("A=1\n)\n", "line 2: unexpected )"),
        ("A=1\nfi\n", "line 2: unexpected fi"),
        ("f() {\nA=1\n", "a group has no }"),
        ("torchrun t.py --lr 1 \\\n  # comment\n  --bf16\n", "line 3 begins with a flag, --bf16"),
        ("torchrun t.py --lr 1\ntorchrun t.py --lr 2", "lines 1, 2 start training with different flags"),
        ("f() { f; }\nf", "nested more than 20 deep"),
        ("[ -d x ] &&", "ends in the middle of a command"),
    ],
)
def test_a_script_that_cannot_be_read_says_where(script, part):
    with pytest.raises(ShellError) as caught:
        read_words(script)
    assert part in str(caught.value)
