"""The record of a run: its folder, metrics, events, and the code that it ran."""
