#!/usr/bin/env bash
# Starts this node's share of a job on several nodes, by hand: the same command on every node, with its own NODE_RANK.
#
#   NUM_NODES=2 NODE_RANK=0 MASTER_ADDR=first-node bash scripts/launch_node.sh [flags of pretrain_gpt.py]
#
# NUM_NODES       nodes of the job
# NODE_RANK       which of them this is, from 0
# MASTER_ADDR     a name or address of node 0 that all nodes can reach
# MASTER_PORT     a free port there (default: 29500)
# PROCS_PER_NODE  processes on each node (default: its GPUs, or 1 without any)
# PYTHON          the interpreter (default: .venv/bin/python if it is there, else python3)
#
# To stop the job, signal any rank or any node's torchrun (Ctrl-C, `kill -USR1`, `kill`): all ranks save and end.  The
# torchruns of other nodes wait up to 300 s for one that was signalled, unless they are signalled too.
#
# PET_SHUTDOWN_TIMEOUT  seconds that torchrun gives the ranks to do so (default: 600)
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

complaints=()

# number NAME LEAST [MOST]: NAME holds a whole number from LEAST on, up to MOST.
number() {
    local value="${!1:-}" range="at least $2${3:+ and at most $3}"
    if [[ -z "$value" ]]; then
        complaints+=("$1 is not set")
    elif [[ ! "$value" =~ ^[0-9]{1,6}$ ]] || ((10#$value < $2 || 10#$value > ${3:-999999})); then
        complaints+=("$1=$value: must be a whole number, $range")
    fi
}

choose_python() {
    python="${PYTHON:-}"
    if [[ -z "$python" ]]; then
        python=python3
        [[ ! -x "$root/.venv/bin/python" ]] || python="$root/.venv/bin/python"
    fi
    command -v "$python" >/dev/null || complaints+=("$python is missing; name an interpreter with PYTHON=...")
}

check() {
    number NUM_NODES 1
    number NODE_RANK 0
    number MASTER_PORT 1 65535
    [[ -z "${PROCS_PER_NODE:-}" ]] || number PROCS_PER_NODE 1
    [[ -n "${MASTER_ADDR:-}" ]] || complaints+=("MASTER_ADDR is not set: the name or address of node 0")
    choose_python
    if ((${#complaints[@]} == 0)) && ((10#$NODE_RANK >= 10#$NUM_NODES)); then
        complaints+=("NODE_RANK=$NODE_RANK: nodes count from 0 to NUM_NODES - 1 = $((10#$NUM_NODES - 1))")
    fi
    if ((${#complaints[@]})); then
        printf 'error: %s\n' "${complaints[@]}" >&2
        printf 'usage: NUM_NODES=2 NODE_RANK=0 MASTER_ADDR=first-node bash scripts/launch_node.sh [flags]\n' >&2
        exit 2
    fi
}

MASTER_PORT="${MASTER_PORT:-29500}"
check
processes="${PROCS_PER_NODE:-$("$python" -c 'import torch; print(torch.cuda.device_count() or 1)')}"
printf 'node %d of %d: %d processes, meeting at %s:%d\n' \
    "$NODE_RANK" "$NUM_NODES" "$processes" "$MASTER_ADDR" "$MASTER_PORT"
# torchrun forwards SIGUSR1 too, and waits longer than its 30 s for ranks that save.
export PET_SIGNALS_TO_HANDLE="${PET_SIGNALS_TO_HANDLE:-SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1}"
export PET_SHUTDOWN_TIMEOUT="${PET_SHUTDOWN_TIMEOUT:-600}"
# By exec, so that there is no shell between the terminal and torchrun.
exec "$python" -m torch.distributed.run --nnodes "$NUM_NODES" --node-rank "$NODE_RANK" --nproc-per-node "$processes" \
    --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" "$root/pretrain_gpt.py" "$@"
