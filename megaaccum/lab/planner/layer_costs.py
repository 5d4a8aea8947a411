"""Measured costs of a model's layers: seconds of each pass of one micro-batch, and the bytes that it holds.

One layer of each kind is built with embedding and head, as a run builds it, and runs in pieces: the graph is cut before
and after every layer, so that forward, input gradient and weight gradients of each can be timed for themselves.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.box import SIMPLE
from rich.table import Table

from megaaccum.config import Plan, resolve
from megaaccum.config.keys import names_where
from megaaccum.config.schema import Config
from megaaccum.distributed import groups
from megaaccum.errors import ConfigError
from megaaccum.executor.wgrad import WeightGrads, install, put_aside
from megaaccum.lab.planner.calibration import time_when_done
from megaaccum.lab.planner.footprint import state_bytes
from megaaccum.lab.planner.layout_config import set_aside
from megaaccum.lab.search.profile import DENSE, EMBEDDING, EXPERTS, HEAD, PREDICTION, LayerCost, Profile
from megaaccum.platform import cpu
from megaaccum.pretrain.metrics.layer_shapes import expert_layers
from megaaccum.pretrain.model import gpt
from megaaccum.pretrain.model.gpt_forward import GptForwardStep
from megaaccum.step.loss import ForwardStepFunc
from megaaccum.units import amount

NAMES = {
    EMBEDDING: "embedding",
    DENSE: "transformer layer",
    EXPERTS: "layer with experts",
    PREDICTION: "multi-token prediction",
    HEAD: "final norm, head and loss",
}
Args = tuple[Any, ...]
COSTS = ("forward", "input_grad", "weight_grad", "activation", "deferred")


def measure(plan: Plan, *, vocab_size: int, repeats: int, data_parallel_size: int = 1) -> Profile:
    """The costs of `plan`'s layers on this process's device. Collective over the ranks that a launcher has started,
    which share matrices, sequences or experts as the plan says (without its pipeline and data parallelism).

    Args:
        plan: of the model that is to be cut into stages.
        vocab_size: tokens of the vocabulary before padding.
        repeats: micro-batches that are timed, after one that warms up; a duration is the median.
        data_parallel_size: ranks over which the sharding backend shards, for the bytes of `state`.

    Raises ConfigError if the ranks are not those that share a layer, or if recompute differs between layers.
    """
    pattern = pattern_of(plan.config)
    small = of_one_layer_each(plan.config)
    built = groups.build(small.layout, timeout_minutes=small.config.parallel.distributed_timeout_minutes)
    (chunk,) = gpt.build_chunks(small, built, vocab_size=vocab_size)
    forward_step = GptForwardStep(built, "token")
    pieces, runs = Pieces(chunk, small), []
    for _ in range(repeats + 1):
        runs.append(pieces.run(microbatch_of(small, vocab_size), forward_step))
        chunk.zero_grad(set_to_none=True)
    states = pieces.states(bytes_per_element(plan, data_parallel_size))
    recomputes = plan.config.model.recompute_granularity == "full"
    kinds = {kind: _median(kind, runs[1:], state, recomputes=recomputes) for kind, state in states.items()}
    return Profile(pattern=pattern, kinds=_with_heads(kinds))


def pattern_of(config: Config) -> str:
    """The kinds of a configuration's layers, in order."""
    layers = "".join(EXPERTS if is_moe else DENSE for is_moe in expert_layers(config.model))
    return EMBEDDING + layers + PREDICTION * (config.model.mtp_num_layers or 0) + HEAD


def of_one_layer_each(config: Config) -> Plan:
    """The plan of a model with one layer of each kind, on the ranks of this start, without recompute."""
    model, layout = config.model, config.parallel
    if model.recompute_granularity == "full" and model.recompute_method == "block":
        raise ConfigError(
            "recompute_method block recomputes some layers of a chunk, and a profile has one cost for each kind of"
            " layer: set recompute_method to uniform to measure."
        )
    tp, cp = layout.tensor_model_parallel_size, layout.context_parallel_size
    ranks = sharing_ranks(tp, cp, layout.expert_model_parallel_size, layout.expert_tensor_parallel_size or 1)
    small = copy.deepcopy(config)
    set_aside(small, set(names_where(lambda facts: facts.planned)) - _SHARING)
    small.batch.micro_batch_size, small.batch.pp_microbatches = config.batch.micro_batch_size or 1, 1
    small.model.recompute_granularity = "selective" if model.recompute_granularity == "selective" else None
    kinds = [kind for kind in (DENSE, EXPERTS) if kind in pattern_of(config)]
    small.model.num_layers = len(kinds)
    if small.model.num_experts is not None:
        small.model.moe_layer_freq = [int(kind == EXPERTS) for kind in kinds]
    small.model.mtp_num_layers = 1 if model.mtp_num_layers else None
    plan = resolve(small, world_size=ranks, own_model=True)
    # Transformer Engine's layers then leave their weight gradients, as under the schedules that profiles are for.
    return dataclasses.replace(plan, layout=dataclasses.replace(plan.layout, schedule="zb-h1"))


def sharing_ranks(tp: int, cp: int, ep: int, etp: int) -> int:
    """The ranks that share a layer. Raises ConfigError if those of this start are not as many."""
    ranks, shared = int(os.environ.get("WORLD_SIZE", "1")), math.lcm(tp * cp, ep * etp)
    if ranks != shared:
        raise ConfigError(
            f"a layer is shared by {shared} ranks (tensor_model_parallel_size {tp}, context_parallel_size {cp},"
            f" expert_model_parallel_size {ep}, expert_tensor_parallel_size {etp}), but {ranks} run: start the"
            f" measurement under torchrun with --nproc-per-node {shared}, or set these sizes to 1."
        )
    return ranks


_SHARING = frozenset(
    "tensor_model_parallel_size context_parallel_size expert_model_parallel_size expert_tensor_parallel_size"
    " sequence_parallel".split()
)
"""Keys of the ranks that share a layer."""


def microbatch_of(plan: Plan, vocab_size: int) -> dict[str, torch.Tensor]:
    shape = (plan.batch.micro_batch_size, plan.batch.seq_length)
    tokens = torch.randint(0, vocab_size, shape)
    positions = torch.arange(shape[1]).expand(shape).contiguous()
    return dict(tokens=tokens, labels=tokens.roll(-1, dims=1), position_ids=positions, loss_mask=torch.ones(shape))


def bytes_per_element(plan: Plan, ranks: int) -> float:
    """Bytes of a parameter with its gradient and optimizer state, whole ones and shards over `ranks`."""
    each = state_bytes(plan.config.sharding)
    whole = each.param + each.grad + each.optimizer
    return whole + (each.param_shard + each.grad_shard + each.optimizer_shard) / ranks


@dataclass(slots=True)
class Piece:
    """A part of one forward. start: its input, cut from what came before; None for tokens. then: the input of the next
    piece."""

    kind: str
    start: torch.Tensor | None
    output: torch.Tensor | None = None
    then: torch.Tensor | None = None
    cost: dict[str, float] = field(default_factory=dict)


class PieceTimer:
    """Times the pieces of a forward, one after another, and then their backwards. made: the pieces of this forward.
    splitting: layers that split their own backward (`install`)."""

    def __init__(self, splitting: Sequence[torch.nn.Module]) -> None:
        self._device, self._splitting = cpu.device(), splitting
        self.made: list[Piece] = []

    def begin(self, kind: str, start: torch.Tensor | None, module: torch.nn.Module) -> None:
        """Begin a piece of `kind` with the input `start`, whose weights are those of `module`."""
        piece = Piece(kind, start)
        self.made.append(piece)
        self._open = ExitStack()
        self._open.enter_context(_bytes_kept(module, piece))
        self._began = time_when_done(self._device)

    def end(self, output: torch.Tensor) -> None:
        """End the last piece, which has made `output`."""
        piece = self.made[-1]
        piece.cost["forward"] = time_when_done(self._device) - self._began
        self._open.close()
        piece.output = output

    def drop(self) -> None:
        """Forget the last piece, in which nothing has run."""
        self.made.pop()
        self._open.close()

    def backward(self, piece: Piece, grad: torch.Tensor | None) -> None:
        """Time both halves of the backward of `piece`. grad: its output's gradient; None of a loss."""
        owed, began = WeightGrads(), time_when_done(self._device)
        assert piece.output is not None
        with put_aside(owed, self._splitting):
            torch.autograd.backward(piece.output, grad)
        between = time_when_done(self._device)
        piece.cost |= {"input_grad": between - began, "deferred": float(owed.nbytes())}
        piece.output = piece.then = None
        between = time_when_done(self._device)
        owed.compute()
        piece.cost["weight_grad"] = time_when_done(self._device) - between


class Pieces:
    """Cuts the graph of `chunk` before and after each layer, from now on."""

    def __init__(self, chunk: Any, plan: Plan):
        self._chunk = chunk
        self._is_moe = expert_layers(plan.config.model)
        self._splitting = install(chunk)
        self._timer = PieceTimer(self._splitting)
        for kind, module in self._layers():
            module.register_forward_pre_hook(self._before(kind), with_kwargs=True)
            module.register_forward_hook(self._after)

    def _layers(self) -> Iterator[tuple[str, torch.nn.Module]]:
        for layer, is_moe in zip(self._chunk.decoder.layers, self._is_moe, strict=True):
            yield EXPERTS if is_moe else DENSE, layer
        if getattr(self._chunk, "mtp", None) is not None:
            yield PREDICTION, self._chunk.mtp

    def states(self, each: float) -> dict[str, float]:
        """Bytes of every kind, at `each` bytes per parameter."""
        layers = {kind: elements(module) for kind, module in self._layers()}
        embedding = elements(self._chunk.embedding)
        rest = elements(self._chunk) - embedding - sum(layers.values())
        if self._chunk.share_embeddings_and_output_weights:
            rest += self._chunk.embedding.word_embeddings.weight.numel()  # of its own, on another stage
        return {kind: n * each for kind, n in {EMBEDDING: embedding, **layers, HEAD: rest}.items()}

    def run(self, microbatch: dict[str, torch.Tensor], forward_step: ForwardStepFunc) -> list[Piece]:
        """The pieces of one micro-batch, which has gone forward and backward, with their costs."""
        self._timer = timer = PieceTimer(self._splitting)
        timer.begin(EMBEDDING, None, self._chunk)
        output, loss_func = forward_step(iter([microbatch]), self._chunk)
        loss, *_ = loss_func(output)
        timer.end(loss)
        for piece in reversed(timer.made):
            timer.backward(piece, None if piece.then is None else piece.then.grad)
        return timer.made

    def _before(self, kind: str) -> Callable[..., Any]:
        def cut(module: torch.nn.Module, args: Args, kwargs: dict[str, Any]) -> tuple[Args, dict[str, Any]]:
            hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
            hidden = self._cut(hidden, kind)
            if "hidden_states" in kwargs:
                return args, kwargs | {"hidden_states": hidden}
            return (hidden, *args[1:]), kwargs

        return cut

    def _after(self, module: torch.nn.Module, args: Args, output: Any) -> Any:
        if isinstance(output, tuple):
            return (self._cut(output[0], HEAD), *output[1:])
        return self._cut(output, HEAD)

    def _cut(self, hidden: torch.Tensor, kind: str) -> torch.Tensor:
        """Ends the piece that made `hidden` and begins the next one, of `kind`. Returns its input."""
        timer = self._timer
        if hidden is timer.made[-1].start:  # nothing has run since the last cut
            timer.drop()
        else:
            timer.end(hidden)
            hidden = timer.made[-1].then = hidden.detach().requires_grad_()
        timer.begin(kind, hidden, self._chunk)
        return hidden


def elements(module: torch.nn.Module) -> int:
    return sum(param.numel() for param in module.parameters())


def _bytes_kept(chunk: torch.nn.Module, piece: Piece) -> Any:
    """Counts in `piece` the bytes that autograd keeps of what runs inside, each storage once; weights aside."""
    seen = {each.untyped_storage().data_ptr() for each in (*chunk.parameters(), *chunk.buffers())}
    piece.cost["activation"] = 0.0

    def count(kept: torch.Tensor) -> torch.Tensor:
        storage = kept.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            piece.cost["activation"] += storage.nbytes()
        return kept

    return torch.autograd.graph.saved_tensors_hooks(count, lambda kept: kept)


# --- from pieces to kinds --------------------------------------------------------------------------------------------


def _median(kind: str, runs: list[list[Piece]], state: float, *, recomputes: bool) -> LayerCost:
    """Medians over `runs` of what the pieces of `kind` come to in one of them."""
    pieces = [[piece for piece in run if piece.kind == kind] for run in runs]
    cost = {name: statistics.median(sum(p.cost[name] for p in run) for run in pieces) for name in COSTS}
    start = pieces[0][0].start
    if recomputes and kind in (DENSE, EXPERTS) and start is not None:
        cost["input_grad"] += cost["forward"]
        cost["activation"] = float(start.nbytes)
    return LayerCost(name=NAMES[kind], state=state, **cost)


def _with_heads(kinds: dict[str, LayerCost]) -> dict[str, LayerCost]:
    """Each prediction layer with its own run of the head: with one such layer, half of what was measured for both."""
    if PREDICTION not in kinds:
        return kinds
    layer, heads = kinds[PREDICTION], kinds[HEAD]
    half = {name: getattr(heads, name) / 2 for name in COSTS}
    more = {name: getattr(layer, name) + half[name] for name in COSTS}
    return kinds | {HEAD: dataclasses.replace(heads, **half), PREDICTION: dataclasses.replace(layer, **more)}


def table(profile: Profile) -> Table:
    """A line for each kind of layer: milliseconds and bytes."""
    out = Table(box=SIMPLE)
    out.add_column("layers")
    for name in ("F ms", "I ms", "W ms", "activation", "deferred", "state"):
        out.add_column(name, justify="right")
    for kind, cost in profile.kinds.items():
        seconds = [f"{each * 1e3:.3f}" for each in (cost.forward, cost.input_grad, cost.weight_grad)]
        sizes = map(amount, (cost.activation, cost.deferred, cost.state))
        out.add_row(f"{profile.pattern.count(kind)} {kind}: {cost.name}", *seconds, *sizes)
    return out
