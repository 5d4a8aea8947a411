"""What every test gets: a machine without GPUs, as far as this process and its children can see, and calm libraries."""

import os

from megaaccum.distributed import preload, quiet

# Before any test module imports torch or DeepSpeed: both look at these when they are imported.
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
preload.prepare()


def pytest_configure(config):
    """pytest has warning filters of its own, in front of the process'."""
    for message, category, module, _ in quiet.WARNINGS:
        config.addinivalue_line("filterwarnings", f"ignore:{message}:{category.__name__}:{module}")
