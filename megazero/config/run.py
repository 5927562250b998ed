"""The whole of what the user said: ten sections in one object.

A builder gets the section it needs, never this whole; only the programs, the rules and the derived figures see it.
"""

from dataclasses import field

from pydantic.dataclasses import dataclass

from megazero.config.activations import ActivationConfig
from megazero.config.checkpoint import CheckpointConfig
from megazero.config.data import DataConfig
from megazero.config.fields import STRICT, FieldInfo, describe
from megazero.config.logging import LoggingConfig
from megazero.config.model import ModelConfig
from megazero.config.optimizer import OptimizerConfig
from megazero.config.parallel import ParallelConfig
from megazero.config.precision import PrecisionConfig
from megazero.config.training import TrainingConfig
from megazero.config.zero import ZeroConfig


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RunConfig:
    """One run.  model, training and optimizer have settings without a default; the other sections may be left out."""

    model: ModelConfig
    training: TrainingConfig
    optimizer: OptimizerConfig
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    zero: ZeroConfig = field(default_factory=ZeroConfig)
    activations: ActivationConfig = field(default_factory=ActivationConfig)
    data: DataConfig = field(default_factory=DataConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)


# In the order of `--help` and of the YAML file.
SECTIONS: tuple[tuple[str, type], ...] = (
    ("model", ModelConfig),
    ("training", TrainingConfig),
    ("optimizer", OptimizerConfig),
    ("precision", PrecisionConfig),
    ("parallel", ParallelConfig),
    ("zero", ZeroConfig),
    ("activations", ActivationConfig),
    ("data", DataConfig),
    ("checkpoint", CheckpointConfig),
    ("logging", LoggingConfig),
)


# Every setting of every section; names are unique, so a flag needs no section.
FIELDS: tuple[FieldInfo, ...] = tuple(info for section, cls in SECTIONS for info in describe(section, cls))
