#!/usr/bin/env bash
# A ~1M-parameter model learns two-digit addition: a short warm start by SFT, then GRPO.
# bash launch/quickstart.sh calculator: it learns to ask a calculator for products, in two turns.
# Further arguments are passed on as overrides, e.g.  training.parallel.tensor=2 training.parallel.data=1
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
. "$root/launch/install.sh"
install "$root"
cd "$root"
name=quickstart task=addition
if [ "${1:-}" = calculator ]; then
    name=quickstart_calculator task=calculator
    shift
fi
[ -f assets/$name/heldout.jsonl ] || .venv/bin/python tools/quickstart_data.py --task $task
[ -f assets/$name/warm/config.json ] || .venv/bin/slimerl run configs/${name}_warm_start.yaml --fresh
exec .venv/bin/slimerl run configs/$name.yaml --fresh "$@"
