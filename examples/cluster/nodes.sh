#!/usr/bin/env bash
# One run on several machines that share a folder. Start it on each machine, with its own NODE_RANK, from 0:
#
#     NODES=2 NODE_RANK=0 MASTER_ADDR=10.0.0.1 examples/cluster/nodes.sh examples/grpo.yaml --output_dir /shared/run \
#         --rollout.prompts_per_step 16
#
# The number of all processes must divide rollout.prompts_per_step.
#
# PROCESSES is the number of processes per machine; by default one for each GPU, or for each core of a machine without.
# MASTER_ADDR is the machine with NODE_RANK 0, and MASTER_PORT a port that is free there.
set -euo pipefail
: "${NODES:?number of machines}" "${NODE_RANK:?number of this machine, from 0}" "${MASTER_ADDR:?address of machine 0}"
exec torchrun --nnodes "$NODES" --node-rank "$NODE_RANK" --nproc-per-node "${PROCESSES:-auto}" \
  --master-addr "$MASTER_ADDR" --master-port "${MASTER_PORT:-29500}" -m rlft_fast train "$@"
