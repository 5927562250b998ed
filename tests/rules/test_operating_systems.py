"""What not every operating system has is used in one module alone; shell scripts run in macOS's bash 3.2."""

import re
from pathlib import Path

from support.each import each
from support.source_tree import PROGRAMS, ROOT, sources

PLACE = "megazero/operating_system.py"
MODULES = {"fcntl", "resource", "termios", "pty", "grp", "msvcrt", "winreg"}
CALLS = (
    *("sched_getaffinity", "sched_setaffinity", "memfd_create", "eventfd", "pidfd_open", "posix_fadvise"),
    *("posix_fallocate", "copy_file_range", "splice", "sendfile", "getrandom", "setns", "unshare", "lockf"),
    *(
        "sched_setscheduler",
        "O_TMPFILE",
        "O_DIRECT",
        "O_NOATIME",
        "O_PATH",
        "epoll",
        "pthread_getcpuclockid",
        "MAP_POPULATE",
    ),
)
# Files of Linux's that are read where they are there.
PATHS = {
    "/proc": {"megazero/owner.py"},
    "/proc/cpuinfo": {"megazero/tensor_parallel/onednn.py"},
    "/proc/self/cgroup": {PLACE},
    "/sys/fs/cgroup": {PLACE},
    "/sys/fs/cgroup/cpu.max": {PLACE},
    "/dev/shm": {"megazero/cluster/preflight.py"},
}
# Bash 3.2 has none of these; an empty array is an unset variable there.
NEWER_BASH = r"\b(mapfile|readarray|coproc)\b|declare -[gAn]|local -[An]|\$\{\w+(\^|,,|@[A-Z])|&>>|\bwait -n|\|&"
GNU_PROGRAMS = r"(?<![-\w])(nproc|readlink -f|realpath|timeout|setsid|taskset)(?![-\w=])|sed -i|grep -P|date -d"
# Slurm's scripts run where Slurm runs, and CUDA's build where CUDA is.
EVERYWHERE = sorted(path for path in (ROOT / "scripts").glob("*.sh") if path.name != "null_gpu.sh")


def test_one_module_uses_what_not_every_system_has() -> None:
    uses = re.compile(rf"\.({'|'.join(CALLS)})\b|^ *(?:import|from) ({'|'.join(MODULES)})\b", re.MULTILINE)
    read = re.compile(r'"(/(?:proc|sys|dev/shm)\b[^"]*)"')
    everywhere = sources("megazero", *PROGRAMS)
    assert {source.name for source in everywhere if uses.search(source.text)} == {PLACE}
    found: dict[str, set[str]] = {}
    for source in everywhere:
        for path in read.findall(source.text):
            found.setdefault(path, set()).add(source.name)
    assert found == PATHS


@each("script", EVERYWHERE, ids=lambda path: path.name)
def test_scripts_need_neither_a_newer_bash_nor_linux(script: Path) -> None:
    lines = [line.partition(" #")[0] for line in script.read_text().splitlines() if not line.startswith("#")]
    assert [line for line in lines if re.search(f"{NEWER_BASH}|{GNU_PROGRAMS}", line)] == []
    # Empty in some calls, so expanded only where they have words.
    empty = {name for line in lines for name in re.findall(r"(?:^|\s)(\w+)=\(\)", line)}
    bare = [line for line in lines for name in empty if re.search(rf'(?<!\+)"\$\{{{name}\[@\]\}}"', line)]
    assert [line for line in bare if "complaints" not in line and "failed" not in line] == []
