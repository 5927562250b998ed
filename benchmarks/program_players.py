"""Plays a random program twice: in plain PyTorch on one process, and with engines of megazero on several ranks.

`PlainPlayer` is what people would write without megazero: a module, a torch optimizer, gradients that are the mean over
the ranks' batches, and, in 16-bit formats, master weights in fp32 beside the module.  `EnginePlayer` is one rank's
program around engines.  Each act is a method of both, of the same name.

What a player observes are tensors, by the act's number and a name; in plain PyTorch also lists, a tensor for each rank.
What the plain program would do otherwise, and megazero states that it does, is a rule here:

    writes        in the middle of a step count at once on each rank; here all ranks write the same
    no_sync       a pass in it adds its gradients, and is not one of the step's
    buffers       are rank 0's (compared on rank 0 alone, since other ranks' drift until a synchronised forward)
    zero_grad     twice after a step() that awaits more passes is refused, since no step would ever be complete
    no elements   a parameter without any counts as updated in every step (its state's step), whatever its gradient
    a refusal     discards what has accumulated; the program ends there
    state_dict    the module's is in working precision; engine.load_state_dict sets master weights to its values
"""

import copy
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel
from user_programs import (
    DTYPES,
    STAGES_OF,
    WHOLE,
    WIDTH,
    WRITES,
    Act,
    Program,
    drawn,
    make_module,
    values_of,
    with_aliases,
)

import megazero
from megazero.comm.mesh import Mesh
from megazero.library.state.access import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
)
from megazero.zero.parameters.gathered import GatheredParameters

Observed = dict[tuple[int, str], Any]
_ROWS = 2
_STATE = {"AdamW": "exp_avg", "given AdamW": "exp_avg", "given Adam": "exp_avg_sq", "given RMSprop": "square_avg"}
_STATE |= {"SGD": "momentum_buffer", "given SGD": "momentum_buffer", "given Adagrad": "sum"}


def batch(act: Act, rank: int, settings: Mapping[str, Any], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return a rank's inputs and targets of a micro-batch."""
    rows = act.get("rows", _ROWS)
    both = drawn(act["seed"] + rank, 2, rows, WIDTH)
    if settings["alike"]:
        both[0, 0, 0] = drawn(act["seed"], 1)[0]
    return both[0].to(dtype), both[1].to(dtype)


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    wide = output if output.dtype is torch.float64 else output.float()
    return (wide - target).square().mean()


def make_optimizer(name: str, parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Return the torch optimizer of a name; a given one has two param groups, matrices and the rest."""
    every = list(parameters)
    if name == "AdamW":
        return torch.optim.AdamW(every, lr=0.01, weight_decay=0.1, betas=(0.8, 0.95), eps=1e-6)
    if name == "SGD":
        return torch.optim.SGD(every, lr=0.05, momentum=0.9, weight_decay=0.01)
    matrices, rest = [p for p in every if p.dim() > 1], [p for p in every if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": rest, "lr": 0.005}]
    makers: dict[str, Callable[[Any], Optimizer]] = {
        "given AdamW": lambda given: torch.optim.AdamW(given, lr=0.01, amsgrad=True, eps=1e-6),
        "given SGD": lambda given: torch.optim.SGD(given, lr=0.05, momentum=0.9, nesterov=True),
        "given Adagrad": lambda given: torch.optim.Adagrad(given, lr=0.02, eps=1e-6),
        "given RMSprop": lambda given: torch.optim.RMSprop(given, lr=0.005, eps=1e-6),
        "given Adam": lambda given: torch.optim.Adam(given, lr=0.01, eps=1e-6),
    }
    return makers[name]([group for group in groups if group["params"]])


def averaged(module: nn.Module) -> AveragedModel:
    return AveragedModel(module, avg_fn=lambda mean, value, _: 0.5 * mean + 0.5 * value)


def state_tensors(optimizer: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors of an optimizer's state_dict, by the parameter's number and the state's name.

    A state before the first step counts as none: torch's Adagrad makes one with the optimizer.
    """
    return {
        f"{number}.{name}": torch.as_tensor(value)
        for number, entries in optimizer["state"].items()
        for name, value in entries.items()
        if value is not None and entries.get("step", 1) != 0
    }


class PlainModule:
    """One module of a program in plain PyTorch."""

    def __init__(self, settings: Mapping[str, Any], module: nn.Module, precision: str, world: int) -> None:
        self.settings, self.module, self.world = settings, module, world
        self.dtype = DTYPES[precision]
        self.accumulation = settings["accumulation"]
        parameters = dict(module.named_parameters())
        self.masters = dict(parameters)
        if precision in ("bf16", "fp16"):
            self.masters = {
                name: nn.Parameter(parameter.detach().float(), parameter.requires_grad)
                for name, parameter in parameters.items()
            }
        self.optimizer = make_optimizer(settings["optimizer"], (p for p in self.masters.values() if p.requires_grad))
        self.schedule: Any = None
        self.average: AveragedModel | None = None
        self.count = 0
        self.grads: dict[str, Tensor] = {}
        self.norm: Tensor | None = None
        self.kept: tuple[str, Any, Any] | None = None

    def add(self, loss: Tensor, *, retain: bool = False) -> None:
        """Run backward of one rank's loss, and add its share of the step's gradients."""
        named = {name: p for name, p in self.module.named_parameters() if p.requires_grad}
        scale = 1.0 if self.dtype is not torch.float16 else 128.0
        found = torch.autograd.grad(loss * scale, list(named.values()), allow_unused=True, retain_graph=retain)
        share = self.accumulation * (1 if self.settings["sums"] else self.world) * scale
        for name, grad in zip(named, found, strict=True):
            if grad is not None:
                part = grad.to(self.masters[name].dtype) / share
                self.grads[name] = self.grads[name] + part if name in self.grads else part

    def forget(self) -> None:
        self.count, self.grads = 0, {}

    def take(self, names: Iterable[str]) -> None:
        """Let master weights have what was written to the module."""
        for name in names:
            if self.masters[name] is not self.module.get_parameter(name):
                self.masters[name].data.copy_(self.module.get_parameter(name))

    def publish(self) -> None:
        for name, master in self.masters.items():
            if master is not self.module.get_parameter(name):
                self.module.get_parameter(name).data.copy_(master)

    def step(self) -> None:
        for name, master in self.masters.items():
            master.grad = self.grads.get(name)
        norms = [grad.double().norm() for grad in self.grads.values()]
        self.norm = torch.stack(norms).norm() if norms else torch.zeros((), dtype=torch.float64)
        if self.settings["clip"]:
            nn.utils.clip_grad_norm_(self.masters.values(), self.settings["clip"])
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.publish()
        self.forget()

    def state(self) -> tuple[Any, Any, Any]:
        """Return a copy of all that a checkpoint holds."""
        masters = {name: master.detach().double().clone() for name, master in self.masters.items()}
        buffers = {name: buffer.clone() for name, buffer in self._saved_buffers()}
        return masters, buffers, copy.deepcopy(self.optimizer.state_dict())

    def load(self, state: tuple[Any, Any, Any]) -> None:
        masters, buffers, optimizer = state
        for name, value in masters.items():
            self.masters[name].data.copy_(value)
        self.publish()
        for name, buffer in self._saved_buffers():
            buffer.copy_(buffers[name])
        self.optimizer.load_state_dict(copy.deepcopy(optimizer))
        self.forget()

    def _saved_buffers(self) -> list[tuple[str, Tensor]]:
        saved = self.module.state_dict(keep_vars=True)
        return [(name, buffer) for name, buffer in self.module.named_buffers() if name in saved]


class PlainPlayer:
    """A program in plain PyTorch."""

    def __init__(self, program: Program) -> None:
        self.program, self.world = program, program["world"]
        self.precision = program["precision"]
        self.observed: Observed = {}
        self.at = -1
        self.modules = [self._make(settings) for settings in program["modules"]]
        self.saved: list[Any] | None = None

    def _make(self, settings: Mapping[str, Any]) -> PlainModule:
        module = make_module(settings["kind"], settings["seed"], DTYPES[self.precision])
        return PlainModule(settings, module, self.precision, self.world)

    def play(self, num_acts: int | None = None) -> Observed:
        """Return what is observed in the program; num_acts: in its first acts only.

        After what an engine refuses, the rest of a program may be nonsense in plain PyTorch too.
        """
        for at, act in enumerate(self.program["acts"][:num_acts]):
            self.at = at
            getattr(self, act["act"].replace(" ", "_"))(act, self.modules[act["module"]])
        if num_acts is None:
            self.at = len(self.program["acts"])
            self.finish()
        return self.observed

    def see(self, label: str, value: Any) -> None:
        self.observed[self.at, label] = value

    def finish(self) -> None:
        for index, one in enumerate(self.modules):
            for name, master in one.masters.items():
                self.see(f"{index}: weight {name}", master.detach().clone())
            for name, value in one.module.state_dict().items():
                self.see(f"{index}: state_dict {name}", value)
            for name, value in state_tensors(one.optimizer.state_dict()).items():
                self.see(f"{index}: optimizer {name}", value)

    def micro(self, act: Act, one: PlainModule) -> None:
        if one.count >= one.accumulation:
            return
        losses = []
        for rank in range(self.world):
            buffers = {name: b.clone() for name, b in one.module.named_buffers()}
            x, target = batch(act, rank, one.settings, one.dtype)
            loss = loss_of(one.module(x), target)
            one.add(loss)
            losses.append(loss.detach())
            if rank:
                for name, buffer in one.module.named_buffers():
                    buffer.copy_(buffers[name])
        one.count += act["how"] != "no_sync"
        self.see("loss", losses)

    def through(self, act: Act, one: PlainModule) -> None:
        if one.count >= one.accumulation:
            return
        other = self.modules[act["behind"]]
        losses = []
        for rank in range(self.world):
            saved = [{name: b.clone() for name, b in each.module.named_buffers()} for each in (one, other)]
            x, target = batch(act, rank, one.settings, one.dtype)
            loss = loss_of(other.module(one.module(x)), target)
            one.add(loss)
            losses.append(loss.detach())
            for each, buffers in zip((one, other), saved, strict=True):
                for name, buffer in each.module.named_buffers() if rank else ():
                    buffer.copy_(buffers[name])
        one.count += 1
        self.see("loss", losses)

    def step(self, act: Act, one: PlainModule) -> None:
        if one.count == one.accumulation:
            one.step()
            self.see("norm", one.norm)

    def zero_grad(self, act: Act, one: PlainModule) -> None:
        one.forget()

    def leave(self, act: Act, one: PlainModule) -> None:
        """Do nothing: states that leave the device between two steps come back as they were."""

    def clear(self, act: Act, one: PlainModule) -> None:
        """Do nothing: there are no gradients between a step and the next forward."""

    def evaluate(self, act: Act, one: PlainModule) -> None:
        if act["how"] == "state":
            for name, value in one.module.state_dict().items():
                self.see(f"state_dict {name}", value.clone())
            return
        one.module.train(act["how"] != "eval")
        with torch.no_grad():
            self.see("output", one.module(batch(act, 0, one.settings, one.dtype)[0]))
        one.module.train()

    def write(self, act: Act, one: PlainModule) -> None:
        values = values_of(one.module, act)
        if act["how"] == "engine.load_state_dict":
            one.module.load_state_dict({**one.module.state_dict(), **with_aliases(one.module, values)})
            for name, parameter in one.module.named_parameters():
                value = values.get(name, parameter.detach())
                one.masters[name].data.copy_(value)
            one.publish()
            return
        WRITES[act["how"]](one.module, {name: value.to(one.dtype) for name, value in values.items()})
        if act["how"] != "data = and back":
            one.take(values if act["how"] not in WHOLE else one.masters)

    def set(self, act: Act, one: PlainModule) -> None:
        for name, value in self._trained(one, act).items():
            if act["what"] == "weights":
                one.masters[name].data.copy_(value)
            elif (state := one.optimizer.state.get(one.masters[name])) and state.get("step", 1) != 0:
                state[_STATE[one.settings["optimizer"]]].copy_(value.square())
        one.publish()

    def _trained(self, one: PlainModule, act: Act) -> dict[str, Tensor]:
        every = values_of(one.module, act)
        return {name: value for name, value in every.items() if one.masters[name].requires_grad}

    def grad(self, act: Act, one: PlainModule) -> None:
        if act["how"] != "get" and one.count < one.accumulation:
            return
        if act["how"] == "clip_grad_norm_":
            for name, master in one.masters.items():
                master.grad = one.grads.get(name)
            self.see("clipped norm", nn.utils.clip_grad_norm_(one.masters.values(), 0.125))
            return
        for name, value in self._trained(one, act).items():
            if act["how"] == "get" and name in one.grads:
                self.see(f"gradient {name}", one.grads[name].clone())
            elif act["how"] == "set" and name in one.grads and one.grads[name].any():
                one.grads[name] = value.to(one.masters[name].dtype)
            elif act["how"] == "mask" and name in one.grads:
                one.grads[name] = one.grads[name] * 0.5
            elif act["how"] == "None" and value.numel():
                one.grads.pop(name, None)

    def rate(self, act: Act, one: PlainModule) -> None:
        one.optimizer.param_groups[-1]["lr"] = act["value"]

    def schedule(self, act: Act, one: PlainModule) -> None:
        one.schedule = torch.optim.lr_scheduler.ExponentialLR(one.optimizer, 0.5)

    def schedule_step(self, act: Act, one: PlainModule) -> None:
        if one.schedule is not None:
            one.schedule.step()
            self.see("rates", torch.tensor(one.schedule.get_last_lr(), dtype=torch.float64))

    def optimizer_state(self, act: Act, one: PlainModule) -> None:
        for name, value in state_tensors(one.optimizer.state_dict()).items():
            self.see(f"optimizer {name}", value.clone())

    def keep(self, act: Act, one: PlainModule) -> None:
        kept = copy.deepcopy(one.module.state_dict()), copy.deepcopy(one.optimizer.state_dict())
        one.kept = (act["parts"], *kept)

    def restore(self, act: Act, one: PlainModule) -> None:
        if one.kept is None:
            return
        parts, module, optimizer = one.kept
        if parts != "optimizer":
            one.module.load_state_dict(module)
            one.take(one.masters)
        if parts != "module":
            one.optimizer.load_state_dict(copy.deepcopy(optimizer))

    def copy(self, act: Act, one: PlainModule) -> None:
        copied = copy.deepcopy(one.module) if act["how"] == "deepcopy" else averaged(one.module)
        with torch.no_grad():
            self.see("copy's output", copied.eval()(batch(act, 0, one.settings, one.dtype)[0]))

    def average(self, act: Act, one: PlainModule) -> None:
        if one.average is None:
            one.average = averaged(one.module)
        one.average.update_parameters(one.module)

    def take_average(self, act: Act, one: PlainModule) -> None:
        if one.average is not None:
            values = {name: p.detach().clone() for name, p in one.average.module.named_parameters()}
            WRITES[act["how"]](one.module, values)
            one.take(one.masters)

    def buffer(self, act: Act, one: PlainModule) -> None:
        for buffer in one.module.buffers():
            buffer.fill_(1)

    def save(self, act: Act, one: PlainModule) -> None:
        self.saved = [each.state() for each in self.modules]

    def load(self, act: Act, one: PlainModule) -> None:
        if self.saved is not None:
            for each, state in zip(self.modules, self.saved, strict=True):
                each.load(state)

    def resume(self, act: Act, one: PlainModule) -> None:
        states = [each.state() for each in self.modules]
        self.world, self.precision, self.saved = act["world"], act["precision"], None
        self.modules = [self._make(settings) for settings in self.program["modules"]]
        for each, state in zip(self.modules, states, strict=True):
            each.load(state)

    def again(self, act: Act, one: PlainModule) -> None:
        index = self.modules.index(one)
        self.modules[index] = PlainModule(one.settings, one.module, self.precision, self.world)
        if self.saved is not None:
            self.saved = None

    def odd(self, act: Act, one: PlainModule) -> None:
        """Do what is ordinary in PyTorch; an engine that does not refuse it must do the same."""
        if act["how"] == "freeze":
            name = next(iter(values_of(one.module, act)))
            one.module.get_parameter(name).requires_grad_(False)
            one.masters[name].requires_grad_(False)
            one.grads.pop(name, None)
        elif act["how"] == "bare":
            self.write({**act, "how": "copy_"}, one)
        elif act["how"] == "grad between" and one.grads:
            for name in one.grads:
                one.grads[name] = one.grads[name] * 0.5


class EngineModule:
    """One module of a program with an engine, on one rank."""

    def __init__(self, settings: Mapping[str, Any], module: nn.Module, precision: str, stage: int, mesh: Mesh) -> None:
        self.settings, self.stage, self.dtype = settings, stage, DTYPES[precision]
        zero: dict[str, Any] = {"zero_stage": stage, "reduce_bucket_size": settings["bucket"]}
        zero |= {name: value for name, value in settings["zero"].items() if stage in STAGES_OF.get(name, (stage,))}
        if stage == 3:
            zero["param_persistence_threshold"] = settings["persists"]
        numbers: dict[str, Any] = {"precision": precision}
        if precision in ("bf16", "fp16"):
            numbers["accumulate_allreduce_grads_in_fp32"] = True
        if precision == "fp16":
            numbers["loss_scale"] = 128.0
        config: dict[str, Any] = {
            "zero": zero,
            "precision": numbers,
            "gradient_accumulation_steps": settings["accumulation"],
            "gradient_clipping": settings["clip"],
            "gradient_allreduce_op": "sum" if settings["sums"] else "mean",
        }
        given = None
        if settings["optimizer"] == "AdamW":
            params: dict[str, Any] = {"weight_decay": 0.1, "betas": [0.8, 0.95], "eps": 1e-6}
            config["optimizer"] = {"type": "AdamW", "lr": 0.01, "params": params}
        elif settings["optimizer"] == "SGD":
            params = {"momentum": 0.9, "weight_decay": 0.01}
            config["optimizer"] = {"type": "SGD", "lr": 0.05, "params": params}
        else:
            given = lambda parameters: make_optimizer(settings["optimizer"], parameters)  # noqa: E731
        self.engine = megazero.initialize(module, config, mesh=mesh, optimizer=given)
        self.module = module
        self.count = 0
        self.schedule: Any = None
        self.average: AveragedModel | None = None
        self.kept: tuple[str, Any, Any] | None = None

    def whole(self, modifier_rank: int | None = None) -> Any:
        """Return a block in which parameters are whole, where they are partitioned."""
        return GatheredParameters(self.module, modifier_rank) if self.stage == 3 else nullcontext()

    def named(self) -> dict[str, nn.Parameter]:
        return dict(self.module.named_parameters())


class EnginePlayer:
    """A program around engines on one rank."""

    def __init__(self, program: Program, mesh: Mesh, folder: Path, *, stages: list[int], precision: str) -> None:
        self.program, self.mesh, self.folder = program, mesh, folder
        self.precision, self.stages, self.rank = precision, stages, mesh.rank
        self.observed: Observed = {}
        self.at = -1
        self.modules: list[EngineModule] = []
        self.num_saved, self.saved, self.num_again, self.segment = 0, -1, 0, 0

    def start(self, segment: int) -> None:
        """Make the engines; those after the first segment go on from what `save_to_resume` of the last has saved."""
        self.segment = segment
        for index, (settings, stage) in enumerate(zip(self.program["modules"], self.stages, strict=True)):
            module = make_module(settings["kind"], settings["seed"] + self.rank, DTYPES[self.precision])
            one = EngineModule(settings, module, self.precision, stage, self.mesh)
            self.modules.append(one)
            if segment:
                one.engine.load_checkpoint(self.folder / f"resume_{segment}_{index}")

    def play(self, acts: Iterable[tuple[int, Act]]) -> None:
        for at, act in acts:
            self.at = at
            getattr(self, act["act"].replace(" ", "_"))(act, self.modules[act["module"]])

    def see(self, label: str, value: Any) -> None:
        self.observed[self.at, label] = value

    def close(self) -> None:
        for one in self.modules:
            one.engine.close()

    def save_to_resume(self, segment: int) -> None:
        for index, one in enumerate(self.modules):
            one.engine.save_checkpoint(self.folder / f"resume_{segment}_{index}")

    def finish(self) -> None:
        self.at = len(self.program["acts"])
        for index, one in enumerate(self.modules):
            with one.whole():
                plain = {name: p.detach().clone() for name, p in one.named().items()}
            for name, parameter in one.named().items():
                master = safe_get_full_fp32_param(parameter)
                self.see(f"{index}: weight {name}", plain[name] if master is None else master)
            for name, value in one.engine.state_dict().items():
                is_parameter = name in plain or isinstance(one.module.state_dict(keep_vars=True)[name], nn.Parameter)
                if is_parameter or self.rank == 0:
                    self.see(f"{index}: state_dict {name}", value.detach().clone())
            for name, value in state_tensors(one.engine.optimizer.state_dict()).items():
                self.see(f"{index}: optimizer {name}", value)

    def micro(self, act: Act, one: EngineModule) -> None:
        if one.count >= one.settings["accumulation"]:
            return
        x, target = batch(act, self.rank, one.settings, one.dtype)
        with one.engine.no_sync() if act["how"] == "no_sync" else nullcontext():
            loss = loss_of(one.engine(x), target)
            if act["how"] == "plain":
                (one.engine.scale(loss) if self.precision == "fp16" else loss).backward()
            else:
                one.engine.backward(loss)
        one.count += act["how"] != "no_sync"
        self.see("loss", loss.detach())

    def through(self, act: Act, one: EngineModule) -> None:
        if one.count >= one.settings["accumulation"]:
            return
        x, target = batch(act, self.rank, one.settings, one.dtype)
        loss = loss_of(self.modules[act["behind"]].engine(one.engine(x)), target)
        one.engine.backward(loss)
        one.count += 1
        self.see("loss", loss.detach())

    def step(self, act: Act, one: EngineModule) -> None:
        one.engine.step()
        if one.count == one.settings["accumulation"]:
            one.count = 0
            self.see("norm", torch.tensor(one.engine.get_global_grad_norm(), dtype=torch.float64))

    def zero_grad(self, act: Act, one: EngineModule) -> None:
        one.engine.zero_grad()
        one.count = 0

    def leave(self, act: Act, one: EngineModule) -> None:
        for kinds in act["kinds"]:
            one.engine.offload_states(kinds)
        one.engine.reload_states()

    def clear(self, act: Act, one: EngineModule) -> None:
        (one.engine.optimizer if act["how"] == "optimizer" else one.module).zero_grad(set_to_none=act["how"] != "zeros")

    def evaluate(self, act: Act, one: EngineModule) -> None:
        if act["how"] == "state":
            for name, value in one.engine.state_dict().items():
                if self.rank == 0 or name in one.named():
                    self.see(f"state_dict {name}", value.detach().clone())
            return
        if act["how"] == "eval":
            one.engine.eval()
        with torch.no_grad():
            output = one.engine(batch(act, 0, one.settings, one.dtype)[0])
        one.engine.train()
        if self.rank == 0:
            self.see("output", output)

    def write(self, act: Act, one: EngineModule) -> None:
        values = values_of(one.module, act)
        if act["how"] == "engine.load_state_dict":
            one.engine.load_state_dict({**one.engine.state_dict(), **with_aliases(one.module, values)})
            return
        if act["how"] == "apply":  # collective in stage 3
            WRITES["apply"](one.module, values)
            return
        with one.whole(0):
            if one.stage < 3 or act["where"] == "all" or self.rank == 0:
                WRITES[act["how"]](one.module, {name: value.to(one.dtype) for name, value in values.items()})

    def _trained(self, one: EngineModule, act: Act) -> dict[str, tuple[nn.Parameter, Tensor]]:
        named = one.named()
        return {
            name: (named[name], value)
            for name, value in values_of(one.module, act).items()
            if named[name].requires_grad
        }

    def set(self, act: Act, one: EngineModule) -> None:
        state = one.engine.optimizer.state_dict()["state"] if act["what"] == "state" else {}
        numbers = {id(p): i for i, p in enumerate(p for g in one.engine.optimizer.param_groups for p in g["params"])}
        for parameter, value in self._trained(one, act).values():
            if act["what"] == "weights":
                safe_set_full_fp32_param(parameter, value)
            elif state.get(numbers[id(parameter)]):
                safe_set_full_optimizer_state(parameter, value.square(), _STATE[one.settings["optimizer"]])

    def grad(self, act: Act, one: EngineModule) -> None:
        if act["how"] != "get" and one.count < one.settings["accumulation"]:
            return
        if act["how"] == "clip_grad_norm_":
            self.see("clipped norm", nn.utils.clip_grad_norm_(one.module.parameters(), 0.125))
            return
        for name, (parameter, value) in self._trained(one, act).items():
            if act["how"] == "get":
                found = safe_get_full_grad(parameter)
                if found is not None:
                    self.see(f"gradient {name}", found)
            elif act["how"] == "set":
                if (found := safe_get_full_grad(parameter)) is not None and found.any():
                    safe_set_full_grad(parameter, value)
            elif act["how"] == "mask":
                if parameter.grad is not None:
                    parameter.grad.mul_(0.5)
            elif value.numel():
                parameter.grad = None

    def rate(self, act: Act, one: EngineModule) -> None:
        one.engine.optimizer.param_groups[-1]["lr"] = act["value"]

    def schedule(self, act: Act, one: EngineModule) -> None:
        one.schedule = torch.optim.lr_scheduler.ExponentialLR(one.engine.optimizer, 0.5)

    def schedule_step(self, act: Act, one: EngineModule) -> None:
        if one.schedule is not None:
            one.schedule.step()
            self.see("rates", torch.tensor(one.engine.get_lr(), dtype=torch.float64))

    def optimizer_state(self, act: Act, one: EngineModule) -> None:
        for name, value in state_tensors(one.engine.optimizer.state_dict()).items():
            self.see(f"optimizer {name}", value.clone())

    def keep(self, act: Act, one: EngineModule) -> None:
        module, optimizer = one.engine.state_dict(), one.engine.optimizer.state_dict()
        one.kept = (act["parts"], copy.deepcopy(module), copy.deepcopy(optimizer))

    def restore(self, act: Act, one: EngineModule) -> None:
        if one.kept is None:
            return
        parts, module, optimizer = one.kept
        if parts != "optimizer":
            one.engine.load_state_dict(module)
        if parts != "module":
            one.engine.optimizer.load_state_dict(copy.deepcopy(optimizer))

    def copy(self, act: Act, one: EngineModule) -> None:
        with one.whole():
            copied = copy.deepcopy(one.module) if act["how"] == "deepcopy" else averaged(one.module)
        with torch.no_grad():
            output = copied.eval()(batch(act, 0, one.settings, one.dtype)[0])
        if self.rank == 0:
            self.see("copy's output", output)

    def average(self, act: Act, one: EngineModule) -> None:
        with one.whole():
            if one.average is None:
                one.average = averaged(one.module)
            one.average.update_parameters(one.module)

    def take_average(self, act: Act, one: EngineModule) -> None:
        if one.average is not None:
            values = {name: p.detach().clone() for name, p in one.average.module.named_parameters()}
            with one.whole(0):
                WRITES[act["how"]](one.module, values)

    def buffer(self, act: Act, one: EngineModule) -> None:
        for buffer in one.module.buffers():
            buffer.fill_(1)

    def save(self, act: Act, one: EngineModule) -> None:
        self.saved = self.num_saved
        self.num_saved += 1
        for index, each in enumerate(self.modules):
            each.engine.save_checkpoint(
                self.folder / f"kept_{self.segment}_{self.num_again}_{index}", tag=f"{self.saved}"
            )

    def load(self, act: Act, one: EngineModule) -> None:
        if self.saved >= 0:
            for index, each in enumerate(self.modules):
                each.engine.load_checkpoint(
                    self.folder / f"kept_{self.segment}_{self.num_again}_{index}", tag=f"{self.saved}"
                )

    def again(self, act: Act, one: EngineModule) -> None:
        index = self.modules.index(one)
        one.engine.close()
        self.saved = -1
        self.num_again += 1
        self.modules[index] = EngineModule(one.settings, one.module, self.precision, one.stage, self.mesh)

    def odd(self, act: Act, one: EngineModule) -> None:
        how, named = act["how"], one.named()
        if how == "freeze":
            next(iter(named.values())).requires_grad_(False)
        elif how == "replace":
            name = next(iter(named))
            parent, _, leaf = name.rpartition(".")
            old = named[name]
            setattr(one.module.get_submodule(parent), leaf, nn.Parameter(torch.zeros(old.shape, dtype=old.dtype)))
            one.engine.step()
            raise AssertionError("a replaced parameter is refused")
        elif how == "bare":
            values = values_of(one.module, act)
            WRITES["copy_"](one.module, {name: value.to(one.dtype) for name, value in values.items()})
        elif how == "early":
            one.engine.save_checkpoint(self.folder / "early")
        elif how == "convert":
            one.module.to(one.dtype)
        elif how == "grad between":
            for parameter in named.values():
                if parameter.grad is not None:
                    parameter.grad.mul_(0.5)
        elif how == "optimizer.step":
            one.engine.optimizer.step()
