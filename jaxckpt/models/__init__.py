"""Models in plain Flax; nothing here imports the rest of the package."""
