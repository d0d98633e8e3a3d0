"""A SLURM made of shell scripts, configurations and a cluster."""

from tests.jobs.conftest import captured, command  # noqa: F401
from tests.launch.conftest import _folder, gpu_site, loaded  # noqa: F401
from tests.runs import fake_command, local_run, rank_function  # noqa: F401
