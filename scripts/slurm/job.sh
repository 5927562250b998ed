# shellcheck shell=bash
# What every batch script of this folder does: `run_job FLAGS OF PRETRAIN_GPT...`.
#
# One srun starts one task a GPU; a first one tests the nodes (tools/preflight.py), the next trains.  A run that is
# asked to stop saves and exits with a status of its own, and the job is requeued: under the same id, with the same
# command line, it resumes from its last checkpoint.  So does a job that fails, until MAX_FAILURES starts in a row have
# brought no new checkpoint.  Status 0 ends the job; so does 2, which is for a person to mend.
#
# Slurm sends the signal of `#SBATCH --signal=USR1@SECONDS` (no "B:") to the tasks and not to this shell.
#
#   RUN_FOLDER      where checkpoints and figures go (default: runs/NAME OF THE JOB)
#   PYTHON          the interpreter on the nodes (default: .venv/bin/python)
#   PREFLIGHT       flags of tools/preflight.py ("--min-bandwidth 80"), or "no" to go without
#   MAX_FAILURES    starts in a row that may fail without a new checkpoint (default: 3)

stopped=75 # asked to stop, and saved

# The models of this folder are trained alike; corpus, tokenizer and anything else come from sbatch's command line.
# shellcheck disable=SC2034  # for the scripts that source this one
recipe=(--seq-length 1024 --max-position-embeddings 1024 --train-iters 300000
    --lr 1.5e-4 --min-lr 1e-5 --lr-decay-style cosine --lr-warmup-iters 3000
    --weight-decay 0.01 --clip-grad 1.0 --eval-interval 1000 --eval-iters 10 --save-interval 500 --log-interval 10)

say() { printf '[%s] %s\n' "$(date '+%F %T')" "$*"; }

fail() {
    printf 'error: %s\n' "$*" >&2
    exit 2
}

# Names of the job's nodes, a line each, in the order of their ranks.
node_names() { scontrol show hostnames "$SLURM_JOB_NODELIST"; }

# The last checkpoint there is.
checkpoint() { cat "$folder/checkpoints/latest" 2>/dev/null || echo nothing; }

check_job() {
    [[ -n "${SLURM_JOB_ID:-}" ]] || fail "this is a batch script: sbatch [options] $0 [flags of pretrain_gpt.py]"
    [[ -f pretrain_gpt.py ]] || fail "no pretrain_gpt.py in $PWD; call sbatch in the project's folder"
    python="${PYTHON:-.venv/bin/python}"
    command -v "$python" >/dev/null || fail "$python is missing; make it (scripts/test.sh does), or name one with PYTHON=..."
    [[ -n "${SLURM_NTASKS:-}" ]] || fail "the number of tasks is unknown; pass --ntasks-per-node, one task a GPU"
    ((SLURM_NTASKS % SLURM_JOB_NUM_NODES == 0)) ||
        fail "$SLURM_NTASKS tasks on $SLURM_JOB_NUM_NODES nodes; pass --ntasks-per-node, one task a GPU"
    local word
    for word in "$@"; do
        [[ ! "$word" =~ ^--(save|load)(=|$) ]] || fail "$word is set by the job; RUN_FOLDER=... sets the folder of a run"
    done
    folder="${RUN_FOLDER:-runs/$SLURM_JOB_NAME}"
    mkdir -p "$folder"
}

# Where the ranks of the next srun meet: the first node, a port that follows from the job's id.  Jobs that share a node
# rarely have ids that differ by a multiple of 10,000.  Two ports a job, so that training doesn't wait for preflight's.
meet_at() {
    read -r MASTER_ADDR < <(node_names)
    MASTER_PORT=$(($1 + SLURM_JOB_ID % 10000))
    export MASTER_ADDR MASTER_PORT
}

# One task a rank, ranks in the order of the nodes.  A rank that ends early ends the others a minute later, not at once:
# they may still be saving, and their status counts.  The status is the greatest of all tasks'.
start_ranks() {
    local options=(--distribution=block --kill-on-bad-exit=0 --wait=60 --input=none)
    # srun doesn't take this from sbatch by itself.
    [[ -z "${SLURM_CPUS_PER_TASK:-}" ]] || options+=(--cpus-per-task="$SLURM_CPUS_PER_TASK")
    srun "${options[@]}" bash scripts/slurm/task.sh "$python" "$@"
}

test_nodes() {
    [[ "${PREFLIGHT:-}" != no ]] || return 0
    meet_at 10000
    local flags
    read -ra flags <<<"${PREFLIGHT:-}"
    # A collective that hangs becomes an error that names its nodes.  Set here alone, and not with the defaults of
    # training (megazero/comm/gpu_environment.py): the host then waits for every collective, and nothing overlaps.
    TORCH_NCCL_BLOCKING_WAIT=1 start_ranks tools/preflight.py \
        --gpus-per-node "${SLURM_GPUS_ON_NODE:-0}" --nodes "$(node_names | paste --serial --delimiters=,)" "${flags[@]}"
}

train() {
    meet_at 20000
    start_ranks pretrain_gpt.py --save "$folder/checkpoints" --load "$folder/checkpoints" \
        --metrics-file "$folder/metrics.jsonl" --exit-status-when-stopped "$stopped" "$@"
}

# Prints how many starts in a row have ended at the checkpoint that is the last one now, this one included.
count_failure() {
    local record="$folder/failures" now before=none count=0
    now="$(checkpoint)"
    # A job that is submitted anew starts counting anew.
    if [[ -f "$record" ]] && ((${SLURM_RESTART_COUNT:-0} > 0)); then
        read -r before count <"$record"
    fi
    [[ "$before" == "$now" ]] || count=0
    printf '%s %d\n' "$now" "$((count + 1))" >"$record"
    echo "$((count + 1))"
}

# Ends this shell too, unless Slurm refuses.
requeue() {
    say "$1; requeued"
    scontrol requeue "$SLURM_JOB_ID" || fail "Slurm does not requeue job $SLURM_JOB_ID; submit it again to resume it"
    exit 0
}

# conclude STATUS CHECKPOINT: what becomes of the job after a start that found CHECKPOINT.
conclude() {
    local status="$1" failures
    case "$status" in
        0) say "finished" && exit 0 ;;
        2) say "ended with status 2, which another start would not mend; see the message above" && exit 2 ;;
        "$stopped") [[ "$(checkpoint)" == "$2" ]] || requeue "stopped before the end" ;;
    esac
    failures="$(count_failure)"
    ((failures < ${MAX_FAILURES:-3})) || {
        say "ended with status $status, $failures times in a row without a new checkpoint: not started again"
        exit "$status"
    }
    requeue "ended with status $status (failure $failures without a new checkpoint)"
}

run_job() {
    set -euo pipefail
    check_job "$@"
    say "job $SLURM_JOB_ID, start $((${SLURM_RESTART_COUNT:-0} + 1)): $SLURM_NTASKS ranks on $SLURM_JOB_NODELIST, in $folder"
    local status=0 found
    found="$(checkpoint)"
    test_nodes || status=$?
    if ((status == 0)); then
        train "$@" || status=$?
    fi
    conclude "$status" "$found"
}
