"""``--host user@login``: a verb that runs on a login node, over ssh, with the code of this machine."""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import json
import os
import re
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from trainkit.cluster.remote import Host, Word, connected, script
from trainkit.errors import RunFailedError

HELP = "do it on this login node, over ssh: user@login, or user@login:FOLDER if it is not ~/trainkit there"
_HINT = re.compile(rb"python -m jobs\.(?:logs|status|cancel|report|why)\b[^`\n]*")
_BEGIN = b"--- trainkit report ---\n"


def add_host_flag(parser: argparse.ArgumentParser) -> None:
    """``--host``, of the verbs that work from a laptop."""
    parser.add_argument("--host", metavar="USER@LOGIN", help=HELP)


def forward(verb: str, argv: Sequence[str], host: str, env: Mapping[str, str]) -> int:
    """Run ``verb`` there, with the code that was sent last; its exit code."""
    there = Host.parse(host)
    terminal = sys.stdin.isatty() and sys.stdout.isatty()  # then Ctrl-C reaches the command, and does not only leave it
    line = script(there, f"jobs.{verb}", _without_host(argv))
    with connected(there, line, env, terminal=terminal) as process:
        assert process.stdout is not None
        while chunk := os.read(process.stdout.fileno(), 65536):
            sys.stdout.buffer.write(chunk)
            sys.stdout.buffer.flush()
    return process.returncode


def submit(
    argv: Sequence[str], args: argparse.Namespace, own: Sequence[str], data_root: str, env: Mapping[str, str]
) -> int:
    """Send a snapshot of the code, and submit there.

    Args:
        own: the run's own functions, ``package.module:function``, without which it cannot do.
        data_root: where the data is; below the folder there, unless it is absolute.
    """
    there = Host.parse(args.host)
    words: list[str | Word] = []
    for word in _without_host(argv):
        flag, equals, value = word.partition("=")
        if words and words[-1] == "--run-dir" and not Path(word).is_absolute():
            words.append(Word(word))
        elif flag == "--run-dir" and equals and not Path(value).is_absolute():
            words += ["--run-dir", Word(value)]
        else:
            words.append(word)
    preset = Path(args.preset).expanduser()
    preset = preset / "config.yaml" if preset.is_dir() else preset
    if preset.is_file():
        name = preset.parent.name if preset.name == "config.yaml" else preset.stem
        words[words.index(args.preset)] = f"configs/{name}.yaml"
    if not Path(data_root).expanduser().is_absolute():
        words.append(Word(data_root, before="data.root="))
    content = _snapshot({f"configs/{name}.yaml": preset} if preset.is_file() else {}, own)
    line = script(there, "jobs.submit", words, snapshot=hashlib.sha256(content).hexdigest()[:16])
    with connected(there, line, env, content=content) as process:
        assert process.stdout is not None
        for said in process.stdout:
            hint = b"\\g<0> --host " + str(there).encode()
            sys.stdout.buffer.write(_HINT.sub(hint, said))
            sys.stdout.buffer.flush()
    return process.returncode


def report(runs: Sequence[str], host: str, out: Path, env: Mapping[str, str]) -> list[Path]:
    """Make the report there, and bring it here, into ``out``; the files."""
    there = Host.parse(host)
    made = ".trainkit/report"
    line = script(there, "jobs.report", [*runs, "--out", Word(made)])
    folder = f'"$root"/{made}'
    line = f"{line} >/dev/null || exit $?; echo {_BEGIN.decode().strip()!r}; tar cf - -C {folder} . && rm -rf {folder}"
    with connected(there, line, env) as process:
        assert process.stdout is not None
        answer = process.stdout.read()
    if process.returncode:
        sys.exit(process.returncode)  # it has said why
    _, begun, packed = answer.partition(_BEGIN)  # whatever a login shell there says first
    try:
        return list(_unpacked(packed, out)) if begun else []
    except (tarfile.TarError, EOFError) as error:
        raise RunFailedError(
            "The report did not arrive whole.", why=f"{error}.", fix="Try again: it is made anew each time."
        ) from None


def _unpacked(packed: bytes, out: Path) -> Iterable[Path]:
    """Plain files only, each by its last name: an archive from elsewhere writes nowhere else."""
    out.mkdir(parents=True, exist_ok=True)
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        for member in archive:
            content = archive.extractfile(member) if member.isfile() else None
            if content is not None:
                target = out / Path(member.name).name
                target.write_bytes(content.read())
                yield target


def _snapshot(files: Mapping[str, Path], own: Sequence[str]) -> bytes:
    """The code of this machine as one archive: the same bytes for the same code."""
    from trainkit.records.rundir import RunDir
    from trainkit.records.snapshot import SENT, write_code, write_manifest

    with tempfile.TemporaryDirectory() as folder:
        run = RunDir(Path(folder))
        for withheld in write_code(run, own):
            print(f"Not sent: {withheld}.", file=sys.stderr)
        if Path("configs").is_dir():  # the user's own, which come before the packaged ones there as well
            shutil.copytree("configs", run.code / "configs", dirs_exist_ok=True)
        for name, source in files.items():
            shutil.copy(source, run.code / name)
        write_manifest(run, [])
        git = json.loads(run.manifest.read_text(encoding="utf-8"))["git"]
        (run.code / SENT).write_text(json.dumps({"git": git}), encoding="utf-8")
        packed = io.BytesIO()
        with (
            gzip.GzipFile(fileobj=packed, mode="wb", mtime=0) as squeezed,
            tarfile.open(fileobj=squeezed, mode="w") as archive,
        ):
            for path in sorted(run.code.rglob("*")):
                if path.is_file():
                    archive.add(path, str(path.relative_to(run.code)), filter=_plain)
        return packed.getvalue()


def _plain(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.mtime = member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


def _without_host(argv: Sequence[str]) -> list[str]:
    words: list[str] = []
    skip = False
    for word in argv:
        if not skip and word != "--host" and not word.startswith("--host="):
            words.append(word)
        skip = word == "--host"
    return words
