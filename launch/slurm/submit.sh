#!/usr/bin/env bash
# Submits a run to SLURM, with as many nodes as the spec says: disaggregated as a heterogeneous job (nodes of the
# trainer, nodes of the engines), colocated as a plain one.
#   bash launch/slurm/submit.sh [--fresh] SPEC [KEY=VALUE]… [-- OPTION_OF_SBATCH…]
#   bash launch/slurm/submit.sh configs/deepseek_v3_671b.yaml -- --partition=gpu --time=24:00:00
#   --fresh          replace an earlier run in the same directory, not go on with it
#   WITHOUT_GPUS=1   ask for no GPUs
# The spec is frozen here, as RUN_DIR/spec.yaml: a queued or requeued job does not see later changes of SPEC. The run
# directory, and this repository with its .venv, must lie on a file system that all nodes share.
#   scancel JOB                          end it at once; submitted again, it goes on from its newest checkpoint
#   scancel --batch --signal=USR1 JOB    save a checkpoint at the end of the step, and queue it again
#   slimerl stop RUN_DIR                 save a checkpoint at the end of the step, and end
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
slimerl=$root/.venv/bin/slimerl
spec=() prepare=() options=()
while (($#)); do
    case $1 in
    --) shift && options=("$@") && break ;;
    --fresh) prepare=(--fresh) ;;
    *) spec+=("$1") ;;
    esac
    shift
done
if [ ${#spec[@]} -eq 0 ]; then
    echo "usage: bash launch/slurm/submit.sh [--fresh] SPEC [KEY=VALUE]… [-- OPTION_OF_SBATCH…]" >&2
    exit 2
fi
get() { "$slimerl" spec get "$1" "${spec[@]}"; }
# nodes as a whole: with their GPUs each role shares all cores and all memory of its node
each=(--exclusive --mem=0 --ntasks-per-node=1)
[ "${WITHOUT_GPUS:-0}" = 1 ] || each+=("--gpus-per-node=$(get cluster.gpus_per_node)")
name=$(get name)
trainer_nodes=$(get trainer_nodes)
engine_nodes=$(get engine_nodes)
frozen=$("$slimerl" prepare --cluster "${prepare[@]}" "${spec[@]}")
run_dir=$(dirname "$frozen")
each+=("${options[@]}")
# SLURM fills in %j, and would what a % of the directory begins
job=(--job-name="$name" --output="${run_dir//%/%%}/slurm-%j.out" --nodes="$trainer_nodes" "${each[@]}")
if ((engine_nodes > 0)); then
    job+=(: --nodes="$engine_nodes" "${each[@]}")
fi
exec sbatch "${job[@]}" "$root/launch/slurm/run.sbatch" "$root" "$frozen"
