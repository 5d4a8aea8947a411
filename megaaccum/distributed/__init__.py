"""Ranks: `start` joins them, `groups` groups them, `agreement` keeps them together, `sums` adds over them; `rng` has
their random states, `breadcrumbs` their notes for the watchdog.
"""
