"""The speed of a run: tokens, floating-point operations, and the share of the device's peak."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """The work of one optimizer step on the configured batch, from which seconds give rates."""

    tokens_per_step: int
    """Tokens of the global batch, masked ones included."""
    flops_per_step: float | None
    """Model FLOPs of one step over all ranks (`flops.step_flops`); None if unknown, and then the rates lack them."""
    world_size: int
    """Ranks of the run."""
    peak_flops: float | None
    """FLOP/s of one device at best (`flops.peak_flops`); None where unknown, and then there is no MFU."""

    sequences_per_step: int = 1
    """Sequences in the configured global batch."""

    def share(self, record: Mapping[str, Any]) -> float:
        """The share of the configured batch that the step of `record` had: less than 1 during batch warm-up."""
        return float(record.get("global_batch_size", self.sequences_per_step) / self.sequences_per_step)

    def rates(self, seconds_per_step: float, share: float = 1.0) -> dict[str, float]:
        """`tokens_per_second` over all ranks and, if known, `tflops_per_second_per_rank`, and `mfu` between 0 and 1.
        share: of the configured batch, processed in these seconds."""
        assert seconds_per_step > 0, f"a step took {seconds_per_step} seconds"
        rates = {"tokens_per_second": share * self.tokens_per_step / seconds_per_step}
        if self.flops_per_step is not None:
            flops_per_rank = share * self.flops_per_step / seconds_per_step / self.world_size
            rates["tflops_per_second_per_rank"] = flops_per_rank / 1e12
            if self.peak_flops is not None:
                rates["mfu"] = flops_per_rank / self.peak_flops
        return rates
