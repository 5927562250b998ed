"""Invented model states, partitioned by invented layouts, for tests of checkpoints.

The whole state is a table from (parameter, kind) to the full tensor.  A layout cuts a parameter along one dim over `tp`
ranks (the dim padded to a multiple of `tp * pad_to`), flattens each rank's tensor and cuts that at arbitrary points
over `dp` ranks.  All of it is plain slicing and shares no code with the code under test.
"""

import random
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megazero.checkpoint.folders import RANKS_IN_FOLDER
from megazero.checkpoint.merging import BOXES_PER_INDEX, Written, part_path, plan_indices, write_part
from megazero.checkpoint.state import TrainState
from megazero.checkpoint.writer import Draft, Saving, merge_own, prepare, publish, write_data
from megazero.optim.loss_scaler import LossScale
from megazero.parallel.param_spec import ParamSpec, StateFragment, StateKind

State = dict[tuple[str, StateKind], Tensor]

PADDING = -77.0

# The full shape of each parameter, and the dim that tensor parallelism cuts (None: replicated).
PARAMETERS: dict[str, tuple[tuple[int, ...], int | None]] = {
    "wte.weight": ((11, 5), 0),
    "qkv.weight": ((3, 6, 2, 5), 1),
    "proj.weight": ((5, 12), 1),
    "norm.weight": ((5,), None),
    "one.element": ((1,), None),
    "scalar": ((), None),
    "nothing": ((0, 3), None),
}


def make_state(seed: int = 0, kinds: tuple[StateKind, ...] = ("weight", "exp_avg", "exp_avg_sq")) -> State:
    generator = torch.Generator().manual_seed(seed)
    return {
        (name, kind): torch.randn(shape, generator=generator)
        for name, (shape, _) in PARAMETERS.items()
        for kind in kinds
    }


@dataclass(frozen=True)
class Layout:
    """A layout of tp x dp ranks, rank = tp_rank * dp + dp_rank; `seed` draws the cut points of the flat tensors."""

    tp: int = 1
    dp: int = 1
    pad_to: int = 1
    seed: int = 0

    @property
    def size(self) -> int:
        return self.tp * self.dp

    def spec(self, name: str, tp_rank: int) -> ParamSpec:
        shape, dim = PARAMETERS[name]
        if dim is None:
            return ParamSpec(name, shape, shape, (0,) * len(shape))
        multiple = self.tp * self.pad_to
        chunk = -(-shape[dim] // multiple) * multiple // self.tp
        local = (*shape[:dim], chunk, *shape[dim + 1 :])
        offset = tuple(chunk * tp_rank if d == dim else 0 for d in range(len(shape)))
        return ParamSpec(name, shape, local, offset, sharded_axes=("tp",))

    def cuts(self, name: str, numel: int) -> list[int]:
        """Return the bounds of the dp partitions of a flat tensor, drawn at random so that some are empty."""
        draw = random.Random(f"{self.seed} {name}")
        return [0, *sorted(draw.randint(0, numel) for _ in range(self.dp - 1)), numel]

    def fragments(self, rank: int, state: State, *, dtype: torch.dtype | None = None) -> list[StateFragment]:
        """Return the fragments of `state` that a rank owns; padding elements are PADDING."""
        tp_rank, dp_rank = divmod(rank, self.dp)
        found = []
        for (name, kind), full in state.items():
            spec = self.spec(name, tp_rank)
            if not spec.sharded_axes and tp_rank:
                continue
            flat = local_tensor(spec, full).reshape(-1).to(dtype or full.dtype)
            start, stop = self.cuts(name, spec.numel)[dp_rank : dp_rank + 2]
            found.append(StateFragment(spec, kind, start, stop, flat[start:stop]))
        return found


def local_tensor(spec: ParamSpec, full: Tensor) -> Tensor:
    """Return the tensor of the spec's rank, filled with PADDING past the full shape."""
    ends = [offset + length for offset, length in zip(spec.offset, spec.local_shape, strict=True)]
    padded = torch.full(list(map(max, ends, full.shape)), PADDING, dtype=full.dtype)
    padded[tuple(slice(0, size) for size in full.shape)] = full
    return padded[tuple(slice(offset, end) for offset, end in zip(spec.offset, ends, strict=True))].clone()


def blank(fragments: list[StateFragment]) -> list[StateFragment]:
    """Return the same fragments with PADDING in every element, to be filled by a reader."""
    return [fragment._replace(source=torch.full_like(fragment.tensor, PADDING)) for fragment in fragments]


def assert_same(got: list[StateFragment], expected: list[StateFragment]) -> None:
    """Assert that all fragments are equal to the bit, padding included."""
    assert len(got) == len(expected)
    for a, b in zip(got, expected, strict=True):
        assert a.tensor.dtype == b.tensor.dtype
        assert torch.equal(a.tensor.view(torch.uint8), b.tensor.view(torch.uint8)), (a.spec.name, a.kind)


def write_checkpoint(
    root: Path,
    state: State,
    layout: Layout,
    *,
    step: int = 20,
    box_bytes: int = 1 << 20,
    boxes_per_index: int = BOXES_PER_INDEX,
    ranks_in_folder: int = RANKS_IN_FOLDER,
) -> Path:
    """Write a checkpoint of `state` as the ranks of `layout` would, one after the other in the calling process."""
    progress = TrainState(LossScale(1.0), step, step, step).to_json()
    draft = Draft(root, step, progress, "seed: 1\n")
    with ExitStack() as held:
        saving = prepare(draft, held, layout.size, ranks_in_folder=ranks_in_folder)
        written = [
            write_data(saving, rank, layout.fragments(rank, state), box_bytes=box_bytes) for rank in range(layout.size)
        ]
        return root / finish(saving, draft, written, boxes_per_index=boxes_per_index)


def finish(saving: Saving, draft: Draft, written: list[Written], *, boxes_per_index: int = BOXES_PER_INDEX) -> str:
    """Take the steps of a save that come after the data, for all ranks in turn, and return the folder's name."""
    size, folder = len(written), Path(saving.folder)
    reports = [each.report(rank, size) for rank, each in enumerate(written)]
    plan = plan_indices(reports, boxes_per_index=boxes_per_index)
    for each in written:
        write_part(folder, saving.save_id, each, plan)
    for rank in range(size):
        merge_own(saving, plan, rank)
    for each in written:
        part_path(folder / each.file.name).unlink()
    return publish(saving, draft, plan)
