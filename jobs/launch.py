"""``python -m jobs.launch PRESET``: start the ranks of this node, without a scheduler or a shared folder.

Give the same command on every node, each with its own --node-rank:

  python -m jobs.launch ddp --nodes 2 --node-rank 0 --gpus-per-node 1 \\
      --master-addr HOST --secret-file FILE
  python -m jobs.launch ddp --nodes 2 --node-rank 1 --gpus-per-node 1 \\
      --master-addr HOST --secret-file FILE

HOST is the name or address of node 0; all nodes must be able to reach it. FILE
holds a secret of at least 16 characters of your choice, the same on all nodes:
only ranks that know it may join. The variable TRAINKIT_SECRET may hold the
secret instead. Without either, node 0 generates one and prints it.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from jobs import cli, flags
from trainkit.cluster.pickles import PYTHON_FLAGS
from trainkit.cluster.scheduler import JobState
from trainkit.common import fileio
from trainkit.common.errors import RefusedError, RunFailedError, TrainkitError, UserError
from trainkit.common.process import scrubbed
from trainkit.launch.follow import refusal
from trainkit.run.find import next_path, runs_root
from trainkit.run.folder import RunDir
from trainkit.run.run_lease import ProcessId

if TYPE_CHECKING:
    from trainkit.cluster.containers import Container
    from trainkit.cluster.plan import Plan
    from trainkit.config.loading import Loaded
    from trainkit.launch.controller import Node

DEFAULT_PORT = 29500


def main(argv: Sequence[str], env: Mapping[str, str]) -> int:
    args, script = flags.parse_script(parser(), list(argv))
    from trainkit.cluster.ranks import RankEnv
    from trainkit.config.loading import load
    from trainkit.launch.controller import Node, run_node
    from trainkit.launch.preparation import check, check_all_data, launch_settings, preset_or_run, record_data, settled
    from trainkit.launch.run_folders import stored_config, write_run
    from trainkit.launch.scripts import check_script, settled_script
    from trainkit.launch.validation import require_plain_path
    from trainkit.run.folder import refuse_bench
    from trainkit.run.ownership import require_own_code
    from trainkit.run.snapshot import restore_code

    if args.preset is None:
        parser().error("the following arguments are required: PRESET|SCRIPT.py|RUN")
    preset = preset_or_run(args.preset, env)
    path = Path(preset).expanduser()
    refuse_bench(path)
    existing = None
    if (path / "config.yaml").is_file():
        existing = RunDir.open(path)
    if existing is not None and args.overrides:
        why = f"You gave: {' '.join(args.overrides)}."
        raise UserError(f"{preset} is a run, and its settings are its own.", why=why, fix="Leave them out.")
    settings = launch_settings(vars(args)) | {"launch.executor": ("local", "launch")} | script
    loaded = load(preset, args.overrides, flags=settings)
    if existing is None:
        loaded = settled_script(loaded, Path.cwd())
    found = require_own_code(path, loaded, allow_code=args.allow_code, starts_snapshot=existing is not None)
    if existing is None and loaded.config.script is not None:
        check_script(loaded, env)
    elif existing is None:  # what a run was made of is in its snapshot, wherever this is called
        check(loaded)
        check_all_data([loaded])
        (loaded,) = settled([loaded])
    plan = _plan(loaded, args, env)
    node = Node(args.node_rank, plan, _master_addr(args), args.master_port, _secret(args, env))
    # Read back by the very function that the ranks use: a mistake here would be theirs.
    RankEnv.from_mapping(node.rank_variables(0))
    if existing is not None:
        folder = existing.path
    elif args.run_dir:
        folder = args.run_dir.absolute()
    else:
        folder = next_path(runs_root(env), loaded.name)
    if args.dry_run:
        print("\n".join(_commands(folder, node, env)))
        return 0
    if plan.container is not None:
        _require_runtime(plan.container)
    if existing is not None:
        run = existing
        if node.node_rank == 0:
            restore_code(run, found.content)
        else:
            restore_code(run, None)  # node 0 starts beside it
    else:
        require_plain_path(folder)
        run = write_run(folder, stored_config(loaded, Path.cwd()), plan, None, ["python", "-m", "jobs.launch", *argv])
        if loaded.config.script is None:
            record_data([run], [loaded.config])
    if plan.container is not None:
        return _in_container(run, node, env)
    last = node.first_rank + plan.ntasks_per_node - 1
    ranks = f"ranks {node.first_rank} to {last} of {plan.world_size}"
    print(f"Node {node.node_rank}: {ranks}; run folder {run.path}", flush=True)
    ending = run_node(run, node, env)
    if ending.state in ("FAILED", "TIMEOUT"):
        raise _failure(run, node.first_rank + (ending.culprit or 0), ending.why)
    if ending.state == "CANCELLED":
        print("Stopped without saving.")
        return 1
    if ending.state == "PREEMPTED":
        print(f"Stopped and saved. To continue, give the same command with {run.path} instead of the preset.")
    elif node.node_rank == 0:
        from trainkit.report.end_lines import summary_lines

        print("\n".join(summary_lines(run)))
    return 0


def _failure(run: RunDir, rank: int, words: str) -> TrainkitError:
    """Why a rank has failed: in its own words, if it has refused its settings."""
    from trainkit.diagnosis.causes import cause_of  # only a failure needs it

    cause = cause_of(run, JobState("FAILED", executor="launch"))
    if cause is not None and cause.why and cause.failure is not None and cause.failure.rank == rank:
        return refusal(run, cause, f"Rank {rank} failed:")
    fix = f"Its log is {run.attempt_logs(run.attempts()[-1]) / f'rank-{rank}.err'}."
    why = "The other ranks of this node were ended."
    return RunFailedError(f"Rank {rank} failed: {words.rstrip('.')}.", why=why, fix=fix)


def _commands(run: Path, node: Node, env: Mapping[str, str]) -> list[str]:
    """Commands that are started on this node: its container, or its ranks. Without the secret."""
    plan = node.plan
    if plan.container is not None:
        return [shlex.join(_container_command(run, node, env))]
    train = [sys.executable, *PYTHON_FLAGS, "-m", "trainkit", "train", str(run)]
    commands = []
    for rank in range(plan.ntasks_per_node):
        variables = [f"{key}={value}" for key, value in node.rank_variables(rank).items()]
        commands.append(shlex.join([*variables, *train]))
    return commands


def _container_command(run: Path, node: Node, env: Mapping[str, str]) -> list[str]:
    """This very command again, in the container, on the run that is written by now."""
    from trainkit.cluster import containers

    plan = node.plan
    assert plan.container is not None
    cwd = Path.cwd()
    gpus = plan.gpus_per_node > 0
    before = containers.node_command(plan.container, (run, cwd), cwd, run / "code", env, gpus=gpus)
    again = ["-m", "trainkit", "launch", str(run), "--allow-code", "--container-image", "none"]
    again += ["--nodes", str(plan.nodes), "--node-rank", str(node.node_rank)]
    again += ["--gpus-per-node", str(plan.gpus_per_node), "--ntasks-per-node", str(plan.ntasks_per_node)]
    return [*before, *again, "--master-addr", node.master_addr, "--master-port", str(node.master_port)]


def _in_container(run: RunDir, node: Node, env: Mapping[str, str]) -> NoReturn:
    """Become the container's command: its signals, its output and its exit code are this command's."""
    from trainkit.cluster import containers

    words = _container_command(run.path, node, env)
    print(f"Node {node.node_rank}: {shlex.join(words)}", flush=True)
    me = ProcessId.of(os.getpid())  # and it stays what is here
    inside = scrubbed(env) | {"TRAINKIT_SECRET": node.secret, containers.CLIENT: me.word()}
    os.execvpe(words[0], words, inside)


def _require_runtime(container: Container) -> None:
    if shutil.which(container.runtime) is None:
        why = f"It is not on the PATH of this machine; launch.container_image={container.image}."
        fix = f"Install {container.runtime}, set launch.container_runtime, or train without: --container-image none."
        raise RefusedError(f"Cannot start {container.runtime}.", why=why, fix=fix)


def parser() -> cli.Parser:
    parser = cli.Parser("launch", __doc__ or "")
    add = parser.add_argument
    preset = "a preset, a YAML file, a script, or a run folder to continue"
    add("preset", nargs="?", metavar="PRESET|SCRIPT.py|RUN", help=preset)
    add("-N", "--nodes", type=int, metavar="N", default=1, help="number of nodes (1)")
    add("--node-rank", type=int, default=0, metavar="N", help="number of this node, from 0 (0)")
    add("--gpus-per-node", type=int, metavar="N", help="GPUs on each node; 0 trains on CPU (all of this node)")
    ranks = "ranks per node (one per GPU, or one on CPU)"
    add("--ntasks-per-node", "--ranks-per-node", type=int, metavar="N", help=ranks)
    add("--master-addr", metavar="HOST", help="name or address of node 0 (127.0.0.1 for one node)")
    port = f"a free port of node 0 ({DEFAULT_PORT}); the next one serves restarts in place"
    add("--master-port", type=int, default=DEFAULT_PORT, metavar="PORT", help=port)
    secret = "file with the secret that ranks must know to join (TRAINKIT_SECRET)"
    add("--secret-file", type=Path, metavar="FILE", help=secret)
    add("--run-dir", type=flags.new_folder, metavar="FOLDER", help="new run folder on this node")
    add("--container-image", metavar="IMAGE", help="run the ranks in this container, by docker or apptainer")
    add("--dry-run", action="store_true", help="print what would be started here; write nothing")
    return parser.taking("-m", "overrides", "--allow-code")


def _plan(loaded: Loaded, args: argparse.Namespace, env: Mapping[str, str]) -> Plan:
    """The plan of all nodes, checked against the GPUs of this one."""
    from trainkit.cluster.survey import discover
    from trainkit.launch.planning import make_plan

    if not 0 <= args.node_rank < args.nodes:
        what = f"--node-rank {args.node_rank} is not one of {args.nodes} nodes."
        fix = f"Use 0 to {args.nodes - 1}."
        raise UserError(what, why="Nodes are numbered from 0.", fix=fix)
    here = discover(env)
    asked = loaded.config.launch.gpus_per_node
    if isinstance(asked, int) and asked > here.gpus:
        what = f"{asked} GPUs per node were requested, but this node has {here.gpus}."
        on_cpu = "" if here.gpus else ", with --ntasks-per-node for ranks on CPU"
        fix = f"Use --gpus-per-node {here.gpus}{on_cpu}."
        raise RefusedError(what, why="Every rank needs a GPU of its own.", fix=fix)
    # Every node brings its own GPUs, so that there are so many times as many as here.
    return make_plan(loaded, replace(here, scheduler="", gpus=here.gpus * args.nodes), Path("run"))


def _master_addr(args: argparse.Namespace) -> str:
    from trainkit.cluster.ranks import check_head

    address = args.master_addr
    if not address and args.nodes == 1:
        address = "127.0.0.1"
    if not address:
        why = "Ranks of several nodes connect to node 0."
        fix = "Give the name or address of node 0."
        raise UserError("--master-addr is missing.", why=why, fix=fix)
    try:
        check_head(address, args.nodes)
    except UserError:
        check_head(address, 1)  # a name that does not resolve is an error
        # Right for all node ranks on one machine, which is how this is tried out; there is no way to tell from here.
        print(f"Note: {address} is this machine itself; ranks on other machines cannot reach it.", file=sys.stderr)
    return str(address)


def _secret(args: argparse.Namespace, env: Mapping[str, str]) -> str:
    """Secret that only the ranks of this run know; made up by node 0 where none is given."""
    from trainkit.cluster.ranks import VARIABLE, Secret

    given = env.get(VARIABLE, "")
    file = args.secret_file
    if file is not None:
        with fileio.disk_errors_as(f"Cannot read --secret-file {file}.", fix="Give a file that holds the secret."):
            given = fileio.read_text(file, 4096, follow=True).strip()
            fileio.require_private(file, "Anybody who knows the secret can join the run.")
    if given:
        return Secret(given).text
    if args.node_rank > 0:
        why = "Only ranks that know the run's secret may join, and node 0 has it."
        fix = f"Give every node the same --secret-file or {VARIABLE}, or the secret that node 0 prints."
        raise UserError("--secret-file is missing.", why=why, fix=fix)
    made_up = Secret.generate().text
    if args.nodes > 1:
        print(f"The other nodes join with: export {VARIABLE}={made_up}", flush=True)
    return made_up


if __name__ == "__main__":
    cli.run(main)
