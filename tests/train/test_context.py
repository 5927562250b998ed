"""Tests of the context that a run gives to its training steps."""

from support.small_runs import core_on_rank, tiny_run

from megazero.pipeline.stage_plan import StagePlan
from megazero.pipeline.trace import NO_TRACE
from megazero.train.build import step_context
from megazero.train.context import StepContext


def test_parts_of_a_run_on_one_rank() -> None:
    core = core_on_rank(0, tiny_run())
    parts = step_context(tiny_run(), core)
    assert parts.plan == StagePlan() and parts.deferred is None and parts.trace is NO_TRACE
    assert parts.model.activation_shape(24) == (24, 16) and parts.model.dtype == core.model.head._tp.dtype
    core.engine.close()


def test_plans_are_not_shared_by_default() -> None:
    core = core_on_rank(0, tiny_run())
    given = {
        name: getattr(step_context(tiny_run(), core), name) for name in ("engine", "model", "mesh", "dropout", "timers")
    }
    one, two = (StepContext(**given, clip_grad=0.0, checks_overflow=False) for _ in range(2))
    assert one.plan == two.plan and one.plan.steps is not two.plan.steps
    core.engine.close()
