"""Chooses the number format of each parameter and buffer of a model that is trained in mixed precision.

Parameters get the configuration's precision.  With bf16 or fp16, buffers keep the format that they have (rotary
frequencies, running statistics), unless the configuration names one for all, and some tensors stay in fp32:

    those that the configuration's `keep_in_fp32` names
    those that transformers' models name: `_keep_in_fp32_modules_strict`, and with fp16 `_keep_in_fp32_modules` too
    parameters of batch normalisation with running statistics in fp32, because its kernels mix no other formats
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from megazero.errors import Problem, UsageError, raise_problems

_KEPT_IN_FP16, _KEPT = "_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"


def choose_formats(
    model: nn.Module, dtype: torch.dtype, *, buffer_dtype: torch.dtype | None, keep_in_fp32: Iterable[str]
) -> Mapping[int, torch.dtype]:
    """Return the formats of the model's floating-point parameters and buffers, by id.

    dtype: that of parameters.  buffer_dtype: that of buffers; None: the one they have, in 32 and 64 bits `dtype`.
    keep_in_fp32: names of parameters, buffers and modules, or parts of them between dots ("norm", "layers.3").  Raises
    UsageError for one that names nothing, and if `dtype` is float64.
    """
    is_narrow = dtype.itemsize < torch.float32.itemsize
    parameters = [item for item in model.named_parameters(remove_duplicate=False) if item[1].is_floating_point()]
    buffers = [item for item in model.named_buffers(remove_duplicate=False) if item[1].is_floating_point()]
    patterns = [_pattern(name) for name in keep_in_fp32]
    raise_problems(UsageError, _problems(keep_in_fp32, dtype, [name for name, _ in (*parameters, *buffers)]))
    formats = {id(parameter): dtype for _, parameter in parameters}
    for _, buffer in buffers:
        formats[id(buffer)] = buffer_dtype or (buffer.dtype if is_narrow else dtype)
    if not is_narrow:
        return formats
    patterns += [_pattern(name) for name in _named_by_transformers(model, dtype)]
    for name, tensor in chain(parameters, buffers):
        if any(pattern.search(name) for pattern in patterns):
            formats[id(tensor)] = torch.float32
    for module in model.modules():
        is_norm = isinstance(module, _BatchNorm) and module.running_mean is not None
        if is_norm and formats[id(module.running_mean)] == torch.float32:
            formats.update((id(parameter), torch.float32) for parameter in module.parameters(recurse=False))
    return formats


def matching(names: Iterable[str], patterns: Iterable[str]) -> dict[str, list[str]]:
    """Return the names that each pattern means: a whole name of a parameter or module, or a part of it between dots."""
    everything = list(names)
    return {pattern: [name for name in everything if _pattern(pattern).search(name)] for pattern in patterns}


def _pattern(name: str) -> re.Pattern[str]:
    return re.compile(rf"(^|\.){re.escape(name)}(\.|$)")


def _named_by_transformers(model: nn.Module, dtype: torch.dtype) -> set[str]:
    attributes = (_KEPT, _KEPT_IN_FP16) if dtype == torch.float16 else (_KEPT,)
    lists = (getattr(module, attribute, None) for module in model.modules() for attribute in attributes)
    return {name for names in lists if isinstance(names, list | tuple | set | frozenset) for name in names}


def _problems(keep_in_fp32: Iterable[str], dtype: torch.dtype, names: list[str]) -> Iterator[Problem]:
    for kept in keep_in_fp32:
        if dtype == torch.float64:
            yield Problem(f'keep_in_fp32: "{kept}" with fp64', "fp64 keeps everything in 64 bits", "bf16, fp16")
        elif not any(_pattern(kept).search(name) for name in names):
            rule = "it names floating-point parameters or buffers of the model, or modules with some"
            yield Problem(f'keep_in_fp32: "{kept}"', rule, ", ".join(names[:3]) + ", ...")
