"""The record of a run: a folder that any tool can read."""
