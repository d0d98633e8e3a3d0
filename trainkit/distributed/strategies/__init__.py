"""Strategies: how the ranks of a run share a model."""
