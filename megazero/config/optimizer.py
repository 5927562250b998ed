"""Adam and its learning-rate schedule."""

from typing import Literal

from pydantic.dataclasses import dataclass

from megazero.config.fields import STRICT, setting


@dataclass(frozen=True, kw_only=True, config=STRICT)
class OptimizerConfig:
    """AdamW: weight decay is decoupled, and not applied to biases and layer norms."""

    optimizer: Literal["adam"] = setting("adam", help="update rule: Adam with decoupled weight decay")
    lr: float = setting(help="learning rate after warm-up", gt=0)
    min_lr: float = setting(0.0, help="learning rate at the end of the decay", ge=0)
    lr_decay_style: Literal["constant", "linear", "cosine"] = setting(
        "linear", help="how the learning rate goes from lr to min_lr"
    )
    lr_decay_iters: int | None = setting(
        None, help="step at which min_lr is reached; without it, the run's last", unit="steps", ge=1
    )
    lr_warmup_iters: int = setting(0, help="steps in which the learning rate rises from 0 to lr", unit="steps", ge=0)
    lr_warmup_fraction: float | None = setting(
        None,
        help="the same as a part of lr_decay_iters",
        unit="fraction",
        aliases=("warmup",),
        ge=0,
        lt=1,
    )
    weight_decay: float = setting(0.01, help="decoupled weight decay, times the learning rate each step", ge=0)
    adam_beta1: float = setting(0.9, help="decay of the first moment", ge=0, lt=1)
    adam_beta2: float = setting(0.999, help="decay of the second moment", ge=0, lt=1)
    adam_eps: float = setting(1e-8, help="added to the root of the second moment", gt=0)
    clip_grad: float = setting(1.0, help="largest global gradient norm; 0 clips nothing", ge=0)
    override_opt_param_scheduler: bool = setting(
        False, help="on resuming take the learning-rate schedule from here, whatever the checkpoint says"
    )
    use_checkpoint_opt_param_scheduler: bool = setting(
        False, help="on resuming take the learning-rate schedule from the checkpoint, whatever is said here"
    )
