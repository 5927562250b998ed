# shellcheck shell=bash
# Sourced by the other scripts.  `ensure_environment` makes .venv beside setup.py with the pinned versions of
# scripts/constraints.txt, once: a stamp in .venv names the setup.py and the constraints it was made from.
# PYTHON names the interpreter to make it with (python3 by default).  Run it in the project's root.

# Prints its arguments with the seconds since the script began.
say() { printf '[%3ds] %s\n' "$SECONDS" "$*"; }

# Prints a message on stderr and ends the script.
fail() {
    printf 'error: %s\n' "$*" >&2
    exit 2
}

require_python() {
    command -v "$1" >/dev/null 2>&1 || fail "$1 is missing; install CPython 3.11 or newer, or name one with PYTHON=..."
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
        fail "$("$1" --version) is too old; megazero needs CPython 3.11 or newer (name one with PYTHON=...)"
}

# Ends the script with the names of the requirements of setup.py (those that stand alone on a line) that a python lacks.
require_packages() {
    local missing
    missing="$("$1" - <<'PROGRAM'
import importlib.metadata
import re

present = {re.sub("[-_.]+", "-", found.name).lower() for found in importlib.metadata.distributions()}
with open("setup.py", encoding="utf-8") as setup:
    needed = re.findall(r'^ +"([\w-]+)>=[^";]*",$', setup.read(), re.MULTILINE)
print(*(name for name in needed if name.lower() not in present))
PROGRAM
)"
    [[ -z "$missing" ]] || fail "$1 lacks ${missing// /, }; leave out --no-install, or name a python with PYTHON=..."
}

environment_fingerprint() {
    cat setup.py scripts/constraints.txt | cksum
}

# Torch alone.  Nothing is byte-compiled ahead, which takes half a minute: of thousands of files a run imports hundreds,
# and python keeps those compiled.
install_torch() {
    local wanted
    wanted="$(grep '^torch==' scripts/constraints.txt)"
    # The build (with CUDA or without) depends on pip's own settings, such as PIP_EXTRA_INDEX_URL.
    .venv/bin/python -m pip install --quiet --no-compile --no-deps "$wanted"
}

# What a run and the tests need besides, by four pips at once, since a pip waits for its index most of the time.  Each
# installs what is named and nothing else, so no two install the same.  The pip that comes last completes what fails here.
install_pinned() {
    local part
    for part in 0 1 2 3; do
        sed -n '/^$/q; /^torch==/d; /==/p' scripts/constraints.txt | awk "NR % 4 == $part" >".venv/part$part.txt"
        .venv/bin/python -m pip install --quiet --no-compile --no-deps -r ".venv/part$part.txt" >/dev/null 2>&1 &
    done
    wait
}

ensure_environment() {
    local stamp=.venv/megazero-stamp
    if [[ -f "$stamp" && "$(cat "$stamp")" == "$(environment_fingerprint)" ]]; then
        return
    fi
    require_python "${PYTHON:-python3}"
    # One without pip is half made: that is what a python without its venv package leaves behind.
    if ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
        say "making .venv"
        "${PYTHON:-python3}" -m venv .venv || fail "python can't make a virtual environment (Debian: apt install python3-venv)"
    fi
    export PIP_DISABLE_PIP_VERSION_CHECK=1
    say "installing torch and what megazero needs besides"
    install_pinned &
    local pinned=$!
    local torch=present
    install_torch || torch=absent
    wait "$pinned"
    [[ "$torch" == present ]] ||
        fail "torch could not be installed; see pip's message above (no network? use --no-install)"
    say "installing megazero and its tools"
    # Meanwhile another core compiles what every run imports of torch.
    env -u PYTHONDONTWRITEBYTECODE .venv/bin/python -c 'import torch.distributed.tensor, torch._inductor.compile_fx' \
        >/dev/null 2>&1 &
    local compiling=$!
    .venv/bin/python -m pip install --quiet --no-compile -e '.[test]' -c scripts/constraints.txt ||
        fail "megazero could not be installed; see pip's message above"
    wait "$compiling" || true  # what is not compiled is compiled when it is imported
    environment_fingerprint >"$stamp"
}
