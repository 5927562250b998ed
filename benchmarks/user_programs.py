"""Random programs of a user around an engine: modules of many kinds, configurations, and acts in a random order.

A program is JSON.  It is drawn from its number alone, so a record names it by that, and it can be shortened by leaving
acts out.  `WRITES` are the ways in which a user's code writes to a module's parameters; plain PyTorch and an engine's
module are written to by the same code.
"""

import random
import tempfile
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import vector_to_parameters
from torch.utils.checkpoint import checkpoint

from megazero.zero.offloaded import StateKind

Act = dict[str, Any]
Program = dict[str, Any]

WIDTH = 5  # of every module's input and output, so that one module's output is another's input
DTYPES = MappingProxyType({"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16})


def drawn(seed: int, *shape: int) -> Tensor:
    """Return normal random numbers that depend on the seed and the shape alone, float64."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Tied(nn.Module):
    """Two products with one weight, once transposed, and a frozen bias between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.second.weight = self.first.weight
        self.shift = nn.Parameter(torch.zeros(WIDTH), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)) + self.shift) @ self.first.weight.t()


class Scaled(nn.Module):
    """Parameters of one element, of none, with transposed strides, and one that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.nothing = nn.Parameter(torch.empty(0))
        self.unused = nn.Parameter(torch.ones(3))
        self.across = nn.Parameter(torch.zeros(7, WIDTH).t())
        self.back = nn.Linear(7, WIDTH)
        self.one = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.back(torch.tanh(x @ self.across) * self.scale) + self.one + self.nothing.sum()


class Counting(nn.Module):
    """A linear layer whose outputs' running mean is a buffer, and counts its forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("own", torch.ones(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(y.detach().mean(0).to(self.mean.dtype), 0.25)
                self.count.add_(1)
            return y
        return y - self.mean.to(y.dtype)


class Sometimes(nn.Module):
    """A parameter that only batches with a positive first element use."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.extra = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        return y * self.extra if x.flatten()[0] > 0 else y


class Recomputed(nn.Module):
    """Blocks of a list, each with its activations computed again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, 3), nn.Tanh(), nn.Linear(3, WIDTH)) for _ in "ab")

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return x


def _plain() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 7), nn.Tanh(), nn.Linear(7, 3, bias=False), nn.LayerNorm(3), nn.Linear(3, 5))


def _frozen() -> nn.Module:
    middle = nn.Linear(4, 3).requires_grad_(False)
    return nn.Sequential(nn.Linear(WIDTH, 4), middle, nn.GELU(), nn.Linear(3, WIDTH))


KINDS: Mapping[str, Callable[[], nn.Module]] = MappingProxyType(
    {
        "plain": _plain,
        "frozen": _frozen,
        "tied": Tied,
        "scaled": Scaled,
        "buffers": lambda: nn.Sequential(Counting(), nn.Tanh(), Counting()),
        "sometimes": Sometimes,
        "recomputed": Recomputed,
    }
)


def make_module(kind: str, seed: int, dtype: torch.dtype) -> nn.Module:
    """Return a module of a kind, its parameters drawn from the seed."""
    module = KINDS[kind]().double()
    with torch.no_grad():
        for index, parameter in enumerate(module.parameters()):
            parameter.copy_(0.5 * drawn(1000 * seed + index, *parameter.shape) + (parameter.dim() < 2) * 0.5)
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(dtype)
    return module


# --- writes -----------------------------------------------------------------------------------------------------------


def _load(module: nn.Module, values: Mapping[str, Tensor]) -> None:
    module.load_state_dict({**module.state_dict(), **with_aliases(module, values)})


def _copy(module: nn.Module, values: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, value in values.items():
            module.get_parameter(name).copy_(value)


def _clamp(module: nn.Module, values: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name in values:
            module.get_parameter(name).clamp_(-0.25, 0.25)


def _initialise(module: nn.Module, values: Mapping[str, Tensor]) -> None:
    for name in values:
        nn.init.constant_(module.get_parameter(name), 0.125)


def _copy_data(module: nn.Module, values: Mapping[str, Tensor]) -> None:
    for name, value in values.items():
        module.get_parameter(name).data.copy_(value)


def _scale_data(module: nn.Module, values: Mapping[str, Tensor]) -> None:
    for name in values:
        data = module.get_parameter(name).data
        if data.dim():
            data[:1] += 0.25
        data.mul_(0.5)


def _assign_data(module: nn.Module, values: Mapping[str, Tensor]) -> None:
    for name, value in values.items():
        parameter = module.get_parameter(name)
        parameter.data = value.to(parameter.dtype)


def _swap_data(module: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Swap other values in and the module's own back again, as an evaluation with averaged weights does."""
    own = {name: module.get_parameter(name).data for name in values}
    _assign_data(module, values)
    for name in values:
        module.get_parameter(name).data = own[name]


def _foreach(module: nn.Module, values: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        torch._foreach_mul_([module.get_parameter(name) for name in values], 0.75)


def _inference(module: nn.Module, values: Mapping[str, Tensor]) -> None:
    with torch.inference_mode():
        for name in values:
            module.get_parameter(name).add_(0.125)


def _from_vector(module: nn.Module, values: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        vector = torch.cat([parameter.reshape(-1) for parameter in module.parameters()])
        vector_to_parameters(vector * 0.5, module.parameters())


def _state_in_place(module: nn.Module, values: Mapping[str, Tensor]) -> None:
    state = module.state_dict()
    for name in values:
        state[name].mul_(-0.5)


def _set(module: nn.Module, values: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, value in values.items():
            parameter = module.get_parameter(name)
            parameter.set_(value.to(parameter.dtype))


def _lerp(module: nn.Module, values: Mapping[str, Tensor]) -> None:
    for name, value in values.items():
        parameter = module.get_parameter(name)
        parameter.data.lerp_(value.to(parameter.dtype), 0.5)


def _apply(module: nn.Module, values: Mapping[str, Tensor]) -> None:
    def halve(part: nn.Module) -> None:
        if isinstance(part, nn.Linear):
            with torch.no_grad():
                part.weight.mul_(0.5)

    module.apply(halve)


WRITES: Mapping[str, Callable[[nn.Module, Mapping[str, Tensor]], None]] = MappingProxyType(
    {
        "load_state_dict": _load,
        "copy_": _copy,
        "clamp_": _clamp,
        "nn.init": _initialise,
        "data.copy_": _copy_data,
        "data.mul_": _scale_data,
        "data =": _assign_data,
        "data = and back": _swap_data,
        "_foreach_mul_": _foreach,
        "inference_mode": _inference,
        "vector_to_parameters": _from_vector,
        "state_dict in place": _state_in_place,
        "set_": _set,
        "data.lerp_": _lerp,
        "apply": _apply,
    }
)
# Writes of every parameter, whatever names they are given.
WHOLE = frozenset({"load_state_dict", "vector_to_parameters", "apply"})


def with_aliases(module: nn.Module, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return values by all names that a module's state_dict has for the parameters, of which some are tied."""
    name_of = {id(parameter): name for name, parameter in module.named_parameters()}
    state = module.state_dict(keep_vars=True)
    return {key: values[name] for key, each in state.items() if (name := name_of.get(id(each), "")) in values}


def values_of(module: nn.Module, act: Act) -> dict[str, Tensor]:
    """Return the values that an act writes, by parameter: every `stride`-th from the first on, float64."""
    names = [name for name, _ in module.named_parameters()][act["first"] :: act["stride"]]
    shapes = {name: parameter.shape for name, parameter in module.named_parameters()}
    return {name: 0.5 * drawn(act["seed"] + index, *shapes[name]) for index, name in enumerate(names)}


# --- programs ---------------------------------------------------------------------------------------------------------

OPTIMIZERS = ("AdamW", "SGD", "given AdamW", "given SGD", "given Adagrad", "given RMSprop", "given Adam")

# Settings beside the stage that change how ranks compute, and not what; and the stages of those that not all have.
ZERO: Mapping[str, Any] = MappingProxyType(
    {
        "overlap_comm": False,
        "contiguous_gradients": False,
        "prescale_gradients": True,
        "gradient_predivide_factor": 2.0,
        "sub_group_size": 16,
        "reduce_scatter": False,
        "allgather_partitions": False,
        "prefetch_bucket_size": 0,
        "max_live_parameters": 8,
        "max_reuse_distance": 1000,
        "enable_sanity_checks": True,
    }
)
STAGES_OF: Mapping[str, Sequence[int]] = MappingProxyType(
    {
        "reduce_scatter": (1, 2, 3),
        "allgather_partitions": (1, 2),
        **dict.fromkeys(("prefetch_bucket_size", "max_live_parameters", "max_reuse_distance"), (3,)),
        "enable_sanity_checks": (3,),
        **dict.fromkeys(("offload_optimizer", "offload_optimizer_ratio"), (1, 2, 3)),
        **dict.fromkeys(("offload_optimizer_nvme_ratio", "offload_gradients_nvme"), (1, 2, 3)),
        **dict.fromkeys(("nvme_path", "offload_buffer_count"), (1, 2, 3)),
        **dict.fromkeys(("offload_param", "offload_param_buffer_count"), (3,)),
    }
)
# Files with as few buffers as may be.
_FILES: Mapping[str, Any] = MappingProxyType({"nvme_path": tempfile.gettempdir(), "offload_buffer_count": 3})
_GRADIENT_FILES: Mapping[str, Any] = MappingProxyType({"offload_gradients_nvme": True, "offload_buffer_count": 4})
# Where optimizer states and parameters have their home, as far as the stage allows.
HOMES: Sequence[Mapping[str, Any]] = (
    {},
    {"offload_optimizer": "cpu"},
    {"offload_param": "cpu"},
    {"offload_optimizer": "cpu", "offload_param": "cpu"},
    {"offload_optimizer": "cpu", "offload_optimizer_ratio": 0.5},
    {"offload_optimizer": "nvme", **_FILES},
    {"offload_optimizer": "nvme", "offload_param": "cpu", **_FILES},
    {"offload_optimizer": "nvme", "offload_param": "nvme", "offload_param_buffer_count": 1, **_FILES},
    {"offload_optimizer": "nvme", "offload_optimizer_ratio": 0.7, "offload_optimizer_nvme_ratio": 0.5, **_FILES},
    {"offload_optimizer": "nvme", **_FILES, **_GRADIENT_FILES},
    {"offload_optimizer": "nvme", "offload_optimizer_nvme_ratio": 0.5, **_FILES, **_GRADIENT_FILES},
)


class _Draw:
    """A draw of one program."""

    def __init__(self, number: int) -> None:
        self._random = random.Random(number)
        self._homes = random.Random(f"homes {number}")
        self._seed = number * 1_000_003
        self.acts: list[Act] = []
        self.stages: list[int] = []
        self.kinds: list[str] = []
        self.done: list[int] = []  # backward passes of the step, by module
        self.accumulation: list[int] = []
        self.kept: dict[str, list[int]] = {}
        self.is_odd = self._random.random() < 0.15

    def program(self) -> Program:
        choose, chance = self._random.choice, self._random.random
        precision = "fp64" if chance() < 0.7 else choose(["bf16", "bf16", "fp16", "fp32"])
        world = choose([1, 2, 2, 3])
        modules = [self._module(precision) for _ in range(1 if chance() < 0.75 else 2)]
        self.done = [0] * len(modules)
        self.accumulation = [module["accumulation"] for module in modules]
        self.stages = [module["stage"] for module in modules]
        self.kinds = [module["kind"] for module in modules]
        for _ in range(self._random.randint(4, 14)):
            self._draw_act(precision)
        for index, module in enumerate(modules):
            stages = [module["stage"], *(act["stages"][index] for act in self.acts if act["act"] == "resume")]
            module["alike"] = 3 in stages  # ranks use the same parameters, as stage 3 requires outside a leaf module
        return {"precision": precision, "world": world, "modules": modules, "acts": self.acts}

    def _module(self, precision: str) -> dict[str, Any]:
        choose, chance = self._random.choice, self._random.random
        return {
            "kind": choose(list(KINDS)),
            "seed": self._next_seed(),
            "stage": choose([0, 1, 2, 3]),
            "accumulation": choose([1, 1, 2, 3]),
            "clip": choose([0.0, 0.0, 0.1, 1.0]),
            "optimizer": choose(OPTIMIZERS),
            "bucket": choose([0, 16, 64, 1 << 20]),
            "persists": choose([0, 0, 6]),
            "sums": chance() < 0.1,
            "zero": dict([choose(list(ZERO.items()))] if chance() < 0.5 else []) | dict(self._homes.choice(HOMES)),
        }

    def _next_seed(self) -> int:
        self._seed += 17
        return self._seed

    def _add(self, act: str, module: int = 0, **more: Any) -> None:
        self.acts.append({"act": act, "module": module, **more})

    def _draw_act(self, precision: str) -> None:
        module = self._random.randrange(len(self.done))
        acts = ["train"] * 6 + ["write"] * 4 + ["micro", "drop", "evaluate", "set", "grad", "rate", "schedule"]
        acts += ["keep", "restore", "copy", "average", "resume", "save", "load", "buffer", "again", "optimizer"]
        acts += ["through"] * 2 * (len(self.done) > 1)
        acts += ["odd"] * 2 * self.is_odd
        getattr(self, f"_{self._random.choice(acts)}")(module, precision)

    def _micro(self, module: int, precision: str) -> None:
        how = self._random.choice(["engine", "engine", "plain"])
        if self.done[module] < self.accumulation[module]:
            if self._random.random() < 0.1:
                self._add("micro", module, seed=self._next_seed(), how="no_sync")
            self._add("micro", module, seed=self._next_seed(), how=how, rows=self._random.randint(1, 3))
            self.done[module] += 1
            if self._random.random() < 0.5:
                self._add("step", module)
                if self.done[module] == self.accumulation[module]:
                    self.done[module] = 0

    def _train(self, module: int, precision: str) -> None:
        while self.done[module] < self.accumulation[module]:
            self._add("micro", module, seed=self._next_seed(), how="engine", rows=self._random.randint(1, 3))
            self.done[module] += 1
            if self._random.random() < 0.1:
                self._write(module, precision)
            if self._random.random() < 0.1:
                self._evaluate(module, precision)
        if self._random.random() < 0.3:
            self._grad(module, precision)
        self._add("step", module)
        self.done[module] = 0
        if self._homes.random() < 0.15:
            number = self._homes.randint(1, len(StateKind))
            self._add(
                "leave",
                module,
                kinds=[self._homes.sample([kind.value for kind in StateKind], number) for _ in range(2)],
            )
        if self._random.random() < 0.3:
            self._add("schedule_step", module)
        if self._random.random() < 0.2:
            self._add("clear", module, how=self._random.choice(["module", "optimizer", "zeros"]))

    def _through(self, module: int, precision: str) -> None:
        # What reaches a module through another one differs from rank to rank, and so would the parameters it uses.
        if self.done[module] < self.accumulation[module] and self.kinds[1 - module] != "sometimes":
            self._add("through", module, seed=self._next_seed(), behind=1 - module)
            self.done[module] += 1

    def _drop(self, module: int, precision: str) -> None:
        self._add("zero_grad", module)
        self.done[module] = 0

    def _evaluate(self, module: int, precision: str) -> None:
        self._add("evaluate", module, seed=self._next_seed(), how=self._random.choice(["eval", "no_grad", "state"]))

    def _write(self, module: int, precision: str) -> None:
        how = self._random.choice([*WRITES, "engine.load_state_dict"])
        where = self._random.choice(["all", "rank 0"])
        span = {"first": self._random.randint(0, 2), "stride": self._random.randint(1, 3)}
        self._add("write", module, seed=self._next_seed(), how=how, where=where, **span)

    def _set(self, module: int, precision: str) -> None:
        what = self._random.choice(["weights", "weights", "state"])
        self._add("set", module, seed=self._next_seed(), what=what, first=self._random.randint(0, 3), stride=2)

    def _grad(self, module: int, precision: str) -> None:
        is_complete = self.done[module] == self.accumulation[module]
        how = self._random.choice(["get", "set", "mask", "clip_grad_norm_", "None"]) if is_complete else "get"
        if how in ("mask", "clip_grad_norm_", "None") and self.stages[module] > 0 and not self.is_odd:
            how = "get"
        self._add("grad", module, how=how, first=self._random.randint(0, 2), seed=self._next_seed(), stride=2)

    def _rate(self, module: int, precision: str) -> None:
        self._add("rate", module, value=self._random.choice([0.0, 0.001, 0.02]))

    def _schedule(self, module: int, precision: str) -> None:
        self._add("schedule", module)

    def _optimizer(self, module: int, precision: str) -> None:
        self._add("optimizer state", module)

    def _keep(self, module: int, precision: str) -> None:
        self._add("keep", module, parts=self._random.choice(["both", "module", "optimizer"]))

    def _restore(self, module: int, precision: str) -> None:
        if self.done[module]:
            self._drop(module, precision)
        self._add("restore", module)

    def _copy(self, module: int, precision: str) -> None:
        self._add("copy", module, seed=self._next_seed(), how=self._random.choice(["deepcopy", "AveragedModel"]))

    def _average(self, module: int, precision: str) -> None:
        self._add("average", module)
        if self._random.random() < 0.5:
            self._add("take average", module, how=self._random.choice(["load_state_dict", "copy_", "data ="]))

    def _buffer(self, module: int, precision: str) -> None:
        self._add("buffer", module)

    def _finish_steps(self, precision: str) -> None:
        for module, done in enumerate(self.done):
            if done:
                self._drop(module, precision)

    def _save(self, module: int, precision: str) -> None:
        self._finish_steps(precision)
        self._add("save")

    def _load(self, module: int, precision: str) -> None:
        self._finish_steps(precision)
        self._add("load")

    def _resume(self, module: int, precision: str) -> None:
        if {"freeze", "again"} <= {word for act in self.acts for word in (act["act"], act.get("how"))}:
            return  # torch's optimizers load no state of fewer parameters than theirs
        self._finish_steps(precision)
        self.stages = [self._random.choice([0, 1, 2, 3]) for _ in self.stages]
        others = ["fp64"] if precision == "fp64" else ["fp32", "bf16", "fp16"]
        self._add(
            "resume",
            world=self._random.choice([1, 2, 3]),
            stages=self.stages,
            precision=self._random.choice(others),
        )

    def _again(self, module: int, precision: str) -> None:
        """Close the engine and make another one around the same module, where its parameters are whole."""
        if self.stages[module] < 3:
            self._drop(module, precision)
            self._add("again", module)

    def _odd(self, module: int, precision: str) -> None:
        """Do what an engine may refuse."""
        how = self._random.choice(["freeze", "replace", "bare", "early", "convert", "grad between", "optimizer.step"])
        self._add("odd", module, how=how, seed=self._next_seed(), first=0, stride=1)


def draw(number: int) -> Program:
    """Return the program of this number."""
    return {"number": number, **_Draw(number).program()}


def without(program: Program, index: int) -> Program:
    """Return the program without one of its acts."""
    acts: Sequence[Act] = program["acts"]
    return {**program, "acts": [act for place, act in enumerate(acts) if place != index]}
