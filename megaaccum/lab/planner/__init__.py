"""The planner: which layout fits, how long a step of it takes, and why. Numbers only: no torch, no DeepSpeed.

| module | holds |
| --- | --- |
| `workload`, `candidates`, `layouts` | the question, the legal layouts, and these as columns |
| `memory`, `activations`, `weights`, `footprint` | bytes |
| `time`, `compute`, `comm`, `pipeline` | seconds: a step, kernels, messages (experts' all-to-all too), the schedule |
| `search`, `report`, `why_not`, `certainty` | the ranking, and its reasons |
| `hardware`, `from_run`, `calibration` | a GPU's figures: from the table, a receipt, or this machine |
| `layer_costs`, `chunk_costs` | measured, not predicted: costs of layers and chunks |
"""
