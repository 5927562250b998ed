"""Rules between the settings of recomputation and those of the model; `rules.check` tries them."""

from collections.abc import Iterator

from megazero.config.run import RunConfig
from megazero.errors import Problem


def recomputed_layers_exist(config: RunConfig, world_size: int) -> Iterator[Problem]:
    count, layers = config.activations.recompute_num_layers, config.model.num_layers
    if count is not None and count > layers:
        yield Problem(
            f"--recompute-num-layers {count} --num-layers {layers}",
            "layers that are recomputed are layers of the model: recompute_num_layers is at most num_layers",
            f"--recompute-num-layers {layers}, --num-layers {count}",
        )


def what_decides_can_be_planned(config: RunConfig, world_size: int) -> Iterator[Problem]:
    names = ("recompute_granularity", "partition_activations", "checkpoint_in_cpu")
    automatic = [f"--{name.replace('_', '-')} auto" for name in names if getattr(config.activations, name) == "auto"]
    in_files = [
        f"--{name.replace('_', '-')} nvme"
        for name in ("offload_optimizer", "offload_param")
        if getattr(config.zero, name) == "nvme"
    ]
    if automatic and in_files:
        rule = "auto is decided by a plan of the run, which runs no states in files yet"
        yield Problem(f"{automatic[0]} with {in_files[0]}", rule, f"{automatic[0].removesuffix('auto')}VALUE")


RULES = (recomputed_layers_exist, what_decides_can_be_planned)
