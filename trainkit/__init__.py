"""Train vision models on SLURM clusters, on machines without a scheduler, and with volunteers."""
