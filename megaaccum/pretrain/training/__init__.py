"""Pretraining: the training loop, its checkpoints, evaluations and log.

| module | holds |
| --- | --- |
| `loop` | `train`, the training loop |
| `training_run` | the objects of a run, and what it does beside its steps; what planner and verification contribute |
| `evaluation`, `text_comparisons`, `sampling`, `generate` | what the model has learned |
| `saver`, `background_save` | when checkpoints are written, and while training continues |
| `stop_signals` | the signals that end a run after its step |
| `run_folder` | the folders of a run, checked and claimed |
| `header` | the first lines of the log |
"""
