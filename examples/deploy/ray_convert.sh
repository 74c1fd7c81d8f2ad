#!/bin/bash
# Convert on all nodes of a Ray cluster, then write the dataset on one: RAY_ADDRESS=http://HEAD:8265 bash ray_convert.sh
# Nodes share the bucket only, and have lmms-stream[ray] (docs/clusters.md).
# Change: bucket, rows and tokenizer. The same command resumes after the loss of a node, hence the loop.
set -euo pipefail

command=(lmms-stream convert 's3://bucket/rows/*.jsonl' s3://bucket/chats --tokenizer Qwen/Qwen3-0.6B)
for attempt in 1 2 3 4 5; do
    if ray job submit -- "${command[@]}" --engine ray --ray-address auto --part 0/1; then break; fi
    if [ "$attempt" = 5 ]; then exit 1; fi
done
ray job submit -- "${command[@]}"
