#!/usr/bin/env bash
# Submits a run to SLURM, with as many nodes as the spec says: disaggregated as a heterogeneous job (nodes of the
# trainer, nodes of the engines), colocated as a plain one.
#   bash launch/slurm/submit.sh SPEC [KEY=VALUE]… [-- OPTION_OF_SBATCH…]
#   bash launch/slurm/submit.sh configs/deepseek_v3_671b.yaml -- --partition=gpu --time=24:00:00
#   WITHOUT_GPUS=1   ask for no GPUs
# The run directory must lie on a file system that all nodes share.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
spec=() options=()
while (($#)); do
    if [ "$1" = -- ]; then
        shift
        options=("$@")
        break
    fi
    spec+=("$1")
    shift
done
if [ ${#spec[@]} -eq 0 ]; then
    echo "usage: bash launch/slurm/submit.sh SPEC [KEY=VALUE]… [-- OPTION_OF_SBATCH…]" >&2
    exit 2
fi
get() { "$root/.venv/bin/slimerl" spec get "$1" "${spec[@]}"; }
name=$(get name)
run_dir=$(get run_dir)
mkdir -p "$run_dir/logs"
each=(--ntasks-per-node=1 "${options[@]}")
[ "${WITHOUT_GPUS:-0}" = 1 ] || each+=("--gpus-per-node=$(get cluster.gpus_per_node)")
job=(--job-name="$name" --output="$run_dir/logs/slurm-%j.out" --nodes="$(get trainer_nodes)" "${each[@]}")
engine_nodes=$(get engine_nodes)
if ((engine_nodes > 0)); then
    job+=(: --nodes="$engine_nodes" "${each[@]}")
fi
exec sbatch "${job[@]}" "$root/launch/slurm/run.sbatch" "$root" "${spec[@]}"
