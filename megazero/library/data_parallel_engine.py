"""The engine of a user's own training loop: forward, backward, step, over data-parallel ranks.

    engine = megazero.initialize(model, config)
    for batch in batches:
        loss = engine(batch)           # the model's forward
        engine.backward(loss)          # or loss.backward()
        engine.step()                  # acts after gradient_accumulation_steps backwards

Attributes that the engine does not have are the model's: `engine.my_method()`.  `save_checkpoint` and `load_checkpoint`
stop and resume the training; `save_16bit_model` and `save_fp32_model` write the weights alone.
"""

import inspect
import warnings
from collections import deque
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from megazero.activations.context import recomputing
from megazero.activations.recompute import Recomputation
from megazero.checkpoint.retention import Retention
from megazero.checkpoint.state import TrainState
from megazero.comm.mesh import Mesh
from megazero.config.batch import BatchSizes
from megazero.config.curriculum import row_lengths_of
from megazero.errors import Problem, TrainingError, UsageError, raise_problems
from megazero.library.config import EngineConfig
from megazero.library.module.buffers import ModuleBuffers
from megazero.library.state.checkpoints import CheckpointRequest, Checkpoints, Loading, raise_missing
from megazero.library.state.model import load_module, whole_state_dict
from megazero.library.state.optimizer import OptimizerState
from megazero.library.state.save import save_model
from megazero.library.step.passes import BackwardPasses
from megazero.library.step.records import StepRecords
from megazero.library.step.reports import StepFigures, StepReports
from megazero.library.step.stepping import LearningRates, StepOutcome, Stepper
from megazero.library.step.times import StepTimes
from megazero.memory.host_copy import HostCopy
from megazero.parallel.param_spec import Unit
from megazero.timers import Timers
from megazero.zero.engine import Engine
from megazero.zero.offloaded import StateKind
from megazero.zero.plan import DTYPES
from megazero.zero.statistics import EVERY_STATISTIC, read_statistics, take_statistics

WEIGHTS_FILE = "model.safetensors"
LENGTH_ARGUMENT = "curriculum_seqlen"


@dataclass(frozen=True)
class EngineComponents:
    """The components of an engine, which `initialize` makes."""

    config: EngineConfig
    batch: BatchSizes
    mesh: Mesh
    units: list[Unit]
    zero_engine: Engine
    passes: BackwardPasses
    stepper: Stepper
    records: StepRecords
    optimizer_state: OptimizerState
    checkpoints: Checkpoints
    recomputation: Recomputation
    timers: Timers


class DataParallelEngine:
    """An engine that trains `module` on this rank's share of the data; `megazero.initialize` makes it.

    Every rank makes the same calls in the same order, and in ZeRO stage 3 runs the same modules, except inside a leaf
    module (`module/leaf_modules.py`).  Attributes that the engine does not have are the module's.
    """

    def __init__(self, module: nn.Module, components: EngineComponents) -> None:
        self.module = module
        self.zero_engine = components.zero_engine
        """The ZeRO engine, which owns the parameters."""
        self.mesh = components.mesh
        self.config = components.config
        self.global_samples = 0
        """The samples of all steps over all ranks; backward passes, where the configuration gives no batch size."""
        self.global_steps = 0
        """The number of steps so far, skipped ones included."""
        self.skipped_steps = 0
        """The number of steps skipped because of an overflow (fp16)."""
        self._batch, self._units = components.batch, components.units
        self._passes, self._stepper = components.passes, components.stepper
        self._records = components.records
        self._recomputation, self._timers = components.recomputation, components.timers
        self._buffers = ModuleBuffers(module, components.zero_engine.data_parallel)
        self._times = StepTimes(components.mesh)
        self._reports = StepReports(components.config, components.mesh, components.timers)
        self._optimizer_state, self._checkpoints = components.optimizer_state, components.checkpoints
        self._row_lengths = row_lengths_of(components.config.curriculum)
        self._gives_length = self._row_lengths is not None and takes_length(module)
        self._last: StepOutcome | None = None
        # A GPU's are read one step late, when its host no longer waits for them.
        self._stops: deque[HostCopy] = deque(maxlen=1 if components.mesh.device.type == "cpu" else 2)
        self._was_applied = False

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        """Run the model's forward; its buffers are data-parallel rank 0's, as under DistributedDataParallel."""
        flight = self.mesh.meter.flight
        flight.iteration, flight.micro_batch, flight.activity = self.global_steps + 1, self._passes.count, "forward"
        self.zero_engine.settings.ledger.phase("forward")
        self._times.begin_forward()
        self._buffers.before_forward()
        self._records.begin_forward(self._passes.count, trains=torch.is_grad_enabled())
        try:
            if self._gives_length and self.module.training:
                options.setdefault(LENGTH_ARGUMENT, self.curriculum_seqlen)
            with self._timers.measure("forward-compute"), recomputing(self._recomputation), self._autocast():
                output = self.module(*inputs, **options)
        except Exception:
            raise
        except BaseException:  # Ctrl-C, after which torch calls no hooks
            self._passes.discard()
            raise
        flight.activity = "user code"
        self._buffers.after_forward(synchronised=torch.is_grad_enabled() and self._passes.is_boundary)
        return output

    forward = __call__

    @property
    def curriculum_seqlen(self) -> int | None:
        """The tokens to which the curriculum cuts the rows of the step in progress; None without a curriculum.

        In training the module's forward is given it as `curriculum_seqlen`, if it takes that.
        """
        return None if self._row_lengths is None else self._row_lengths.at(self.global_steps)

    def _autocast(self) -> AbstractContextManager[Any]:
        """Return the context in which the configuration's `autocast` lets a forward compute; an empty one without.

        A weight's narrow copy isn't kept for a second use: it would outlive the gathered weight (ZeRO stage 3).
        """
        if self.config.autocast is None:
            return nullcontext()
        return torch.autocast(self.mesh.device.type, dtype=DTYPES[self.config.autocast], cache_enabled=False)

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> None:
        """Run backward of one micro-batch.  loss: this rank's mean; gradients are means over ranks and micro-batches.

        scale_wrt_gas: False adds the gradients of the micro-batches up instead.  Raises UsageError when the step is
        complete already.  An error during backward discards the whole step: its micro-batches start again.
        """
        weight = 1.0 if scale_wrt_gas else float(self._batch.accumulation)
        try:
            with self._timers.measure("backward-compute"):
                self._passes.run(_multiplied(loss, weight * self.loss_scale), retain_graph=retain_graph)
        except BaseException:
            self._records.forget()
            raise
        self._records.add_loss(loss)

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss times the loss scale, from which a plain `backward()` starts; needed in fp16."""
        self._records.add_loss(loss)
        scaled = _multiplied(loss, self.loss_scale)
        self._passes.expect_scaled(scaled)
        return scaled

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which backward passes accumulate gradients without being counted as the step's.

        Partitioned gradients are reduced nevertheless, since no rank has memory for whole ones.
        """
        return self._passes.no_sync()

    def is_gradient_accumulation_boundary(self) -> bool:
        """Return True if the current micro-batch is the last of its step."""
        return self._passes.is_boundary

    @property
    def passes(self) -> BackwardPasses:
        """The counter of the step's backward passes."""
        return self._passes

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """Set whether the next backward passes end their step; None: gradient_accumulation_steps decides that.

        Gradients are still divided by gradient_accumulation_steps, however many passes a step has.
        """
        self._passes.boundary = is_boundary

    def allreduce_gradients(self) -> None:
        """End the step with the passes that it has had: reduce what they have accumulated; a collective call."""
        self._passes.complete()

    def step(self, *, stop: bool = False) -> None:
        """Update the parameters if all of the step's backward passes are done; do nothing before that.

        stop: True if this rank requests the end of the training, for which `stop_requested` looks on every rank.
        Raises UsageError without a backward pass; and for parameters that are not the engine's any more, or that not
        all ranks have written, and after an update that an exception has ended (`Engine.check_updated`): that discards
        the step, whose micro-batches start again.  Raises TrainingError, which names the cause, when a gradient is not
        finite and the configuration checks that, or when the loss scale can fall no further (fp16): the step is over
        then, and has changed nothing.  On a GPU, writes of some ranks and a gradient that is not finite are reported by
        the next call.  Raises CheckpointError, after the step, if a save beside training has failed.
        """
        self._was_applied = False
        with self._passes.discarding():
            self.zero_engine.written.check()
        if not self._passes.check_complete():
            return
        self.zero_engine.check_may_update()
        self.zero_engine.take_written_gradients()
        flight, checkpoints = self.mesh.meter.flight, self._checkpoints
        flight.activity = "update"
        lr, loss_scale = next(iter(self.get_lr()), 0.0), self.loss_scale
        with self._passes.discarding():
            save_failed = checkpoints.has_failed if checkpoints.is_saving else None
            self._last = self._stepper.step(stop=stop, save_failed=save_failed)
        self._stops.append(HostCopy(self._last.flags))
        flight.activity = "user code"
        self._was_applied = self._last.applied
        self.global_steps += 1
        self.global_samples += self._batch.train or self._batch.accumulation * self.mesh.axis("dp").size
        self._optimizer_state.count_step()
        self.skipped_steps += not self._last.applied
        self._passes.reset()
        self._times.end_step(self.global_steps)
        self._reports.end_step(
            StepFigures(
                self.global_steps, self.global_samples, lr, loss_scale, self._records.losses, self._last.grad_norm
            )
        )
        if (fault := self._last.fault) is not None:
            raise TrainingError(fault)
        if checkpoints.is_saving and any(self._stops[0].read()[1:]):
            checkpoints.finish()

    def was_step_applied(self) -> bool:
        """Return True if the last call of `step` changed the parameters."""
        return self._was_applied

    def stop_requested(self) -> bool:
        """Return True if any rank gave `stop` to the last step; the same on every rank.

        On a GPU it is the step before the last, so that the host does not wait for the last one.
        """
        return len(self._stops) == self._stops.maxlen and self._stops[0].read()[0] > 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Throw away what has been accumulated since the last step; a collective call, also between micro-batches.

        A step frees its own gradients, so a training loop needs no such call.
        """
        if self._passes.zero_grad():
            self._records.forget()

    @property
    def loss_scale(self) -> float:
        """The factor by which the next loss is multiplied; 1 except in fp16."""
        return self._stepper.loss_scale

    def get_global_grad_norm(self) -> float | None:
        """Return the norm of the last step's averaged gradients, before clipping; None before the first step.

        On a GPU the host waits for the step.
        """
        return None if self._last is None else float(self._last.grad_norm.item())

    def optimizer_statistics(self) -> dict[str, float]:
        """Return l1 and l2 norms and the largest element of the optimizer's variance, momentum and weights, by name.

        A collective call, for which a GPU's host waits.  With them come "params_norm" and, between a step's last
        backward and `step`, "num_zeros", the zeros in the gradient.  Every parameter that is trained counts once; state
        that the optimizer does not keep is left out.
        """
        return read_statistics(take_statistics(self.zero_engine, EVERY_STATISTIC).tolist(), EVERY_STATISTIC)

    def offload_states(
        self,
        include: Iterable[Any] | str | None = None,
        device: Any = "cpu",
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> int:
        """Move state to host memory between two steps, until `reload_states`; return the bytes freed on this rank.

        include: the name (or DeepSpeed's enum member) of a kind, or several: "optim_states", "hp_params" (master
        weights), "lp_params" (in stage 3) and "lp_grads" (in stages 2 and 3; "contiguous_grad_buffer" is the same); by
        default all of them.
        What is whole on every rank stays, as do states whose home is host memory already, and a CPU's memory that NumPy
        has referred to, such as a checkpoint was written from.  pin_memory, non_blocking: taken for DeepSpeed's
        programs; the configuration's offload_pin_memory decides, and the call waits for copies.
        device: "cpu"; DeepSpeed's "none" is warned of, and moves nothing.
        Raises UsageError for other kinds or devices, and between a backward pass and the end of its step; so does until
        `reload_states` what needs a kind that is away.  Forwards without a backward, gathers and `save_16bit_model`
        need "lp_params", backward passes "lp_grads" too, and a step or checkpoint all that it changes or saves.
        """
        if str(getattr(device, "value", device)) == "none":
            warnings.warn('engine.offload_states(device="none") moves nothing; device="cpu" does', stacklevel=2)
            return 0
        if str(getattr(device, "value", device)) != "cpu":
            given = f"engine.offload_states(device={device!r})"
            raise UsageError(Problem(given, "states leave the device for host memory", 'device="cpu"'))
        if not self._passes.is_between_steps:
            given = "engine.offload_states() between a backward pass and the end of its step"
            raise UsageError(Problem(given, "the step needs its states", "after the step"))
        kinds = StateKind if include is None else [include] if isinstance(include, str) else include
        names = [str(getattr(kind, "value", kind)) for kind in kinds]
        known = {**{kind.value: kind for kind in StateKind}, "contiguous_grad_buffer": StateKind.GRADIENTS}
        if unknown := [name for name in names if name not in known]:
            given = f"engine.offload_states(include={unknown})"
            raise UsageError(Problem(given, "there are no states of this kind", ", ".join(known)))
        return self.zero_engine.offload_states({known[name] for name in names})

    def reload_states(self, non_blocking: bool = False) -> None:
        """Bring back what `offload_states` has moved to host memory; non_blocking: as there."""
        self.zero_engine.reload_states()

    def get_lr(self) -> list[float]:
        """Return the learning rates of the next update, one for each param group."""
        return self._stepper.rates.current()

    def gradient_accumulation_steps(self) -> int:
        """Return the number of backward passes in a step."""
        return self._batch.accumulation

    def train_micro_batch_size_per_gpu(self) -> int | None:
        """Return the samples of a backward pass on one rank; None if the configuration leaves the number out."""
        return self._batch.micro

    def train_batch_size(self) -> int | None:
        """Return the samples of a step over all ranks; None if the configuration leaves the number out."""
        return self._batch.train

    def set_train_batch_size(self, samples: int) -> None:
        """Set the samples of a step over all ranks, by which the number of its backward passes changes.

        Raises UsageError between a backward pass and the end of its step, and for a size that is no number of
        whole micro-batches.
        """
        micro, ranks = self._batch.micro, self.mesh.axis("dp").size
        if not self._passes.is_between_steps:
            given = "set_train_batch_size between a backward pass and the end of its step"
            raise UsageError(Problem(given, "a step has one number of passes", "after the step"))
        if micro is None or samples < 1 or samples % (micro * ranks):
            given = f"set_train_batch_size({samples}) with micro-batches of {micro} on {ranks} data-parallel processes"
            legal = "train_micro_batch_size_per_gpu" if micro is None else f"multiples of {micro * ranks}"
            raise UsageError(Problem(given, "a step consists of whole micro-batches of every process", legal))
        accumulation = samples // (micro * ranks)
        self._batch = replace(self._batch, train=samples, accumulation=accumulation)
        self._passes.accumulation = self._stepper.accumulation = accumulation
        self._stepper.rates.samples_per_step = samples
        self._passes.reset()

    def train(self, mode: bool = True) -> Self:
        """Set the model's training mode."""
        self.module.train(mode)
        return self

    def eval(self) -> Self:
        """Set the model's evaluation mode."""
        return self.train(False)

    def take_checkpoint_seconds(self) -> dict[str, float]:
        """Return the host seconds in `megazero.recompute` since the last call, by part.

        The parts are "checkpoint-forward" and "checkpoint-recompute".  The result is empty unless the configuration's
        profile_backward (DeepSpeed's profile) is on; where parts of steps are timed, it is that of whole steps.  A
        GPU's host waits for its device.
        """
        return dict(self._reports.take_recomputing())

    def empty_partition_cache(self) -> None:
        """Release gathered parameters that are retained for their next use."""
        self.zero_engine.release_all()

    def save_16bit_model(self, folder: str | Path, filename: str = WEIGHTS_FILE) -> bool:
        """Write the working parameters and buffers to folder/filename, a safetensors file; a collective call.

        In stage 3 parameters are gathered unit by unit.  Raises UsageError if a rank has slices of them only,
        CheckpointError if the file cannot be written.
        """
        self._check_whole("save_16bit_model")
        self.zero_engine.check_updated("save_16bit_model")
        save_model(self.module, self._units, Path(folder) / filename, self.mesh)
        return True

    def save_fp32_model(self, folder: str | Path, filename: str = WEIGHTS_FILE) -> bool:
        """Write master weights, and other floating-point state in float32, to a safetensors file; a collective call.

        Each rank holds one whole parameter at a time.  An engine of float64 writes float64.  Raises as
        `save_16bit_model` does.
        """
        self._check_whole("save_fp32_model")
        self.zero_engine.check_updated("save_fp32_model")
        self.zero_engine.written.check_and_agree()
        save_model(self.module, self._units, Path(folder) / filename, self.mesh, masters=self.zero_engine)
        return True

    def _check_whole(self, call: str) -> None:
        if self.mesh.axis("tp").size > 1:
            given = f"{call} of a model in {self.mesh.axis('tp').size} tensor-parallel slices"
            raise UsageError(Problem(given, "one file holds whole parameters", "save_checkpoint"))

    # --- save and resume ----------------------------------------------------------------------------------------------

    def save_checkpoint(
        self,
        folder: str | Path,
        tag: str | int | None = None,
        client_state: Mapping[str, Any] | None = None,
        *,
        keep_last: int | None = None,
        keep_every: int | None = None,
    ) -> Path:
        """Save the training to a step folder under `folder`, and return that; a collective call between two steps.

        It holds everything that a training in any stage, precision and number of processes goes on from.  torch's
        random state is not part of it.
        tag: a name for `load_checkpoint`; a checkpoint replaces the one of the same tag.
        client_state: the user's own state of JSON values, rank 0's.
        keep_last, keep_every: remove older checkpoints without a tag but for so many, and multiples of this step.
        Raises CheckpointError on all ranks if it fails on any: older checkpoints are then unchanged.  Raises UsageError
        if not all ranks have written the same parameters since the last step.
        """
        return self._checkpoints.save(
            self._request("save_checkpoint", folder, tag, client_state, Retention(keep_last, keep_every))
        )

    def async_save_checkpoint(
        self,
        folder: str | Path,
        tag: str | int | None = None,
        client_state: Mapping[str, Any] | None = None,
        *,
        keep_last: int | None = None,
        keep_every: int | None = None,
    ) -> Future[Path]:
        """Save the training as `save_checkpoint` does, in a thread beside the steps that follow; a collective call.

        It copies the state to host memory, which takes as much as this rank saves, and returns.  The future's
        `result()` waits for the step folder.  An error of the thread is raised there, and on all ranks by the next
        `step`, save or load; on a GPU by the step after it.  A further save or load waits for the one under way.
        """
        return self._checkpoints.begin(
            self._request("async_save_checkpoint", folder, tag, client_state, Retention(keep_last, keep_every))
        )

    def _request(
        self,
        call: str,
        folder: str | Path,
        tag: str | int | None,
        client_state: Mapping[str, Any] | None,
        retention: Retention,
    ) -> CheckpointRequest:
        self._check_between_steps(call)
        kept = {"keep_last": retention.keep_last, "keep_every": retention.keep_every}
        wrong = [f"{name}={count}" for name, count in kept.items() if count is not None and count < 1]
        raise_problems(UsageError, (Problem(each, "a number of checkpoints or steps", "1 and above") for each in wrong))
        self._stepper.finish()
        self.zero_engine.written.check_and_agree()
        steps = int(self.zero_engine.optimizer_step.item())
        updated = self.global_samples * steps // max(self.global_steps, 1)
        state = TrainState(self._stepper.scale_state, self.global_steps, self.global_samples, steps, updated)
        name = None if tag is None else str(tag)
        return CheckpointRequest(Path(folder), name, state, self.skipped_steps, client_state, retention)

    def load_checkpoint(
        self,
        folder: str | Path,
        tag: str | int | None = None,
        *,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        missing_ok: bool = False,
    ) -> tuple[Path | None, dict[str, Any]]:
        """Go on from the newest sound checkpoint under `folder`, or from that of `tag`; a collective call.

        Returns its folder and the user's client_state.  A damaged checkpoint is passed over with a warning, unless it
        was named by its tag.
        load_optimizer_states: False begins the optimizer anew.  load_lr_scheduler_states: False leaves the schedule and
        learning rates as they are.  load_module_only: True takes weights and buffers only, for another training.
        missing_ok: True returns (None, {}) where there is no checkpoint at all, instead of an error.
        Raises CheckpointError on all ranks.
        """
        self._check_between_steps("load_checkpoint")
        trains = not load_module_only
        parts = Loading(load_optimizer_states and trains, load_lr_scheduler_states and trains, counters=trains)
        found = self._checkpoints.load(Path(folder), None if tag is None else str(tag), parts)
        if found is None:
            if not missing_ok:
                raise_missing(Path(folder), self.mesh.control)
            return None, {}
        if found.state is not None:
            self.global_steps, self.global_samples = found.state.iteration, found.state.consumed_samples
            self.skipped_steps = found.skipped_steps
        self._passes.reset()
        if self.mesh.control.rank == 0:
            for line in found.warnings():
                warnings.warn(line, stacklevel=2)
        return found.taken.checkpoint.folder, found.client_state

    def state_dict(self, *, prefix: str = "", keep_vars: bool = False) -> dict[str, Any]:
        """Return the module's state_dict with whole parameters in every stage.

        A collective call in stage 3, where parameters are copies in host memory, and where updates are late, all of
        which it has.  keep_vars=True returns the parameters themselves.
        """
        self.zero_engine.check_updated("state_dict")
        self.zero_engine.publish_late()
        if keep_vars:
            return self.module.state_dict(prefix=prefix, keep_vars=True)
        return whole_state_dict(self.module, self.zero_engine, self._units, prefix)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> Any:
        """Load a module's state_dict, the same on every rank, in any stage; a collective call.

        Master weights take its values as they are.  Returns the missing and the unexpected keys, and raises
        RuntimeError, as torch does.
        """
        return load_module(self.module, self.zero_engine, state_dict, strict=strict)

    def _check_between_steps(self, call: str) -> None:
        if not self._passes.is_between_steps:
            rule = "the gradients of a step in progress are no part of a checkpoint"
            raise UsageError(Problem(f"{call} between a backward pass and the end of its step", rule, "after the step"))

    @property
    def device(self) -> torch.device:
        """The device of this process, on which the model is."""
        return self.mesh.device

    @property
    def optimizer(self) -> Optimizer | None:
        """The torch optimizer whose param groups set the options; it never steps, and its state is the engine's.

        None if the engine was initialized without one.  Its `state_dict` is a collective call where ranks partition
        the optimizer's state.
        """
        return self._optimizer_state.optimizer

    @property
    def lr_scheduler(self) -> LearningRates | None:
        """The configuration's schedule, which `step` advances; None without one."""
        return None if self.config.scheduler is None else self._stepper.rates

    def close(self) -> None:
        """Remove all hooks from the module, and end its reports; partitioned parameters remain without values."""
        self._reports.close()
        self._passes.close()
        self.zero_engine.close()

    def __getattr__(self, name: str) -> Any:
        if name == "module":  # __init__ has not set it yet
            raise AttributeError(name)
        return getattr(self.module, name)


def takes_length(module: nn.Module) -> bool:
    """Return True if the module's forward takes an argument `curriculum_seqlen`, by its name or as any other."""
    parameters = inspect.signature(module.forward).parameters
    return LENGTH_ARGUMENT in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())


def _multiplied(loss: Tensor, factor: float) -> Tensor:
    """Return the loss times a factor, in 32 bits at least, since the product could overflow in 16."""
    wide = loss.float() if loss.dtype in (torch.float16, torch.bfloat16) else loss
    return wide * factor
