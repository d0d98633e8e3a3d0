"""What others would write: scripts, each whole. And for GPUs the kit's own command, with a stopwatch."""
