"""The kept gradients of one step of a tiny GPT on the engine, beside what the plain twin's autograd finds.

Whatever memory a gradient goes through is full of nan before: a place that is taken for a sum too early shows.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from support import reference
from support.models import CPU, build_gpt, context, put_logical
from support.processes import mesh_in_worker
from support.reference import Weights
from support.small_runs import VOCAB, reference_batch, tiny_run
from torch import Tensor

from megazero.config.run import RunConfig
from megazero.memory.arena_scratch import ArenaScratch
from megazero.memory.fused_buffers import FusedBuffers
from megazero.model.gpt import GPT
from megazero.optim.inner import AdamWSettings, FusedAdamW
from megazero.parallel.param_spec import named_specs
from megazero.tensor_parallel.layers import TensorParallel
from megazero.tensor_parallel.onednn import fastest_products
from megazero.tensor_parallel.random import RandomRegions
from megazero.zero.engine import Engine, EngineSettings
from megazero.zero.plan import DTYPES, resolve

MICRO_BATCH = 3  # times 8 positions: activations have another shape than any weight
Kept = dict[str, tuple[Tensor, Tensor]]
Around = Callable[[int], AbstractContextManager[Any]]


class Placed(NamedTuple):
    """A model on an engine, on one rank of `dp`."""

    model: GPT
    engine: Engine
    rank: int
    dp: int
    accumulation: int

    def loss(self, micro: int) -> Tensor:
        """This rank's share of the mean over the step's positions."""
        batch = reference_batch((micro * self.dp + self.rank) * MICRO_BATCH, MICRO_BATCH, masked=False)
        positions = batch.labels.numel() * self.dp * self.accumulation
        return self.model.summed_loss(batch.tokens, batch.labels) / positions

    def step(self, around: Around = lambda _: nullcontext(), extra: Callable[[], Tensor] | None = None) -> Kept:
        """All of a step up to its reduced gradients.

        around(micro-batch) is entered for its passes; extra() is added to its loss.
        """
        with lent_memory_is_nan():
            for flat in self.engine._shards._resident_gradients.values():
                flat.fill_(torch.nan)
            self.engine.begin_step()
            for micro in range(self.accumulation):
                with around(micro):
                    loss = self.loss(micro)
                    loss = loss if extra is None else loss + extra()
                    self.engine.backward(loss, is_last=micro == self.accumulation - 1)
            self.engine.finish_reductions()
        return self._kept()

    def _kept(self) -> Kept:
        """By name: the reduced gradient in float64, in its logical shape, and which of its elements this rank keeps."""
        found = {}
        for spec, parameter in named_specs(self.model):
            if parameter.requires_grad:
                values, here = torch.zeros(spec.numel).double(), torch.zeros(spec.numel, dtype=torch.bool)
                for piece in self.engine.pieces(spec.name, "gradient"):
                    values[piece.start : piece.stop] = piece.tensor.double()
                    here[piece.start : piece.stop] = True
                found[spec.name] = (values.view(spec.full_shape), here.view(spec.full_shape))
        return found


def small_run(**settings: Any) -> RunConfig:
    """The tiny run with larger micro-batches, and buckets that some weights fit into and others don't."""
    return tiny_run(**{"reduce_bucket_size": 900, "micro_batch_size": MICRO_BATCH, **settings})


def placed(rank: int, config: RunConfig, *, dp: int = 1, accumulation: int = 1, frozen: Sequence[str] = ()) -> Placed:
    """The run's GPT with `first_weights`, on an engine of its settings."""
    dtype = DTYPES[config.precision.precision]
    mesh, products = mesh_in_worker(rank, dp=dp), fastest_products(CPU, dtype)
    random = RandomRegions(config.training.seed, 0, CPU)
    tp = TensorParallel(mesh.axis("tp"), random, dtype, CPU, products=products, head_products=products)
    model = build_gpt(config.model, tp, vocab_size=VOCAB)
    put_logical(model, first_weights(config))
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    settings = EngineSettings(config.zero, FusedAdamW(AdamWSettings(0.9, 0.95, 1e-8, 0.1)))
    plan, buffers = resolve(config.zero, config.precision), FusedBuffers(0, CPU)
    engine = Engine(model, model.units(), plan, mesh=mesh, buffers=buffers, settings=settings)
    buffers.resize(engine.largest_buffer_bytes)
    return Placed(model, engine, rank, dp, accumulation)


def first_weights(config: RunConfig) -> Weights:
    """Drawn values, of biases too, as the run's precision holds them."""
    generator = torch.Generator().manual_seed(5)
    specs = [spec for spec, _ in named_specs(build_gpt(config.model, context(), vocab_size=VOCAB))]
    drawn = {spec.name: torch.randn(spec.full_shape, generator=generator, dtype=torch.float64) for spec in specs}
    dtype = DTYPES[config.precision.precision]
    return {name: (value * 0.2).to(dtype).double() for name, value in drawn.items()}


def plain_gradients(weights: Weights, first: int, num_samples: int) -> Weights:
    """The plain twin's, of the mean loss over some samples."""
    live = {name: value.clone().requires_grad_(True) for name, value in weights.items()}
    return reference.gradients(reference.mean_loss(live, reference_batch(first, num_samples, masked=False)), live)


def whole_gradients(ranks: Sequence[Kept]) -> Weights:
    """Gradients from what all ranks keep; those kept twice must be the same, and nothing may be missing."""
    whole = {}
    for name, (first, _) in ranks[0].items():
        values, seen = torch.zeros_like(first), torch.zeros(first.shape, dtype=torch.bool)
        for found, here in (rank[name] for rank in ranks):
            both = seen & here
            assert torch.equal(values[both], found[both]), f"ranks disagree about {name}"
            values[here] = found[here]
            seen |= here
        assert bool(seen.all()), f"nobody keeps all of {name}"
        whole[name] = values
    return whole


def assert_equal(found: Weights, expected: Weights, tolerance: float) -> None:
    """The largest error of each gradient is within `tolerance` times its largest element."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        error, largest = (found[name] - value).abs().max(), value.abs().max()
        assert error <= tolerance * largest, f"{name} is off by {error:.3g} where the largest is {largest:.3g}"


@contextmanager
def lent_memory_is_nan() -> Iterator[None]:
    """Whatever is lent for buckets, from a pool or an arena, is full of nan."""
    lend = {kind: kind.lease for kind in (FusedBuffers, ArenaScratch)}

    def poisoned(kind: Any) -> Callable[..., Any]:
        def lease(self: Any, numel: int, dtype: torch.dtype) -> Any:
            lent = lend[kind](self, numel, dtype)
            lent.tensor.fill_(torch.nan)
            return lent

        return lease

    pool = patch.object(FusedBuffers, "lease", poisoned(FusedBuffers))
    with pool, patch.object(ArenaScratch, "lease", poisoned(ArenaScratch)):
        yield
