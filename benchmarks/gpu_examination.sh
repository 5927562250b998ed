#!/usr/bin/env bash
# Runs gpu_examination.py on a GPU machine that may lack packages and network; arguments after the folder go to it.
#
#   bash benchmarks/gpu_examination.sh --fetch WHEELS             where there is a network: fetches what is lacking
#   bash benchmarks/gpu_examination.sh [WHEELS] [--seconds N ...]   on the GPU machine, with that folder copied along
#
# PYTHON names the interpreter (python3 by default); it has to have torch for CUDA.  LACKING names the packages that
# --fetch fetches, with versions of scripts/constraints.txt; PLATFORM the machine they are for (x86_64 by default).
# Wheels are unpacked to a temporary folder: nothing of the machine is changed.  The exit status is gpu_examination.py's.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python="${PYTHON:-python3}"

if [[ "${1:-}" == --fetch ]]; then
    folder="${2:?--fetch needs a folder}"
    wanted=()
    for name in ${LACKING:-pydantic pydantic_core annotated-types typing-inspection typing_extensions orjson zstandard}; do
        pinned="$(grep -iE "^${name//[-_]/[-_]}==" scripts/constraints.txt || true)"
        wanted+=("${pinned:-$name}")
    done
    platforms=()
    for tag in manylinux_2_28 manylinux_2_27 manylinux_2_17 manylinux2014 manylinux1; do
        platforms+=(--platform "${tag}_${PLATFORM:-x86_64}")
    done
    exec "$python" -m pip download --quiet --no-deps --only-binary=:all: --implementation cp \
        --python-version "${PYTHON_VERSION:-3.12}" "${platforms[@]}" --platform any --dest "$folder" "${wanted[@]}"
fi

scratch="$(mktemp -d)"
trap 'rm -rf "$scratch"' EXIT
if [[ $# -gt 0 && "${1:0:2}" != -- ]]; then
    "$python" -m pip install --quiet --no-index --no-deps --no-compile --target "$scratch/packages" "$1"/*.whl
    export PYTHONPATH="$scratch/packages${PYTHONPATH:+:$PYTHONPATH}"
    shift
fi
# Phases share what torch.compile has made: a second process with the same shapes compiles nothing anew.
export TORCHINDUCTOR_CACHE_DIR="$scratch/inductor" TRITON_CACHE_DIR="$scratch/triton"
export TORCHINDUCTOR_FX_GRAPH_CACHE=1 TORCHINDUCTOR_AUTOGRAD_CACHE=1 PYTHONUNBUFFERED=1
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
"$python" benchmarks/gpu_examination.py "$@"
