"""Validation of a launch plan: what would fail, or wait for ever, is refused before a job is queued."""

import os
import re
import socket
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from trainkit.cluster.containers import Container, is_file
from trainkit.cluster.plan import Plan
from trainkit.cluster.scheduler import Scheduler, named
from trainkit.cluster.site import Partition, Site
from trainkit.cluster.site_profile import SiteFacts, read_facts
from trainkit.common import terminal
from trainkit.common.errors import RefusedError, UserError
from trainkit.config.loading import Loaded
from trainkit.launch.resources import shares_without_use, without_use

PLACEHOLDER = "CHANGE_ME"
"""Word of a profile or a template for a value that is everybody's own."""
LEAST_MB = 200
"""Room for the snapshot of the code, logs and a first small checkpoint."""
LEAST_FILES = 1000
"""A snapshot is some 300 files; logs, checkpoints and TensorBoard's come on top."""
# Every machine has its own of these, on whatever site: memory, not disk.
_OWN = ("/dev", "/run", "/proc")
_USUALLY_OWN = ("/tmp", "/var/tmp")


def validate(loaded: Loaded, plan: Plan, site: Site, folder: Path, cwd: Path) -> list[str]:
    """Refuse what would fail or wait for ever, as far as that is known before a job is queued; return lines on doubts.

    `sbatch --test-only` is no help: it takes 99 hours on a partition of one.

    Args:
        folder: of the run, or of the sweep.
        cwd: the folder of the submission, where the job runs.

    Raises RefusedError: folders that nodes do not see, no room for a run, an environment or a container's image that is
    not there.
    """
    require_room(folder)
    if plan.executor != "debug":
        require_plain_path(folder)
    if not named(plan.executor).batch:
        return _without_use(loaded)
    if plan.executor != site.scheduler:
        return []
    launch = loaded.config.launch
    partition = site.partition(launch.partition)
    facts = _facts(loaded)
    _require_account(loaded)
    require_environment(loaded, cwd)
    if plan.container is not None:
        require_container(loaded, plan.container, facts, named(plan.executor))
    places = {"The run folder": folder, "The folder of the submission": cwd}
    data = (cwd / Path(loaded.config.data.root).expanduser()).absolute()
    if data.is_dir():
        places["The data's folder"] = data
    if sys.prefix != sys.base_prefix and not (launch.environment or launch.container_image):
        places["The virtual environment"] = Path(sys.prefix)  # Python's own folders are every machine's
    for what, place in places.items():
        require_shared(place, what, site, facts.shared_folders)
    notes = [doubtful(place, site, facts.shared_folders) for place in dict.fromkeys(places.values())]
    if not launch.sbatch.get("export", "ALL").startswith("ALL") or "export-file" in launch.sbatch:
        notes.append("Note: with such an --export the job does not get the variables of this shell, keys among them.")
    if launch.gpus_per_node == "auto" and not plan.gpus_per_node and partition is not None:
        notes.append(_without_gpus(partition, site))
    return [*filter(None, notes), *loaded.notes]


def _facts(loaded: Loaded) -> SiteFacts:
    """Read what the site's profile knows; a run's own configuration outlives its site's profile."""
    cluster = loaded.config.launch.cluster
    try:
        if cluster is not None:
            return read_facts(cluster) or SiteFacts()
    except UserError:
        if loaded.source("launch.cluster").kind != "file":
            raise
    return SiteFacts()


def _without_use(loaded: Loaded) -> list[str]:
    """Name in a line the settings that have no effect on this machine."""
    found = [*without_use(loaded, "flag", "override", "environment", "file"), *shares_without_use(loaded)]
    if not found:
        return []
    verb = "is" if len(found) == 1 else "are"
    return [f"Note: {', '.join(found)} {verb} for a scheduler, and without effect on this machine."]


def _without_gpus(partition: Partition, site: Site) -> str:
    """Note that a partition has no GPUs where others have some."""
    others = []
    for other in site.partitions:
        if other.up and any(node.gpus for node in other.nodes):
            others.append(other.name)
    if not others:
        return ""
    some = ", ".join(others)
    return f"Note: partition '{partition.name}' has no GPUs, so this trains on the CPU; these have some: {some}."


def _require_account(loaded: Loaded) -> None:
    """Raise UserError for an account that is still a profile's placeholder."""
    key = "launch.account"
    if loaded.config.launch.account == PLACEHOLDER:
        what = f"{key} is still {PLACEHOLDER} ({loaded.source(key)})."
        fix = "Give yours: --account NAME, or export SBATCH_ACCOUNT=NAME; `python -m jobs.cluster show` lists them."
        raise UserError(what, why="Everybody has another one.", fix=fix, key=key)


# Folders


def require_room(folder: Path) -> None:
    """Raise RefusedError where a run folder could be begun, but not filled."""
    require_text(folder)
    place = next(item for item in (folder, *folder.absolute().parents) if item.is_dir())
    try:
        there = os.statvfs(place)
    except OSError:  # making the folder will say it better
        return
    what = f"There is no room for a run in {place}."
    otherwise = "choose another folder with TRAINKIT_RUNS=FOLDER or --run-dir."
    free_mb = there.f_bavail * there.f_frsize / 1e6
    if free_mb < LEAST_MB:
        why = f"{free_mb:.0f} MB are free, and {LEAST_MB} are little for a run: its code, its logs, its checkpoints."
        raise RefusedError(what, why=why, fix=f"Free some space, or {otherwise}")
    if there.f_files and there.f_favail < LEAST_FILES:  # no number of files at all: it knows no such limit
        why = f"{there.f_favail} more files (inodes) may be made there, and a run needs {LEAST_FILES}."
        raise RefusedError(what, why=why, fix=f"Remove old runs or environments, or {otherwise}")


def require_text(folder: Path) -> None:
    """Raise UserError for a folder whose name is no text: records and scripts could not name it."""
    try:
        str(folder).encode()
    except UnicodeEncodeError:
        what = f"The name of {terminal.one_line(folder)} is no text in UTF-8."
        fix = "Rename that folder, or start from another one: --run-dir FOLDER."
        raise UserError(what, why="Records, scripts and logs name it.", fix=fix) from None


def require_plain_path(folder: Path) -> None:
    """Raise UserError for a folder where ranks would not find the run, or would run other code than its snapshot.

    submitit fills a job's numbers into its path, or no search path holds it.
    """
    found = re.search(r"%[jtAa]|:", str(folder))
    if found is None:
        return
    why = "submitit puts the number of the job in the place of %j, %A, %a and %t."
    if found[0] == ":":
        why = "PYTHONPATH, by which ranks find the run's code, is split at colons."
    what = f"A run cannot be in {str(folder)!r}: its path holds {found[0]}."
    raise UserError(what, why=why, fix="Give another --run-dir or --name, or another folder with TRAINKIT_RUNS=FOLDER.")


def require_shared(folder: Path, what: str, site: Site, shared: Sequence[str]) -> None:
    """Raise RefusedError for a folder that compute nodes do not see: their job would end without a log.

    Args:
        what: what it is, for the message: ``The run folder``.
        shared: where the site's shared file systems are, as its profile knows them; empty where nobody knows.
    """
    if _is_one_machine(site):
        return
    real = Path(os.path.realpath(folder))
    if _is_below(real, _OWN):
        why = "Every machine has memory of its own there"
    elif shared and not _is_below(real, map(os.path.realpath, shared)):
        why = f"The site's profile knows as shared: {', '.join(shared)}"
    else:
        return
    why += "; a compute node would not find it, and the job would end without a log."
    fix = "Use a folder below your home."
    if shared:
        fix = f"Use a folder below {shared[0]}, or add this one to shared_folders in the profile if nodes do see it."
    raise RefusedError(f"{what} {folder} is on this machine alone.", why=why, fix=fix)


def doubtful(folder: Path, site: Site, shared: Sequence[str]) -> str:
    """Note of caution about a folder that most sites do not share; empty if there is no doubt."""
    real = Path(os.path.realpath(folder))
    if shared or _is_one_machine(site) or not _is_below(real, _USUALLY_OWN):
        return ""
    return f"Note: {folder} must be seen by the compute nodes, and few sites share /tmp."


def _is_below(folder: Path, places: Iterable[str]) -> bool:
    return any(folder.is_relative_to(place) for place in places)


def _is_one_machine(site: Site) -> bool:
    """Return True if this very machine is the only node."""
    names = set[str]()
    for partition in site.partitions:
        for node in partition.nodes:
            names.add(node.name)
    return names == {socket.gethostname().partition(".")[0]}


# Environments


def require_environment(loaded: Loaded, cwd: Path) -> None:
    """Raise RefusedError where the folder of ``launch.environment`` holds no such environment.

    conda's environments have names, and a job sees which of them are there only once its modules are loaded.
    """
    kind, _, name = (loaded.config.launch.environment or "").partition(":")
    folder = cwd / Path(name).expanduser()
    if kind == "venv" and not os.path.lexists(folder / "bin" / "python"):  # its Python may be the nodes' only
        missing = "bin/python"
        command = "python3 -m venv"
    elif kind == "uv" and not (folder / "pyproject.toml").is_file():
        missing = "pyproject.toml"
        command = "uv init"
    else:
        return
    what = f"{folder} is no environment of {kind} ({loaded.source('launch.environment')})."
    why = f"There is no {missing} in it, and the job would end before its ranks start."
    fix = f"Give the right folder, or: `{command} {folder}` makes one; it needs trainkit's packages too."
    raise RefusedError(what, why=why, fix=fix, key="launch.environment")


def require_container(loaded: Loaded, container: Container, facts: SiteFacts, scheduler: Scheduler) -> None:
    """Raise RefusedError where the image is a file that is not there, or srun does not know pyxis."""
    key = "launch.container_image"
    source = loaded.source(key)
    if is_file(container.image) and not Path(container.image).exists():
        what = f"There is no image {container.image} ({source})."
        fix = "Give the image's path, the name that it has in a registry, or --container-image none."
        raise RefusedError(what, why="The job would end before its ranks start.", fix=fix, key=key)
    if container.runtime == "pyxis" and "pyxis" not in facts.containers and scheduler.has_pyxis() is False:
        what = f"srun has no option --container-image here, so it does not run {container.image} ({source})."
        why = "The option is pyxis's, and this machine's SLURM does not load it."
        fix = "Use an image for apptainer (.sif, docker://...), or write `containers: [pyxis]` below site: in the "
        fix += "cluster's profile if its nodes have it."
        raise RefusedError(what, why=why, fix=fix, key=key)
