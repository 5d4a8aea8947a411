"""Counts where the host would wait for a GPU: reads of a tensor's value, waits for a stream, an event or all, and
copies of a number that the host makes."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch

from tests.support.parity import Case, Rig

OF_THE_HOST = (
    "gpt_forward.py:_counts",
    "random.py:fork",
    "utils.py:is_invalid_grad_norm",
    "nonfinite.py:_is_finite_on_the_host",
    "sharding/base.py:run item",
)
"""Masks as the data reader gives them; the CPU's random state, which Megatron's tracker compares; a norm of 0 that
ZeRO-3 is given (upstream/zero.py); gradients in host memory; the count of steps of torch's AdamW."""
BUDGET = 3
"""Waits in a step that docs/concepts/gpu.md states, beside one for three of ZeRO-3's buckets."""
READS = ("item", "tolist", "__bool__", "__int__", "__float__", "__index__")


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Inside, counts the reads, waits and copies by the place in megaaccum, DeepSpeed or Megatron that makes them.
    Reads of tensors that lie in host memory on a machine with a GPU too (OF_THE_HOST) are left out. A copy is one to a
    device of what `torch.tensor` or `torch.as_tensor` made of the host's numbers, unless it says non_blocking."""
    found: Counter[str] = Counter()

    def note(name: str) -> None:
        place = _place(name)
        if not any(of_the_host in place for of_the_host in OF_THE_HOST):
            found[place] += 1

    def noting(name, function):
        return lambda *args, **keys: (note(name), function(*args, **keys))[1]

    def making(name, function):
        def make(data, *args, **keys):
            made = function(data, *args, **keys)
            if keys.get("device") is not None and not isinstance(data, torch.Tensor):
                note(f"{name} on the device")
            made.is_of_host = keys.get("device") is None and not isinstance(data, torch.Tensor)
            return made

        return make

    def moving(self, *args, to=torch.Tensor.to, **keys):
        is_moved = any(isinstance(each, torch.device) for each in (*args, *keys.values()))
        if is_moved and getattr(self, "is_of_host", False) and not keys.get("non_blocking"):
            note("copy")
        return to(self, *args, **keys)

    with ExitStack() as stack:
        stack.enter_context(patch.object(torch.Tensor, "to", moving))
        for name in ("tensor", "as_tensor"):
            stack.enter_context(patch.object(torch, name, making(name, getattr(torch, name))))
        for name in READS:
            stack.enter_context(patch.object(torch.Tensor, name, noting(name, getattr(torch.Tensor, name))))
        for owner in (torch.cuda, torch.cuda.Stream, torch.cuda.Event):
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


def of_a_step(case: Case, spoiled: bool = False) -> tuple[dict[str, int], int]:
    """(by place, the number of buckets that ZeRO-3 reduces) in the second step of `case` on this rank, with DeepSpeed
    as on a GPU: its reductions have a stream of their own and take their time, and it waits for them where it would.
    spoiled: by DeepSpeed's own waits."""
    from deepspeed.accelerator import get_accelerator

    rig, buckets = Rig.of(case), list[Any]()
    optimizer = rig.backend.driver.optimizer  # type: ignore[attr-defined]
    rig.train(0)
    batch = rig.microbatches()
    if hasattr(optimizer, "reduce_and_partition_stream"):
        optimizer.reduce_and_partition_stream = torch.cuda.Stream()
    if spoiled:
        optimizer.max_param_reduce_events = 2
    on_gpu = {name: lambda: False for name in ("resolves_data_dependency", "handles_memory_backpressure")}

    class ToCome(torch.cuda.Event):
        """An event that has not happened when the host asks."""

        def query(self) -> bool:
            return False

    def event() -> ToCome:
        buckets.append(ToCome())
        return buckets[-1]

    accelerator: Any = get_accelerator()
    is_one = patch.object(type(accelerator), "Event", property(lambda self: event))
    with patch.multiple(accelerator, **on_gpu), is_one, counted() as found:
        rig.train_step.train(batch, step=1)
    return dict(found), len(buckets)
