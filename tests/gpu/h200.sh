#!/usr/bin/env bash
# On a machine with one GPU and no network: install the wheels that came along, once, and run cases.
#   tests/gpu/h200.sh        all cases, the most telling first, until the machine is gone; again for what is left
#   tests/gpu/h200.sh mfu    one subcommand (python -m tests.gpu.one --list names the cases)
# WHEELS: the folder of wheels (default .whl; none is needed where the libraries are installed). SITE: where they go.
# COMMIT: named in the results where there is no git. OUT: folder of the results, to which each case adds a line when it
# ends. What has passed at this commit, by its lines or those in docs/benchmarks/gpu.jsonl, is not run again.
set -euo pipefail
cd "$(dirname "$0")/../.."
wheels=${WHEELS:-.whl} site=${SITE:-/tmp/megaaccum-site}
if compgen -G "$wheels/*.whl" >/dev/null && [ ! -e "$site/.done" ]; then
  python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$site" "$wheels"/*.whl
  echo 'default:' >"$site/megatron/core/datasets/Makefile"  # Megatron's loop calls make there; the wheel has what it makes
  touch "$site/.done"
fi
export PYTHONPATH="$PWD:$site${PYTHONPATH:+:$PYTHONPATH}"
exec python3 -m tests.gpu.one "$@"
