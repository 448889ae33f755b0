#!/usr/bin/env bash
# A ~1M-parameter model learns two-digit addition: a short warm start by SFT, then GRPO.
# bash launch/quickstart.sh calculator: it learns to ask a calculator for products, in two turns.
# bash launch/quickstart.sh ppo: PPO with a critic in place of GRPO; reward_model, dpo: on pairs of right and wrong sums;
# distillation: from what GRPO has trained.
# Further arguments are passed on as overrides, e.g.  training.parallel.tensor=2 training.parallel.data=1
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
. "$root/launch/install.sh"
install "$root"
cd "$root"
name=quickstart task=addition run=quickstart
case "${1:-}" in
    calculator) name=quickstart_calculator task=calculator run=quickstart_calculator; shift ;;
    ppo | dpo | reward_model | distillation) run=quickstart_$1; shift ;;
esac
[ -f assets/$name/heldout.jsonl ] || .venv/bin/python tools/quickstart_data.py --task $task
[ -f assets/$name/warm/config.json ] || .venv/bin/slimerl run configs/${name}_warm_start.yaml --fresh
case $run in
    *dpo | *reward_model)
        [ -f assets/quickstart/preferences.jsonl ] || .venv/bin/python tools/preference_data.py ;;
    *distillation)
        [ -f runs/quickstart/model/config.json ] || .venv/bin/slimerl run configs/quickstart.yaml --fresh ;;
esac
exec .venv/bin/slimerl run configs/"$run".yaml --fresh "$@"
