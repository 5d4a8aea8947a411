"""`megaaccum export`: write a checkpoint of a run of `megaaccum train` as a Hugging Face folder: weights in safetensors
files, config.json and the tokenizer; as one of Megatron's checkpoints; or in one file. It reads the checkpoint of any
layout in one process, one parameter at a time, and needs no GPU. The folder appears when all of it is written.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

from megaaccum.cli.arguments import command_parser, refuse_idle
from megaaccum.errors import ConfigError

_UNITS = {"": 1, "MB": 10**6, "GB": 10**9}
_OF_HF = ("--via", "--like", "--family", "--max_shard_size")


def main(argv: Sequence[str]) -> int:
    """Run `megaaccum export` with these arguments; returns the exit code. Raises MegaaccumError."""
    args = _parse(argv)
    if (match := re.fullmatch(r"([1-9]\d*)(MB|GB|)", args.max_shard_size)) is None:
        raise ConfigError(f"--max_shard_size {args.max_shard_size}: give bytes, or a number with MB or GB, as in 5GB")
    from megaaccum.platform import cpu

    cpu.install()  # before Megatron is imported
    from megaaccum.pretrain.weights import torch_dist_out
    from megaaccum.pretrain.weights.weights_out import Export, consolidate, current_of

    if args.consolidated is not None:
        consolidate(args.run, args.consolidated, checkpoint=args.checkpoint, dtype=args.dtype or "fp32")
        print(f"wrote {args.consolidated}: the weights of {args.run} in {args.dtype or 'fp32'}")
        return 0
    if args.megatron is not None:
        source, only_weights = current_of(args.run, args.checkpoint), args.only_weights
        step = torch_dist_out.write(args.megatron, *source, dtype=args.dtype, only_weights=only_weights)
        what = "the weights" if only_weights else "the weights and the optimizer's state"
        print(f"wrote {args.megatron}: {what} of {args.run} as Megatron's checkpoint of iteration {step}")
        return 0
    export = Export.of_run(
        args.run,
        checkpoint=args.checkpoint,
        family=args.family,
        dtype=args.dtype,
        like=args.like,
        via_bridge=bool(args.via),
    )
    export.write(args.hf, max_shard_bytes=int(match[1]) * _UNITS[match[2]])
    made = "made of the run's configuration" if export.content is None else f"that of {export.source}"
    kind = export.family or "Megatron-Bridge's"
    print(f"wrote {args.hf}: the {kind} model of {export.checkpoint}; config.json is {made}")
    return 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    from megaaccum.pretrain.weights.rows import families

    parser = command_parser("export", __doc__)
    add = parser.add_argument
    add("run", type=Path, metavar="RUN", help="output_dir of a run")
    one_of = parser.add_mutually_exclusive_group(required=True).add_argument
    one_of("--hf", type=Path, metavar="DIR", help="the folder of the model to write: new, or empty")
    one_of("--consolidated", type=Path, metavar="DIR", help="a folder for one file under the run's own names")
    one_of("--megatron", type=Path, metavar="DIR", help="a folder for Megatron's --load, of its format torch_dist")
    add("--checkpoint", type=Path, metavar="DIR", help="a checkpoint's folder (default: the current one)")
    add("--only_weights", action="store_true", help="with --megatron: without the optimizer's state")
    add("--family", choices=list(families()["families"]), help="default: the first that has the model")
    add("--like", type=Path, metavar="DIR", help="a model with the config.json and tokenizer (default: init_from)")
    add("--via", choices=("bridge",), help="weights by Megatron-Bridge's mapping, if it is installed")
    add("--dtype", choices=("fp32", "bf16", "fp16"), help="default: params_dtype of the run")
    add("--max_shard_size", default="5GB", metavar="SIZE", help="the most bytes of a file (default: 5GB)")
    args = parser.parse_args(list(argv))
    refuse_idle(parser, args, dict.fromkeys(_OF_HF, "--hf") | {"--only_weights": "--megatron"})
    return args
