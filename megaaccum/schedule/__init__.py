"""Pipeline schedules as data: built, validated, priced, drawn, and run.

Everything that this package exports works without torch, so that a planner can call it for every candidate.
"""

from megaaccum.schedule.actions import Action, Pair, Schedule, make_schedule, parse
from megaaccum.schedule.build import build, names, register
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
