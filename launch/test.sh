#!/usr/bin/env bash
# Every check and test that runs without a GPU. Arguments go to pytest, e.g.  bash launch/test.sh tests/spec -k unknown
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
WITH_DEV=1
. "$root/launch/install.sh"
install "$root"
cd "$root"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} TOKENIZERS_PARALLELISM=false
if [ $# -eq 0 ]; then
    .venv/bin/ruff check .
    .venv/bin/ruff format --check .
    .venv/bin/mypy
    .venv/bin/lint-imports
    # tests with engines in one worker, those with trainer ranks in another, jobs in a third (tests/conftest.py)
    set -- -n 3
fi
exec .venv/bin/python -m pytest -m "not gpu" "$@"
