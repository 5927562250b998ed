"""Counts the Python calls of one training step, in a process of its own, which `structure.py` starts.

    cd TREE && python .../benchmarks/step_calls.py RECORD.json [flags of pretrain_gpt.py]

Runs TREE's pretrain_gpt.py under a profile hook that counts calls of functions in TREE/megazero; torch's own functions
do not count, and a generator counts each time it is resumed.  A step lasts from the second to the third call of
`training_step`, so it includes the loop around it: the batch, the figures, the log line.
"""

import json
import os
import runpy
import sys
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

STEP = "training_step"
FIRST, LAST = 2, 3


class StepCalls:
    """The profile hook, with its counts between two calls of the training step.

    calls: of the package's functions.  moves: those of a function in another file than its caller's.  depth: the length
    of the longest chain of calls, in which the function that runs the loop is the first.
    """

    def __init__(self, package: Path) -> None:
        self._package = f"{package}{os.sep}"
        self._stack: list[str] = []
        self._steps = 0
        self._base = 0
        self.calls = self.moves = self.depth = 0
        self.functions: set[CodeType] = set()

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        """Count a call or follow a return within the package; other events are calls of C functions."""
        code = frame.f_code
        if event not in ("call", "return") or not code.co_filename.startswith(self._package):
            return
        if event == "return":
            if self._stack:
                self._stack.pop()
            return
        if code.co_name == STEP:
            self._steps += 1
            self._base = len(self._stack) - 1
        caller = self._stack[-1] if self._stack else ""
        self._stack.append(code.co_filename)
        if FIRST <= self._steps < LAST:
            self.calls += 1
            self.functions.add(code)
            self.moves += caller != code.co_filename
            self.depth = max(self.depth, len(self._stack) - self._base)

    def record(self) -> dict[str, Any]:
        """Return the counts by name, with the number of different files and functions called.

        Raises RuntimeError where the run took too few steps.
        """
        if self._steps < LAST:
            raise RuntimeError(f"{STEP} was called {self._steps} times; counting takes {LAST}")
        files = {code.co_filename for code in self.functions}
        return {
            "files": len(files),
            "functions": len(self.functions),
            "calls": self.calls,
            "moves": self.moves,
            "depth": self.depth,
        }


def main() -> int:
    output, tree = Path(sys.argv[1]), Path.cwd()
    counter = StepCalls(tree / "megazero")
    sys.path[0] = str(tree)
    sys.argv = ["pretrain_gpt.py", *sys.argv[2:]]
    sys.setprofile(counter)
    try:
        runpy.run_path("pretrain_gpt.py", run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise
    finally:
        sys.setprofile(None)
    output.write_text(json.dumps(counter.record()), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
