"""Checks the optimizer and the schedule of a run, their settings and parameters, against the tables of both."""

from collections.abc import Iterable
from typing import Any

from megazero.config.choices import (
    AUTO,
    OptimizerChoice,
    choose_param_groups,
    choose_sweep,
    defaults_of,
    key_values,
    optimizer_conflicts,
    read_params,
)
from megazero.config.engine_sections import OptimizerConfig
from megazero.config.optimizers import DECOUPLED, OPTIMIZERS, RUN_NAMES, run_settings
from megazero.config.values import Diagnostics, Location
from megazero.errors import ConfigError, Problem, raise_problems


def optimizer_choice(config: OptimizerConfig) -> OptimizerChoice:
    """Return a run's optimizer, whose learning rate is the schedule's peak; raise ConfigError with all problems."""
    diagnostics = Diagnostics()
    choice = choose_for_run(config, diagnostics)
    raise_problems(ConfigError, diagnostics.problems)
    return choice


def choose_for_run(config: OptimizerConfig, diagnostics: Diagnostics) -> OptimizerChoice:
    """Return the optimizer of a run as `optimizer_choice` does, but add the problems to `diagnostics`."""
    kind = RUN_NAMES[config.optimizer]
    location = Location("--optimizer-params")
    given = key_values(location, config.optimizer_params, "nesterov=true, etas=0.5,1.2", diagnostics)
    if kind == "AdamW":
        switch = {DECOUPLED: given.pop(DECOUPLED, AUTO)}
        if read_params(location, OPTIMIZERS["Adam"].params, switch, diagnostics).get(DECOUPLED) is False:
            kind = "Adam"
    optimizer, own = OPTIMIZERS[kind], run_settings(kind)
    for name in own.keys() & given.keys():
        rule = f"{name} has a setting of its own"
        diagnostics.problems.append(Problem(location.key(name).quote(given.pop(name)), rule, _flags(own[name])))
    numbers = {
        "adam_beta1": config.adam_beta1,
        "adam_beta2": config.adam_beta2,
        "adam_eps": config.adam_eps,
        "lion_beta1": config.lion_beta1,
        "lion_beta2": config.lion_beta2,
        "sgd_momentum": config.sgd_momentum,
        "weight_decay": config.weight_decay,
    }
    if config.weight_decay_incr_style != "constant":  # the groups that decay are those that do at the end
        numbers["weight_decay"] = config.end_weight_decay or 0.0
    others = {name: info for name, info in optimizer.params.items() if name not in own}
    values = defaults_of(others) | read_params(location, others, given, diagnostics)
    for name, settings in own.items():
        both = tuple(numbers[setting] for setting in settings)
        values[name] = both if optimizer.params[name].kind == "pair" else both[0]
    diagnostics.problems.extend(optimizer_conflicts(location, values, momentum="--sgd-momentum 0.9"))
    groups = choose_param_groups(Location("--param-groups"), config.param_groups, kind, diagnostics)
    if groups and config.decoupled_lr is not None:
        rule = "param groups have rates of their own, also of the word embedding and the head"
        conflict = f"--decoupled-lr {config.decoupled_lr:g} with --param-groups"
        legal = f'--param-groups "embedding.word.* lr={config.decoupled_lr:g}"'
        diagnostics.problems.append(Problem(conflict, rule, legal))
    return OptimizerChoice(type=kind, lr=config.lr, params=values, param_groups=groups)


def _flags(settings: Iterable[str]) -> str:
    return " ".join(f"--{name.replace('_', '-')}" for name in settings)


def sweep_for_run(config: OptimizerConfig, diagnostics: Diagnostics) -> dict[str, Any]:
    """Return the parameters of a run's LRRangeTest or OneCycle, none of other styles; problems go to `diagnostics`."""
    rates = {"lr": config.lr, "min_lr": config.min_lr}
    return choose_sweep(config.lr_decay_style, config.lr_decay_params, rates, diagnostics)
