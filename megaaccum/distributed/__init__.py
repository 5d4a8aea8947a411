"""Ranks: joined, grouped, kept in agreement, added up over.

| module | holds |
| --- | --- |
| `start`, `preload` | joins the ranks; prepares a process |
| `groups` | process groups |
| `agreement` | checks that ranks do the same, and raises on all |
| `sums` | sums over ranks, also in host memory on a thread |
| `rng` | random states of this process |
| `breadcrumbs` | notes for the watchdog |
"""
