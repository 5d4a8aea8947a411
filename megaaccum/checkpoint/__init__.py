"""Checkpoints: in pieces named after the whole model's parameters, in folders that appear whole or not at all.

| module | holds |
| --- | --- |
| `save_load` | the door |
| `pieces` | the stored elements that a rank of another layout needs |
| `untrusted_reader` | reads them without running code |
| `folders` | names, publishes and deletes checkpoints |
| `resume` | which one a run resumes from, and what may differ |
| `whole` | whole weights, one parameter at a time |
"""
