"""``--host user@login``: a verb that runs on a login node, over ssh, with the code of this machine."""

from __future__ import annotations

import argparse
import re
import secrets
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO

from trainkit import fileio, terminal
from trainkit.errors import RunFailedError
from trainkit.site.ssh import Host, Word, run_there, script

HELP = "do it on this login node, over ssh: user@login, or user@login:FOLDER if it is not ~/trainkit there"


def add_host_flag(parser: argparse.ArgumentParser) -> None:
    """``--host``, of the verbs that work from a laptop."""
    parser.add_argument("--host", metavar="USER@LOGIN", help=HELP)


def forward(verb: str, argv: Sequence[str], host: str, env: Mapping[str, str]) -> int:
    """Run ``verb`` there, with the code that was sent last; its exit code."""
    there = Host.parse(host)
    on_terminal = sys.stdin.isatty() and sys.stdout.isatty()  # then Ctrl-C reaches the command there
    return run_there(there, script(there, f"jobs.{verb}", without_host(argv)), env, show, on_terminal=on_terminal)


def report(runs: Sequence[str], host: str, out: Path, env: Mapping[str, str]) -> list[Path]:
    """Make the report there, and bring it here, into ``out``; the files."""
    there = Host.parse(host)
    made = f".trainkit/report-{secrets.token_hex(4)}"
    making = script(there, "jobs.report", [*runs, "--out", Word(made)])
    folder = f'"$root"/{made}'
    line = (
        f'said=$(mktemp)\n{making} >"$said"; code=$?\n'
        f"if [ -d {folder} ]; then echo files; tar cf - -C {folder} .; rm -rf {folder}\n"
        'else echo words; cat "$said"; fi; rm -f "$said"; exit "$code"'
    )
    with tempfile.SpooledTemporaryFile(_IN_MEMORY) as answer:

        def hear(chunk: bytes) -> None:
            if answer.tell() + len(chunk) > _LONGEST:
                raise _torn(f"it has more than {_LONGEST:,} bytes")
            answer.write(chunk)

        code = run_there(there, line, env, hear)
        answer.seek(0)
        has_files = answer.readline(10) == b"files\n"
        while not has_files and (chunk := answer.read(_IN_MEMORY)):
            print(terminal.lines(chunk.decode(errors="replace")), end="")
        if code:
            sys.exit(code)  # it has said why
        try:
            return list(_unpacked(answer, out)) if has_files else []
        except fileio.BROKEN_TAR as error:
            raise _torn(terminal.one_line(error)) from None


def _torn(words: str) -> RunFailedError:
    return RunFailedError(
        "The report did not arrive whole.", why=f"{words}.", fix="Try again: it is made anew each time."
    )


def show(chunk: bytes) -> None:
    """On stdout, as it comes."""
    sys.stdout.buffer.write(chunk)
    sys.stdout.buffer.flush()


_LONGEST = 1 << 28
"""Bytes of a report."""
_OF_A_REPORT = re.compile(r"(logbook|comparison|results)\.md|report\.html|[\w.-]+\.(svg|png)", re.ASCII)
_IN_MEMORY = 1 << 24


def _unpacked(packed: IO[bytes], out: Path) -> Iterable[Path]:
    """Files that a report has, by their last names: with ``--out .`` they lie beside the user's code."""
    from trainkit.report.writers import written_to  # not at the top: of all verbs this one alone needs it

    with tarfile.open(fileobj=packed, mode="r:", tarinfo=fileio.TarMember) as archive:
        total = 0
        for member in archive:
            total += member.size
            if total > _LONGEST or member.issparse():
                raise tarfile.TarError(f"it holds more than {_LONGEST:,} bytes")
            content = archive.extractfile(member) if member.isfile() else None
            if content is not None:
                name = Path(member.name).name
                if not _OF_A_REPORT.fullmatch(name):
                    raise tarfile.TarError(f"{name!r:.100} is no file of a report")
                with written_to(out / name) as target:
                    fileio.write(target, content.read())
                yield target


def without_host(argv: Sequence[str]) -> list[str]:
    """The words of a command line for the machine that ``--host`` names."""
    words: list[str] = []
    skip = False
    for word in argv:
        if not skip and word != "--host" and not word.startswith("--host="):
            words.append(word)
        skip = word == "--host"
    return words
