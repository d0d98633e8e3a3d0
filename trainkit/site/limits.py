"""What a site would refuse, or leave pending for ever: accounts, QOS and their limits. Asks nobody.

It goes by what `scontrol show partition` has just told, and by what the site's profile knows. Accounts are refused only
where the profile says that the site enforces them: elsewhere any name is as good as another.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trainkit import terminal
from trainkit.config.loading import Loaded
from trainkit.config.slurm_options import slurm_time, time_minutes
from trainkit.errors import RefusedError, UserError, did_you_mean
from trainkit.site.profile import Account, Partition, Site, SiteFacts

PLACEHOLDER = "CHANGE_ME"
"""What a profile or a template has where everybody has something else."""


@dataclass(frozen=True)
class Request:
    """What a plan asks for."""

    nodes: int
    gpus_per_node: int
    minutes: float


def require_access(loaded: Loaded, request: Request, partition: Partition | None, facts: SiteFacts) -> None:
    """Refuse an account or a QOS that this user or the partition does not have, and more than the QOS allows.

    Raises:
        UserError: the account is still a profile's placeholder.
        RefusedError: everything else.
    """
    account, names = loaded.config.launch.account, list(dict.fromkeys(item.name for item in facts.accounts))
    if account == PLACEHOLDER:
        raise UserError(
            f"launch.account is still {PLACEHOLDER} ({loaded.source('launch.account')}).",
            why="Everybody has another one.",
            fix="Give yours: --account NAME, or export SBATCH_ACCOUNT=NAME."
            + (f" You have: {', '.join(names)}." if names else ""),
            key="launch.account",
        )
    charged = account or next((item.name for item in facts.accounts if item.default), None)
    if partition is not None and charged is not None:
        _require_in_partition(loaded, charged, partition)
    mine = [item for item in facts.accounts if charged in (None, item.name)]
    if facts.accounts_enforced and facts.accounts:
        if account is not None:
            _require_mine(loaded, account, partition, mine, names)
        _require_qos_of_mine(loaded, charged, mine)
    _require_qos(loaded, request, partition, facts, mine)


def _refused(loaded: Loaded, key: str, what: str, why: str, fix: str) -> RefusedError:
    return RefusedError(f"{what} ({loaded.source(key)}).", why=why, fix=fix, key=key)


def _require_in_partition(loaded: Loaded, account: str, partition: Partition) -> None:
    lets_in = partition.accounts
    if (lets_in and account not in lets_in) or account in partition.denied_accounts:
        raise _refused(
            loaded, "launch.account", f"Account '{account}' may not use partition '{partition.name}'",
            f"It lets in: {', '.join(lets_in)}." if lets_in else "It shuts this account out.",
            "Use another --partition" + (f", or --account {lets_in[0]} if it is yours." if lets_in else "."),
        )  # fmt: skip


def _require_mine(
    loaded: Loaded, account: str, partition: Partition | None, mine: Sequence[Account], names: Sequence[str]
) -> None:
    if not mine:
        fix = did_you_mean(account, names, otherwise=f"Use --account {names[0]}.")
        what, why = f"Account '{account}' is none of yours", f"You have: {', '.join(names)}."
        raise _refused(loaded, "launch.account", what, why, fix)
    places = [item.partition for item in mine]
    if partition is not None and all(places) and partition.name not in places:
        raise _refused(
            loaded, "launch.account", f"Account '{account}' is not for partition '{partition.name}'",
            f"It is yours in: {', '.join(places)}.", f"Use --partition {places[0]}, or another --account.",
        )  # fmt: skip


def _require_qos_of_mine(loaded: Loaded, account: str | None, mine: Sequence[Account]) -> None:
    qos = loaded.config.launch.qos
    known = list(dict.fromkeys(name for item in mine for name in item.qos))
    if qos is not None and known and qos not in known:
        whose = f" with account '{account}'" if account else ""
        fix = did_you_mean(qos, known, otherwise=f"Use --qos {known[0]}, or leave it out.")
        what, why = f"QOS '{qos}' is none of yours{whose}", f"You have: {', '.join(known)}."
        raise _refused(loaded, "launch.qos", what, why, fix)


def _require_qos(
    loaded: Loaded, request: Request, partition: Partition | None, facts: SiteFacts, mine: Sequence[Account]
) -> None:
    qos = loaded.config.launch.qos
    if qos is not None and partition is not None and partition.qos and qos not in partition.qos:
        fix = did_you_mean(qos, partition.qos, otherwise=f"Use --qos {partition.qos[0]}, or another --partition.")
        what = f"QOS '{qos}' is not for partition '{partition.name}'"
        raise _refused(loaded, "launch.qos", what, f"It takes: {', '.join(partition.qos)}.", fix)
    only = {name for item in mine for name in item.qos}
    name = qos or (only.pop() if len(only) == 1 else None)
    limits = next((item for item in facts.qos if item.name == name), None)
    if limits is None:
        return
    if limits.max_wall and request.minutes > time_minutes(limits.max_wall):
        longest = slurm_time(time_minutes(limits.max_wall))
        raise _refused(
            loaded, "launch.time", f"--time {slurm_time(request.minutes)} is over the limit of QOS '{name}'",
            f"Its MaxWall is {longest}; SLURM would leave the job pending for ever.",
            f"Use --time {longest}; the job is requeued at the limit and goes on where it was.",
        )  # fmt: skip
    most = re.search(r"gres/gpu=(\d+)", limits.max_tres_per_user)
    gpus = request.nodes * request.gpus_per_node
    if most is not None and gpus > int(most[1]):
        raise RefusedError(
            f"{gpus} GPUs are more than QOS '{name}' gives one user ({loaded.source('launch.qos')}).",
            why=f"Its limit is {most[1]}; SLURM would leave the job pending for ever.",
            fix=f"Ask for at most {most[1]} GPUs over all nodes, or use another --qos.",
            key="launch.gpus_per_node",
        )


# Whether a run's folders will do: seen by the compute nodes, and with room for a run.

LEAST_MB = 200
"""The snapshot of the code, logs and a first small checkpoint."""
LEAST_FILES = 1000
"""A snapshot is some 300 files; logs, checkpoints and TensorBoard's come on top."""

# Every machine has its own of these, on whatever site: memory, not disk.
_OWN = ("/dev", "/run", "/proc")
_USUALLY_OWN = ("/tmp", "/var/tmp")


def require_room(folder: Path) -> None:
    """Raise RefusedError where a run folder could be begun, but not filled."""
    require_text(folder)
    place = next(item for item in (folder, *folder.absolute().parents) if item.is_dir())
    try:
        there = os.statvfs(place)
    except OSError:  # making the folder will say it better
        return
    free_mb = there.f_bavail * there.f_frsize / 1e6
    if free_mb < LEAST_MB:
        raise RefusedError(
            f"There is no room for a run in {place}.",
            why=f"{free_mb:.0f} MB are free, and {LEAST_MB} are little for a run: its code, its logs, its checkpoints.",
            fix="Free some space, or choose another folder with TRAINKIT_RUNS=FOLDER or --run-dir.",
        )
    if there.f_files and there.f_favail < LEAST_FILES:  # no number of files at all: it knows no such limit
        raise RefusedError(
            f"There is no room for the files of a run in {place}.",
            why=f"{there.f_favail} more files (inodes) may be made there, and a run needs {LEAST_FILES}.",
            fix="Remove old runs or environments, or choose another folder with TRAINKIT_RUNS=FOLDER or --run-dir.",
        )


def require_text(folder: Path) -> None:
    """Raise UserError for a folder whose name is no text: records and scripts could not name it."""
    try:
        str(folder).encode()
    except UnicodeEncodeError:
        raise UserError(
            f"The name of {terminal.one_line(folder)} is no text in UTF-8.",
            why="A run's records, scripts and logs name its folder.",
            fix="Rename that folder, or start from another one: --run-dir FOLDER.",
        ) from None


def require_shared(folder: Path, what: str, site: Site, shared: Sequence[str]) -> None:
    """Raise RefusedError for a folder that compute nodes do not see: their job would end without a log.

    Args:
        what: what it is, for the message: ``The run folder``.
        shared: where the site's shared file systems are, as its profile knows them; empty where nobody knows.
    """
    if _is_one_machine(site):
        return
    real = Path(os.path.realpath(folder))
    if _below(real, _OWN):
        why = "Every machine has memory of its own there"
    elif shared and not _below(real, [os.path.realpath(item) for item in shared]):
        why = f"The site's profile knows as shared: {', '.join(shared)}"
    else:
        return
    raise RefusedError(
        f"{what} {folder} is on this machine alone.",
        why=f"{why}; a compute node would not find it, and the job would end without a log.",
        fix=f"Use a folder below {shared[0] if shared else 'your home'}"
        + (", or add this one to shared_folders in the profile if nodes do see it." if shared else "."),
    )


def doubtful(folder: Path, site: Site, shared: Sequence[str]) -> str:
    """A word of caution about a folder that most sites do not share; empty if there is no doubt."""
    real = Path(os.path.realpath(folder))
    usual = [item for item in _USUALLY_OWN if real.is_relative_to(item)]
    if shared or _is_one_machine(site) or not usual:
        return ""
    return f"Note: {folder} must be seen by the compute nodes, and few sites share {usual[0]}."


def _is_one_machine(site: Site) -> bool:
    """Whether this very machine is the only node."""
    names = {node.name for partition in site.partitions for node in partition.nodes}
    return names == {socket.gethostname().partition(".")[0]}


def _below(path: Path, folders: Sequence[str]) -> bool:
    return any(path.is_relative_to(folder) for folder in folders)
