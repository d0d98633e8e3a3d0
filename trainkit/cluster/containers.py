"""Run ranks in a container: the command prefix and srun's options, for pyxis, apptainer and docker.

The image provides Python with torch and trainkit's dependencies; the run's own code comes from its snapshot. A
container therefore mounts the run folder, the folder of the submission and the data, each at its own path, and passes
on the variables that tell a rank its place. The batch script, which requeues the job, runs outside.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from trainkit.common.accelerators import MASKS
from trainkit.common.errors import UserError
from trainkit.common.process import leaked

if TYPE_CHECKING:  # its classes take a quarter of a second, and the script of a job does without
    from trainkit.config.schema import LaunchConfig

Runtime = Literal["pyxis", "apptainer", "docker"]

CLIENT = "TRAINKIT_CLIENT"
"""Variable that names docker's client to the supervisor of the ranks inside: docker lets ranks outlive their client."""

# enroot's hook for PyTorch images sets these, and a rank would believe that torchrun had started it.
_NOT_OURS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
# docker passes no variable on by itself. Those that hold a path of this machine are left out.
_PASSED = re.compile(
    r"(?!.*_(HOME|CACHE|DIR|FILE|PATH|BUNDLE)$)"
    rf"({'|'.join(MASKS)}|CUDA_LAUNCH_BLOCKING|(NCCL|CCL|GLOO|TORCH|OMP|WANDB|HF|AWS|TRAINKIT)_.*)"
)


@dataclass(frozen=True)
class Container:
    """An image, its runtime, and the folders that it mounts besides those of the run."""

    runtime: Runtime
    image: str
    """Name in a registry, or the absolute path of a file."""
    mounts: tuple[str, ...]
    """``SOURCE:TARGET``, with ``:ro`` for read-only, or a path that is the same inside."""
    python: str
    """The interpreter inside."""


def container_of(launch: LaunchConfig, data_root: str, *, on_slurm: bool) -> Container | None:
    """Return the container of a launch, if it asks for one. It mounts the data folder if this machine has it.

    Raises UserError if the runtime cannot run there.
    """
    image = launch.container_image
    if image is None:
        return None
    runtime = launch.container_runtime
    usual: Runtime = "pyxis" if on_slurm else "docker"
    impossible = "docker" if on_slurm else "pyxis"
    if runtime == "auto":
        runtime = "apptainer" if image.endswith(".sif") or "://" in image else usual
    if runtime == impossible:
        where = "SLURM jobs" if on_slurm else "without SLURM"
        what = f"launch.container_runtime={runtime} does not run {where}."
        why = "pyxis is a plugin of srun; docker's daemon, and not the job, would own the containers."
        fix = f"Use launch.container_runtime={usual} or apptainer."
        raise UserError(what, why=why, fix=fix, key="launch.container_runtime")
    if is_file(image):  # pyxis looks for a name without a slash in a registry
        image = str(Path(image).expanduser().absolute())
    mounts = launch.container_mounts
    data = Path(data_root).expanduser().absolute()
    if data.is_dir():
        mounts = (*mounts, str(data))
    return Container(runtime, image, mounts, launch.container_python)


def is_file(image: str) -> bool:
    """Return True if an image is a file or a folder rather than a name in a registry."""
    named = image.startswith(("/", "./", "../", "~")) or image.endswith((".sif", ".sqsh", ".squashfs"))
    return named and "://" not in image and "#" not in image


def srun_options(container: Container, folders: Sequence[Path], cwd: Path) -> list[tuple[str, str]]:
    """Return pyxis' options of srun. None for apptainer, which srun starts like any other program."""
    if container.runtime != "pyxis":
        return []
    return [
        ("container-image", container.image),
        ("container-mounts", ",".join(map(_both_sides, _mounts(container, folders)))),
        ("container-workdir", str(cwd)),
        # Otherwise the values of the image, or of enroot's hook, win.
        ("container-env", "MASTER_ADDR,MASTER_PORT"),
    ]


def command(container: Container, folders: Sequence[Path], cwd: Path, *, gpus: bool) -> list[str]:
    """Return the command prefix of a rank or a node: for apptainer alone."""
    if container.runtime != "apptainer":
        return []
    words = ["apptainer", "exec"]
    if gpus:
        words.append("--nv")
    return [*words, "--bind", ",".join(_mounts(container, folders)), "--pwd", str(cwd), container.image]


def inside() -> list[str]:
    """Return the command prefix inside the container; PYTHONPATH, which would not pass from outside, is added to it."""
    # A mounted home folder has packages of its own (~/.local), made for another Python.
    return ["env", *_repeated("-u", _NOT_OURS), "PYTHONNOUSERSITE=1"]


def _repeated(option: str, values: Iterable[str]) -> list[str]:
    """Repeat an option before each of its values."""
    return list(chain.from_iterable((option, value) for value in values))


def node_command(
    container: Container, folders: Sequence[Path], cwd: Path, code: Path, env: Mapping[str, str], *, gpus: bool
) -> list[str]:
    """Return the command of one node's ranks without a scheduler, up to Python's arguments.

    docker shares the machine's network (ranks of other machines connect to it), its shared memory (data loaders and
    NCCL use it) and its process ids (the run's record holds the supervisor's, and the supervisor watches the client).
    It runs as the user, who then owns the files. Variables are passed by name, because `ps` shows their values, the
    run's secret among them, to everybody.
    """
    path = f"PYTHONPATH={code}"
    if container.runtime != "docker":
        return [*command(container, folders, cwd, gpus=gpus), *inside(), path, container.python]
    passed = {name for name in env if _PASSED.fullmatch(name)} - set(leaked(env))
    words = ["docker", "run", "--rm"]
    if gpus:
        words += ["--gpus", "all"]
    words += ["--net=host", "--ipc=host", "--pid=host"]
    words += ["--user", f"{os.getuid()}:{os.getgid()}", "--workdir", str(cwd)]
    words += _repeated("--volume", map(_both_sides, _mounts(container, folders)))
    words += _repeated("--env", sorted({"TRAINKIT_SECRET", CLIENT} | passed))
    # A user whom the image does not know has neither of these, and torch needs both.
    words += _repeated("--env", ("HOME=/tmp", f"USER={os.getuid()}"))
    return [*words, container.image, *inside(), path, container.python]


def _mounts(container: Container, folders: Sequence[Path]) -> list[str]:
    """List the run's folders, those inside another one left out, and then the user's own mounts."""
    for folder in folders:
        if "," in str(folder) or ":" in str(folder):
            what = f"The folder {str(folder)!r} cannot be mounted into a container."
            why = "Commas and colons separate mounts and their parts."
            raise UserError(what, why=why, fix="Use a folder without them in its name.")
    own = []
    paths = set(folders)
    for mount in container.mounts:
        if ":" in mount:
            own.append(mount)
        else:
            paths.add(Path(mount))
    outermost = [str(path) for path in sorted(paths) if paths.isdisjoint(path.parents)]
    return [*outermost, *own]


def _both_sides(mount: str) -> str:
    return mount if ":" in mount else f"{mount}:{mount}"
