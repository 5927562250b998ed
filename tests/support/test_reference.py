"""Compares the plain reference with torch's AdamW and clipping, so that its mistakes do not become the standard."""

import torch
from support.reference import Batch, Recipe, decayed, mean_loss, scheduled_rate, train

VOCAB, HIDDEN, HEADS, LENGTH = 11, 8, 2, 6


def random_weights(num_layers: int = 2) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    head_dim = HIDDEN // HEADS
    shapes: dict[str, tuple[int, ...]] = {
        "embedding.word.weight": (VOCAB, HIDDEN),
        "embedding.position.weight": (LENGTH, HIDDEN),
        "final_norm.weight": (HIDDEN,),
        "final_norm.bias": (HIDDEN,),
    }
    for i in range(num_layers):
        for norm in ("input_norm", "post_attention_norm"):
            shapes |= {f"layers.{i}.{norm}.weight": (HIDDEN,), f"layers.{i}.{norm}.bias": (HIDDEN,)}
        for name, shape in {
            "attention.qkv": (3, HEADS, head_dim, HIDDEN),
            "attention.projection": (HIDDEN, HIDDEN),
            "mlp.up": (4 * HIDDEN, HIDDEN),
            "mlp.down": (HIDDEN, 4 * HIDDEN),
        }.items():
            shapes |= {f"layers.{i}.{name}.weight": shape, f"layers.{i}.{name}.bias": shape[:-1]}
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) * 0.3 for name, shape in shapes.items()}


def batch(seed: int) -> Batch:
    ids = torch.randint(VOCAB, (3, LENGTH + 1), generator=torch.Generator().manual_seed(seed))
    return Batch(ids[:, :-1], ids[:, 1:])


def test_steps_equal_torch_adamw_with_clipping() -> None:
    weights = random_weights()
    batches = [batch(seed) for seed in range(4)]
    ours = train(weights, batches, Recipe(lambda step: 1e-2 / (step + 1), weight_decay=0.1, max_norm=0.5))
    theirs = {name: value.clone().requires_grad_(True) for name, value in weights.items()}
    groups = [
        {"params": [value for name, value in theirs.items() if decayed(name) is kind], "weight_decay": 0.1 * kind}
        for kind in (True, False)
    ]
    optimizer = torch.optim.AdamW(groups, lr=1.0, eps=1e-8)
    for step, one in enumerate(batches):
        optimizer.zero_grad()
        mean_loss(theirs, one).backward()
        norm = torch.nn.utils.clip_grad_norm_(list(theirs.values()), 0.5)
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 / (step + 1)
        optimizer.step()
        assert abs(norm.item() - ours.grad_norms[step]) < 1e-12
    for name, value in theirs.items():
        torch.testing.assert_close(ours.weights[name], value.detach(), rtol=0, atol=1e-12)


def test_masked_labels_do_not_count() -> None:
    weights, one = random_weights(), batch(1)
    mask = torch.ones_like(one.labels)
    mask[:, 2:] = 0
    short = Batch(one.tokens[:, :2], one.labels[:, :2])
    masked = mean_loss(weights, one._replace(loss_mask=mask))
    torch.testing.assert_close(masked, mean_loss(weights, short), rtol=1e-13, atol=0)


def test_rates_by_hand() -> None:
    rates = [scheduled_rate(i, peak=1.0, final=0.2, warmup=2, decay_steps=6, style="linear") for i in range(9)]
    torch.testing.assert_close(rates, [0.0, 0.5, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2, 0.2])
