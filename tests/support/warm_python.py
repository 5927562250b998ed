"""A python for tests that has imported torch and megazero before it is asked to run a program.

A process that imports both takes two to four seconds of CPU for it, and a test of a program under torchrun starts
several.  `warm_python()` returns the path of an executable that takes the place of `sys.executable` where the start
itself is not what a test is about:

    subprocess.run([warm_python(), "-m", "torch.distributed.run", "--nproc-per-node=2", "tools/preflight.py"])

It sends its arguments, environment, working folder and open files to a *fork server*, which forks a process that runs
the program from its first line, as `__main__`, with these; a program's own `sys.executable` is the same executable.
Signals are passed on to that process, and its exit status comes back.  When the executable itself is killed, that
process is killed too.

`warm_python(TOOLS)` has imported what tools take that prepare text, and no torch; its fork server is there at once.
All processes that share out the tests have the fork servers in common.

What differs from a start of its own: the process is no child of the one that started it, so it is not found under /proc
by its parent, environment or name; SIGSTOP does not reach it; the seed of `hash` is the server's; and modules have been
imported from this tree.  A program started with options of python other than -u, -B, -c and -m gets a python of its
own.
"""

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import marshal
import multiprocessing
import os
import runpy
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

ROOT = Path(__file__).resolve().parents[2]
RUNS = (
    "torch",
    "torch.distributed.run",
    "torch._dynamo",
    "megazero.train.program",
    "megazero.verify.program",
    "megazero.generate.session",
    "tokenizers",
    "tensorboard.compat.proto.summary_pb2",
)
TOOLS = (
    "sentencepiece",
    *(f"megazero.commands.{name}" for name in ("preprocess", "inspect", "merge", "text_to_jsonl", "train_tokenizer")),
    *(f"megazero.commands.{name}" for name in ("clean", "summarize", "completion")),
)
SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
FREE_NUMBERS = 512  # files are moved to numbers from here on, to be out of the way of those that a process asks for

# The executable.  It imports little, so that it costs some hundredths of a second.
CLIENT = """
import _socket, array, marshal, os, signal, sys

words = sys.argv[1:]
while words[:1] in (["-u"], ["-B"]):  # what is imported has been compiled
    del words[0]
if not words or words[0][0] == "-" and words[0] not in ("-m", "-c"):
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
files = []
for name in os.listdir("/proc/self/fd"):
    try:
        os.fstat(int(name))
        files.append(int(name))
    except OSError:
        pass
ignored = [number for number in {signals!r} if signal.getsignal(number) is signal.SIG_IGN]
server = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
server.connect({address!r})
request = marshal.dumps((words, dict(os.environb), os.getcwdb(), files, ignored, "-u" in sys.argv[1:2]))
handed = [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, array.array("i", files))]
server.sendmsg([b"%8d%8d" % (len(request), os.getpid())], handed)
server.sendall(request)
told = server.recv(8)
process = int(told or b"0")
def forward(number, frame):
    try:
        os.kill(process, number)
    except ProcessLookupError:  # it has ended, and its status is on its way
        pass
for number in {signals!r}:
    if number not in ignored:
        signal.signal(number, forward)
status = server.recv(8)
if not status:
    sys.exit("the fork server has ended")
code = os.waitstatus_to_exitcode(int(status))
if code < 0:
    signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
    os.kill(os.getpid(), -code)
os._exit(code)
"""


class _Request(NamedTuple):
    words: list[str]
    environment: dict[bytes, bytes]
    folder: bytes
    files: list[int]  # the numbers under which the program has its files
    ignored: list[int]  # signals
    is_unbuffered: bool


class _Started(NamedTuple):
    process: int
    handle: int  # a file that becomes readable when the process ends
    client: socket.socket


_servers: list["subprocess.Popen[bytes]"] = []
_SHARED = os.environ.get("PYTEST_XDIST_TESTRUNUID")  # the name of these tests in each of several processes of pytest
_ALONE = uuid.uuid4().hex


def warm_python(modules: tuple[str, ...] = RUNS) -> str:
    """Return the path of the executable; the first call starts the fork server, which ends with the tests.

    modules: what it has imported, RUNS or TOOLS.
    """
    if not hasattr(os, "pidfd_open") or len(sys.executable) > 100 or " " in sys.executable:
        return sys.executable  # this is not Linux, or the path cannot stand in a script's first line
    owner = os.getpid() if _SHARED is None else os.getppid()
    folder = Path(tempfile.gettempdir(), f"warm_{_SHARED or _ALONE}_{modules[0]}")
    executable = folder / "python"
    try:
        folder.mkdir()
    except FileExistsError:  # the server is there, or another process starts it
        while not executable.exists():
            time.sleep(0.01)
        return str(executable)
    address = str(folder / "socket")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen(64)
        words = [sys.executable, __file__, str(listener.fileno()), str(folder), str(owner), ",".join(modules)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        handed = [listener.fileno()]
        server = subprocess.Popen(
            words, env=environment, pass_fds=handed, start_new_session=True, stdin=subprocess.DEVNULL
        )
    _servers.append(server)
    numbers = [int(number) for number in SIGNALS]
    client = CLIENT.format(python=sys.executable, address=address, signals=numbers)
    (folder / "written").write_text(f"#!{sys.executable} -IS\n{client}")
    (folder / "written").chmod(0o755)
    (folder / "written").rename(executable)
    return str(executable)


def _serve(listener: socket.socket, tests: int) -> tuple[_Request, list[int], socket.socket, int]:
    """Fork a process for every request; return only in these, with the request, its files and its client.

    tests: a file that becomes readable when the tests have ended, and with them the server.
    """
    selector = selectors.DefaultSelector()
    for watched in (listener, tests):
        selector.register(watched, selectors.EVENT_READ)
    running: dict[Any, _Started] = {}
    has_ended = False
    while not has_ended:
        for key, _ in selector.select():
            if key.fileobj == tests:
                has_ended = True
            elif key.fileobj is listener:
                client, _ = listener.accept()
                files: list[int] = []
                try:
                    request, owner = _receive(client, files)
                except (OSError, ValueError, EOFError):  # it has been killed before it has sent everything
                    client.close()
                    for file in files:
                        os.close(file)
                    continue
                process = os.fork()
                if process == 0:
                    selector.close()
                    return request, files, client, owner
                with contextlib.suppress(BrokenPipeError):
                    client.sendall(b"%8d" % process)
                started = _Started(process, os.pidfd_open(process), client)
                for file in files:
                    os.close(file)
                for watched in (started.handle, client):
                    running[watched] = started
                    selector.register(watched, selectors.EVENT_READ)
            elif key.fileobj in running:
                started = running[key.fileobj]
                if key.fileobj is started.client:  # it has been killed, since it sends nothing
                    os.kill(started.process, signal.SIGKILL)
                _, status = os.waitpid(started.process, 0)
                for watched in (started.handle, started.client):
                    selector.unregister(watched)
                    del running[watched]
                os.close(started.handle)
                with started.client, contextlib.suppress(BrokenPipeError):
                    started.client.sendall(b"%8d" % status)
    for started in running.values():
        os.kill(started.process, signal.SIGKILL)
    raise SystemExit


def _receive(client: socket.socket, files: list[int]) -> tuple[_Request, int]:
    """Return the request and the client's process id; the client's files are appended to `files`."""
    head, handed, _, _ = socket.recv_fds(client, 16, 253)
    files += handed
    size, owner, body = int(head[:8]), int(head[8:]), b""
    while len(body) < size:
        part = client.recv(size - len(body))
        if not part:
            raise EOFError
        body += part
    return _Request(*marshal.loads(body)), owner


def _enter(request: _Request, files: list[int], client: socket.socket, owner: int, executable: str) -> None:
    """Give this forked process the request's files, environment, folder, signals and network."""
    os.setsid()
    _share_network(owner)
    moved = [fcntl.fcntl(file, fcntl.F_DUPFD, FREE_NUMBERS) for file in files]
    client.detach()
    os.closerange(0, FREE_NUMBERS)
    for file, number in zip(moved, request.files, strict=True):
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environb.update(request.environment)
    os.chdir(request.folder)
    for number in request.ignored:
        signal.signal(number, signal.SIG_IGN)
    sys.executable = executable
    if "multiprocessing.spawn" in sys.modules:  # it has kept the server's
        multiprocessing.set_executable(executable)
    sys.orig_argv[:] = [executable, *request.words]
    if request.is_unbuffered:
        for stream in (sys.stdout, sys.stderr):
            assert hasattr(stream, "reconfigure")
            stream.reconfigure(write_through=True)
    threads = int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1))
    torch = sys.modules.get("torch")
    if torch is not None and torch.get_num_threads() != threads:
        torch.set_num_threads(threads)


def _share_network(owner: int) -> None:
    """Enter the network namespace of the client, which may run inside an emulated node."""
    theirs = f"/proc/{owner}/ns/net"
    if os.readlink(theirs) == os.readlink("/proc/self/ns/net"):
        return
    file = os.open(theirs, os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).setns(file, 0):
        raise OSError(ctypes.get_errno(), "cannot enter the network namespace of the client")


def _run(words: list[str], search_path: list[str]) -> None:
    """Run a program as python does with these words."""
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    named = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    if words[0] == "-m":
        sys.path[:] = [os.getcwd(), *named, *search_path]
        sys.argv[:] = words[1:]
        sys.modules.pop(words[1], None)  # it is to be run from its first line
        run_module: Callable[[str], object] = vars(runpy)["_run_module_as_main"]
        run_module(words[1])
    elif words[0] == "-c":
        sys.path[:] = ["", *named, *search_path]
        sys.argv[:] = ["-c", *words[2:]]
        exec(compile(words[1], "<string>", "exec"), main.__dict__)
    else:
        sys.path[:] = [str(Path(words[0]).resolve().parent), *named, *search_path]
        sys.argv[:] = words
        main.__file__ = words[0]
        exec(compile(Path(words[0]).read_bytes(), words[0], "exec"), main.__dict__)


def _status_of(words: list[str], search_path: list[str]) -> int:
    """Run a program and return its exit status, after python's own rules for exceptions that leave it."""
    try:
        _run(words, search_path)
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            return (ended.code or 0) & 0xFF
        print(ended.code, file=sys.stderr)
        return 1
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _end_as(status: int) -> NoReturn:
    """End this process as python does, but without clearing its modules, which takes a quarter of a second."""
    vars(threading)["_shutdown"]()
    vars(atexit)["_run_exitfuncs"]()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(BrokenPipeError, ValueError):
            stream.flush()
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def _main() -> None:
    listener, folder, tests = socket.socket(fileno=int(sys.argv[1])), Path(sys.argv[2]), os.pidfd_open(int(sys.argv[3]))
    own = {str(Path(__file__).parent), str(ROOT)}
    search_path = [path for path in sys.path if path not in own]
    for name in sys.argv[4].split(","):
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    try:
        request, files, client, owner = _serve(listener, tests)
    except SystemExit:
        shutil.rmtree(folder)
        raise
    listener.detach()
    os.close(tests)
    _enter(request, files, client, owner, str(folder / "python"))
    _end_as(_status_of(request.words, search_path))


if __name__ == "__main__":
    _main()
