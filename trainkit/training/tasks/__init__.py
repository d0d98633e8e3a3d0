"""Tasks: what a model is trained to tell."""
