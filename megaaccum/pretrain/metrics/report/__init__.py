"""The report of a run, or of two side by side: one HTML page without scripts, fonts or links of other places."""
