"""Counts where the host would wait for a GPU: reads of a tensor's value, and waits for a stream, an event or all."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import torch

from megaaccum.platform import cpu
from tests.support.parity import Case, Rig

OF_THE_HOST = (
    "gpt_forward.py:_counts",
    "random.py:fork",
    "utils.py:is_invalid_grad_norm",
    "nonfinite.py:_is_finite_on_the_host",
)
"""Masks as the data reader gives them; the CPU's random state, which Megatron's tracker compares; a norm of 0 that
ZeRO-3 is given (upstream/zero.py); gradients in host memory."""
READS = ("item", "tolist", "__bool__", "__int__", "__float__", "__index__")


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Inside, counts the reads and waits by the place in megaaccum, DeepSpeed or Megatron that makes them. Reads of
    tensors that lie in host memory on a machine with a GPU too (OF_THE_HOST) are left out."""
    found: Counter[str] = Counter()

    def note(name: str) -> None:
        place = _place(name)
        if not any(of_the_host in place for of_the_host in OF_THE_HOST):
            found[place] += 1

    def noting(name, function):
        return lambda *args, **keys: (note(name), function(*args, **keys))[1]

    with ExitStack() as stack:
        for name in READS:
            stack.enter_context(patch.object(torch.Tensor, name, noting(name, getattr(torch.Tensor, name))))
        for owner in (torch.cuda, cpu._Stream, cpu._Event):
            stack.enter_context(patch.object(owner, "synchronize", noting("synchronize", owner.synchronize)))
        yield found


def _place(name: str) -> str:
    for frame in reversed(traceback.extract_stack()[:-2]):
        for package in ("megaaccum/", "deepspeed/", "megatron/"):
            if package in frame.filename and "tests/" not in frame.filename:
                return f"{frame.filename[frame.filename.rindex(package) :]}:{frame.name} {name}"
    return f"elsewhere {name}"


# --- on ranks --------------------------------------------------------------------------------------------------------


def uploads(case: Case) -> int:
    """Tensors of micro-batches that a step of `case` puts on this rank's device."""
    rig, places = Rig.of(case), Counter[str]()
    batch, to = rig.microbatches(), torch.Tensor.to

    def noted(self, *args, **keys):
        places[_place("to")] += any(isinstance(each, torch.device) for each in args)
        return to(self, *args, **keys)

    with patch.object(torch.Tensor, "to", noted):
        rig.train_step.train(batch, step=0)
    return sum(count for place, count in places.items() if "gpt_forward.py" in place)


def of_a_step(case: Case) -> dict[str, int]:
    """By place, in the second step of `case` on this rank, with ZeRO-3 as on a GPU: its reduction has a stream of its
    own, and waits for it where DeepSpeed would."""
    from deepspeed.accelerator import get_accelerator

    rig = Rig.of(case)
    rig.train(0)
    batch = rig.microbatches()
    rig.backend.driver.optimizer.reduce_and_partition_stream = cpu._Stream()  # type: ignore[attr-defined]
    with patch.object(get_accelerator(), "resolves_data_dependency", lambda: False), counted() as found:
        rig.train_step.train(batch, step=1)
    return dict(found)
