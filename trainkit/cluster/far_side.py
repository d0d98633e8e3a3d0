"""What is run on a login node: a few lines of shell, and the Python that starts a module of the kit there."""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from trainkit.errors import RefusedError, SchedulerError, TrainkitError, UserError

FOLDER = "trainkit"
"""Below the home folder there, where none is given: what README's first lines have cloned and installed."""
SENT = ".trainkit/sent"
"""Below that folder: snapshots of code that were sent, by their hashes, and a link to the latest."""
BEGIN = "--- trainkit speaks ---"
"""What a profile there prints comes before this line, and is no part of the answer."""

NEEDED = {"pydantic": "2.12", "yaml": "6.0.3", "submitit": "1.5.4", "rich": "14.0", "psutil": "7.0", "torch": "2.14.1"}
"""Modules without which nothing goes there, and their lowest versions, as in pyproject.toml."""

# Whatever Python 3 is there must be able to read this. The packages of the snapshot come before those that lie in the
# current folder. What is missing or too old is said in the kit's own way, and not by a traceback. Without a terminal
# there, the end of stdin is the end of the one who asked: a follower must not go on asking the scheduler for nobody.
_START = f"""
import sys
code, host, module = sys.argv[1:4]
here = sys.path.pop(0)
def refuse(what):
    sys.stderr.write(what + "\\n  why: Python and its packages are installed there once, and used by every job.\\n"
        "  fix: Log in, and install trainkit into .venv in that folder, as its README begins.\\n")
    sys.exit(3)
if sys.version_info < (3, 10):
    refuse("%s there is Python %d.%d, and trainkit needs 3.10." % ((sys.executable,) + sys.version_info[:2]))
import os, re, runpy, signal, threading
from importlib import metadata, util
sys.path.insert(0, code or here)
for name, lowest in {NEEDED!r}.items():
    if util.find_spec(name) is None:
        refuse("%s there has no %s." % (sys.executable, name))
    try:
        there = metadata.version("PyYAML" if name == "yaml" else name)
    except metadata.PackageNotFoundError:
        continue
    if [int(part) for part in re.findall("[0-9]+", there)[:3]] < [int(part) for part in lowest.split(".")]:
        refuse("%s there has %s %s, and trainkit needs %s." % (sys.executable, name, there, lowest))
if util.find_spec(module.partition(".")[0]) is None:
    refuse("%s there has no trainkit." % sys.executable)
if None in (util.find_spec("trainkit.importing"), util.find_spec(module)):
    refuse("The trainkit there is older than the one here.")
if not os.isatty(0):
    asker = os.dup(0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    def watch():
        while os.read(asker, 65536):
            pass
        os.kill(os.getpid(), signal.SIGINT)
    threading.Thread(target=watch, daemon=True).start()
from trainkit import importing
importing.installed_first()
from trainkit import terminal
terminal.HOST = host
sys.argv[1:4] = []
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""


@dataclass(frozen=True)
class Host:
    """``user@login``, or ``user@login:FOLDER``."""

    name: str
    folder: str = FOLDER

    @classmethod
    def parse(cls, text: str) -> Host:
        """Raises UserError for what ssh would take for something else."""
        name, _, folder = text.partition(":")
        if not re.fullmatch(r"[\w][\w.@%+-]*", name) or not folder.isprintable():
            raise UserError(
                f"--host {text!r} is not a machine.",
                why="It is what ssh takes: a name of ~/.ssh/config, or user@login; with :FOLDER if that is not "
                f"~/{FOLDER}.",
                fix="For example --host me@login.example.org, or --host me@login.example.org:work/trainkit.",
            )
        return cls(name, folder.removeprefix("~/") or FOLDER)

    def __str__(self) -> str:
        return self.name if self.folder == FOLDER else f"{self.name}:{self.folder}"


@dataclass(frozen=True)
class Word:
    """A word of a command with a path below the folder there, which only the machine there knows in full."""

    below: str
    before: str = ""
    """What stands before the path: ``data.root=``."""

    def __str__(self) -> str:
        return f'{shlex.quote(self.before) if self.before else ""}"$root"/{shlex.quote(self.below)}'


@dataclass(frozen=True)
class Sent:
    """Code that comes over stdin: a packed archive, called by its hash."""

    content: bytes

    @property
    def name(self) -> str:
        return hashlib.sha256(self.content).hexdigest()[:16]


def script(host: Host, module: str, words: Sequence[str | Word], *, sent: Sent | None = None) -> str:
    """The lines of shell that run a module of the kit there.

    Args:
        sent: the code; the module runs in its folder. None: the latest that was sent, else what lies in the host's
            folder; the module runs in that one.
    """
    # Below the home folder wherever a profile there goes, and whatever CDPATH it sets.
    folder = ("" if host.folder.startswith("/") else "~/") + shlex.quote(host.folder)
    lines = [
        f"cd {folder} 2>/dev/null || {{ {_no_folder(host)} >&2; exit 2; }}",
        "root=$PWD",
        'python=$root/.venv/bin/python; [ -x "$python" ] || python=python3',
        f'command -v "$python" >/dev/null || {{ {_no_python(host)} >&2; exit 3; }}',
        'export TRAINKIT_RUNS="${TRAINKIT_RUNS:-$root/runs}"',
    ]
    if sent is None:
        lines += [f"code=$root/{SENT}/latest", '[ -d "$code" ] || code=']
    else:
        size = len(sent.content)
        lines += [
            f"sent=$root/{SENT}; code=$sent/{sent.name}",
            "umask 077",
            f'mkdir -p "$sent" || {{ {_not_whole(host)} >&2; exit 1; }}',
            # Of connections that were lost while they sent.
            "find \"$sent\" -maxdepth 1 -name 'new.*' -mmin +600 -exec rm -rf {} + 2>/dev/null",
            # Complete or absent: two submissions at once unpack it twice, and one of them is left aside.
            f'if [ -d "$code" ]; then head -c {size} >/dev/null',
            f'elif new=$(mktemp -d "$sent/new.XXXXXX") && head -c {size} | tar xzf - -C "$new"; then',
            'ln -s "$root/.venv" "$new/.venv"; mv -T "$new" "$code" 2>/dev/null || rm -rf "$new"',
            f'else {_not_whole(host)} >&2; rm -rf "$new"; exit 1; fi',
            'ln -sfn "$code" "$sent/latest"',
            'cd "$code" || exit 1',
        ]
    given = " ".join(str(word) if isinstance(word, Word) else shlex.quote(word) for word in words)
    start = f'"$python" -u -c {shlex.quote(_START)} "$code" {shlex.quote(str(host))} {module} {given}'
    return "\n".join([f"echo {shlex.quote(BEGIN)}", *lines, start])


def _no_folder(host: Host) -> str:
    error = UserError(
        f"{host.name} has no folder {host.folder}.",
        why="It is where trainkit was installed there, and where its runs go.",
        fix=f"Log in, clone and install trainkit there, or give another folder: --host {host.name}:FOLDER.",
    )
    return _saying(error)


def _no_python(host: Host) -> str:
    error = RefusedError(
        f"{host.name} has no Python.",
        why=f"There is neither {host.folder}/.venv/bin/python nor python3 on the PATH.",
        fix="Log in, and install trainkit into .venv in that folder, as its README begins.",
    )
    return _saying(error)


def _not_whole(host: Host) -> str:
    error = SchedulerError(
        f"The code has not arrived on {host.name}.",
        why=f"It could not be unpacked below {host.folder}; nothing was submitted.",
        fix="Look for space and quota there, and give the command again.",
    )
    return _saying(error)


def _saying(error: TrainkitError) -> str:
    """The shell words that print it, a line each."""
    return shlex.join(["printf", "%s\\n", *str(error).splitlines()])
