"""Host memory and time of weights that come in and go out: a random Llama, 4 ranks under ZeRO-3, and an export.

    python -m benchmarks weights [--gigabytes 2] [--json F]

Memory is counted in anonymous pages of a process (RssAnon), sampled while it works, above what it held before: an
import fills tensors that exist, so everything above is under way. A piece is the largest tensor's part on a rank for an
import, and that tensor for an export. Time is compared with a plain read, or write, of the same files.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from megaaccum.lab.verification.testing import run_ranks

RANKS, VOCABULARY, WIDTH = 4, 32000, 1024
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
        safetensors_folder.write(aside, layout, tensors, max_shard_bytes=10**9)
        (aside / "config.json").write_text(json.dumps(config))
    return sum(map(safetensors_folder.nbytes, layout.values()))


def anonymous() -> int:
    """Bytes of this process' anonymous pages."""
    text = Path("/proc/self/status").read_text()
    return int(text.split("RssAnon:")[1].split()[0]) * 1024


def measured(work: Callable[[], Any]) -> dict[str, float]:
    """Seconds of `work`, and the most bytes above what the process held before."""
    before, most, done = anonymous(), 0, threading.Event()

    def sample() -> None:
        nonlocal most
        while not done.wait(0.002):
            most = max(most, anonymous())

    thread = threading.Thread(target=sample)
    thread.start()
    start = time.perf_counter()
    work()
    seconds = time.perf_counter() - start
    done.set()
    thread.join()
    return {"seconds": seconds, "bytes": max(most, anonymous()) - before}


def read_plainly(folder: Path) -> None:
    buffer = bytearray(1 << 24)
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def imported(folder: str, run: str) -> dict[str, Any]:
    """An import on this rank, and its checkpoint for the export."""
    from megaaccum.checkpoint.pieces import held_pieces
    from megaaccum.distributed import groups
    from megaaccum.engine import initialize
    from megaaccum.model import gpt
    from megaaccum.pretrain.weights import weights_in
    from tests.support import huggingface as hf

    plan = hf.plan_of(Path(folder), RANKS)
    built = groups.build(plan.layout, timeout_minutes=5)
    engine = initialize(plan, gpt.build_chunks(plan, built, vocab_size=VOCABULARY), groups=built)
    pieces = [tensor.nbytes for _, tensor, _ in held_pieces(engine.backend, built)]  # and makes the moments
    found = measured(lambda: weights_in.load(engine, Path(folder), vocab_size=VOCABULARY))
    engine.save(run)
    return found | {"piece": max(pieces)}


def exported(folder: str, run: str, target: str) -> dict[str, Any]:
    """An export by this process."""
    import torch

    from megaaccum.checkpoint.folders import latest
    from megaaccum.pretrain.weights.weights_out import Export
    from tests.support import huggingface as hf

    checkpoint = latest(run)
    assert checkpoint is not None
    config = hf.plan_of(Path(folder), 1).config
    export = Export(
        checkpoint=checkpoint, config=config, vocab_size=VOCABULARY, family="llama", dtype=torch.float32,
        max_shard_bytes=10**9,
    )  # fmt: skip
    return measured(lambda: export.write(Path(target))) | {"piece": VOCABULARY * WIDTH * 4}


def written_plainly(folder: Path, target: Path) -> float:
    """Seconds to copy the files to new ones on the disk."""
    import os

    start = time.perf_counter()
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file, (target / path.name).open("wb") as copy:
            while content := file.read(1 << 24):
                copy.write(content)
            copy.flush()
            os.fsync(copy.fileno())
    return time.perf_counter() - start


def rows(gigabytes: float, home: Path) -> Iterator[dict[str, Any]]:
    """A row for the import and one for the export."""
    folder, run, out, plain = home / "model", home / "run", home / "out", home / "plain"
    size = write_model(folder, gigabytes)
    plain.mkdir()
    start = time.perf_counter()
    read_plainly(folder)
    reading = time.perf_counter() - start
    ranks = run_ranks(imported, RANKS, str(folder), str(run), timeout=900)
    worst = max(ranks, key=lambda rank: rank["bytes"])
    yield row("import", size, worst, seconds=max(rank["seconds"] for rank in ranks), plain=reading)
    writing = written_plainly(folder, plain)
    (found,) = run_ranks(exported, 1, str(folder), str(run), str(out), timeout=900)
    yield row("export", size, found, seconds=found["seconds"], plain=writing)


def row(name: str, size: int, found: dict[str, Any], *, seconds: float, plain: float) -> dict[str, Any]:
    return {
        "name": name,
        "model_bytes": size,
        "pieces_under_way": round(found["bytes"] / found["piece"], 2),
        "bytes_under_way": found["bytes"],
        "seconds": round(seconds, 2),
        "times_plain": round(seconds / plain, 2),
    }


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
