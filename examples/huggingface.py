"""Train a model of transformers in ZeRO stage 3, and let it write between the steps.

torchrun --standalone --nproc-per-node 2 examples/huggingface.py

The text is a counting rhyme, byte by byte.  In stage 3 generation is a collective call of all ranks.
"""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import megazero

TEXT = " ".join(f"{number} little ducks" for number in range(1, 60)).encode()

torch.manual_seed(1)
shape = GPT2Config(vocab_size=256, n_positions=64, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0)
config = {
    "train_micro_batch_size_per_gpu": 16,
    "zero_optimization": {"stage": 3},
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
}
engine = megazero.initialize(GPT2LMHeadModel(shape), config)
model, rank = engine.module, engine.mesh.rank
ids = torch.tensor(list(TEXT))
generator = torch.Generator().manual_seed(rank)
for step in range(1, 41):
    model.train()
    starts = torch.randint(len(ids) - 48, (16,), generator=generator)
    samples = torch.stack([ids[start : start + 48] for start in starts.tolist()]).to(engine.device)
    loss = engine(input_ids=samples, labels=samples).loss
    engine.backward(loss)
    engine.step()
    if step % 20 == 0:
        model.eval()
        prompt = torch.tensor([list(b"7 little ")], device=engine.device)
        mask = torch.ones_like(prompt)
        written = engine.generate(prompt, attention_mask=mask, max_new_tokens=12, do_sample=False, synced_gpus=True)
        if rank == 0:
            text = bytes(written[0].tolist()).decode(errors="replace")
            print(f"step {step}: loss {loss.item():.3f}: {text!r}", flush=True)
