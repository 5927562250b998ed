"""Kills preprocessing at random moments and resumes it: are the files those of a run that was not killed?

    python benchmarks/preprocess_kills.py --folder FOLDER [--kills 50] [--seed 0] [--megabytes 24]

An input is made of the standard library's sources and preprocessed undisturbed, which shows how long that takes.  Then
every trial starts tools/preprocess_data.py with two workers and a dozen partitions, kills it (SIGKILL) at a moment of
its own, from the first second to the last rename, sometimes kills the resumed process as well, and resumes it to the
end.  Trials are noted in FOLDER/trials.jsonl, from which a later call continues; the last line of output sums them up.
"""

import argparse
import json
import random
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def parse_arguments() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="where everything goes")
    parser.add_argument("--kills", type=int, default=50, help="trials")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--megabytes", type=int, default=24, help="size of the input")
    return parser.parse_args()


def write_input(path: Path, num_bytes: int) -> None:
    """Write sources of the standard library as JSON lines, repeated up to the size; some lines are no JSON."""
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    written = 0
    with open(path, "w", encoding="utf-8") as stream:
        while written < num_bytes:
            for number, source in enumerate(sources):
                text = source.read_text(encoding="utf-8", errors="replace")
                line = json.dumps({"text": text, "name": source.name}) if number % 50 else "{not JSON"
                written += stream.write(line + "\n")


def command(folder: Path, out: Path) -> list[str]:
    tool = [sys.executable, str(ROOT / "tools" / "preprocess_data.py"), "--tokenizer-type", "ByteTokenizer"]
    rules = ["--json-keys", "text", "name", "--append-eod", "--skip-bad-lines", "--partitions", "12", "--workers", "2"]
    return [*tool, *rules, "--input", str(folder / "input.jsonl"), "--output-prefix", str(out / "c"), "--resume"]


def run(folder: Path, out: Path, seconds: float | None = None) -> float:
    """Run one process, kill it after `seconds` if it still runs, and return how many seconds it ran."""
    started = time.monotonic()
    process = subprocess.Popen(command(folder, out), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        text, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
    else:
        if process.returncode:
            raise SystemExit(f"a run failed:\n{text}")
    return time.monotonic() - started


def contents(out: Path) -> dict[str, bytes]:
    return {str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*") if path.is_file()}


def trial(folder: Path, rng: random.Random, whole: dict[str, bytes], seconds: float) -> dict[str, object]:
    """Kill a run once or twice, resume it to its end, and return the trial's line.

    The line has the moments in seconds, the files that each kill left, and whether the files at the end are the same.
    """
    out = folder / "trial"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    # Half of the moments are in the last tenth of a run, where files are sealed and get their names.
    first = rng.uniform(0.9, 1.05) if rng.random() < 0.5 else rng.uniform(0.1, 0.9)
    moments = [first * seconds, *([rng.uniform(0.2, 1.0) * seconds] if rng.random() < 0.3 else [])]
    left = []
    for moment in moments:
        run(folder, out, moment)
        left.append(sorted(contents(out)))
    run(folder, out)
    return {"moments": moments, "left": left, "same": contents(out) == whole}


def main() -> None:
    """Make the input, measure an undisturbed run, take the trials that are missing, and print their summary."""
    arguments = parse_arguments()
    folder: Path = arguments.folder
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "input.jsonl").exists():
        write_input(folder / "input.new", arguments.megabytes << 20)
        (folder / "input.new").rename(folder / "input.jsonl")
    whole = folder / "whole"
    shutil.rmtree(whole, ignore_errors=True)
    whole.mkdir()
    seconds = min(run(folder, whole) for _ in range(2))
    expected, notes = contents(whole), folder / "trials.jsonl"
    done = notes.read_text(encoding="utf-8").splitlines() if notes.exists() else []
    for number in range(len(done), arguments.kills):
        found = trial(folder, random.Random(f"{arguments.seed} {number}"), expected, seconds)
        done.append(json.dumps(found))
        with open(notes, "a", encoding="utf-8") as stream:
            stream.write(done[-1] + "\n")
        print(f"trial {number}: {'same' if found['same'] else 'DIFFERENT'} files", flush=True)
    trials = [json.loads(line) for line in done]
    same = sum(found["same"] for found in trials)
    kills = sum(len(found["moments"]) for found in trials)
    caught = sum(any(name.startswith(".") for name in left) for found in trials for left in found["left"])
    print(f"{kills} kills in {len(trials)} trials, {caught} amid work: {same} trials ended with the same files")
    sys.exit(same != len(trials))


if __name__ == "__main__":
    main()
