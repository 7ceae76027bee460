"""What the training state is and where it lives."""
