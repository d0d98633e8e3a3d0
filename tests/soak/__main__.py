"""``python -m tests.soak``: the command."""

import argparse
import os
import random
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import tests.soak
from tests.slurm.conftest import _clean_environment
from tests.soak.cluster import DEVCLUSTER, PROJECT, Cluster
from tests.soak.strikes import KINDS
from tests.soak.training import Soak

NODES = ("n1", "n2", "n3", "n4")
QUICK = ("SlurmdTimeout=10",)
"""Of slurm.conf: a node that is gone is missed sooner than by default."""


def main() -> int:
    """Make a cluster, soak, take it down; 1 if anything is wrong."""
    parser = argparse.ArgumentParser(description=(tests.soak.__doc__ or "").splitlines()[0])
    parser.add_argument("--interruptions", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", type=lambda text: tuple(text.split(",")), default=KINDS, help=",".join(KINDS))
    parser.add_argument("--spare-nodes", type=int, default=0, help="of the job, beside those of its ranks")
    parser.add_argument("--net", default="10.199.199", help="of the cluster that is made for it")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        home, place = Path(folder), f"{folder}-cluster"
        for name in ("jobs", "trainkit", "configs"):
            (home / name).symlink_to(PROJECT / name)
        env = {**_clean_environment(), "DEVCLUSTER_DIR": place, "DEVCLUSTER_NET": args.net}
        env |= {"SLURM_CONF": f"{place}/etc/slurm.conf", "XDG_STATE_HOME": str(home / "state")}
        quick = [*QUICK, f"AuthInfo=socket={place}/run/munge.sock,cred_expire=5"]  # a requeued job waits no longer
        up = [DEVCLUSTER, "up", "--nodes", str(len(NODES)), *(word for line in quick for word in ("--conf", line))]
        subprocess.run([*up, "--until-exit", str(os.getpid())], env=env, check=True)
        began = time.monotonic()
        soak = Soak(
            Cluster(home, env, up, NODES), random.Random(args.seed), args.kinds, nodes=2, spare=args.spare_nodes
        )
        try:
            faults = soak.soak(args.interruptions, lambda words: print(words, flush=True))
        except SystemExit as error:
            faults = [str(error)]
        finally:
            kept = f"{folder}-run"
            shutil.copytree(soak.run.path, kept, symlinks=True, ignore=shutil.ignore_patterns("code"))
            shutil.copytree(f"{place}/log", f"{kept}/cluster-log", dirs_exist_ok=True)
            subprocess.run([DEVCLUSTER, "down", "--purge"], env=env, check=False)
        print(soak.summary())
        print(f"{len(soak.done)} interruptions in {time.monotonic() - began:.0f} s, seed {args.seed}: ", end="")
        print("\n".join(faults) or "all is as if nothing had happened")
        if faults:
            print(f"The run is kept in {kept}.")
        else:
            shutil.rmtree(kept)
    return 1 if faults else 0


if __name__ == "__main__":
    raise SystemExit(main())
