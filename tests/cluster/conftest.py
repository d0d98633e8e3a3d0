"""A SLURM made of shell scripts, configurations and a cluster."""

import os

import pytest

from tests.jobs.conftest import captured, command  # noqa: F401
from tests.launch.conftest import _folder, loaded  # noqa: F401
from tests.runs import fake_command, local_run, rank_function  # noqa: F401


@pytest.fixture
def no_slurm() -> dict[str, str]:
    """For `command`: what a queue in a folder starts needs the programs of this machine."""
    return dict(os.environ)
