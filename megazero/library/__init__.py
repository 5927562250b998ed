"""megazero around any torch.nn.Module: `engine = megazero.initialize(model, config)`."""
