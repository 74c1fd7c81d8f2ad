#!/bin/bash
# 16 jobs convert a part each, then one job writes the dataset from their parts:
#   parts=$(sbatch --parsable slurm_convert.sh)
#   sbatch --array=0 --dependency=afterok:"$parts" slurm_convert.sh dataset
# Change: bucket, rows and tokenizer; the number of parts in two places.
#SBATCH --job-name=convert
#SBATCH --array=0-15
#SBATCH --cpus-per-task=32
#SBATCH --mem=64G
#SBATCH --time=24:00:00
#SBATCH --requeue
set -euo pipefail

part=(--part "$SLURM_ARRAY_TASK_ID/16")
if [ "${1:-}" = dataset ]; then part=(); fi
exec lmms-stream convert 's3://bucket/rows/*.jsonl' s3://bucket/chats --tokenizer Qwen/Qwen3-0.6B "${part[@]}"
