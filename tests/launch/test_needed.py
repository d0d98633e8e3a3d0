"""What is refused before a job is queued, because its script would look for it in vain."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trainkit.config.loading import Loaded
from trainkit.errors import RefusedError
from trainkit.launch.plan import make_plan, require_container, require_environment
from trainkit.schedulers.base import named
from trainkit.site.profile import Site, SiteFacts

Load = Callable[..., Loaded]


@pytest.mark.parametrize(
    ("environment", "there", "fix"),
    [
        ("venv:env", [], "python3 -m venv"),
        ("venv:env", ["pyvenv.cfg"], "python3 -m venv"),
        ("uv:env", ["main.py"], "uv init"),
    ],
)
def test_an_environment_that_is_not_there_is_refused_with_the_command_that_makes_it(
    loaded: Load, tmp_path: Path, environment: str, there: list[str], fix: str
) -> None:
    (tmp_path / "env").mkdir()
    for name in there:
        (tmp_path / "env" / name).touch()
    with pytest.raises(RefusedError) as error:
        require_environment(loaded(environment=environment), tmp_path)
    assert error.value.what.startswith(f"{tmp_path}/env is no environment of {environment.partition(':')[0]} (")
    assert fix in error.value.fix


def test_an_environment_may_be_of_a_python_that_only_the_nodes_have(loaded: Load, tmp_path: Path) -> None:
    (tmp_path / "env" / "bin").mkdir(parents=True)
    (tmp_path / "env" / "bin" / "python").symlink_to("/apps/python/3.12/bin/python3")
    require_environment(loaded(environment="venv:env"), tmp_path)
    require_environment(loaded(environment="conda:vision"), tmp_path)
    require_environment(loaded(), tmp_path)


def test_an_image_that_is_not_there_is_refused_and_a_name_in_a_registry_is_not(
    loaded: Load, gpu_site: Site, tmp_path: Path
) -> None:
    def require(image: str) -> None:
        config = loaded(container_image=image)
        container = make_plan(config, gpu_site, tmp_path / "run").container
        assert container is not None
        require_container(config, container, SiteFacts(containers=("pyxis",)), named("slurm"))

    for image in ("nowhere.sif", "nowhere.sqsh", "./sandbox", f"{tmp_path}/nowhere"):
        with pytest.raises(RefusedError, match="There is no image /"):
            require(image)
    (tmp_path / "nowhere.sif").touch()
    for image in ("nowhere.sif", "docker://python:3.12", "nvcr.io#nvidia/pytorch:25.01-py3", "ubuntu"):
        require(image)


def test_pyxis_takes_a_file_by_its_whole_path_or_it_would_ask_a_registry_for_it(
    loaded: Load, gpu_site: Site, tmp_path: Path
) -> None:
    container = make_plan(loaded(container_image="torch.sqsh"), gpu_site, tmp_path / "run").container
    assert container is not None
    assert container.image == f"{tmp_path}/torch.sqsh"


@pytest.mark.parametrize(
    ("srun", "containers", "fits"),
    [
        ("echo '--container-image=[USER@]IMAGE [pyxis] the image to use'", (), True),
        ("echo '--container  Path to OCI container bundle'", (), False),
        ("echo '--container  Path to OCI container bundle'", ("pyxis",), True),
        ("exit 1", ("apptainer",), True),
    ],
)
def test_a_container_of_pyxis_is_refused_where_srun_does_not_know_it(
    loaded: Load, gpu_site: Site, fake_command: Callable[..., Any], srun: str, containers: tuple[str, ...], fits: bool
) -> None:
    fake_command("srun", srun)
    config = loaded(container_image="ubuntu")
    container = make_plan(config, gpu_site, Path("run")).container
    assert container is not None
    if fits:
        require_container(config, container, SiteFacts(containers=containers), named("slurm"))
    else:
        with pytest.raises(RefusedError, match="srun has no option --container-image here"):
            require_container(config, container, SiteFacts(containers=containers), named("slurm"))
