"""What a run reports, and where to."""

from pathlib import Path

from pydantic.dataclasses import dataclass

from megazero.config.fields import STRICT, setting


@dataclass(frozen=True, kw_only=True, config=STRICT)
class LoggingConfig:
    """Console, TensorBoard and a file of one JSON object a step."""

    log_interval: int = setting(100, help="steps between lines on the console", unit="steps", ge=1)
    metrics_file: Path | None = setting(
        None, help="file that gets one JSON object a step, and one an evaluation, at full precision"
    )
    tensorboard_dir: Path | None = setting(None, help="folder for TensorBoard; without it, none is written")
    tensorboard_queue_size: int = setting(
        1000, help="TensorBoard: points kept before they are written", unit="points", ge=1
    )
    tensorboard_log_interval: int = setting(1, help="TensorBoard: steps between points", unit="steps", ge=1)
    log_timers_to_tensorboard: bool = setting(False, help="TensorBoard: seconds spent in each part of a step")
    log_validation_ppl_to_tensorboard: bool = setting(False, help="TensorBoard: perplexity beside the validation loss")
    ledger: bool = setting(
        False, help="keep the ledger: live memory by category and traffic by axis, of every step; slows the step down"
    )
    ledger_limit: float | None = setting(
        None,
        help="stop the run as soon as more than this is alive on a process's device, as the ledger counts it,"
        " which this keeps",
        unit="MiB",
        gt=0,
    )
    ledger_dir: Path | None = setting(
        None, help="folder for the ledger's pictures, one page a process: of the second step, then every log_interval"
    )
    pipeline_trace_dir: Path | None = setting(
        None,
        help="folder for traces of steps, when each pipeline stage computed what, as pictures (.svg) and figures"
        " (.json): of the second step, every log_interval-th and the last",
    )
    log_memory_to_tensorboard: bool = setting(False, help="TensorBoard: bytes of each kind of model state, and peak")
