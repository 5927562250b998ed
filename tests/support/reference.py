"""The plain reference: GPT-2 and its training in single-process float64 PyTorch, without any code of megazero.

Weights are a dict from logical name to the full, unpadded logical tensor:

    embedding.word.weight [V, h]        layers.{i}.input_norm.{weight,bias} [h]
    embedding.position.weight [S, h]    layers.{i}.attention.qkv.weight [3, n, d, h]    .bias [3, n, d]
    final_norm.{weight,bias} [h]        layers.{i}.attention.projection.weight [h, h]   .bias [h]
    head.weight [V, h] (untied only)    layers.{i}.post_attention_norm.{weight,bias} [h]
                                        layers.{i}.mlp.up.weight [f, h]   .bias [f]
                                        layers.{i}.mlp.down.weight [h, f] .bias [h]

Attention is the naive softmax of an S x S matrix; AdamW, clipping and the learning-rate schedule are written out.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

Weights = dict[str, Tensor]


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


def train(weights: Mapping[str, Tensor], batches: Sequence[Batch], recipe: Recipe, epsilon: float = 1e-5) -> History:
    """Train on `batches`, one optimizer step each; `epsilon` is that of the layer norms."""
    history = History()
    live = {name: value.detach().double().clone().requires_grad_(True) for name, value in weights.items()}
    masters = {name: value.detach().clone() for name, value in live.items()}
    moments = {name: (torch.zeros_like(value), torch.zeros_like(value)) for name, value in live.items()}
    late: Weights = {}
    for step, batch in enumerate(batches):
        loss = mean_loss(live, batch, epsilon)
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


def mean_loss(weights: Mapping[str, Tensor], batch: Batch, epsilon: float = 1e-5) -> Tensor:
    """Return the sum of the token losses that count, divided by their number in the global batch."""
    scores = _documents_logits(weights, batch, epsilon)
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


def logits(weights: Mapping[str, Tensor], tokens: Tensor, epsilon: float = 1e-5) -> Tensor:
    """Return the logits [B, S, V] of token ids [B, S]."""
    word = weights["embedding.word.weight"]
    x = word[tokens] + weights["embedding.position.weight"][torch.arange(tokens.shape[1])]
    num_layers = 1 + max(int(name.split(".")[1]) for name in weights if name.startswith("layers."))
    for index in range(num_layers):
        here = {name.split(".", 2)[2]: w for name, w in weights.items() if name.startswith(f"layers.{index}.")}
        x = x + _attention(here, _norm(here, "input_norm", x, epsilon))
        x = x + _feed_forward(here, _norm(here, "post_attention_norm", x, epsilon))
    x = _norm(weights, "final_norm", x, epsilon)
    return torch.einsum("bsh,vh->bsv", x, weights.get("head.weight", word))


def _documents_logits(weights: Mapping[str, Tensor], batch: Batch, epsilon: float) -> Tensor:
    """Return the logits [B, S, V] with every document computed alone; documents of one length form a batch of rows."""
    if batch.document_end is None:
        return logits(weights, batch.tokens, epsilon)
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
        scores[rows, places] = logits(weights, batch.tokens[rows, places], epsilon)
    return scores


def _norm(weights: Mapping[str, Tensor], name: str, x: Tensor, epsilon: float) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    variance = centred.square().mean(-1, keepdim=True)
    return centred / torch.sqrt(variance + epsilon) * weights[f"{name}.weight"] + weights[f"{name}.bias"]


def _attention(weights: Mapping[str, Tensor], x: Tensor) -> Tensor:
    matrix, bias = weights["attention.qkv.weight"], weights["attention.qkv.bias"]
    query, key, value = (torch.einsum("bsh,ndh->bnsd", x, matrix[i]) + bias[i][:, None, :] for i in range(3))
    scores = torch.einsum("bnqd,bnkd->bnqk", query, key) / math.sqrt(matrix.shape[2])
    future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
    mixed = torch.einsum("bnqk,bnkd->bqnd", scores.masked_fill(future, -math.inf).softmax(-1), value)
    return mixed.flatten(2) @ weights["attention.projection.weight"].T + weights["attention.projection.bias"]


def _feed_forward(weights: Mapping[str, Tensor], x: Tensor) -> Tensor:
    u = x @ weights["mlp.up.weight"].T + weights["mlp.up.bias"]
    u = 0.5 * u * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (u + 0.044715 * u**3)))
    return u @ weights["mlp.down.weight"].T + weights["mlp.down.bias"]


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
