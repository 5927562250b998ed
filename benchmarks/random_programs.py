"""Plays random programs around megazero's engines, and in plain PyTorch: do both compute the same?

    python benchmarks/random_programs.py --records FILE.jsonl [--programs 5000] [--output FILE.md] [--minutes 30]

A program is drawn from its number (`user_programs.py`): one or two small modules of random kinds, a configuration
each, and some ten acts of a user - training, writes, checkpoints, other layouts.  It is played with engines on one to
three ranks, which are threads, and in plain PyTorch on one process (`program_players.py`); losses, gradient norms,
outputs, weights, states of optimizers and buffers are compared.

Outcomes: "equal"; "refused", by an error of megazero's on every rank, where an act asked for it; any other is a
failure: other numbers, a refusal of ordinary acts, another exception, a hang, ranks that disagree.  In float64 numbers
are equal to 1e-9 (of the largest of a tensor, or of 1); else to the bounds of `BOUNDS`.

A line is appended to --records for each program, and none is played twice, so the campaign may be stopped and started
at will.  It ends with status 1 if a program failed, and with 2 if --minutes were over before all were played.
`--only N` plays one program, prints its acts, and shortens it to those that are needed to fail.
"""

import argparse
import contextlib
import io
import json
import multiprocessing
import re
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from program_players import EnginePlayer, Observed, PlainPlayer
from rank_threads import RankLeft, run_ranks
from report import HelpFormat, heading, table, tell
from torch import Tensor
from user_programs import Act, Program, draw, without

from megazero.comm.mesh import Mesh
from megazero.errors import UserError

Record = dict[str, Any]
WHOLE_GRADIENTS = ("mask", "clip_grad_norm_", "None")  # what takes p.grad for a whole gradient: stage 0 alone
BOUNDS = MappingProxyType({"fp64": 1e-9, "fp32": 1e-3, "bf16": 0.05, "fp16": 0.05})


class Played(NamedTuple):
    """What became of a program: what each rank has observed, and the act and the error of ranks that failed."""

    observed: list[Observed]
    errors: dict[int, tuple[int, Exception]]


def segments(program: Program) -> Iterator[tuple[int, list[int], str, list[tuple[int, Act]]]]:
    """Yield the world size, the stages, the precision and the acts between two changes of them."""
    world, precision = program["world"], program["precision"]
    stages = [module["stage"] for module in program["modules"]]
    acts: list[tuple[int, Act]] = []
    for index, act in enumerate(program["acts"]):
        if act["act"] == "resume":
            yield world, stages, precision, acts
            world, stages, precision, acts = act["world"], act["stages"], act["precision"], []
        else:
            acts.append((index, act))
    yield world, stages, precision, acts


def play_engines(program: Program, folder: Path) -> Played:
    """Play a program with engines, segment by segment."""
    parts = list(segments(program))
    observed: list[Observed] = [{} for _ in range(max(world for world, *_ in parts))]
    for number, (world, stages, precision, acts) in enumerate(parts):
        players: dict[int, EnginePlayer] = {}

        def play(
            mesh: Mesh,
            number: int = number,
            players: dict[int, EnginePlayer] = players,
            part: tuple[list[int], str, list[tuple[int, Act]]] = (stages, precision, acts),
        ) -> None:
            stages, precision, acts = part
            player = players[mesh.rank] = EnginePlayer(program, mesh, folder, stages=stages, precision=precision)
            player.start(number)
            player.play(acts)
            if number + 1 < len(parts):
                player.save_to_resume(number + 1)
            else:
                player.finish()
            player.close()

        ended = run_ranks(world, play)
        errors = {
            rank: (players[rank].at if rank in players else -1, error)
            for rank, error in enumerate(ended)
            if isinstance(error, Exception)
        }
        for rank, player in players.items():
            observed[rank].update(player.observed)
        if errors:
            return Played(observed, errors)
    return Played(observed, {})


def differences(played: Played, expected: Observed, bound: float) -> Iterator[str]:
    """Yield how what was observed differs from the plain program's, in the order of acts."""
    stop = _first_error(played)
    for rank, observed in enumerate(played.observed):
        for (at, label), found in observed.items():
            wanted = expected.get((at, label))
            if isinstance(wanted, list):
                wanted = wanted[rank]
            if (stop is None or at < stop) and (text := _difference(found, wanted, bound)):
                yield f"act {at}, rank {rank}, {label}: {text}"
    for at, label in expected:
        if (at, label) not in played.observed[0]:
            yield f"act {at}, {label}: not there"


def _first_error(played: Played) -> int | None:
    """Return the first act that failed on a rank, beyond which nothing is compared; None if none did."""
    return min((at for at, _ in played.errors.values()), default=None)


def _difference(found: Tensor, expected: Tensor | None, bound: float) -> str:
    """Describe how a tensor differs; "" if it does not."""
    if expected is None:
        return "" if not found.any() else "there, and not in plain PyTorch"
    if found.shape != expected.shape:
        return f"shape {list(found.shape)} instead of {list(expected.shape)}"
    if not found.numel():
        return ""
    apart = float((found.detach().double() - expected.detach().double()).abs().max())
    scale = max(1.0, float(expected.detach().abs().max()))
    return "" if apart <= bound * scale else f"differs by {apart:.3g} of {scale:.3g}"


def bound_of(program: Program) -> float:
    """Return the bound of a program's numbers: of the narrowest format that it computes in."""
    return max(BOUNDS[precision] for _, _, precision, _ in segments(program))


def judge(program: Program) -> Record:
    """Play a program in both ways; return its outcome."""
    begin = time.process_time()
    # Engines print what offloading costs, of which nothing is judged.
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
        played = play_engines(program, Path(folder))
    expected = PlainPlayer(program).play(_first_error(played))
    found = min(differences(played, expected, bound_of(program)), key=_act_of, default="")
    outcome, text = ("! other numbers", found) if found else _outcome(program, played)
    return {
        "number": program["number"],
        "outcome": outcome,
        "text": text,
        "acts": len(program["acts"]),
        "seconds": round(time.process_time() - begin, 3),
    }


def _act_of(text: str) -> int:
    return int(text.split()[1].rstrip(","))


def _outcome(program: Program, played: Played) -> tuple[str, str]:
    """Return the outcome of a program whose numbers, as far as it was played, are those of plain PyTorch."""
    if not played.errors:
        return "equal", ""
    own = {rank: (at, error) for rank, (at, error) in played.errors.items() if not isinstance(error, RankLeft)}
    _, (at, error) = next(iter(own.items() or played.errors.items()))
    acts = program["acts"]
    doing = acts[at] if 0 <= at < len(acts) else {"act": "initialize" if at < 0 else "finish"}
    said = " ".join(str(error).split())
    text = f"act {at}, {doing['act']} {doing.get('how', '')}: {type(error).__name__}: {said}"
    if not all(isinstance(each, UserError) for _, each in own.values()):
        last = traceback.format_exception(error)
        return f"! {type(error).__name__}", f"{text}\n{''.join(last)[-3000:]}"
    if len(own) < len(played.observed) and len(own) < _world_at(program, at):
        return "! refused on some ranks", text
    return ("refused" if _may_be_refused(program, at) else "! refused"), text


def _world_at(program: Program, at: int) -> int:
    """Return the number of ranks that play an act."""
    worlds = [act["world"] for act in program["acts"][: max(at, 0)] if act["act"] == "resume"]
    return int(worlds[-1] if worlds else program["world"])


def _may_be_refused(program: Program, at: int) -> bool:
    """Return True if an act up to this one is nothing that an engine must do."""
    if at >= len(program["acts"]) or at < 0:
        return any(act["act"] == "odd" for act in program["acts"])
    before = program["acts"][: at + 1]
    was_early = before[-1]["act"] == "zero_grad" and any(act["act"] == "step" for act in before)
    return was_early or any(act["act"] == "odd" or act.get("how") in WHOLE_GRADIENTS for act in before)


def shortened(program: Program, outcome: str) -> Program:
    """Return the program without the acts that it does not need for its outcome."""
    index = len(program["acts"]) - 1
    while index >= 0:
        shorter = without(program, index)
        try:
            if judge(shorter)["outcome"] == outcome:
                program = shorter
        except Exception:  # plain PyTorch can't do without the act
            pass
        index -= 1
    return program


def _play_number(number: int) -> Record:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    try:
        return judge(draw(number))
    except Exception:
        return {"number": number, "outcome": "! plain", "text": traceback.format_exc()[-3000:], "acts": 0, "seconds": 0}


def read_records(path: Path) -> dict[int, Record]:
    """Return the records by number; a line that was cut off in writing is skipped."""
    found = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        if line.endswith("}"):
            record = json.loads(line)
            found[record["number"]] = record
    return found


def run_missing(options: argparse.Namespace) -> bool:
    """Play the programs without a record; return False if the time was over before the last one."""
    known, start = read_records(options.records), time.monotonic()
    missing = [number for number in range(options.first, options.first + options.programs) if number not in known]
    pool = multiprocessing.get_context("forkserver").Pool(options.processes) if options.processes > 1 else None
    results = map(_play_number, missing) if pool is None else pool.imap_unordered(_play_number, missing, 8)
    try:
        with options.records.open("a", encoding="utf-8") as stream:
            for count, record in enumerate(results, start=1):
                stream.write(json.dumps(record) + "\n")
                stream.flush()
                if record["outcome"].startswith("!"):
                    tell(f"program {record['number']}: {record['outcome']}: {record['text'].splitlines()[0]}")
                if count < len(missing) and time.monotonic() - start > 60 * options.minutes:
                    return False
    finally:
        if pool is not None:
            pool.terminate()
            pool.join()
    return True


def page(records: Sequence[Record]) -> str:
    """Return the summary as Markdown."""
    outcomes = Counter(record["outcome"] for record in records)
    refusals = Counter(_kind(record["text"]) for record in records if record["outcome"] == "refused")
    bounds = ", ".join(f"{name} {bound:g}" for name, bound in BOUNDS.items())
    parts = [
        heading("Random programs of a user around the engine", "cpu", "fp64 and others"),
        f"{len(records)} programs, {sum(record['acts'] for record in records)} acts,"
        f" {sum(record['seconds'] for record in records):.0f} s of one core. Bounds: {bounds}.",
        table(("outcome", "programs"), sorted(outcomes.items())),
    ]
    if refusals:
        parts += ["## Refused", table(("what", "programs"), sorted(refusals.items(), key=lambda pair: -pair[1]))]
    failed = [record for record in records if record["outcome"].startswith("!")]
    for record in failed:
        first = record["text"].partition("\n")[0]
        parts.append(f"Program {record['number']} failed, {record['outcome']}: {first}")
    if not failed:
        parts.append("None failed.")
    return "\n\n".join(parts) + "\n"


def _kind(text: str) -> str:
    """Return a refusal's act and rule."""
    doing, rule = text.partition(", ")[2].partition(":")[0], text.partition("rule: ")[2].partition(" legal: ")[0]
    return f"{doing}: {re.sub('[a-z0-9_.]*[.][a-z0-9_.]+ is', 'it is', rule)}".replace("|", "\\|")


def play_one(number: int) -> int:
    """Play one program, show it, and shorten it if it fails."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    program = draw(number)
    record = judge(program)
    failed = record["outcome"].startswith("!")
    if failed:
        program = shortened(program, record["outcome"])
        record = judge(program)
    print(json.dumps({name: value for name, value in program.items() if name != "acts"}, indent=1))
    for index, act in enumerate(program["acts"]):
        print(index, json.dumps(act))
    print(record["outcome"], record["text"], sep="\n")
    return int(failed)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormat)
    add = parser.add_argument
    add("--records", type=Path, help="JSON lines of what has been played; appended to")
    add("--programs", type=int, default=5000, help="how many programs")
    add("--first", type=int, default=0, help="number of the first")
    add("--only", type=int, help="play the program of this number, and show it")
    add("--processes", type=int, default=1, help="processes that share the programs")
    add("--minutes", type=float, default=float("inf"), help="stop after so long")
    add("--output", type=Path, help="file for the summary, which is printed in any case")
    options = parser.parse_args(words)
    if options.only is not None:
        return play_one(options.only)
    if options.records is None:
        parser.error("--records or --only is needed")
    complete = run_missing(options)
    known = read_records(options.records)
    records = [known[number] for number in sorted(known)]
    text = page(records)
    print(text)
    if options.output is not None:
        options.output.write_text(text, encoding="utf-8")
    if any(record["outcome"].startswith("!") for record in records):
        return 1
    return 0 if complete else 2


if __name__ == "__main__":
    sys.exit(main())
