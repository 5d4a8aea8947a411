"""Layers whose sums do not depend on the number of ranks of tensor and context parallelism (`reproducible: layout`).

Every matrix is cut into as many blocks as `reproducible_tensor_blocks` says, of columns of a layer's output
(column-parallel) or of its input (row-parallel), and a tp rank has a run of them. A product is made block by block, so
its shapes are the same whatever tp is. A sum over blocks (the output of a row-parallel layer, the input's gradient of a
column-parallel one, the exponentials of a softmax over the vocabulary) is made in the order of a binary tree: first
those of a rank, then the ranks gather each other's sums and add them alike. Attention runs for the heads of a block at
a time, with the random numbers of the tp rank that it would be. Experts are cut as dense matrices are.

Every sequence is cut into as many blocks as `reproducible_context_blocks` says, each of one piece from either half, as
Megatron's zigzag cuts it over cp ranks, and a cp rank has a run of them. What has parameters or draws random numbers
runs for one block at a time, in the shapes and with the random numbers that it has on a rank with one block, and each
block's gradient is a leaf of its own in the tree of micro-batches (sharding/sum_tree.py). Queries of a block meet the
keys and values of the whole sequence, whose gradients are summed over blocks in the order of a binary tree. Balancing
losses of experts count the tokens of the whole sequence.

Megatron's layers have no types: `Any`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from megatron.core.transformer.moe import router as router_module
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import compute_routing_scores_for_aux_loss

from megaaccum.distributed import rng
from megaaccum.distributed.groups import Seat
from megaaccum.errors import ConfigError
from megaaccum.executor import wgrad
from megaaccum.model.attention import causal_mask, whole_sequence
from megaaccum.model.torch_chunk import layers_of
from megaaccum.platform.replacing import replaced

_OTHER_LAYERS = "needs Megatron's local layers: set transformer_impl to local, and attention_backend to auto or fused"


def in_pairs(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum of `parts` in the order of a binary tree: the first half, the second half, and so on."""
    half = len(parts) // 2
    return in_pairs(parts[:half]) + in_pairs(parts[half:]) if half else parts[0]


def sum_over_ranks(part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The sum of all ranks' `part` in the order of the tree. Each gathers the others' parts and adds: the order of an
    all-reduce is its library's."""
    if group.size() == 1:
        return part
    gathered = part.new_empty(group.size(), *part.shape)
    dist.all_gather_into_tensor(gathered.view(-1), part.contiguous().view(-1), group=group)
    return in_pairs(gathered.unbind())


@dataclass(frozen=True, slots=True)
class _Blocks:
    """The blocks of a layer on this rank. axis: that of the weight which is cut. runs: of a block along it, two where a
    matrix is [gate; up]."""

    weight: torch.nn.Parameter
    axis: int
    count: int
    runs: int
    group: dist.ProcessGroup
    source: int

    def cut(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """All runs of the columns of `tensor`, each alone in memory, as on a rank that has no others."""
        return [part.contiguous() for part in tensor.chunk(self.count * self.runs, dim=-1)]

    def matrices(self) -> list[torch.Tensor]:
        """All runs of the weight along its axis."""
        return [part.contiguous() for part in self.weight.chunk(self.count * self.runs, dim=self.axis)]

    def spread(self, tensor: torch.Tensor, matrices: list[torch.Tensor]) -> torch.Tensor:
        """The products of `tensor` with each matrix, side by side."""
        return torch.cat([torch.matmul(tensor, matrix) for matrix in matrices], dim=-1)

    def collect(self, tensor: torch.Tensor, matrices: list[torch.Tensor]) -> torch.Tensor:
        """The sum over blocks and ranks of the products of the columns of `tensor`, each with its matrix."""
        parts = [torch.matmul(part, matrix) for part, matrix in zip(self.cut(tensor), matrices, strict=True)]
        blocks = [in_pairs(parts[number :: self.count]) for number in range(self.count)]
        return sum_over_ranks(in_pairs(blocks), self.group)


@dataclass(slots=True)
class _Product(wgrad.Product):
    """The weight gradient of such a layer."""

    at: _Blocks = field(kw_only=True)

    @torch.no_grad()
    def __call__(self) -> torch.Tensor:
        whole, cut = (self.input, self.grad_output) if self.at.axis == 0 else (self.grad_output, self.input)
        rows, parts = wgrad.flat_rows(whole), [wgrad.flat_rows(part).t() for part in self.at.cut(cut)]
        if self.at.axis == 0:
            return torch.cat([part.matmul(rows) for part in parts])
        return torch.cat([rows.t().matmul(part.t()) for part in parts], dim=1)


class _Linear(torch.autograd.Function):
    """input @ weight^T by blocks, of a column-parallel layer with its bias."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, bias: torch.Tensor | None, at: _Blocks) -> torch.Tensor:
        ctx.save_for_backward(input)
        ctx.at, ctx.has_bias = at, bias is not None
        matrices = [matrix.t() for matrix in at.matrices()]
        output = at.collect(input, matrices) if at.axis else at.spread(input, matrices)
        return output if bias is None else output.add_(bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        (input,), at = ctx.saved_tensors, ctx.at
        sums = [wgrad.flat_rows(part).sum(dim=0) for part in at.cut(grad)] if ctx.has_bias else []
        grad_input = at.spread(grad, at.matrices()) if at.axis else at.collect(grad, at.matrices())
        if at.weight.requires_grad:  # after the last read of it
            wgrad.defer(at.weight, _Product(input, grad, None, at=at), at.source)
        return grad_input, torch.cat(sums) if sums else None, None


def _linear(at: _Blocks, input: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    if torch.is_grad_enabled() and not input.requires_grad:
        input = input.detach().requires_grad_()  # else the backward would not visit this layer at all
    return cast("torch.Tensor", _Linear.apply(input, bias, at))


def _column_forward(layer: Any, count: int, runs: int, input_: torch.Tensor, weight: Any = None, **keys: Any) -> Any:
    """ColumnParallelLinear.forward by `count` blocks. The bias is added here, also one that its caller would add."""
    own, gathers = layer.weight if weight is None else weight, keys.get("runtime_gather_output")
    output = _linear(_Blocks(own, 0, count, runs, layer.tp_group, wgrad.source()), input_, layer.bias)
    if layer.gather_output if gathers is None else gathers:
        output = gather_from_tensor_model_parallel_region(output, group=layer.tp_group)
    return output, None


def _row_forward(layer: Any, count: int, input_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """RowParallelLinear.forward by `count` blocks, over inputs that are cut as its weight is."""
    output = _linear(_Blocks(layer.weight, 1, count, 1, layer.tp_group, wgrad.source()), input_)
    return (output, layer.bias) if layer.skip_bias_add or layer.bias is None else (output + layer.bias, None)


def _attend_by_heads(
    attend: Callable[..., torch.Tensor], core: Any, count: int, first: int, *args: torch.Tensor, **keys: Any
) -> torch.Tensor:
    """`attend` of a core of attention for the heads of each of `count` blocks. first: number of this rank's first."""
    cut = zip(*(each.chunk(count, dim=2) for each in args[:3]), strict=True)
    contexts = []
    for number, parts in enumerate(cut):
        core.hidden_size_per_partition = parts[0].shape[2] * parts[2].shape[3]
        with rng.branched(tp_rank=first + number):
            contexts.append(attend(*(each.contiguous() for each in parts), *args[3:], **keys))
    return torch.cat(contexts, dim=-1)


class _SumOverRanks(torch.autograd.Function):
    """`sum_over_ranks` of what each rank has; backward, what all ranks have is each one's gradient."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        return sum_over_ranks(part, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


def _let_ranks_have_all_tokens(layer: Any) -> None:
    """Let a layer of experts, which are cut as dense matrices are, take the same tokens on all tp ranks, over which
    Megatron's cuts them. It sums the gradient of a token's weight over an expert's columns: here the weight multiplies
    what comes out of the expert."""
    layer.attn_tp_group, layer.router.tp_cp_group = Seat(0, 1), layer.router.cp_group
    old, groups = layer.token_dispatcher, SimpleNamespace(ep=layer.ep_group, expt_tp=None, tp_ep=layer.ep_group)
    layer.token_dispatcher = type(old)(
        layer.num_local_experts, layer.local_expert_indices, config=layer.config, pg_collection=groups
    )
    for expert in layer.experts.local_experts:
        expert.forward = partial(weighted, expert.forward)


def weighted(forward: Callable[..., Any], tokens: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, None]:
    """The output of an expert, times the weights of its tokens."""
    output, _ = forward(tokens, torch.ones_like(weights))
    return (output * weights.unsqueeze(-1)).to(output.dtype), None


def _losses(count: int, group: dist.ProcessGroup, labels: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """Cross entropy [batch, sequence] of logits [sequence, batch, vocabulary / tp] by blocks of the vocabulary, in FP32
    (float64 of float64)."""
    wide = logits if logits.dtype is torch.float64 else logits.float()
    most = wide.detach().amax(dim=-1, keepdim=True)
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
    wide = wide - most
    own = labels.t().unsqueeze(-1) - group.rank() * logits.shape[-1]
    mine = (own >= 0) & (own < logits.shape[-1])
    of_label = torch.where(mine, wide.gather(-1, torch.where(mine, own, 0)), 0.0).squeeze(-1)
    total = in_pairs([part.contiguous().exp().sum(dim=-1) for part in wide.chunk(count, dim=-1)])
    sums: torch.Tensor = _SumOverRanks.apply(torch.stack([total, of_label]), group)
    return (sums[0].log() - sums[1]).t().contiguous()


def cut_columns(chunks: Iterable[torch.nn.Module], blocks: int, tp: dist.ProcessGroup) -> None:
    """Let the layers of `chunks` compute by `blocks` blocks over the ranks of `tp`. The rules on `reproducible` know
    which models have other tensor-parallel sums."""
    count = blocks // tp.size()
    for chunk in chunks:
        for module in chunk.modules():
            layer: Any = module
            if type(module).__module__.startswith("megatron.core.extensions.transformer_engine"):
                raise ConfigError(f"reproducible_tensor_blocks {blocks} {_OTHER_LAYERS}")
            if isinstance(module, ColumnParallelLinear):
                layer.forward = partial(_column_forward, layer, count, getattr(layer.weight, "partition_stride", 1))
            elif isinstance(module, RowParallelLinear):
                layer.forward = partial(_row_forward, layer, count)
            elif isinstance(module, VocabParallelEmbedding):
                # A row's gradients are added in the order of the tokens in memory, which a mask over tp makes as here.
                layer.forward = lambda ids, plain=layer.forward: plain(ids.flatten()).view(*ids.shape, -1)
            elif isinstance(module, MoELayer):
                _let_ranks_have_all_tokens(layer)
            if (core := getattr(layer, "core_attention", None)) is not None:
                name = "attend" if hasattr(core, "attend") else "forward"
                setattr(core, name, partial(_attend_by_heads, getattr(core, name), core, count, tp.rank() * count))
        vars(chunk)["compute_language_model_loss"] = partial(_losses, count, tp)


# --- blocks of a sequence ---------------------------------------------------------------------------------------------

Run = Callable[..., torch.Tensor]
"""Output of a block [its rows, ...] from the block's number on this rank and its inputs."""


@dataclass(frozen=True, slots=True)
class Cut:
    """The blocks of a rank's part of a sequence. count: how many, of each rank of `cp`; of_all_ranks: of a whole
    sequence."""

    count: int
    cp: dist.ProcessGroup
    of_all_ranks: int

    @property
    def first(self) -> int:
        """Number of this rank's first block."""
        return self.cp.rank() * self.count

    def split(self, part: torch.Tensor, dim: int = 0) -> list[torch.Tensor]:
        """The blocks of this rank's part of a tensor."""
        pieces = part.chunk(2 * self.count, dim)
        return [torch.cat([pieces[i], pieces[-1 - i]], dim) for i in range(self.count)]

    def joined(self, blocks: list[torch.Tensor]) -> torch.Tensor:
        """This rank's part from its blocks, along dimension 0."""
        halves = [block.chunk(2) for block in blocks]
        return torch.cat([*(half[0] for half in halves), *(half[1] for half in reversed(halves))])

    def __call__(
        self, run: Run, *inputs: torch.Tensor, whole: tuple[torch.Tensor, ...] = (), draws: str = "", dim: int = 0
    ) -> torch.Tensor:
        """`run` for each block of `inputs`, cut along `dim`, and for all of `whole`. draws: a name in the layer, if it
        draws random numbers."""

        def of_block(number: int, *parts: torch.Tensor) -> torch.Tensor:
            with rng.branched(part=f"{self.first + number}/{draws}") if draws else nullcontext():
                return run(number, *parts)

        if self.count == 1:  # views, as what an RMS norm's several functions give an input is summed first below, too
            return of_block(0, *(each.view_as(each) for each in inputs), *whole)
        if not torch.is_grad_enabled():
            parts = zip(*(self.split(each, dim) for each in inputs), strict=True)
            return self.joined([of_block(number, *each, *whole) for number, each in enumerate(parts)])
        number = torch.zeros((), requires_grad=True)  # so that autograd reaches it if no input needs a gradient
        return cast("torch.Tensor", _ByBlock.apply(self, of_block, dim, len(whole), number, *inputs, *whole))


class _ByBlock(torch.autograd.Function):
    """A function of each block, with a graph of its own, whose backward runs for itself."""

    @staticmethod
    def forward(
        ctx: Any, cut: Cut, run: Run, dim: int, num_whole: int, anchor: torch.Tensor, *inputs: torch.Tensor
    ) -> torch.Tensor:
        ctx.cut, ctx.num_cut = cut, len(inputs) - num_whole
        ctx.graphs = []
        outputs = []
        for number, parts in enumerate(zip(*(cut.split(each, dim) for each in inputs[: ctx.num_cut]), strict=True)):
            leaves = [
                part.detach().requires_grad_(given.requires_grad)
                for part, given in zip((*parts, *inputs[ctx.num_cut :]), inputs, strict=True)
            ]
            with torch.enable_grad(), wgrad.tokens_from(number):
                output = run(number, *leaves)
            outputs.append(output.detach())
            # The edge alone: the output is kept where its own backward needs it.
            edge = torch.autograd.graph.get_gradient_edge(output) if output.requires_grad else None
            ctx.graphs.append((leaves, edge))
        return cut.joined(outputs)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        graphs, ctx.graphs = ctx.graphs, []
        for number, ((_, edge), part) in enumerate(zip(graphs, ctx.cut.split(grad), strict=True)):
            if edge is not None:
                with wgrad.tokens_from(number):
                    torch.autograd.backward([edge], [part])
        found: list[torch.Tensor | None] = []
        for position, leaf in enumerate(graphs[0][0]):
            join = ctx.cut.joined if position < ctx.num_cut else in_pairs
            found.append(join([leaves[position].grad for leaves, _ in graphs]) if leaf.requires_grad else None)
        return (None, None, None, None, None, *found)


def cut_sequences(chunks: Iterable[torch.nn.Module], blocks: int, cp: dist.ProcessGroup) -> None:
    """Let `chunks` compute by `blocks` blocks of each sequence over the ranks of `cp`. The rules on `reproducible` know
    which models have sums over tokens elsewhere."""
    cut = Cut(blocks // cp.size(), cp, blocks)
    for chunk in chunks:
        model: Any = chunk
        model.loss_cut = cut
        if getattr(model, "embedding", None) is not None:
            model.embedding.forward = partial(_embedding, cut, model.embedding.forward)
        alone = [getattr(model, "output_layer", None), getattr(model.decoder, "final_layernorm", None)]
        for layer in layers_of(model):
            attention: Any = layer.self_attention
            alone += [layer.input_layernorm, layer.pre_mlp_layernorm, layer.mlp]
            alone += [attention.linear_qkv, attention.linear_proj]
            if not hasattr(attention.core_attention, "attend"):
                raise ConfigError(f"reproducible_context_blocks {blocks} {_OTHER_LAYERS}")
            attention.core_attention.forward = partial(_attention, cut, attention.core_attention.attend)
            for name in ("self_attn_bda", "mlp_bda"):
                setattr(layer, name, partial(_bias_dropout_add, cut, name, getattr(layer, name)))
        for module in alone:
            if module is not None:
                module.forward = partial(_by_block, cut, module.forward)
            if isinstance(module, MoELayer):
                module.forward = partial(balanced, cut, module.router, module.forward)


def _by_block(cut: Cut, forward: Callable[..., Any], hidden: torch.Tensor, *args: Any, **keys: Any) -> Any:
    """The forward of a layer, which may return a bias too, a parameter, for its caller to add."""
    biases: list[Any] = []
    masks = [] if keys.get("padding_mask") is None else [keys.pop("padding_mask").t()]

    def run(number: int, part: torch.Tensor, *masks: torch.Tensor) -> torch.Tensor:
        output = forward(part, *args, **keys, **({"padding_mask": masks[0].t()} if masks else {}))
        if isinstance(output, tuple):
            output, *biases[:] = output
        return cast("torch.Tensor", output)

    output = cut(run, hidden, *masks)
    return (output, *biases) if biases else output


def balanced(cut: Cut, router: Any, forward: Callable[..., Any], hidden: torch.Tensor, *args: Any, **keys: Any) -> Any:
    """The forward of a layer of experts, whose balancing losses compare the scores of a block with the tokens that
    experts get of the whole sequence."""
    if cut.count == 1 or not (router.is_aux_loss_enabled() and router.training and torch.is_grad_enabled()):
        return forward(hidden, *args, **keys)
    with torch.no_grad():
        logits, picked = [router.gating(part) for part in cut.split(hidden)], compute_routing_scores_for_aux_loss
        chosen = [picked(each.flatten(0, 1), router.topk, router.score_function)[0] for each in logits]
        mask = keys.get("padding_mask")
        real = 1 if mask is None else ~torch.cat(cut.split(mask.t())).unsqueeze(-1)
        counts = (torch.cat(chosen).view(-1, *logits[0].shape[1:]) * real).sum(dim=0)  # of each row of the micro-batch
        dist.all_reduce(counts, group=cut.cp)

    def of_sequence(routing_map: torch.Tensor, topk: int, with_padding_mask: bool, **_: Any) -> tuple[Any, Any, Any]:
        tokens, columns = routing_map.shape  # columns: experts, or those of each row
        by_expert = counts.view(-1, columns).sum(dim=0)
        total = by_expert.sum() / topk if with_padding_mask else tokens * cut.of_all_ranks
        return by_expert, total / cut.cp.size(), total

    with replaced(router_module, get_tokens_per_expert_and_token_count=of_sequence):
        return forward(hidden, *args, **keys)


def _embedding(cut: Cut, forward: Callable[..., torch.Tensor], input_ids: Any, position_ids: Any) -> torch.Tensor:
    return cut(lambda number, *parts: forward(*parts), input_ids, position_ids, draws="embedding", dim=1)


def _bias_dropout_add(cut: Cut, name: str, build: Callable[..., Any], training: bool, fused: bool) -> Any:
    """Megatron's maker of a function that adds bias and residual around a dropout."""
    add = build(training, fused)

    def by_block(with_bias: tuple[torch.Tensor, Any], residual: torch.Tensor, prob: float) -> torch.Tensor:
        output, bias = with_bias
        return cut(lambda number, part, rest: add((part, bias), rest, prob), output, residual, draws=name)

    return by_block


def _attention(cut: Cut, attend: Callable[..., torch.Tensor], *inputs: torch.Tensor, **unused: Any) -> torch.Tensor:
    """FusedAttention.forward of each block of queries."""
    query, key, value, *_ = inputs
    if cut.cp.size() > 1:
        key, value = whole_sequence(key, cut.cp, in_pairs), whole_sequence(value, cut.cp, in_pairs)

    def run(number: int, rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        allowed = causal_mask(len(rows), len(keys), cut.first + number, cut.of_all_ranks, rows.device)
        return attend(rows, keys, values, allowed)

    return cut(run, query, whole=(key, value), draws="attention")
