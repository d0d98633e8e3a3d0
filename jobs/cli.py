"""What the verbs share: flags in sbatch's spelling, and errors as three lines with the right exit code."""

from __future__ import annotations

import argparse
import os
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TextIO

from trainkit import terminal
from trainkit.errors import TrainkitError, UserError, did_you_mean
from trainkit.process import leave

if TYPE_CHECKING:
    from trainkit.config.schema import Config
    from trainkit.run.folder import RunDir
    from trainkit.run.selection import Selection

# sbatch's flag -> short form, metavar, help. It sets the configuration key launch.<flag with underscores>.
RESOURCES: dict[str, tuple[str | None, str, str]] = {
    "nodes": ("N", "N", "number of nodes"),
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
    "dependency": ("d", "WHEN:JOB", "start after: afterok:JOBID, or afterok:RUN"),
    "container-image": (None, "IMAGE", "run the ranks in this container; none: in no container"),
    "mail-user": (None, "ADDRESS", "mail address"),
    "mail-type": (None, "EVENTS", "mail on: BEGIN,END,FAIL"),
}
# What several verbs take, see `Parser.taking`.
COMMON: dict[str, dict[str, Any]] = {
    "run": {"metavar": "RUN", "help": "a run's folder or name, or the URL of its copy: s3://bucket/prefix/NAME"},
    "runs": {"nargs": "+", "metavar": "RUN", "help": "a run's or a sweep's name or folder"},
    "--attempt": {"type": int, "metavar": "N", "help": "which attempt, from 0 (default: the last)"},
    "overrides": {"nargs": "*", "metavar": "section.key=value", "help": "settings, such as data.root=/elsewhere"},
    "--checkpoint": {"default": "best", "metavar": "best|latest|STEP", "help": "which weights (default: best)"},
    "--weights": {
        "choices": ("raw", "ema"), "help": "the model's own, or the averaged ones (default: those, if the run has them)"
    },
    "--join": {
        "metavar": "TOKEN", "nargs": "?", "const": "",
        "help": "join that swarm, as one peer with all ranks of the job, and with its creator's settings "
        "(default: that in TRAINKIT_TOKEN, or a file with it)",
    },
    "--allow-code": {"action": "store_true", "help": "run, and send to, what somebody else's run or settings name"},
    "--force": {"action": "store_true", "help": "also if nobody can tell whether its job has ended"},
    "--host": {
        "metavar": "USER@LOGIN",
        "help": "do it on this login node, over ssh: user@login, or user@login:FOLDER if it is not ~/trainkit there",
    },
}  # fmt: skip


def new_folder(text: str) -> Path:
    """The argparse type of a flag that names a new folder."""
    from trainkit import start  # too slow for `--help`

    return start.new_folder(text)


@contextmanager
def run_to_read(reference: str, env: Mapping[str, str]) -> Iterator[RunDir]:
    """The run of a folder or name; for a URL, a temporary copy without the optimizer's state.

    Raises UserError also if the block meets a part of another user's run that is closed to this user.
    """
    from trainkit.run.folder import closed, find_run, is_url

    if not is_url(reference):
        try:
            yield find_run(reference, env)
        except PermissionError as error:
            if not error.filename:
                raise
            raise closed(Path(os.fsdecode(error.filename))) from None
        return
    from trainkit.checkpoint.remote import fetch_run

    with TemporaryDirectory(prefix="trainkit-") as folder:
        yield fetch_run(reference, Path(folder), weights_only=True)


def require_attempt(run: RunDir, attempt: int | None) -> None:
    """Raise UserError where ``--attempt`` names none of the run's."""
    if attempt is not None and attempt not in run.attempts():
        why = f"There are: {', '.join(map(str, run.attempts())) or 'none'}."
        fix = "Leave --attempt out for the last one."
        raise UserError(f"{run.name} has no attempt {attempt}.", why=why, fix=fix)


def settings_to_read(run: RunDir, args: argparse.Namespace) -> Config:
    """The settings of such a run with ``args.overrides``. Makes the run's own code importable from any folder.

    Raises RefusedError if another user could have written that code, unless ``args.allow_code``.
    """
    from trainkit import plugins
    from trainkit.config.loading import load
    from trainkit.run.ownership import require_own_code

    loaded = load(str(run.config), args.overrides)
    found = require_own_code(run.path, loaded, allow_code=args.allow_code, only_loads=True)
    plugins.search_snapshot(found.code, own=found.own)  # the code as it was in training
    return loaded.config


@contextmanager
def opened_table(file: str | None, flag: str) -> Iterator[TextIO]:
    """A file for CSV that appears only when it is complete; None: standard output."""
    from io import TextIOWrapper

    from trainkit.fileio import disk_errors_as, replacing

    if file is None:
        yield sys.stdout
        return
    final, fix = Path(file).expanduser(), f"Give another {flag}, or leave it out."
    with (
        disk_errors_as(f"{final} cannot be written.", fix=fix),
        replacing(final) as content,
        TextIOWrapper(content, encoding="utf-8", newline="") as out,
    ):
        yield out


class Parser(argparse.ArgumentParser):
    """argparse, but mistakes are `UserError`s and flags are never abbreviated."""

    def __init__(self, verb: str, description: str) -> None:
        self.verb, text = verb, "\n".join(_help_lines(description)).strip()
        form = argparse.RawDescriptionHelpFormatter
        super().__init__(f"{terminal.PROGRAM}{verb}", description=text, allow_abbrev=False, formatter_class=form)

    def taking(self, *names: str) -> Parser:
        """This parser, with arguments of `COMMON`."""
        for name in names:
            self.add_argument(name, **COMMON[name])
        return self

    def parsed(self, argv: Sequence[str], env: Mapping[str, str]) -> argparse.Namespace:
        """The arguments. With ``--host`` the command is done there instead, and this process ends with its code."""
        args = self.parse_intermixed_args(list(argv))
        if getattr(args, "host", None) is not None:
            from jobs import login_node

            raise SystemExit(login_node.forward(self.verb, argv, args.host, env))
        return args

    def error(self, message: str) -> NoReturn:
        what, why, fix = message, f"It was given to `{self.prog}`.", f"`{self.prog} --help` lists the flags."
        kind, _, rest = message.partition(": ")
        if kind == "unrecognized arguments":
            word, *more = rest.split()
            flag, _, value = word.partition("=")
            takes_settings = any(action.dest == "overrides" for action in self._actions)
            known = list(self._option_string_actions)
            meant = _meant(flag, value or " ".join(more[:1]), known, settings=takes_settings)
            fix = meant or did_you_mean(flag, known, otherwise=fix)
        elif kind == "the following arguments are required":
            # argparse also names the overrides, which are optional.
            names = [item for item in rest.split(", ") if item not in ("section.key=value", "...")]
            what, why = f"{', '.join(names)} missing", f"`{self.prog}` needs it."
            if "|" in names[0] and names[0].islower():
                what = f"One of {names[0].replace('|', ', ')} is missing"
        elif match := re.fullmatch(r"invalid choice: '(.*)' \(choose from (.*)\)", rest):
            choices = match[2].replace("'", "").split(", ")
            what = f"'{match[1]}' is not possible"
            why = f"{kind.removeprefix('argument ')} is one of: {', '.join(choices)}."
            fix = did_you_mean(match[1], choices, otherwise=f"Use {choices[0]}.")
        raise UserError(f"{what[0].upper()}{what[1:]}.", why=why, fix=fix)


_COLUMN = re.compile(r" *(?:\S.*?  +(?=\S))?")
"""What stands before the words of a line: blanks, or the first column of a list."""


def _help_lines(description: str) -> Iterator[str]:
    """Fill a terminal of 80 columns, as argparse does: paragraphs of prose, and each line of an example or a list."""
    said = re.sub(r"^`+[^`]*`+: ", "", description)  # a file's docstring begins with its command
    for block in terminal.as_started(said[:1].upper() + said[1:]).strip().split("\n\n"):
        lines = block.split("\n")
        widths = [len(line) - len(_COLUMN.sub("", line, count=1)) for line in lines]
        if not any(widths):
            lines, widths = [" ".join(lines)], [0]
        for line, width in zip(lines, widths, strict=True):
            yield textwrap.fill(line, 79, subsequent_indent=" " * width, break_on_hyphens=False)
        yield ""


class Verb(NamedTuple):
    """A word after a command, as in `swarm create`: its parser and its function."""

    parser: Callable[[], Parser]
    run: Callable[[argparse.Namespace, Mapping[str, str]], int | None]


def verb_parser(command: str, description: str, verbs: Mapping[str, Verb]) -> Parser:
    """The parser of a command that takes a verb."""
    parser = Parser(command, description)
    parser.add_argument("verb", choices=tuple(verbs), metavar="|".join(verbs), help="what to do")
    rest = f"`{next(iter(verbs))} --help` lists its flags"
    parser.add_argument("rest", nargs=argparse.REMAINDER, metavar="...", help=rest)
    return parser


def run_verb(parser: Parser, verbs: Mapping[str, Verb], argv: Sequence[str], env: Mapping[str, str]) -> int:
    """Parse the flags of the given verb and call it."""
    words = parser.parse_args(argv)
    verb = verbs[words.verb]
    return verb.run(verb.parser().parse_intermixed_args(words.rest), env) or 0


# Flags of other programs -> our answer. It is given where the command has the flags that it names, or --executor.
_INSTEAD = {
    "run-name experiment exp-name": "--name NAME is the name of the run, --job-name NAME that of its job.",
    "name run-name experiment exp-name": "--job-name NAME is the name of the job, --run-dir FOLDER the run's folder.",
    "output output-dir out out-dir log-dir logdir save-dir chdir":
        "--run-dir FOLDER is the run's folder; all that a run writes is in there.",
    "config preset cfg yaml": "The preset, or a YAML file of your own, is the first word, without a flag.",
    "device cpu gpu-id cuda accelerator":
        "--gpus-per-node 0 trains on the CPU, --gpus-per-node N on so many GPUs of each node.",
    "debug": "--executor debug runs it in this very process.",
    "local": "--executor local runs it on this machine.",
    "resume restart resume-from resume-from-checkpoint": "`python -m jobs.resume RUN` goes on with a run.",
    "amp fp16 bf16 mixed-precision": "Settings are written without dashes: train.precision=bf16 (or fp16).",
    "n ntasks np": "Ranks are given by node: --nodes N --ntasks-per-node N.",
}  # fmt: skip


def _meant(flag: str, value: str, known: Sequence[str], *, settings: bool) -> str:
    """Suggest a replacement for an unknown flag: one of other programs, or a setting written as a flag."""
    from trainkit.config.loading import meant_by  # needed for this mistake alone
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
    key = meant_by(name) or name.replace("-", "_") * is_option
    if settings and key and not key.startswith("launch."):
        return f"Settings are written without dashes: {key}={value or 'VALUE'}."
    own = f"--{(key or name).rpartition('.')[2].replace('_', '-')}"
    return f"Did you mean '{own}'?" if own in known else ""


def add_selection(parser: Parser) -> Parser:
    """The parser with the flags of commands that look for runs."""
    add = parser.add_argument_group("which runs").add_argument
    add("--state", metavar="STATE", help="in this state: failed, running, queued, or one of SLURM's; several: A,B")
    add("--preset", metavar="PRESET", help="submitted by this preset")
    add("--tag", metavar="TAG", action="append", default=[], help="with this tag; repeatable: with all of them")
    return parser


def selection(args: argparse.Namespace) -> Selection:
    """The runs that these flags, and an age where the command has one, ask for."""
    from trainkit.run.selection import Selection, seconds_in, states_in

    ages = {name: seconds_in(text) for name in ("since", "older") if (text := getattr(args, name, None)) is not None}
    return Selection(states_in(args.state) if args.state else frozenset(), args.preset or "", tuple(args.tag), **ages)


def add_resource_flags(parser: argparse.ArgumentParser) -> None:
    """Add sbatch's flags. Their values stay text here; the configuration checks them."""
    group = parser.add_argument_group("resources (sbatch's own flags)")
    for flag, (short, value, text) in RESOURCES.items():
        names = [f"--{flag}"] + ([f"-{short}"] if short else [])
        group.add_argument(*names, metavar=value, help=text)
    group.add_argument("--sbatch", metavar="KEY=VALUE", action="append", default=[], help="any other sbatch option")
    group.add_argument("--srun", metavar="KEY=VALUE", action="append", default=[], help="any other srun option")


def add_launch_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of the commands that start a job: executor, cluster, following, resources."""
    add = parser.add_argument
    add("--executor", metavar="NAME", help="auto, slurm, local, or debug (in this very process)")
    add("--cluster", metavar="PROFILE", help="a site profile: a name in configs/clusters, or a YAML file")
    add("--dry-run", action="store_true", help="print what would be submitted, and why; write nothing")
    add("--preflight", action="store_true", help="check the nodes before the ranks start; go on without a bad one")
    group = parser.add_mutually_exclusive_group()
    group.add_argument("-f", "--follow", action="store_true", default=None, help="show progress until the run ends")
    group.add_argument("--no-follow", action="store_false", dest="follow", help="return at once, also for a local run")
    group.add_argument("--wait", action="store_true", help="wait silently until the run ends")
    add_resource_flags(parser)


def launch_flags(args: argparse.Namespace) -> dict[str, tuple[Any, str]]:
    """Configuration key -> (value, flag) of the given launch flags."""
    from trainkit.start import launch_settings

    return launch_settings(vars(args))


def follow(runs: Sequence[RunDir], executor: str, args: argparse.Namespace) -> int:
    """Follow started runs if asked to; local runs unless asked not to. Returns the exit code."""
    from trainkit.finish import end_of, follow_to_end, wait_for
    from trainkit.schedulers.base import job_state, named

    if executor == "debug":
        return end_of(runs[0], job_state(runs[0]))
    wanted = args.follow if args.follow is not None else not named(executor).batch
    if not args.wait and not wanted:
        return 0
    codes = [0]
    for run in runs:
        try:
            codes.append(wait_for(run) if args.wait else follow_to_end(run))
        except TrainkitError as error:
            if len(runs) == 1:
                raise
            print(error, file=sys.stderr)  # the others of a sweep go on
            codes.append(error.exit_code)
    return max(codes)


Main = Callable[[Sequence[str], Mapping[str, str]], int | None]
"""A command, from its arguments and the environment to its exit code; None is 0."""


def run(main: Main) -> NoReturn:
    """Run a command and exit with its code."""
    leave(call(main))


def call(main: Main) -> int:
    """Run a command on this process's arguments and environment. Prints errors for users; returns the exit code.

    This is the only place that reads the environment; it is handed down.
    """
    try:
        code = main(sys.argv[1:], dict(os.environ)) or 0
        sys.stdout.flush()
        return code
    except TrainkitError as error:
        if isinstance(error, UserError):
            error.fix = _to_type_anew(sys.argv[1:], error.what) or error.fix
        print(terminal.as_started(terminal.lines(str(error))), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `... | head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


_PRETTY = re.compile("[\u2010-\u201f\u2212\u00a0\u00ab\u00bb\u200b\ufe58\ufe63\ufeff\uff01-\uff5e]")
"""What text processors make of dashes, quotes and spaces."""


def _to_type_anew(arguments: Sequence[str], complaint: str) -> str:
    for word in arguments:
        odd = _PRETTY.search(word)
        if odd and (word in complaint or word.partition("=")[0] in complaint):
            return f"Type {word} anew: its {odd[0]} (U+{ord(odd[0]):04X}) only looks like a character of the keyboard."
    return ""
