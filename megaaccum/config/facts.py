"""Facts about one key beside its type and default: the field of the schema carries them, and no list elsewhere."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """The annotation of a field: `Annotated[int, Facts(at_least=1)]`."""

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None
    required: bool = False
    """A run cannot do without it; the default is a value out of range."""
    needs: str = ""
    """The key (or key and value, or several with `|` between) without which this one has no effect."""
    core: bool | str = False
    """It is a field of megatron-core's TransformerConfig: under the same name, or under this one."""
    fixed: bool = False
    """A checkpoint is read only into a model with the same value."""
    unseen: bool = False
    """Another value computes something else with the same weights: a run resumes only with the same one."""
    lr_state: str = ""
    """The number of Megatron's learning-rate schedule that it decides; a run resumes only with the same one."""
    in_samples: bool = False
    """That number counts samples, although the key counts steps."""
    group_rate: bool = False
    """It decides the rate of some of the parameters, or a factor on it; a run resumes only with the same one."""
    planned: bool = False
    """`megaaccum plan` decides it."""
    per_host: bool = False
    """It may differ between hosts: a path, or how a host does its part. The numbers of the run do not depend on it."""

    def core_name(self, name: str) -> str:
        """The field of TransformerConfig that the key `name` becomes; empty if it becomes none."""
        return self.core if isinstance(self.core, str) else name if self.core else ""

    def allow(self, value: float) -> bool:
        """Whether a number is in range."""
        return (
            (self.at_least is None or value >= self.at_least)
            and (self.above is None or value > self.above)
            and (self.at_most is None or value <= self.at_most)
            and (self.below is None or value < self.below)
        )

    @property
    def range(self) -> str:
        """'at least 0 and below 1'; empty without a bound."""
        bounds = {"at least": self.at_least, "more than": self.above, "at most": self.at_most, "below": self.below}
        return " and ".join(f"{words} {bound:g}" for words, bound in bounds.items() if bound is not None)
