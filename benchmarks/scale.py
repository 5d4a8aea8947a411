"""The host's part on thousands of ranks: measured here on few, and by formula at 1,024 and 16,384.

    python -m benchmarks scale [--ranks 256] [--page]

Threads of one process are the ranks of what ranks do together over gloo, with the package's own code: agreement, and
the sum of a speculative step. What one rank does alone for all others is done for as many as it says: groups are built
in a world of that size whose collectives do nothing, rank 0 plans a checkpoint, reads a hostfile, writes a receipt.
Writes docs/benchmarks/scale.json, and the tables of docs/concepts/scale.md. --page writes the tables alone.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import os
import pickle
import platform
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from benchmarks.scale_threads import PATIENCE, Measured, agreement, message, sums

ROOT = Path(__file__).parents[1]
JSON = ROOT / "docs" / "benchmarks" / "scale.json"
PAGE = ROOT / "docs" / "concepts" / "scale.md"
BEGIN, END = "<!-- figures: python -m benchmarks scale -->\n", "<!-- end of figures -->\n"
SIZES = (1024, 16384)
TP, PP = 8, 16
LAYERS, KINDS = 126, 3
"""A model of 405 B parameters on tp 8 and pp 16; the weight and two moments of each parameter are stored."""
# --- what one rank does for all --------------------------------------------------------------------------------------


def timed(action: Callable[[], Any], times: int = 3) -> float:
    """The least seconds of some calls."""
    found = []
    for _ in range(times):
        began = time.perf_counter()
        action()
        found.append(time.perf_counter() - began)
    return min(found)


def groups_of_a_world(size: int) -> Measured:
    """Seconds in which one rank makes all its groups, in a process of its own, and how many calls that is."""
    code = f"from benchmarks import scale; scale.print_groups({size})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def print_groups(size: int) -> None:
    """Build the groups of a plan and the lanes of its pipelines in a world whose collectives do nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from megaaccum.platform import cpu

    cpu.install()
    from megaaccum.config import Plan
    from megaaccum.distributed import groups

    batch = dict(micro_batch_size=1, seq_length=8, global_batch_size=size)
    plan = Plan.of(layout=dict(tp=TP, pp=PP), batch=batch, world_size=size, hidden_size=64)
    dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
    calls = [0]
    new_group = dist.new_group

    def counted(*args: Any, **keys: Any) -> Any:
        calls[0] += 1
        return new_group(*args, **keys)

    with mock.patch.object(dist, "new_group", counted), mock.patch("torch.distributed.new_group", counted):
        began = time.perf_counter()
        built = groups.build(plan.layout, timeout_minutes=1)
        seconds = time.perf_counter() - began
        members = dist.get_process_group_ranks(built.pp)
        step = size // PP
        columns = [[rank % step for rank in range(size)], [rank // step for rank in range(size)]]
        with mock.patch.object(groups, "numbers_of_all", return_value=columns):
            began = time.perf_counter()
            pipelines = groups.all_like(members)
            for pipeline in pipelines:
                for _ in range(5):  # four over NCCL, one over gloo for the first flush
                    dist.new_group(pipeline)
        lanes = time.perf_counter() - began
    print(json.dumps({"ranks": size, "calls": calls[0], "seconds": seconds, "lane_groups": 5 * len(pipelines),
                      "lane_seconds": lanes}))  # fmt: skip


def keys_of(rank: int) -> list[str]:
    """Keys of what a rank of the model of 405 B parameters stores, one tensor-parallel part cut over data-parallel
    ranks."""
    from megaaccum.checkpoint.pieces import Cut, Piece

    hidden, wide, kv = 16384, 53248, 1024
    shapes = {
        "self_attention.linear_qkv.weight": (hidden + 2 * kv, hidden),
        "self_attention.linear_proj.weight": (hidden, hidden),
        "mlp.linear_fc1.weight": (2 * wide, hidden),
        "mlp.linear_fc2.weight": (hidden, wide),
        "self_attention.linear_qkv.layer_norm_weight": (hidden,),
        "mlp.linear_fc1.layer_norm_weight": (hidden,),
    }
    tp, stage = rank % TP, (rank // TP) % PP
    per_stage = -(-LAYERS // PP)
    found = []
    for layer in range(stage * per_stage, min(LAYERS, (stage + 1) * per_stage)):
        for name, shape in shapes.items():
            if len(shape) == 1 and tp:
                continue
            cut = Cut(math.prod(shape), 1, tp, TP) if len(shape) > 1 else Cut(shape[0])
            for kind in ("param", "exp_avg", "exp_avg_sq")[:KINDS]:
                start = 4096 * (rank // (TP * PP))
                found.append(Piece(f"decoder.layers.{layer}.{name}", kind, shape, cut, start, start + 4096).key)
    return found


def checkpoint(size: int) -> Measured:
    """Rank 0's part of a save by `size` ranks, and every rank's of a load."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import MetadataIndex

    from megaaccum.checkpoint import save_load, untrusted_reader

    states = [{key: torch.empty(4096, device="meta") for key in keys_of(rank)} for rank in range(size)]
    entries = sum(map(len, states))
    planner = save_load.plan_maker()
    began = time.perf_counter()
    plans = []
    for state in states:
        planner.set_up_planner(state, is_coordinator=True)
        plans.append(planner.create_local_plan())
    local = (time.perf_counter() - began) / size
    plan_bytes = max(len(pickle.dumps(plan)) for plan in plans[:: max(1, size // 16)])
    began = time.perf_counter()
    _, metadata = planner.create_global_plan(plans)
    merged = time.perf_counter() - began
    metadata.storage_data = {}
    for number, key in enumerate(metadata.state_dict_metadata):
        info = _StorageInfo(f"__{number % size}_0.distcp", 4096 * number, 4096)
        info.sha256 = f"{number:064x}"  # type: ignore[attr-defined]
        metadata.storage_data[MetadataIndex(key)] = info
    content = pickle.dumps(metadata)
    read = timed(lambda: untrusted_reader.listing(content, Path("scale")), 1)
    return {
        "ranks": size, "entries": entries, "plan_bytes": plan_bytes, "local_seconds": local, "merge_seconds": merged,
        "metadata_bytes": len(content), "write_seconds": timed(lambda: pickle.dump(metadata, io.BytesIO())),
        "read_seconds": read,
    }  # fmt: skip


def nested(sizes: list[int]) -> list[Measured]:
    """Rank 0's merge of the plans by torch's planner as it comes, which our save does not use."""
    import torch.distributed.checkpoint as dcp

    rows = []
    for size in sizes:
        planner, plans = dcp.DefaultSavePlanner(), []
        for rank in range(size):
            planner.set_up_planner({key: torch.empty(8, device="meta") for key in keys_of(rank)}, is_coordinator=True)
            plans.append(planner.create_local_plan())
        rows.append({"ranks": size, "seconds": timed(lambda p=planner, q=plans: p.create_global_plan(q), 1)})  # type: ignore[misc]
    return rows


def hostfile(hosts: int) -> Measured:
    from megaaccum.config import slurm
    from megaaccum.pretrain.launch.hostfile import read_hostfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "hosts"
        path.write_text("".join(f"worker-{number:05d} slots=8\n" for number in range(hosts)))
        assert len(read_hostfile(path)) == hosts
        seconds = timed(lambda: read_hostfile(path))
    nodes = f"gpu[00000-{hosts - 1:05d}]"
    listed = timed(lambda: (slurm.first_host(nodes), slurm.tasks_per_node(f"8(x{hosts})")))
    return {"hosts": hosts, "seconds": seconds, "slurm_seconds": listed}


def log(size: int) -> Measured:
    """The receipt with a record of each rank, and rank reports."""
    from megaaccum.pretrain.metrics import receipts
    from megaaccum.pretrain.metrics.ranks import RankReport, Ranks

    ranks = [receipts.this_rank("NVIDIA H200", 1.5e11) | {"rank": rank} for rank in range(size)]
    gathered = max(len(pickle.dumps(each)) for each in ranks[-8:])
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        receipt = receipts.Receipt(Path(folder), {"ranks": ranks})
        first = time.perf_counter() - began
        again = timed(receipt.write)
        num_bytes = receipt.path.stat().st_size
    numbers = dict.fromkeys(RankReport.__dataclass_fields__, 1.0)
    reports = [RankReport(**numbers | {"pp_rank": float(rank % PP)}) for rank in range(size)]
    plan = SimpleNamespace(
        config=SimpleNamespace(run=SimpleNamespace(rank_report_interval=100, straggler_threshold=0.1))
    )
    watching = Ranks(plan, SimpleNamespace(pp=SimpleNamespace(rank=lambda: 0)), [], [])  # type: ignore[arg-type]
    compared = timed(lambda: (watching.stragglers(reports), watching.alarms(reports)))
    return {
        "ranks": size, "record_bytes": gathered, "receipt_bytes": num_bytes, "first_seconds": first,
        "again_seconds": again, "report_bytes": 8 * len(numbers), "compare_seconds": compared,
    }  # fmt: skip


def store(clients: int = 32, times: int = 200) -> float:
    """Requests per second that the store of rank 0 answers, asked by some clients at once."""
    server = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=PATIENCE), wait_for_workers=False)

    def ask(number: int) -> None:
        client = dist.TCPStore("127.0.0.1", server.port, None, False, timedelta(seconds=PATIENCE))
        for at in range(times):
            client.set(f"{number}/{at}", "x" * 64)
            client.get(f"{number}/{at}")

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(clients)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    return 2 * clients * times / (time.perf_counter() - began)


# --- at thousands of ranks -------------------------------------------------------------------------------------------


def at(ranks: int, measured: Measured) -> dict[str, Measured]:
    """Messages one after another, bytes on the rank with the most, and seconds of each part at `ranks` ranks."""
    log2 = math.ceil(math.log2(ranks))
    hop, rate = measured["message_seconds"], measured["store_per_second"]
    saved, logged = measured["checkpoint"], measured["log"]
    share = ranks / saved["ranks"]
    groups = next(each for each in measured["groups"] if each["ranks"] == ranks)
    hosts = ranks // 8
    last = measured["nested"][-1]
    sum_bytes = 12 * 8
    return {
        "meet": {"messages": 2 * ranks, "bytes": 64 * 2 * ranks, "seconds": 2 * ranks / rate},
        "mesh": {"messages": 2 * ranks * ranks, "bytes": 64 * ranks * ranks, "seconds": 2 * ranks * ranks / rate},
        "groups": {"messages": groups["calls"], "bytes": 0, "seconds": groups["seconds"] + groups["lane_seconds"]},
        "agreement": {"messages": 2 * log2, "bytes": 48, "seconds": measured["agreement"]["seconds_alone"]},
        "norm": {"messages": 2 * log2, "bytes": 2 * sum_bytes, "seconds": 0.0},
        "ring": {"messages": 2 * (ranks - 1), "bytes": 2 * sum_bytes, "seconds": 2 * (ranks - 1) * hop},
        "pairs": {"messages": log2, "bytes": log2 * sum_bytes, "seconds": log2 * hop},
        "hostfile": {"messages": 0, "bytes": 21 * hosts,
                     "seconds": measured["hostfile"]["seconds"] * hosts / measured["hostfile"]["hosts"]},
        "plans": {"messages": ranks, "bytes": ranks * saved["plan_bytes"],
                  "seconds": share * saved["merge_seconds"]},
        "nested": {"messages": 0, "bytes": 0, "seconds": last["seconds"] * (ranks / last["ranks"]) ** 2},
        "metadata": {"messages": 0, "bytes": share * saved["metadata_bytes"],
                     "seconds": share * saved["write_seconds"]},
        "load": {"messages": 0, "bytes": share * saved["metadata_bytes"], "seconds": share * saved["read_seconds"]},
        "receipt": {"messages": ranks, "bytes": ranks * logged["receipt_bytes"] / logged["ranks"],
                    "seconds": ranks * logged["first_seconds"] / logged["ranks"]},
        "receipt_again": {"messages": 0, "bytes": ranks * logged["receipt_bytes"] / logged["ranks"],
                          "seconds": ranks * logged["again_seconds"] / logged["ranks"]},
        "reports": {"messages": 2 * log2, "bytes": ranks * logged["report_bytes"],
                    "seconds": ranks * logged["compare_seconds"] / logged["ranks"]},
    }  # fmt: skip


TITLES = {
    "meet": "ranks meet at rank 0's store",
    "groups": "process groups and lanes, calls of `new_group` on each rank",
    "mesh": "a gloo group of the world: requests at the store",
    "agreement": "agreement, each step: 3 numbers; seconds of the host",
    "norm": "norm, loss, reports, each step: 12 numbers",
    "ring": "sum of a speculative step by gloo's ring (not made)",
    "pairs": "the same in pairs",
    "hostfile": "hostfile",
    "plans": "checkpoint: plans to rank 0, and their merge",
    "nested": "the same with torch's table of a nested dict (not made)",
    "metadata": "checkpoint: list of tensors, written by rank 0",
    "load": "the list, read by every rank of a resume",
    "receipt": "receipt at the start, rank 0",
    "receipt_again": "receipt, each minute, rank 0",
    "reports": "reports of ranks, each `rank_report_interval` steps",
}


def tables(content: Measured) -> str:
    """The tables of the page."""
    rows = [
        "| | messages one after another | | bytes | | seconds | |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        "| ranks | " + " | ".join(f"{size:,}" for _ in range(3) for size in SIZES) + " |",
    ]
    for name, title in TITLES.items():
        each = [content["at"][str(size)][name] for size in SIZES]
        cells = [f"{one['messages']:,}" if one["messages"] else "" for one in each]
        cells += [_amount(one["bytes"]) for one in each] + [_seconds(one["seconds"]) for one in each]
        rows.append(f"| {title} | " + " | ".join(cells) + " |")
    measured = content["measured"]
    rows += ["", "| ranks as threads | gloo's ring | in pairs |", "| --- | --- | --- |"]
    rows += [f"| {one['ranks']} | {_seconds(one['ring'])} | {_seconds(one['pairs'])} |" for one in measured["sums"]]
    machine = content["machine"]
    rows += [
        "",
        f"Measured on {machine['cores']} CPU cores ({machine['processor']}), load {machine['load']:.1f} before,"
        f" torch {machine['torch']}, commit {machine['commit'][:8]}:"
        f" a message of gloo's between two threads {_seconds(measured['message_seconds'])},"
        f" {measured['store_per_second']:,.0f} requests a second at the store;"
        f" {measured['agreement']['ranks']} ranks as threads agree in {_seconds(measured['agreement']['seconds'])}"
        f" and, if every one differs, end in {_seconds(measured['agreement']['differing_seconds'])} with a message of"
        f" {measured['agreement']['longest_message']} characters; the checkpoint's plan is of"
        f" {measured['checkpoint']['ranks']} ranks with {measured['checkpoint']['entries']:,} tensors.",
    ]  # fmt: skip
    return "\n".join(rows) + "\n"


def _amount(num_bytes: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.3g} {unit}"
    return f"{num_bytes:.0f} B" if num_bytes else ""


def _seconds(seconds: float) -> str:
    if seconds >= 600:
        return f"{seconds / 60:,.0f} min"
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us" if seconds else ""


def written(page: str, content: Measured) -> str:
    """`page` with the tables of these figures between its marks."""
    head, _, rest = page.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return head + BEGIN + "\n" + tables(content) + "\n" + END + tail


@contextmanager
def progress(name: str) -> Iterator[None]:
    began = time.perf_counter()
    yield
    print(f"{name}: {time.perf_counter() - began:.1f} s", flush=True)


def measure(ranks: int) -> Measured:
    """All that is measured, with `ranks` ranks as threads."""
    found: Measured = {}
    with progress("messages, store"):
        found |= {"message_seconds": message(), "store_per_second": store()}
    with progress("agreement"):
        found["agreement"] = agreement(ranks)
    with progress("sums"):
        found["sums"] = sums([size for size in (8, 16, 32, 64, 128, 256) if size <= ranks])
    with progress("checkpoint"):
        found |= {"checkpoint": checkpoint(ranks), "nested": nested([ranks // 2, ranks])}
    with progress("hostfile, log"):
        found |= {"hostfile": hostfile(2048), "log": log(max(SIZES))}
    with progress("groups"):
        found["groups"] = [groups_of_a_world(size) for size in SIZES]
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks scale", description=__doc__)
    parser.add_argument("--ranks", type=int, default=256, help="ranks as threads (default 256)")
    parser.add_argument("--page", action="store_true", help="write the page's tables from scale.json alone")
    parser.add_argument("--json", type=Path, default=JSON, help="where the figures go")
    args = parser.parse_args(argv)
    if not args.page:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
        machine = {
            "cores": os.cpu_count(), "processor": platform.machine(), "load": os.getloadavg()[0],
            "python": platform.python_version(), "torch": torch.__version__.partition("+")[0],
            "commit": commit.stdout.strip(),
        }  # fmt: skip
        measured = measure(args.ranks)
        content = {"machine": machine, "measured": measured, "at": {str(size): at(size, measured) for size in SIZES}}
        args.json.write_text(json.dumps(content, indent=1) + "\n")
    content = json.loads(args.json.read_text())
    print(tables(content))
    if args.json == JSON:
        PAGE.write_text(written(PAGE.read_text(), content))
    return 0
