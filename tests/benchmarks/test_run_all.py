"""Tests of running all benchmarks: the parts, their shares of the time, and how a part that is too slow is ended."""

import fcntl
from pathlib import Path

import compare
import kernels
import pytest
import run_all
import throughput
from run_all import FOLDER, Part, budget, main, parse_arguments, parts, run, slug
from steps import configuration_of
from support.each import each


@each(("device", "number"), [("cpu", 0), ("cuda", 1), ("cuda", 2), ("cuda", 8)])
def test_parts_are_programs_that_are_there(device: str, number: int) -> None:
    found = parts(device, number)
    assert len({part.what for part in found}) == len(found)
    assert {part.program for part in found} == {"compare.py", "throughput.py", "kernels.py"}
    alone = [part for part in found if "--world-size 2" not in part.options]
    assert (len(alone) == len(found)) == (device == "cuda" and number == 1)


@pytest.mark.parametrize(("device", "number"), [("cpu", 0), ("cuda", 2)])
def test_programs_understand_what_they_are_told(device: str, number: int) -> None:
    programs = {"compare.py": compare, "kernels.py": kernels, "throughput.py": throughput}
    for part in parts(device, number):
        parsed = programs[part.program].parse_arguments(part.words(Path("a-1.5"), 7.0, device)[1:])
        options, flags = parsed if isinstance(parsed, tuple) else (parsed, [])
        assert (options.device, options.time_limit, options.output) == (device, 7.0, Path("a-1.5"))
        if flags:
            configuration_of(flags, options.world_size)


def test_what_the_programs_are_told() -> None:
    part = Part("a", "throughput.py", "--world-size 2", 1.0, "--preset gpt2-124m")
    words = part.words(Path("out"), 12.4, "cpu")
    assert words[0] == str(FOLDER / "throughput.py") and words[1:3] == ["--world-size", "2"]
    assert words[3:] == ["--device", "cpu", "--time-limit", "12", "--output", "out", "--", "--preset", "gpt2-124m"]
    assert "--" not in Part("b", "kernels.py", "", 1.0).words(Path("out"), 1.0, "cpu")


def test_shares_of_what_is_left() -> None:
    ahead = [Part(name, "x.py", "", share) for name, share in (("a", 3.0), ("b", 1.0))]
    assert budget(110.0, ahead) == pytest.approx(75.0)
    assert budget(90.0, ahead[1:]) == pytest.approx(80.0)  # a has used less than its share
    assert budget(5.0, ahead) == 0.0


@pytest.mark.parametrize(
    ("name", "expected"), [("CPU", "cpu"), ("NVIDIA H200", "h200"), ("NVIDIA A100-SXM4-80GB", "a100-sxm4-80gb")]
)
def test_names_of_devices_in_names_of_files(name: str, expected: str) -> None:
    assert slug(name) == expected


def test_a_program_that_takes_too_long_is_ended_with_its_children(tmp_path: Path) -> None:
    """The child holds a lock, which the test gets as soon as the child has ended."""
    program, lock, late = tmp_path / "slow.py", tmp_path / "lock", tmp_path / "late"
    child = (
        "import fcntl, pathlib, time\n"
        f"with open({str(lock)!r}, 'w') as held:\n"
        "    fcntl.flock(held, fcntl.LOCK_EX)\n"
        "    time.sleep(20)\n"
        f"    pathlib.Path({str(late)!r}).touch()\n"
    )
    program.write_text(f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {child!r}])\n")
    assert run([str(program)], 1.0) is None
    with lock.open("w") as taken:
        fcntl.flock(taken, fcntl.LOCK_EX)
    assert not late.exists()
    program.write_text("raise SystemExit(3)\n")
    assert run([str(program)], 30.0) == 3


def test_parts_that_fail_are_named_and_the_others_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    good = "import sys, pathlib\npathlib.Path(sys.argv[sys.argv.index('--output') + 1]).touch()\n"
    for name, text in (("good.py", good), ("bad.py", "raise SystemExit(3)\n")):
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(run_all, "FOLDER", tmp_path)
    found = [Part("first", "bad.py", "", 1.0), Part("second", "good.py", "", 1.0)]
    monkeypatch.setattr(run_all, "parts", lambda device, number: found)
    assert main(["--device", "cpu", "--time-limit", "60", "--results", str(tmp_path)]) == 1
    assert "first: exit status 3" in capsys.readouterr().err
    assert [path.name for path in tmp_path.glob("*-cpu-second.md")]
    assert main(["--device", "cpu", "--time-limit", "60", "--results", str(tmp_path), "--only", "second"]) == 0
    assert main(["--only", "third"]) == 2 and "there are first, second" in capsys.readouterr().err


def test_nine_minutes_are_the_limit() -> None:
    assert parse_arguments([]).time_limit <= 540
