"""How the training state survives."""
