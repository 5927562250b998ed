"""Models of many kinds, none written for megazero's library, and their training in plain PyTorch for comparison."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

SAMPLES = 8  # samples of a step
Inputs = tuple[Tensor, ...]


@dataclass(frozen=True)
class Case:
    """A model, its inputs of a step (dim 0: samples), and its loss, which is a mean over the samples."""

    make: Callable[[], nn.Module]
    inputs: Callable[[torch.Generator], Inputs]
    loss: Callable[..., Tensor]


class History(NamedTuple):
    """The loss and gradient norm of each step, and the parameters by name after the last."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]


def make(name: str) -> nn.Module:
    torch.manual_seed(11)
    return CASES[name].make().double()


def inputs_of(name: str, step: int) -> Inputs:
    return CASES[name].inputs(torch.Generator().manual_seed(100 + step))


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1, foreach=False, fused=False)


def train_plain(
    name: str,
    steps: int,
    make_optimizer: Callable[[Any], torch.optim.Optimizer] = adamw,
    clip: float = 0.0,
) -> History:
    """Train in one process on whole batches; the optimizer leaves a parameter without a gradient alone."""
    model = make(name)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = make_optimizer(trained)
    losses, norms = [], []
    for step in range(steps):
        optimizer.zero_grad()
        loss = CASES[name].loss(model, step, *inputs_of(name, step))
        loss.backward()
        losses.append(loss.item())
        norms.append(float(torch.nn.utils.clip_grad_norm_(trained, clip or 1e30)))
        optimizer.step()
    return History(losses, norms, {n: p.detach() for n, p in model.named_parameters()})


def features(width: int) -> Callable[[torch.Generator], Inputs]:
    return lambda generator: (torch.randn(SAMPLES, width, generator=generator, dtype=torch.float64),)


def tokens(vocabulary: int, length: int) -> Callable[[torch.Generator], Inputs]:
    return lambda generator: (torch.randint(vocabulary, (SAMPLES, length), generator=generator),)


def mean_square(model: nn.Module, step: int, x: Tensor) -> Tensor:
    return model(x).square().mean()


class Perceptron(nn.Module):
    """A perceptron of odd sizes with a parameter of one element, a frozen layer and an unused layer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((1,), 0.7))
        self.layers = nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 11, bias=False), nn.LayerNorm(11))
        self.frozen = nn.Linear(11, 5).requires_grad_(False)
        self.unused = nn.Linear(5, 3)
        self.last = parametrizations.weight_norm(nn.Linear(5, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.frozen(self.layers(x) * self.scale)))


class Recurrent(nn.Module):
    """A model of tokens through an LSTM, whose weights lie in a list of its own and are used by one fused function."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(17, 5, padding_idx=0)
        self.lstm = nn.LSTM(5, 6, num_layers=2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(12, 17)

    def forward(self, ids: Tensor) -> dict[str, Any]:
        hidden, (last, _) = self.lstm(self.embed(ids))
        return {"logits": self.head(hidden), "more": [last]}


def next_token(model: nn.Module, step: int, ids: Tensor) -> Tensor:
    output = model(ids)
    logits = output["logits"] if isinstance(output, dict) else output
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


class Translator(nn.Module):
    """An encoder and decoder with one embedding, whose weight is also the head's.

    The embedding's weight and the weights inside attention are read outside the modules that own them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(19, 8)
        self.transformer = nn.Transformer(8, 2, 2, 2, 12, dropout=0.0, batch_first=True)

    def forward(self, ids: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], dtype=torch.float64)
        hidden = self.transformer(self.embed(ids.flip(1)), self.embed(ids), tgt_mask=mask)
        return F.linear(hidden, self.embed.weight)


class Branching(nn.Module):
    """A stack of blocks that runs in another order in every second step, with one block left out."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(5, 5) for _ in range(4))
        self.step = 0

    def forward(self, x: Tensor) -> Tensor:
        order = [0, 1, 2, 3] if self.step % 2 == 0 else [3, 0, 1]
        for index in order:
            x = torch.tanh(self.blocks[index](x))
        return x


def branching_loss(model: nn.Module, step: int, x: Tensor) -> Tensor:
    getattr(model, "module", model).step = step
    return model(x).square().mean()


class Lender(nn.Module):
    """A module whose forward returns its parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))

    def forward(self) -> Tensor:
        return self.weight


class Sharing(nn.Module):
    """A model with a layer that is called three times and with parameters that are used in unusual ways.

    One parameter is returned by its module, one is used twice, and one is shared by two modules.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lender = Lender()
        self.layer = nn.Linear(6, 6)
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.gain = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.lender()
        for _ in range(3):
            x = torch.tanh(self.layer(x)) * self.gain
        x = self.second(torch.tanh(self.first(x) @ weight))
        return (x * self.gain) @ self.first.weight.t() + self.layer.weight.sum(1)


class Recomputing(nn.Module):
    """A model whose blocks are recomputed in the backward by torch's checkpoint, two blocks at a time."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.first = nn.Linear(5, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4))
        self.last = nn.Linear(6, 1)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for pair in (self.blocks[:2], self.blocks[2:]):
            x = checkpoint(lambda x, pair=pair: pair[1](pair[0](x)), x, use_reentrant=self.reentrant)
        return self.last(x)


class Experts(nn.Module):
    """A mixture of experts, weighted by a gate; every expert runs for every sample, so that all ranks call the same."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 3)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(4, 5), nn.GELU(), nn.Linear(5, 4)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        share = self.gate(x).softmax(-1)  # [b, experts]
        outputs = torch.stack([expert(x) for expert in self.experts], dim=-1)  # [b, 4, experts]
        return (outputs * share.unsqueeze(1)).sum(-1) + x


class Convolutions(nn.Module):
    """A convolutional net for images, with group normalisation because that has no buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 6, 3, padding=1),
            nn.GroupNorm(2, 6),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(6, 5, 3, bias=False),
        )
        self.head = nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).mean((2, 3)))


def images(generator: torch.Generator) -> Inputs:
    return (torch.randn(SAMPLES, 3, 8, 8, generator=generator, dtype=torch.float64),)


def recomputing(reentrant: bool) -> Case:
    return Case(lambda: Recomputing(reentrant=reentrant), features(5), mean_square)


CASES: dict[str, Case] = {
    "perceptron": Case(Perceptron, features(7), mean_square),
    "recurrent": Case(Recurrent, tokens(17, 6), next_token),
    "translator": Case(Translator, tokens(19, 5), next_token),
    "branching": Case(Branching, features(5), branching_loss),
    "sharing": Case(Sharing, features(6), mean_square),
    "checkpoint": recomputing(reentrant=False),
    "reentrant checkpoint": recomputing(reentrant=True),
    "experts": Case(Experts, features(4), mean_square),
    "convolutions": Case(Convolutions, images, mean_square),
    "sequential": Case(lambda: nn.Sequential(nn.Linear(3, 4), nn.SiLU(), nn.Linear(4, 1)), features(3), mean_square),
}
