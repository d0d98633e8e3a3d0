"""Ranks in a container: what stands before their command, for pyxis, apptainer and docker.

The image brings Python with torch and the packages that trainkit stands on; the run's code is its snapshot, as ever. So
a container must see the run folder, the folder of the submission and the data, each under its own name, and the
variables that tell a rank its place. Requeueing is left to the batch script, which runs outside.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from trainkit.config.schema import LaunchConfig
from trainkit.errors import UserError
from trainkit.process import leaked

Runtime = Literal["pyxis", "apptainer", "docker"]

CLIENT = "TRAINKIT_CLIENT"
"""Variable that names docker's client to the ranks' supervisor inside. Were it killed, docker would let them go on."""

# What enroot's hook for PyTorch images sets by itself: a rank would take itself for one of torchrun's.
_NOT_OURS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
# A new container of docker's knows nothing of the environment around it. What names a place on this machine stays out.
_PASSED = re.compile(
    r"(?!.*_(HOME|CACHE|DIR|FILE|PATH|BUNDLE)$)"
    r"(CUDA_VISIBLE_DEVICES|CUDA_LAUNCH_BLOCKING|(NCCL|GLOO|TORCH|OMP|WANDB|HF|AWS|TRAINKIT)_.*)"
)


@dataclass(frozen=True)
class Container:
    """An image, who runs it, and which folders of the user's it sees beside those of the run."""

    runtime: Runtime
    image: str
    """With its whole path, if it is a file."""
    mounts: tuple[str, ...]
    """``SOURCE:TARGET``, with ``:ro`` to read only, or a path that has the same name inside."""
    python: str
    """The interpreter inside."""


def container_of(launch: LaunchConfig, data_root: str, *, on_slurm: bool) -> Container | None:
    """The container of a launch, if it asks for one. It sees the data where that lies in a folder of this machine.

    Raises UserError where the image's kind and who is to run it do not fit.
    """
    image = launch.container_image
    if image is None:
        return None
    runtime = launch.container_runtime
    if runtime == "auto":
        by_apptainer = image.endswith(".sif") or "://" in image
        runtime = "apptainer" if by_apptainer else "pyxis" if on_slurm else "docker"
    if (runtime == "docker") == on_slurm and runtime != "apptainer":
        others = "pyxis or apptainer" if on_slurm else "docker or apptainer"
        raise UserError(
            f"launch.container_runtime={runtime} does not run {'SLURM jobs' if on_slurm else 'without SLURM'}.",
            why="pyxis is a part of srun; docker's containers are its daemon's and not the job's.",
            fix=f"Use launch.container_runtime={others}.",
            key="launch.container_runtime",
        )
    if is_file(image):  # pyxis takes a name without a slash for one of a registry
        image = str(Path(image).expanduser().absolute())
    data = Path(data_root).expanduser().absolute()
    mounts = (*launch.container_mounts, *([str(data)] if data.is_dir() else []))
    return Container(runtime, image, mounts, launch.container_python)


def is_file(image: str) -> bool:
    """Whether an image is a file or a folder, and not a name in a registry."""
    named = image.startswith(("/", "./", "../", "~")) or image.endswith((".sif", ".sqsh", ".squashfs"))
    return named and "://" not in image and "#" not in image


def srun_options(container: Container, folders: Sequence[Path], cwd: Path) -> list[tuple[str, str]]:
    """Options of srun, which pyxis adds to it. None for apptainer, which srun starts like any other program."""
    if container.runtime != "pyxis":
        return []
    return [
        ("container-image", container.image),
        ("container-mounts", ",".join(_both_sides(mount) for mount in _mounts(container, folders))),
        ("container-workdir", str(cwd)),
        # The image's own values would go first, and enroot's hook gives some.
        ("container-env", "MASTER_ADDR,MASTER_PORT"),
    ]


def command(container: Container, folders: Sequence[Path], cwd: Path, *, gpus: bool) -> list[str]:
    """The words before those of a rank or a node: of apptainer, nothing for pyxis."""
    if container.runtime != "apptainer":
        return []
    binds = ",".join(_mounts(container, folders))
    return ["apptainer", "exec", *(["--nv"] if gpus else []), "--bind", binds, "--pwd", str(cwd), container.image]


def inside() -> list[str]:
    """The first words inside, after which the caller sets PYTHONPATH: what is set outside may not get here."""
    # A home folder that is mounted brings packages of its own (~/.local), made for another Python.
    return ["env", *[word for name in _NOT_OURS for word in ("-u", name)], "PYTHONNOUSERSITE=1"]


def node_command(
    container: Container, folders: Sequence[Path], cwd: Path, code: Path, env: Mapping[str, str], *, gpus: bool
) -> list[str]:
    """All words before Python's arguments for one node's ranks where there is no scheduler.

    docker: on the machine's own network (the ranks of other machines must reach it), shared memory (data loaders' and
    NCCL's) and process ids (by which the run's record names who looks after it, and the container sees its client), as
    the user, so that the files are theirs. Variables are given by name: their values, the run's secret among them,
    would stand in ``ps`` for everybody.
    """
    path = f"PYTHONPATH={code}"
    if container.runtime != "docker":
        return [*command(container, folders, cwd, gpus=gpus), *inside(), path, container.python]
    hidden = leaked(env)
    names = sorted(
        {"TRAINKIT_SECRET", CLIENT, *(name for name in env if _PASSED.fullmatch(name) and name not in hidden)}
    )
    user = f"{os.getuid()}:{os.getgid()}"
    words = ["docker", "run", "--rm", *(["--gpus", "all"] if gpus else []), "--net=host", "--ipc=host", "--pid=host"]
    words += ["--user", user, "--workdir", str(cwd)]
    words += [word for mount in _mounts(container, folders) for word in ("--volume", _both_sides(mount))]
    words += [word for name in names for word in ("--env", name)]
    # A user whom the image does not know has neither of these, and torch asks for both.
    words += [word for pair in ("HOME=/tmp", f"USER={os.getuid()}") for word in ("--env", pair)]
    return [*words, container.image, *inside(), path, container.python]


def _mounts(container: Container, folders: Sequence[Path]) -> list[str]:
    """The run's folders, none inside another, and then the user's own mounts."""
    for folder in folders:
        if "," in str(folder) or ":" in str(folder):
            raise UserError(
                f"The folder {str(folder)!r} cannot be mounted into a container.",
                why="Commas and colons part the mounts from one another.",
                fix="Use a folder with a plainer name.",
            )
    paths = sorted({*folders, *(Path(mount) for mount in container.mounts if ":" not in mount)})
    outermost = [path for path in paths if not any(other in path.parents for other in paths)]
    return [*map(str, outermost), *(mount for mount in container.mounts if ":" in mount)]


def _both_sides(mount: str) -> str:
    return mount if ":" in mount else f"{mount}:{mount}"
