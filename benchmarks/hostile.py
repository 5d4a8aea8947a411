"""Inputs made to break what reads them: each is read once, or refused in one message.

    python -m benchmarks hostile --seed S --inputs N [--first I] [--kinds NAME ...] [--json F]

Input I of a seed is the same on every machine: a file or a command line of one of the kinds that megaaccum reads, some
of its bytes, numbers or values replaced, or the file replaced by a pipe, a link to /dev/zero or a folder. A process of
its own reads it, with an empty home folder. What counts as broken: a traceback, a control character in a message, more
than 10 seconds of a processor or 60 in all, more than 2 GB, or a file outside of the folders that the command writes
to. Each broken input is printed with the --first that repeats it.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import os
import random
import re
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from unittest.mock import patch

import numpy as np

from benchmarks import mutations

SECONDS, MEMORY = 10.0, 2 << 30
WALL = 60.0
"""Seconds after which a reader hangs: its own processor time is held against SECONDS."""
Read = Callable[[Path], object]
"""Reads the input at a path, as a user's command would."""


@dataclass(frozen=True)
class Kind:
    """name: of the inputs. file: a good one. read: its reader. is_file: otherwise the file only holds what reaches the
    reader by another way, such as the words of a command line, one a line."""

    name: str
    file: str
    read: Read
    is_file: bool = True


@dataclass(frozen=True)
class Outcome:
    """broken: what was wrong with the reading of input `number`; empty if nothing."""

    number: int
    kind: str
    broken: str
    seconds: float
    bytes: int


# --- what reads each kind -------------------------------------------------------------------------------------------


def _command(*words: str) -> Read:
    """A command of megaaccum; FILE among its words is the input, FOLDER its folder, LINES are the input's lines."""

    def read(path: Path) -> int:
        from megaaccum import cli

        argv: list[str] = []
        for word in words:
            lines = os.fsdecode(path.read_bytes()).replace("\0", "").split("\n") if word == "LINES" else [word]
            files = {"FILE": str(path), "FOLDER": str(path.parent)}
            argv += [files.get(line, line) if word != "LINES" else line for line in lines]
        return cli.main(argv)

    return read


def _index(path: Path) -> None:
    from megaaccum.pretrain.data.indexed import check_ids, check_tables, open_pair

    pair = open_pair(path.with_suffix(""))
    check_tables(pair)
    check_ids(pair, 100)


def _metadata(path: Path) -> None:
    """The seal of a forged .metadata is right, as its forger makes it."""
    from megaaccum.checkpoint.untrusted_reader import CheckpointReader

    content = path.read_bytes() if path.is_file() and path.stat().st_size else b""
    reader = CheckpointReader(path.parent, hashlib.sha256(content).hexdigest())
    reader.check_files(reader.stored)
    reader.read(reader.stored)


def _state(path: Path) -> None:
    from megaaccum.checkpoint import folders

    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    with contextlib.suppress(ValueError, RecursionError, AttributeError):
        state = json.loads(text)
        state["sha256"] = folders._seal({name: each for name, each in state.items() if name != "sha256"})
        path.write_text(json.dumps(state))
    folders.read_progress(path.parent)


def _report(path: Path) -> int:
    from megaaccum import cli

    folder = path.parent.parent if path.parent.name == "receipts" else path.parent
    return cli.main(["report", str(folder), "--output", str(folder / "page.html")])


def _hostfile(path: Path) -> None:
    from megaaccum.pretrain.launch.hostfile import read_hostfile

    for host in read_hostfile(path):
        assert re.fullmatch(r"[\w.:-]+", host, re.ASCII) and not host.startswith("-"), f"a host is named {host!r}"


def _tokenizer(kind: str | None) -> Read:
    def read(path: Path) -> None:
        from megaaccum.pretrain.data.vocabulary import read_gpt2_vocabulary, read_vocabulary

        read_gpt2_vocabulary(str(path)) if kind == "GPT2BPETokenizer" else read_vocabulary(path, kind)

    return read


def _weights(path: Path) -> None:
    from megaaccum.pretrain.weights.safetensors_folder import Weights

    Weights(path.parent).altered()


def _lock(path: Path) -> None:
    from megaaccum.pretrain.launch.lock import claim

    with contextlib.suppress(OSError):  # a start makes a message of it
        claim(path.parent)


def _sample_order(path: Path) -> None:
    from megaaccum.pretrain.data.dataset import check_orders

    check_orders(path.parent)


def _records(path: Path) -> None:
    from megaaccum.pretrain.interop import jail

    with tempfile.TemporaryDirectory(dir=path.parent) as left, path.open("rb") as archive:
        jail._unpack(archive, Path(left))
        assert not any(each.is_symlink() or not (each.is_file() or each.is_dir()) for each in Path(left).rglob("*"))


def _documents(path: Path) -> int:
    from megaaccum import cli

    tokenizer = path.parent / "tokenizer.json"
    return cli.main(
        ["data", "build", "--input", str(path), "--tokenizer", str(tokenizer), "--output", str(path.parent / "built")]
    )


_FLAGS = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32"
    " --micro-batch-size 1 --global-batch-size 16 --lr 1e-3 --train-iters 10 --vocab-size 128 --tokenizer-type"
    " NullTokenizer --mock-data --position-embedding-type rope --pipeline-model-parallel-size 2"
)
KINDS = (
    Kind("YAML", "run.yaml", _command("check", "FILE", "--world-size", "4")),
    Kind("keys", "keys.txt", _command("check", "run.yaml", "LINES"), is_file=False),
    Kind("numbers", "keys.txt", _command("check", "run.yaml", "--world-size", "4", "LINES"), is_file=False),
    Kind("flags", "flags.txt", _command("check", "LINES"), is_file=False),
    Kind("argument file", "run.args", _command("check", "FILE")),
    Kind("Megatron's YAML", "megatron.yml", _command("check", "--yaml-cfg", "FILE", "--micro-batch-size", "1")),
    Kind("DeepSpeed JSON", "ds.json", _command("check", "run.yaml", "--world-size", "4", "--deepspeed", "FILE")),
    Kind("data paths", "paths.json", _command("check", *_FLAGS.split(), "--per-split-data-args-path", "FILE")),
    Kind("CSV", "table.csv", _command("schedule", "--pp", "2", "-m", "4", "--schedule", "FILE")),
    Kind("profile", "profile.json", _command("schedule", "--pp", "2", "-m", "4", "--schedule", "1f1b", "--profile",
                                              "FILE", "--cut")),
    Kind("hardware", "gpus.yaml", _command("plan", "run.yaml", "--gpus", "4", "--gpu", "mine", "--hardware", "FILE")),
    Kind("index", "corpus.idx", _index),
    Kind("metadata", "checkpoint/.metadata", _metadata),
    Kind("state.json", "checkpoint/state.json", _state),
    Kind("log.jsonl", "run/log.jsonl", _report),
    Kind("receipt", "run/receipts/start_1.json", _report),
    Kind("hostfile", "hosts", _hostfile),
    Kind("tokenizer.json", "tokenizer.json", _tokenizer(None)),
    Kind("vocab.json", "vocab.json", _tokenizer("GPT2BPETokenizer")),
    Kind("tiktoken", "tiktoken.json", _tokenizer("TikTokenizer")),
    Kind("documents", "texts.jsonl", _documents),
    Kind("records", "records.tar", _records, is_file=False),
    Kind("config.json", "model/config.json", _command("config", "--from-hf", "FOLDER")),
    Kind("index of weights", "model/model.safetensors.index.json", _weights),
    Kind("weights", "model/a.safetensors", _weights),
    Kind("digests of weights", "model/tensors.sha256", _weights),
    Kind("lock", "locked/.megaaccum.lock", _lock),
    Kind("order of samples", "orders/x-GPTDataset-train-shuffle_index.npy", _sample_order),
)  # fmt: skip


# --- good inputs ----------------------------------------------------------------------------------------------------


def _make_good(folder: Path) -> None:
    """A good input of every kind, and the files that they name."""
    import tarfile

    import torch
    import torch.distributed.checkpoint as dcp
    from tokenizers import Tokenizer, models

    from megaaccum.checkpoint.folders import Progress, write_progress
    from megaaccum.checkpoint.save_load import Writer
    from megaaccum.pretrain.data.indexed import PairWriter
    from tests.unit.cli.test_report import make_run

    repository = Path(__file__).parent.parent
    shutil.copy(repository / "configs" / "tiny_cpu.yaml", folder / "run.yaml")
    flags = _FLAGS.split(" --")
    texts = {
        "keys.txt": "--lr\n1e-3\n--train_iters=20\n--micro_batch_size\n2\n--num_layers\n8\n--data_path\nembedded",
        "flags.txt": "\n".join(_FLAGS.split()),
        "run.args": "\n".join(["# flags", flags[0], *("--" + flag for flag in flags[1:])]),
        "megatron.yml": "language_model:\n  num_layers: 4\n  hidden_size: 64\n  num_attention_heads: 4\n"
        "model_parallel:\n  pipeline_model_parallel_size: 2\nlr: 1.0e-3\nseq_length: 32\ntrain_iters: 10\n",
        "ds.json": json.dumps({
            "train_batch_size": 64, "steps_per_print": 3, "zero_optimization": {"stage": 3, "overlap_comm": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 6e-3, "betas": [0.9, 0.95]}}, "gradient_clipping": 1.0,
        }),
        "paths.json": json.dumps({"train": ["1", "corpus"], "valid": ["corpus"], "test": None}),
        "table.csv": "0F0,0F1,0F2,0B0,0F3,0B1,0B2,0B3\n1F0,1B0,1F1,1B1,1F2,1B2,1F3,1B3\n",
        "profile.json": json.dumps({
            "pattern": "E" + "D" * 6 + "H",
            "kinds": {k: {"forward": 1.0, "input_grad": 1.0, "weight_grad": 1.0} for k in "EDH"},
        }),
        "gpus.yaml": "mine:\n  like: h100\n",
        "hosts": "# hosts\nworker-1 slots=8\n10.0.0.2 slots=8\n",
        "vocab.json": json.dumps({"a": 0, "b": 1, "<|endoftext|>": 2}),
        "tiktoken.json": json.dumps([{"rank": 0, "token_bytes": "YQ==", "token_str": "a"}]),
        "texts.jsonl": "".join(json.dumps({"text": f"a b {i}"}) + "\n" for i in range(20)),
    }  # fmt: skip
    for name, text in texts.items():
        (folder / name).write_text(text)
    vocabulary = {"<|endoftext|>": 0, "a": 1, "b": 2, "?": 3}
    Tokenizer(models.WordLevel(vocabulary, unk_token="?")).save(str(folder / "tokenizer.json"))
    with PairWriter(folder / "corpus", np.dtype(np.uint16)) as writer:
        writer.add(np.arange(40, dtype=np.uint16), [10, 30])
    (folder / "checkpoint").mkdir()
    with contextlib.redirect_stderr(io.StringIO()):
        dcp.save({"layer.weight": torch.ones(4)}, storage_writer=Writer(folder / "checkpoint"), no_dist=True)
    write_progress(folder / "checkpoint", Progress(
        step=3, consumed_samples=48, lr_schedule={"num_steps": 3}, data={"spans": []}, shape={"layers": 4},
    ))  # fmt: skip
    make_run(folder / "run")
    _make_model(folder / "model")
    for name in ("locked", "orders"):
        (folder / name).mkdir()
    (folder / "locked" / ".megaaccum.lock").write_text(json.dumps({"host": "x", "pid": "7", "start": "now", "job": ""}))
    np.save(folder / "orders" / "x-GPTDataset-train-shuffle_index.npy", np.arange(80, dtype=np.uint32))
    with tarfile.open(folder / "records.tar", "w") as archive:
        archive.add(folder / "hosts", arcname="megaaccum/records/1")


def _make_model(folder: Path) -> None:
    """A model's folder in Hugging Face's format, of two files of weights and with digests."""
    import torch
    from safetensors.torch import save_file

    from tests.support.huggingface import MODELS

    folder.mkdir()
    keys = MODELS["llama"][1] | {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "rms_norm_eps": 1e-5}
    (folder / "config.json").write_text(json.dumps(keys))
    digests = []
    for file, name in (("a.safetensors", "a"), ("b.safetensors", "b")):
        tensor = torch.arange(6.0).view(2, 3)
        save_file({name: tensor}, folder / file)
        digests.append(f"{hashlib.sha256(tensor.numpy().tobytes()).hexdigest()}  {file}  {name}\n")
    (folder / "tensors.sha256").write_text("".join(digests))
    listed = {"metadata": {"total_size": 48}, "weight_map": {"a": "a.safetensors", "b": "b.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(listed))


# --- inputs ---------------------------------------------------------------------------------------------------------


@cache
def _numeric_keys() -> list[str]:
    from megaaccum.config.keys import all_keys

    return [key.name for key in all_keys().values() if re.search(r"\b(int|float)\b", str(key.annotation))]


def _write_input(path: Path, content: bytes, draw: random.Random, kind: Kind) -> None:
    """Put a mutated input, or rarely another thing than a file, at `path`."""
    path.unlink()
    if kind.name == "numbers":
        path.write_text(
            "\n".join(f"--{draw.choice(_numeric_keys())}={draw.choice(mutations.NUMBERS)}" for _ in range(2))
        )
        return
    other = draw.random() if kind.is_file else draw.uniform(0.03, 1)
    if other < 0.01:
        os.mkfifo(path)
    elif other < 0.02:
        path.symlink_to(draw.choice(("/dev/zero", "/proc/self/mem", path, "/nowhere")))
    elif other < 0.03:
        path.mkdir()
    elif other < 0.06:
        path.write_text(draw.choice(mutations.MANY))
    elif other < 0.08:
        path.write_bytes(mutations.token(draw))
    else:
        path.write_bytes(mutations.mutate(content, draw))


# --- the campaign ---------------------------------------------------------------------------------------------------


def attempt(number: int, seed: int, kinds: tuple[Kind, ...], good: Path, scratch: Path) -> Outcome:
    """Read input `number` of a seed in a process of its own."""
    draw = random.Random(f"{seed}/{number}")
    kind = kinds[number % len(kinds)]
    here, home = scratch / "here", scratch / "home"
    shutil.copytree(good, here)
    home.mkdir()
    path = here / kind.file
    _write_input(path, path.read_bytes(), draw, kind)
    before = {each.name for each in scratch.iterdir()}
    start, ours, theirs = time.monotonic(), *os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(ours)
        _child(kind, path, here, home, theirs)
    os.close(theirs)
    broken, told = "", b""
    while time.monotonic() - start < WALL:
        if select.select([ours], [], [], 0.1)[0]:
            part = os.read(ours, 1 << 16)
            told += part
            if not part:
                break
    else:
        broken = f"no end within {WALL:.0f} seconds"
        os.kill(pid, signal.SIGKILL)
    os.close(ours)
    _, status, used = os.wait4(pid, 0)
    outside = {each.name for each in scratch.iterdir()} - before | {each.name for each in home.iterdir()}
    if not broken and status:
        broken = f"ended with status {status}"
    if told:
        broken = told.decode(errors="replace")
    taken = used.ru_utime + used.ru_stime
    if not broken and (taken > SECONDS or used.ru_maxrss << 10 > MEMORY):
        broken = f"took {taken:.1f} s and {used.ru_maxrss >> 10} MB"
    if outside:
        broken += f" wrote {', '.join(sorted(outside))} outside"
    shutil.rmtree(here)
    shutil.rmtree(home)
    return Outcome(number, kind.name, broken, taken, used.ru_maxrss << 10)


def _child(kind: Kind, path: Path, here: Path, home: Path, pipe: int) -> None:
    """Read the input, and write to the pipe what is wrong with that."""
    from megaaccum.errors import MegaaccumError

    size = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, size + MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.chdir(here)
    os.environ["HOME"] = str(home)
    null = os.open(os.devnull, os.O_RDWR)
    for handle in (0, 1, 2):
        os.dup2(null, handle)
    output, broken = io.StringIO(), ""
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output), patch.object(sys, "argv", ["x"]):
            kind.read(path)
    except MegaaccumError as error:
        output.write(str(error))
    except SystemExit as error:
        broken = "" if error.code in (0, 1, 2) else f"SystemExit {error.code}"
    except BaseException as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        ours = [each for each in traceback.extract_tb(error.__traceback__) if "megaaccum" in each.filename]
        at = ours[-1] if ours else last
        broken = f"{type(error).__name__}: {str(error)[:200]} at {Path(at.filename).name}:{at.lineno}"
    if found := re.search(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e]", output.getvalue()):
        at = found.start()
        broken += f" control character in {output.getvalue()[max(0, at - 60) : at + 20]!r}"
    os.write(pipe, broken.encode(errors="replace")[:4000])
    os._exit(0)


@contextlib.contextmanager
def _good_inputs() -> Iterator[tuple[Path, Path]]:
    """A folder of good inputs, and one for attempts, after everything that readers import has been imported."""
    from megaaccum import cli as _cli  # noqa: F401
    from megaaccum.lab.planner import search as _search  # noqa: F401
    from megaaccum.pretrain.data import build as _build  # noqa: F401
    from megaaccum.pretrain.interop.megatron import parser
    from megaaccum.pretrain.metrics.report import page as _page  # noqa: F401

    parser.defaults()
    parser.model_fields()
    with tempfile.TemporaryDirectory(prefix="megaaccum-hostile-") as scratch:
        good, tries = Path(scratch, "good"), Path(scratch, "tries")
        good.mkdir()
        tries.mkdir()
        with contextlib.redirect_stdout(io.StringIO()):
            _make_good(good)
        yield good, tries


def run(seed: int, numbers: range, kinds: tuple[Kind, ...] = KINDS) -> list[Outcome]:
    """Read these inputs of a seed, and print the broken ones."""
    outcomes = []
    with _good_inputs() as (good, tries):
        for number in numbers:
            outcome = attempt(number, seed, kinds, good, tries)
            outcomes.append(outcome)
            if outcome.broken:
                print(f"--seed {seed} --first {number} --inputs 1: {outcome.kind}: {outcome.broken}", flush=True)
    return outcomes


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks hostile", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--inputs", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="number of the first input")
    parser.add_argument("--kinds", nargs="+", metavar="NAME", choices=[kind.name for kind in KINDS])
    parser.add_argument("--json", type=Path, help="also write the outcomes here")
    args = parser.parse_args(argv)
    kinds = tuple(kind for kind in KINDS if args.kinds is None or kind.name in args.kinds)
    outcomes = run(args.seed, range(args.first, args.first + args.inputs), kinds)
    broken = Counter(each.kind for each in outcomes if each.broken)
    print(
        f"{len(outcomes)} inputs of {len(kinds)} kinds: {sum(broken.values())} broken {dict(broken)}, the slowest took"
        f" {max(each.seconds for each in outcomes):.1f} s, the largest {max(each.bytes for each in outcomes) >> 20} MB"
    )
    if args.json:
        args.json.write_text(json.dumps([asdict(each) for each in outcomes], indent=1) + "\n")
    return int(bool(broken))


if __name__ == "__main__":
    raise SystemExit(main())
