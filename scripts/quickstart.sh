#!/usr/bin/env bash
# From nothing to a trained GPT that writes text: environment, corpus, tokenizer, token files, training, a sample, and
# what came of it.  Every stage whose result is there is skipped, and training resumes from its last checkpoint.
#
#   bash scripts/quickstart.sh [--fresh] [--input FILE] [--train-iters N] [--dir DIR] [--no-install]
#
# On CPUs it runs 4 processes (tensor parallel 2 x data parallel 2, ZeRO stage 2); on GPUs one process each, in bf16.
set -euo pipefail
invoked_from="$PWD"
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/environment.sh
source scripts/environment.sh

# The model and its training: 2.2M parameters, about 1.6M tokens, on two CPU cores less than four minutes.
vocab_size=2048
global_batch_size=8
shape=(--num-layers 4 --hidden-size 192 --num-attention-heads 6 --seq-length 256 --max-position-embeddings 256
    --hidden-dropout 0 --attention-dropout 0)
recipe=(--lr 3e-3 --min-lr 3e-4 --lr-decay-style cosine --lr-warmup-fraction 0.05 --weight-decay 0.1
    --adam-beta2 0.95 --clip-grad 1.0 --seed 1234)
intervals=(--log-interval 10 --eval-interval 100 --eval-iters 20 --eval-at-start --save-interval 100)

usage() {
    cat <<'TEXT'
usage: bash scripts/quickstart.sh [options]

Trains a small GPT on real text with tensor parallelism and ZeRO, and shows what it learnt.
Run again, it resumes where it stopped.

  --fresh           start over: remove what an earlier run left in its folder
  --input FILE      train on this .jsonl (key "text") or .txt instead of the Python standard library's sources
  --train-iters N   steps to train (default: 800)
  --dir DIR         where everything goes (default: runs/quickstart, or runs/quickstart-NAME with --input)
  --no-install      use the python that is there (PYTHON, python3 by default) and its packages
  --help            show this
TEXT
}

# Sets the options' variables from the command line.
parse_options() {
    fresh=no install=yes input="" train_iters=800 dir=""
    while (($#)); do
        case "$1" in
            --fresh) fresh=yes ;;
            --no-install) install=no ;;
            --input | --train-iters | --dir)
                (($# >= 2)) || fail "$1 needs a value; see --help"
                case "$1" in
                    --input) input="$2" ;;
                    --train-iters) train_iters="$2" ;;
                    --dir) dir="$2" ;;
                esac
                shift
                ;;
            --help | -h) usage && exit 0 ;;
            *) fail "unknown option $1; see --help" ;;
        esac
        shift
    done
    [[ "$train_iters" =~ ^[1-9][0-9]{0,8}$ ]] || fail "--train-iters $train_iters: must be a whole number, at least 1"
    check_input
    choose_folder
}

check_input() {
    [[ -n "$input" ]] || return 0
    input="$(from_where_invoked "$input")"
    [[ -f "$input" ]] || fail "--input $input: no such file"
    [[ "$input" == *.jsonl || "$input" == *.txt ]] || fail "--input $input: must end in .jsonl or .txt"
    # A twentieth is held out, and the tokenizer learns 2048 pieces: less text gives neither.
    local least=300000 size
    size="$(wc -c <"$input")"
    ((size >= least)) || fail "--input $input: $size bytes of text; the quickstart needs $least or more"
}

# Relative paths are the caller's, who need not stand in the project's root.
from_where_invoked() {
    case "$1" in
        /*) printf '%s\n' "$1" ;;
        *) printf '%s\n' "$invoked_from/$1" ;;
    esac
}

choose_folder() {
    if [[ -n "$dir" ]]; then
        dir="$(from_where_invoked "$dir")"
    elif [[ -n "$input" ]]; then
        local name="${input##*/}"
        dir="runs/quickstart-${name%.*}"
    else
        dir=runs/quickstart
    fi
}

choose_python() {
    if [[ "$install" == yes ]]; then
        ensure_environment
        python="$PWD/.venv/bin/python"
        return
    fi
    python="${PYTHON:-python3}"
    require_python "$python"
    # Without an installation the package is found where it lies.
    export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
    local missing
    missing="$("$python" -c '
from importlib.util import find_spec
names = "torch numpy pydantic yaml rich safetensors sentencepiece tensorboard tokenizers".split()
print(*(name for name in names if find_spec(name) is None))')"
    [[ -z "$missing" ]] || fail "$python lacks the packages: $missing (name another python with PYTHON=..., or install)"
}

# Makes the folder, or reuses the one of an earlier run on the same text.  The file `text` in it names the text that
# was used, and marks the folder as a quickstart's: nothing else is ever removed or written into.
prepare_folder() {
    local text
    if [[ -n "$input" ]]; then
        text="$input, $(cksum <"$input")"
    else
        text="standard library of $("$python" -c 'import platform, sys; print(sys.base_prefix, platform.python_version())')"
    fi
    if [[ -d "$dir" && ! -f "$dir/text" && -n "$(ls -A "$dir")" ]]; then
        fail "$dir is not empty and holds no quickstart; name another with --dir"
    fi
    if [[ "$fresh" == yes && -d "$dir" ]]; then
        say "removing $dir"
        rm -rf -- "$dir"
    fi
    mkdir -p "$dir"
    if [[ -f "$dir/text" && "$(cat "$dir/text")" != "$text" ]]; then
        fail "$dir was made from other text ($(cat "$dir/text")); start over with --fresh, or name another with --dir"
    fi
    printf '%s\n' "$text" >"$dir/text"
}

# stage NAME FILE COMMAND...: runs COMMAND unless FILE, the last thing it writes, is there.  The tools give a file its
# name only when it is complete.
stage() {
    local name="$1" result="$2"
    shift 2
    if [[ -e "$result" ]]; then
        say "$name: there already ($result)"
        return
    fi
    say "$name"
    "$@"
}

prepare_data() {
    local corpus="$input"
    if [[ -z "$corpus" ]]; then
        corpus="$dir/corpus.jsonl"
        stage "corpus from the standard library" "$corpus" "$python" tools/text_to_jsonl.py --stdlib --output "$corpus"
    fi
    stage "tokenizer" "$dir/tokenizer.model" "$python" tools/train_tokenizer.py \
        --input "$corpus" --vocab-size "$vocab_size" --output "$dir/tokenizer.model"
    stage "token files" "$dir/corpus_text_document.json" "$python" tools/preprocess_data.py \
        --input "$corpus" --output-prefix "$dir/corpus" --append-eod --workers "$(worker_count)" \
        --tokenizer-type SentencePieceTokenizer --tokenizer-model "$dir/tokenizer.model"
}

worker_count() {
    local cores
    cores="$(core_count)"
    echo "$((cores < 8 ? cores : 8))"
}

core_count() {
    "$python" -c 'from megazero.operating_system import usable_cores; print(usable_cores())'
}

# Sets processes and layout: the largest power of two of the GPUs, in pairs of tensor parallelism; without GPUs 2 x 2.
choose_layout() {
    local gpus tensor=2
    gpus="$("$python" -c 'import torch; print(torch.cuda.device_count())')"
    precision=fp32
    processes=4
    if ((gpus > 0)); then
        precision=bf16
        processes=1
        while ((processes * 2 <= gpus && processes < 2 * global_batch_size)); do processes=$((processes * 2)); done
    else
        local cores
        cores="$(core_count)"
        export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((cores > processes ? cores / processes : 1))}"
    fi
    ((processes > 1)) || tensor=1
    local data=$((processes / tensor))
    layout=(--tensor-model-parallel-size "$tensor" --zero-stage 2 --precision "$precision"
        --micro-batch-size "$((global_batch_size / data))" --global-batch-size "$global_batch_size")
    say "layout: $processes processes on $( ((gpus > 0)) && echo GPUs || echo CPUs)," \
        "tensor parallel $tensor x data parallel $data, ZeRO stage 2, $precision"
}

train() {
    local saved
    saved="$(cat "$dir/checkpoints/latest" 2>/dev/null || true)"
    # step_0000300, or step_0000300_2 when a step was saved again
    if [[ "$saved" =~ ^step_0*([0-9]+)(_[0-9]+)?$ ]] && ((BASH_REMATCH[1] >= train_iters)); then
        say "training: $train_iters steps are done ($dir/checkpoints/$saved)"
        return
    fi
    choose_layout
    say "training: to step $train_iters${saved:+, from $saved}"
    export PET_SHUTDOWN_TIMEOUT="${PET_SHUTDOWN_TIMEOUT:-120}" # seconds that Ctrl-C leaves the ranks to save
    # The schedule is that of this command line, so that --train-iters can be raised between two runs.
    "$python" -m torch.distributed.run --standalone --nproc-per-node "$processes" pretrain_gpt.py \
        "${shape[@]}" "${recipe[@]}" "${layout[@]}" "${intervals[@]}" \
        --train-iters "$train_iters" --override-opt_param-scheduler \
        --data-path "$dir/corpus_text_document" --split 95,5,0 \
        --tokenizer-type SentencePieceTokenizer --tokenizer-model "$dir/tokenizer.model" \
        --save "$dir/checkpoints" --load "$dir/checkpoints" \
        --metrics-file "$dir/metrics.jsonl" --tensorboard-dir "$dir/tensorboard" \
        --log-timers-to-tensorboard --log-memory-to-tensorboard --log-validation-ppl-to-tensorboard
}

show_sample() {
    local prompt="The "
    [[ -n "$input" ]] || prompt="def __init__(self"
    say "a sample that begins with \"$prompt\""
    "$python" tools/generate_text.py --load "$dir/checkpoints" --prompt "$prompt" \
        --max-new-tokens 120 --temperature 0.7 --top-p 0.9 --seed 1234
}

# What ended early is said, whatever ended it: a tool's own message may be missing when a signal did.
# shellcheck disable=SC2329  # the trap below calls it
tell_failure() {
    local status=$?
    ((status == 0)) || printf 'stopped after %ds with exit status %d; the same command resumes from here\n' \
        "$SECONDS" "$status" >&2
}

# In a function, so that the whole script is read before anything runs and may be edited meanwhile.
main() {
    parse_options "$@"
    choose_python
    prepare_folder
    trap tell_failure EXIT
    prepare_data
    train
    show_sample
    say "done"
    "$python" tools/summarize_run.py --metrics-file "$dir/metrics.jsonl" --load "$dir/checkpoints" \
        --tensorboard-dir "$dir/tensorboard"
}

main "$@"
exit
