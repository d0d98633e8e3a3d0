"""``python -m jobs.launch PRESET``: start this node's ranks. Needs neither a scheduler nor a shared folder."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jobs import cli
from trainkit.config import loading
from trainkit.errors import RefusedError, RunFailedError, UserError
from trainkit.records.events import append_event
from trainkit.records.ownership import require_own_code
from trainkit.records.rundir import RunDir, next_path, runs_root

if TYPE_CHECKING:
    from trainkit.launch.processes import RankGroup

DESCRIPTION = """Start this node's ranks of a training, without a scheduler.
Give the same command on every node, each with its own --node-rank:

  python -m jobs.launch ddp --nodes 2 --node-rank 0 --gpus-per-node 1 --master-addr HOST
  python -m jobs.launch ddp --nodes 2 --node-rank 1 --gpus-per-node 1 --master-addr HOST

HOST is node 0, by a name or address that all nodes can reach."""
DEFAULT_PORT = 29500


def main(argv: Sequence[str], env: Mapping[str, str]) -> int:
    args = _parse(argv)
    existing = _existing(args.preset)
    if existing is not None and args.overrides:
        raise UserError(
            f"{args.preset} is a run, and its settings are its own.",
            why=f"Given: {' '.join(args.overrides)}.",
            fix="Leave them out.",
        )
    settings: dict[str, tuple[Any, str]] = {
        "launch.executor": ("local", "launch"),
        "launch.nodes": (args.nodes, "--nodes"),
    }
    for key in ("gpus_per_node", "ntasks_per_node"):
        if (value := getattr(args, key)) is not None:
            settings[f"launch.{key}"] = (value, "--" + key.replace("_", "-"))
    loaded = loading.load(args.preset, args.overrides, flags=settings)
    require_own_code(
        Path(args.preset).expanduser(), loaded, allow_code=args.allow_code, starts_snapshot=existing is not None
    )
    from trainkit.checking import check
    from trainkit.ranks.env import RankEnv

    if existing is None:  # what a run was made of is in its snapshot, wherever this is called
        check(loaded)
    plan = _plan(loaded, args, env)
    master_addr = _master_addr(args)
    run = existing or _new_run(loaded, args, plan, ["python", "-m", "jobs.launch", *argv], env)
    first = args.node_rank * plan.ntasks_per_node
    # Read back by the very function that the ranks use: a mistake here would be theirs.
    RankEnv.from_mapping(_rank_env(args, plan, master_addr, 0))
    return _run(
        run, [_rank_env(args, plan, master_addr, index) for index in range(plan.ntasks_per_node)], first, plan, env
    )


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = cli.Parser("launch", DESCRIPTION)
    parser.add_argument("preset", help="a preset, a YAML file, or a run folder to go on with")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument("-N", "--nodes", type=int, default=1, help="number of nodes (1)")
    parser.add_argument("--node-rank", type=int, default=0, metavar="K", help="which of them this is, from 0 (0)")
    parser.add_argument(
        "--gpus-per-node", type=int, metavar="G", help="GPUs of each node; 0 trains on CPU (all that are here)"
    )
    parser.add_argument("--ntasks-per-node", type=int, metavar="N", help="ranks per node (one per GPU, or one on CPU)")
    parser.add_argument("--master-addr", metavar="HOST", help="name or address of node 0 (127.0.0.1 for one node)")
    parser.add_argument(
        "--master-port", type=int, default=DEFAULT_PORT, metavar="PORT", help=f"free on node 0 ({DEFAULT_PORT})"
    )
    parser.add_argument("--run-dir", metavar="FOLDER", help="the run folder to make on this node")
    cli.add_allow_code_flag(parser)
    return parser.parse_intermixed_args(list(argv))


def _plan(loaded: loading.Loaded, args: argparse.Namespace, env: Mapping[str, str]) -> Any:
    """The plan of all nodes, checked against the GPUs of this one."""
    from dataclasses import replace

    from trainkit.cluster.site import discover
    from trainkit.launch.plan import make_plan

    if not 0 <= args.node_rank < args.nodes:
        raise UserError(
            f"--node-rank {args.node_rank} is not one of {args.nodes} nodes.",
            why="They count from 0.",
            fix=f"Use 0 to {args.nodes - 1}.",
        )
    here = discover(env)
    asked = loaded.config.launch.gpus_per_node
    if isinstance(asked, int) and asked > here.gpus:
        raise RefusedError(
            f"{asked} GPUs per node are asked for, and this node shows {here.gpus}.",
            why="Every rank needs a GPU of its own.",
            fix=f"Use --gpus-per-node {here.gpus}"
            + ("" if here.gpus else ", with --ntasks-per-node for ranks on the CPU")
            + ".",
        )
    # Every node brings its own GPUs, so that there are so many times as many as here.
    return make_plan(loaded, replace(here, slurm=False, gpus=here.gpus * args.nodes), Path("run"))


def _master_addr(args: argparse.Namespace) -> str:
    from trainkit.ranks.rendezvous import check_head

    if args.master_addr is None:
        if args.nodes > 1:
            raise UserError(
                "--master-addr is missing.",
                why="The ranks of several nodes meet on node 0.",
                fix="Give its name or address.",
            )
        return "127.0.0.1"
    try:
        check_head(args.master_addr, args.nodes)
    except UserError:
        check_head(args.master_addr, 1)  # a name that does not resolve is an error
        # Right for all node ranks on one machine, which is how this is tried out; there is no way to tell from here.
        print(
            f"Note: {args.master_addr} is this machine itself; ranks on other machines cannot reach it.",
            file=sys.stderr,
        )
    return str(args.master_addr)


def _existing(preset: str) -> RunDir | None:
    path = Path(preset).expanduser()
    return RunDir.open(path) if (path / "config.yaml").is_file() else None


def _new_run(
    loaded: loading.Loaded, args: argparse.Namespace, plan: Any, command: list[str], env: Mapping[str, str]
) -> RunDir:
    from trainkit.launch import submission

    path = Path(args.run_dir).expanduser().absolute() if args.run_dir else next_path(runs_root(env), loaded.name)
    return submission.write_run(path, submission.stored_config(loaded, Path.cwd()), plan, None, command)


def _rank_env(args: argparse.Namespace, plan: Any, master_addr: str, local_rank: int) -> dict[str, str]:
    per_node = plan.ntasks_per_node
    return {
        "RANK": str(args.node_rank * per_node + local_rank),
        "WORLD_SIZE": str(plan.world_size),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(per_node),
        "NODE_RANK": str(args.node_rank),
        "GROUP_RANK": str(args.node_rank),
        "MASTER_ADDR": master_addr,
        "MASTER_PORT": str(args.master_port),
    }


def _run(run: RunDir, ranks: Sequence[Mapping[str, str]], first: int, plan: Any, env: Mapping[str, str]) -> int:
    from trainkit.cluster.site import local_cpus
    from trainkit.launch.environment import python_path, scrubbed
    from trainkit.launch.processes import Rank, RankGroup, caught_signals
    from trainkit.records.process_id import ProcessId

    attempt, me = len(run.attempts()), ProcessId.of(os.getpid())
    logs = run.attempt_logs(attempt)
    logs.mkdir(parents=True)
    common = scrubbed(env) | {
        "TRAINKIT_RUN_DIR": str(run.path),
        "TRAINKIT_ATTEMPT": str(attempt),
        "PYTHONPATH": python_path(run.code, env),
        "OMP_NUM_THREADS": env.get("OMP_NUM_THREADS") or str(max(local_cpus() // len(ranks), 1)),
    }
    if not plan.gpus_per_node:
        common["CUDA_VISIBLE_DEVICES"] = ""
    # Whether its code may run was asked above, of the user; the ranks do not ask again.
    command = [sys.executable, "-u", "-m", "jobs.train", str(run.path), "--allow-code"]
    numbers = range(first, first + len(ranks))
    files = [(logs / f"rank-{number}.out", logs / f"rank-{number}.err") for number in numbers]
    who = {"host": me.host, "pid": me.pid, "process_started": me.started}
    append_event(run, "submitted", executor="launch", job_id=str(me.pid), attempts_before=attempt, **who)
    print(
        f"Node {ranks[0]['NODE_RANK']}: ranks {first} to {numbers[-1]} of {plan.world_size}; run folder {run.path}",
        flush=True,
    )
    desk = _Desk(*(files[0] if first == 0 else (None, None)))
    with caught_signals((signal.SIGINT, signal.SIGTERM, signal.SIGUSR2), desk.asked.append):
        group = RankGroup([Rank(command, {**common, **own}, *pair) for own, pair in zip(ranks, files, strict=True)])
        codes = group.wait(lambda: desk.attend(group))
    desk.show()
    saved = run.requeue_marker(attempt).exists() or desk.signalled
    state = "FAILED" if any(codes) else "PREEMPTED" if saved else "COMPLETED"
    append_event(run, "ended", state=state, job_id=str(me.pid), attempt=attempt, exit_codes=codes)
    if any(codes):
        local_rank = group.first_failed or 0
        code = codes[local_rank]
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        raise RunFailedError(
            f"Rank {first + local_rank} {how}.",
            why="The other ranks of this node were ended.",
            fix=f"Its log is {files[local_rank][1]}.",
        )
    if saved:
        print(f"Stopped and saved. The same command with {run.path} in the preset's place goes on.")
    elif first == 0:
        from trainkit.monitor.follow import summary_lines

        print("\n".join(summary_lines(run)))
    return 0


class _Desk:
    """What comes in from outside while the ranks run: signals are passed on, rank 0's output is shown."""

    def __init__(self, stdout: Path | None, stderr: Path | None) -> None:
        self.asked: list[int] = []
        self.signalled = False
        self._shown = [(stdout, sys.stdout), (stderr, sys.stderr)]
        self._offsets = [0, 0]

    def attend(self, group: RankGroup) -> None:
        """Called often. The first signal asks the ranks to save and end, a second one ends them."""
        while self.asked:
            number = self.asked.pop(0)
            if self.signalled and number != signal.SIGUSR2:
                group.end(grace_seconds=0)
            self.signalled = True
            group.signal(signal.SIGUSR2 if number == signal.SIGUSR2 else signal.SIGTERM)
        self.show()

    def show(self) -> None:
        """Print what rank 0 has written since the last look."""
        for index, (path, stream) in enumerate(self._shown):
            if path is not None and path.is_file():
                with path.open("rb") as file:
                    file.seek(self._offsets[index])
                    new = file.read()
                if new:
                    self._offsets[index] += len(new)
                    stream.write(new.decode(errors="replace"))
                    stream.flush()


if __name__ == "__main__":
    cli.run(main)
