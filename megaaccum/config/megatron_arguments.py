"""Verdicts on Megatron's arguments: which run, are noted or are refused (megatron_arguments.yaml), unless they are keys
of megaaccum's or fields of Megatron's model configuration; and what those that concern the step mean. For `check` and
for Megatron's own loop alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, cast

from megaaccum.texts import packaged_yaml

Verdict = Literal["run", "note", "refuse"]
VERDICTS: tuple[Verdict, ...] = ("run", "note", "refuse")


@dataclass(frozen=True, slots=True)
class Listed:
    """Arguments that share a verdict and its reason."""

    title: str
    verdict: Verdict
    why: str
    """The reason, for the reader of a note, a problem or the documentation."""
    instead: str
    """The replacement for a refused argument."""
    names: tuple[str, ...]
    """argparse destinations."""
    loop: Verdict | None
    """The verdict in Megatron's own loop (`megaaccum.loop.pretrain`), where they act through an object that is
    replaced; None where they are Megatron's own."""

    def text(self, shown: str) -> str:
        """The note or problem on the arguments `shown`."""
        return f"{shown}: {self.why}; {self.instead}." if self.instead else f"{shown}: {self.why}."


@cache
def _tables() -> dict[str, Any]:
    return cast("dict[str, Any]", packaged_yaml("megaaccum.config", "megatron_arguments.yaml"))


def _rows(tables: dict[str, Any], *, loop: bool = False) -> tuple[Listed, ...]:
    return tuple(
        Listed(
            row["title"], verdict, row["why"], row.get("instead", ""), tuple(row["names"].split()),
            verdict if loop else row.get("loop"),
        )
        for verdict in VERDICTS
        for row in tables[verdict]
    )  # fmt: skip


@cache
def lists() -> tuple[Listed, ...]:
    """Every list, in the order of megatron_arguments.yaml."""
    return _rows(_tables())


@cache
def listed() -> dict[str, Listed]:
    """The list of each listed argument, by destination."""
    return {name: row for row in lists() for name in row.names}


@cache
def lists_in_loop() -> tuple[Listed, ...]:
    """The lists that hold in Megatron's own loop."""
    return (*(row for row in lists() if row.loop), *_rows(_tables()["loop"], loop=True))


@cache
def handled(table: str) -> frozenset[str]:
    """The names in a table of those that code treats: by_rules, converted, owned_fields."""
    return frozenset(_tables()["handled"][table].split())


def fork_flags() -> dict[str, tuple[str, ...]]:
    """Destinations of Megatron-DeepSpeed's own flags, by kind of value (switch, int, float, str, words)."""
    return {kind: tuple(names.split()) for kind, names in _tables()["fork"].items()}


# --- what arguments of the step mean --------------------------------------------------------------------------------

LOSS_SCALE = ("loss_scale", "initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")
"""Arguments of the loss scale, which have the names of their keys."""

NO_EFFECT_ON_SCALE = {
    True: "no effect beside --loss-scale, which fixes the scale",
    False: "only FP16 needs its loss scaled",
}
"""Why an argument of the loss scale has no effect, with FP16 and without."""


def loss_scale_keys(args: Any) -> tuple[str, ...]:
    """The arguments of the loss scale that have an effect: none without FP16, and one if the scale is fixed."""
    if not args.fp16:
        return ()
    return ("loss_scale",) if args.loss_scale else LOSS_SCALE[1:]


def distributed_optimizer(args: Any, *, offload: bool) -> tuple[dict[str, object], str]:
    """(keys that --use-distributed-optimizer sets, the note on it if another backend takes its place).

    offload: the optimizer goes to host memory.
    """
    if offload:
        return {}, "DeepSpeed ZeRO-3, which offload needs."
    if args.fp16:
        return {"zero_stage": 1}, "DeepSpeed ZeRO-1 shards the same optimizer state, for FP16."
    return {"backend": "megatron"}, ""


MUON = (
    "muon_momentum", "muon_split_qkv", "muon_nesterov", "muon_scale_mode", "muon_fp32_matmul_prec",
    "muon_coefficient_type", "muon_num_ns_steps", "muon_extra_scale_factor",
)  # fmt: skip
"""Arguments of Muon, which have the names of their keys."""
LION = ("lion_beta1", "lion_beta2")
"""Arguments of Lion, which have the names of their keys."""
LION_THERE = (
    "--optimizer lion: it steps every parameter, with --lion-beta1 and --lion-beta2. Megatron 0.19 steps norms, biases,"
    " word embeddings and the output layer with AdamW, and gives Lion Adam's betas: other numbers."
)
SOAP: Mapping[str, object] = {"muon_split_qkv": False, "muon_split_gated": False}
"""Keys of SOAP, which Megatron-core gives no arguments and takes fused weights whole for (0.19)."""


def optimizer_of(args: Any, written: Mapping[str, str]) -> tuple[str, list[str], list[str]]:
    """(the key `optimizer`, notes, problems): AdamW, Lion, SOAP or Muon, of which only the mode that orthogonalises
    whole matrices is Muon in every layout. written: arguments as they stand on the command line, by destination."""
    tp, problems, notes = args.tensor_model_parallel_size, [], []
    if args.optimizer == "soap":
        blocks = [f"--optimizer soap: whole matrices; Megatron steps each of their {tp} blocks alone."]
        return "soap", blocks if tp > 1 else [], []
    if args.optimizer == "lion":
        return "lion", [LION_THERE], []
    if args.optimizer == "adam":
        return "adam", [], []
    if args.optimizer not in ("muon", "dist_muon"):
        return "adam", [], [f"{written['optimizer']}: write adam (AdamW), lion, muon or soap."]
    if "muon_tp_mode" in written and args.muon_tp_mode == "blockwise" and tp > 1:
        problems.append(
            f"{written['muon_tp_mode']}: it orthogonalises each of {tp} blocks of a matrix, another optimizer for"
            " each tensor-parallel size; write --muon-tp-mode duplicated, which is the whole matrix."
        )
    elif tp > 1 and args.muon_tp_mode == "blockwise":
        notes.append(
            "--optimizer muon: whole matrices (--muon-tp-mode duplicated); Megatron's default cuts them into blocks."
        )
    if args.muon_scalar_optimizer != "adam":
        problems.append(f"{written['muon_scalar_optimizer']}: write adam, which steps the others here.")
    return "muon", notes, problems


ORDER_OF_COLLECTIVES = (
    "--deterministic-mode: at ZeRO-1 and -2 with the optimizer in host memory or BF16 messages, sums over ranks are in"
    " the order of the collectives, so a run repeats up to rounding."
)


def repeats_to_the_bit(keys: Mapping[str, object]) -> bool:
    """Whether the key `deterministic` holds beside other keys; otherwise ORDER_OF_COLLECTIVES is the note."""
    by_deepspeed = keys.get("backend", "deepspeed") == "deepspeed"
    by_its_sums = keys.get("offload_optimizer") == "cpu" or keys.get("grad_reduce_dtype") == "bf16"
    return not (by_deepspeed and keys.get("zero_stage", 3) != 3 and by_its_sums)
