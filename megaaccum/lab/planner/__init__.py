"""The planner: which layout fits, how long a step of it takes, and why. Numbers only: no torch, no DeepSpeed.

| module | holds |
| --- | --- |
| `workload`, `candidates`, `layouts` | the question, the legal layouts, and these as columns |
| `memory` | peak bytes of the most loaded rank, by kind |
| `activations`, `weights`, `footprint` | bytes of one micro-batch; parameters; bytes of each sync mode |
| `time` | seconds of a step |
| `compute`, `comm` | seconds of kernels; of messages and collectives, experts' all-to-all too |
| `pipeline`, `stages`, `cut` | micro-batches in flight and bubbles; layers of each stage |
| `search`, `report`, `why_not` | the ranking, the probability that a row fits, and its reasons |
| `sync_mode`, `auto_schedule` | what `auto` chooses, also for a run; the micro-batch, if it is left open |
| `expected` | bytes and seconds that a run is compared with |
| `layout_config` | a row as a configuration |
| `hardware`, `from_run`, `calibration` | a GPU's figures: from the table, a receipt, or this machine |
| `layer_costs`, `chunk_costs` | measured, not predicted: costs of layers and chunks |
| `fallbacks`, `trial` | what `tune` tries |
| `gather_units`, `matrices` | units of streaming; Muon's matrices |
"""
