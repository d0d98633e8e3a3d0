"""Runs whose ranks import no torch, and end as the name of their folder says: ``light_ranks.py NAME=FLAGS ...``."""

import importlib
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from trainkit.run.events import Attempt
from trainkit.run.folder import RunDir


def run_rank(run: str) -> str:
    """Do a rank's part."""
    what, is_last = Path(run).name, os.environ["SLURM_PROCID"] == str(int(os.environ["SLURM_NTASKS"]) - 1)
    if what in ("killed", "again") and is_last:
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "raises" and is_last:
        raise ValueError("bad labels")
    if what == "unseen":
        os.environ.pop("TRAINKIT_DEVICE", None)  # by which the tests' own ranks do without a GPU
        importlib.import_module("trainkit.distributed.device").gpu_is_here()
    if what == "full" and is_last:
        Path("/dev/full").write_text("weights", encoding="utf-8")
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # both have handlers of submitit's
    signal.signal(signal.SIGTERM, signal.SIG_IGN if what in ("raises", "preempted") else signal.SIG_DFL)
    if what == "ends":
        Attempt(RunDir(Path(run)), 0).ended("COMPLETED")
    else:
        time.sleep(100)
    return "finished"


def main(wanted: list[str]) -> None:
    """Submit them, each with its own flags (``nodes:2;srun:KEY=VALUE``), and print their job ids."""
    from trainkit.cluster.scheduler import named
    from trainkit.cluster.survey import discover
    from trainkit.config.loading import load
    from trainkit.launch.planning import make_plan
    from trainkit.launch.run_folders import stored_config, write_run

    env, cwd = dict(os.environ), Path.cwd()
    site, function = discover(env), importlib.import_module("light_ranks").run_rank
    for item in wanted:
        name, _, flags = item.partition("=")
        given: dict[str, tuple[Any, str]] = {}
        for flag in flags.split(";"):
            key, _, text = flag.partition(":")
            value: Any = int(text) if text.isdigit() else text == "yes" if key == "requeue" else text
            if key in ("sbatch", "srun"):
                value = dict([text.split("=", 1)])
            given[f"launch.{key}"] = (value, key)
        config, path = load("ddp", flags=given), cwd / "runs" / name
        plan = make_plan(config, site, path)
        run = write_run(
            path, stored_config(config, cwd), plan, named(plan.executor).script(plan, path, cwd), ["light_ranks.py"]
        )
        print(name, *named(plan.executor).submit(path, [run], plan, function, cwd=cwd, env=env))


if __name__ == "__main__":
    main(sys.argv[1:])
