#!/usr/bin/env bash
# Makes the environment if needed, then runs the linter, the formatter's check, the type checker and the tests.
#
#   bash scripts/test.sh [--fast] [--no-install] [arguments of pytest]
#
# --fast leaves out the tests that need a process group or a GPU.  --no-install uses the python that is there (PYTHON,
# python3 by default) and its packages.  Every phase runs even when one before it failed; the exit status is 0 only if
# all passed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/environment.sh
source scripts/environment.sh

install=yes
selected=()
while (($#)); do
    case "$1" in
    --no-install) install=no ;;
    --fast)
        # Rewriting the asserts of all tests, so that they show their values, takes as long as compiling these does.
        selected=(-m pure --assert plain)
        ;;
    *) break ;;
    esac
    shift
done

if [[ "$install" == yes ]]; then
    ensure_environment
    python=.venv/bin/python
else
    python="${PYTHON:-python3}"
    require_python "$python"
    require_packages "$python"
fi

failed=()
phase() {
    local name="$1" start=$SECONDS
    shift
    printf -- '--- %s\n' "$name"
    if "$@"; then
        printf -- '--- %s: passed in %ds\n' "$name" "$((SECONDS - start))"
    else
        printf -- '--- %s: FAILED after %ds\n' "$name" "$((SECONDS - start))"
        failed+=("$name")
    fi
}

# Tests start several processes on few cores: one thread each.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# Hundreds of processes import the same files: the first one's compiled files serve the others.
unset PYTHONDONTWRITEBYTECODE

phase "ruff check" "$python" -m ruff check .
phase "ruff format" "$python" -m ruff format --check .
# Types are checked beside the tests, in the processor time that ranks leave while they wait for each other.
types="$(mktemp)"
nice -n 19 "$python" -m mypy >"$types" 2>&1 &
checker=$!
trap 'kill "$checker" 2>/dev/null || true; rm -f "$types"' EXIT
# Files are dealt out to a process of pytest for each core, up to four: each imports all tests, and has ranks of its own.
cores="$("$python" -c 'import os; print(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())')"
phase "pytest" "$python" -m pytest --numprocesses "$cores" --maxprocesses 4 --dist loadfile \
    --no-loadscope-reorder --durations 20 ${selected[@]+"${selected[@]}"} "$@"

verdict_on_types() {
    local status=0
    wait "$checker" || status=$?
    cat "$types"
    return "$status"
}
phase "mypy" verdict_on_types

if ((${#failed[@]})); then
    printf 'FAILED: %s (%ds in all)\n' "${failed[*]}" "$SECONDS"
    exit 1
fi
printf 'all passed in %ds\n' "$SECONDS"
