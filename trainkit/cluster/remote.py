"""A login node from afar: commands of the kit, run there over the system's own ssh.

ssh does all of the connecting: its configuration, agent, jump hosts and questions (passwords, second factors) are the
user's. One connection is shared by the commands of ten minutes, unless the user's configuration shares it already.
"""

from __future__ import annotations

import base64
import errno
import os
import re
import shlex
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from trainkit import programs
from trainkit import terminal as printable
from trainkit.cluster.far_side import BEGIN, Host
from trainkit.errors import SchedulerError, UserError
from trainkit.records.files import make_own

SSH = "TRAINKIT_SSH"
"""The environment variable with another ssh command, or with options for it: ``ssh -F FILE``."""
_PERSIST = "10m"
_ALIVE_SECONDS = 20
"""A connection that does not answer three times is lost."""
_LONGEST_SOCKET = 100
_LONGEST_GREETING = 1 << 20
"""Bytes that a shell there prints before it does what it was told to."""
_END_SECONDS = 5.0
"""How long ssh has to end once nobody listens any more."""
_FAILED = 255
"""ssh's own exit code; every other one is the command's."""


def run_there(
    host: Host, line: str, env: Mapping[str, str], hear: Callable[[bytes], None], *, content: bytes = b"",
    terminal: bool = False,
) -> int:  # fmt: skip
    """Run lines of shell on the login node; their exit code.

    A login shell runs them: sites put SLURM's path and users their account there. What it prints itself, before that,
    goes to stderr.

    Args:
        hear: told of what they print, as it comes.
        content: what they read from stdin first; after it stdin stays open until they or this process end.
        terminal: they talk to this terminal instead, so that Ctrl-C reaches them.

    Raises SchedulerError if there was no connection, or is none any more; what ssh says itself has reached stderr.
    """
    ssh = shlex.split(env.get(SSH) or "ssh")
    # In base64 it is the same for every login shell: csh takes no line breaks in quotes, fish knows other escapes.
    packed = base64.b64encode(os.fsencode(line)).decode()
    options = ["-t"] if terminal else ["-T"]
    command = [*ssh, *options, *_lasting(ssh, host, env), "--", host.name]
    command.append(f"exec bash -lc 'eval \"$(echo {packed} | base64 -d)\"'")
    try:
        process = subprocess.Popen(
            command, env=dict(env), stdin=None if terminal else subprocess.PIPE, stdout=subprocess.PIPE
        )
    except OSError as error:
        if error.errno == errno.E2BIG:
            fix = "Put the settings into a preset, which is sent as a file."
            raise UserError("The command is too long for ssh.", why=f"{error.strerror}.", fix=fix) from None
        raise SchedulerError(
            "There is no ssh here.",
            why=f"{ssh[0]}: {error.strerror}.",
            fix=f"Install OpenSSH, or name another command in {SSH}.",
        ) from None
    begun = False
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
    if (code == _FAILED or code < 0) and begun:
        raise SchedulerError(
            f"The connection to {host.name} was lost.",
            why="What had begun there may have come to its end, or not.",
            fix=f"Look: `{printable.command('status', '--host', host)}`.",
        )
    if code == _FAILED or code < 0:
        raise SchedulerError(
            f"No connection to {host.name}.",
            why="ssh has said above what is wrong.",
            fix=f"Try `{shlex.join([*ssh, host.name])}`.",
        )
    return code


def _feed(stdin: IO[bytes], content: bytes) -> None:
    with suppress(OSError, ValueError):  # they have ended without it, which they say themselves
        stdin.write(content)
        stdin.flush()


def _listen(process: subprocess.Popen[bytes], host: Host, hear: Callable[[bytes], None]) -> bool:
    """Pass on what comes after the first line of ours; whether that came.

    Raises SchedulerError if too much comes before it.
    """
    assert process.stdout is not None
    before, begun = b"", False
    while chunk := os.read(process.stdout.fileno(), 65536):
        if not begun:
            before += chunk
            noise, mark, after = before.partition(BEGIN.encode())
            if len(before) > _LONGEST_GREETING:
                raise SchedulerError(
                    f"{host.name} does not come to the point.",
                    why=f"Its shell has printed {printable.size(len(before))}, and has not begun with the command.",
                    fix=f"Look at what the shell's profile there prints: `ssh {host.name} true`.",
                )
            if not mark or b"\n" not in after:
                continue
            begun, chunk = True, after.partition(b"\n")[2]
            before = noise
            _complain(noise)
        if chunk:
            hear(chunk)
    if not begun:
        _complain(before)
    return begun


def _complain(noise: bytes) -> None:
    if noise.strip():
        sys.stderr.write(printable.lines(noise.decode(errors="replace")).rstrip() + "\n")
        sys.stderr.flush()


def _lasting(ssh: Sequence[str], host: Host, env: Mapping[str, str]) -> list[str]:
    """Options with which the connection is shared, and its loss is noticed; none where the user's configuration says
    so itself."""
    try:
        settings = programs.ask([*ssh, "-G", "--", host.name], env=env).require()
    except programs.NoAnswer:
        return []
    said = dict(line.partition(" ")[::2] for line in settings.splitlines())
    options = []
    if said.get("serveraliveinterval", "0") == "0":
        options += ["-o", f"ServerAliveInterval={_ALIVE_SECONDS}"]
    if said.get("controlmaster", "false") in ("false", "no") and "controlpath" not in said:
        folder = next((item for item in _socket_folders(env) if make_own(item)), None)
        if folder is not None:
            options += ["-o", "ControlMaster=auto", "-o", f"ControlPath={folder}/%C"]
            options += ["-o", f"ControlPersist={_PERSIST}"]
    return options


def _socket_folders(env: Mapping[str, str]) -> Iterator[Path]:
    """Where the shared connection's socket may be: who has it has the connection. Its path must be short, which that of
    a home folder need not be."""
    state = Path(env.get("XDG_STATE_HOME") or "~/.local/state").expanduser() / "trainkit" / "ssh"
    folders = [state, *(Path(run) / "trainkit" for run in [env.get("XDG_RUNTIME_DIR")] if run)]
    for folder in [*folders, *(Path(base) / f"trainkit-{os.getuid()}" for base in (tempfile.gettempdir(), "/tmp"))]:
        # A hash, and what ssh adds while it makes the socket. In its configuration % and ${} mean something.
        if len(os.fsencode(folder)) + 1 + 40 + 17 <= _LONGEST_SOCKET and not re.search(r"[%\s\"'${]", str(folder)):
            yield folder
