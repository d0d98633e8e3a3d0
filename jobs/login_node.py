"""``--host user@login``: a verb that runs on a login node, over ssh, with the code of this machine.

`forward` runs a verb with the code that was sent last, `submit` sends the code first, `report` brings files back. What
only `submit` needs is imported there: every verb imports this file, also for `--help`.
"""

import argparse
import gzip
import io
import json
import re
import secrets
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING

from jobs import output
from trainkit.cluster.ssh import Host, Word, run_there, script
from trainkit.common import fileio, terminal
from trainkit.common.errors import RunFailedError

if TYPE_CHECKING:
    from trainkit.config.loading import Loaded
    from trainkit.run.code_files import Project

_LONGEST = 1 << 28
"""Bytes of a report."""
_IN_MEMORY = 1 << 24
_OF_A_REPORT = re.compile(r"(logbook|comparison|results)\.md|report\.html|[\w.-]+\.(svg|png)", re.ASCII)


def forward(verb: str, argv: Sequence[str], host: str, env: Mapping[str, str]) -> int:
    """Run ``verb`` there, with the code that was sent last; its exit code."""
    there = Host.parse(host)
    on_terminal = sys.stdin.isatty() and sys.stdout.isatty()  # then Ctrl-C reaches the command there
    return run_there(there, script(there, f"jobs.{verb}", without_host(argv)), env, _show, on_terminal=on_terminal)


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
        if not has_files:
            print(terminal.lines(answer.read().decode(errors="replace")), end="")
        if code:
            sys.exit(code)  # it has said why
        if not has_files:
            return []
        try:
            return list(_unpacked(answer, out))
        except fileio.BROKEN_TAR as error:
            raise _torn(terminal.one_line(error)) from None


def _torn(words: str) -> RunFailedError:
    return RunFailedError("The report did not arrive whole.", why=f"{words}.", fix="Try again: it is made anew.")


def _unpacked(packed: IO[bytes], out: Path) -> Iterator[Path]:
    """Write the files of a report by their last names: with ``--out .`` they lie beside the user's code."""
    from trainkit.report.writers import written_to

    total = 0
    with tarfile.open(fileobj=packed, mode="r:", tarinfo=fileio.TarMember) as archive:
        for member in archive:
            total += member.size
            if total > _LONGEST or member.issparse():
                raise tarfile.TarError(f"it holds more than {_LONGEST:,} bytes")
            if not member.isfile():
                continue
            content = archive.extractfile(member)
            assert content is not None
            name = Path(member.name).name
            if not _OF_A_REPORT.fullmatch(name):
                raise tarfile.TarError(f"{name!r:.100} is no file of a report")
            with written_to(out / name) as target:
                fileio.write(target, content.read())
            yield target


def submit(
    argv: Sequence[str], parser: argparse.ArgumentParser, loadeds: "Sequence[Loaded]", env: Mapping[str, str],
    verb: str = "submit",
) -> int:  # fmt: skip
    """Send a snapshot of the code, and submit there.

    Args:
        parser: of the command line; it knows a ``preset``, a ``run_dir`` and a ``cluster``.
        loadeds: what is to be submitted, as far as this machine knows; nothing if the preset is a run there.

    Raises:
        RefusedError: a setting, or a file that the run cannot do without, looks like a secret.
    """
    from trainkit.config.presets import find_preset
    from trainkit.config.script import is_script, split
    from trainkit.run.code_files import project_of
    from trainkit.run.secrets import refuse_settings

    given, of_script = split(argv)
    args = parser.parse_intermixed_args(given)
    there = Host.parse(args.host)
    presets = dict[str, str]()
    preset: str | Word = args.preset
    more: list[str | Word] = []  # the last word on a flag counts
    plugins: Sequence[str] = ()
    project = None
    for loaded in loadeds:
        refuse_settings(loaded)
    if loadeds and loadeds[0].config.script is not None:
        project = project_of(loadeds[0].config.script)
        plugins = loadeds[0].config.plugin_names()
        if project is not None and is_script(args.preset or ""):
            preset = project.script
    elif loadeds:
        plugins = loadeds[0].config.plugin_names()
        text = _standing_alone(find_preset(args.preset))
        if text:
            preset = f"configs/{loadeds[0].name}.yaml"
            presets[preset] = text
        root = loadeds[0].config.data.root
        if not Path(root).expanduser().is_absolute():
            more.append(Word(root, before="data.root="))
    elif not Path(args.preset).expanduser().is_absolute():
        preset = Word(args.preset)
    if args.run_dir is not None and not args.run_dir.is_absolute():
        more += ["--run-dir", Word(str(args.run_dir))]
    profile = Path(args.cluster or "")
    if profile.suffix in (".yaml", ".yml") and profile.is_file():
        name = f"configs/clusters/{profile.name}"
        more += ["--cluster", name]
        presets[name] = fileio.read_text(profile, follow=True)
    sent = _snapshot(presets, plugins, project)
    words = [*_with_preset(parser, without_host(given), args.preset, preset), *more]
    if of_script is not None:
        words += ["--", *of_script]
    try:
        return run_there(there, script(there, f"jobs.{verb}", words, sent=sent), env, _show, content=sent)
    except KeyboardInterrupt:
        look = terminal.command("status", "--host", there)
        print(f"\nDetached; what was submitted goes on.\n  state   {look}")
        return 130


def _show(chunk: bytes) -> None:
    out = output.stream().buffer
    out.write(chunk)
    out.flush()


def without_host(argv: Sequence[str]) -> list[str]:
    """The words of a command line for the machine that ``--host`` names."""
    words = []
    before = ""
    for word in argv:
        if "--host" not in (before, word) and not word.startswith("--host="):
            words.append(word)
        before = word
    return words


def _with_preset(
    parser: argparse.ArgumentParser, words: Sequence[str], preset: str, there: str | Word
) -> list[str | Word]:
    """A command line with another preset. Which word is the preset, the parser knows: others may be alike."""
    probe = "/a word of its own"
    for index, word in enumerate(words):
        before = words[:index]
        after = words[index + 1 :]
        if word == preset and parser.parse_intermixed_args([*before, probe, *after]).preset == probe:
            return [*before, there, *after]
    return [*words]


def _standing_alone(preset: Path) -> str | None:
    """The text of a preset that needs no other file, if it or what it extends is in no folder that goes along."""
    from trainkit.config import yaml
    from trainkit.config.loading import file_layer, files_of
    from trainkit.config.presets import OWN, PACKAGED

    own = OWN.resolve()
    packaged = PACKAGED.resolve()
    goes_along = True
    for file in map(Path.resolve, files_of(preset)):
        if not file.is_relative_to(own) and not file.is_relative_to(packaged):
            goes_along = False
    if goes_along:
        return None
    settings = {}
    for key, (value, _) in file_layer(preset).items():
        settings[key] = value
    return yaml.dump(settings)


def _snapshot(presets: Mapping[str, str], own: Sequence[str], project: "Project | None" = None) -> bytes:
    """The code of this machine as one archive: the same bytes for the same code.

    Args:
        presets: texts by their names, that the run cannot do without.
        own: names of plugins.
        project: that of a script, which lies there as it does here, beside the program.
    """
    from trainkit.config.presets import OWN
    from trainkit.run.code_files import PROJECT, refusal, withheld_in
    from trainkit.run.folder import RunDir
    from trainkit.run.run_manifest import SENT, write_manifest
    from trainkit.run.snapshot import write_code

    with tempfile.TemporaryDirectory() as folder:
        run = RunDir(Path(folder))
        withheld = write_code(run, own, project=project)
        for file in sorted((run.code / PROJECT).rglob("*")):
            target = run.code / file.relative_to(run.code / PROJECT)
            if file.is_file() and not target.exists():  # of two alike the program's counts
                fileio.make_folder(target.parent, run.path)
                file.rename(target)
        shutil.rmtree(run.code / PROJECT, ignore_errors=True)
        # The user's own presets and profiles come before the packaged ones there as well. Other files stay here.
        texts = {}
        for file in [*OWN.rglob("*.yaml"), *OWN.rglob("*.yml")]:
            if file.is_file():
                texts[file] = fileio.read_bytes(file, follow=True)
        for name, text in presets.items():
            texts[Path(name)] = text.encode()
        for file, content in texts.items():
            fileio.make_folder((run.code / file).parent, run.path)
            fileio.write(run.code / file, content, run.path)
        for file in sorted((run.code / OWN).rglob("*")):
            if not file.is_file():
                continue
            name = str(file.relative_to(run.code))
            found = withheld_in(file, name)
            if found:
                if name in presets:
                    raise refusal(found)
                file.unlink()
                withheld.append(found)
        for item in withheld:
            print(f"Not sent: {item}.", file=sys.stderr)
        write_manifest(run, [])
        fileio.write(run.code / SENT, json.dumps({"git": fileio.read_object(run.manifest)["git"]}), run.path)
        packed = io.BytesIO()
        with (
            gzip.GzipFile(fileobj=packed, mode="wb", mtime=0) as squeezed,
            tarfile.open(fileobj=squeezed, mode="w") as archive,
        ):
            for path in sorted(run.code.rglob("*")):
                if path.is_file():
                    archive.add(path, str(path.relative_to(run.code)), filter=_anonymous)
        return packed.getvalue()


def _anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.mtime = member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member
