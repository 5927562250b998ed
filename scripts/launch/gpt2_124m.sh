#!/usr/bin/env bash
# GPT-2 124M on the GPUs of one machine: 8 of 24 GB or more, or any other power of two up to 16.  Half a million tokens
# a step, bf16, ZeRO stage 1, which reduces gradients once a step however many micro-batches it has.
#
#   bash scripts/launch/gpt2_124m.sh --data-path PREFIX --split 98,1,1
#
# On 8 GPUs a GPU keeps by formula 0.9 GB of model states and, at 34 b s h bytes a layer, 10.3 GB of activations.
# Flags at the end win over the script's.  The variables are those of scripts/launch_node.sh (PROCS_PER_NODE=4, ...); on
# several nodes it is started on each, with its NUM_NODES, NODE_RANK and MASTER_ADDR.
set -euo pipefail
export NUM_NODES="${NUM_NODES:-1}" NODE_RANK="${NODE_RANK:-0}" MASTER_ADDR="${MASTER_ADDR:-127.0.0.1}"
exec bash "$(dirname "${BASH_SOURCE[0]}")/../launch_node.sh" --preset gpt2-124m --zero-stage 1 \
    --bf16 --accumulate-allreduce-grads-in-fp32 --micro-batch-size 32 --global-batch-size 512 --train-iters 100000 \
    --lr 6e-4 --min-lr 6e-5 --lr-decay-style cosine --lr-warmup-iters 2000 --weight-decay 0.1 --adam-beta2 0.95 \
    --clip-grad 1.0 --hidden-dropout 0 --attention-dropout 0 --eval-interval 1000 --eval-iters 10 --log-interval 10 \
    --save runs/gpt2-124m --load runs/gpt2-124m --save-interval 1000 --metrics-file runs/gpt2-124m/metrics.jsonl "$@"
