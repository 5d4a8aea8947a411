"""Search for an order of passes and a cut of the layers.

| module | holds |
| --- | --- |
| `search`, `greedy` | orders of passes |
| `cut` | layers of each stage |
| `profile` | their costs |
| `bound` | how much better any could be |
"""
