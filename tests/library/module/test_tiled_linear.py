"""Tests tiles against the whole linear layer, the sizes of their temporary tensors, and partitioned parameters."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from support.each import each
from support.irregular_model import engine_around, take_step
from support.late_copies import late_copies
from support.processes import mesh_in_worker, run_ranks
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from megazero.errors import ConfigError
from megazero.library.module.tiled_linear import TiledLinear
from megazero.library.state.access import safe_get_full_grad
from megazero.zero.parameters.gathered import GatheredParameters
from megazero.zero.parameters.guard import attach_handle, guard, unguard

IN, OUT = 13, 11


def whole(inputs: int = IN, outputs: int = OUT, *, bias: bool = True) -> nn.Linear:
    torch.manual_seed(3)
    return nn.Linear(inputs, outputs, bias=bias, dtype=torch.float64)


def tiled(linear: nn.Linear, **options: Any) -> TiledLinear:
    bias = linear.bias is not None
    options.setdefault("dtype", torch.float64)
    return TiledLinear(linear.in_features, linear.out_features, bias, init_linear=linear, **options)


def batch(inputs: int = IN, *shape: int) -> Tensor:
    x = torch.randn(*(shape or (2, 3)), inputs, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    return x.requires_grad_(True)


def weight_gradient(layer: TiledLinear) -> Tensor:
    """Return the tiles' weight gradients, joined to the gradient of the whole layer."""
    return torch.cat([torch.cat([tile.weight.grad for tile in row], dim=1) for row in layer.linears])


def bias_gradient(layer: TiledLinear) -> Tensor:
    return torch.cat([row[-1].bias.grad for row in layer.linears])


def assert_close(ours: Tensor | None, theirs: Tensor | None) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@each("bias", [True, False])
@each(("in_splits", "out_splits"), [(1, 1), (2, 1), (1, 4), (3, 2), (5, 4), (IN, OUT)])
def test_equals_the_whole_layer(in_splits: int, out_splits: int, bias: bool) -> None:
    linear = whole(bias=bias)
    layer = tiled(linear, in_splits=in_splits, out_splits=out_splits)
    x, twin = batch(), batch()
    y, expected = layer(x), linear(twin)
    assert_close(y, expected)
    (y * torch.arange(OUT)).sum().backward()
    (expected * torch.arange(OUT)).sum().backward()
    assert_close(x.grad, twin.grad)
    assert_close(weight_gradient(layer), linear.weight.grad)
    if bias:
        assert_close(bias_gradient(layer), linear.bias.grad)


@pytest.mark.parametrize("shape", [(), (0,), (5,)])
def test_any_number_of_dims(shape: tuple[int, ...]) -> None:
    linear = whole()
    x = torch.randn(*shape, IN, dtype=torch.float64)
    assert_close(tiled(linear, in_splits=2, out_splits=3)(x), linear(x))


def test_first_parts_are_larger_and_each_output_has_one_bias() -> None:
    layer = TiledLinear(13, 11, in_splits=3, out_splits=2)
    assert {name: tuple(p.shape) for name, p in layer.named_parameters()} == {
        "linears.0.0.weight": (6, 5),
        "linears.0.1.weight": (6, 4),
        "linears.0.2.weight": (6, 4),
        "linears.0.2.bias": (6,),
        "linears.1.0.weight": (5, 5),
        "linears.1.1.weight": (5, 4),
        "linears.1.2.weight": (5, 4),
        "linears.1.2.bias": (5,),
    }


@pytest.mark.parametrize("in_splits", [1, 3])
def test_input_in_parts(in_splits: int) -> None:
    linear = whole()
    layer = tiled(linear, in_splits=in_splits, out_splits=2, input_is_already_split=True)
    x = batch()
    parts = torch.split(x, [tile.in_features for tile in layer.linears[0]], dim=-1)
    assert_close(layer(list(parts)), linear(x))
    if in_splits == 1:
        assert_close(layer(x), linear(x))


def test_output_in_parts() -> None:
    linear = whole()
    parts = tiled(linear, in_splits=2, out_splits=3, combine_out_splits=False)(batch())
    assert isinstance(parts, list) and [part.shape for part in parts] == [(2, 3, 4), (2, 3, 4), (2, 3, 3)]
    assert_close(torch.cat(parts, dim=-1), linear(batch()))
    (only,) = tiled(linear, in_splits=2, combine_out_splits=False)(batch())
    assert_close(only, linear(batch()))


def test_one_layers_parts_go_into_the_next() -> None:
    first, second = whole(), whole(OUT, 5)
    wide = tiled(first, out_splits=3, combine_out_splits=False)
    narrow = tiled(second, in_splits=3, input_is_already_split=True)
    assert_close(narrow(wide(batch())), second(first(batch())))


class Scaled(nn.Linear):
    """A linear layer with a constructor argument of its own, a scale."""

    def __init__(self, inputs: int, outputs: int, bias: bool, *, scale: float, dtype: torch.dtype) -> None:
        super().__init__(inputs, outputs, bias=bias, dtype=dtype)
        self.scale = scale

    def forward(self, input: Tensor) -> Tensor:
        return self.scale * super().forward(input)


def test_tiles_of_another_class() -> None:
    linear = whole()
    layer = tiled(linear, in_splits=2, out_splits=2, linear_cls=Scaled, scale=3.0)
    assert_close(layer(batch()), 3.0 * linear(batch()))


def test_copy_later() -> None:
    linear = whole()
    layer = TiledLinear(IN, OUT, True, 2, 2, dtype=torch.float64)
    before = layer(batch())
    layer.copy_params_from(linear)
    assert not torch.allclose(layer(batch()), before)
    assert_close(layer(batch()), linear(batch()))
    assert all(p.requires_grad and p.is_leaf for p in layer.parameters())


class Sizes(TorchDispatchMode):
    """A mode that records the shapes of all tensors that operations make, in forward and in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: set[torch.Size] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for made in result if isinstance(result, (list, tuple)) else [result]:
            if isinstance(made, Tensor):
                self.shapes.add(made.shape)
        return result


def shapes_of_a_step(layer: nn.Module, x: Tensor) -> set[torch.Size]:
    with Sizes() as sizes:
        y = layer(x)
        for part in y if isinstance(y, list) else [y]:
            part.backward(torch.ones_like(part), retain_graph=True)
    return sizes.shapes


@each(("in_splits", "out_splits"), [(1, 1), (2, 1), (4, 2), (4, 5)])
def test_working_memory_shrinks_with_the_tiles(in_splits: int, out_splits: int) -> None:
    """No tensor of a step is larger than a tile's weight, down to 1 / (in_splits * out_splits) of the whole weight."""
    layer = TiledLinear(48, 40, in_splits=in_splits, out_splits=out_splits)
    tile = 48 * 40 // (in_splits * out_splits)
    assert max(p.numel() for p in layer.parameters()) == tile
    shapes = shapes_of_a_step(layer, torch.randn(2, 48))
    assert max(shape.numel() for shape in shapes) == tile


def test_output_is_never_whole_unless_asked_for() -> None:
    linear = whole(48, 40)
    x = torch.randn(3, 7, 48, dtype=torch.float64)
    apart = tiled(linear, in_splits=3, out_splits=4, combine_out_splits=False)
    assert all(40 not in shape for shape in shapes_of_a_step(apart, x))
    combined = tiled(linear, in_splits=3, out_splits=4)
    assert (3, 7, 40) in shapes_of_a_step(combined, x)


class Keeper:
    """An owner that keeps parameters' values elsewhere, as an engine does; `held` counts the elements gathered now."""

    def __init__(self, module: nn.Module, rank: int) -> None:
        self.parameters = dict(module.named_parameters())
        self.values = {name: p.detach().clone() for name, p in self.parameters.items()}
        self.rank = rank
        self.held = self.most_held = 0
        for name, parameter in self.parameters.items():
            attach_handle(parameter, name, self)
            self.take(name)

    def take(self, name: str) -> None:
        self.parameters[name].data.fill_(torch.nan)
        guard(self.parameters[name])

    def check_unchanged(self, names: Iterable[str]) -> None:
        """Do nothing, as an engine whose configuration does not check that."""

    def lists_partitioned(self) -> bool:
        return False

    def touched(self, name: str, call: str) -> None:
        raise AssertionError(f"{name} was touched by {call}")

    def gather(self, names: Iterable[str], why: str, *, is_modified: bool) -> None:
        for name in names:
            unguard(self.parameters[name])
            self.parameters[name].data.copy_(self.values[name])
            self.held += self.values[name].numel()
        self.most_held = max(self.most_held, self.held)

    def release(self, names: Iterable[str], *, modifier_rank: int | None) -> None:
        for name in names:
            if modifier_rank == self.rank:
                self.values[name].copy_(self.parameters[name].detach())
            self.held -= self.values[name].numel()
            self.take(name)

    def register_external(self, module: nn.Module, name: str) -> None:
        raise AssertionError("nothing here is external")


@pytest.mark.parametrize("rank", [0, 1])
def test_copying_gathers_partitioned_parameters_tile_by_tile(rank: int) -> None:
    """Both layers are partitioned; rank 0's values count, and the other rank does not change its own."""
    linear = whole()
    layer = TiledLinear(IN, OUT, in_splits=3, out_splits=2, dtype=torch.float64)
    tiles, source = Keeper(layer, rank), Keeper(linear, rank)
    before = {name: value.clone() for name, value in tiles.values.items()}
    weight, bias = source.values["weight"].clone(), source.values["bias"].clone()
    layer.copy_params_from(linear)
    assert (tiles.held, source.held) == (0, 0)
    assert tiles.most_held == 6 * 5 and source.most_held == OUT * IN + OUT
    assert torch.equal(source.values["weight"], weight)
    if rank == 0:
        assert torch.equal(tiles.values["linears.1.1.weight"], weight[6:, 5:9])
        assert torch.equal(tiles.values["linears.1.2.bias"], bias[6:])
    else:
        assert all(torch.equal(value, before[name]) for name, value in tiles.values.items())


@pytest.mark.parametrize(
    ("splits", "given"),
    [
        ({"in_splits": 0}, ["TiledLinear(in_splits=0) of in_features=13"]),
        ({"out_splits": 12}, ["TiledLinear(out_splits=12) of out_features=11"]),
        (
            {"in_splits": 14, "out_splits": -1},
            ["TiledLinear(in_splits=14) of in_features=13", "TiledLinear(out_splits=-1) of out_features=11"],
        ),
    ],
)
def test_splits_out_of_range(splits: dict[str, int], given: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        TiledLinear(IN, OUT, **splits)
    assert [problem.given for problem in caught.value.problems] == given


@each(
    ("already_split", "widths"),
    [(True, [7]), (True, [6, 7]), (True, [7, 6, 1]), (False, [7, 6]), (True, []), (False, [])],
)
def test_inputs_in_the_wrong_form(already_split: bool, widths: list[int]) -> None:
    """An input is refused if it is one tensor instead of parts, or the reverse, or has wrong widths."""
    layer = TiledLinear(IN, OUT, in_splits=2, input_is_already_split=already_split)
    x = [torch.zeros(2, width) for width in widths] or torch.zeros(2, IN if already_split else IN + 1)
    with pytest.raises(ConfigError) as caught:
        layer(x)
    (problem,) = caught.value.problems
    assert "[.., 7], [.., 6]" in problem.legal if already_split else problem.legal == "a tensor [.., 13]"


def test_layers_of_another_size_are_not_copied() -> None:
    layer = TiledLinear(IN, OUT, False, in_splits=2)
    with pytest.raises(ConfigError) as caught:
        layer.copy_params_from(whole(OUT, IN))
    assert [problem.given for problem in caught.value.problems] == [
        "a weight of shape [13, 11] to copy into TiledLinear",
        "a layer with bias to copy into TiledLinear",
    ]
    with pytest.raises(ConfigError, match="without bias"):
        TiledLinear(IN, OUT, True, init_linear=whole(bias=False))


def test_shows_what_it_is() -> None:
    shown = repr(TiledLinear(IN, OUT, in_splits=3, out_splits=2))
    assert "in_features=13, out_features=11, bias=True, in_splits=3, out_splits=2" in shown


class Step(NamedTuple):
    """The outcome of a training step of a model that is one wide layer."""

    loss: float
    most_gathered: int
    gradient: Tensor
    weights: list[Tensor]


def tiles_under_stage_3(rank: int, splits: int, **zero: Any) -> Step:
    """Take a step of a model whose layer has so many tiles each way; the gradient is that of its first tile."""
    torch.manual_seed(8)
    plain = nn.Linear(24, 40, dtype=torch.float64)
    model = nn.Sequential(TiledLinear(24, 40, in_splits=splits, out_splits=splits, init_linear=plain).double())
    engine = engine_around(model, mesh_in_worker(rank, dp=2), prefetch_bucket_size=0, **zero)
    x = torch.randn(4, 24, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
    engine.begin_step()
    loss = torch.tanh(model(x)).square().sum()
    engine.backward(loss, is_last=True)
    engine.finish_reductions()
    gradient, most_gathered = safe_get_full_grad(model[0].linears[0][0].weight), engine.gathered_numel[1]
    assert gradient is not None
    take_step(engine)
    with GatheredParameters(model):
        weights = [parameter.detach().clone() for parameter in model.parameters()]
    engine.close()
    return Step(loss.item(), most_gathered, gradient, weights)


@pytest.mark.gloo
def test_under_stage_3_a_tile_is_gathered_at_a_time() -> None:
    (whole, _), (tiles, _) = (run_ranks(2, tiles_under_stage_3, splits) for splits in (1, 4))
    assert tiles.loss == pytest.approx(whole.loss, rel=1e-12)
    torch.testing.assert_close(tiles.gradient, whole.gradient[:10, :6], rtol=1e-12, atol=1e-12)
    assert whole.most_gathered >= 24 * 40
    assert tiles.most_gathered < whole.most_gathered / 8, "a sixteenth, and padding"


def tiles_at_home(rank: int, folder: Path) -> list[Step]:
    """Return the steps of tiles whose states are on the device, in host memory and in files."""
    moved = [{"offload_optimizer": home, "offload_param": home} for home in ("cpu", "nvme")]
    with late_copies():
        return [tiles_under_stage_3(rank, 4, **zero, nvme_path=folder) for zero in ({}, *moved)]


@pytest.mark.gloo
def test_a_home_changes_no_bit_of_the_tiles(tmp_path: Path) -> None:
    for plain, *moved in run_ranks(2, tiles_at_home, tmp_path):
        for step in moved:
            assert (step.loss, step.most_gathered) == (plain.loss, plain.most_gathered)
            assert torch.equal(step.gradient, plain.gradient)
            assert all(map(torch.equal, step.weights, plain.weights))
