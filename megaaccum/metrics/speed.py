"""How fast a run goes: tokens, floating-point operations, and the share of what the device could do."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """The work of one optimizer step, from which its seconds make rates."""

    tokens_per_step: int
    """Tokens of the global batch, masked ones included."""
    flops_per_step: float
    """Model FLOPs of one step over all ranks (`megaaccum.model.flops.step_flops`)."""
    world_size: int
    """Ranks of the run."""
    peak_flops: float | None
    """FLOP/s of one device at best (`model.flops.peak_flops`); None where unknown, and then there is no MFU."""

    def rates(self, seconds_per_step: float) -> dict[str, float]:
        """`tokens_per_second` over all ranks, `tflops_per_second_per_rank`, and `mfu` between 0 and 1."""
        assert seconds_per_step > 0, f"a step took {seconds_per_step} seconds"
        flops_per_rank = self.flops_per_step / seconds_per_step / self.world_size
        rates = {
            "tokens_per_second": self.tokens_per_step / seconds_per_step,
            "tflops_per_second_per_rank": flops_per_rank / 1e12,
        }
        if self.peak_flops is not None:
            rates["mfu"] = flops_per_rank / self.peak_flops
        return rates
