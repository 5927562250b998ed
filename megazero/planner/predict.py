"""The time of a planned job: its dry ranks' events on a machine, and what they mean for the training."""

from megazero.config import derived
from megazero.planner.forecast import Forecast
from megazero.planner.job_plan import Plan
from megazero.planner.seconds import step_time
from megazero.report.metrics import flops_per_token
from megazero.train.pipeline_stages import stage_plan

_COMPILING = ("on", "max", "auto")


def forecast_of(plan: Plan, *, total_tokens: int | None = None, draws: bool = False) -> Forecast:
    """Return the forecast of a planned job.

    total_tokens: of the training; by default those that the run itself trains on.  draws: its stages have spans.
    """
    config, job, hardware, trace = plan.job.config, plan.job, plan.hardware, plan.trace

    def order(stage: int) -> list[tuple[str, int, int]]:
        actions = stage_plan(config, stage).step(trace.micro_batches).actions
        return [(each.kind.value, each.micro_batch, each.chunk) for each in actions if each.kind.is_computation]

    fuses = hardware.device == "cuda" and config.training.compile in _COMPILING
    steps = derived.run_length(config, job.world_size).steps
    trained = steps - sum(len(range(span.start, min(span.stop, steps + 1))) for span in derived.untrained_steps(config))
    return Forecast(
        step=step_time(trace, hardware, order, fuses=fuses, draws=draws),
        hardware=hardware,
        devices=job.world_size,
        tokens=trace.tokens,
        flops=flops_per_token(config.model, vocab_size=job.vocab_size),
        precision=config.precision.precision,
        total_tokens=trained * trace.tokens if total_tokens is None else total_tokens,
    )
