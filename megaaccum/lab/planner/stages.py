"""Which layers, embedding and head each pipeline stage and each rank holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megaaccum.config.schema import Config, ModelConfig, ParallelConfig
from megaaccum.config.stage_layout import parse_layout
from megaaccum.pretrain.metrics.layer_shapes import expert_layers
from megaaccum.schedule.registry import by_executor, is_v_shaped, names


@dataclass(frozen=True, slots=True)
class Stage:
    """A contiguous piece of the model."""

    dense: int
    """Transformer layers with an MLP."""
    moe: int
    """Transformer layers with experts."""
    embedding: bool = False
    """Whether it holds the word table (and turns tokens into vectors)."""
    head: bool = False
    """Whether it holds output matrix and loss."""
    final_norm: bool = False
    """Whether it holds the norm before the head: with the head, but after the last layer in a model that predicts
    further tokens."""
    prediction: int = 0
    """Multi-token-prediction layers."""

    @property
    def layers(self) -> int:
        """Transformer layers, those of multi-token prediction aside."""
        return self.dense + self.moe


def split_layers(num_layers: int, num_stages: int) -> list[int] | None:
    """Layers of each stage in model order, or None if no balanced split is known.

    Even if they divide. If one, two or three are missing, the last stage, the first, and the last once more have one
    layer less: head and embedding are their extra work (Llama 3 405B: 126 layers on 128 stages, arXiv 2407.21783;
    DeepSeek-V3: 61 on 32, where prediction of further tokens is in the last, arXiv 2412.19437).
    """
    most = -(-num_layers // num_stages)
    missing = most * num_stages - num_layers
    layers = [most] * num_stages
    for short in (-1, 0, -1)[:missing]:
        layers[short] -= 1
    return layers if sum(layers) == num_layers and min(layers) >= 0 else None


def layout_text(layers: Sequence[int], prediction: int = 0) -> str:
    """Megatron's notation for these layers per stage: `E|(t|)*126L`."""
    stages = ["t" * count for count in layers]
    stages[0] = "E" + stages[0]
    stages[-1] += "m" * prediction + "L"
    return "|".join(_runs(stages))


def _runs(stages: Sequence[str]) -> list[str]:
    """The stages with runs of three and more equal ones written as (...)*n, each run as one text between bars."""
    texts: list[str] = []
    start = 0
    while start < len(stages):
        end = start
        while end < len(stages) and stages[end] == stages[start]:
            end += 1
        count = end - start
        if count >= 3 and end < len(stages):
            # The last bar of the group stands before the next stage, so that stage follows without one of its own.
            texts.append(f"({stages[start]}|)*{count}{stages[end]}")
            end += 1
        else:
            texts += stages[start:end]
        start = end
    return texts


def make_stages(model: ModelConfig, layers: Sequence[int]) -> list[Stage]:
    """The stages in model order for `layers` transformer layers in each."""
    is_moe = expert_layers(model)
    assert sum(layers) == model.num_layers == len(is_moe), "stages hold every layer once"
    stages, start = [], 0
    for index, count in enumerate(layers):
        moe = sum(is_moe[start : start + count])
        start += count
        last = index == len(layers) - 1
        norm = count > 0 and start == model.num_layers if model.mtp_num_layers else last
        extra = (model.mtp_num_layers or 0) if last else 0
        stages.append(Stage(count - moe, moe, index == 0, last, norm, extra))
    return stages


def layers_of_stages(model: ModelConfig, parallel: ParallelConfig) -> list[int]:
    """Transformer layers of each stage in model order, pp * vpp of them, for a configuration that keeps the rules."""
    pp, vpp = parallel.pipeline_model_parallel_size, parallel.virtual_pipeline_model_parallel_size or 1
    if parallel.pipeline_model_parallel_layout is not None:
        return [stage.count("t") for stage in parse_layout(parallel.pipeline_model_parallel_layout)]
    first, last = parallel.decoder_first_pipeline_num_layers, parallel.decoder_last_pipeline_num_layers
    if first is None and last is None:
        return [model.num_layers // (pp * vpp)] * (pp * vpp)
    ends = [count for count in (first, last) if count is not None]
    between = pp - len(ends)
    middle = (model.num_layers - sum(ends)) // between if between else 0
    by_rank = [middle] * pp
    by_rank[0] = middle if first is None else first
    by_rank[-1] = by_rank[-1] if last is None else last
    return [count // vpp for count in by_rank] * vpp


def stages_of(config: Config) -> list[Stage]:
    """The stages of a resolved configuration, in model order, pp * vpp of them."""
    text = config.parallel.pipeline_model_parallel_layout
    stages = make_stages(config.model, layers_of_stages(config.model, config.parallel))
    if text is None or not config.model.mtp_num_layers:
        return stages
    extra = [stage.count("m") for stage in parse_layout(text)]
    return [replace(stage, prediction=count) for stage, count in zip(stages, extra, strict=True)]


def chunks_of_rank(stages: Sequence[Stage], rank: int, *, pp: int, schedule: str) -> list[Stage]:
    """The stages that pipeline rank `rank` holds, chunk by chunk."""
    if is_v_shaped(schedule):
        return [stages[rank], stages[2 * pp - 1 - rank]]
    return list(stages[rank::pp])


def rank_kinds(stages: Sequence[Stage], *, pp: int, schedule: str) -> dict[int, list[Stage]]:
    """The ranks that can be the most loaded, with their chunks: of every kind of rank the first, which holds the most
    micro-batches, and under a schedule that splits backwards the last too, which owes the most weight gradients."""
    kinds: dict[tuple[Stage, ...], set[int]] = {}
    splits = schedule in names() and by_executor(schedule)
    for rank in range(pp):
        chunks = tuple(chunks_of_rank(stages, rank, pp=pp, schedule=schedule))
        first = min(kinds.get(chunks, {rank}))
        kinds[chunks] = {first, rank} if splits else {first}
    return {rank: list(chunks) for chunks, ranks in kinds.items() for rank in sorted(ranks)}


def with_head_apart(chunks: list[Stage]) -> list[Stage]:
    """`chunks` with the head of a stage that has the embedding as a stage of its own, with a copy of a tied table."""
    both = [chunk for chunk in chunks if chunk.embedding and chunk.head]
    bodies = [replace(chunk, head=False) if chunk in both else chunk for chunk in chunks]
    return bodies + [Stage(dense=0, moe=0, head=True) for _ in both]
