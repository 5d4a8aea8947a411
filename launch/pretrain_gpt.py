"""Pretraining under a launcher that starts the ranks itself.

    deepspeed [--hostfile HOSTS] launch/pretrain_gpt.py --config CONFIG [--key value ...]
    torchrun --nproc-per-node 4 launch/pretrain_gpt.py --config CONFIG [--key value ...]

The same job as `megaaccum train CONFIG`. Every rank prints its own error and ends with an exit code that is not 0.
"""

import os
import sys

from megaaccum import preload
from megaaccum.cli import main


def without_local_rank(argv: list[str]) -> list[str]:
    """`argv` without the --local_rank=N that the deepspeed launcher appends; N goes to LOCAL_RANK if that is unset."""
    rest = []
    for argument in argv:
        name, _, value = argument.partition("=")
        if name in ("--local_rank", "--local-rank") and value:
            os.environ.setdefault("LOCAL_RANK", value)
        else:
            rest.append(argument)
    return rest


if __name__ == "__main__":
    preload.prepare()
    sys.exit(main(["train", *without_local_rank(sys.argv[1:])]))
