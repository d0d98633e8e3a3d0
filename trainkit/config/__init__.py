"""The typed, frozen configuration of a run, and how it is read."""
