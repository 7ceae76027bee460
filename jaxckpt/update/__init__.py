"""How a step changes the training state."""
