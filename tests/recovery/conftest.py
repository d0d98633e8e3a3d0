from tests.jobs.conftest import captured, command, no_slurm  # noqa: F401
