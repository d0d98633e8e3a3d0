"""What a job's script will look for before its ranks run: the user's environment, and a container's image."""

from __future__ import annotations

import os
from pathlib import Path

from trainkit.config.loading import Loaded
from trainkit.errors import RefusedError
from trainkit.launch.containers import Container, is_file
from trainkit.site.discover import has_pyxis
from trainkit.site.profile import SiteFacts


def require_environment(loaded: Loaded, cwd: Path) -> None:
    """Raise RefusedError where the folder of ``launch.environment`` is not what it is said to be.

    conda's environments have names, and which of them are there a job sees only once its modules are loaded.
    """
    kind, _, name = (loaded.config.launch.environment or "").partition(":")
    folder = cwd / Path(name).expanduser()
    if kind == "venv" and not os.path.lexists(folder / "bin" / "python"):  # its Python may be the nodes' only
        missing, fix = "bin/python", f"python3 -m venv {folder}` makes one; it needs trainkit's packages too."
    elif kind == "uv" and not (folder / "pyproject.toml").is_file():
        missing, fix = "pyproject.toml", f"uv init {folder}` makes one; it needs trainkit's packages too."
    else:
        return
    raise RefusedError(
        f"{folder} is no environment of {kind} ({loaded.source('launch.environment')}).",
        why=f"There is no {missing} in it, and the job would end before its ranks start.",
        fix=f"Give the right folder, or: `{fix}",
        key="launch.environment",
    )


def require_container(loaded: Loaded, container: Container, facts: SiteFacts) -> None:
    """Raise RefusedError where the image is a file that is not there, or srun does not know pyxis."""
    source = loaded.source("launch.container_image")
    if is_file(container.image) and not Path(container.image).exists():
        raise RefusedError(
            f"There is no image {container.image} ({source}).",
            why="The job would end before its ranks start.",
            fix="Give the image's path, the name that it has in a registry, or --container-image none.",
            key="launch.container_image",
        )
    if container.runtime == "pyxis" and "pyxis" not in facts.containers and has_pyxis() is False:
        raise RefusedError(
            f"srun has no option --container-image here, so it does not run {container.image} ({source}).",
            why="The option is pyxis's, and this machine's SLURM does not load it.",
            fix="Use an image for apptainer (.sif, docker://...), or write `containers: [pyxis]` below site: in the "
            "cluster's profile if its nodes have it.",
            key="launch.container_image",
        )
