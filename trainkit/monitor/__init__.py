"""Watching a run: the loggers that rank 0 writes to, hardware samples, and following from another process."""
