#!/usr/bin/env bash
# One run on the nodes of a Slurm job. At the repository's root, in the environment that has rlft_fast:
#
#     sbatch --nodes 2 examples/cluster/slurm.sh examples/grpo.yaml --output_dir /shared/run --rollout.prompts_per_step 16
#
# The number of processes, here 16, must divide rollout.prompts_per_step.
#
# Slurm starts a preempted job again, which then continues from the newest checkpoint. Five minutes before the time limit
# the run saves its last step and ends, and the job asks Slurm to start it again.
#SBATCH --job-name=rlft_fast
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@300
#SBATCH --requeue
#SBATCH --output=slurm-%j.log
set -euo pipefail
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
export MASTER_ADDR=${hosts%%$'\n'*} NODES=$SLURM_JOB_NUM_NODES MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))

# srun does not inherit --cpus-per-task from sbatch. It runs in the background, because bash answers signals only while
# it waits, and passes SIGTERM on to the processes.
trap 'at_limit=1; kill -TERM "$!"' USR1
trap 'kill -TERM "$!"' TERM
srun --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit \
  bash -c 'NODE_RANK=$SLURM_NODEID exec examples/cluster/nodes.sh "$@"' nodes "$@" --resume &
run=$!
status=0
wait "$run" || status=$?
while kill -0 "$run" 2>/dev/null; do  # a signal ended the wait, not the run
  status=0
  wait "$run" || status=$?
done
if [[ -n ${at_limit:-} && $status != 0 ]]; then  # a run that is complete ends with 0
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
