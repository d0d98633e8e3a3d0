"""Commands of the kit, run on a login node over the system's own ssh.

ssh makes the connection, with the user's configuration, agent and jump hosts, and asks the user for passwords and
second factors. Commands share one connection, which stays open for ten minutes after the last of them, unless the
user's configuration shares connections already.
"""

import base64
import errno
import hashlib
import os
import re
import shlex
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from trainkit import terminal
from trainkit.errors import RefusedError, SchedulerError, TrainkitError, UserError
from trainkit.fileio import make_own
from trainkit.process import NoAnswer, ask

FOLDER = "trainkit"
"""The default folder, below the home folder there: what README's first lines have cloned and installed."""
SENT = ".trainkit/sent"
"""Below that folder: the snapshots of code that were sent, named by their hashes, and a link to the latest."""
BEGIN = "--- trainkit speaks ---"
"""The first line of an answer; what the shell's profile prints comes before it and is no part of the answer."""

NEEDED = {"pydantic": "2.12", "yaml": "6.0.3", "submitit": "1.5.4", "rich": "14.0", "psutil": "7.0", "torch": "2.14.1"}
"""Modules that every command needs there, and their lowest versions, as in pyproject.toml."""

# Any Python 3 must be able to parse this, so that it can say in three lines, and not by a traceback, what is missing or
# too old. The packages of the snapshot take precedence over those in the current folder. Without a terminal, the end of
# stdin means that the user's command has ended: a follower must not go on asking the scheduler for nobody.
_START = f"""
import sys
code, host, program, module = sys.argv[1:5]
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
terminal.HOST, terminal.PROGRAM = host, program
sys.argv[1:5] = []
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""


@dataclass(frozen=True)
class Host:
    """``user@login``, or ``user@login:FOLDER``."""

    name: str
    folder: str = FOLDER

    @classmethod
    def parse(cls, text: str) -> "Host":
        """Raises UserError for what ssh would take for something else."""
        name, _, folder = text.partition(":")
        if not re.fullmatch(r"[\w][\w.@%+-]*", name) or not folder.isprintable():
            why = "It is what ssh takes: a name of ~/.ssh/config, or user@login; with :FOLDER if that is not "
            fix = "For example --host me@login.example.org, or --host me@login.example.org:work/trainkit."
            raise UserError(f"--host {text!r} is not a machine.", why=f"{why}~/{FOLDER}.", fix=fix)
        return cls(name, folder.removeprefix("~/") or FOLDER)

    def __str__(self) -> str:
        return self.name if self.folder == FOLDER else f"{self.name}:{self.folder}"


@dataclass(frozen=True)
class Word:
    """A word of a command that holds a path below the folder there; only the login node knows the absolute path."""

    below: str
    before: str = ""
    """The text before the path: ``data.root=``."""

    def __str__(self) -> str:
        return f'{shlex.quote(self.before) if self.before else ""}"$root"/{shlex.quote(self.below)}'


def script(host: Host, module: str, words: Sequence[str | Word], *, sent: bytes | None = None) -> str:
    """The lines of shell that run a module of the kit there.

    Args:
        sent: the code, a packed archive that the lines read from stdin; the module runs in the folder of that code.
            None: the latest that was sent, or else the code in the host's folder; the module runs in the host's folder.
    """
    name = host.name
    no_folder = _refusal(UserError(
        f"{name} has no folder {host.folder}.",
        why="It is where trainkit was installed there, and where its runs go.",
        fix=f"Log in, clone and install trainkit there, or give another folder: --host {name}:FOLDER.",
    ))  # fmt: skip
    no_python = _refusal(RefusedError(
        f"{name} has no Python.",
        why=f"There is neither {host.folder}/.venv/bin/python nor python3 on the PATH.",
        fix="Log in, and install trainkit into .venv in that folder, as its README begins.",
    ))  # fmt: skip
    not_whole = _refusal(TrainkitError(
        f"The code has not arrived on {name}.",
        why=f"It could not be unpacked below {host.folder}; nothing was submitted.",
        fix="Look for space and quota there, and give the command again.",
    ))  # fmt: skip
    # "~/": a profile there may change the current folder, or set CDPATH.
    folder = ("" if host.folder.startswith("/") else "~/") + shlex.quote(host.folder)
    lines = [
        f"cd {folder} 2>/dev/null || {{ {no_folder}; }}",
        "root=$PWD",
        'python=$root/.venv/bin/python; [ -x "$python" ] || python=python3',
        f'command -v "$python" >/dev/null || {{ {no_python}; }}',
        'export TRAINKIT_RUNS="${TRAINKIT_RUNS:-$root/runs}"',
    ]
    if sent is None:
        lines += [f"code=$root/{SENT}/latest", '[ -d "$code" ] || code=']
    else:
        size = len(sent)
        lines += [
            f"sent=$root/{SENT}; code=$sent/{hashlib.sha256(sent).hexdigest()[:16]}",
            "umask 077",
            f'mkdir -p "$sent" || {{ {not_whole}; }}',
            # Left by connections that were lost while they sent.
            "find \"$sent\" -maxdepth 1 -name 'new.*' -mmin +600 -exec rm -rf {} + 2>/dev/null",
            # Complete or absent: of two submissions at once both unpack it, and the later copy is removed.
            f'if [ -d "$code" ]; then head -c {size} >/dev/null',
            f'elif new=$(mktemp -d "$sent/new.XXXXXX") && head -c {size} | tar xzf - -C "$new"; then',
            'ln -s "$root/.venv" "$new/.venv"; mv -T "$new" "$code" 2>/dev/null || rm -rf "$new"',
            f'else rm -rf "$new"; {not_whole}; fi',
            'ln -sfn "$code" "$sent/latest"',
            'cd "$code" || exit 1',
        ]
    given = " ".join(str(word) if isinstance(word, Word) else shlex.quote(word) for word in words)
    start = f'"$python" -u -c {shlex.quote(_START)} "$code" {shlex.join([str(host), terminal.PROGRAM, module])} {given}'
    return "\n".join([f"echo {shlex.quote(BEGIN)}", *lines, start])


def _refusal(error: TrainkitError) -> str:
    """The shell commands that print an error, line by line, and end with its exit code."""
    words = shlex.join(["printf", "%s\\n", *str(error).splitlines()])
    return f"{words} >&2; exit {error.exit_code}"


SSH = "TRAINKIT_SSH"
"""The environment variable for another ssh command, or for its options: ``ssh -F FILE``."""
_PERSIST = "10m"
_ALIVE_SECONDS = 20
"""Seconds between two probes of the connection; after three without an answer it is lost."""
_SOCKETS = Path("/tmp")
_LONGEST_GREETING = 1 << 20
"""Most bytes that a shell there may print before it runs the command."""
_END_SECONDS = 5.0
"""How long ssh may take to end after it was terminated."""
_FAILED = 255
"""ssh's own exit code; every other one is the command's."""


def run_there(
    host: Host, line: str, env: Mapping[str, str], hear: Callable[[bytes], None], *, content: bytes = b"",
    on_terminal: bool = False,
) -> int:  # fmt: skip
    """Run lines of shell on the login node; their exit code.

    A login shell runs them, because its profile sets SLURM's path and users set their account there. What the profile
    prints goes to stderr.

    Args:
        hear: called with what they print, as it comes.
        content: what they read from stdin first; after it stdin stays open until they or this process end.
        on_terminal: they read from this terminal instead, so that Ctrl-C reaches them.

    Raises SchedulerError if there was no connection, or is none any more; what ssh says itself has reached stderr.
    """
    ssh = shlex.split(env.get(SSH) or "ssh")
    # Base64 is the same in every login shell: csh allows no line breaks in quotes, fish has other escapes.
    packed = base64.b64encode(os.fsencode(line)).decode()
    command = [*ssh, "-t" if on_terminal else "-T", *_lasting(ssh, host, env), "--", host.name]
    command.append(f"exec bash -lc 'eval \"$(echo {packed} | base64 -d)\"'")
    stdin = None if on_terminal else subprocess.PIPE
    try:
        process = subprocess.Popen(command, env=dict(env), stdin=stdin, stdout=subprocess.PIPE)
    except OSError as error:
        if error.errno == errno.E2BIG:
            fix = "Put the settings into a preset, which is sent as a file."
            raise UserError("The command is too long for ssh.", why=f"{error.strerror}.", fix=fix) from None
        fix = f"Install OpenSSH, or name another command in {SSH}."
        raise SchedulerError("There is no ssh here.", why=f"{ssh[0]}: {error.strerror}.", fix=fix) from None
    with process:
        try:
            if process.stdin is not None:
                threading.Thread(target=_feed, args=(process.stdin, content), daemon=True).start()
            begun = _listen(process, host, hear)
            code = process.wait()
        except BaseException:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(_END_SECONDS)
            process.kill()
            raise
        finally:
            if process.stdin is not None:
                with suppress(OSError):
                    process.stdin.close()
    if code != _FAILED and code >= 0:
        return code
    if begun:
        why, look = "What had begun there may have come to its end, or not.", terminal.command("status", "--host", host)
        raise SchedulerError(f"The connection to {host.name} was lost.", why=why, fix=f"Look: `{look}`.")
    why, by_hand = "ssh has said above what is wrong.", shlex.join([*ssh, host.name])
    raise SchedulerError(f"No connection to {host.name}.", why=why, fix=f"Try `{by_hand}`.")


def _feed(stdin: IO[bytes], content: bytes) -> None:
    with suppress(OSError, ValueError):  # the command has ended without it, and says why itself
        stdin.write(content)
        stdin.flush()


def _listen(process: subprocess.Popen[bytes], host: Host, hear: Callable[[bytes], None]) -> bool:
    """Pass on what comes after our first line (`BEGIN`). Returns whether that line came.

    Raises SchedulerError if too much comes before it.
    """
    assert process.stdout is not None
    before, begun = b"", False
    while chunk := os.read(process.stdout.fileno(), 65536):
        if begun:
            hear(chunk)
            continue
        before += chunk
        noise, mark, after = before.partition(BEGIN.encode())
        if len(before) > _LONGEST_GREETING:
            why = f"Its shell has printed {terminal.size(len(before))}, and has not begun with the command."
            fix = f"Look at what the shell's profile there prints: `ssh {host.name} true`."
            raise SchedulerError(f"{host.name} does not come to the point.", why=why, fix=fix)
        if mark and b"\n" in after:
            before, begun = noise, True
            _complain(noise)
            if rest := after.partition(b"\n")[2]:
                hear(rest)
    if not begun:
        _complain(before)
    return begun


def _complain(noise: bytes) -> None:
    if noise.strip():
        print(terminal.lines(noise.decode(errors="replace")).rstrip(), file=sys.stderr, flush=True)


def _lasting(ssh: Sequence[str], host: Host, env: Mapping[str, str]) -> list[str]:
    """Options by which commands share the connection and ssh notices its loss; none where the user's configuration sets
    them already."""
    try:
        settings = ask([*ssh, "-G", "--", host.name], env=env).require()
    except NoAnswer:
        return []
    said = dict(line.partition(" ")[::2] for line in settings.splitlines())
    options = [f"ServerAliveInterval={_ALIVE_SECONDS}"] if said.get("serveraliveinterval", "0") == "0" else []
    shares = said.get("controlmaster", "false") not in ("false", "no") or "controlpath" in said
    # Whoever opens the socket has the connection. Its path must be short, as that of a home folder may not be.
    folder = _SOCKETS / f"trainkit-{os.getuid()}"
    if not shares and make_own(folder):
        options += ["ControlMaster=auto", f"ControlPath={folder}/%C", f"ControlPersist={_PERSIST}"]
    return [word for option in options for word in ("-o", option)]
