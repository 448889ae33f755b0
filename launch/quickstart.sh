#!/usr/bin/env bash
# A ~1M-parameter model learns two-digit addition: a short warm start by SFT, then GRPO.
# bash launch/quickstart.sh calculator: it learns to ask a calculator for products, in two turns.
# bash launch/quickstart.sh grm: it learns to judge sums (a generative reward model): warm start, rejective filter, GRPO.
# bash launch/quickstart.sh ppo: PPO with a critic in place of GRPO; reward_model, dpo: on pairs of right and wrong sums;
# distillation: from what GRPO has trained.
# Further arguments are passed on as overrides, e.g.  training.parallel.tensor=2 training.parallel.data=1
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
. "$root/launch/install.sh"
install "$root"
cd "$root"
name=quickstart data="quickstart_data.py --task addition" run=quickstart
case "${1:-}" in
    calculator)
        name=quickstart_calculator data="quickstart_data.py --task calculator" run=quickstart_calculator; shift ;;
    grm) name=quickstart_grm data=judge_data.py run=quickstart_grm; shift ;;
    ppo | dpo | reward_model | distillation) run=quickstart_$1; shift ;;
esac
# shellcheck disable=SC2086  # a program and its arguments
[ -f assets/$name/heldout.jsonl ] || .venv/bin/python tools/$data
[ -f assets/$name/warm/config.json ] || .venv/bin/slimerl run configs/${name}_warm_start.yaml --fresh
case $run in
    *dpo | *reward_model)
        [ -f assets/quickstart/preferences.jsonl ] || .venv/bin/python tools/preference_data.py ;;
    *distillation)
        [ -f runs/quickstart/model/config.json ] || .venv/bin/slimerl run configs/quickstart.yaml --fresh ;;
    *grm)
        [ -f assets/$name/filtered.jsonl ] || .venv/bin/python tools/rejective_filter.py configs/$name.yaml \
            --out assets/$name/filtered.jsonl --prompts 100 model.path=assets/$name/warm
        [ -f assets/$name/filtered/config.json ] || .venv/bin/slimerl run configs/${name}_filtered.yaml --fresh ;;
esac
exec .venv/bin/slimerl run configs/"$run".yaml --fresh "$@"
