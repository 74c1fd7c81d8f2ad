#!/bin/bash
# A run on 4 nodes of 8 GPUs: sbatch slurm_train.sh run.yaml
# A lost or preempted node ends the job and queues it again, as does the time limit; it resumes from its checkpoint.
# Change: nodes, GPUs (two places), CPUs, time. Put keys of the store into the environment.
#SBATCH --job-name=chat
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=96
#SBATCH --time=24:00:00
#SBATCH --signal=USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
set -uo pipefail

head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=590  # torchrun kills ranks so many seconds after the SIGTERM of a preemption
srun --kill-on-bad-exit=0 python -m lmms_stream.train.torchrun --nnodes "$SLURM_NNODES" --nproc-per-node 8 \
    --rdzv-backend c10d --rdzv-endpoint "$head:29400" --rdzv-id "$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}" \
    --rdzv-conf read_timeout=600 -m lmms_stream.train "$1"
status=$?
if [ "$status" = 85 ]; then scontrol requeue "$SLURM_JOB_ID"; fi  # the run was told to stop, and has saved
exit "$status"
