"""The configuration of a run: read it with `load`, settle it for a number of ranks with `resolve`."""

from megaaccum.config.layout import RankLayout
from megaaccum.config.load import load
from megaaccum.config.plan import Plan, resolve
from megaaccum.config.schema import Config

__all__ = ["Config", "Plan", "RankLayout", "load", "resolve"]
