#!/usr/bin/env bash
# A ~1M-parameter model learns two-digit addition: a short warm start by SFT, then GRPO.
# Arguments are passed on as overrides, e.g.  bash launch/quickstart.sh training.parallel.tensor=2 training.parallel.data=1
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
. "$root/launch/install.sh"
install "$root"
cd "$root"
[ -f assets/quickstart/heldout.jsonl ] || .venv/bin/python tools/quickstart_data.py
[ -f assets/quickstart/warm/config.json ] || .venv/bin/slimerl run configs/quickstart_warm_start.yaml --fresh
exec .venv/bin/slimerl run configs/quickstart.yaml --fresh "$@"
