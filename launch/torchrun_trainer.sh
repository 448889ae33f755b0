#!/usr/bin/env bash
# This node's part of the trainer role; sizes come from the spec.
#   bash launch/torchrun_trainer.sh SPEC [KEY=VALUE]…
# Run it on every node of the trainer, with
#   MASTER_ADDR   address of the first of them (needed where there are several)
#   NODE_RANK     which of them this is (default 0)
#   MASTER_PORT   where they meet (default 29500)
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
if [ $# -eq 0 ]; then
    echo "usage: bash launch/torchrun_trainer.sh SPEC [KEY=VALUE]…" >&2
    exit 2
fi
get() { "$root/.venv/bin/slimerl" spec get "$1" "${spec[@]}"; }
spec=("$@")
nodes=$(get trainer_nodes)
here=$(get ranks_per_node)
ranks=$(get training.parallel.world_size)
if ((nodes * here != ranks)); then
    echo "training.parallel has $ranks ranks, which do not fill $nodes nodes of cluster.gpus_per_node = $here" >&2
    exit 2
fi
if ((nodes > 1)) && [ -z "${MASTER_ADDR:-}" ]; then
    echo "the trainer has $nodes nodes: set MASTER_ADDR to the address of the first, and NODE_RANK on each" >&2
    exit 2
fi
OMP_NUM_THREADS=$(get training.threads_per_rank)
export OMP_NUM_THREADS OMP_WAIT_POLICY=PASSIVE PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false
exec "$root/.venv/bin/python" -m slimerl.training.launcher "$@"
