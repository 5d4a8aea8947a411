"""Stand-ins of the CPU lane leave torch's own contexts in force."""

import subprocess
import sys


def test_a_device_context_applies_to_the_factories():
    code = (
        "from megaaccum.platform import cpu; cpu.install(); import torch\n"
        "with torch.device('meta'): made = [torch.empty(2), torch.arange(3), torch.zeros(1)]\n"
        "print({each.device.type for each in made}, torch.zeros(1, device='cuda').device)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout.split("\n")[-2] == "{'meta'} cpu"
