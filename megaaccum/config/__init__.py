"""The configuration of a run: `load` reads it, `resolve` derives a `Plan` for a number of ranks."""

from megaaccum.config.layout import RankLayout
from megaaccum.config.load import load
from megaaccum.config.plan import Plan, resolve
from megaaccum.config.schema import Config

__all__ = ["Config", "Plan", "RankLayout", "load", "resolve"]
