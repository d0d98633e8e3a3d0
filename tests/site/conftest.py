"""A SLURM made of shell scripts."""

from tests.runs import fake_command  # noqa: F401
