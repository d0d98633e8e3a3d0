"""Command line of every verb: its parser, and errors as three lines with the right exit code."""

from __future__ import annotations

import argparse
import os
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, NamedTuple, NoReturn, TextIO

from jobs import output
from trainkit.common import terminal
from trainkit.common.errors import TrainkitError, UserError, did_you_mean
from trainkit.common.process import leave

if TYPE_CHECKING:
    from jobs.shapes import OutlookPart
    from trainkit.config.schema import Config
    from trainkit.launch.submission import Started
    from trainkit.run.folder import RunDir
from jobs.flags import COMMON, meant_flag


@contextmanager
def run_to_read(reference: str, env: Mapping[str, str]) -> Iterator[RunDir]:
    """The run of a folder or name; for a URL, a temporary copy without the optimizer's state.

    Raises UserError also if the block meets a part of another user's run that is closed to this user.
    """
    from trainkit.run.find import find_run, is_url
    from trainkit.run.folder import closed

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
        why = f"Its attempts: {', '.join(map(str, run.attempts())) or 'none'}."
        fix = "Omit --attempt for the last one."
        raise UserError(f"{run.name} has no attempt {attempt}.", why=why, fix=fix)


def settings_to_read(run: RunDir, args: argparse.Namespace, verb: str) -> Config:
    """The settings of such a run with ``args.overrides``. Makes the run's own code importable from any folder.

    Args:
        verb: the command that asks.

    Raises:
        RefusedError: another user could have written that code, unless ``args.allow_code``.
        UserError: it is the run of a script, of which the command can tell nothing.
    """
    from trainkit.config import plugins
    from trainkit.config.loading import load
    from trainkit.launch.scripts import refuse_script
    from trainkit.run.ownership import READS, require_own_code

    loaded = load(str(run.config), args.overrides)
    refuse_script(loaded.config, verb)
    found = require_own_code(run.path, loaded, allow_code=args.allow_code, use=READS)
    plugins.search_snapshot(found.code, own=found.own)  # the code as it was in training
    return loaded.config


@contextmanager
def opened_table(file: str | None, flag: str) -> Iterator[TextIO]:
    """A file for CSV that appears only when it is complete; None: standard output."""
    from io import TextIOWrapper

    from trainkit.common.fileio import disk_errors_as, replacing

    if file is None:
        yield sys.stdout
        return
    final = Path(file).expanduser()
    fix = f"Give another {flag}, or omit it."
    if final.is_dir():  # or it would be seen once all is done
        raise UserError(f"{final} cannot be written.", why="It is a folder.", fix=fix)
    with (
        disk_errors_as(f"{final} cannot be written.", fix=fix),
        replacing(final) as content,
        TextIOWrapper(content, encoding="utf-8", newline="") as out,
    ):
        yield out


def require_table(file: str | None, flag: str) -> None:
    """Refuse a file of `opened_table` that cannot be written, before the work for it; it stays as it is."""
    with suppress(_TriedError), opened_table(file, flag):
        raise _TriedError


class _TriedError(Exception):
    """The file can be written."""


class Parser(argparse.ArgumentParser):
    """argparse, but mistakes are `UserError`s and flags are never abbreviated."""

    def __init__(self, verb: str, description: str) -> None:
        self.verb = verb
        text = "\n".join(_help_lines(description)).strip()
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
        what = message
        why = f"It was given to `{self.prog}`."
        fix = f"`{self.prog} --help` lists the flags."
        kind, _, rest = message.partition(": ")
        if kind == "unrecognized arguments":
            word, *more = rest.split()
            flag, _, value = word.partition("=")
            takes_settings = any(action.dest == "overrides" for action in self._actions)
            known = list(self._option_string_actions)
            meant = meant_flag(flag, value or " ".join(more[:1]), known, settings=takes_settings)
            fix = meant or did_you_mean(flag, known, otherwise=fix)
        elif kind == "the following arguments are required":
            # argparse also names the overrides, which are optional.
            names = re.sub(r", (section\.key=value|\.\.\.)", "", rest)
            what = f"{names} missing"
            why = f"`{self.prog}` needs it."
            if "|" in names and names.islower():
                what = f"One of {names.replace('|', ', ')} is missing"
        elif rest.startswith("invalid choice: "):
            given, *choices = re.findall(r"'([^']*)'", rest)
            what = f"'{given}' is not possible"
            why = f"{kind.removeprefix('argument ')} is one of: {', '.join(choices)}."
            fix = did_you_mean(given, choices, otherwise=f"Use {choices[0]}.")
        raise UserError(f"{what[0].upper()}{what[1:]}.", why=why, fix=fix)


_COLUMN = re.compile(r" *(?:\S.*?  +(?=\S))?")
"""Blanks, or the first column of a list, before the words of a line."""


def _help_lines(description: str) -> Iterator[str]:
    """Fill a terminal of 80 columns, as argparse does: paragraphs of prose, and each line of an example or a list."""
    said = re.sub(r"^`+[^`]*`+: ", "", description)  # a file's docstring begins with its command
    for block in terminal.as_started(said[:1].upper() + said[1:]).strip().split("\n\n"):
        lines = block.split("\n")
        widths = [len(line) - len(_COLUMN.sub("", line, count=1)) for line in lines]
        if not any(widths):
            lines = [" ".join(lines)]
        for line, width in zip(lines, widths, strict=False):
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


def is_followed(executor: str, args: argparse.Namespace) -> bool:
    """True if the progress of a started run is shown: if asked, and of a local run unless asked not to."""
    from trainkit.cluster.scheduler import named

    if args.follow is None:
        return not named(executor).batch
    return bool(args.follow)


def follow(runs: Sequence[RunDir], executor: str, args: argparse.Namespace) -> int:
    """Follow started runs if asked to; local runs unless asked not to. Returns the exit code."""
    from trainkit.cluster.job_states import job_state
    from trainkit.launch.follow import end_of, follow_to_end, wait_for

    if executor == "debug":
        return end_of(runs[0], job_state(runs[0]))
    if not args.wait and not is_followed(executor, args):
        return 0
    codes = [0]
    watched = wait_for if args.wait else follow_to_end
    for run in runs:
        try:
            codes.append(watched(run))
        except TrainkitError as error:
            if len(runs) == 1:
                raise
            print(error, file=sys.stderr)  # the others of a sweep go on
            codes.append(error.exit_code)
    return max(codes)


def finish(started: Started, args: argparse.Namespace, outlook: OutlookPart | None = None) -> int:
    """Follow what was started, as asked, and answer a program. Returns the exit code."""
    code = follow(started.going_on, started.executor, args)
    if output.is_on():
        from jobs.shapes import Submitted, SubmittedRun
        from trainkit.cluster.job_states import job_states

        told = []
        for run, state in zip(started.runs, job_states(started.runs), strict=True):
            item = SubmittedRun(
                run=run.name, folder=str(run.path), executor=state.executor or None, job_id=state.job_id or None,
                state=state.state, goes_on=run in started.going_on,
            )  # fmt: skip
            told.append(item)
        output.emit(Submitted(runs=told, outlook=outlook))
    return code


Main = Callable[[Sequence[str], Mapping[str, str]], int | None]
"""A command, from its arguments and the environment to its exit code; None is 0."""


def run(main: Main) -> NoReturn:
    """Run a command and exit with its code."""
    leave(call(main))


def call(main: Main) -> int:
    """Run a command on this process's arguments and environment. Prints errors for users; returns the exit code.

    This is the only place that reads the environment; it is handed down.
    """
    with output.for_programs(sys.argv[1:]):
        return _call(main)


def _call(main: Main) -> int:
    try:
        code = main(sys.argv[1:], dict(os.environ)) or 0
        sys.stdout.flush()
        return code
    except TrainkitError as error:
        if output.is_on():
            output.emit_error(error)
            return error.exit_code
        print(terminal.as_started(terminal.lines(str(error))), file=sys.stderr)
        return error.exit_code
    except RuntimeError as error:
        if str(error) != _NO_HOME:
            raise
        why = "The word after ~ must be the name of a user of this machine."
        fix = "If the folder has this name, write its full path."
        print(UserError("A path begins with ~ and an unknown user name.", why=why, fix=fix), file=sys.stderr)
        return UserError.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `... | head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


_NO_HOME = "Could not determine home directory."
"""Words of the error that Path.expanduser raises; every verb takes paths, as flags or settings."""
