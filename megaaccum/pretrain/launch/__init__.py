"""Starting ranks on this machine, watching them, and ending them together.

| module | holds |
| --- | --- |
| `local`, `processes` | starts, watches and ends the ranks of this machine |
| `hostfile` | DeepSpeed's hostfile |
| `lock` | one job for each run folder |
| `watchdog` | a limit on a step's time |
| `output` | standard output that may go away |
"""
