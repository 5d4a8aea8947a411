"""The numbers of docs/concepts/arithmetic.md, computed again."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

from megaaccum.config.derive import derive
from megaaccum.lab.planner import comm
from megaaccum.lab.planner.comm import Group, Links
from megaaccum.lab.planner.footprint import StateBytes, state_bytes
from megaaccum.observe.noise_scale import estimate
from tests.support.check import run
from tests.support.configs import make

PAGE = (Path(__file__).parents[4] / "docs" / "concepts" / "arithmetic.md").read_text(encoding="utf-8")
SIZE, SPEED = 140e9, 50e9


def rows_after(text: str) -> list[list[str]]:
    """The cells of the first table after `text`, its head left out."""
    lines = PAGE[PAGE.index(text) :].splitlines()
    first = next(index for index, line in enumerate(lines) if line.startswith("| ---"))
    table = iter(lines[first + 1 :])
    rows = []
    while (line := next(table, "")).startswith("|"):
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def ring(ranks: int) -> float:
    """Seconds of the planner's ring all-reduce, by bandwidth alone."""
    speeds = dict(node_bandwidth=SPEED, node_latency=0.0, net_bandwidth=SPEED, net_latency=0.0, start=0.0)
    links = Links(gpus_per_node=1, **speeds)
    return 2 * float(comm.ring(SIZE, Group(ranks, 1), links))


def server(ranks: int, speed: float = SPEED) -> float:
    """Seconds in which a parameter server takes in every worker's gradient."""
    return ranks * SIZE / speed


def test_a_parameter_server_beside_a_ring() -> None:
    assert SIZE == 70e9 * 2
    for workers, *cells in rows_after("At B = 50 GB/s"):
        k = int(workers)
        assert [f"{value:,.1f}" for value in (server(k), ring(k), server(k) / ring(k))] == cells


def test_the_break_even() -> None:
    lines = [line for line in PAGE.splitlines() if line.startswith(("| b |", "| break-even"))]
    for b, told in zip(*(map(float, re.findall(r"[\d.]+", line)) for line in lines), strict=True):
        found = b + math.sqrt(b * b - 2 * b)
        assert round(found, 1) == told
        for k in (round(found) - 1, round(found) + 1):  # on both sides of it
            assert k < 2 or (server(k, b * SPEED) < ring(k)) == (k < found and b > 2)
    assert all(server(k) > ring(k) for k in range(2, 100))  # never with the workers' own link


def kept(backend: str, sync: str, stage: int = 3) -> StateBytes:
    """Bytes per parameter, of BF16 parameters with FP32 sums."""
    config = make(bf16=True, grad_accum_dtype="fp32")
    derive(config, [])
    return state_bytes(replace(config.sharding, backend=backend, sync=sync, zero_stage=stage))


def test_what_each_sync_mode_keeps_of_whole_gradients() -> None:
    mine, ranks = 70e9 / (8 * 4), 16
    whole = [kept("deepspeed", "resident", stage) for stage in (1, 2, 3)]
    whole += [kept("fsdp2", "resident"), kept("megatron", "resident")]
    assert {each.grad * mine / 1e9 for each in whole} == {8.75}
    zero3 = whole[2]
    assert f"{(zero3.grad + zero3.grad_shard / ranks) * mine / 1e9:.2f}" == "9.30"
    for backend in ("deepspeed", "fsdp2"):
        streamed = kept(backend, "streaming")
        assert streamed.grad == 0 and streamed.unit_grad > 0
        assert f"{streamed.grad_shard / ranks * mine / 1e9:.2f}" == "0.55"
    assert kept("ddp", "resident").grad * mine / 1e9 == 17.5
    cells = [row[2] for row in rows_after("## 140 GB of gradients")]
    assert cells == ["8.75 GB (9.30 GB)", "0.55 GB and a layer", "0.55 GB and a layer", "17.5 GB"]


def test_the_tokens_of_a_step() -> None:
    words = "--num_layers 2 --hidden_size 64 --num_attention_heads 4 --seq_length 2048 --vocab_size 100 --lr 1e-3"
    words += " --train_iters 1 --micro_batch_size 4 --grad_accum_steps 16"
    text = run(None, words.split(), world_size=8)
    for line in re.findall(r"^(?:global_batch_size|tokens_per_step) = .*", PAGE, re.MULTILINE):
        assert line in text


def test_the_noise_scale_of_the_example() -> None:
    noise, signal = estimate(2.0, 5.0 / 16, 1 / 16)
    assert (round(signal, 9), round(noise * 16, 9), f"{noise * 16 / signal:.2f}") == (1.8, 3.2, "1.78")
