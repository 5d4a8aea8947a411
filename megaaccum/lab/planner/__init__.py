"""The planner: which layout fits, how long a step of it takes, and why. Numbers only: no torch, no DeepSpeed."""
