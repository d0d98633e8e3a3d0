"""A login node from afar: commands of the kit, run there over the system's own ssh.

ssh does all of the connecting: its configuration, agent, jump hosts and questions (passwords, second factors) are the
user's. One connection is shared by the commands of ten minutes, unless the user's configuration shares it already.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from trainkit.errors import SchedulerError, UserError

SSH = "TRAINKIT_SSH"
"""The environment variable with another ssh command, or with options for it: ``ssh -F FILE``."""
FOLDER = "trainkit"
"""Below the home folder there, where none is given: what README's first lines have cloned and installed."""
SENT = ".trainkit/sent"
"""Below that folder: snapshots of code that were sent, by their hashes, and a link to the latest."""
_PERSIST = "10m"
_LONGEST_SOCKET = 100
_FAILED = 255
"""ssh's own exit code; every other one is the command's."""

# The packages of the snapshot come before those that lie in the current folder there. What is missing is said in the
# kit's own way, and not by a traceback.
_START = (
    "import importlib.util as u, runpy, sys; code, module = sys.argv[1:3]; sys.path[0] = code or sys.path[0]; "
    "gone = [m for m in ('pydantic', 'yaml', 'submitit', 'torch', module) if u.find_spec(m.split('.')[0]) is None]; "
    "gone and sys.exit(f'{sys.executable} there has no {gone[0]}.\\n  why: Python packages are installed there once, "
    "and used by every job.\\n  fix: Log in, and install trainkit into .venv in that folder, as its README begins.'); "
    "sys.argv[1:3] = []; runpy.run_module(module, run_name='__main__', alter_sys=True)"
)


@dataclass(frozen=True)
class Word:
    """A word of a command with a path below the folder there, which only the machine there knows in full."""

    below: str
    before: str = ""
    """What stands before the path: ``data.root=``."""

    def __str__(self) -> str:
        return f'{shlex.quote(self.before) if self.before else ""}"$root"/{shlex.quote(self.below)}'


@dataclass(frozen=True)
class Host:
    """``user@login``, or ``user@login:FOLDER``."""

    name: str
    folder: str = FOLDER

    @classmethod
    def parse(cls, text: str) -> Host:
        """Raises UserError for what ssh would take for something else."""
        name, _, folder = text.partition(":")
        if not re.fullmatch(r"[\w][\w.@%+-]*", name) or any(ord(char) < 32 for char in folder):
            raise UserError(
                f"--host {text!r} is not a machine.",
                why="It is what ssh takes: a name of ~/.ssh/config, or user@login; with :FOLDER if that is not "
                f"~/{FOLDER}.",
                fix="For example --host me@login.example.org, or --host me@login.example.org:work/trainkit.",
            )
        return cls(name, folder or FOLDER)

    def __str__(self) -> str:
        return self.name if self.folder == FOLDER else f"{self.name}:{self.folder}"


def script(host: Host, module: str, words: Sequence[str | Word], *, snapshot: str | None = None) -> str:
    """The shell line that runs a module of the kit there.

    Args:
        snapshot: hash of the code that comes over stdin, unless it is there already; the module runs in its folder.
            None: the latest that was sent, else what lies in the host's folder; the module runs in that one.
    """
    folder = shlex.quote(host.folder)
    lines = [
        f"cd {folder} 2>/dev/null || {{ {_no_folder(host)} >&2; exit 2; }}",
        "root=$PWD",
        'python=$root/.venv/bin/python; [ -x "$python" ] || python=python3',
        'export TRAINKIT_RUNS="${TRAINKIT_RUNS:-$root/runs}"',
    ]
    if snapshot is None:
        lines += [f"code=$root/{SENT}/latest", '[ -d "$code" ] || code=']
    else:
        lines += [
            f"sent=$root/{SENT}; code=$sent/{snapshot}",
            "umask 077",
            'mkdir -p "$sent"',
            # Complete or absent: two submissions at once unpack it twice, and one of them is left aside.
            'if [ -d "$code" ]; then cat >/dev/null; '
            'else new=$(mktemp -d "$sent/new.XXXXXX") && tar xzf - -C "$new" && '
            'ln -s "$root/.venv" "$new/.venv" && { mv -T "$new" "$code" 2>/dev/null || rm -rf "$new"; }; fi || exit 1',
            'ln -sfn "$code" "$sent/latest"',
            'cd "$code"',
        ]
    given = " ".join(str(word) if isinstance(word, Word) else shlex.quote(word) for word in words)
    lines.append(f'"$python" -u -c {shlex.quote(_START)} "$code" {module} {given} </dev/null')
    return "; ".join(lines)


@contextmanager
def connected(
    host: Host, line: str, env: Mapping[str, str], *, content: bytes = b"", terminal: bool = False
) -> Iterator[subprocess.Popen[bytes]]:
    """The running ssh with a shell line for the login node, and its output to read; ``content`` is its input.

    A login shell runs the line: sites put SLURM's path and users their account there.

    Raises SchedulerError if there was no connection; what ssh says itself has reached stderr.
    """
    ssh = shlex.split(env.get(SSH) or "ssh")
    options = ["-t"] if terminal else ["-T"]
    if socket := _shared_socket(ssh, host, env):
        options += ["-o", "ControlMaster=auto", "-o", f"ControlPath={socket}", "-o", f"ControlPersist={_PERSIST}"]
    command = [*ssh, *options, "--", host.name, f"exec bash -lc {shlex.quote(line)}"]
    with tempfile.TemporaryFile() as source:
        source.write(content)
        source.seek(0)
        try:
            process = subprocess.Popen(
                command, env=dict(env), stdin=None if terminal else source, stdout=subprocess.PIPE
            )
        except OSError as error:
            raise SchedulerError(
                "There is no ssh here.",
                why=f"{ssh[0]}: {error.strerror}.",
                fix=f"Install OpenSSH, or name another command in {SSH}.",
            ) from None
    with process:
        try:
            yield process
        except BaseException:
            process.terminate()
            raise
    if process.returncode == _FAILED:
        raise SchedulerError(
            f"No connection to {host.name}.",
            why="ssh has said above what is wrong.",
            fix=f"Try `{shlex.join([*ssh, host.name])}`.",
        )


def _no_folder(host: Host) -> str:
    """The shell words that say so, a line each."""
    error = UserError(
        f"{host.name} has no folder {host.folder}.",
        why="It is where trainkit was installed there, and where its runs go.",
        fix=f"Log in, clone and install trainkit there, or give another folder: --host {host.name}:FOLDER.",
    )
    return shlex.join(["printf", "%s\\n", *str(error).splitlines()])


def _shared_socket(ssh: Sequence[str], host: Host, env: Mapping[str, str]) -> str | None:
    """Where the shared connection's socket may be; None where the user's configuration says so itself."""
    try:
        done = subprocess.run(
            [*ssh, "-G", "--", host.name], env=dict(env), capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return None
    said = dict(line.partition(" ")[::2] for line in done.stdout.splitlines())
    if done.returncode or said.get("controlmaster", "false") not in ("false", "no") or "controlpath" in said:
        return None
    state = Path(env.get("XDG_STATE_HOME") or "~/.local/state").expanduser() / "trainkit" / "ssh"
    if len(str(state)) + 1 + 40 + 17 > _LONGEST_SOCKET:  # a hash, and what ssh adds while it makes the socket
        return None
    try:
        state.mkdir(mode=0o700, parents=True, exist_ok=True)
        if state.stat().st_uid != os.getuid() or state.stat().st_mode & 0o077:
            return None
    except OSError:
        return None
    return f"{state}/%C"
