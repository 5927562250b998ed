"""Trains any torch.nn.Module with ZeRO: `engine = megazero.initialize(model, config)`."""
