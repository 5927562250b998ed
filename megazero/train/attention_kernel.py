"""Chooses the one of torch's kernels that computes attention.

On a GPU several can (FlashAttention, cuDNN's, the memory-efficient one), and which is fastest depends on the GPU, the
shape and torch's version: *auto* measures them once, forward and backward, on tensors of the run's shape and strides,
with a mask if the run has one (FlashAttention takes none), and all ranks take the same one.  The chosen kernel goes
first; a call that it cannot serve goes to the next.  Megatron-LM's names: flash, fused (cuDNN), unfused.

FlashAttention 3 (*flash3*) takes the place of torch's own FlashAttention in the whole process, and is never measured.

At its first choice of a kernel in a process torch sets its own order, on Hopper cuDNN's kernel first, and so overwrites
an order that was set before.  Hence torch chooses once for the run's call before an order is set; it chooses again
afterwards, and that kernel is the one that is reported.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from importlib.util import find_spec
from types import MappingProxyType
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, activate_flash_attention_impl, sdpa_kernel

from megazero.comm.interface import Communicator
from megazero.config import derived
from megazero.config.run import RunConfig
from megazero.errors import ConfigError, Problem
from megazero.model.sequences import document_mask
from megazero.zero.plan import DTYPES

KERNELS: Mapping[str, SDPBackend] = MappingProxyType(
    {
        "flash": SDPBackend.FLASH_ATTENTION,
        "fused": SDPBackend.CUDNN_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
        "unfused": SDPBackend.MATH,
    }
)
_FLASH3 = "flash3"
_FLASH3_IMPLEMENTATION = "FA3"  # torch's name for it
_FLASH3_PACKAGE = "flash_attn_interface"
_HOPPER = 9  # the major compute capability of GPUs that FlashAttention 3 is written for
_FUSED = ("flash", "fused", "efficient")
_CALLS = 5
_event: Callable[..., torch.cuda.Event] = torch.cuda.Event
_using: Callable[..., AbstractContextManager[None]] = sdpa_kernel
_torchs_choice: Callable[..., int] = torch._fused_sdp_choice
_activate: Callable[[str], None] = activate_flash_attention_impl


class AttentionCall(NamedTuple):
    """The arguments of one attention call, as far as kernels depend on them.

    shape: [b, a/t, s, d] of query, key and value.  dropout: a probability.
    is_masked: True for a mask of documents, False for a causal one.
    is_deterministic: True if its backward must add in the same order every time.
    key_value_heads: the heads of keys and values, which several of the queries share; 0: as many as queries have.
    """

    shape: tuple[int, int, int, int]
    dtype: torch.dtype
    device: torch.device
    dropout: float
    is_masked: bool = False
    is_deterministic: bool = False
    key_value_heads: int = 0

    @property
    def is_grouped(self) -> bool:
        """True if several heads of queries share keys and values."""
        return self.key_value_heads not in (0, self.shape[1])

    def operands(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return empty query, key and value as the model passes them: views of one tensor [b, s, 3, a/t, d].

        Where several heads share keys and values, queries are a tensor of their own beside one of [b, s, 2, g/t, d].
        """
        batch, heads, length, head_dim = self.shape
        empty = partial(torch.empty, dtype=self.dtype, device=self.device)
        if self.is_grouped:
            queries = empty(batch, length, heads, head_dim).transpose(1, 2)
            pair = empty(batch, length, 2, self.key_value_heads, head_dim).permute(2, 0, 3, 1, 4)
            parts = (queries, *pair.unbind(0))
        else:
            parts = empty(batch, length, 3, heads, head_dim).permute(2, 0, 3, 1, 4).unbind(0)
        query, key, value = (part.requires_grad_() for part in parts)
        return query, key, value

    def mask(self) -> Tensor | None:
        """Return a mask of rows that are one document each, or None for a causal call."""
        if not self.is_masked:
            return None
        documents = torch.zeros(self.shape[0], self.shape[2], dtype=torch.int32, device=self.device)
        return document_mask(documents, self.dtype)

    def __str__(self) -> str:
        shared = f", keys of {self.key_value_heads}" * self.is_grouped
        more = f"{shared}{', masked' * self.is_masked}{f', dropout {self.dropout:g}' if self.dropout else ''}"
        return f"{list(self.shape)} in {str(self.dtype).removeprefix('torch.')} on {self.device.type}{more}"


class KernelChoice(NamedTuple):
    """The name in `KERNELS` of the kernel to prefer, None for torch's own order, and a line that reports the choice.

    The line is empty where there was nothing to choose.
    """

    kernel: str | None = None
    line: str = ""


Seconds = Callable[[str, AttentionCall], float | None]
Reduction = Callable[[Sequence[float]], list[float]]


def attention_call(config: RunConfig, device: torch.device) -> AttentionCall:
    """Return the attention call of every layer of a run."""
    model, tensor_size = config.model, config.parallel.tensor_model_parallel_size
    heads, width = model.num_attention_heads // tensor_size, derived.head_width(model)
    return AttentionCall(
        (config.training.micro_batch_size, heads, model.seq_length, width),
        DTYPES[config.precision.precision],
        device,
        model.attention_dropout,
        config.data.reset_attention_mask or model.position_embedding_type == "alibi",
        config.training.deterministic_mode,
        derived.key_value_heads_of_rank(model, tensor_size),
    )


def check_attention(wanted: str, device: torch.device) -> None:
    """Raise ConfigError where FlashAttention 3 is wanted and this process cannot have it; CPUs have other kernels."""
    if wanted != _FLASH3 or device.type != "cuda":
        return
    missing = ""
    if find_spec(_FLASH3_PACKAGE) is None:
        missing = f"the package {_FLASH3_PACKAGE} is not installed"
    elif torch.cuda.get_device_capability(device)[0] != _HOPPER:
        missing = f"{torch.cuda.get_device_name(device)} is no Hopper GPU"
    if missing:
        rule = f"FlashAttention 3 is that package's, for Hopper GPUs, and {missing}"
        raise ConfigError(Problem(f"--attention-backend {_FLASH3}", rule, "--attention-backend auto, or flash"))


def choose_for_run(config: RunConfig, device: torch.device, world: Communicator) -> KernelChoice:
    """Return the kernel that a run prefers, the same on every rank; a collective call of all ranks."""
    wanted, call = config.training.attention_backend, attention_call(config, device)
    if wanted == "auto" and device.type != "cuda":
        return KernelChoice()
    is_flash3 = wanted == _FLASH3 and device.type == "cuda"
    if is_flash3:
        _activate(_FLASH3_IMPLEMENTATION)
    computing_kernel(call)  # torch sets its own order now, and not after the run's
    kernel = choose_kernel("flash" if wanted == _FLASH3 else wanted, call, partial(largest, world, device))
    with prefer_kernel(kernel):
        computing = computing_kernel(call)
    return KernelChoice(kernel, reported(wanted, _FLASH3 if is_flash3 and computing == "flash" else computing, call))


def choose_kernel(wanted: str, call: AttentionCall, slowest: Reduction, seconds: Seconds | None = None) -> str | None:
    """Return the name in `KERNELS` of the kernel to prefer; None leaves it to torch, as on the CPU, which has one.

    "auto" is the kernel whose slowest rank is fastest, of those that serve the call on every rank.  A deterministic run
    measures nothing, since another run could find another kernel fastest: FlashAttention goes first, cuDNN's never.
    slowest: returns each kernel's largest time over all ranks.
    seconds: returns how long a kernel takes for a call, None if it cannot serve it; `measure` by default.
    """
    if wanted != "auto":
        return wanted
    if call.device.type != "cuda":
        return None
    if call.is_deterministic:
        return "flash"
    candidates = [name for name in _FUSED if not (call.is_masked and name == "flash")]
    measured = [(seconds or measure)(name, call) for name in candidates]
    times = slowest([math.inf if each is None else each for each in measured])
    fastest, name = min(zip(times, candidates, strict=True))
    return name if math.isfinite(fastest) else None


def largest(world: Communicator, device: torch.device, figures: Sequence[float]) -> list[float]:
    """Return the largest of each figure over all ranks; a collective call."""
    figures_here = torch.tensor(figures, dtype=torch.float64, device=device)
    world.all_reduce_scalars(figures_here, "max").wait()
    found: list[float] = figures_here.tolist()
    return found


def computing_kernel(call: AttentionCall) -> str:
    """Return the name of the kernel by which torch would compute the call now, "torch's" for one without a name."""
    query, key, value = call.operands()
    mask = call.mask()
    chosen = _torchs_choice(query, key, value, mask, call.dropout, mask is None, enable_gqa=call.is_grouped)
    return next((name for name, backend in KERNELS.items() if backend.value == chosen), "torch's")


def reported(wanted: str, computing: str, call: AttentionCall) -> str:
    """Return the line that reports which kernel computes, and why, if another one was wanted by name."""
    because = f", since {wanted} cannot compute {call}" if wanted not in ("auto", computing) else ""
    return f"attention: kernel {computing}{because}"


def prefer_kernel(kernel: str | None) -> AbstractContextManager[None]:
    """Return a context in which attention is computed by this kernel where it can be."""
    if kernel is None:
        return nullcontext()
    if kernel == "unfused":  # which serves every call
        return _using([KERNELS[kernel]])
    others = [backend for name, backend in KERNELS.items() if name != kernel]
    return _using([KERNELS[kernel], *others], set_priority=True)


def measure(kernel: str, call: AttentionCall) -> float | None:
    """Return the median seconds of a forward and backward on a GPU; None if the kernel cannot serve the call."""
    query, key, value = (part.detach().normal_().requires_grad_() for part in call.operands())
    mask = call.mask()
    times: list[float] = []
    try:
        with _using([KERNELS[kernel]]):
            for _ in range(_CALLS + 1):
                begin, end = _event(enable_timing=True), _event(enable_timing=True)
                begin.record()
                mixed = F.scaled_dot_product_attention(
                    query,
                    key,
                    value,
                    attn_mask=mask,
                    dropout_p=call.dropout,
                    is_causal=mask is None,
                    enable_gqa=call.is_grouped,
                )
                torch.autograd.backward(mixed, torch.ones_like(mixed))
                end.record()
                end.synchronize()
                times.append(begin.elapsed_time(end) / 1e3)
    except RuntimeError:  # "no available kernel"
        return None
    return statistics.median(times[1:])
