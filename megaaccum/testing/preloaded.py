"""Imports of the process that forks the ranks of tests: torch, DeepSpeed and Megatron, on the CPU lane."""

from megaaccum.distributed import preload
from megaaccum.testing import ranks as ranks  # ranks find their own code imported too

preload.libraries()
