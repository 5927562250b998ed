"""The engine: wires layout, shards, reduction, update and publishing around a module, for every ZeRO stage.

A step is: `begin_step`, then for every micro-batch `backward` (its reductions run beside it), `finish_reductions`,
`local_norms` (the caller sums them over ranks and derives the factor), `update`.  Which stage it is shows nowhere but
in the plan.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor, nn

from megazero.comm.interface import Scratch
from megazero.comm.mesh import Mesh
from megazero.optim.inner import AdamWSettings, StepInputs
from megazero.parallel.param_spec import StateFragment, named_specs
from megazero.zero.gather import ParameterGather
from megazero.zero.hooks import before_forward, on_gradient
from megazero.zero.layout import Bucket, FlatLayout, Fragment, LayoutRules, Range, Unit, build_layout
from megazero.zero.plan import ModelStateBytes, ZeroPlan
from megazero.zero.reduce import GradientReducer
from megazero.zero.shards import Shards
from megazero.zero.update import LocalNorms, ShardUpdate


class ModelUnit(NamedTuple):
    """A unit of the model: its parameters by name, and the module whose forward reads them first."""

    name: str
    parameters: tuple[str, ...]
    consumer: nn.Module


@dataclass(frozen=True)
class EngineSettings:
    """reduce_bucket_numel in elements; overlap: whether reductions run beside backward."""

    reduce_bucket_numel: int
    overlap: bool
    adamw: AdamWSettings


def plan_layout(model: nn.Module, units: Sequence[ModelUnit], partitions: int, reduce_bucket_numel: int) -> FlatLayout:
    """The flat layout of a model's parameters over `partitions` ranks."""
    specs = ((spec, parameter.dtype) for spec, parameter in named_specs(model))
    plain = [Unit(unit.name, unit.parameters) for unit in units]
    return build_layout(plain, specs, LayoutRules(partitions, reduce_bucket_numel))


class Engine:
    """ZeRO data parallelism around `model`, whose parameters become views of the engine's flat tensors."""

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[ModelUnit],
        plan: ZeroPlan,
        *,
        mesh: Mesh,
        buffers: Scratch,
        settings: EngineSettings,
    ) -> None:
        self.model = model
        self.plan = plan
        self.settings = settings
        axis = mesh.axis("dp")
        parameters = dict(model.named_parameters())
        self.layout = plan_layout(model, units, axis.size, settings.reduce_bucket_numel)
        self._shards = Shards(plan, self.layout, axis.rank, parameters=parameters)
        self._reducer = GradientReducer(self._shards, axis, buffers, parameters, overlap=settings.overlap)
        self._gather = ParameterGather(self._shards, axis)
        self._coordinates = {"tp": mesh.coordinate("tp")}
        self._update = ShardUpdate(self._shards, self._gather, buffers, counted_at=self._coordinates)
        self._hooks = on_gradient(parameters, self._reducer.gradient_ready)
        self._hooks += before_forward([(unit.name, unit.consumer) for unit in units], self._gather.ensure)

    def begin_step(self) -> None:
        """Nothing is accumulated any more."""
        self._reducer.begin_step()

    def backward(self, loss: Tensor, *, is_last: bool) -> None:
        """Backward of one micro-batch; `is_last` marks the accumulation boundary.

        loss must already be divided by the step's number of tokens over all ranks: gradients are summed, not averaged.
        """
        self._reducer.begin_micro_batch(is_last=is_last)
        loss.backward()  # type: ignore[no-untyped-call]
        self._reducer.end_micro_batch()

    def finish_reductions(self) -> None:
        """Return when every gradient this rank keeps is reduced."""
        self._reducer.finish()

    def local_norms(self) -> LocalNorms:
        """This rank's share of the gradient norm and of the overflow check."""
        return self._update.local_norms()

    def update(self, inputs: StepInputs) -> None:
        """Optimizer step on the owned ranges, and publishing, which ends just before each unit's next use."""
        self._update.apply(self.settings.adamw, inputs)

    def ensure_parameters(self) -> None:
        """Return when every working parameter may be read outside a forward."""
        self._gather.ensure_all()

    def parameter_name(self, index: int) -> str:
        """The parameter that `LocalNorms.first_overflow` means."""
        return self._update.parameter_names[index]

    @property
    def optimizer_step(self) -> Tensor:
        """Number of optimizer steps taken, float32, no dimensions."""
        return self._shards.optimizer_step

    def model_state_bytes(self) -> ModelStateBytes:
        """Bytes of model states this rank really holds."""
        return self._shards.model_state_bytes()

    def owned_state(self) -> Iterator[StateFragment]:
        """What this rank saves: over all ranks, every element of every parameter and kind exactly once."""
        for bucket, fragment in self._fragments_to_save():
            if fragment.spec.is_counted_on(self._coordinates):
                yield from self._state_of(bucket, fragment)

    def wanted_state(self) -> Iterator[StateFragment]:
        """What this rank must be given to go on from a checkpoint; follow with `state_loaded`."""
        for section in self.layout.sections:
            for bucket in section.buckets:
                kept = self._shards.owned(bucket) if section.trainable else bucket.range
                for fragment in section.fragments(kept):
                    yield from self._state_of(bucket, fragment)

    def state_loaded(self) -> None:
        """Make working parameters follow what has been written into `wanted_state`."""
        self._shards.copy_master_to_working()
        self._update.publish_all()
        self.ensure_parameters()

    def weights_loaded(self) -> None:
        """Make master weights follow what has been written into the module's parameters (initial values, say)."""
        self._shards.copy_working_to_master()

    def close(self) -> None:
        """Take the hooks off the module."""
        self.ensure_parameters()
        for handle in self._hooks:
            handle.remove()

    def _fragments_to_save(self) -> Iterator[tuple[Bucket, Fragment]]:
        for section in self.layout.sections:
            for bucket in section.buckets:
                for fragment in section.fragments(self._shards.partition(bucket)):
                    yield bucket, fragment

    def _state_of(self, bucket: Bucket, fragment: Fragment) -> Iterator[StateFragment]:
        within = Range(fragment.section_start, fragment.section_start + fragment.numel)
        place = (fragment.start, fragment.stop)
        if not fragment.spec.trainable:
            yield StateFragment(fragment.spec, "weight", *place, self._shards.working(bucket, within))
            return
        yield StateFragment(fragment.spec, "weight", *place, self._shards.master(bucket, within))
        yield StateFragment(fragment.spec, "exp_avg", *place, self._shards.exp_avg(bucket, within))
        yield StateFragment(fragment.spec, "exp_avg_sq", *place, self._shards.exp_avg_sq(bucket, within))
