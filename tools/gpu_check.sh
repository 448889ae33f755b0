#!/usr/bin/env bash
# Everything that needs a GPU, in one go of at most 8 minutes: the tests marked `gpu`, a tiny run, a report.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

TESTS_S=300 TEST_S=180                            # all tests together, and one
ASSETS_S=20 WARM_START_S=50 GRPO_S=75 FIGURES_S=15
FAILED=1 NO_GPU=2 USAGE=64

usage() {
    cat <<EOF
usage: bash tools/gpu_check.sh [--install] [--report DIR] [--python PATH] [-- PYTEST_ARGUMENT…]

Runs the tests marked 'gpu' (each at most ${TEST_S} s) and a tiny run of every role (warm start in fp32, GRPO in bf16) on the
first GPU, and writes DIR/report.md and DIR/report.json: versions, passed, failed and skipped tests, seconds, figures.
Takes at most 8 minutes (installing not counted).

  --install      first install requirements.txt, requirements-gpu.txt and requirements-dev.txt into the environment
  --report DIR   where the report and all logs go (default: runs/gpu-check)
  --python PATH  the interpreter (default: .venv/bin/python, else python3)

Exit code 0: all passed; ${FAILED}: something failed; ${NO_GPU}: there is no GPU, nothing was run; ${USAGE}: wrong arguments.
EOF
}

install=0 report=runs/gpu-check python=""
while [ $# -gt 0 ]; do
    case $1 in
        --help | -h) usage; exit 0 ;;
        --install) install=1 ;;
        --report) report=${2:?--report needs a directory}; shift ;;
        --python) python=${2:?--python needs a path}; shift ;;
        --) shift; break ;;
        *) echo "unknown argument '$1'" >&2; usage >&2; exit "$USAGE" ;;
    esac
    shift
done
if [ -z "$python" ]; then
    if [ -x "$root/.venv/bin/python" ]; then python=$root/.venv/bin/python; else python=$(command -v python3); fi
fi
case $report in /*) ;; *) report=$PWD/$report ;; esac
cd "$root"

if [ "$install" = 1 ]; then
    "$python" -m pip install -r requirements.txt -r requirements-dev.txt
    "$python" -m pip install --no-build-isolation -r requirements-gpu.txt
    "$python" -m pip install --no-deps --editable .
fi

if ! why=$("$python" -c 'import torch; torch.cuda.init(); print(torch.cuda.get_device_name(0))' 2>&1); then
    echo "There is no GPU that torch can use here, nothing was checked ($(tail -n 1 <<<"$why"))." >&2
    echo "Run this on a machine with an NVIDIA GPU and a torch built for CUDA: requirements-gpu.txt, or --install." >&2
    exit "$NO_GPU"
fi
echo "GPU: $why"

if [ -n "$(ls -A "$report" 2>/dev/null)" ] && [ ! -f "$report/steps.tsv" ]; then
    echo "$report is not empty and no earlier report; choose another directory for --report" >&2
    exit "$USAGE"
fi
rm -rf "$report"
mkdir -p "$report"
export CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-0} OMP_NUM_THREADS=${OMP_NUM_THREADS:-4} TOKENIZERS_PARALLELISM=false

# step NAME SECONDS COMMAND…: its output goes to NAME.log, its exit code and seconds to steps.tsv
step() {
    local name=$1 limit=$2 code=0 start=$SECONDS
    shift 2
    echo "$name …"
    timeout --kill-after=10 "$limit" "$@" >"$report/$name.log" 2>&1 || code=$?
    printf '%s\t%d\t%d\n' "$name" "$code" "$((SECONDS - start))" >>"$report/steps.tsv"
    if [ "$code" != 0 ]; then
        echo "$name failed with exit code $code; the end of $report/$name.log:" >&2
        tail -n 15 "$report/$name.log" >&2
    fi
}

step tests "$TESTS_S" "$python" -m pytest tests/gpu -m gpu -rs --timeout="$TEST_S" \
    --session-timeout="$((TESTS_S - 15))" \
    --junitxml="$report/tests.xml" -o junit_family=xunit1 "$@"

slimerl=("$python" -m slimerl.cli)
assets=$report/assets
step assets "$ASSETS_S" "$python" tools/quickstart_data.py --out "$assets"
step warm-start "$WARM_START_S" "${slimerl[@]}" run configs/quickstart_warm_start.yaml --fresh model.path="$assets/base" \
    data.train_path="$assets/sft.jsonl" training.export_path="$assets/warm" output_dir="$report/warm-start-run" \
    training.steps=20 training.parallel.data=1
step grpo "$GRPO_S" "${slimerl[@]}" run configs/quickstart.yaml --fresh model.path="$assets/warm" model.dtype=bf16 \
    data.train_path="$assets/train.jsonl" data.eval_path="$assets/heldout.jsonl" output_dir="$report/grpo-run" \
    training.steps=3 training.optimizer.warmup_steps=1 training.parallel.data=1 evaluation.max_prompts=64
step figures "$FIGURES_S" "$python" tools/show_run.py "$report/grpo-run"

exec "$python" tools/gpu_report.py "$report"
