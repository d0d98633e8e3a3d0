"""A site that enforces accounts, QOS and their limits: what it would refuse; tests/site has texts of one."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

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
sacctmgr -i add qos one
sacctmgr -i add user root account=vision qos=normal,weekly
sacctmgr -i add user root account=nlp qos=normal,one
scontrol update PartitionName=low AllowAccounts=vision
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Account `nlp` may use QOS `one`, and not partition `low`; `vision` may use QOS `weekly`."""
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
