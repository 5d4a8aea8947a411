"""What every test gets: a machine without GPUs, as far as this process and its children can see."""

import os

# Before any test module imports torch or DeepSpeed: both look at these when they are imported.
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
