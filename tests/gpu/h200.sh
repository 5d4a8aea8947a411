#!/usr/bin/env bash
# On a machine with one GPU and no network: install the wheels that came along, once, and run cases.
#   tests/gpu/h200.sh env smoke sync adam        (or twohosts, mfu profile layer, memory loop, te; no name is everything)
# WHEELS: the folder of wheels (default .whl; none is needed where the libraries are installed). SITE: where they go.
# COMMIT: named in the results where there is no git. OUT: folder of the results, read for what has passed.
set -euo pipefail
cd "$(dirname "$0")/../.."
wheels=${WHEELS:-.whl} site=${SITE:-/tmp/megaaccum-site}
if compgen -G "$wheels/*.whl" >/dev/null && [ ! -e "$site/.done" ]; then
  python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$site" "$wheels"/*.whl
  touch "$site/.done"
fi
export PYTHONPATH="$PWD:$site${PYTHONPATH:+:$PYTHONPATH}"
exec python3 -m tests.gpu.one "$@"
