"""The tables of optimizers: the parameters of each, the settings of a run that set them, and why others are refused.

An optimizer is a class of torch.optim, or one of `megazero/optim` that torch has not got, which updates every element
independently of the others, so that it may run on flat slices of parameters; its parameters have torch's names and
defaults.  LAMB and Adafactor alone need figures of whole parameters beside, which are summed over the ranks.  Those
with moments in 8 bits run on slices of whole blocks.

The library's configuration uses torch's names; a run uses Megatron-LM's, where `adam` is AdamW.  Some settings of a run
(--adam-beta1, --lion-beta1, --sgd-momentum, --weight-decay) are parameters under their own flags; all others are given
by --optimizer-params.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from megazero.config.fields import FieldInfo, by_name, parameter

_BETAS = parameter("betas", "pair", (0.9, 0.999), ge=0, lt=1)
_LION_BETAS = parameter("betas", "pair", (0.9, 0.99), ge=0, lt=1)
_EPS = parameter("eps", "float", 1e-8, gt=0)
_NO_DECAY = parameter("weight_decay", "float", 0.0, ge=0)
_MAXIMIZE = parameter("maximize", "bool", False)
_DECOUPLED = parameter("decoupled_weight_decay", "bool", False)
_AMSGRAD = parameter("amsgrad", "bool", False)
_MOMENTUM = parameter("momentum", "float", 0.0, ge=0)

# The elements of a block of moments in 8 bits, which share one maximum.
EIGHT_BIT_BLOCK = 256


@dataclass(frozen=True)
class Optimizer:
    """An optimizer's default learning rate, torch's for a class of torch.optim, and descriptions of its arguments.

    moments: the kinds of state of elements that it keeps beside the weights, without those that `num_moments` adds.
    measures: whether its step of a parameter needs figures of all of it.
    package: the one whose kernels have its moments in 8 bits, an extra of this project's; "": they are numbers.
    in_numbers: the optimizer with the same update whose moments are numbers; "": itself.
    """

    lr: float
    params: Mapping[str, FieldInfo]
    moments: int = 2
    measures: bool = False
    package: str = ""
    in_numbers: str = ""


OPTIMIZERS: Mapping[str, Optimizer] = MappingProxyType(
    {
        "AdamW": Optimizer(
            1e-3, by_name(_BETAS, _EPS, parameter("weight_decay", "float", 0.01, ge=0), _AMSGRAD, _MAXIMIZE)
        ),
        "Adam": Optimizer(1e-3, by_name(_BETAS, _EPS, _NO_DECAY, _AMSGRAD, _MAXIMIZE, _DECOUPLED)),
        "SGD": Optimizer(
            1e-3,
            by_name(
                _MOMENTUM,
                parameter("dampening", "float", 0.0),
                _NO_DECAY,
                parameter("nesterov", "bool", False),
                _MAXIMIZE,
            ),
            moments=0,
        ),
        "Adagrad": Optimizer(
            1e-2,
            by_name(
                parameter("lr_decay", "float", 0.0, ge=0),
                _NO_DECAY,
                parameter("initial_accumulator_value", "float", 0.0, ge=0),
                parameter("eps", "float", 1e-10, gt=0),
                _MAXIMIZE,
            ),
            moments=1,
        ),
        "Adadelta": Optimizer(
            1.0,
            by_name(
                parameter("rho", "float", 0.9, ge=0, le=1), parameter("eps", "float", 1e-6, gt=0), _NO_DECAY, _MAXIMIZE
            ),
        ),
        "Adamax": Optimizer(2e-3, by_name(_BETAS, _EPS, _NO_DECAY, _MAXIMIZE)),
        "NAdam": Optimizer(
            2e-3,
            by_name(_BETAS, _EPS, _NO_DECAY, parameter("momentum_decay", "float", 4e-3, ge=0), _DECOUPLED, _MAXIMIZE),
        ),
        "RAdam": Optimizer(1e-3, by_name(_BETAS, _EPS, _NO_DECAY, _DECOUPLED, _MAXIMIZE)),
        "RMSprop": Optimizer(
            1e-2,
            by_name(
                parameter("alpha", "float", 0.99, ge=0),
                _EPS,
                _NO_DECAY,
                _MOMENTUM,
                parameter("centered", "bool", False),
                _MAXIMIZE,
            ),
            moments=1,
        ),
        "Rprop": Optimizer(
            1e-2,
            by_name(
                parameter("etas", "pair", (0.5, 1.2), gt=0),
                parameter("step_sizes", "pair", (1e-6, 50.0), gt=0),
                _MAXIMIZE,
            ),
        ),
        "ASGD": Optimizer(
            1e-2,
            by_name(
                parameter("lambd", "float", 1e-4),
                parameter("alpha", "float", 0.75),
                parameter("t0", "float", 1e6),
                _NO_DECAY,
                _MAXIMIZE,
            ),
            moments=1,
        ),
        "Lamb": Optimizer(
            1e-3,
            by_name(
                _BETAS,
                _EPS,
                _NO_DECAY,
                parameter("bias_correction", "bool", True),
                parameter("eps_inside_sqrt", "bool", False),
                parameter("min_coeff", "float", 0.01, ge=0),
                parameter("max_coeff", "float", 10.0, gt=0),
            ),
            measures=True,
        ),
        "Adafactor": Optimizer(
            1e-2,
            by_name(
                parameter("beta2_decay", "float", -0.8, le=0),
                parameter("eps", "pair", (None, 1e-3), ge=0),
                parameter("d", "float", 1.0, ge=1),
                _NO_DECAY,
                _MAXIMIZE,
            ),
            moments=0,
            measures=True,
        ),
        "Lion": Optimizer(1e-4, by_name(_LION_BETAS, _NO_DECAY, _MAXIMIZE), moments=1),
        "AdamW8bit": Optimizer(
            1e-3,
            by_name(_BETAS, _EPS, parameter("weight_decay", "float", 0.01, ge=0)),
            package="bitsandbytes",
            in_numbers="AdamW",
        ),
        # The package's Adam too has decoupled weight decay.
        "Adam8bit": Optimizer(1e-3, by_name(_BETAS, _EPS, _NO_DECAY), package="bitsandbytes", in_numbers="AdamW"),
        "Lion8bit": Optimizer(1e-4, by_name(_LION_BETAS, _NO_DECAY), 1, package="bitsandbytes", in_numbers="Lion"),
    }
)


def num_moments(optimizer: str, params: Mapping[str, object]) -> int:
    """Return the kinds of state of elements that an optimizer with these parameters keeps beside the weights."""
    return OPTIMIZERS[optimizer].moments + sum(bool(params.get(name)) for name in ("amsgrad", "centered", "momentum"))


def in_numbers(kind: str) -> str:
    """Return the optimizer with the same update whose moments are numbers; other names as they are."""
    return (OPTIMIZERS[kind].in_numbers if kind in OPTIMIZERS else "") or kind


LR = parameter("lr", "float", None, ge=0)

# Arguments that choose between implementations of one update rule, torch's or DeepSpeed's.
IMPLEMENTATION = ("foreach", "fused", "capturable", "torch_adam", "set_grad_none")

_COMPRESSED = "it compresses what the processes exchange, and here gradients are exchanged in full"
_WHOLE = "its update of one element depends on others, and an optimizer here sees flat slices of parameters"
_MUP = "it scales learning rates by shapes that only the mup package has"

REFUSED_OPTIMIZERS: Mapping[str, str] = MappingProxyType(
    {
        "OneBitLamb": _COMPRESSED,
        "OneBitAdam": _COMPRESSED,
        "ZeroOneAdam": _COMPRESSED,
        "Muon": _WHOLE,
        "LBFGS": "it evaluates the model several times a step",
        "SparseAdam": "gradients are dense",
        "MuAdam": _MUP,
        "MuAdamW": _MUP,
        "MuSGD": _MUP,
    }
)

# --- at the command line ---------------------------------------------------------------------------------------------

# The names that `--optimizer` takes; "adam" with decoupled_weight_decay=false is torch's Adam instead.
RUN_NAMES: Mapping[str, str] = MappingProxyType(
    {"adam": "AdamW"} | {name.lower(): name for name in OPTIMIZERS if name not in ("AdamW", "Adam")}
)
DECOUPLED = _DECOUPLED.name


def run_settings(kind: str) -> Mapping[str, tuple[str, ...]]:
    """Return the settings of a run that set parameters of the optimizer `kind`, by parameter.

    The settings of Adam serve every optimizer that has betas, but for Lion, whose betas are others.
    """
    params = OPTIMIZERS[kind].params
    adams = {"betas": ("adam_beta1", "adam_beta2"), "eps": ("adam_eps",)} if "betas" in params else {}
    if kind in ("Lion", "Lion8bit"):
        adams = {"betas": ("lion_beta1", "lion_beta2")}
    momentum = {"momentum": ("sgd_momentum",)} if kind == "SGD" else {}
    decay = {"weight_decay": ("weight_decay",)} if "weight_decay" in params else {}
    return MappingProxyType({**adams, **momentum, **decay})
