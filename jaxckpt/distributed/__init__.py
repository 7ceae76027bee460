"""Starting processes together, stopping them together, and waiting for each other within a limit."""
