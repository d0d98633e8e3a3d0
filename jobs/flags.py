"""Flags that verbs share, in sbatch's spelling, and what other programs call them."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainkit.common.errors import UserError

if TYPE_CHECKING:
    from trainkit.run.selection import Selection

# sbatch's flag -> short form, metavar, help. It sets the configuration key launch.<flag with underscores>.
RESOURCES: dict[str, tuple[str | None, str, str]] = {
    "nodes": ("N", "N", "number of nodes"),
    "spare-nodes": (None, "N", "further nodes of the job, to replace one that is lost"),
    "gpus-per-node": (None, "N", "GPUs on each node; 0 trains on CPU"),
    "ntasks-per-node": (None, "N", "ranks on each node (default: one per GPU, or one on CPU)"),
    "cpus-per-task": ("c", "N", "CPUs for each rank"),
    "mem": (None, "SIZE", "memory per node: 32G"),
    "time": ("t", "TIME", "time limit: minutes, H:MM:SS, D-HH:MM:SS"),
    "partition": ("p", "NAME", "partition"),
    "account": ("A", "NAME", "account to charge"),
    "qos": ("q", "NAME", "quality of service"),
    "constraint": ("C", "FEATURES", "node features"),
    "nodelist": ("w", "NODES", "run on these nodes"),
    "exclude": ("x", "NODES", "do not run on these nodes"),
    "reservation": (None, "NAME", "reservation"),
    "gres": (None, "KIND:N", "generic resources, instead of --gpus-per-node: gpu:4"),
    "job-name": ("J", "NAME", "name of the job"),
    "dependency": ("d", "WHEN:JOB", "start after another job: afterok:JOBID, or afterok:RUN"),
    "container-image": (None, "IMAGE", "run the ranks in this container; none: without a container"),
    "mail-user": (None, "ADDRESS", "mail address"),
    "mail-type": (None, "EVENTS", "events that send mail: BEGIN,END,FAIL"),
}
# What several verbs take, see `Parser.taking`.
COMMON: dict[str, dict[str, Any]] = {
    "run": {"metavar": "RUN", "help": "a run's folder or name, or the URL of its copy: s3://bucket/prefix/NAME"},
    "runs": {"nargs": "+", "metavar": "RUN", "help": "a run's or a sweep's name or folder"},
    "--attempt": {"type": int, "metavar": "N", "help": "number of the attempt, from 0 (default: the last)"},
    "overrides": {"nargs": "*", "metavar": "section.key=value", "help": "settings, such as data.root=/elsewhere"},
    "--checkpoint": {"default": "best", "metavar": "best|latest|STEP", "help": "the checkpoint to use (default: best)"},
    "--weights": {
        "choices": ("raw", "ema"),
        "help": "the model's own weights, or the averaged ones (default: averaged, if the run has them)",
    },
    "-m": {"dest": "module", "metavar": "MODULE", "help": "a script, given as a module as for `python -m`"},
    "--join": {
        "metavar": "TOKEN", "nargs": "?", "const": "",
        "help": "join this swarm as one peer with all ranks of the job, with the creator's settings "
        "(a token, or a file with one; default: TRAINKIT_TOKEN)",
    },
    "--allow-code": {
        "action": "store_true", "help": "allow somebody else's run or settings to run code, and to send or fetch data"
    },
    "--force": {"action": "store_true", "help": "continue even if the state of its job is unknown"},
    "--json": {"action": "store_true", "help": "answer a program, in JSON (docs/reference/json.md)"},
    "--host": {
        "metavar": "USER@LOGIN",
        "help": "run this on a login node, over ssh; append :FOLDER if the folder there is not ~/trainkit",
    },
}  # fmt: skip


def new_folder(text: str) -> Path:
    """Type, for argparse, of a flag that names a new folder."""
    from trainkit.launch import submission  # too slow for `--help`

    return submission.new_folder(text)


# Flags of other programs -> our answer. It is given where the command has the flags that it names, or --executor.
_INSTEAD = {
    "run-name experiment exp-name": "--name NAME is the name of the run, --job-name NAME the name of its job.",
    "name run-name experiment exp-name": "--job-name NAME is the name of the job, --run-dir FOLDER the run's folder.",
    "output output-dir out out-dir log-dir logdir save-dir chdir":
        "--run-dir FOLDER is the run's folder; it holds everything that the run writes.",
    "config preset cfg yaml": "The preset, or your own YAML file, is the first word, without a flag.",
    "device cpu gpu-id cuda accelerator":
        "--gpus-per-node 0 trains on the CPU, --gpus-per-node N on N GPUs of each node.",
    "debug": "--executor debug runs it in this process.",
    "local": "--executor local runs it on this machine.",
    "resume restart resume-from resume-from-checkpoint": "`python -m jobs.resume RUN` continues a run.",
    "amp fp16 bf16 mixed-precision": "Settings are written without dashes: train.precision=bf16 (or fp16).",
    "n ntasks np": "Ranks are counted per node: --nodes N --ntasks-per-node N.",
}  # fmt: skip


def meant_flag(flag: str, value: str, known: Sequence[str], *, settings: bool) -> str:
    """Suggest a replacement for an unknown flag: one of other programs, or a setting written as a flag."""
    from trainkit.config.layers import meant_by  # needed for this mistake alone
    from trainkit.config.schema import SECTIONS

    name = flag.lstrip("-").lower().replace("_", "-")
    for names, instead in _INSTEAD.items():
        if name in names.split() and {*(re.findall("--[a-z-]+", instead) or ["--executor"])} <= {*known}:
            return instead
    if settings and name in ("name", "follow", "wait", *RESOURCES):
        return f"`python -m jobs.submit` takes --{name}; it queues the run, or starts its ranks on this machine."
    if settings and name in SECTIONS and "=" in value:  # --optim lr=3
        return f"Settings are written without dashes: {name}.{value}."
    is_option = "." in name and name.partition(".")[0] in SECTIONS  # of a plugin
    key = meant_by(name)
    if not key and is_option:
        key = name.replace("-", "_")
    if settings and key and not key.startswith("launch."):
        return f"Settings are written without dashes: {key}={value or 'VALUE'}."
    own = f"--{(key or name).rpartition('.')[2].replace('_', '-')}"
    return f"Did you mean '{own}'?" if own in known else ""


def add_selection(parser: argparse.ArgumentParser) -> None:
    """Add the flags of commands that look for runs."""
    add = parser.add_argument_group("which runs").add_argument
    add("--state", metavar="STATE", help="in this state: failed, running, queued, or a state of SLURM; A,B for several")
    add("--preset", metavar="PRESET", help="submitted with this preset")
    add("--tag", metavar="TAG", action="append", default=[], help="with this tag; if repeated, with all of these tags")


def selection(args: argparse.Namespace) -> Selection:
    """Selection of runs that these flags, and an age where the command has one, ask for."""
    from trainkit.run.selection import Selection, seconds_in, states_in

    ages: dict[str, float] = {}
    for name in ("since", "older"):
        text = getattr(args, name, None)
        if text is not None:
            ages[name] = seconds_in(text)
    states: frozenset[str] = frozenset()
    if args.state:
        states = states_in(args.state)
    return Selection(states, args.preset or "", tuple(args.tag), **ages)


def add_resource_flags(parser: argparse.ArgumentParser) -> None:
    """Add sbatch's flags. Their values stay text here; the configuration checks them."""
    group = parser.add_argument_group("resources (sbatch's own flags)")
    for flag, (short, value, text) in RESOURCES.items():
        names = [f"--{flag}"]
        if short:
            names.append(f"-{short}")
        if flag == "ntasks-per-node":
            names.append("--ranks-per-node")
        group.add_argument(*names, metavar=value, help=text)
    group.add_argument("--sbatch", metavar="KEY=VALUE", action="append", default=[], help="any other sbatch option")
    group.add_argument("--srun", metavar="KEY=VALUE", action="append", default=[], help="any other srun option")


def add_launch_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of the commands that start a job: executor, cluster, following, resources."""
    add = parser.add_argument
    add("--executor", metavar="NAME", help="auto, slurm, local, or debug (in this process)")
    add("--cluster", metavar="PROFILE", help="a site profile: a name in configs/clusters, or a YAML file")
    add("--dry-run", action="store_true", help="print what would be submitted and why; write nothing")
    add(
        "--preflight",
        action="store_true",
        default=None,
        help="check the nodes before the ranks start; exclude bad ones",
    )
    group = parser.add_mutually_exclusive_group()
    group.add_argument("-f", "--follow", action="store_true", default=None, help="show progress until the run ends")
    group.add_argument("--no-follow", action="store_false", dest="follow", help="return at once, also for a local run")
    group.add_argument("--wait", action="store_true", help="wait silently until the run ends")
    add_resource_flags(parser)


def parse_script(
    parser: argparse.ArgumentParser, argv: Sequence[str]
) -> tuple[argparse.Namespace, dict[str, tuple[Any, str]]]:
    """Parse a command line that names a preset, or a script and its arguments; the latter's settings beside it."""
    from trainkit.config import script

    given, words = script.split(argv)
    try:
        args = parser.parse_intermixed_args(given)
    except UserError as error:
        program = next(filter(script.is_script, given), None)
        if program is None or words is not None or not error.what.startswith("Unrecognized arguments: "):
            raise
        raise script.without_dashes(error.what.split()[2], program) from None
    first = "preset" if hasattr(args, "preset") else "run"
    found = script.named(getattr(args, first), args.module, args.overrides, words)
    setattr(args, first, found.preset)
    args.overrides = found.overrides
    return args, found.settings


def launch_flags(args: argparse.Namespace) -> dict[str, tuple[Any, str]]:
    """Configuration key -> (value, flag) of the given launch flags."""
    from trainkit.launch.preparation import launch_settings

    return launch_settings(vars(args))
