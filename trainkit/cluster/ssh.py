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
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from trainkit.cluster.pickles import shell_template
from trainkit.common import terminal
from trainkit.common.errors import RefusedError, SchedulerError, TrainkitError, UserError
from trainkit.common.fileio import make_own
from trainkit.common.process import NoAnswer, ask

FOLDER = "trainkit"
"""The default folder, below the home folder there: what README's first lines have cloned and installed."""
SENT = ".trainkit/sent"
"""Below that folder: the snapshots of code that were sent, named by their hashes, and a link to the latest."""
BEGIN = "--- trainkit speaks ---"
"""The first line of an answer; what the shell's profile prints comes before it and is no part of the answer."""

NEEDED = {"pydantic": "2.12", "yaml": "6.0.3", "submitit": "1.5.4", "rich": "14.0", "psutil": "7.0", "torch": "2.14.1"}
"""Modules that every command needs there, and their lowest versions, as in pyproject.toml."""


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
            why = "It takes what ssh takes: a name of ~/.ssh/config, or user@login; with :FOLDER if that is not "
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
        before = self.before and shlex.quote(self.before)
        return f'{before}"$root"/{shlex.quote(self.below)}'


def script(host: Host, module: str, words: Sequence[str | Word], *, sent: bytes | None = None) -> str:
    """Write the lines of shell that run a module of the kit there.

    Args:
        sent: the code, a packed archive that the lines read from stdin; the module runs in the folder of that code.
            None: the latest that was sent, or else the code in the host's folder; the module runs in the host's folder.
    """
    name = host.name
    why = "trainkit must be installed there; its runs go there too."
    fix = f"Log in, clone and install trainkit there, or give another folder: --host {name}:FOLDER."
    no_folder = UserError(f"{name} has no folder {host.folder}.", why=why, fix=fix)
    why = f"There is neither {host.folder}/.venv/bin/python nor python3 on the PATH."
    fix = "Log in, and install trainkit into .venv in that folder, as its README begins."
    no_python = RefusedError(f"{name} has no Python.", why=why, fix=fix)
    why = f"It could not be unpacked below {host.folder}; nothing was submitted."
    fix = "Check disk space and quota there, and repeat the command."
    not_whole = TrainkitError(f"The code has not arrived on {name}.", why=why, fix=fix)
    start = shell_template("login_start.jinja").render(needed=NEEDED)
    given = [shlex.quote(word) if isinstance(word, str) else str(word) for word in words]
    return shell_template("login_node.jinja").render(
        begin=BEGIN, folder=host.folder, no_folder=_refusal(no_folder), no_python=_refusal(no_python),
        not_whole=_refusal(not_whole), sent_folder=SENT, size=len(sent or b""),
        digest=sent and hashlib.sha256(sent).hexdigest()[:16], start=start,
        arguments=" ".join([shlex.join([str(host), terminal.PROGRAM, module]), *given]),
    )  # fmt: skip


def _refusal(error: TrainkitError) -> str:
    """Write the shell commands that print an error, line by line, and end with its exit code."""
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
"""Most seconds that ssh may take to end after it was terminated."""
_FAILED = 255
"""ssh's own exit code; every other one is the command's."""


def run_there(
    host: Host, line: str, env: Mapping[str, str], hear: Callable[[bytes], None], *, content: bytes = b"",
    on_terminal: bool = False,
) -> int:  # fmt: skip
    """Run lines of shell on the login node. Returns their exit code.

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
        fix = f"Install OpenSSH, or name another command in {SSH}."
        if error.errno == errno.E2BIG:
            fix = "Put the settings into a preset, which is sent as a file."
        raise SchedulerError("ssh cannot be started here.", why=f"{ssh[0]}: {error.strerror}.", fix=fix) from None
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
        why = "The command on the login node may or may not have finished."
        look = terminal.command("status", "--host", host)
        raise SchedulerError(f"The connection to {host.name} was lost.", why=why, fix=f"Look: `{look}`.")
    why = "The message of ssh is above."
    by_hand = shlex.join([*ssh, host.name])
    raise SchedulerError(f"No connection to {host.name}.", why=why, fix=f"Try `{by_hand}`.")


def _feed(stdin: IO[bytes], content: bytes) -> None:
    with suppress(OSError, ValueError):  # the command has ended without it, and says why itself
        stdin.write(content)
        stdin.flush()


def _listen(process: subprocess.Popen[bytes], host: Host, hear: Callable[[bytes], None]) -> bool:
    """Pass on what comes after our first line (`BEGIN`). Returns whether that line came.

    Raises SchedulerError if too much comes before it.
    """
    out = process.stdout
    assert out is not None
    before = b""
    begun = False
    for chunk in iter(lambda: os.read(out.fileno(), 65536), b""):
        if begun:
            hear(chunk)
            continue
        before += chunk
        noise, mark, after = before.partition(BEGIN.encode())
        if len(before) > _LONGEST_GREETING:
            why = f"Its shell has printed {terminal.size(len(before))}, and has not started the command."
            fix = f"Look at what the shell's profile there prints: `ssh {host.name} true`."
            raise SchedulerError(f"{host.name} does not start the command.", why=why, fix=fix)
        if mark and b"\n" in after:
            before = noise
            begun = True
            _complain(noise)
            rest = after.partition(b"\n")[2]
            if rest:
                hear(rest)
    if not begun:
        _complain(before)
    return begun


def _complain(noise: bytes) -> None:
    if noise.strip():
        terminal.warn(terminal.lines(noise.decode(errors="replace")).rstrip())


def _lasting(ssh: Sequence[str], host: Host, env: Mapping[str, str]) -> list[str]:
    """List options to share the connection and to notice its loss, but for those that the user's configuration sets."""
    try:
        settings = ask([*ssh, "-G", "--", host.name], env=env).require()
    except NoAnswer:
        return []
    said = dict(line.partition(" ")[::2] for line in settings.splitlines())
    options = []
    if said.get("serveraliveinterval", "0") == "0":
        options.append(f"-oServerAliveInterval={_ALIVE_SECONDS}")
    shares = said.get("controlmaster", "false") not in ("false", "no") or "controlpath" in said
    # Whoever opens the socket has the connection. Its path must be short, as that of a home folder may not be.
    folder = _SOCKETS / f"trainkit-{os.getuid()}"
    if not shares and make_own(folder):
        options += ["-oControlMaster=auto", f"-oControlPath={folder}/%C", f"-oControlPersist={_PERSIST}"]
    return options
