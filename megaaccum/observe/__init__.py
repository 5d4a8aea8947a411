"""Measurements of a step.

| module | holds |
| --- | --- |
| `observer` | all of it for one step; seconds by phase |
| `traffic`, `memory` | bytes between ranks, bytes held |
| `nonfinite`, `norm_guard` | values that are not finite; norms that are far off |
| `changing_buffers` | buffers that a forward changes |
| `noise_scale`, `expert_loads` | the gradient noise scale; tokens of each expert |
"""
