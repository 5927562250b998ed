"""Build a model that no process ever holds whole: `torchrun --standalone --nproc-per-node 2 examples/zero_init.py`.

Inside `megazero.zero.Init` every parameter is partitioned as soon as its module has been made.
"""

import torch
from torch import nn

import megazero

WIDTH, LAYERS = 512, 8
config = {
    "train_micro_batch_size_per_gpu": 4,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
}

torch.manual_seed(1)
with megazero.zero.Init(config_dict_or_path=config):
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS)))
numel = sum(parameter.numel() for parameter in model.parameters())
kept = sum(parameter.untyped_storage().nbytes() // 4 for parameter in model.parameters())

engine = megazero.initialize(model, config)
if engine.mesh.rank == 0:
    print(f"{numel} parameters, of which {kept} were in this process's modules before the training", flush=True)
x = torch.randn(4, WIDTH, device=engine.device)
for step in range(1, 16):
    loss = (engine(x) - x).square().mean()
    engine.backward(loss)
    engine.step()
    if engine.mesh.rank == 0 and step % 5 == 0:
        print(f"step {step}: loss {loss.item():.4f}", flush=True)
with megazero.zero.GatheredParameters(model[0][0].weight):
    if engine.mesh.rank == 0:
        print(f"the first layer has norm {model[0][0].weight.norm():.2f}", flush=True)
