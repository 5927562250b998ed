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

# Puts the pip that every python has inside into .venv, if that has none.  It is the content of a wheel; ensurepip, which
# compiles all of it, takes ten times as long.
bring_pip() {
    .venv/bin/python -c "import pip" 2>/dev/null && return
    .venv/bin/python - 2>/dev/null <<'PROGRAM' || .venv/bin/python -m ensurepip >/dev/null
import ensurepip
import pathlib
import sysconfig
import zipfile

places = (sysconfig.get_config_var("WHEEL_PKG_DIR"), pathlib.Path(ensurepip.__file__).with_name("_bundled"))
[wheel, *_] = [path for place in places if place for path in pathlib.Path(place).glob("pip-*.whl")]
zipfile.ZipFile(wheel).extractall(sysconfig.get_path("purelib"))
PROGRAM
}

# Brings uv into .venv/uv: a whole environment takes it a fraction of pip's time.  The pip is the one of the python that
# makes .venv, or else the one that every python has inside.  It brings uv into a folder; into the environment of
# another python than its own it would start twice.
bring_uv() {
    local wanted pip=("${PYTHON:-python3}" -m pip)
    wanted="$(grep '^uv==' scripts/constraints.txt)"
    if ! "${PYTHON:-python3}" -c "import pip" 2>/dev/null; then
        bring_pip || return
        pip=(.venv/bin/python -m pip)
    fi
    "${pip[@]}" config list >.venv/pip-settings.txt &
    # A folder is no environment: settings that ask for a user's own, or for an activated one, are about others.
    PIP_USER=0 PIP_REQUIRE_VIRTUALENV=0 PIP_ROOT_USER_ACTION=ignore "${pip[@]}" install --quiet --no-compile --no-deps \
        --upgrade --target .venv/uv "$wanted" || return
    wait $!
}

# Prints pip's own settings as assignments to uv's variables: which build of torch is installed (with CUDA or without)
# depends on them.  What is in the environment already is left alone.
settings_for_uv() {
    .venv/bin/python - <<'PROGRAM'
import ast
import os
import shlex

SAME = {
    "index-url": ("UV_DEFAULT_INDEX", " "),
    "extra-index-url": ("UV_INDEX", " "),
    "find-links": ("UV_FIND_LINKS", ","),
    "no-index": ("UV_NO_INDEX", " "),
    "trusted-host": ("UV_INSECURE_HOST", " "),
    "cert": ("SSL_CERT_FILE", " "),
}
# As with pip, the newest version that is allowed wins, whichever index has it.
settings = {"UV_INDEX_STRATEGY": "unsafe-best-match"}
with open(".venv/pip-settings.txt", encoding="utf-8") as listed:
    lines = listed.read().splitlines()
for section in ("global.", "install.", ":env:."):  # each overrules the one before it
    for line in lines:
        name, _, value = line.partition("=")
        if name.startswith(section) and name.removeprefix(section) in SAME:
            variable, separator = SAME[name.removeprefix(section)]
            settings[variable] = separator.join(ast.literal_eval(value).split())
for variable, value in settings.items():
    if variable not in os.environ:
        print(f"export {variable}={shlex.quote(value)}")
PROGRAM
}

# Nothing is byte-compiled ahead, which takes half a minute: of thousands of files a run imports hundreds.
install_by_uv() (
    bring_uv || return
    settings="$(settings_for_uv)" || return
    eval "$settings"
    .venv/uv/bin/uv pip install --quiet --python .venv/bin/python pip -e '.[test]' -c scripts/constraints.txt
)

install_by_pip() {
    bring_pip 2>/dev/null
    .venv/bin/python -m pip install --quiet --no-compile -e '.[test]' -c scripts/constraints.txt
}

# Lets python keep what every run and the tests import in compiled form, on two cores: each process of pytest would do
# all of it by itself.  What is not compiled here is compiled when it is imported.
compile_what_is_imported() {
    local imported
    for imported in \
        "torch.distributed.tensor, transformers.models.gpt2.modeling_gpt2" "sympy, torch._inductor.compile_fx"; do
        env -u PYTHONDONTWRITEBYTECODE .venv/bin/python -c "import $imported" >/dev/null 2>&1 &
    done
    wait
}

ensure_environment() {
    local stamp=.venv/megazero-stamp
    if [[ -f "$stamp" && "$(cat "$stamp")" == "$(environment_fingerprint)" ]]; then
        return
    fi
    require_python "${PYTHON:-python3}"
    export PIP_DISABLE_PIP_VERSION_CHECK=1
    if [[ ! -x .venv/bin/python ]]; then
        say "making .venv"
        "${PYTHON:-python3}" -m venv --without-pip .venv ||
            fail "python can't make a virtual environment (Debian: apt install python3-venv)"
    fi
    say "installing torch, megazero and what both need besides"
    if ! install_by_uv; then
        say "uv could not install them; pip does"
        install_by_pip || fail "megazero could not be installed; see pip's message above (no network? use --no-install)"
    fi
    say "compiling what is imported most"
    compile_what_is_imported
    environment_fingerprint >"$stamp"
}
