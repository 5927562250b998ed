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


RULES = (recomputed_layers_exist,)
