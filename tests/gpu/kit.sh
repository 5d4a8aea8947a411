#!/usr/bin/env bash
# Wheels for tests/gpu/h200.sh on a machine without network that has Python and torch: tests/gpu/kit.sh OUT (about 8 MB).
# They are of the versions installed here (PYTHON, default .venv/bin/python) and of its Python.
set -euo pipefail
out=$(mkdir -p "${1:?where to}" && cd "$1" && pwd)
python=$(cd "$(dirname "$0")/../.." && realpath -s "${PYTHON:-.venv/bin/python}")
pinned() { "$python" -c 'import sys; from importlib.metadata import version as v; print(*(f"{n}=={v(n)}" for n in sys.argv[1:]))' "$@"; }
read -ra wheels < <(pinned megatron-core pydantic pydantic-core annotated-types typing-extensions typing-inspection \
  msgpack hjson einops packaging psutil py-cpuinfo tqdm pyyaml emerging-optimizers absl-py safetensors)
"$python" -m pip download -q --no-deps --only-binary=:all: -d "$out" "${wheels[@]}"
# Without its compiled operators, which are built where they are first used.
DS_BUILD_OPS=0 DS_ACCELERATOR=cpu "$python" -m pip wheel -q --no-deps --no-build-isolation -w "$out" "$(pinned deepspeed)"
ls -l "$out"
