"""Training programs in the styles in which DeepSpeed is used, beside the same training in plain PyTorch.

Each program is a function of `Place`, and returns what it has trained; `plain_...` does the same in one process with
whole batches, in float64.
"""

import argparse
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import megazero.deepspeed as deepspeed

Sample = tuple[Tensor, Tensor]
RATE = 0.05
CLIP = 0.5


class Place(NamedTuple):
    """Where a program runs: its rank, the number of ranks, the ZeRO stage, and a folder that all ranks see."""

    rank: int
    ranks: int
    stage: int
    folder: Path


class Trained(NamedTuple):
    """The weights by name, and other results that must be those of plain PyTorch."""

    weights: dict[str, Tensor]
    figures: dict[str, float]


class Points(Dataset[Sample]):
    """Thirteen points, a number that two ranks with micro-batches of two do not divide."""

    def __len__(self) -> int:
        return 13

    def __getitem__(self, index: int) -> Sample:
        x = torch.arange(3, dtype=torch.float64) * 0.3 + index
        return torch.sin(x), torch.cos(x[:1] * 2)


def collate(samples: list[Sample]) -> dict[str, Tensor]:
    return {"x": torch.stack([x for x, _ in samples]), "y": torch.stack([y for _, y in samples])}


class Net(nn.Module):
    """A small network whose forward returns the loss, with a layer that may be frozen."""

    def __init__(self, *, freezes: bool = False) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 7)
        self.outer = nn.Linear(7, 1, bias=False)
        self.inner.bias.requires_grad_(not freezes)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.outer(torch.tanh(self.inner(x))) - y).square().mean()


def net(*, freezes: bool = False) -> Net:
    torch.manual_seed(5)
    return Net(freezes=freezes).double()


def configuration(stage: int, **others: Any) -> dict[str, Any]:
    """Return a configuration in float64, which is megazero's own form."""
    return {
        "zero": {"zero_stage": stage, "reduce_bucket_size": 20}
        | ({"param_persistence_threshold": 2} if stage == 3 else {}),
        "precision": {"precision": "fp64"},
        "optimizer": {"type": "AdamW", "lr": RATE, "params": {"weight_decay": 0.1}},
        "gradient_clipping": CLIP,
        "train_micro_batch_size_per_gpu": 2,
        **others,
    }


# Whether the optimizer's states, the gradients and the parameters are partitioned, by stage (ZeRO, section 5).
PARTITIONED = {0: (False, False, False), 1: (True, False, False), 2: (True, True, False), 3: (True, True, True)}


def check_stage(engine: Any, stage: int) -> None:
    """Check what an engine answers about its stage."""
    found = (
        engine.zero_optimization(),
        engine.zero_optimization_partition_gradients(),
        engine.zero_optimization_partition_weights(),
    )
    assert (engine.zero_optimization_stage(), found) == (stage, PARTITIONED[stage])


def whole_weights(engine: Any) -> dict[str, Tensor]:
    state: Mapping[str, Tensor] = engine.state_dict()
    return {name: value.detach().cpu().clone() for name, value in state.items()}


def micro_batch(step: int, micro: int, rank: int) -> Sample:
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
    x = torch.randn(2, 3, generator=generator, dtype=torch.float64)
    return x, x.sum(1, keepdim=True).sin()


# --- the program's arguments, its data and the configuration's optimizer and schedule --------------------------------

SCHEDULE = {"type": "WarmupLR", "params": {"warmup_min_lr": 0.0, "warmup_max_lr": RATE, "warmup_num_steps": 4}}


def arguments_and_data(place: Place) -> Trained:
    path = place.folder / f"configuration_{place.stage}.json"
    if place.rank == 0:
        path.write_text(json.dumps(configuration(place.stage, gradient_accumulation_steps=2, scheduler=SCHEDULE)))
    deepspeed.init_distributed()
    deepspeed.comm.barrier()
    parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
    parser.add_argument("--local_rank", type=int, default=-1)
    args = parser.parse_args(["--deepspeed", "--deepspeed_config", str(path)])
    model = net(freezes=True)
    engine, optimizer, loader, schedule = deepspeed.initialize(
        args=args,
        model=model,
        model_parameters=(p for p in model.parameters() if p.requires_grad),
        training_data=Points(),
        collate_fn=collate,
    )
    assert args.deepspeed and args.local_rank == engine.local_rank >= 0
    assert loader is engine.training_dataloader and len(loader) == 4
    loader = engine.deepspeed_io(Points(), num_local_io_workers=0)  # a process of the tests may have no children
    engine.train()
    returned = []
    for _ in range(2):
        for batch in loader:
            loss = engine(**batch)
            returned.append(engine.backward(loss))
            engine.step()
    assert torch.equal(returned[-1], loss.detach() / 2)
    assert engine.micro_steps == 8 and engine.global_steps == 4 and optimizer is engine.optimizer
    figures = {"norm": engine.get_global_grad_norm(), "rate": schedule.get_last_lr()[0]}
    trained = Trained(whole_weights(engine), figures)
    engine.destroy()
    return trained


def plain_arguments_and_data(ranks: int) -> Trained:
    model, data = net(freezes=True), Points()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=RATE, weight_decay=0.1)
    shares = [
        list(DataLoader(data, 2, sampler=DistributedSampler(data, ranks, rank), collate_fn=collate))
        for rank in range(ranks)
    ]
    norm, updates = 0.0, 0
    for _ in range(2):
        for first in range(0, 4, 2):
            for share in shares:
                for batch in share[first : first + 2]:
                    (model(**batch) / 2 / ranks).backward()
            norm = float(nn.utils.clip_grad_norm_(trained, CLIP))
            optimizer.param_groups[0]["lr"] = warm_rate(updates)
            optimizer.step()
            optimizer.zero_grad()
            updates += 1
    return Trained({n: p.detach() for n, p in model.named_parameters()}, {"norm": norm, "rate": warm_rate(updates)})


def warm_rate(updates: int) -> float:
    """Return the rate of an update: DeepSpeed's scheduler steps after the optimizer, and rises with a logarithm."""
    call = max(updates - 1, 0)
    share = torch.log(torch.tensor(call + 1.0, dtype=torch.float64)) / torch.log(torch.tensor(4.0, dtype=torch.float64))
    return RATE if call >= 4 else RATE * float(share)


# --- an optimizer and a scheduler of the program's own ---------------------------------------------------------------


def own_optimizer(place: Place) -> Trained:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    content = configuration(place.stage)
    del content["optimizer"]
    engine, same, _, schedule = deepspeed.initialize(
        None,
        model,
        optimizer,
        model.parameters(),
        lr_scheduler=lambda made: torch.optim.lr_scheduler.MultiStepLR(made, [2, 3], gamma=0.3),
        config_params=content,
    )
    assert same is optimizer
    train(engine, place, range(2))
    assert engine.save_checkpoint(place.folder / f"own_{place.stage}", client_state={"epoch": 1}) is True
    train(engine, place, range(2, 5))
    after = whole_weights(engine)
    path, client_state = engine.load_checkpoint(place.folder / f"own_{place.stage}", tag="global_step2")
    assert path is not None and client_state == {"epoch": 1}
    assert engine.global_steps == engine.micro_steps == 2 and schedule.last_epoch == 2
    assert engine.load_checkpoint(place.folder / "nowhere") == (None, None)
    train(engine, place, range(2, 5))
    weights = whole_weights(engine)
    assert all(torch.equal(weights[name], value) for name, value in after.items())
    assert engine.save_16bit_model(place.folder / f"half_{place.stage}")
    read = torch.load(place.folder / f"half_{place.stage}" / "pytorch_model.bin", weights_only=True)
    assert all(torch.equal(weights[name], value) for name, value in read.items())
    trained = Trained(weights, {"rate": engine.get_lr()[0], "momentum": engine.get_mom()[0]})
    engine.destroy()
    return trained


def train(engine: Any, place: Place, steps: range) -> None:
    for step in steps:
        engine.backward(engine(*micro_batch(step, 0, place.rank)))
        engine.step()


def plain_own_optimizer(ranks: int) -> Trained:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 3], gamma=0.3)
    for step in range(5):
        for rank in range(ranks):
            (model(*micro_batch(step, 0, rank)) / ranks).backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    figures = {"rate": schedule.get_last_lr()[0], "momentum": 0.9}
    return Trained({n: p.detach() for n, p in model.named_parameters()}, figures)


# --- param groups of the program's for the configuration's optimizer; boundaries of its own --------------------------

PASSES = (3, 1, 2)  # backward passes of each step, which are divided by four all the same


def boundaries(place: Place) -> Trained:
    model = net()
    engine, _, _, _ = deepspeed.initialize(
        model=model, model_parameters=groups(model), config=configuration(place.stage, gradient_accumulation_steps=4)
    )
    for step, passes in enumerate(PASSES):
        for micro in range(passes):
            is_last = micro + 1 == passes
            with set_boundary(engine, step, is_last=is_last):
                loss = engine(*micro_batch(step, micro, place.rank))
                if step == 1:
                    loss.backward()
                else:
                    engine.backward(loss)
            if step != 2:
                assert engine.is_gradient_accumulation_boundary() is is_last
        if step != 1:
            engine.allreduce_gradients()  # after the first step's last pass they are reduced already
        if step == 2:
            engine.allreduce_gradients()
        engine.step()
        assert engine.was_step_applied()
    figures = {"norm": engine.get_global_grad_norm(), "rates": sum(engine.get_lr()), "steps": engine.global_steps}
    trained = Trained(whole_weights(engine), figures)
    engine.destroy()
    return trained


@contextmanager
def set_boundary(engine: Any, step: int, *, is_last: bool) -> Iterator[None]:
    """Set whether a pass is the step's last; in the third step no pass is, and all are in no_sync."""
    if step < 2:
        engine.set_gradient_accumulation_boundary(is_last)
        yield
    else:
        engine.set_gradient_accumulation_boundary(None)
        with engine.no_sync():
            yield


def groups(model: Net) -> list[dict[str, Any]]:
    return [
        {"params": [model.inner.weight, model.outer.weight], "weight_decay": 0.3},
        {"params": [model.inner.bias], "weight_decay": 0.0, "lr": RATE / 2},
    ]


def plain_boundaries(ranks: int) -> Trained:
    model = net()
    optimizer = torch.optim.AdamW(groups(model), lr=RATE, weight_decay=0.1)
    norm = 0.0
    for step, passes in enumerate(PASSES):
        for micro in range(passes):
            for rank in range(ranks):
                (model(*micro_batch(step, micro, rank)) / 4 / ranks).backward()
        norm = float(nn.utils.clip_grad_norm_(model.parameters(), CLIP))
        optimizer.step()
        optimizer.zero_grad()
    figures = {"norm": norm, "rates": RATE * 1.5, "steps": float(len(PASSES))}
    return Trained({n: p.detach() for n, p in model.named_parameters()}, figures)


# --- several losses, each with a backward pass of its own ------------------------------------------------------------


def several_losses(place: Place) -> Trained:
    """Train in steps of two passes, which the first engine counts itself and the second leaves to the program."""
    trained = []
    for managed in (True, False):
        content = configuration(place.stage, managed_gradient_accumulation=managed)
        engine, _, _, _ = deepspeed.initialize(model=net(), config=content)
        assert engine.managed_gradient_accumulation() is managed
        for step in range(3):
            with engine.coalesce_grad_reduction() if managed else nullcontext():
                for micro in range(2):
                    engine.backward(engine(*micro_batch(step, micro, place.rank)))
            engine.step()
            assert engine.was_step_applied()
        trained.append(Trained(whole_weights(engine), {"norm": engine.get_global_grad_norm()}))
        engine.destroy()
    for name, value in trained[0].weights.items():
        torch.testing.assert_close(trained[1].weights[name], value, rtol=1e-12, atol=1e-12)
    return trained[0]


def plain_several_losses(ranks: int) -> Trained:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.1)
    norm = 0.0
    for step in range(3):
        for micro in range(2):
            for rank in range(ranks):
                (model(*micro_batch(step, micro, rank)) / ranks).backward()
        norm = float(nn.utils.clip_grad_norm_(model.parameters(), CLIP))
        optimizer.step()
        optimizer.zero_grad()
    return Trained({n: p.detach() for n, p in model.named_parameters()}, {"norm": norm})


# --- a batch that grows ---------------------------------------------------------------------------------------------


def growing_batch(place: Place) -> Trained:
    engine, _, _, _ = deepspeed.initialize(model=net(), config=configuration(place.stage))
    check_stage(engine, place.stage)
    assert engine.train_batch_size() == 2 * place.ranks
    for step in range(4):
        if step == 2:
            engine.set_train_batch_size(6 * place.ranks)
            assert engine.gradient_accumulation_steps() == 3
        for micro in range(engine.gradient_accumulation_steps()):
            engine.backward(engine(*micro_batch(step, micro, place.rank)))
            engine.step()
    assert (engine.global_steps, engine.global_samples) == (4, 16 * place.ranks)
    trained = Trained(whole_weights(engine), {"norm": engine.get_global_grad_norm()})
    engine.destroy()
    return trained


def plain_growing_batch(ranks: int) -> Trained:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.1)
    norm = 0.0
    for step in range(4):
        passes = 1 if step < 2 else 3
        for micro in range(passes):
            for rank in range(ranks):
                (model(*micro_batch(step, micro, rank)) / passes / ranks).backward()
        norm = float(nn.utils.clip_grad_norm_(model.parameters(), CLIP))
        optimizer.step()
        optimizer.zero_grad()
    return Trained({n: p.detach() for n, p in model.named_parameters()}, {"norm": norm})


Program = Callable[[Place], Trained]
PROGRAMS: Mapping[str, tuple[Program, Callable[[int], Trained]]] = {
    "arguments and data": (arguments_and_data, plain_arguments_and_data),
    "own optimizer": (own_optimizer, plain_own_optimizer),
    "boundaries": (boundaries, plain_boundaries),
    "several losses": (several_losses, plain_several_losses),
    "growing batch": (growing_batch, plain_growing_batch),
}
