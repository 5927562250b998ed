"""Tests that Ctrl-C while a program imports its modules ends it in a word, and Windows in a sentence."""

import json
import signal
import subprocess
import sys

from support.source_tree import PROGRAMS, ROOT, sources

from megazero.interrupts import NOT_ON_WINDOWS

# Forks a process for each program, which gets Ctrl-C as soon as it imports the module that all programs need.
INTERRUPTED = """
import json, os, runpy, signal, sys

class Interrupt:
    def find_spec(self, name, *rest):
        if name == "megazero.errors":
            os.kill(os.getpid(), signal.SIGINT)

programs, handler = json.loads(sys.argv[1]), {"default": signal.default_int_handler, "ignored": signal.SIG_IGN}
signal.signal(signal.SIGINT, handler[sys.argv[2]])
sys.meta_path.insert(0, Interrupt())
for program in programs:
    pid = os.fork()
    if not pid:
        sys.argv[:] = [program, "--help"]
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        if program == "megazero/__main__.py":
            runpy.run_module("megazero", run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(program, run_name="__main__")
    print(program, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""

# Starts each program in a process that takes itself to be on Windows, then imports the library there.
ON_WINDOWS = """
import json, os, runpy, sys

sys.platform = "win32"
for program in json.loads(sys.argv[1]):
    pid = os.fork()
    if not pid:
        sys.argv[:] = [program, "--help"]
        if program == "megazero/__main__.py":
            runpy.run_module("megazero", run_name="__main__", alter_sys=True)
        elif program == "megazero/command.py":
            from megazero.command import run
            run()
        else:
            runpy.run_path(program, run_name="__main__")
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
try:
    import megazero.signals
except ImportError as error:
    print(error)
"""


def interrupted(programs: list[str], handler: str) -> tuple[list[str], str]:
    command = [sys.executable, "-c", INTERRUPTED, json.dumps(programs), handler]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout.splitlines(), done.stderr


def test_an_interrupt_during_imports_is_a_word() -> None:
    programs = [source.name for source in sources("megazero/__main__.py", *PROGRAMS)]
    statuses, told = interrupted(programs, "default")
    assert statuses == [f"{program} {128 + signal.SIGINT}" for program in programs], told
    assert told == "interrupted\n" * len(programs)


def test_a_shells_background_job_ignores_it() -> None:
    assert interrupted(["pretrain_gpt.py"], "ignored") == (["pretrain_gpt.py 0"], "")


def test_windows_is_refused_in_a_sentence_by_every_program_and_by_the_library() -> None:
    programs = [source.name for source in sources("megazero/__main__.py", "megazero/command.py", *PROGRAMS)]
    command = [sys.executable, "-c", ON_WINDOWS, json.dumps(programs)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.splitlines() == ["2"] * len(programs) + [NOT_ON_WINDOWS]
    assert done.stderr == f"error: {NOT_ON_WINDOWS}\n" * len(programs)
    assert "WSL" in NOT_ON_WINDOWS
