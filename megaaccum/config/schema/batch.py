"""Keys of the layout over ranks and of the batch."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from megaaccum.config.facts import Facts
from megaaccum.schedule.registry import BUILT_IN

if TYPE_CHECKING:
    ScheduleName = str
else:
    ScheduleName = Literal[("auto", "none", *BUILT_IN)]


@dataclass(kw_only=True, slots=True)
class ParallelConfig:
    """The cut of the model over ranks. world = tp * cp * pp * dp."""

    tensor_model_parallel_size: Annotated[int, Facts(at_least=1, core=True, planned=True)] = 1
    """Ranks that share each matrix (tp)."""
    pipeline_model_parallel_size: Annotated[int, Facts(at_least=1, core=True, planned=True)] = 1
    """Pipeline stages' ranks (pp)."""
    virtual_pipeline_model_parallel_size: Annotated[int | None, Facts(at_least=1, planned=True)] = None
    """Model chunks per rank (vpp) for the interleaved schedule; zbv and dualpipev set it to 2."""
    num_layers_per_virtual_pipeline_stage: Annotated[int | None, Facts(at_least=1, planned=True)] = None
    """Layers per chunk: another way to give vpp."""
    context_parallel_size: Annotated[int, Facts(at_least=1, core=True, planned=True)] = 1
    """Ranks that share each sequence (cp)."""
    expert_model_parallel_size: Annotated[int, Facts(at_least=1, needs="num_experts", core=True, planned=True)] = 1
    """Ranks over which experts are spread (ep); a part of tp * cp * dp."""
    expert_tensor_parallel_size: Annotated[
        int | None, Facts(at_least=1, needs="num_experts", core=True, planned=True)
    ] = None
    """Tensor parallelism inside experts; default tensor_model_parallel_size."""
    sequence_parallel: Annotated[bool, Facts(core=True, planned=True)] = False
    """Split norms and dropout along the sequence over the tp ranks."""
    schedule: Annotated[ScheduleName | str | None, Facts(planned=True)] = None
    """Pipeline schedule, or the path of a .csv table. Default, as Megatron: none at pp 1, interleaved when vpp is set,
    else 1f1b. auto: of the built-in ones that are legal here and fit into memory_gib, or the GPU's memory, the one with
    the fastest predicted step."""
    microbatch_group_size_per_vp_stage: Annotated[
        int | None, Facts(at_least=1, needs="schedule interleaved", core=True, planned=True)
    ] = None
    """Consecutive micro-batches of one chunk in the interleaved schedule; default pp."""
    overlap_p2p_comm: Annotated[bool | None, Facts(core=True, planned=True)] = None
    """Overlap stage-to-stage traffic with compute; default: on for the interleaved schedule, as Megatron-LM."""
    batch_p2p_comm: Annotated[bool | None, Facts(core=True, planned=True)] = None
    """Send and receive in one batched call. Default: the opposite of overlap_p2p_comm."""
    overlap_moe_expert_parallel_comm: Annotated[bool, Facts(core=True)] = False
    """Interleave a forward and a backward layer by layer, so that the experts' all-to-all of one runs under the compute
    of the other (Megatron's combined 1F1B): schedule none, interleaved, or one with fused pairs (dualpipev)."""
    decoder_first_pipeline_num_layers: Annotated[
        int | None, Facts(at_least=1, core="num_layers_in_first_pipeline_stage", planned=True)
    ] = None
    """Layers of the first stage when stages are uneven."""
    decoder_last_pipeline_num_layers: Annotated[
        int | None, Facts(at_least=1, core="num_layers_in_last_pipeline_stage", planned=True)
    ] = None
    """Layers of the last stage when stages are uneven."""
    pipeline_model_parallel_layout: Annotated[str | None, Facts(core=True, planned=True)] = None
    """Explicit layers per stage, in Megatron's notation (Et*3|(tt|)*29,mL)."""
    distributed_timeout_minutes: Annotated[float, Facts(above=0)] = 10.0
    """A collective that waits longer than this ends the run."""


@dataclass(kw_only=True, slots=True)
class BatchConfig:
    """The batch and how it is split. Values that are None are derived; values that determine each other must agree."""

    micro_batch_size: Annotated[int | None, Facts(at_least=1, planned=True)] = None
    """Sequences in one pipeline micro-batch on one data-parallel rank. Default: of those that fit into memory_gib, or
    the GPU's memory, the one with the fastest predicted step; 1 if neither is known."""
    global_batch_size: Annotated[int | None, Facts(at_least=1, planned=True)] = None
    """Sequences per optimizer step over all ranks."""
    total_batch_size: Annotated[int | None, Facts(at_least=1, planned=True)] = None
    """Tokens per optimizer step over all ranks: another way to give global_batch_size, a multiple of seq_length."""
    device_batch_size: Annotated[int | None, Facts(at_least=1, planned=True)] = None
    """Sequences a data-parallel rank takes in per accumulation step (dbs)."""
    pp_microbatches: Annotated[int | None, Facts(at_least=1, planned=True)] = None
    """Pipeline micro-batches that one device batch is cut into (also num_chunks)."""
    grad_accum_steps: Annotated[int | None, Facts(at_least=1, planned=True)] = None
    """Device batches per optimizer step (ga)."""
    batch_warmup_steps: Annotated[int, Facts(at_least=0, at_most=1e6)] = 0
    """Optimizer steps over which grad_accum_steps grows to its value from an eighth of it; 0 is off."""
    rampup_batch_size: list[int] | None = None
    """START INCREMENT SAMPLES: the global batch grows from START sequences by INCREMENT, in equal spans of samples, to
    global_batch_size after SAMPLES."""
    step_batch_size_schedule: str | None = None
    """Sequences of the global batch from a number of tokens on, '0:768 250B:1536'. The last is global_batch_size."""
    static_graph: bool = False
    """Every step has one count of micro-batches and one shape (CUDA graphs, XLA, regional compile): no batch warm-up,
    and anything else that changes them is refused."""
    variable_seq_lengths: bool = False
    """Micro-batches may have different lengths, up to seq_length; with a pipeline, every stage knows them in
    advance."""
    allow_underfilled_pipeline: bool = False
    """Accept fewer than 2 * pp micro-batches per flush, and the bubble that they cost."""
    flush: Annotated[Literal["merged", "per_round"], Facts(planned=True)] = "merged"
    """One pipeline flush of ga * pp_microbatches micro-batches, or one flush per accumulation round."""
    loss_norm: Literal["token", "microbatch"] = "token"
    """Divide the loss by the step's unmasked tokens, or take the mean over micro-batches of their means."""
