"""Compares the gradients that ranks keep after a step of a tiny GPT on the engine with those of the plain reference.

All memory that a gradient goes through is filled with nan before the step, so that adding to it before it has been
written gives nan.
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
    """A model on an engine, on one rank of `dp`; a step has `accumulation` micro-batches."""

    model: GPT
    engine: Engine
    rank: int
    dp: int
    accumulation: int

    def loss(self, micro: int) -> Tensor:
        """Return what a micro-batch of this rank adds to the mean loss over all positions of the step."""
        batch = reference_batch((micro * self.dp + self.rank) * MICRO_BATCH, MICRO_BATCH, masked=False)
        positions = batch.labels.numel() * self.dp * self.accumulation
        return self.model.summed_loss(batch.tokens, batch.labels) / positions

    def step(self, around: Around = lambda _: nullcontext(), extra: Callable[[], Tensor] | None = None) -> Kept:
        """Run a step up to its reduced gradients, and return those that this rank keeps.

        around(micro) is the context of a micro-batch's forward and backward; extra() is added to its loss.
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
        """Return by name the reduced gradient (float64, full logical shape) and a mask of the elements kept here."""
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
    """Return the tiny run with larger micro-batches, and buckets that some weights fit into and others do not."""
    return tiny_run(**{"reduce_bucket_size": 900, "micro_batch_size": MICRO_BATCH, **settings})


def placed(rank: int, config: RunConfig, *, dp: int = 1, accumulation: int = 1, frozen: Sequence[str] = ()) -> Placed:
    """Build the run's GPT with `first_weights`, on an engine with the run's settings."""
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
    """Return random float64 weights, of biases too, rounded to the run's precision."""
    generator = torch.Generator().manual_seed(5)
    specs = [spec for spec, _ in named_specs(build_gpt(config.model, context(), vocab_size=VOCAB))]
    drawn = {spec.name: torch.randn(spec.full_shape, generator=generator, dtype=torch.float64) for spec in specs}
    dtype = DTYPES[config.precision.precision]
    return {name: (value * 0.2).to(dtype).double() for name, value in drawn.items()}


def plain_gradients(weights: Weights, first: int, num_samples: int) -> Weights:
    """Return the reference's gradients of the mean loss over `num_samples` samples."""
    live = {name: value.clone().requires_grad_(True) for name, value in weights.items()}
    return reference.gradients(reference.mean_loss(live, reference_batch(first, num_samples, masked=False)), live)


def whole_gradients(ranks: Sequence[Kept]) -> Weights:
    """Assemble full gradients from all ranks; elements kept twice must be the same, and none may be missing."""
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
    """Assert that the largest error of each gradient is at most `tolerance` times its largest element."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        error, largest = (found[name] - value).abs().max(), value.abs().max()
        assert error <= tolerance * largest, f"{name} is off by {error:.3g} where the largest is {largest:.3g}"


@contextmanager
def lent_memory_is_nan() -> Iterator[None]:
    """Fill every lease of the buffer pool and of the arena's scratch with nan, inside the block."""
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
