"""Seconds of collectives and messages, by latency and bandwidth, within a node and between nodes.

A transfer of S bytes takes alpha + S / beta, and a collective some time to start. A ring over K ranks takes K - 1
steps for an all-gather or a reduce-scatter, each of S / K, and twice that for an all-reduce; a tree takes 2 log2 K
latencies and moves S twice
(arXiv 1910.02054, section 7, and the notes of NVIDIA's nccl-tests on bus bandwidth). NCCL takes whichever is faster.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

START = 15e-6
"""Seconds to start a collective: NCCL's kernel 8.4e-6 (baseLatencies of its tuning.cc, protocol Simple), the rest for
the launch and the ranks' meeting."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """The links between GPUs: latencies in seconds, bandwidths in bytes per second and direction."""

    gpus_per_node: int
    """GPUs that NVLink (or the like) joins."""
    node_bandwidth: float
    """Bytes per second of one GPU's links inside the node."""
    node_latency: float
    net_bandwidth: float
    """Bytes per second of one GPU's share of the network."""
    net_latency: float
    start: float = START
    """Seconds to start a collective, beside its steps."""


@dataclass(frozen=True, slots=True)
class Group:
    """The ranks that communicate, of many layouts at once."""

    size: Any
    """Ranks."""
    per_node: Any
    """Ranks of the group on one node."""

    @staticmethod
    def strided(size: Any, stride: Any, links: Links) -> Group:
        """`size` ranks, `stride` ranks apart (tp is innermost, then cp, dp, and pp outermost)."""
        return Group(size, np.clip(links.gpus_per_node // np.maximum(stride, 1), 1, size))

    def crosses_nodes(self) -> Any:
        """Whether some of its ranks are on different nodes."""
        return np.asarray(self.size) > self.per_node


def bandwidth(group: Group, links: Links) -> Any:
    """Bytes per second of a ring over the group: between nodes, the links of all its ranks on a node together."""
    between = np.minimum(links.node_bandwidth, links.net_bandwidth * group.per_node)
    return np.where(group.crosses_nodes(), between, links.node_bandwidth)


def latency(group: Group, links: Links) -> Any:
    """Seconds of one step."""
    return np.where(group.crosses_nodes(), links.net_latency, links.node_latency)


def ring(num_bytes: Any, group: Group, links: Links) -> Any:
    """An all-gather or reduce-scatter of `num_bytes` (the whole tensor): (K - 1) alpha + (K - 1) / K * S / beta."""
    k = np.maximum(np.asarray(group.size, dtype=float), 1)
    steps = (k - 1) * (latency(group, links) + num_bytes / k / bandwidth(group, links))
    return steps + np.where(k > 1, links.start, 0.0)


def tree(num_bytes: Any, group: Group, links: Links) -> Any:
    """An all-reduce over a double tree: 2 log2(K) alpha + 2 S / beta; nothing for one rank."""
    k = np.maximum(np.asarray(group.size, dtype=float), 1)
    moved = 2 * np.log2(k) * latency(group, links) + 2 * num_bytes / bandwidth(group, links)
    return np.where(k > 1, links.start + moved, 0.0)


def hierarchical(num_bytes: Any, group: Group, links: Links) -> Any:
    """Seconds of a ring inside each node and then between nodes: fewer steps over the slow links for a group of many
    nodes."""
    nodes = np.maximum(1.0, np.asarray(group.size) / group.per_node)
    inside = Group(np.asarray(group.per_node), np.asarray(group.per_node))
    share = num_bytes / np.asarray(group.per_node)
    between = np.ceil(np.log2(nodes)) * links.net_latency + (nodes - 1) / nodes * share / links.net_bandwidth
    return ring(num_bytes, inside, links) + np.where(nodes > 1, links.start + between, 0.0)


def gather(num_bytes: Any, group: Group, links: Links) -> Any:
    """An all-gather or reduce-scatter of `num_bytes`, over a ring or node by node, whichever is faster."""
    return np.minimum(ring(num_bytes, group, links), hierarchical(num_bytes, group, links))


def all_reduce(num_bytes: Any, group: Group, links: Links) -> Any:
    """An all-reduce of `num_bytes`: a reduce-scatter and an all-gather, or a tree."""
    return np.minimum(2 * gather(num_bytes, group, links), tree(num_bytes, group, links))


def copies(group: Group, topk: int = 1, *, once: bool = False) -> tuple[Any, Any]:
    """Expected copies of a token that are sent (inside its node, to other nodes) if its `topk` experts are spread
    evenly over the ranks. once: each rank, and each other node, receives one copy at most."""
    k = np.maximum(np.asarray(group.size, dtype=float), 1)
    nodes, here = np.maximum(1.0, k / group.per_node), np.asarray(group.per_node) - 1.0
    if not once:
        return topk * here / k, topk * (1 - 1 / nodes)
    return here * (1 - (1 - 1 / k) ** topk), (nodes - 1) * (1 - (1 - 1 / nodes) ** topk)


def all_to_all(num_bytes: Any, group: Group, links: Links, sent: tuple[Any, Any] | None = None) -> Any:
    """Every rank sends `num_bytes` / K to every other, or its `num_bytes` by the numbers of copies in `sent`: what
    leaves the node passes each GPU's own network link, while the rest passes the node's."""
    inside, away = copies(group) if sent is None else sent
    slow = away * num_bytes / links.net_bandwidth + np.where(away > 0, links.net_latency, 0.0)
    alone = np.asarray(group.size) <= 1
    return np.maximum(slow, inside * num_bytes / links.node_bandwidth) + np.where(alone, 0.0, links.node_latency)


def message(num_bytes: Any, crosses_nodes: Any, links: Links) -> Any:
    """One tensor from a rank to another."""
    slow = links.net_latency + num_bytes / links.net_bandwidth
    return np.where(crosses_nodes, slow, links.node_latency + num_bytes / links.node_bandwidth)
