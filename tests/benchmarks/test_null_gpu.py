"""Tests of the null GPU without torch's CUDA build: the script's checks, the driver, the program, its page."""

import ctypes
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import null_gpu
import pytest
from null_gpu import (
    ASSUMPTIONS,
    CASES,
    FOLDER,
    Case,
    excesses,
    main,
    page,
    parse_arguments,
    predicted_seconds,
    units,
)
from readme import TOP
from support.source_tree import ROOT
from support.warm_python import warm_python

from megazero.command_line.parse import parse
from megazero.rules import run as rules

SCRIPT = ROOT / "scripts" / "null_gpu.sh"
BLOCK = {"unit_bytes": 4, "block_bytes": 280}
FOUND = {"launches": 10, "products": 4, "copies": 1, "synchronizations": 0, "peak_bytes": 3 << 20, **BLOCK}

RECORD = FOLDER / "results" / "2026-11-28-null-gpu-3.json"


def record_of(systems: dict[str, Any]) -> dict[str, Any]:
    return {"date": "2026-01-02", "device": "null GPU", "torch": "2", "command": "x", "systems": systems}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, []),
        ({"launches": 11}, ["11 launches, at most 10 are allowed"]),
        ({"synchronizations": 1}, ["1 synchronizations, at most 0 are allowed"]),
        ({"peak_bytes": 4 << 20}, ["4 MiB at the peak, at most 3 are allowed"]),
        ({"block_bytes": 284}, ["71 U of a block, at most 70 are allowed"]),
        ({"refused": "failed: exit status 1"}, ["failed: exit status 1"]),
    ],
)
def test_a_figure_beyond_its_limit_is_named(changes: dict[str, object], expected: list[str]) -> None:
    case = Case("data 2", 2, "", launches=10, peak=3, units=70)
    assert excesses(case, FOUND | changes) == [f"data 2: {text}" for text in expected]


def test_every_limit_is_close_to_the_record() -> None:
    """The committed record is within all limits, and no limit is much above it."""
    systems = json.loads(RECORD.read_text(encoding="utf-8"))["systems"]
    assert {case.name for case in CASES} == systems.keys() and len(CASES) == 20
    for case in CASES:
        found = systems[case.name]
        assert excesses(case, found) == [] and case.launches is not None and case.peak is not None
        assert case.launches <= 1.01 * found["launches"] and case.peak <= 1.01 * found["peak_bytes"] / (1 << 20) + 1
        assert found["synchronizations"] == 0 and (case.units is None) == (units(found) is None)
        assert case.units is None or case.units <= 1.01 * units(found)
    # What was wanted before anything was measured.
    for name, launches in (("GPT-2 124M, 64 samples, compiled", 950), ("GPT-2 1.5B, 16 samples, compiled", 3200)):
        assert systems[name]["launches"] < launches and (units(systems[name]) or 0) <= 55


def test_the_page_has_every_case() -> None:
    systems = {"a": FOUND, "b": {"refused": "failed"}, "c": {"compiled": None}}
    lines = page(record_of(systems))[-1]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines.splitlines()[2:]]
    assert rows[0] == ["a", "10", "4", "1", "0", "3.0", "70.0"]
    assert [row[:2] for row in rows[1:]] == [["b", "failed"], ["c", "ran on the CPU"]]


def test_predictions_follow_from_operations_and_bytes() -> None:
    """GPT-2 124M with 64 samples: products of 33.4 and 15.2 TFLOP, and kernels of blocks that move 81 GB."""
    sizes = {"tokens": 65_536, "layers": 12, "width": 768, "length": 1024, "vocabulary": 50_304, "parameters": 124e6}
    found = {**FOUND, "block_bytes": 67 * 65_536 * 768 * 2, "model": sizes}
    parts = {name: 1e3 * seconds for name, seconds in predicted_seconds(found, ASSUMPTIONS["low"]).items()}
    expected = [62.9, 21.0, 18.8, 26.0, 5.5, 0.98]
    assert list(parts.values()) == pytest.approx(expected, rel=0.02)
    lines = page(record_of({"GPT-2 124M": found, "small": FOUND}))[-1].splitlines()[2:]
    speeds = [float(line.split("|")[-2].strip().removesuffix("k")) for line in lines]
    assert len(lines) == len(ASSUMPTIONS)
    assert 470 < speeds[0] < speeds[2] < speeds[1] < speeds[3] < 620, "low, FA2, middle, high"


def test_another_python_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_arguments([])
    assert "bash scripts/null_gpu.sh" in capsys.readouterr().err


@pytest.mark.gloo
def test_steps_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank of eight takes its steps beside the fake process group; a failing case is recorded."""
    monkeypatch.setattr(sys, "executable", warm_python())
    layout = CASES[11]
    wrong = Case("wrong", 2, f"{layout.words} --zero-stage 7")
    monkeypatch.setattr(null_gpu, "CASES", (layout, wrong))
    assert main(["--device", "cpu", "--output", str(tmp_path / "toy.md")]) == 1
    record = json.loads((tmp_path / "toy.json").read_text())
    assert record["device"] == "CPU" and record["systems"][layout.name]["compiled"] is None
    assert record["exceeded"] == ["wrong: failed: exit status 1"]
    assert "ran on the CPU" in (tmp_path / "toy.md").read_text()


@pytest.mark.skipif(shutil.which("g++") is None, reason="this machine lacks g++")
def test_the_driver_is_an_h200_that_logs(tmp_path: Path) -> None:
    """The driver is compiled and called; the runtime needs headers of CUDA's packages, which are not there."""
    library, stub = tmp_path / "driver.so", tmp_path / "note.cpp"
    stub.write_text(
        '#include "device.h"\n#include <cstdio>\nstatic char last[64];\n'
        'extern "C" void null_gpu_note(const char* kind, const char* name, const char*) {'
        ' snprintf(last, sizeof last, "%s %s", kind, name); }\nextern "C" const char* last_note() { return last; }\n'
    )
    folder = ROOT / "benchmarks" / "null_cuda"
    sources = [str(folder / "driver.cpp"), str(stub)]
    subprocess.run(["g++", "-Wall", "-Werror", "-fPIC", "-shared", f"-I{folder}", *sources, "-o", library], check=True)
    driver = ctypes.CDLL(str(library))
    name, value, function = ctypes.create_string_buffer(32), ctypes.c_int(), ctypes.c_void_p()
    assert driver.cuInit(0) == driver.cuDeviceGetName(name, 32, 0) == 0 and name.value == b"NVIDIA H200"
    assert driver.cuDeviceGetAttribute(ctypes.byref(value), 16, 0) == 0 and value.value == 132
    assert driver.cuModuleGetFunction(ctypes.byref(function), None, b"triton_poi_fused_add_0") == 0
    driver.last_note.restype = ctypes.c_char_p
    assert driver.cuLaunchKernel(function, *[0] * 7, None, None, None) == 0
    assert driver.last_note() == b"KERNEL triton_poi_fused_add_0"
    assert driver.cuCtxSynchronize() == 0 and driver.last_note() == b"SYNC cuCtxSynchronize"


def commands() -> list[str]:
    """Return the commands of the page's section on the null GPU, continued lines joined."""
    section = TOP.partition("## Without a GPU")[2].replace("\\\n", "")
    return [" ".join(line.split()) for line in section.splitlines() if line.startswith("    ")]


def test_the_pages_commands_are_those_of_the_script() -> None:
    """The two commands stand in the script's head too, and the third one's flags are those of a run."""
    first, second, third = commands()
    assert first == "bash scripts/null_gpu.sh" and second == "build/null_gpu/python benchmarks/null_gpu.py"
    head = SCRIPT.read_text(encoding="utf-8").partition("set -euo")[0]
    assert f"#   {first}\n" in head and f"#   {second} " in head
    words = third.split()[2:]
    words[words.index("cuda")] = "cpu"
    config = parse(words, world_size=1).config
    assert not list(rules.check(config, 1)) and config.training.attention_backend == "efficient"


def run_script(tmp_path: Path, **fakes: str) -> subprocess.CompletedProcess[str]:
    """Run the script with these programs in place of the system's; an empty one is missing."""
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in ("dirname", "uname", "df", "tail", "mkdir", "cksum", "gcc", "g++", "python3"):
        text = fakes.get(name.replace("+", "p"))
        if text is None:
            (programs / name).symlink_to(sys._base_executable if name == "python3" else shutil.which(name) or "missing")
        elif text:
            (programs / name).write_text(f"#!/bin/bash\n{text}\n")
            (programs / name).chmod(0o755)
    environment = {"PATH": str(programs), "FOLDER": str(tmp_path / "made")}
    return subprocess.run(["/bin/bash", str(SCRIPT)], env=environment, capture_output=True, text=True, check=False)


LINUX = {"uname": '[[ "$1" == -s ]] && echo Linux || echo x86_64', "gcc": ":", "gpp": ":"}


@pytest.mark.parametrize(
    ("fakes", "message"),
    [
        ({"uname": "echo Darwin"}, "the null GPU is for Linux on x86_64, and this is Darwin"),
        ({"gcc": ""}, "gcc is missing"),
        ({"gpp": ""}, "g++ is missing"),
        ({"python3": ""}, "python3 is missing"),
    ],
)
def test_what_the_script_needs_is_named_first(fakes: dict[str, str], message: str, tmp_path: Path) -> None:
    done = run_script(tmp_path, **(LINUX | fakes))
    assert done.returncode == 2 and message in done.stderr and not (tmp_path / "made").exists()


def test_room_on_the_disk_is_looked_at_before_the_download(tmp_path: Path) -> None:
    """Where there is no room, nothing is downloaded; Python's headers need not be there for this test."""
    (tmp_path / "Python.h").touch()
    python = f'[[ "$2" == *get_path* ]] && echo {tmp_path}; exit 0'
    done = run_script(tmp_path, **LINUX, python3=python, df="echo Avail; echo 3000000")
    assert done.returncode == 2 and "has 3 GB of room; 12 GB are needed" in done.stderr
    assert list((tmp_path / "made").iterdir()) == [] and done.stdout == ""
