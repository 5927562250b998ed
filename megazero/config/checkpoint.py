"""What is saved, where, and what is taken from it."""

from pathlib import Path

from pydantic.dataclasses import dataclass

from megazero.config.fields import STRICT, setting


@dataclass(frozen=True, kw_only=True, config=STRICT)
class CheckpointConfig:
    """Checkpoints fit every layout; they are folders below `save`, the newest named by its file `latest`."""

    save: Path | None = setting(None, help="folder for checkpoints; without it, nothing is saved")
    load: Path | None = setting(
        None, help="folder to resume from; a folder without a checkpoint starts from the beginning"
    )
    save_interval: int | None = setting(
        None, help="steps between checkpoints; without it, only at the end of the run", unit="steps", ge=1
    )
    no_save_optim: bool = setting(False, help="save parameters only; such a checkpoint can't be resumed bitwise")
    no_load_optim: bool = setting(False, help="take no optimizer state, start it anew")
    finetune: bool = setting(
        False, help="take parameters only and start at step 0: no optimizer state, no position in the data"
    )
