"""Ranks together: the process group, and stopping at the same step."""
