"""Train a module of your own on two workers of Ray Train, and resume: `python examples/ray_train.py /tmp/storage`.

Ray has joined the workers when the loop begins, and megazero takes the group that is there.  For a whole run of
`megazero pretrain` under Ray see megazero/train/on_ray.py.
"""

import sys
import tempfile
from typing import Any

import ray.train
import torch
from ray.train import Checkpoint, RunConfig, ScalingConfig
from ray.train.collective import broadcast_from_rank_zero
from ray.train.torch import TorchTrainer
from torch import nn

import megazero

CONFIG = {
    "train_micro_batch_size_per_gpu": 8,
    "zero_optimization": {"stage": 3},
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
}


def loop(settings: dict[str, Any]) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))
    engine = megazero.initialize(model, CONFIG)
    if (saved := ray.train.get_checkpoint()) is not None:
        with saved.as_directory() as folder:
            engine.load_checkpoint(folder)
            print(f"resumed at step {engine.global_steps}", flush=True)
    generator = torch.Generator().manual_seed(engine.mesh.rank)
    while engine.global_steps < settings["steps"]:
        inputs = torch.randn(8, 16, generator=generator)
        loss = (engine(inputs.to(engine.device)).squeeze(1) - inputs.sum(1).to(engine.device)).square().mean()
        engine.backward(loss)
        engine.step()
        if engine.global_steps % 50 == 1 or engine.global_steps == settings["steps"]:
            with tempfile.TemporaryDirectory() as folder:
                # All ranks write into rank 0's folder, so on several nodes it must be one that they share.
                place = broadcast_from_rank_zero(folder)
                engine.save_checkpoint(place)
                checkpoint = Checkpoint.from_directory(place) if engine.mesh.rank == 0 else None
                ray.train.report({"loss": loss.item()}, checkpoint=checkpoint)


if __name__ == "__main__":
    losses = []
    for steps in (1, 101):  # the second trainer has the name of the first, and so resumes what that has saved
        kept = RunConfig(name="example", storage_path=sys.argv[1])
        two = ScalingConfig(num_workers=2)
        trainer = TorchTrainer(loop, train_loop_config={"steps": steps}, scaling_config=two, run_config=kept)
        losses.append(trainer.fit().metrics["loss"])
    print(*losses)
