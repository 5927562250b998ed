"""Computes the likelihoods of requests on any layout; copies of the model share the work.

All ranks have all requests.  Their windows are sorted by length and cut into batches, which are the same for any number
of copies, and copy c of n computes batches c, c + n, ...  A number per window comes from the first rank of the last
pipeline stage, and every rank adds up the same ones.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megazero.comm.mesh import Mesh
from megazero.console import Console
from megazero.evaluate.windows import Request, Window, windows
from megazero.generate.session import Session
from megazero.tensor_parallel.cross_entropy import IN_PLACE, Labels
from megazero.tensor_parallel.head_loss import row_chunks

_LOGITS_BYTES = 1 << 27  # the most bytes of logits at a time


class Score(NamedTuple):
    """A request's log-likelihood in nats, and whether every predicted id is the most likely one at its place."""

    log_likelihood: float
    is_greedy: bool


class Scorer:
    """A model that gives likelihoods.

    rows: windows that it reads at a time.  `score` is collective: all ranks of the mesh call it with the same requests.
    """

    def __init__(self, session: Session, mesh: Mesh, *, rows: int, console: Console) -> None:
        self.session = session
        self.length = session.model.max_positions
        self._mesh = mesh
        self._rows = rows
        self._console = console

    @torch.inference_mode()
    def score(self, requests: Sequence[Request], *, stride: int | None = None, name: str = "scoring") -> list[Score]:
        """Return every request's score, the same on every rank.

        stride: ids that each window but the first predicts, the model's length if None.  name: for the progress bar.
        """
        cut = [
            window
            for number, request in enumerate(requests)
            for window in windows(number, request, length=self.length, stride=stride or self.length)
        ]
        order = sorted(range(len(cut)), key=lambda index: -cut[index].length)
        batches = [order[start : start + self._rows] for start in range(0, len(order), self._rows)]
        copies, copy = self._mesh.topology.dp, self._mesh.coordinate("dp")
        found = torch.zeros(len(cut), 2, dtype=torch.float64)  # log-likelihood, and 1 if all are the most likely
        own = batches[copy::copies]
        for batch in self._console.track(own, total=len(own), description=name):
            scores = self._score_windows([(requests[cut[index].request], cut[index]) for index in batch])
            if scores is not None and self._mesh.coordinate("tp") == 0:
                found[batch] = scores
        if cut:
            self._mesh.control.all_reduce(found).wait()
        parts: list[list[list[float]]] = [[] for _ in requests]
        for window, part in zip(cut, found.tolist(), strict=True):
            parts[window.request].append(part)
        return [Score(math.fsum(part[0] for part in each), all(part[1] for part in each)) for each in parts]

    def _score_windows(self, batch: Sequence[tuple[Request, Window]]) -> Tensor | None:
        """Return the scores [b, 2] of windows, float64 on the CPU; None before the last stage."""
        longest = max(window.length for _, window in batch)
        tokens = torch.zeros(len(batch), longest, dtype=torch.int64)
        places: list[Tensor] = []
        labels: list[Tensor] = []
        for row, (request, window) in enumerate(batch):
            ids = torch.tensor(request.ids[window.begin : window.end])
            tokens[row, : window.length] = ids[:-1]  # what is behind them changes nothing before it
            first = window.first - window.begin
            places.append(torch.arange(first - 1, window.length) + row * longest)
            labels.append(ids[first:])
        x = self.session.last_layer(tokens)
        if x is None:
            return None
        losses, are_best = self._losses(x[torch.cat(places).to(x.device)], torch.cat(labels).to(x.device))
        sizes = [len(each) for each in labels]
        parts = zip(torch.split(losses.cpu().double(), sizes), torch.split(are_best.cpu(), sizes), strict=True)
        return torch.stack([torch.stack((-loss.sum(), best.all().double())) for loss, best in parts])

    def _losses(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss of each of m ids, and whether it is the most likely one.  x [m, h]; labels [m]."""
        model, tp = self.session.model, self._mesh.axis("tp")
        losses = torch.empty(len(x), dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
        are_best = torch.empty(len(x), dtype=torch.bool, device=x.device)
        for rows in row_chunks(len(x), _LOGITS_BYTES // (losses.element_size() * model.vocab_size)):
            logits = model.logits(model.final_norm(x[rows]))  # [m, Vp / t]
            first = tp.rank * logits.shape[1]
            logits[:, max(model.vocab_size - first, 0) :] = -torch.inf  # padding
            peak, best = logits.max(dim=1)
            highest = peak.clone()
            tp.all_reduce(highest, "max").wait()
            best = torch.where(peak == highest, best + first, model.vocab_size)
            tp.all_reduce(best, "min").wait()
            are_best[rows] = best == labels[rows]
            losses[rows], _ = IN_PLACE.losses(logits, Labels(labels[rows], None, model.vocab_size), tp)
        return losses, are_best
