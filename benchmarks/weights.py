"""Host memory and time of weights that come in and go out: a random Llama, 4 ranks under ZeRO-3, and an export.

    python -m benchmarks weights [--gigabytes 2] [--json F]

Memory is counted in anonymous pages of a process (RssAnon), sampled while it works, above what it held before: an
import fills tensors that exist, so everything above is under way. A piece is the largest tensor's part on a rank for an
import, and that tensor for an export.

Time is compared with a plain read by the same ranks, each of its share of the bytes, and with a plain write by one
process, in turns: medians of seconds and of ratios, over 11 rounds of the import, whose reads of the disk are noisy,
and 3 of the export. Reads begin with nothing of the files in memory, as a run's do; what they take when the files are
in memory is reported beside it. Writes end when the files are on the disk.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

from megaaccum.lab.verification.testing import run_ranks

RANKS, VOCABULARY, WIDTH = 4, 32000, 1024
IMPORTS, EXPORTS = 11, 3
PER_LAYER = 4 * WIDTH * WIDTH + 3 * WIDTH * 4 * WIDTH


def write_model(folder: Path, gigabytes: float) -> int:
    """Write a random model in FP32. Returns its bytes."""
    import torch

    from megaaccum.pretrain.weights import safetensors_folder

    layers = max(int((gigabytes * 1e9 / 4 - 2 * VOCABULARY * WIDTH) / PER_LAYER), 1)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCABULARY, WIDTH),
        "model.norm.weight": (WIDTH,),
    }
    shapes["lm_head.weight"] = (VOCABULARY, WIDTH)
    for layer in range(layers):
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"model.layers.{layer}.{name}.weight"] = (WIDTH,)
        for name in "qkvo":
            shapes[f"model.layers.{layer}.self_attn.{name}_proj.weight"] = (WIDTH, WIDTH)
        for name in ("gate", "up"):
            shapes[f"model.layers.{layer}.mlp.{name}_proj.weight"] = (4 * WIDTH, WIDTH)
        shapes[f"model.layers.{layer}.mlp.down_proj.weight"] = (WIDTH, 4 * WIDTH)
    layout = {name: (shape, torch.float32) for name, shape in shapes.items()}
    config = dict(
        model_type="llama", num_hidden_layers=layers, hidden_size=WIDTH, intermediate_size=4 * WIDTH,
        num_attention_heads=8, num_key_value_heads=8, max_position_embeddings=128, rms_norm_eps=1e-5,
        vocab_size=VOCABULARY, hidden_act="silu", tie_word_embeddings=False, dtype="float32",
    )  # fmt: skip
    with safetensors_folder.written_aside(folder) as aside:
        tensors = ((name, torch.randn(shape)) for name, shape in shapes.items())
        safetensors_folder.write(aside, layout, [lambda: tensors], max_shard_bytes=10**9)
        (aside / "config.json").write_text(json.dumps(config))
    return sum(map(safetensors_folder.nbytes, layout.values()))


def anonymous() -> int:
    """Bytes of this process' anonymous pages."""
    text = Path("/proc/self/status").read_text()
    return int(text.split("RssAnon:")[1].split()[0]) * 1024


def most_bytes(work: Callable[[], Any]) -> int:
    """The most bytes of `work` above what the process held before. Sampling takes time of its own."""
    before, most, done = anonymous(), 0, threading.Event()

    def sample() -> None:
        nonlocal most
        while not done.wait(0.002):
            most = max(most, anonymous())

    thread = threading.Thread(target=sample)
    thread.start()
    work()
    done.set()
    thread.join()
    return max(most, anonymous()) - before


def read_plainly(folder: Path, part: int = 0, parts: int = 1) -> None:
    """Read part number `part` of `parts` equal ones of each file."""
    buffer = bytearray(1 << 24)
    for path in sorted(folder.glob("*.safetensors")):
        share = -(-path.stat().st_size // parts)
        with path.open("rb", buffering=0) as file:
            file.seek(part * share)
            left = share
            while left > 0 and (count := file.readinto(memoryview(buffer)[:left])):
                left -= count


def evict(folder: Path) -> None:
    """Leave nothing of the files in memory."""
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def timed(work: Callable[[], Any]) -> float:
    """Seconds of `work`."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def together(work: Callable[[], Any], folder: Path, *, cold: bool) -> float:
    """Seconds of all ranks, which begin at once and end with the last; cold: with nothing of the files in memory."""
    from torch import distributed

    if cold and distributed.get_rank() == 0:
        evict(folder)
    distributed.barrier()

    def until_all_have() -> None:
        work()
        distributed.barrier()

    return timed(until_all_have)


def imported(folder: str, run: str) -> dict[str, Any]:
    """An import on this rank, and its checkpoint for the export."""
    import torch

    from megaaccum.checkpoint.pieces import held_pieces
    from megaaccum.distributed import groups
    from megaaccum.engine import initialize
    from megaaccum.pretrain.model import gpt
    from megaaccum.pretrain.weights import foreign
    from tests.support import huggingface as hf

    plan = hf.plan_of(Path(folder), RANKS)
    built = groups.build(plan.layout, timeout_minutes=5)
    engine = initialize(plan, gpt.build_chunks(plan, built, vocab_size=VOCABULARY), groups=built)
    pieces = [tensor.nbytes for _, tensor, _ in held_pieces(engine.backend, built)]  # and makes the moments
    rank, ways = torch.distributed.get_rank(), {
        "import": lambda: foreign.load(engine, Path(folder), vocab_size=VOCABULARY),
        "read": lambda: read_plainly(Path(folder), rank, RANKS),
    }  # fmt: skip
    found = most_bytes(ways["import"])
    rounds = [
        {(way, cold): together(ways[way], Path(folder), cold=cold) for way, cold in TURNS} for _ in range(IMPORTS)
    ]
    engine.save(run)
    cold, in_memory = (median(each["import", cold] / each["read", cold] for each in rounds) for cold in (True, False))
    return {
        "seconds": median(each["import", True] for each in rounds), "times_plain": round(cold, 2),
        "times_plain_in_memory": round(in_memory, 2), "bytes": found, "piece": max(pieces),
    }  # fmt: skip


TURNS = [("read", True), ("import", True), ("read", False), ("import", False)]
"""The turns of a round: the way, and whether nothing of the files is in memory."""


def exported(folder: str, run: str, home: str) -> dict[str, Any]:
    """Exports by this process, and plain writes of the same files, in turns."""
    import torch

    from megaaccum.checkpoint.folders import latest
    from megaaccum.pretrain.weights.weights_out import Export
    from tests.support import huggingface as hf

    torch.set_num_threads(1)
    checkpoint = latest(run)
    assert checkpoint is not None
    config = hf.plan_of(Path(folder), 1).config
    export = Export(checkpoint=checkpoint, config=config, vocab_size=VOCABULARY, family="llama", dtype=torch.float32)
    rounds, plain = [], []
    for number in range(EXPORTS):
        target = Path(home) / f"out{number}"
        rounds.append(timed(lambda target=target: export.write(target, max_shard_bytes=10**9)))
        shutil.rmtree(target)
        plain.append(written_plainly(Path(folder), Path(home)))
    most = most_bytes(lambda: export.write(Path(home) / "out", max_shard_bytes=10**9))
    ratio = round(median(one / two for one, two in zip(rounds, plain, strict=True)), 2)
    return {"seconds": median(rounds), "times_plain": ratio, "bytes": most, "piece": VOCABULARY * WIDTH * 4}


def written_plainly(folder: Path, home: Path) -> float:
    """Seconds to copy the files to new ones on the disk."""
    target = home / "plain"
    target.mkdir()
    start = time.perf_counter()
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file, (target / path.name).open("wb") as copy:
            while content := file.read(1 << 24):
                copy.write(content)
            copy.flush()
            os.fsync(copy.fileno())
    seconds = time.perf_counter() - start
    shutil.rmtree(target)
    return seconds


def rows(gigabytes: float, home: Path) -> Iterator[dict[str, Any]]:
    """A row for the import and one for the export."""
    folder, run = home / "model", home / "run"
    size = write_model(folder, gigabytes)
    ranks = run_ranks(imported, RANKS, str(folder), str(run), timeout=900)
    yield row("import", size, max(ranks, key=lambda rank: rank["bytes"]))
    (found,) = run_ranks(exported, 1, str(folder), str(run), str(home), timeout=900)
    yield row("export", size, found)


def row(name: str, size: int, found: dict[str, Any]) -> dict[str, Any]:
    made = {
        "name": name,
        "model_bytes": size,
        "pieces_under_way": round(found["bytes"] / found["piece"], 2),
        "bytes_under_way": found["bytes"],
        "seconds": round(found["seconds"], 2),
    }
    return made | {key: each for key, each in found.items() if key.startswith("times_plain")}


def main(argv: list[str]) -> int:
    """Print the rows; returns 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks weights", description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as home:
        found = list(rows(args.gigabytes, Path(home)))
    for each in found:
        print(json.dumps(each))
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0
