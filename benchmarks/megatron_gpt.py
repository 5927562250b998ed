"""Trains Megatron-core's GPT in its DistributedDataParallel with its optimizer, from the first values of megazero's.

Importing this needs Megatron-core.  The model has its `local` layers, which need neither Apex nor Transformer Engine:
attention writes out all scores, biases are added in compiled kernels, and the optimizer is torch's fused AdamW inside
Megatron-core's.  ZeRO stage 1 is its distributed optimizer.  Communication overlaps with computation where it can.

Megatron-core requires a GPU.  On the CPU it trains nevertheless, with unchanged sources: `PosesAsCUDA` stands in for
CUDA while the model is set up and while its optimizer updates, and `torch.cuda.current_device` returns the CPU.  Its
losses there are valid, but its times are those of code that was never made fast on CPUs.  This file has never run on a
GPU, where the same lines run without `PosesAsCUDA`.

Shapes, in comments: a = heads, d = elements of a head, s = sequence.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel.random import initialize_rng_tracker
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from plain_gpt import ADAMW, CLIP, first_values
from torch import Tensor
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from megazero.config.model import ModelConfig

# Parts of parameters' names, megazero's to Megatron-core's, in the order in which they are replaced.
_NAMES: Mapping[str, str] = {
    r"^layers": "decoder.layers",
    r"^final_norm": "decoder.final_layernorm",
    r"\.(word|position)\b": r".\1_embeddings",
    r"\.post_attention_norm": ".pre_mlp_layernorm",
    r"\.input_norm": ".input_layernorm",
    r"\.attention\.qkv": ".self_attention.linear_qkv",
    r"\.attention\.projection": ".self_attention.linear_proj",
    r"\.up\b": ".linear_fc1",
    r"\.down\b": ".linear_fc2",
}


class PosesAsCUDA(TorchFunctionMode):
    """A mode in which tensors that are to be on CUDA are made on the CPU, and the name of a tensor's type is CUDA's."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "cpu"
        made = func(*args, **kwargs)
        return made.replace("torch.", "torch.cuda.") if func is Tensor.type and isinstance(made, str) else made


class MegatronGPT:
    """The model of `config`, its wrapper and its optimizer, on this process of a job of data-parallel processes.

    dtype: that of parameters; with bf16 master weights are fp32, and so are gradients, as in Megatron-LM.  shards:
    whether to use ZeRO stage 1.  optimizer: torch's, inside Megatron-core's.
    """

    def __init__(
        self, config: ModelConfig, device: torch.device, dtype: torch.dtype, *, lr: float, seed: int, shards: bool
    ) -> None:
        self._device = device
        self._poses = nullcontext() if device.type == "cuda" else PosesAsCUDA()
        if device.type != "cuda":
            torch.cuda.current_device = lambda: device
        bf16 = dtype == torch.bfloat16
        overlaps = {"overlap_grad_reduce": True, "overlap_param_gather": shards}
        of_buffers = {"use_distributed_optimizer": shards, "grad_reduce_in_fp32": bf16, **overlaps}
        with self._poses:
            parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
            initialize_rng_tracker(inference_rng_tracker=True)  # without dropout nothing is random
            self._model = _model(config, device, dtype, seed)
            self._parallel = DistributedDataParallel(
                self._model.config, DistributedDataParallelConfig(**of_buffers), self._model
            )
            self._optimizer = _optimizer(self._parallel, dtype, lr=lr, shards=shards)
        self.optimizer: Optimizer = self._optimizer.optimizer
        self.settings: dict[str, Any] = {
            "layers": "local",
            "ddp_config": of_buffers,
            "optimizer": _described(self.optimizer),
        }
        if device.type != "cuda":
            self.settings["device"] = "the CPU, posing as CUDA"

    def take(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Take one step with this process's samples [b, s], and return their mean loss."""
        seq_length = tokens.shape[1]
        positions = torch.arange(seq_length, device=self._device).expand_as(tokens)
        later = torch.ones(1, 1, seq_length, seq_length, dtype=torch.bool, device=self._device).triu(1)
        loss: Tensor = self._parallel(tokens, positions, later, labels=labels).mean()
        loss.backward()
        self._parallel.finish_grad_sync()
        with self._poses:
            self._optimizer.step()
        self._parallel.zero_grad_buffer()
        self._optimizer.zero_grad()
        return loss.detach()

    def parameters(self) -> Iterator[Tensor]:
        return self._model.parameters()

    def buffers(self) -> Iterator[Tensor]:
        """Yield the buffers that hold the gradients, and those of sharded parameters."""
        for buffer in self._parallel.buffers:
            yield from (data for data in (buffer.grad_data, buffer.param_data) if data is not None)


def _model(config: ModelConfig, device: torch.device, dtype: torch.dtype, seed: int) -> Any:
    """Make the model with the first values of the seed.

    In bf16 they are rounded, and so are the master weights, which are made from the model's.
    """
    shape = TransformerConfig(
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        use_cpu_initialization=True,
        perform_initialization=False,
        bias_activation_fusion=True,  # its GELU is the tanh approximation, as in megazero
        bias_dropout_fusion=True,
    )
    model = GPTModel(
        shape,
        get_gpt_layer_local_spec(),
        vocab_size=config.vocab_size,
        max_sequence_length=config.seq_length,
        share_embeddings_and_output_weights=True,
    )
    _fill(model, config, seed)
    model.to(device)
    return Float16Module(shape, model) if dtype == torch.bfloat16 else model


def _fill(model: Any, config: ModelConfig, seed: int) -> None:
    parameters = dict(model.named_parameters())
    for name, value in first_values(config, seed):
        parameter = parameters.pop(their_name(name))
        if ".qkv." in name:  # rows [3, a, d] as [a, 3, d]
            value = value.reshape(3, config.num_attention_heads, -1, *parameter.shape[1:]).transpose(0, 1)
        with torch.no_grad():
            parameter.copy_(value.reshape(parameter.shape))
    assert not parameters, f"{', '.join(parameters)} of Megatron-core's model only"


def their_name(name: str) -> str:
    """Return Megatron-core's name of the parameter that is called `name` in megazero's model."""
    for ours, theirs in _NAMES.items():
        name = re.sub(ours, theirs, name)
    return name


def _optimizer(parallel: Any, dtype: torch.dtype, *, lr: float, shards: bool) -> Any:
    config = OptimizerConfig(
        optimizer="adam",
        lr=lr,
        weight_decay=ADAMW.weight_decay,
        adam_beta1=ADAMW.beta1,
        adam_beta2=ADAMW.beta2,
        adam_eps=ADAMW.eps,
        clip_grad=CLIP,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        use_distributed_optimizer=shards,
        overlap_param_gather=shards,
    )
    optimizer = get_megatron_optimizer(config, [parallel], use_gloo_process_groups=False)
    for group in optimizer.param_groups:
        group["weight_decay"] *= group["wd_mult"]  # as Megatron-core's scheduler would do
        if "fused" in group:  # torch's optimizer; those of Apex and Transformer Engine are always fused
            group["fused"] = True
    return optimizer


def _described(optimizer: Optimizer) -> str:
    kind = type(optimizer)
    return f"{kind.__module__}.{kind.__name__}({'fused=True' if 'fused' in optimizer.param_groups[0] else ''})"
