"""Defines the components of a run that compute, which `build` makes and everything else of a run is given."""

from dataclasses import dataclass

from megazero.activations.recompute_plan import ActivationPlan
from megazero.comm.mesh import Mesh
from megazero.memory.fused_buffers import FusedBuffers
from megazero.model.gpt import GPT
from megazero.pipeline.stage_plan import StagePlan
from megazero.pipeline.trace import AnyTrace
from megazero.tensor_parallel.deferred import DeferredGradients
from megazero.tensor_parallel.float8_scales import DelayedScales
from megazero.tensor_parallel.float8_weights import QuantisedWeights
from megazero.tensor_parallel.random import RandomRegions
from megazero.timers import Timers
from megazero.train.attention_kernel import KernelChoice
from megazero.zero.engine import Engine


@dataclass(frozen=True)
class RunComponents:
    """The components of a rank that compute, without data, schedule of learning rates, and reports.

    random: the random states of dropout.  activations: which activations are recomputed, and where checkpoints lie.
    plan: the schedule of the pipeline stage.  deferred: the store for weight gradients that the schedule computes
    later, None if it does not.  trace: the timeline of its steps.  attention: the kernel that computes attention.
    compiled: a description of what torch compiles.  weights: their 8-bit form of a step, None where there is none.
    scales: those of delayed scaling, None where 8-bit products find their scales themselves.
    """

    mesh: Mesh
    model: GPT
    engine: Engine
    random: RandomRegions
    activations: ActivationPlan
    timers: Timers
    buffers: FusedBuffers
    plan: StagePlan
    deferred: DeferredGradients | None
    trace: AnyTrace
    attention: KernelChoice
    compiled: str | None = None
    weights: QuantisedWeights | None = None
    scales: DelayedScales | None = None
