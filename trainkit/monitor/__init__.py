"""Measurements, and where they go."""
