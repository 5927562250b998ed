#!/usr/bin/env bash
# Builds the null GPU, with which torch's CUDA build takes training steps on a machine that has no GPU.
#
#   bash scripts/null_gpu.sh
#   build/null_gpu/python benchmarks/null_gpu.py      (or any program of the project, with --device cuda)
#
# Makes build/null_gpu: a virtual environment with torch for CUDA (2.5 GB to download, 5 GB on the disk) and the few
# packages that a training step needs, the two libraries of benchmarks/null_cuda, and `python`, which runs the
# environment's interpreter on them.  Run again, it makes only what is missing or out of date.  FOLDER names another
# place, PYTHON the interpreter to make the environment with (python3 by default).  benchmarks/README.md has the details.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/environment.sh
source scripts/environment.sh

# The libraries stand in for what this version calls of CUDA; another one may call more.
torch="torch==2.11.0"
packages=(hypothesis numpy orjson pydantic pytest pytest-timeout PyYAML rich safetensors sentencepiece tokenizers xxhash zstandard)
folder="${FOLDER:-build/null_gpu}"
sources=benchmarks/null_cuda
free_gigabytes_needed=12

machine="$(uname -s) $(uname -m)"
[[ "$machine" == "Linux x86_64" ]] || fail "the null GPU is for Linux on x86_64, and this is $machine"
for program in gcc g++; do # gcc: Triton builds its launchers with it
    command -v "$program" >/dev/null || fail "$program is missing (Debian: apt install build-essential)"
done
require_python "${PYTHON:-python3}"
headers="$("${PYTHON:-python3}" -c 'import sysconfig; print(sysconfig.get_path("include"))')"
[[ -e "$headers/Python.h" ]] || fail "Python's headers are missing in $headers (Debian: apt install python3-dev)"

mkdir -p "$folder"
folder="$(cd "$folder" && pwd)"
python="$folder/venv/bin/python"
stamp="$folder/packages"
wanted="$torch ${packages[*]} $(cksum <scripts/constraints.txt)"
if [[ ! -f "$stamp" || "$(<"$stamp")" != "$wanted" ]]; then
    free=$(($(df --output=avail -k "$folder" | tail -n 1) / 1000000))
    ((free >= free_gigabytes_needed)) || fail "$folder has $free GB of room; $free_gigabytes_needed GB are needed"
    say "downloading $torch for CUDA and the packages it needs: 2.5 GB, 5 GB on the disk, to $folder/venv"
    "$python" -m pip --version >/dev/null 2>&1 || "${PYTHON:-python3}" -m venv "$folder/venv" ||
        fail "python can't make a virtual environment (Debian: apt install python3-venv)"
    export PIP_DISABLE_PIP_VERSION_CHECK=1
    # torch's version is the null GPU's own; that of Triton and CUDA's libraries is torch's choice.
    grep -v '^torch==' scripts/constraints.txt >"$folder/constraints.txt"
    "$python" -m pip install --quiet --no-cache-dir "$torch" "${packages[@]}" -c "$folder/constraints.txt" ||
        fail "the packages could not be installed; see pip's message above"
    "$python" -c 'import sys, torch; sys.exit(torch.version.cuda is None)' ||
        fail "pip has chosen a build of $torch without CUDA; look at PIP_INDEX_URL, PIP_EXTRA_INDEX_URL and pip config list"
    printf '%s\n' "$wanted" >"$stamp"
fi

site="$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
header="$(find "$site/nvidia" -name driver_types.h -print -quit)"
[[ -n "$header" ]] || fail "CUDA's header driver_types.h is not among the packages in $site/nvidia"
compile() { # library, source, options
    local library="$1" source="$2"
    shift 2
    if [[ -n "$(find "$sources" scripts/null_gpu.sh -type f -newer "$library" 2>/dev/null || echo missing)" ]]; then
        say "compiling ${library##*/}"
        g++ -O1 -Wall -fPIC -shared -I"$sources" -I"$(dirname "$header")" "$source" -o "$library" -ldl "$@"
    fi
}
compile "$folder/libnull_gpu.so" "$sources/runtime.cpp"
compile "$folder/libcuda.so.1" "$sources/driver.cpp" -Wl,-soname,libcuda.so.1

cat >"$folder/python" <<PROGRAM
#!/usr/bin/env bash
# Made by scripts/null_gpu.sh: runs python with torch for CUDA on the null GPU.
export LD_PRELOAD='$folder/libnull_gpu.so' LD_LIBRARY_PATH='$folder' TRITON_LIBCUDA_PATH='$folder'
export PYTHONPATH='$PWD'"\${PYTHONPATH:+:\$PYTHONPATH}"
# Segments that grow are virtual memory of the driver's, which the null GPU's driver does not have.
export PYTORCH_ALLOC_CONF="\${PYTORCH_ALLOC_CONF:-expandable_segments:False}"
exec '$python' "\$@"
PROGRAM
chmod +x "$folder/python"
"$folder/python" -c 'import torch; torch.ones(8, 8, device="cuda") @ torch.ones(8, 8, device="cuda")' ||
    fail "torch does not run on the null GPU; the message above is torch's"
say "$folder/python runs python on the null GPU"
