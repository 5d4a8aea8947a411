"""One rank of tests/multiproc/test_fp8.py: runs cases of cases.py in turn and writes what they return.

python -m tests.support.fp8.worker RESULTS CASE...   with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path


def main(results: Path, names: list[str]) -> None:
    prepare()
    import torch.distributed as dist

    from megaaccum.distributed import preload
    from tests.support.fp8 import cases

    preload.freeze_objects()
    dist.init_process_group("gloo", timeout=timedelta(seconds=100))
    told = {}
    for name in names:
        start = time.process_time()
        try:
            told[name] = {"result": getattr(cases, name)(), "cpu_seconds": time.process_time() - start}
        except Exception:  # whatever it is, the test shows it
            told[name] = {"error": traceback.format_exc()}
        results.write_text(json.dumps(told))
        if "error" in told[name]:
            break  # the other rank may be waiting for this one
    dist.destroy_process_group()


def prepare() -> None:
    """Transformer Engine in, megaaccum's own hiding of it out, and the rest of the CPU lane as it is."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from megaaccum.distributed import preload
    from megaaccum.platform import cpu

    preload.prepare()
    from tests.support.fp8 import te_on_cpu

    te_on_cpu.install()
    import torch

    torch.set_num_threads(1)
    te_on_cpu.use_megatrons_attention()
    cpu._redirect_rng()
    cpu.has_accelerator = lambda: False
    from megaaccum.pretrain.model import machine
    from megaaccum.upstream import pytorch, zero

    zero.tame_deepspeed()
    pytorch.tame_gloo()
    problem = machine.device_problem
    machine.device_problem = lambda recipe, capability, cuda: problem(recipe, (9, 0), "13.0")  # as te_on_cpu plays


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
