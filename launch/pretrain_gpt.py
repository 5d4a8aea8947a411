"""Pretraining under a launcher that starts the ranks itself.

    deepspeed [--hostfile HOSTS] launch/pretrain_gpt.py --config CONFIG [--key value ...]
    torchrun --nproc-per-node 4 launch/pretrain_gpt.py --config CONFIG [--key value ...]
    srun --ntasks-per-node 8 python launch/pretrain_gpt.py --config CONFIG [--key value ...]

The same job as `megaaccum train CONFIG`. Every rank prints its own error and ends with an exit code that is not 0.
"""

import os
import sys

from megaaccum.cli import main
from megaaccum.config import slurm
from megaaccum.distributed import preload
from megaaccum.pretrain.launch.local import threads_per_rank


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


def share_cores() -> None:
    """Threads of this rank, unless OMP_NUM_THREADS says; before torch is imported. DeepSpeed and Slurm let every rank
    take all cores.
    """
    slurm.adopt()
    local_ranks = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or "1"
    os.environ.setdefault("OMP_NUM_THREADS", str(threads_per_rank(int(local_ranks))))


if __name__ == "__main__":
    share_cores()
    preload.prepare()
    sys.exit(main(["train", *without_local_rank(sys.argv[1:])]))
