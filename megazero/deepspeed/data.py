"""Loads the training data that a DeepSpeed program passes to `initialize`: micro-batches of each rank's share."""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Sampler

from megazero.deepspeed.missing import refuse

_WORKERS = 2


class InputSettings(NamedTuple):
    """The training data of an engine, None without any, and how its samples become micro-batches and steps.

    collate_fn: makes a micro-batch of a list of samples; None for torch's.
    drop_last: leaves out the last micro-batch where it is smaller.
    managed: the engine counts micro-batches; False lets every call of its `step` update the parameters.
    """

    data: Dataset[Any] | None = None
    collate_fn: Callable[[list[Any]], Any] | None = None
    drop_last: bool = False
    managed: bool = True


class RepeatingLoader:
    """An iterator that begins a loader again whenever that ends."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self._batches = iter(loader)

    def __iter__(self) -> "RepeatingLoader":
        return self

    def __next__(self) -> Any:
        try:
            return next(self._batches)
        except StopIteration:
            self._batches = iter(self.loader)
            return next(self._batches)


def make_loader(
    dataset: Any,
    batch_size: int | None,
    *,
    shuffle: bool,
    rank: int,
    ranks: int,
    sampler: Sampler[Any] | None,
    collate_fn: Callable[[list[Any]], Any] | None,
    workers: int | None,
    pin_memory: bool,
    drop_last: bool,
) -> DataLoader[Any]:
    """Return a loader of one rank's share of a dataset.

    sampler: the samples of this rank; None gives every rank an equal share, where a sample may come twice.
    workers: processes that load samples; None for 2.
    Raises UsageError for a dataset that cannot be divided, and where no batch size is known.
    """
    if batch_size is None:
        rule = "a loader makes micro-batches"
        raise refuse("training data without a batch size", rule, "train_micro_batch_size_per_gpu, or train_batch_size")
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        rule = "every rank loads its share, which samples with an index have"
        raise refuse(f"training data of type {type(dataset).__name__}", rule, "a map-style torch Dataset")
    if sampler is None:
        sampler = DistributedSampler(dataset, num_replicas=ranks, rank=rank, shuffle=shuffle)
    return DataLoader(
        dataset,
        batch_size,
        sampler=sampler,
        num_workers=_WORKERS if workers is None else workers,
        collate_fn=collate_fn,
        pin_memory=pin_memory,
        drop_last=drop_last,
    )
