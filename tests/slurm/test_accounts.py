"""A site that enforces accounts, QOS and their limits: what it would refuse, and what waits for others to end."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.conftest import Cluster, cluster_up, login
from tests.slurm.test_site import discovered
from tests.slurm.test_submit import TINY
from trainkit.site.profile import Account, Qos, read_facts

pytestmark = [pytest.mark.slurm, pytest.mark.long]

ENFORCED = "AccountingStorageEnforce=associations,limits,qos"
SITE = """\
sacctmgr -i add account vision,nlp
sacctmgr -i add qos weekly MaxWall=7-00:00:00 MaxTRESPerUser=gres/gpu=2
sacctmgr -i add qos one MaxJobsPerUser=1
sacctmgr -i add qos short MaxWall=1
sacctmgr -i add user root account=vision qos=normal,weekly
sacctmgr -i add user root account=nlp qos=normal,one,short
sacctmgr -i modify account vision set GrpTRES=node=1
scontrol update PartitionName=low AllowAccounts=vision
"""
ONE_RANK = ("--nodes", "1", "--gpus-per-node", "0")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Account `vision` may have one node, QOS `one` one job and QOS `short` one minute; `nlp` may not use `low`."""
    with cluster_up("--nodes", "2", "--gpus-per-node", "4", "--conf", ENFORCED) as env:
        cluster = login(env, tmp_path_factory.mktemp("home"))
        for line in SITE.splitlines():
            cluster.run(*shlex.split(line))
        yield cluster


@pytest.fixture(scope="module")
def profile(site: Cluster, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The site's profile, as `jobs.cluster discover` writes it."""
    folder = tmp_path_factory.mktemp("profile")
    discovered(site, folder)
    return str(folder / "configs" / "clusters" / "found.yaml")


def test_discover_lists_the_accounts_and_qos_of_this_user(profile: str) -> None:
    facts = read_facts(profile)
    assert facts is not None
    assert facts.accounts_enforced is True
    mine = {Account("vision", "", ("normal", "weekly")), Account("root", "", ("normal",), default=True)}
    assert mine < {*facts.accounts}
    assert Qos("weekly", "7-00:00:00", "gres/gpu=2") in facts.qos


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("-A visoin", "Account 'visoin' is none of yours"),
        ("-A vision -q one", "QOS 'one' is none of yours with account 'vision'"),
        ("-A vision -q weekly -t 8-00:00:00", "is over the limit of QOS 'weekly'"),
        ("-A vision -q weekly -N 1 --gpus-per-node 4", "4 GPUs are more than QOS 'weekly' gives one user"),
        ("-A nlp -p low", "Account 'nlp' may not use partition 'low'"),
    ],
)
def test_what_the_site_would_not_start_is_refused_before_it_is_queued(
    site: Cluster, profile: str, flags: str, words: str
) -> None:
    refused = site.job("submit", "ddp", *TINY, "--cluster", profile, *flags.split(), check=False)
    assert (refused.returncode, words in refused.stderr) == (3, True), refused.stderr
    assert site.run("squeue", "-h", "-o", "%j").stdout == ""


@pytest.mark.parametrize(
    ("flags", "words"),
    [("-A nosuch", "Invalid account or account/partition combination"), ("-A nlp -q weekly", "Invalid qos")],
)
def test_without_a_profile_the_scheduler_refuses_in_its_own_words(site: Cluster, flags: str, words: str) -> None:
    refused = site.job("submit", "ddp", *TINY, *ONE_RANK, *flags.split(), check=False)
    assert (refused.returncode, words in refused.stderr) == (4, True), refused.stderr


@pytest.fixture(scope="module")
def waiting(site: Cluster, profile: str) -> Path:
    """The folder of runs that wait, each for what its name says; one job of QOS `one` is running."""
    running = site.sbatch("-A", "nlp", "-q", "one", "-o", "/dev/null", "--wrap", "sleep 300")
    site.wait_for("the job that is in their way", lambda: site.states(running) == ["RUNNING"])
    for name, flags in {
        "AssocGrpNodeLimit": "-A vision -N 2 --gpus-per-node 0",
        "QOSMaxJobsPerUserLimit": "-A nlp -q one -N 1 --gpus-per-node 0",
        "QOSMaxWallDurationPerJobLimit": "-A nlp -q short -t 30 -N 1 --gpus-per-node 0",
    }.items():
        site.job("submit", "ddp", *TINY, "--again", "--run-dir", f"runs/{name}", *flags.split())
    return site.home / "runs"


@pytest.mark.parametrize(
    ("reason", "says"),
    [
        ("AssocGrpNodeLimit", "It waits for other jobs of this account, QOS or user to end"),
        ("QOSMaxJobsPerUserLimit", "It waits for other jobs of this account, QOS or user to end"),
        ("QOSMaxWallDurationPerJobLimit", "The job asks for more than its account or QOS allows one job"),
    ],
)
def test_why_names_the_limit_that_a_job_waits_for(site: Cluster, waiting: Path, reason: str, says: str) -> None:
    def told() -> bool:
        said = site.job("why", str(waiting / reason)).stdout
        return says in said and f"({reason})" in said

    site.wait_for(f"{reason} in jobs.why", told)
