"""The engine of a DeepSpeed program: megazero's engine, with the methods and results that DeepSpeed's has.

What the two have in common is megazero's: this class passes it on.  Its own are the methods that DeepSpeed spells
another way, the data loader, and a learning-rate scheduler of the program's, which `step` advances.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Sampler

from megazero.checkpoint.folders import hidden_path
from megazero.deepspeed import scheduler_state
from megazero.deepspeed.data import InputSettings, make_loader
from megazero.deepspeed.missing import missing_name, refuse
from megazero.library.data_parallel_engine import DataParallelEngine
from megazero.parallel.launch import Launch
from megazero.zero.plan import Lifetime, Placement

_SCHEDULER = "lr_scheduler"  # the program's, in the client_state of a checkpoint
_STEPS = "global_step"


class DeepSpeedEngine:
    """An engine under DeepSpeed's names; `deepspeed.initialize` makes it.

    `core` is megazero's engine.  Attributes that neither engine has are the module's.
    """

    def __init__(
        self,
        core: DataParallelEngine,
        inputs: InputSettings,
        lr_scheduler: Any = None,
        *,
        config: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """lr_scheduler: the program's, or a function that makes one for the optimizer; None: the configuration's."""
        self.core = core
        self.config = dict(config)
        """The configuration's keys as they were given; `core.config` is what megazero reads in them."""
        self.micro_steps = 0
        """The number of calls of `step`, also of those before a gradient accumulation boundary."""
        self.local_rank = Launch.from_environment().local_rank
        self.global_rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.device = core.mesh.device
        self.dp_world_size, self.mp_world_size = core.mesh.axis("dp").size, core.mesh.axis("tp").size
        self.collate_fn = inputs.collate_fn
        self._inputs = inputs
        self._advances = lr_scheduler is not None
        self.lr_scheduler: Any = core.lr_scheduler
        """The scheduler that `step` advances: the program's, or the configuration's, or None."""
        if lr_scheduler is not None:
            is_function = callable(lr_scheduler) and not hasattr(lr_scheduler, "step")
            self.lr_scheduler = lr_scheduler(self.optimizer) if is_function else lr_scheduler
        self.training_dataloader = None if inputs.data is None else self.deepspeed_io(inputs.data)
        if not inputs.managed:
            core.set_gradient_accumulation_boundary(False)
        self._show_scale()

    # --- training -----------------------------------------------------------------------------------------------------

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        """Run the model's forward."""
        return self.core(*inputs, **options)

    forward = __call__

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Run backward of one micro-batch, and return the loss as it counts in the step's mean."""
        self.core.backward(loss, retain_graph=retain_graph, scale_wrt_gas=scale_wrt_gas)
        accumulation = self.core.gradient_accumulation_steps()
        return loss.detach() / accumulation if scale_wrt_gas and accumulation > 1 else loss.detach()

    def step(self, lr_kwargs: Mapping[str, Any] | None = None, *, stop: bool = False) -> None:
        """End a micro-batch; at a boundary update the parameters, and then the learning rate.

        lr_kwargs: options for the `step` of the program's scheduler.  stop: as for megazero's engine.
        Raises UsageError if this micro-batch has had several backward passes and no boundary was set: DeepSpeed counts
        calls of `step`, and megazero reduces gradients in the pass that it takes for the step's last.
        """
        passes = self.core.passes.num_since_step
        if passes > 1 and self.core.passes.boundary is None:
            given = f"engine.step() after {passes} backward passes"
            legal = "engine.coalesce_grad_reduction() around them, or managed_gradient_accumulation: false"
            raise refuse(given, "a micro-batch is one backward pass and one engine.step()", legal)
        if lr_kwargs and not self._advances:
            rule = "the configuration's schedule counts updates, and takes nothing else"
            raise refuse(f"engine.step(lr_kwargs={dict(lr_kwargs)})", rule, "initialize(lr_scheduler=...)")
        skipped = self.core.skipped_steps
        if not self._inputs.managed:
            self.core.allreduce_gradients()
        self.core.step(stop=stop)
        self.micro_steps += 1
        if self._advances and self.core.was_step_applied():
            self.lr_scheduler.step(**(lr_kwargs or {}))
        self._show_scale(overflow=self.core.skipped_steps > skipped)

    @contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """Return a context whose backward passes, however many, are one step's: their gradients are reduced at its end.

        Partitioned gradients are reduced in every pass nevertheless.  `step` follows after the block.
        """
        with self.core.no_sync():
            yield
        self.core.allreduce_gradients()

    def train(self, mode: bool = True) -> None:
        """Set the model's training mode."""
        self.core.train(mode)

    def eval(self) -> None:
        """Set the model's evaluation mode."""
        self.core.eval()

    def destroy(self) -> None:
        """Remove all hooks from the module."""
        self.core.close()

    def _show_scale(self, *, overflow: bool = False) -> None:
        """Write the loss scale, and whether a step was skipped, into the optimizer, where DeepSpeed's have them."""
        scale, optimizer = self.core.loss_scale, self.optimizer
        if optimizer is not None:
            vars(optimizer).update(cur_scale=scale, loss_scale=scale, overflow=overflow)

    @property
    def curriculum_seqlen(self) -> int | None:
        """The tokens to which the curriculum cuts the rows of the step in progress; None without a curriculum."""
        return self.core.curriculum_seqlen

    # --- settings -----------------------------------------------------------------------------------------------------

    def zero_optimization_stage(self) -> int:
        """Return the ZeRO stage."""
        return self.core.config.zero.zero_stage

    def zero_optimization(self) -> bool:
        """Return True if optimizer states are partitioned: above ZeRO stage 0."""
        return self.core.zero_engine.plan.optimizer.placement is Placement.PARTITIONED

    def zero_optimization_partition_gradients(self) -> bool:
        """Return True if no rank keeps whole gradients beyond their reduction: from ZeRO stage 2 on."""
        return self.core.zero_engine.plan.gradient.lifetime is Lifetime.LEASED

    def zero_optimization_partition_weights(self) -> bool:
        """Return True if parameters are partitioned: in ZeRO stage 3."""
        return self.core.zero_engine.plan.parameter.placement is Placement.PARTITIONED

    def fp16_enabled(self) -> bool:
        """Return True if the model is in fp16."""
        return self.core.config.precision.precision == "fp16"

    def bfloat16_enabled(self) -> bool:
        """Return True if the model is in bf16."""
        return self.core.config.precision.precision == "bf16"

    def torch_autocast_enabled(self) -> bool:
        """Return True if forwards run under torch.autocast."""
        return self.core.config.autocast is not None

    def curriculum_enabled_legacy(self) -> bool:
        """Return True if the configuration has a curriculum by sequence length, in either of its sections."""
        return self.core.curriculum_seqlen is not None

    def curriculum_params_legacy(self) -> Mapping[str, Any] | bool:
        """Return the configuration's section `curriculum_learning` as it was given; False without it."""
        section = self.config.get("curriculum_learning", False)
        return dict(section) if isinstance(section, Mapping) else False

    def gradient_clipping(self) -> float:
        """Return the largest norm of gradients, 0 for no limit."""
        return self.core.config.gradient_clipping

    def dynamic_loss_scale(self) -> bool:
        """Return True if the loss scale moves (fp16)."""
        return self.fp16_enabled() and self.core.config.precision.loss_scale is None

    def optimizer_name(self) -> str | None:
        """Return the class of the optimizer, None without one."""
        return None if self.optimizer is None else type(self.optimizer).__name__

    def scheduler_name(self) -> str | None:
        """Return the type of the configuration's schedule, None without one."""
        return None if self.core.config.scheduler is None else self.core.config.scheduler.type

    def managed_gradient_accumulation(self) -> bool:
        """Return True if calls of `step` are counted; False if each of them updates the parameters."""
        return self._inputs.managed

    def get_batch_info(self) -> tuple[int | None, int | None, int]:
        """Return the samples of a step over all ranks and of a backward pass on one rank, and the passes of a step."""
        core = self.core
        return core.train_batch_size(), core.train_micro_batch_size_per_gpu(), core.gradient_accumulation_steps()

    def get_mom(self) -> list[Any]:
        """Return the betas of each param group, or its momentum; 0 where it has neither."""
        groups = () if self.optimizer is None else self.optimizer.param_groups
        return [group.get("betas", group.get("momentum", 0.0)) for group in groups]

    def get_data_parallel_rank(self) -> int:
        """Return this process's rank on the data-parallel axis."""
        return self.core.mesh.axis("dp").rank

    # --- data ---------------------------------------------------------------------------------------------------------

    def deepspeed_io(
        self,
        dataset: Any,
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: Sampler[Any] | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_local_io_workers: int | None = None,
    ) -> DataLoader[Any]:
        """Return a loader of this rank's share of a dataset, in micro-batches.

        route: "train" shuffles, "eval" and "predict" keep the order.  batch_size: the micro-batch, if it is left out.
        """
        size = self.core.train_micro_batch_size_per_gpu() if batch_size is None else batch_size
        axis = self.core.mesh.axis("dp")
        return make_loader(
            dataset,
            size,
            shuffle=route == "train",
            rank=axis.rank,
            ranks=axis.size,
            sampler=data_sampler,
            collate_fn=collate_fn or self.collate_fn,
            workers=num_local_io_workers,
            pin_memory=pin_memory and self.device.type == "cuda",
            drop_last=self._inputs.drop_last,
        )

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: str | int | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save the training under `save_dir`, in megazero's format; a collective call.

        tag: "global_step" and the number of steps, if it is left out.  client_state: JSON values, rank 0's.
        The state of the program's learning-rate scheduler is saved too.  `save_dir`/`tag` is a link to the checkpoint.
        """
        if exclude_frozen_parameters:
            rule = "a checkpoint holds all parameters and buffers"
            raise refuse("save_checkpoint(exclude_frozen_parameters=True)", rule, "exclude_frozen_parameters=False")
        if not save_latest:
            rule = "load_checkpoint without a tag takes the newest sound checkpoint"
            raise refuse("save_checkpoint(save_latest=False)", rule, "save_latest=True, and a tag for load_checkpoint")
        if _SCHEDULER in (client_state or {}):
            rule = "the state of the scheduler is stored under this name"
            raise refuse(f"client_state[{_SCHEDULER!r}]", rule, "another name")
        saved = dict(client_state or {})
        if self._advances:
            saved[_SCHEDULER] = scheduler_state.to_json(self.lr_scheduler.state_dict())
        tag = f"{_STEPS}{self.core.global_steps}" if tag is None else str(tag)
        folder = self.core.save_checkpoint(save_dir, tag, saved)
        if self.global_rank == 0:
            _link(Path(save_dir) / tag, folder)
        return True

    def load_checkpoint(
        self,
        load_dir: str | Path,
        tag: str | int | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Go on from the newest sound checkpoint under `load_dir`, or from that of `tag`; a collective call.

        Returns its folder and the program's client_state; (None, None) where there is no checkpoint at all.
        """
        if not load_module_strict:
            rule = "a checkpoint has the parameters of the model"
            raise refuse("load_checkpoint(load_module_strict=False)", rule, "load_module_strict=True")
        if custom_load_fn is not None:
            raise refuse("load_checkpoint(custom_load_fn=...)", "a checkpoint is read by its own reader", "None")
        folder, client_state = self.core.load_checkpoint(
            load_dir,
            tag,
            load_optimizer_states=load_optimizer_states,
            load_lr_scheduler_states=load_lr_scheduler_states,
            load_module_only=load_module_only,
            missing_ok=tag is None,
        )
        if folder is None:
            return None, None
        schedule = client_state.pop(_SCHEDULER, None)
        if self._advances and schedule is not None and load_lr_scheduler_states and not load_module_only:
            self.lr_scheduler.load_state_dict(scheduler_state.from_json(schedule))
        if not load_module_only:
            self.micro_steps = self.core.global_steps * self.core.gradient_accumulation_steps()
        self._show_scale()
        return str(folder), client_state

    def save_16bit_model(
        self, save_dir: str | Path, save_filename: str = "pytorch_model.bin", exclude_frozen_parameters: bool = False
    ) -> bool:
        """Write the working parameters and buffers to save_dir/save_filename; a collective call.

        A name that ends in .safetensors gives a safetensors file, others what torch.load reads.
        """
        if exclude_frozen_parameters:
            rule = "the file holds all parameters and buffers"
            raise refuse("save_16bit_model(exclude_frozen_parameters=True)", rule, "exclude_frozen_parameters=False")
        if save_filename.endswith(".safetensors"):
            return self.core.save_16bit_model(save_dir, save_filename)
        whole = self.core.state_dict()
        if self.global_rank == 0:
            Path(save_dir).mkdir(parents=True, exist_ok=True)
            torch.save({name: value.clone() for name, value in whole.items()}, Path(save_dir) / save_filename)
        dist.barrier()
        return True

    save_fp16_model = save_16bit_model

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """Return True: whole parameters are gathered wherever they are saved."""
        return True

    def _consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any]:
        """Return the module's state_dict with whole parameters, on every rank; a collective call."""
        if exclude_frozen_parameters:
            rule = "the state holds all parameters and buffers"
            raise refuse("exclude_frozen_parameters=True", rule, "exclude_frozen_parameters=False")
        return self.core.state_dict()

    _zero3_consolidated_16bit_state_dict = _consolidated_16bit_state_dict

    # --- the rest -----------------------------------------------------------------------------------------------------

    @property
    def module(self) -> nn.Module:
        """The model."""
        return self.core.module

    @property
    def optimizer(self) -> Optimizer | None:
        """The torch optimizer whose param groups set the options, None without one; it never steps itself.

        It has the engine's `offload_states` and `reload_states`, which programs call of DeepSpeed's optimizers.
        """
        if (optimizer := self.core.optimizer) is not None:
            vars(optimizer).update(offload_states=self.core.offload_states, reload_states=self.core.reload_states)
        return optimizer

    def __getattr__(self, name: str) -> Any:
        if name == "core":  # __init__ has not set it yet
            raise AttributeError(name)
        try:
            return getattr(self.core, name)
        except AttributeError:
            raise missing_name(name, "engine") from None


def _link(path: Path, folder: Path) -> None:
    """Make `path` a link to the step folder beside it, as programs look for a checkpoint under its tag.

    What has this name and is no link stays.
    """
    if path.parent.resolve() != folder.parent.resolve() or (path.exists() and not path.is_symlink()):
        return
    aside = hidden_path(path.parent, path.name)
    with suppress(FileNotFoundError):
        aside.unlink()
    aside.symlink_to(folder.name, target_is_directory=True)
    aside.replace(path)
