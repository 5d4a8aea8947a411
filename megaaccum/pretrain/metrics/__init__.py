"""A run's reports.

| module | holds |
| --- | --- |
| `run_log` | `RunLog`, which the training loop talks to: what is recorded, and where |
| `journal`, `step_record` | log.jsonl, and a step in it |
| `progress`, `summary`, `plots`, `services` | the terminal, a picture, TensorBoard, W&B, CSV |
| `schedule_plots` | pictures of a schedule |
| `receipts` | a file for each start: as planned, as measured |
| `ranks`, `expected` | stragglers, and ranks that leave the plan |
| `speed`, `flops`, `param_count` | tokens, FLOPs, parameters |
| `layer_shapes` | the matrices and elements of a layer, which both of these and the planner count |
| `goodput` | wall time by cause |
"""
