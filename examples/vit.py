"""Train a small vision transformer in a loop of one's own: `torchrun --standalone --nproc-per-node 2 examples/vit.py`.

The pictures are made here: each class is a plane wave of its own direction, under noise.
"""

import torch
from torch import Tensor, nn

import megazero

CLASSES, SIZE, PATCH, WIDTH = 8, 16, 4, 64


class ViT(nn.Module):
    """Patches, one token for the class, transformer layers, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, WIDTH, PATCH, stride=PATCH)
        self.token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.positions = nn.Parameter(0.02 * torch.randn(1, (SIZE // PATCH) ** 2 + 1, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, pictures: Tensor) -> Tensor:
        tokens = self.patches(pictures).flatten(2).transpose(1, 2)
        tokens = torch.cat((self.token.expand(len(tokens), -1, -1), tokens), dim=1)
        return self.head(self.layers(tokens + self.positions)[:, 0])


def batch(number: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return pictures [number, 1, SIZE, SIZE] and their classes [number]."""
    classes = torch.randint(CLASSES, (number,), generator=generator)
    angles = (torch.pi / CLASSES * classes).view(-1, 1, 1)
    rows, columns = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
    waves = (rows * angles.sin() + columns * angles.cos()).sin()
    return (waves + torch.randn(waves.shape, generator=generator)).unsqueeze(1), classes


torch.manual_seed(1)
config = {"train_micro_batch_size_per_gpu": 32, "zero_optimization": {"stage": 2}, "gradient_clipping": 1.0}
config["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-3}}
engine = megazero.initialize(ViT(), config)
generator = torch.Generator().manual_seed(engine.mesh.rank)
for step in range(1, 41):
    pictures, classes = batch(32, generator)
    scores = engine(pictures.to(engine.device))
    loss = nn.functional.cross_entropy(scores, classes.to(engine.device))
    engine.backward(loss)
    engine.step()
    if engine.mesh.rank == 0 and step % 20 == 0:
        right = (scores.argmax(1).cpu() == classes).float().mean()
        print(f"step {step}: loss {loss.item():.3f}, {right:.0%} right", flush=True)
