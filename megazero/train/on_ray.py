"""Makes a run of `megazero pretrain` a `TorchTrainer` of Ray Train, which places the ranks and starts them again.

    trainer = pretraining_trainer(
        ["--config", "run.yaml", "--save-interval", "500"],
        scaling_config=ScalingConfig(num_workers=8, use_gpu=True),
        run_config=RunConfig(name="gpt", storage_path="/shared/runs", failure_config=FailureConfig(max_failures=3)),
    )
    print(trainer.fit().checkpoint)

A worker of Ray starts its rank as a process of its own, which has a main thread to handle signals, and waits for it.
Checkpoints are written to STORAGE_PATH/NAME/checkpoints, so Ray lists them without copying them, and an attempt that
follows a failed one resumes from the newest.
"""

import json
import os
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from megazero.checkpoint.folders import list_steps, step_of
from megazero.command_line.parse import parse
from megazero.errors import ConfigError, Problem

_POLL_SECONDS = 1.0
_SAVING_SECONDS = 600  # that a rank has to save when Ray ends its worker
_LAST_LINES = 20  # of a rank's messages, in the error that Ray reports


def pretraining_trainer(flags: Sequence[str], *, scaling_config: Any, **settings: Any) -> Any:
    """Return the trainer of a run; its result's metrics are those of the last checkpoint's step.

    flags: those of `megazero pretrain`, without `--save`; paths are relative to this process's folder.
    scaling_config, settings: those of `TorchTrainer`.  Raises UserError if the flags are wrong.
    """
    from ray.train.torch import TorchConfig, TorchTrainer

    parsed = parse(flags, world_size=scaling_config.num_workers)
    if (save := parsed.config.checkpoint.save) is not None:
        rule = "under Ray Train checkpoints are written where Ray keeps the run"
        raise ConfigError(Problem(f"--save {save}", rule, "RunConfig(storage_path=..., name=...) without --save"))
    return TorchTrainer(
        _run_rank,
        train_loop_config={"flags": list(flags), "folder": os.getcwd(), "loads": parsed.config.checkpoint.load is None},
        # The rank makes its own groups.  The worker's must not take a GPU's memory.
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=scaling_config,
        **settings,
    )


def _run_rank(settings: dict[str, Any]) -> None:
    """Run this worker's rank to its end, and report each new checkpoint; raise RuntimeError if the rank fails."""
    from ray import train
    from ray.train.collective import broadcast_from_rank_zero

    context = train.get_context()
    root = Path(context.get_storage().experiment_fs_path)
    folder, metrics = root / "checkpoints", root / "metrics.jsonl"
    own = ["--save", str(folder), "--metrics-file", str(metrics)]
    if settings["loads"] or list_steps(folder):  # --load is for the first attempt
        own += ["--load", str(folder)]
    environment = {
        **os.environ,
        "MASTER_PORT": str(broadcast_from_rank_zero(_free_port())),  # Ray's worker listens at the one that is set
        "TORCHELASTIC_RUN_ID": f"ray-{context.get_experiment_name()}",  # so that a rank ends with its worker
    }
    words = [sys.executable, "-m", "megazero", "pretrain", *settings["flags"], *own]
    last = train.get_checkpoint()
    reported = -1 if last is None else step_of(Path(last.path).name) or 0
    process = subprocess.Popen(words, cwd=settings["folder"], env=environment, stderr=subprocess.PIPE, text=True)
    messages: deque[str] = deque(maxlen=_LAST_LINES)
    reader = threading.Thread(target=_pass_on, args=(process.stderr, messages), daemon=True)
    reader.start()
    try:
        has_ended = False
        while not has_ended:
            has_ended = _has_ended(process)  # before the list is read, which then holds the last checkpoint
            found = [str(step.path) for step in list_steps(folder) if step.step > reported]
            # All workers report the same checkpoints; rank 0's list counts.
            has_ended, found = broadcast_from_rank_zero((has_ended, found))
            for path in found:
                reported = step_of(Path(path).name) or 0
                _report(reported, Path(path) if context.get_world_rank() == 0 else None, metrics)
        status = process.wait()
    finally:
        _end(process)
    if status:
        reader.join(_POLL_SECONDS)
        raise RuntimeError(f"rank {context.get_world_rank()} ended with status {status}\n{''.join(messages)}")


def _report(step: int, path: Path | None, metrics: Path) -> None:
    """Report a checkpoint, on rank 0, with the figures of its step; the other ranks report none at the same time."""
    from ray import train
    from ray.train import CheckpointUploadMode

    figures: dict[str, Any] = {"iteration": step}
    if path is not None and metrics.exists():
        records = [json.loads(line) for line in metrics.read_text().splitlines(keepends=True) if line.endswith("\n")]
        steps = [record for record in records if record.get("iteration") == step and "evaluation" not in record]
        figures |= {name: value for name, value in (steps or [{}])[-1].items() if isinstance(value, int | float)}
    checkpoint = None if path is None else train.Checkpoint.from_directory(str(path))
    train.report(figures, checkpoint=checkpoint, checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port


def _pass_on(stream: IO[str], messages: deque[str]) -> None:
    """Print a rank's messages, and keep the last ones."""
    for line in stream:
        messages.append(line)
        sys.stderr.write(line)


def _has_ended(process: "subprocess.Popen[str]") -> bool:
    try:
        process.wait(_POLL_SECONDS)
    except subprocess.TimeoutExpired:
        return False
    return True


def _end(process: "subprocess.Popen[str]") -> None:
    """End a rank that still runs: it may save a checkpoint first."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_SAVING_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
