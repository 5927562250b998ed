"""Train low-rank additions (LoRA) to a frozen model: `torchrun --standalone --nproc-per-node 2 examples/lora.py`.

Frozen parameters are partitioned too in stage 3, but have no gradients, master weights or moments.
"""

import torch
from torch import nn

import megazero

WIDTH, RANK = 64, 4

torch.manual_seed(1)
layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)]
model = nn.Sequential(*layers, nn.Linear(WIDTH, 1))
megazero.lora(model, rank=RANK)
config = {
    "train_micro_batch_size_per_gpu": 32,
    "zero_optimization": {"stage": 3},
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.0}},
}
trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
frozen = sum(parameter.numel() for parameter in model.parameters() if not parameter.requires_grad)
engine = megazero.initialize(model, config)
generator = torch.Generator().manual_seed(engine.mesh.rank)
for step in range(1, 101):
    x = torch.randn(32, WIDTH, generator=generator).to(engine.device)
    loss = (engine(x) - x[:, :4].sum(1, keepdim=True)).square().mean()
    engine.backward(loss)
    engine.step()
    if engine.mesh.rank == 0 and step % 25 == 0:
        print(f"step {step}: loss {loss.item():.3f}, {trained} parameters trained, {frozen} frozen", flush=True)
