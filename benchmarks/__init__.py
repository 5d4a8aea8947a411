"""Speed and memory, as ratios of two things measured side by side in one run. See docs/reference/benchmarks.md."""
