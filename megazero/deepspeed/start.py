"""Defines `deepspeed.initialize`, which makes an engine from DeepSpeed's arguments."""

import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from megazero.config.choices import OptimizerChoice
from megazero.deepspeed.comm import DEFAULT_PORT, get_rank, init_distributed
from megazero.deepspeed.data import InputSettings
from megazero.deepspeed.deepspeed_engine import DeepSpeedEngine
from megazero.deepspeed.missing import refuse
from megazero.dialects.deepspeed.reading import read_file
from megazero.library.config import load_engine_config
from megazero.library.initialize import initialize as initialize_core
from megazero.optim.configured import make_torch_optimizer
from megazero.parallel.launch import Launch

# Keys that the engine of a DeepSpeed program serves, beside those of the library.
_DROP_LAST, _MANAGED = "dataloader_drop_last", "managed_gradient_accumulation"


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Optimizer | Callable[[Any], Optimizer] | None = None,
    model_parameters: Any = None,
    training_data: Dataset[Any] | None = None,
    lr_scheduler: Any = None,
    distributed_port: int = DEFAULT_PORT,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: str | Path | Mapping[str, Any] | None = None,
    mesh_param: Any = None,
    config_params: str | Path | Mapping[str, Any] | None = None,
) -> tuple[DeepSpeedEngine, Optimizer | None, DataLoader[Any] | None, Any]:
    """Return the engine of a model, its optimizer, the loader of `training_data`, and the learning-rate scheduler.

    args: the program's arguments, whose deepspeed_config is the configuration, unless `config` (or `config_params`,
    its older name) is; their local_rank is set.
    optimizer: a torch optimizer, or a function that makes one of the parameters; the configuration's otherwise.
    model_parameters: the parameters, or param groups, of the configuration's optimizer; all by default.
    lr_scheduler: a scheduler of the optimizer, or a function that makes one for it; the configuration's otherwise.
    mpu: an object with the process groups, if the program has groups of its own.
    distributed_port, dist_init_required: for `init_distributed`, which this calls.
    Raises ConfigError, TopologyError or UsageError.
    """
    if model is None:
        raise refuse("initialize() without a model", "an engine is made around a model", "initialize(model=...)")
    if mesh_param is not None:
        raise refuse("initialize(mesh_param=...)", "sequences are not divided over processes", "mpu=...")
    init_distributed(distributed_port=distributed_port, dist_init_required=dist_init_required)
    _set_local_rank(args)
    source = _source(args, config, config_params)
    given_content = source if isinstance(source, Mapping) else read_file(Path(source))
    content = dict(given_content)
    drop_last, managed = content.pop(_DROP_LAST, False), content.pop(_MANAGED, True)
    for name, given in ((_DROP_LAST, drop_last), (_MANAGED, managed)):
        if not isinstance(given, bool):
            raise refuse(f"{name}: {given!r}", "it is a switch", "true, false")
    parameters = None if model_parameters is None else _listed(model_parameters)
    for name, given in (("optimizer", optimizer), ("scheduler", lr_scheduler)):
        if given is not None and content.pop(name, None) is not None and get_rank() == 0:
            warnings.warn(f"{name}: the one that the program passes to initialize takes its place", stacklevel=2)
    settings = load_engine_config(content)
    chosen = _optimizer(optimizer, parameters, settings.optimizer, model)
    if chosen is not None:
        settings = replace(settings, optimizer=None)
    core = initialize_core(model, settings, mpu, chosen)
    inputs = InputSettings(training_data, collate_fn, drop_last, managed)
    engine = DeepSpeedEngine(core, inputs, lr_scheduler, config=given_content)
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


def _set_local_rank(args: Any) -> None:
    """Set args.local_rank, which older launchers passed; raise UsageError if it is another process's."""
    local_rank = Launch.from_environment().local_rank
    given = getattr(args, "local_rank", None)
    if given is not None and given not in (-1, local_rank):
        raise refuse(f"args.local_rank {given}", f"the launcher gives local rank {local_rank}", "LOCAL_RANK alone")
    if hasattr(args, "local_rank"):
        args.local_rank = local_rank


def _source(args: Any, *configs: str | Path | Mapping[str, Any] | None) -> str | Path | Mapping[str, Any]:
    """Return the configuration, or its file; raise UsageError if there is none, or there are several."""
    given = [each for each in (getattr(args, "deepspeed_config", None), *configs) if each is not None]
    if len(given) != 1:
        found = f"initialize() with {len(given)} configurations"
        raise refuse(found, "an engine has one configuration", "args.deepspeed_config, or config=...")
    if not isinstance(given[0], str | Path | Mapping):
        rule = "a configuration is a mapping, or the path of a JSON file"
        raise refuse(f"config of type {type(given[0]).__name__}", rule, "dict, str, Path")
    return given[0]


def _listed(model_parameters: Any) -> list[Any]:
    """Return the parameters or param groups as lists, as a generator can be read once only."""
    given: Iterable[Any] = (
        model_parameters.parameters() if isinstance(model_parameters, nn.Module) else model_parameters
    )
    return [{**each, "params": list(_group(each["params"]))} if isinstance(each, Mapping) else each for each in given]


def _group(params: Any) -> Iterable[Any]:
    return (params,) if isinstance(params, nn.Parameter) else params


def _optimizer(
    given: Optimizer | Callable[[Any], Optimizer] | None,
    parameters: list[Any] | None,
    choice: OptimizerChoice | None,
    model: nn.Module,
) -> Optimizer | Callable[[Any], Optimizer] | None:
    """Return the optimizer that the core is to use, a function that makes it, or None for the configuration's own.

    choice: the configuration's optimizer.
    Raises UsageError if an optimizer has other parameters than the program names, or if the configuration's decouples a
    rate that the program's param groups would set.
    """
    if parameters is None:
        return given
    named = [p for each in parameters for p in (each["params"] if isinstance(each, Mapping) else (each,))]
    if isinstance(given, Optimizer):
        own = {id(p) for group in given.param_groups for p in group["params"]}
        if own != {id(p) for p in named}:
            rule = "they are those of the optimizer, where one is given"
            raise refuse("model_parameters that differ from the optimizer's", rule, "the optimizer alone")
        return given
    if given is not None:
        return lambda _: given(parameters)
    trained = [p for p in model.parameters() if p.requires_grad]
    is_all = not any(isinstance(each, Mapping) for each in parameters) and {id(p) for p in trained} <= {
        id(p) for p in named
    }
    if is_all:
        return None
    if choice is None:
        return None
    if choice.decoupled_lr is not None:
        found = f"optimizer.decoupled_lr: {choice.decoupled_lr:g} beside initialize(model_parameters=...)"
        raise refuse(found, "param groups have their own rates", "a param group with that lr")
    if choice.param_groups:
        found = "optimizer.param_groups beside initialize(model_parameters=...)"
        raise refuse(found, "the param groups are given", "one of the two")
    return partial(_make, choice, parameters)


def _make(choice: OptimizerChoice, parameters: list[Any], _all: object) -> Optimizer:
    """Make the configuration's optimizer over the parameters that the program names, instead of all."""
    return make_torch_optimizer(choice, parameters)
