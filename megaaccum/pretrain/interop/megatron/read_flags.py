"""The correspondence of Megatron's arguments and megaaccum's keys. Most have the same name; `several_flags` has
those that are not one key each."""

from __future__ import annotations

import typing
from collections.abc import Callable, Collection, Sequence
from enum import Enum
from pathlib import Path

from megaaccum.config import precision
from megaaccum.config.keys import all_keys
from megaaccum.config.megatron_arguments import SOAP, handled, listed, loss_scale_keys
from megaaccum.pretrain.interop.megatron.parser import (
    RENAMED,
    ParsedFlags,
    built_fields,
    model_fields,
    parse,
    refuse_and_note_listed,
)
from megaaccum.pretrain.interop.megatron.several_flags import RULES, Reading

CONSTANTS: dict[str, tuple[str, object]] = {
    "calculate_per_token_loss": ("loss_norm", "token"),
    "optimizer_cpu_offload": ("offload_optimizer", "cpu"),
    "use_rotary_position_embeddings": ("position_embedding_type", "rope"),
    "enable_zbh1_pipeline": ("schedule", "zb-h1"),
    "overlap_p2p_communication": ("overlap_p2p_comm", True),
}
"""Switches that set a key to a constant."""

ALONE = {"use_rope_scaling": "rope_scaling", "rotary_seq_len_interpolation_factor": "seq_len_interpolation_factor"}
"""Fields of arguments that Megatron's conversion renames and that can be given beside a file."""


def read_flags(
    argv: Sequence[str],
    *,
    locate: Callable[[str], Path] = Path,
    world_size: int | None = None,
    whole: bool = True,
    outranking: Collection[str] = (),
) -> Reading:
    """The keys that a list of Megatron flags sets, with notes and problems. Arguments as those of `parser.parse`.
    outranking: keys among them, under their own names, that hold against Megatron's flags."""
    given = parse(argv, locate=locate, world_size=world_size, whole=whole)
    refuse_and_note_listed(given)
    problems = given.problems + given.own.problems
    reading = Reading(whole=whole, outranking=outranking, notes=given.notes + given.own.notes, problems=problems)
    reading.problems += [unknown.problem() for unknown in given.own.unknown]
    for key, value in given.own.values.items():
        place = given.own.places[key]
        given.written.setdefault(place, place)
        reading.put(key, value, given, place)
    _put_same_names(given, reading)
    for rule in RULES:
        rule(given, reading)
    if whole:
        _put_defaults(given, reading)
    _put_model_fields(given, reading)
    return reading


def _put_same_names(given: ParsedFlags, reading: Reading) -> None:
    for name in given.written:
        value = getattr(given.args, name, None)
        if name in handled("by_rules") or value is None:
            continue
        if name in CONSTANTS:
            reading.put(*CONSTANTS[name], given, name)
        elif name == "split":
            reading.put(name, value.strip("'\""), given, name)  # Megatron looks for the numbers alone
        elif isinstance(value, Enum) and name in all_keys():
            reading.put(name, value.name, given, name)
        elif name in all_keys():
            annotation = all_keys()[name].annotation
            scalar = "list[" not in str(annotation) or {str, float} & {*typing.get_args(annotation)}
            one = isinstance(value, list) and len(value) == 1 and scalar
            reading.put(name, value[0] if one else value, given, name)
        elif name in RENAMED:
            reading.put(RENAMED[name], value, given, name)


def _put_defaults(given: ParsedFlags, reading: Reading) -> None:
    """Set Megatron's defaults where megaaccum's differ."""
    args, values = given.args, reading.values
    theirs: dict[str, object] = {"loss_norm": "microbatch", "log_interval": args.log_interval, "nonfinite": "skip"}
    theirs["keep_last"] = int(args.save_retain_interval is not None)  # beside those that are retained
    if not precision.KEYS & values.keys() and reading.deepspeed is None:
        theirs["params_dtype"] = "fp32"
    if values.get("optimizer") == "muon":
        theirs |= {"muon_momentum": args.muon_momentum, "muon_split_gated": False}
    theirs |= SOAP if values.get("optimizer") == "soap" else {}
    if args.eval_interval is None:
        theirs["eval_interval"] = 0
    if reading.deepspeed is None and not args.loss_scale:
        theirs |= {name: getattr(args, name) for name in loss_scale_keys(args)}
    sizes = {"global_batch_size", "device_batch_size", "grad_accum_steps", "step_batch_size_schedule"}
    if args.micro_batch_size and not sizes & values.keys():
        theirs["grad_accum_steps"] = 1
        if "pp_microbatches" not in values:
            theirs["pp_microbatches"] = 1
    if not {"data_path", "train_data_path", "mock_data"} & values.keys():
        theirs["mock_data"] = True
        reading.notes.append("no data path is given: the samples are mock data, as in Megatron.")
    for key, value in theirs.items():
        if key not in values:
            reading.put(key, value, given)


def _put_model_fields(given: ParsedFlags, reading: Reading) -> None:
    """Set the fields of Megatron's model configuration that are no keys; for a whole run by Megatron's own
    conversion."""
    if given.checked is not None:
        asked = {name for name in given.written if name in model_fields() or name in handled("converted")}
        hybrid = given.has("hybrid_layer_pattern", "hybrid_override_pattern")
        if not (asked - all_keys().keys() - listed().keys() or given.args.multi_latent_attention or hybrid):
            return
        taken = built_fields(given)
        if given.args.multi_latent_attention:
            taken["rope_type"] = given.args.rope_type or "yarn"  # megaaccum's own default is plain rope
    else:
        taken = {name: getattr(given.args, name) for name in given.written if name in model_fields()}
        taken |= {ALONE[name]: getattr(given.args, name) for name in given.written if name in ALONE}
        reading.problems += [
            f"{given.written[name]}: only a whole list of flags can have it; beside a file write yarn_* under model."
            for name in given.written
            if name in handled("converted") - ALONE.keys()
        ]
    owned = handled("owned_fields") | all_keys().keys() | listed().keys() | handled("by_rules") | RENAMED.keys()
    reading.megatron |= {name: value for name, value in taken.items() if name not in owned}
