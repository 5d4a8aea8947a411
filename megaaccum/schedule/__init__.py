"""Pipeline schedules as data: `registry` builds one by name, `builders` and `v_half` make the tables, `validate` proves
that they cannot deadlock, `simulate` prices and `render` draws them.

Everything that this package exports works without torch, so that a planner can call it for every candidate.
"""

from megaaccum.schedule.actions import Action, Pair, Schedule, make_schedule, parse
from megaaccum.schedule.registry import build, names, register
from megaaccum.schedule.simulate import Costs, Simulation, held, simulate
from megaaccum.schedule.table import read_csv, write_csv
from megaaccum.schedule.validate import Footprint, validate

__all__ = [
    "Action",
    "Costs",
    "Footprint",
    "Pair",
    "Schedule",
    "Simulation",
    "build",
    "held",
    "make_schedule",
    "names",
    "parse",
    "read_csv",
    "register",
    "simulate",
    "validate",
    "write_csv",
]
