"""Pipeline schedules as data. Everything that this package exports works without torch, so that a planner can call it
for every candidate.

| module | holds |
| --- | --- |
| `actions`, `table` | a schedule as data; its CSV file |
| `registry` | schedules by name: `build`, `register` |
| `builders`, `v_half` | the built-in tables |
| `validate` | the proof that a table cannot deadlock |
| `simulate`, `memory` | its seconds, what it holds |
| `exchange` | the all-to-all of experts, a lane beside a rank's compute |
| `pass_numbers` | orders as numbers, for the search |
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
