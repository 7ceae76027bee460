"""What a run will need, before it runs: bytes in every memory, seconds a step, and what does not fit."""
