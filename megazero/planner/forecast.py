"""The figures that follow from a step's time: tokens a second, MFU, and a training's days and energy.  Pure."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megazero.planner.hardware import Hardware
from megazero.planner.seconds import StepTime

HOUR = 3600.0
_LEAST_SHOWN = 0.005  # of the shares of a step
# A unit of time is used from twice its length on, seconds from ten.
_UNITS = (("days", 86400.0, 2), ("hours", HOUR, 2), ("minutes", 60.0, 2), ("s", 1.0, 10), ("ms", 0.001, 0))
_LEAST_SHOWN = 0.005  # of the shares of a step


@dataclass(frozen=True)
class Band:
    """A figure, and the range in which it is expected to be two times out of three."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Forecast:
    """The forecast of a training of `devices` devices.

    step: its predicted times.  tokens: of one step, of all devices.  total_tokens: of the training, 0 if not given.
    flops: of a token, in the mathematics of the model (`report.metrics.flops_per_token`).  precision: the number format
    of its products.  unit: what is counted where the model has no tokens: "samples".
    """

    step: StepTime
    hardware: Hardware
    devices: int
    tokens: int
    flops: int
    precision: str
    total_tokens: int = 0
    unit: str = "tokens"

    @property
    def step_seconds(self) -> Band:
        return self._band(self.step.seconds)

    @property
    def tokens_per_second(self) -> Band:
        return self._band(self.tokens / self.step.seconds)

    @property
    def tflops_per_device(self) -> Band:
        return self._band(self.tokens / self.step.seconds * self.flops / self.devices / 1e12)

    @property
    def mfu(self) -> Band:
        """Model FLOPs by the peak of all devices."""
        found, peak = self.tflops_per_device, self.hardware.peak(self.precision) / 1e12
        return Band(*(min(figure / peak, 1.0) for figure in (found.value, found.low, found.high)))

    @property
    def seconds(self) -> Band:
        """The seconds of the whole training, in steps alone."""
        return self._band(self.total_tokens / self.tokens * self.step.seconds)

    @property
    def device_hours(self) -> Band:
        return self._times(self.seconds, self.devices / HOUR)

    @property
    def kilowatt_hours(self) -> Band:
        """The energy of the whole training, at the watts that the machine takes at the most."""
        return self._times(self.device_hours, self.hardware.watts / 1000)

    def _band(self, value: float) -> Band:
        return Band(value, value / (1 + self.hardware.error), value * (1 + self.hardware.error))

    def _times(self, band: Band, factor: float) -> Band:
        return Band(band.value * factor, band.low * factor, band.high * factor)

    def to_json(self) -> dict[str, Any]:
        """Return all figures; each that is expected to be off has its range: [value, low, high]."""
        figures = {
            "step_seconds": self.step_seconds,
            f"{self.unit}_per_second": self.tokens_per_second,
            "tflops_per_device": self.tflops_per_device,
            "mfu": self.mfu,
        }
        training = {"seconds": self.seconds, "device_hours": self.device_hours, "kilowatt_hours": self.kilowatt_hours}
        figures |= training if self.total_tokens else {}
        found: dict[str, Any] = {name: [band.value, band.low, band.high] for name, band in figures.items()}
        whole = {self.unit: self.tokens, f"total_{self.unit}": self.total_tokens, "binding": self.step.binding}
        return {**found, **whole, "shares": self.step.shares(), "parts_seconds": self.step.parts()}

    def lines(self) -> Iterator[str]:
        """Yield the forecast as text, a figure a line."""
        error = f"{100 * self.hardware.error:.0f} %"
        yield f"machine          {self.hardware.name}, {self.devices} devices; {self.hardware.source}"
        yield f"step             {_seconds(self.step_seconds)} (error expected: {error})"
        yield f"{f'{self.unit}/s':<17}{_range(self.tokens_per_second)}"
        mfu, tflops = self.mfu, self.tflops_per_device
        between = f"{100 * mfu.low:.1f} to {100 * mfu.high:.1f}"
        yield f"TFLOP/s a device {_rounded(tflops.value)}, MFU {100 * mfu.value:.1f} % ({between})"
        shares = [(kind, share) for kind, share in self.step.shares().items() if share >= _LEAST_SHOWN]
        yield "the step is      " + ", ".join(f"{kind} {100 * share:.0f} %" for kind, share in shares)
        yield f"what binds       {self.step.binding}"
        if self.total_tokens:
            yield f"{self.total_tokens:,} {self.unit}: {_seconds(self.seconds)}"
            hours, energy = self.device_hours, self.kilowatt_hours
            yield f"device-hours     {_range(hours)}"
            if self.hardware.watts:
                yield f"energy, kWh      {_range(energy)}"


def _seconds(band: Band) -> str:
    """Return a duration in the unit that suits it: "23 days (18 to 29)"."""
    unit, factor = next((name, factor) for name, factor, least in _UNITS if band.value >= least * factor)
    value, low, high = (_rounded(figure / factor) for figure in (band.value, band.low, band.high))
    return f"{value} {unit} ({low} to {high})"


def _range(band: Band) -> str:
    return f"{_rounded(band.value)} ({_rounded(band.low)} to {_rounded(band.high)})"


def _rounded(figure: float) -> str:
    return f"{figure:,.0f}" if figure >= 100 else f"{figure:.3g}"
