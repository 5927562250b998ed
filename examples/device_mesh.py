"""Use other people's process groups: torch's DeviceMesh, and layers that torch has split over its tensor dimension.

torchrun --standalone --nproc-per-node 4 examples/device_mesh.py
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import megazero

device = "cuda" if torch.cuda.is_available() else "cpu"
mesh = init_device_mesh(device, (int(os.environ["WORLD_SIZE"]) // 2, 2), mesh_dim_names=("dp", "tp"))

torch.manual_seed(1)
model = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)).to(device)
parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
config = {
    "train_micro_batch_size_per_gpu": 64,
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 1},
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
}
engine = megazero.initialize(model, config, mesh=mesh)
# Ranks of one tensor-parallel group compute on the same samples.
generator = torch.Generator().manual_seed(mesh.get_local_rank("dp"))
for step in range(1, 101):
    x = torch.randn(64, 32, generator=generator).to(device)
    loss = (engine(x) - x.sin()).square().mean()
    engine.backward(loss)
    engine.step()
    if dist.get_rank() == 0 and step % 25 == 0:
        print(f"step {step}: loss {loss.item():.4f}", flush=True)
