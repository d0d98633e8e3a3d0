"""Measurements: ratios of arms that run side by side in one process, never tests that fail on a busy machine."""
