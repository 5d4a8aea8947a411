"""Steps of Megatron-core and DeepSpeed themselves beside the reference of one process, without megaaccum's step.

    python -m benchmarks libraries [--only TEXT ...] [--diagnose] [--json FILE]

Each cell is a model, a layout and a way of using a library. The reference, the comparison and the search for the axes
that a difference needs are those of `megaaccum verify`; in FP32, with the bounds of its rounding, because both
libraries compute in part in FP32 whatever the model's precision is.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks import library_models as models
from benchmarks import library_steps
from benchmarks.library_steps import Options
from benchmarks.schedules import conditions
from megaaccum.lab.verification import localise
from megaaccum.lab.verification.case import Case, Keys, Lane, UserModel
from megaaccum.lab.verification.localise import Diagnosis
from megaaccum.lab.verification.records import GRADIENT, Observed, Reference, ReferenceStep
from megaaccum.lab.verification.testing.ranks import run_ranks
from megaaccum.lab.verification.verdict import Verdict, Verifier
from tests.bank.cases import CASES


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A way of using a library, and what one process has to be compared with.

    expected: how it differs, or why it cannot be run, with a source; empty if it agrees."""

    case: Case
    options: Options = field(default_factory=Options)
    lane: Lane = "fp32"
    expected: str = ""

    @property
    def take(self) -> Callable[..., Observed]:
        return library_steps.of_megatron if self.case.user_model is None else library_steps.of_deepspeed


class OfLibrary(Verifier):
    """Observes a library's steps in place of ours."""

    def __init__(self, cell: Cell, references: dict[str, Reference]):
        """references: of cells before this one, to which new ones are added."""
        self._frozen = cell.options.frozen

        def observe(case: Case, steps: int, at_borders: bool) -> list[Observed]:
            found: list[Observed] = run_ranks(cell.take, case.world_size, case, steps, cell.options, timeout=60)
            return found

        super().__init__(steps=1 if self._frozen else 2, observing=observe, known=references)

    def references(self, case: Case, lanes: Any, *, keep_parts: bool = False) -> dict[Lane, Reference]:
        found = super().references(case, lanes, keep_parts=keep_parts)
        return {lane: without(each, self._frozen) if self._frozen else each for lane, each in found.items()}


def without(reference: Reference, frozen: str) -> Reference:
    """The reference of a first step in which parameters with these names are frozen: they have no gradient, and no part
    in the norm."""

    def trained(step: ReferenceStep) -> ReferenceStep:
        grads = {name: each for name, each in step.tensors[GRADIENT].items() if not re.search(frozen, name)}
        norm = sum(float(each.square().sum()) for each in grads.values()) ** 0.5
        kept = {name: each if name in grads else reference.before[name] for name, each in step.tensors["param"].items()}
        return replace(step, norm=norm, tensors={GRADIENT: grads, "param": kept})

    assert reference.problem or reference.clip == 1.0, "a norm without the frozen ones would clip otherwise"
    return replace(reference, steps=[trained(step) for step in reference.steps])


# --- the cells --------------------------------------------------------------------------------------------------------

_SP: Keys = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
_TP: Keys = {"tensor_model_parallel_size": 2, "sequence_parallel": None}
_PP: Keys = {"pipeline_model_parallel_size": 2}
_FLAT: Keys = {"pipeline_model_parallel_size": None, "tensor_model_parallel_size": None, "sequence_parallel": None}
_LATENT: Keys = {
    "multi_latent_attention": True, "kv_lora_rank": 16, "qk_head_dim": 8, "qk_pos_emb_head_dim": 8, "v_head_dim": 8,
    "q_lora_rank": 16, "add_bias_linear": False, "normalization": "RMSNorm", "qk_layernorm": True,
}  # fmt: skip
_CONSTANT: Keys = {"lr_decay_style": "constant", "min_lr": None}
_OVERLAP = Options(ddp={"overlap_grad_reduce": True, "bucket_size": 4000})
_SHARDED = Options(ddp={"use_distributed_optimizer": True})
_KEYS = "the rotated part of the keys is not summed over tp: https://github.com/NVIDIA/Megatron-LM/issues/1699"
_INTERLEAVED = {"overlap_p2p_comm": True, "batch_p2p_comm": False}
_MEANS = {"calculate_per_token_loss": False}
_OFTEN: Keys = {"loss_norm": "microbatch"}


def _megatron(base: str, *keys: Keys, ranks: int = 4, options: Options | None = None, **fields: Any) -> Cell:
    """A case of the bank, changed."""
    merged: Keys = dict(CASES[base].keys)
    for each in (*keys, _CONSTANT):
        merged |= each
    expected, masks = fields.pop("expected", ""), fields.pop("masks", CASES[base].masks)
    case = CASES[base].changed(merged, world_size=ranks, masks=masks, megatron=fields.pop("megatron", {}))
    options = Options(**fields) if options is None else options
    return Cell(case=case, options=options, expected=expected)


MEGATRON: dict[str, Cell] = {
    "dp 4": _megatron("pipeline", _FLAT),
    "dp 4, overlapped": _megatron("pipeline", _FLAT, options=_OVERLAP),
    "dp 4, distributed optimizer": _megatron("pipeline", _FLAT, {"clip_grad": 0.5}, options=_SHARDED),
    "dp 4, means": _megatron("pipeline", _FLAT, _OFTEN, config=_MEANS),
    "dp 4, means, averaged in the collective": _megatron(
        "pipeline", _FLAT, _OFTEN, config=_MEANS, ddp={"average_in_collective": True}
    ),
    "pp 2": _megatron("pipeline"),
    "pp 2, clipped": _megatron("pipeline, clipped"),
    "pp 2, tied": _megatron("pipeline, tied"),
    "pp 2, tied, clipped": _megatron("pipeline, tied and clipped"),
    "pp 2, tied, clipped, distributed optimizer": _megatron("pipeline, tied and clipped", options=_SHARDED),
    "pp 2, means": _megatron("micro-batch means", config=_MEANS),
    "pp 2, interleaved": _megatron("interleaved", config=_INTERLEAVED),
    "pp 2, interleaved, tied, overlapped": _megatron(
        "interleaved", {"untie_embeddings_and_output_weights": None}, config=_INTERLEAVED, ddp=_OVERLAP.ddp
    ),
    "pp 2, recompute": _megatron("recompute", {"schedule": None}),
    "pp 2, recompute of attention": _megatron(
        "pipeline", {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    ),
    "pp 2, recompute of MLPs, no biases": _megatron(
        "pipeline",
        {"recompute_granularity": "selective", "recompute_modules": ["mlp"], "add_bias_linear": False},
    ),
    "tp 2, sp": _megatron("tensor parallel"),
    "tp 2, sp, clipped": _megatron("tensor parallel, clipped"),
    "tp 2, sp, gated, grouped queries": _megatron("tensor parallel, gated", {"num_query_groups": 2}),
    "tp 2, sp, tied, recompute": _megatron(
        "tensor parallel", {"untie_embeddings_and_output_weights": None, "recompute_granularity": "full",
                            "recompute_method": "uniform", "recompute_num_layers": 1}
    ),
    "tp 2, norms of heads": _megatron("tensor parallel, norms of queries"),
    "tp 2, sp, norms of heads": _megatron("tensor parallel, norms of queries", {"sequence_parallel": True}),
    "tp 2, pp 2, sp, tied": _megatron("tensor parallel", _PP, {"untie_embeddings_and_output_weights": None}),
    "tp 2, one group of queries": _megatron("tensor parallel", {"num_query_groups": 1}, ranks=2),
    "tp 2, one group of queries, norms of heads": _megatron(
        "tensor parallel", {"num_query_groups": 1, "qk_layernorm": True, "sequence_parallel": None}, ranks=2
    ),
    "cp 2": _megatron("context parallel", _FLAT),
    "cp 2, pp 2, tied": _megatron("context parallel", {"untie_embeddings_and_output_weights": None}),
    "cp 2, means": _megatron(
        "context parallel", _FLAT, _OFTEN, ranks=2, config=_MEANS,
        expected="each rank's part of a sequence weighs the same: https://github.com/NVIDIA/Megatron-LM/issues/4590",
    ),
    "cp 2, means, all tokens": _megatron("context parallel", _FLAT, _OFTEN, ranks=2, config=_MEANS, masks="full"),
    "latent attention": _megatron("pipeline", _LATENT, _FLAT, ranks=2),
    "latent attention, tp 2": _megatron(
        "pipeline", _LATENT, _FLAT, _TP, ranks=2, expected=f"{_KEYS}; the norm of the queries' latent x 2: below"
    ),
    "latent attention, tp 2, sp": _megatron("pipeline", _LATENT, _FLAT, _SP, ranks=2, expected=_KEYS),
    "latent attention, tp 2, no latent of queries": _megatron(
        "pipeline", _LATENT, _FLAT, _TP, {"q_lora_rank": None}, ranks=2, expected=_KEYS
    ),
    "latent attention, tp 2, no norms": _megatron(
        "pipeline", _LATENT, _FLAT, _TP, {"qk_layernorm": None}, ranks=2, expected=_KEYS
    ),
    "experts, dp 2": _megatron("experts", _FLAT, ranks=2, masks="full"),
    "experts, dp 2, unequal": _megatron(
        "experts", _FLAT, ranks=2,
        expected="side losses weigh all tokens / unmasked ones: https://github.com/verl-project/verl/pull/6836",
    ),
    "experts, dp 2, means": _megatron("experts", _FLAT, _OFTEN, ranks=2, config=_MEANS),
    "experts, pp 2": _megatron("experts", ranks=2, masks="full"),
    "experts, z loss, pp 2": _megatron("experts, z loss", ranks=2, masks="full"),
    "experts, ep 2": _megatron("spread experts", ranks=2, masks="full"),
    "experts, ep 2, means": _megatron("spread experts", _OFTEN, ranks=2, config=_MEANS),
    "experts, ep 2, clipped": _megatron("spread experts, clipped", ranks=4, masks="full"),
    "experts, ep 2, clipped, distributed optimizer": _megatron(
        "spread experts, clipped", ranks=4, masks="full", options=_SHARDED
    ),
    "experts, tp 2, sp, ep 2": _megatron("spread experts", _SP, ranks=2, masks="full"),
    "experts, tp 2, sp": _megatron("experts, tensor parallel", ranks=2, masks="full"),
    "experts, cp 2": _megatron("experts, context parallel", _FLAT, ranks=2, masks="full"),
    "experts, cp 2, means": _megatron(
        "experts, context parallel", _FLAT, _OFTEN, ranks=2, masks="full", config=_MEANS
    ),
    "experts, z loss, cp 2": _megatron(
        "experts, z loss", _FLAT, {"context_parallel_size": 2}, ranks=2, masks="full"
    ),
    "experts, z loss, tp 2, sp": _megatron("experts, z loss", _FLAT, _SP, ranks=2, masks="full"),
    "experts, z loss, dp 2, means": _megatron("experts, z loss", _FLAT, _OFTEN, ranks=2, config=_MEANS),
    "experts, per sequence, dp 2": _megatron(
        "experts", _FLAT, {"moe_router_load_balancing_type": "seq_aux_loss"}, ranks=2, masks="full"
    ),
    "experts, per sequence, cp 2": _megatron(
        "experts", _FLAT, {"moe_router_load_balancing_type": "seq_aux_loss", "context_parallel_size": 2}, ranks=2,
        masks="full",
    ),
    "experts, per sequence, tp 2, sp": _megatron(
        "experts", _FLAT, _SP, {"moe_router_load_balancing_type": "seq_aux_loss"}, ranks=2, masks="full"
    ),
    "experts, bias, pp 2": _megatron("experts, bias", masks="full"),
    "experts, bias, pp 2, recompute": _megatron("experts, recompute", masks="full"),
    "experts, bias, tp 2, sp": _megatron("experts, bias", _FLAT, _SP, ranks=2, masks="full"),
    "experts, shared, tp 2, sp": _megatron(
        "experts, tensor parallel", {"moe_shared_expert_intermediate_size": 32}, ranks=2, masks="full"
    ),
    "experts, gated shared one, tp 2, sp": _megatron(
        "experts, tensor parallel", {"moe_shared_expert_intermediate_size": 32}, ranks=2, masks="full",
        megatron={"moe_shared_expert_gate": True},
    ),
    "experts, tp 2, sp, ep 2, clipped": _megatron("spread experts, clipped", _SP, masks="full"),
    "experts, cut over tp 2": _megatron(
        "experts, tensor parallel", {"expert_tensor_parallel_size": 2, "clip_grad": 0.5}, masks="full"
    ),
    "experts, ep 2, means, averaged in the collective": _megatron(
        "spread experts", _OFTEN, config=_MEANS, ddp={"average_in_collective": True}
    ),
    "experts, recomputed": _megatron(
        "experts, bias", _FLAT, {"recompute_granularity": "selective", "recompute_modules": ["moe"]}, ranks=2,
        masks="full",
    ),
    "experts, frozen routers": _megatron("experts", _FLAT, ranks=2, masks="full", frozen=r"router"),
    "prediction, pp 2": _megatron("prediction"),
    "prediction, pp 2, tied": _megatron("prediction", {"untie_embeddings_and_output_weights": None}),
    "prediction, pp 2, tied, clipped": _megatron(
        "prediction", {"untie_embeddings_and_output_weights": None, "clip_grad": 0.5}
    ),
    "prediction, pp 2, means": _megatron("prediction", _OFTEN, config=_MEANS),
    "prediction, tp 2, sp": _megatron("prediction, tensor parallel"),
    "prediction, tp 2, sp, recompute": _megatron("prediction, recompute"),
    "two predictions, pp 2": _megatron("prediction", {"mtp_num_layers": 2}),
    "prediction with experts, pp 2": _megatron(
        "experts", CASES["prediction"].keys, CASES["experts"].keys, masks="full"
    ),
    "frozen embedding": _megatron("pipeline", frozen=r"embedding\."),
    "frozen embedding, recompute": _megatron(
        "recompute", {"schedule": None}, frozen=r"embedding\.",
        expected="the first stage gets no gradients: https://github.com/NVIDIA-NeMo/Megatron-Bridge/pull/5586",
    ),
    "frozen first stage": _megatron("pipeline", frozen=r"embedding\.|layers\.[01]\."),
    "frozen tied embedding": _megatron("pipeline, tied", frozen=r"embedding\."),
    "frozen matrices, biases trained": _megatron(
        "pipeline", _FLAT, _SP, ranks=2, frozen=r"linear_\w+\.weight", expected="the biases get no gradient: below"
    ),
    "frozen matrices and biases": _megatron("pipeline", _FLAT, _SP, ranks=2, frozen=r"linear_\w+\."),
}  # fmt: skip


@cache
def _own(build: Any, forward: Any, data: Any) -> UserModel:
    """One for all cells that have it, whose references are then one too."""
    return UserModel(build=build, forward_step_func=forward, data=data, optimizer=models.sgd)


def _deepspeed(stage: int, build: Any = models.plain, *, loss: str = "means", **fields: Any) -> Cell:
    steps = {
        "means": (models.of_means, models.numbered_batches), "tokens": (models.of_tokens, models.batches),
        "equal": (models.of_tokens, models.equal_batches),
    }  # fmt: skip
    forward, data = steps[loss]
    own = _own(build, forward, data)
    keys: Keys = {
        "hidden_size": models.WIDTH, "seq_length": models.SEQ, "micro_batch_size": models.ROWS, "lr": models.LR,
        "grad_accum_steps": 3, "pp_microbatches": 1, "backend": "ddp", "train_iters": None, "data_path": None,
        "clip_grad": fields.pop("clip", 0.0), "lr_decay_style": "constant",
    }  # fmt: skip
    zero, more = {"stage": stage, **fields.pop("zero", {})}, fields.pop("more", {})
    lane, expected, ranks = fields.pop("lane", "fp32"), fields.pop("expected", ""), fields.pop("ranks", 2)
    case = Case(keys={name: each for name, each in keys.items() if each is not None}, world_size=ranks, user_model=own)
    options = Options(json={"zero_optimization": zero, **more}, **fields)
    return Cell(case=case, options=options, lane=lane, expected=expected)


def _at(stages: tuple[int, ...], name: str, *args: Any, **fields: Any) -> dict[str, Cell]:
    return {f"ZeRO-{stage}{name}": _deepspeed(stage, *args, **fields) for stage in stages}


_MEANS_OF_MEANS = "every micro-batch weighs the same, however many tokens it has: documented"
_LAST = "only the last backward counts: https://github.com/allenai/open-instruct/pull/1498"
_READ = "what is read with safe_get_* is of other parameters: below"
_RAISES = "raises: DeepSpeed names the combination"
_ALL, _CUT, _LATE = (0, 1, 2, 3), (1, 2, 3), (2, 3)
_BF16 = {"bf16": {"enabled": True}}
_SMALL = {"reduce_bucket_size": 1000, "stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 500}

_OFFLOADED = {"offload_optimizer": {"device": "cpu"}}
_ANY = {"zero_force_ds_cpu_optimizer": False}
_ONE, _UNMANAGED = {"gradient_accumulation_steps": 1}, {"managed_gradient_accumulation": False}

DEEPSPEED: dict[str, Cell] = {
    **_at(_ALL, ""),
    **_at(_ALL, ", equal tokens", loss="equal"),
    **_at(_ALL, ", unequal tokens", loss="tokens", expected=_MEANS_OF_MEANS),
    **_at(_ALL, ", unequal tokens, weighed", loss="tokens", loop="weighed"),
    **_at(_ALL, ", clipped", clip=0.1),
    **_at(_ALL, ", tied", models.tied),
    **_at(_ALL, ", tied, clipped", models.tied, clip=0.1),
    **_at(_ALL, ", frozen", models.frozen),
    **_at(_ALL, ", frozen, clipped", models.frozen, clip=0.1),
    **_at(_ALL, ", unused layer", models.unused),
    **_at((0, 1), ", layer skipped by some", models.skipping),
    **_at(_ALL, ", boundary set", loop="boundary"),
    **_at(_ALL, ", evaluation between", loop="evaluating"),
    **_at((0, 1), ", no_sync", loop="no_sync", more=_ONE),
    **_at((1,), ", no_sync, overlapped", loop="no_sync", more=_ONE, expected=_RAISES, zero={"overlap_comm": True}),
    **_at(_CUT, ", coalesced", loop="coalesced", more=_ONE),
    **_at(_CUT, ", coalesced, clipped", loop="coalesced", more=_ONE, clip=0.1),
    **_at(_CUT, ", unmanaged", loop="unmanaged", more=_UNMANAGED),
    **_at(_CUT, ", unmanaged, clipped", loop="unmanaged", more=_UNMANAGED, clip=0.1),
    **_at(_CUT, ", loss.backward()", loop="torch style"),
    **_at((0, 3), ", two forwards a step", loop="in halves"),
    **_at((1, 2), ", two forwards a step", loop="in halves", expected=_LAST),
    **_at((0,), ", two backwards of one forward", loop="from one graph"),
    **_at((1, 2), ", two backwards of one forward", loop="from one graph", expected=_LAST),
    **_at(
        (3,), ", two backwards of one forward", loop="from one graph",
        expected="raises: https://github.com/deepspeedai/DeepSpeed/issues/7352",
    ),
    **_at((0, 1, 2), ", forwards first", loop="forwards first"),
    **_at((3,), ", forwards first", loop="forwards first", expected="gradients are lost: below"),
    **_at(_CUT, ", small buckets", zero=_SMALL),
    **_at(_CUT, ", small buckets, overlapped", zero=_SMALL | {"overlap_comm": True}),
    **_at(_CUT, ", gradients not contiguous", zero={"contiguous_gradients": False}),
    **_at((1, 2), ", round robin", expected=_READ, zero={"round_robin_gradients": True}),
    **_at(_CUT, ", all-reduce", zero={"reduce_scatter": False}),
    **_at((0, 1), ", prescaled", more={"prescale_gradients": True}),
    **_at(_LATE, ", prescaled", more={"prescale_gradients": True}, expected=_RAISES),
    **_at((0, 1), ", divided before by 4", more={"gradient_predivide_factor": 4.0}),
    **_at(_LATE, ", divided before by 4", more={"gradient_predivide_factor": 4.0}, expected=_RAISES),
    **_at(_ALL, ", reduced in FP32", more={"communication_data_type": "fp32"}),
    **_at(_ALL, ", BF16", lane="bf16", more=_BF16),
    **_at(_ALL, ", BF16, clipped", lane="bf16", clip=0.1, more=_BF16),
    **_at(_CUT, ", BF16, added in FP32", lane="bf16", more=_BF16 | {"data_types": {"grad_accum_dtype": "fp32"}}),
    **_at(_ALL, ", BF16, reduced in FP32", lane="bf16", more=_BF16 | {"communication_data_type": "fp32"}),
    **_at(_LATE, ", offloaded", more=_ANY, zero=_OFFLOADED),
    **_at(_LATE, ", offloaded, coalesced", loop="coalesced", more=_ONE | _ANY, zero=_OFFLOADED),
    **_at(_LATE, ", offloaded, unmanaged", loop="unmanaged", more=_UNMANAGED | _ANY,
          zero=_OFFLOADED),
    **_at((3,), ", small groups, clipped", clip=0.1, zero={"sub_group_size": 500}),
    **_at(_CUT, ", BF16, coalesced", lane="bf16", loop="coalesced", more=_BF16 | _ONE),
    **_at(_ALL, ", BF16, unmanaged", lane="bf16", loop="unmanaged", more=_BF16 | _UNMANAGED),
    **_at(_ALL, ", BF16, boundary set", lane="bf16", loop="boundary", more=_BF16),
    **_at((0, 3), ", BF16, two forwards a step", lane="bf16", loop="in halves", more=_BF16),
    **_at((1, 2), ", BF16, two forwards a step", lane="bf16", loop="in halves", more=_BF16, expected=_LAST),
    **_at(_CUT, ", BF16, added in FP32, boundary set", lane="bf16", loop="boundary",
          more=_BF16 | {"data_types": {"grad_accum_dtype": "fp32"}}),
    **_at((1,), ", BF16, added in FP32, two forwards a step", lane="bf16", loop="in halves",
          more=_BF16 | {"data_types": {"grad_accum_dtype": "fp32"}}),
}  # fmt: skip

CELLS = {f"Megatron: {name}": cell for name, cell in MEGATRON.items()} | {
    f"DeepSpeed: {name}": cell for name, cell in DEEPSPEED.items()
}


# --- the run ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Outcome:
    """The outcome of a cell."""

    name: str
    verdict: Verdict
    diagnosis: Diagnosis | None = None

    @property
    def word(self) -> str:
        return "refused" if self.verdict.problem or self.verdict.failure else "agrees" if self.verdict.ok else "differs"

    def words(self) -> str:
        """How far gradients are away, or what differs, or why it cannot be run."""
        if self.word == "refused":
            return (self.verdict.problem or self.verdict.failure).splitlines()[0]
        (compared,) = self.verdict.comparisons
        if self.word == "agrees":
            return f"gradients to {max((row.error for row in compared.rows if row.kind == GRADIENT), default=0.0):.0e}"
        grads = [row for row in compared.failed if row.kind == GRADIENT]
        first = str((grads or compared.failed)[0])
        found = self.diagnosis
        if found is None:
            return f"{first}; {len({row.name for row in grads})} gradients"
        return f"{found.relation or first}; {found.wrong} of {found.of}; needs {', '.join(found.axes) or 'no axis'}"


def outcome_of(name: str, references: dict[str, Reference] | None = None, *, diagnosed: bool = False) -> Outcome:
    """references: as OfLibrary takes them. diagnosed: with the axes that a difference needs, which takes many runs."""
    cell = CELLS[name]
    verifier = OfLibrary(cell, {} if references is None else references)
    verdict = verifier.verify(cell.case, [cell.lane])
    outcome = Outcome(name, verdict)
    if diagnosed and outcome.word == "differs":
        outcome.diagnosis = localise.diagnose(verifier, verdict)
    return outcome


def table(cells: dict[str, dict[str, str]]) -> str:
    """The table of the documentation: what agrees, by library, and what does not, by what is known of it. cells: as the
    file of --json has them."""
    known: dict[str, list[str]] = {}
    for name in cells:
        known.setdefault(CELLS[name].expected, []).append(name)
    agree = known.pop("")
    lines = [f"{len(agree)} of {len(cells)} agree.", "", "| agrees | cells |", "| --- | --- |"]
    for library in ("Megatron", "DeepSpeed"):
        mine = [name for name in agree if name.startswith(library)]
        lines.append(f"| {library} ({len(mine)}) | {_listed(mine)} |")
    lines += ["", "| does not | what it is |", "| --- | --- |"]
    lines += [f"| {names[0].split(':')[0]}: {_listed(names)} | {_linked(text)} |" for text, names in known.items()]
    return "\n".join(lines)


def _listed(names: list[str]) -> str:
    """Without the library; stages of ZeRO together."""
    stages: dict[str, list[str]] = {}
    for name in names:
        _, rest = name.split(": ", 1)
        match = re.match(r"ZeRO-(\d)(?:, )?(.*)", rest)
        stages.setdefault(match[2] or "as documented" if match else rest, []).extend(match[1] if match else "")
    return "; ".join(f"{what} (ZeRO-{', '.join(at)})" if at else what for what, at in stages.items())


def _linked(text: str) -> str:
    return re.sub(r"https://github\.com/([\w.-]+/[\w.-]+)/(?:issues|pull)/(\d+)", r"[\1#\2](\g<0>)", text)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks libraries", description=__doc__)
    parser.add_argument("--only", nargs="*", default=[""], help="cells whose name holds one of these texts")
    parser.add_argument("--diagnose", action="store_true", help="look for the axes that a difference needs")
    parser.add_argument("--json", type=Path, help="also write the outcomes here, beside those of other cells")
    args = parser.parse_args(argv)
    names = [name for name in CELLS if any(text in name for text in args.only)]
    if not names:
        parser.error(f"--only {' '.join(args.only)} fits none of: {', '.join(CELLS)}")
    references: dict[str, Reference] = {}
    unexpected = 0
    for name in names:
        begun = time.monotonic()
        outcome = outcome_of(name, references, diagnosed=args.diagnose)
        unexpected += (outcome.word == "agrees") == bool(CELLS[name].expected)
        print(f"{time.monotonic() - begun:5.1f} s  {outcome.word:8} {name}: {outcome.words()}", flush=True)
        if args.json:
            _note(args.json, outcome)
    return 1 if unexpected else 0


def _note(path: Path, outcome: Outcome) -> None:
    """Add an outcome to the file, in the order of the cells."""
    had = json.loads(path.read_text())["cells"] if path.exists() else {}
    had[outcome.name] = {"outcome": outcome.word, "how": outcome.words()}
    rows = {name: had[name] for name in CELLS if name in had}
    path.write_text(json.dumps({"conditions": conditions(), "cells": rows}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
