"""Checkpoints: complete or absent, the same for every strategy and world size, and free of pickle."""
