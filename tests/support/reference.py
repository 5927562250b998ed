"""The plain reference: the model and its training in single-process float64 PyTorch, without any code of megazero.

Weights are a dict from logical name to the full, unpadded logical tensor:

    embedding.word.weight [V, h]        layers.{i}.input_norm.{weight,bias} [h]
    embedding.position.weight [S, h]    layers.{i}.attention.qkv.weight [3, n, d, h]    .bias [3, n, d]
    final_norm.{weight,bias} [h]        layers.{i}.attention.projection.weight [h, h]   .bias [h]
    head.weight [V, h] (untied only)    layers.{i}.post_attention_norm.{weight,bias} [h]
                                        layers.{i}.mlp.up.weight [f, h]   .bias [f]
                                        layers.{i}.mlp.down.weight [h, f] .bias [h]

What is there decides on the model: without a norm's bias it is an RMSNorm, without biases linear layers add none, and

    embedding.norm.weight [h]                    a norm of the embedding
    layers.{i}.attention.query.weight [n, d, h]  grouped queries, in place of qkv, with .key_value.weight [2, g, d, h]
    layers.{i}.attention.query_norm.weight [d]   norms of every head's queries, with .key_norm, of its keys
    layers.{i}.mlp.up.weight [2, f, h]           SwiGLU
    NAME.adapter.lora_A.weight [r, in]           an adapter of the layer NAME, with .lora_B.weight [*out, r]

`Shape` has the rest.  Attention is the naive softmax of an S x S matrix; AdamW, clipping and the learning-rate schedule
are written out.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

Weights = dict[str, Tensor]


class Shape(NamedTuple):
    """What the weights don't show of a model.

    positions: "rope" or "alibi", or "" without positions beside learned ones.  rotated: the elements of a head that
    rotary positions turn.  interpolation: what their frequencies are divided by.  stretch: the factor of Llama 3.1's
    scaling; None: there is none.  adapters: what the products of adapters are multiplied by.
    """

    epsilon: float = 1e-5
    positions: str = ""
    base: float = 10_000.0
    rotated: int = 0
    interpolation: float = 1.0
    stretch: float | None = None
    squares: bool = False
    adapters: float = 1.0


GPT2 = Shape()


class Batch(NamedTuple):
    """A global batch: tokens and labels [B, S], and a mask of the labels that count (1 or 0; None: all count).

    document_end: the token after which a row's next document begins, which attends to nothing before itself; None:
    every row is one document.
    """

    tokens: Tensor
    labels: Tensor
    loss_mask: Tensor | None = None
    document_end: int | None = None


@dataclass(frozen=True)
class Recipe:
    """The settings of the reference's training; learning_rate(i) is the rate of step i = 0, 1, ...

    factors: by name, what the rate of a weight is multiplied by; 1 for all others.  late_from: the first step whose
    gradients change the weights of the step after the next one; None: all change those of the next.
    """

    learning_rate: Callable[[int], float]
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8
    max_norm: float = 1.0
    frozen: frozenset[str] = frozenset()
    factors: Mapping[str, float] = field(default_factory=dict)
    late_from: int | None = None


@dataclass
class History:
    """The outcome of training: one loss and one gradient norm (before clipping) a step, and the weights at the end."""

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    weights: Weights = field(default_factory=dict)


def train(weights: Mapping[str, Tensor], batches: Sequence[Batch], recipe: Recipe, shape: Shape = GPT2) -> History:
    """Train on `batches`, one optimizer step each."""
    history = History()
    live = {name: value.detach().double().clone().requires_grad_(True) for name, value in weights.items()}
    masters = {name: value.detach().clone() for name, value in live.items()}
    moments = {name: (torch.zeros_like(value), torch.zeros_like(value)) for name, value in live.items()}
    late: Weights = {}
    for step, batch in enumerate(batches):
        loss = mean_loss(live, batch, shape)
        grads = gradients(loss, live)
        trained = {name: grad for name, grad in grads.items() if name not in recipe.frozen}
        norm = math.sqrt(sum(float(grad.square().sum()) for grad in trained.values()))
        factor = min(1.0, recipe.max_norm / (norm + 1e-6)) if recipe.max_norm > 0 else 1.0
        for name, grad in trained.items():
            own = recipe.factors.get(name, 1.0)
            _adamw(masters[name], grad * factor, moments[name], step, decayed(name), recipe, own)
        is_late = recipe.late_from is not None and step >= recipe.late_from
        for name, value in (late if is_late else masters).items():
            live[name].data.copy_(value)
        late = {name: master.clone() for name, master in masters.items()} if is_late else {}
        history.losses.append(loss.item())
        history.grad_norms.append(norm)
    history.weights = masters
    return history


def mean_loss(weights: Mapping[str, Tensor], batch: Batch, shape: Shape = GPT2) -> Tensor:
    """Return the sum of the token losses that count, divided by their number in the global batch."""
    scores = _documents_logits(weights, batch, shape)
    losses = F.cross_entropy(scores.flatten(0, 1), batch.labels.flatten(), reduction="none")
    if batch.loss_mask is None:
        return losses.sum() / losses.numel()
    mask = batch.loss_mask.flatten().double()
    return (losses * mask).sum() / mask.sum()


def gradients(loss: Tensor, weights: Mapping[str, Tensor]) -> Weights:
    """Return d loss / d weight by name, with zeros for a weight that is not used."""
    found = torch.autograd.grad(loss, list(weights.values()), allow_unused=True)
    pairs = zip(weights.items(), found, strict=True)
    return {name: torch.zeros_like(value) if grad is None else grad for (name, value), grad in pairs}


def decayed(name: str) -> bool:
    """Return True if weight decay applies: to matrices, not to biases or layer norms."""
    return not name.endswith("bias") and "norm" not in name


def logits(weights: Mapping[str, Tensor], tokens: Tensor, shape: Shape = GPT2) -> Tensor:
    """Return the logits [B, S, V] of token ids [B, S]."""
    weights = adapted(weights, shape.adapters)
    word = weights["embedding.word.weight"]
    x = word[tokens]
    if "embedding.position.weight" in weights:
        x = x + weights["embedding.position.weight"][torch.arange(tokens.shape[1])]
    if "embedding.norm.weight" in weights:
        x = _norm(weights, "embedding.norm", x, shape.epsilon)
    num_layers = 1 + max(int(name.split(".")[1]) for name in weights if name.startswith("layers."))
    for index in range(num_layers):
        here = {name.split(".", 2)[2]: w for name, w in weights.items() if name.startswith(f"layers.{index}.")}
        x = x + _attention(here, _norm(here, "input_norm", x, shape.epsilon), shape)
        x = x + _feed_forward(here, _norm(here, "post_attention_norm", x, shape.epsilon), shape)
    x = _norm(weights, "final_norm", x, shape.epsilon)
    return torch.einsum("bsh,vh->bsv", x, weights.get("head.weight", word))


def adapted(weights: Mapping[str, Tensor], scale: float) -> Weights:
    """Return the weights of a model without adapters that computes the same: W + scale B A of each layer with one."""
    found = {name: value for name, value in weights.items() if ".adapter." not in name}
    for name in [name for name in weights if name.endswith(".adapter.lora_A.weight")]:
        layer = name.removesuffix(".adapter.lora_A.weight")
        thin, other = weights[name], weights[f"{layer}.adapter.lora_B.weight"]
        found[f"{layer}.weight"] = found[f"{layer}.weight"] + scale * torch.einsum("...r,ri->...i", other, thin)
    return found


def _documents_logits(weights: Mapping[str, Tensor], batch: Batch, shape: Shape) -> Tensor:
    """Return the logits [B, S, V] with every document computed alone; documents of one length form a batch of rows."""
    if batch.document_end is None:
        return logits(weights, batch.tokens, shape)
    by_length: dict[int, list[tuple[int, int]]] = {}
    for row, tokens in enumerate(batch.tokens.tolist()):
        start = 0
        for place, token in enumerate(tokens):
            if token == batch.document_end or place == len(tokens) - 1:
                by_length.setdefault(place + 1 - start, []).append((row, start))
                start = place + 1
    vocabulary = weights["embedding.word.weight"].shape[0]
    scores = torch.zeros((*batch.tokens.shape, vocabulary), dtype=torch.float64)
    for length, found in by_length.items():
        rows, starts = torch.tensor(found).T.unsqueeze(-1)  # each [documents, 1]
        places = starts + torch.arange(length)
        scores[rows, places] = logits(weights, batch.tokens[rows, places], shape)
    return scores


def _norm(weights: Mapping[str, Tensor], name: str, x: Tensor, epsilon: float) -> Tensor:
    if f"{name}.bias" not in weights:
        return x / torch.sqrt(x.square().mean(-1, keepdim=True) + epsilon) * weights[f"{name}.weight"]
    centred = x - x.mean(-1, keepdim=True)
    variance = centred.square().mean(-1, keepdim=True)
    return centred / torch.sqrt(variance + epsilon) * weights[f"{name}.weight"] + weights[f"{name}.bias"]


def _attention(weights: Mapping[str, Tensor], x: Tensor, shape: Shape) -> Tensor:
    query, key, value = _heads(weights, x)
    if "attention.query_norm.weight" in weights:
        query = _norm(weights, "attention.query_norm", query, shape.epsilon)
        key = _norm(weights, "attention.key_norm", key, shape.epsilon)
    if shape.positions == "rope":
        query, key = _rotated(query, shape), _rotated(key, shape)
    shared = query.shape[1] // key.shape[1]
    key, value = (part.repeat_interleave(shared, dim=1) for part in (key, value))
    scores = torch.einsum("bnqd,bnkd->bnqk", query, key) / math.sqrt(query.shape[-1])
    if shape.positions == "alibi":
        slopes = torch.tensor(_slopes(query.shape[1]), dtype=torch.float64)
        scores = scores + slopes[:, None, None] * torch.arange(x.shape[1])
    future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
    mixed = torch.einsum("bnqk,bnkd->bqnd", scores.masked_fill(future, -math.inf).softmax(-1), value)
    return _linear(weights, "attention.projection", mixed.flatten(2))


def _heads(weights: Mapping[str, Tensor], x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries [B, n, S, d], keys and values [B, g, S, d]."""
    if "attention.qkv.weight" in weights:
        matrices, name = list(weights["attention.qkv.weight"]), "attention.qkv.bias"
        biases = list(weights[name]) if name in weights else [0.0] * 3
    else:
        matrices = [weights["attention.query.weight"], *weights["attention.key_value.weight"]]
        names = ("attention.query.bias", "attention.key_value.bias")
        biases = [weights[names[0]], *weights[names[1]]] if names[0] in weights else [0.0] * 3
    query, key, value = (
        (torch.einsum("bsh,ndh->bsnd", x, matrix) + bias).transpose(1, 2)
        for matrix, bias in zip(matrices, biases, strict=True)
    )
    return query, key, value


def _rotated(x: Tensor, shape: Shape) -> Tensor:
    """Multiply pairs of elements, half of the rotated ones apart, as complex numbers; x [B, n, S, d]."""
    half = shape.rotated // 2
    # In float32, as everybody's tables are.
    powers = torch.arange(0, shape.rotated, 2, dtype=torch.float32) / shape.rotated
    frequencies = torch.tensor([_stretched(1 / each, shape) for each in shape.base**powers])
    angles = torch.arange(x.shape[2], dtype=torch.float32)[:, None] * frequencies
    turn = torch.complex(angles.cos().double(), angles.sin().double())
    turned = torch.complex(x[..., :half], x[..., half : 2 * half]) * turn
    return torch.cat((turned.real, turned.imag, x[..., 2 * half :]), dim=-1)


def _stretched(frequency: Tensor, shape: Shape) -> Tensor:
    """Return a frequency after interpolation and Llama 3.1's scaling of those that fit 8192 positions rarely."""
    frequency = frequency / shape.interpolation
    if shape.stretch is None:
        return frequency
    times = 8192 / (2 * math.pi / frequency)
    if times >= 4:
        return frequency
    if times <= 1:
        return frequency / shape.stretch
    smooth = (times - 1.0) / 3.0
    return (1 - smooth) * frequency / shape.stretch + smooth * frequency


def _slopes(heads: int) -> list[float]:
    """Return ALiBi's slopes, as the paper's code finds them for any number of heads."""
    power = math.log2(heads)
    if power == int(power):
        return [2 ** (-8 * (index + 1) / heads) for index in range(heads)]
    fewer = 2 ** int(power)
    return _slopes(fewer) + _slopes(2 * fewer)[0::2][: heads - fewer]


def _feed_forward(weights: Mapping[str, Tensor], x: Tensor, shape: Shape) -> Tensor:
    if weights["mlp.up.weight"].ndim == 3:
        gate, up = (
            x @ matrix.T + (weights["mlp.up.bias"][index] if "mlp.up.bias" in weights else 0.0)
            for index, matrix in enumerate(weights["mlp.up.weight"])
        )
        return _linear(weights, "mlp.down", gate * torch.sigmoid(gate) * up)
    u = _linear(weights, "mlp.up", x)
    if shape.squares:
        return _linear(weights, "mlp.down", u.clamp(min=0) ** 2)
    u = 0.5 * u * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (u + 0.044715 * u**3)))
    return _linear(weights, "mlp.down", u)


def _linear(weights: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    return x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", torch.zeros(()))


@torch.no_grad()
def _adamw(
    weight: Tensor, grad: Tensor, moments: tuple[Tensor, Tensor], step: int, decay: bool, recipe: Recipe, factor: float
) -> None:
    """Take one AdamW step in place (Loshchilov and Hutter, Decoupled Weight Decay Regularization, algorithm 2)."""
    rate, (beta1, beta2) = recipe.learning_rate(step) * factor, recipe.betas
    first, second = moments
    first.copy_(beta1 * first + (1 - beta1) * grad)
    second.copy_(beta2 * second + (1 - beta2) * grad**2)
    corrected = first / (1 - beta1 ** (step + 1)), second / (1 - beta2 ** (step + 1))
    if decay:
        weight.mul_(1 - rate * recipe.weight_decay)
    weight.sub_(rate * corrected[0] / (corrected[1].sqrt() + recipe.epsilon))


def scheduled_rate(
    step: int, *, peak: float, final: float = 0.0, warmup: int = 0, decay_steps: int = 1, style: str = "constant"
) -> float:
    """Return the learning rate after `step` un-skipped steps: linear warm-up, then constant, linear or cosine."""
    if step < warmup:
        return peak * step / warmup
    if style == "constant":
        return peak
    if step > decay_steps:
        return final
    done = (step - warmup) / (decay_steps - warmup)
    shape = {"linear": 1.0 - done, "cosine": 0.5 * (1.0 + math.cos(math.pi * done))}[style]
    return final + (peak - final) * shape
