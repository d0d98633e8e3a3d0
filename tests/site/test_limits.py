"""What is refused before a job is queued, although ``sbatch --test-only`` might take it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trainkit.config.loading import Loaded, load
from trainkit.errors import RefusedError, UserError
from trainkit.schedulers.slurm_programs import read_start
from trainkit.site.limits import Request, doubtful, require_access, require_room, require_shared
from trainkit.site.profile import Account, Node, Partition, Qos, Site, SiteFacts

PROJECT = Path(__file__).parents[2]
PARTITION = Partition("gpu", accounts=("vision", "nlp"), qos=("normal", "long"))
OPEN = Partition("open")
FACTS = SiteFacts(
    accounts=(
        Account("vision", "", ("normal", "long"), default=True),
        Account("nlp", "gpu", ("normal",)),
        Account("guest", "cpu", ("normal",)),
    ),
    qos=(Qos("normal", "1-00:00:00"), Qos("long", "7-00:00:00", "cpu=64,gres/gpu=8")),
    accounts_enforced=True,
)
HOUR = Request(nodes=2, gpus_per_node=4, minutes=60)
TWO_NODES = Site("slurm", 0, 2, partitions=(Partition("main", (Node("n1", 8, 4), Node("n2", 8, 4))),))


def loaded(**flags: Any) -> Loaded:
    return load("ddp", flags={f"launch.{key}": (value, f"--{key}") for key, value in flags.items()})


def refused(partition: Partition | None, facts: SiteFacts = FACTS, request: Request = HOUR, **flags: Any) -> str:
    with pytest.raises(RefusedError) as error:
        require_access(loaded(**flags), request, partition, facts)
    assert error.value.fix
    return f"{error.value.what} {error.value.why}"


# Accounts and QOS


@pytest.mark.parametrize(
    ("partition", "flags"),
    [
        *((PARTITION, {}), (PARTITION, {"account": "nlp"}), (PARTITION, {"account": "vision", "qos": "long"})),
        *((OPEN, {"account": "vision"}), (None, {"account": "guest", "qos": "normal"})),
    ],
)
def test_what_the_user_has_is_let_pass(partition: Partition | None, flags: dict[str, str]) -> None:
    require_access(loaded(**flags), HOUR, partition, FACTS)


def test_an_account_that_is_not_the_users_is_refused_with_those_that_are() -> None:
    assert refused(OPEN, account="visoin") == (
        "Account 'visoin' is none of yours (flag --account). You have: vision, nlp, guest."
    )


def test_an_account_that_the_partition_does_not_let_in_is_refused() -> None:
    words = refused(PARTITION, SiteFacts(), account="guest")
    assert "may not use partition 'gpu'" in words
    assert "It lets in: vision, nlp." in words
    assert "shuts this account out" in refused(Partition("p", denied_accounts=("x",)), SiteFacts(), account="x")


def test_the_default_account_is_the_one_that_is_charged() -> None:
    assert "Account 'vision' may not use" in refused(replace(PARTITION, accounts=("nlp",)))


def test_an_account_for_one_partition_is_refused_in_another() -> None:
    assert "is yours in: cpu" in refused(OPEN, account="guest")


def test_a_site_that_does_not_enforce_accounts_takes_every_name() -> None:
    for enforced in (False, None):
        require_access(loaded(account="any", qos="any"), HOUR, OPEN, replace(FACTS, accounts_enforced=enforced))
    require_access(loaded(account="any", qos="any"), HOUR, OPEN, SiteFacts())


def test_a_placeholder_is_a_mistake_of_the_user_whatever_is_known() -> None:
    with pytest.raises(UserError, match="still CHANGE_ME") as error:
        require_access(loaded(account="CHANGE_ME"), HOUR, None, FACTS)
    assert "You have: vision, nlp, guest." in error.value.fix


def test_a_qos_is_that_of_the_account_and_of_the_partition() -> None:
    assert "QOS 'long' is none of yours with account 'nlp'" in refused(None, account="nlp", qos="long")
    assert "It takes: normal, long." in refused(PARTITION, SiteFacts(), qos="debug")


def test_more_time_or_gpus_than_the_qos_gives_would_wait_for_ever() -> None:
    require_access(loaded(account="vision", qos="long"), replace(HOUR, minutes=7 * 1440), OPEN, FACTS)
    week = replace(HOUR, minutes=8 * 1440)
    assert "Its MaxWall is 7-0:00:00" in refused(OPEN, request=week, qos="long", account="vision")
    many = replace(HOUR, nodes=3)
    assert "12 GPUs are more than QOS 'long' gives one user" in refused(OPEN, request=many, qos="long")
    only_one = SiteFacts(accounts=(Account("a", "", ("normal",)),), qos=FACTS.qos)
    assert "QOS 'normal'" in refused(OPEN, only_one, week), "the only QOS is the one that counts"


# Folders


def test_memory_of_this_machine_is_no_place_for_a_run() -> None:
    with pytest.raises(RefusedError) as error:
        require_shared(Path("/dev/shm/runs/x"), "The run folder", TWO_NODES, ())
    assert error.value.what == "The run folder /dev/shm/runs/x is on this machine alone."


def test_where_shared_folders_are_known_a_run_lies_in_one(tmp_path: Path) -> None:
    shared = tmp_path / "work"
    shared.mkdir()
    (tmp_path / "link").symlink_to(shared)
    for folder in (shared / "runs" / "x", tmp_path / "link" / "x"):
        require_shared(folder, "The run folder", TWO_NODES, [str(shared)])
    with pytest.raises(RefusedError, match="on this machine alone") as error:
        require_shared(tmp_path / "home" / "x", "The run folder", TWO_NODES, [str(shared)])
    assert str(shared) in error.value.fix


def test_a_folder_that_few_sites_share_is_only_doubtful() -> None:
    require_shared(Path("/tmp/runs/x"), "The run folder", TWO_NODES, ())
    assert "few sites share /tmp" in doubtful(Path("/tmp/runs/x"), TWO_NODES, ())
    assert doubtful(Path("/tmp/runs/x"), TWO_NODES, ("/tmp",)) == ""
    assert doubtful(Path("/home/me/runs/x"), TWO_NODES, ()) == ""


def test_on_a_cluster_of_one_machine_every_folder_is_seen() -> None:
    name = socket.gethostname().partition(".")[0]
    alone = Site("slurm", 0, 2, partitions=(Partition("main", (Node(name, 8, 4),)),))
    require_shared(Path("/dev/shm/x"), "The run folder", alone, ["/home"])
    assert doubtful(Path("/tmp/x"), alone, ()) == ""


def test_a_folder_with_room_is_let_pass_before_it_is_made(tmp_path: Path) -> None:
    require_room(tmp_path / "not" / "yet" / "there")


def test_a_file_system_that_counts_no_files_has_room_for_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """btrfs: the very file system is not here."""
    there = list(os.statvfs(tmp_path))
    there[5:8] = [0, 0, 0]  # f_files, f_ffree, f_favail
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result(there))
    require_room(tmp_path)


@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="small file systems are made by root")
def test_a_disk_without_space_or_without_inodes_is_refused(tmp_path: Path) -> None:
    code = f"""
from pathlib import Path
from trainkit.site.limits import require_room
from trainkit.errors import RefusedError
for name in ("space", "inodes", "enough"):
    try:
        require_room(Path({str(tmp_path)!r}) / name / "runs" / "x")
        print(name, "passes")
    except RefusedError as error:
        print(name, error.why)
"""
    options = {"space": "size=1m", "inodes": "size=300m,nr_inodes=20", "enough": "size=300m,nr_inodes=5000"}
    mounts = []
    for name, value in options.items():
        (tmp_path / name).mkdir()
        mounts.append(f"mount -t tmpfs -o {value} tmpfs {tmp_path / name}")
    done = subprocess.run(
        ["unshare", "--mount", "bash", "-ec", "\n".join([*mounts, '"$@"']), "bash", sys.executable, "-c", code],
        cwd=PROJECT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if "mount" in done.stderr or "unshare" in done.stderr:
        pytest.skip(f"this machine does not let root mount: {done.stderr.strip()}")
    space, inodes, enough = done.stdout.splitlines()
    assert space.startswith("space 1 MB are free")
    assert "more files (inodes) may be made there, and a run needs 1000" in inodes
    assert enough == "enough passes"


# The guess of sbatch, beyond what test_versions.py holds


@pytest.mark.parametrize(
    ("text", "nodes", "refusal"),
    [
        ("sbatch: Job 3 to start at 2026-11-21T19:12:29 using 2 processors on n1", "n1", ""),  # before 18.08
        ("sbatch: warning: can't run 1 processes on 2 nodes\n"
         "sbatch: Job 9 to start at 2026-11-21T19:12:29 using 8 processors on nodes g7 in partition gpu\n", "g7", ""),
        ("allocation failure: Requested node is not there", "", "Requested node is not there"),
        ("", "", "sbatch said nothing"),
    ],
)  # fmt: skip
def test_the_guess_of_sbatch_and_its_refusal_are_read(text: str, nodes: str, refusal: str) -> None:
    start = read_start(text)
    assert (start.when.isoformat() if start.when else "") == ("" if refusal else "2026-11-21T19:12:29")
    assert (start.nodes, start.refusal) == (nodes, refusal)
