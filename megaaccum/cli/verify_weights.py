"""`megaaccum verify --weights DIR`: a Hugging Face folder holds what was exported, and computes what transformers says.

    megaaccum verify --weights DIR [--run RUN] [--no-logits]

Compares the digests that an export writes beside the weights; with --run, every tensor with the checkpoint of that run,
bit by bit; and the logits of one batch, of this model on one rank with those of transformers, in FP32 (1e-5 relative).
Exit codes: 0 all agree, 1 something differs, which is named.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from megaaccum.cli.arguments import command_parser
from megaaccum.distributed import preload


def main(argv: Sequence[str]) -> int:
    """Verify a folder of weights, and return the exit code. Raises MegaaccumError."""
    parser = command_parser("verify", __doc__)
    add = parser.add_argument
    add("--weights", type=Path, required=True, metavar="DIR", help="the folder of a model")
    add("--run", type=Path, metavar="RUN", help="output_dir of the run that it was exported from")
    add("--no-logits", action="store_true", help="compare bytes alone, for a model too large for a host")
    args = parser.parse_args(list(argv))
    preload.libraries()  # the CPU lane's stand-ins have to be there before Megatron is imported
    from megaaccum.distributed.start import end_process_group
    from megaaccum.pretrain.weights import compare

    problems = compare.altered(args.weights, args.run)
    if not problems and not args.no_logits:
        distance = compare.logits_distance(args.weights)
        end_process_group()
        print(f"logits: {distance:.1e} from transformers' (at most {compare.TOLERANCE:.0e})")
        if not distance <= compare.TOLERANCE:
            problems = [f"{args.weights} computes other logits here than in transformers"]
    print("\n".join(problems) or f"{args.weights}: all tensors agree", file=sys.stderr if problems else None)
    return int(bool(problems))
