#!/usr/bin/env bash
# GPT-2 1.5B on the GPUs of one machine: 8 of 40 GB or more.  Half a million tokens a step, bf16, ZeRO stage 1: a step
# has 16 micro-batches, and stages 2 and 3 would send gradients with every one of them.
#
#   bash scripts/launch/gpt2_1.5b.sh --data-path PREFIX --split 98,1,1
#
# On 8 GPUs a GPU keeps by formula 11.7 GB of model states and, at 34 b s h bytes a layer, 10.7 GB of activations.  On
# fewer or smaller ones, --zero-stage 2 --recompute-granularity full takes less.
# Flags at the end win over the script's.  The variables are those of scripts/launch_node.sh (PROCS_PER_NODE=4, ...); on
# several nodes it is started on each, with its NUM_NODES, NODE_RANK and MASTER_ADDR.
set -euo pipefail
export NUM_NODES="${NUM_NODES:-1}" NODE_RANK="${NODE_RANK:-0}" MASTER_ADDR="${MASTER_ADDR:-127.0.0.1}"
exec bash "$(dirname "${BASH_SOURCE[0]}")/../launch_node.sh" --preset gpt2-1.5b --zero-stage 1 \
    --bf16 --accumulate-allreduce-grads-in-fp32 --micro-batch-size 4 --global-batch-size 512 --train-iters 300000 \
    --lr 1.5e-4 --min-lr 1e-5 --lr-decay-style cosine --lr-warmup-iters 3000 --weight-decay 0.1 --adam-beta2 0.95 \
    --clip-grad 1.0 --eval-interval 1000 --eval-iters 10 --log-interval 10 \
    --save runs/gpt2-1.5b --load runs/gpt2-1.5b --save-interval 1000 --metrics-file runs/gpt2-1.5b/metrics.jsonl "$@"
