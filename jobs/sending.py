"""`--host` of submit and bench: what the login node must have of this machine, and the command as it is meant there."""

from __future__ import annotations

import argparse
import gzip
import io
import json
import sys
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jobs.elsewhere import show, without_host
from trainkit import fileio, terminal
from trainkit.config import yaml
from trainkit.config.loading import OWN, PACKAGED, Loaded, file_layer, files_of, find_preset
from trainkit.errors import UserError
from trainkit.run.folder import RunDir
from trainkit.run.secrets import refuse_settings
from trainkit.run.snapshot import SENT, refusal, withheld_in, write_code, write_manifest
from trainkit.site.ssh import Host, Word, run_there, script


def submit(
    argv: Sequence[str], parser: argparse.ArgumentParser, loadeds: Sequence[Loaded], env: Mapping[str, str],
    verb: str = "submit",
) -> int:  # fmt: skip
    """Send a snapshot of the code, and submit there.

    Args:
        parser: of the command line; it knows a ``preset``, a ``run_dir`` and a ``cluster``.
        loadeds: what is to be submitted, as far as this machine knows; nothing if the preset is a run there.

    Raises:
        RefusedError: a setting, or a file that the run cannot do without, looks like a secret.
    """
    args = parser.parse_intermixed_args(list(argv))
    there, words, presets = Host.parse(args.host), _Words(parser, without_host(argv)), {}
    if args.run_dir is not None and not args.run_dir.is_absolute():
        words.replace("run_dir", Word(str(args.run_dir)))
    if loadeds:
        for loaded in loadeds:
            refuse_settings(loaded)
        if text := _standing_alone(find_preset(args.preset)):
            presets[f"configs/{loadeds[0].name}.yaml"] = text
            words.replace("preset", f"configs/{loadeds[0].name}.yaml")
        config = loadeds[0].config
        if not Path(config.data.root).expanduser().is_absolute():
            words.add(Word(config.data.root, before="data.root="))
        own = config.plugin_names()
    elif not Path(args.preset).expanduser().is_absolute():
        words.replace("preset", Word(args.preset))
    if args.cluster is not None and Path(args.cluster).suffix in (".yaml", ".yml") and Path(args.cluster).is_file():
        name = f"configs/clusters/{Path(args.cluster).name}"
        presets[name] = fileio.read_text(Path(args.cluster), follow=True)
        words.replace("cluster", name)
    sent = _snapshot(presets, own if loadeds else ())
    line = script(there, f"jobs.{verb}", words.words, sent=sent)
    try:
        return run_there(there, line, env, show, content=sent)
    except KeyboardInterrupt:
        look = terminal.command("status", "--host", there)
        print(f"\nDetached; what was submitted goes on.\n  state   {look}")
        return 130


class _Words:
    """The words of a command line, of which some mean something else there."""

    def __init__(self, parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
        self._parser, self._given = parser, list(words)
        self._there: list[list[str | Word]] = [[word] for word in words]

    @property
    def words(self) -> list[str | Word]:
        return [word for part in self._there for word in part]

    def replace(self, argument: str, word: str | Word) -> None:
        """Give an argument of the parser another value. Which word it is, the parser knows: others may be the same."""
        probe = "/a word of its own"
        for index, given in enumerate(self._given):
            flag, equals, _ = given.partition("=")
            named = given.startswith("-")
            if named and not equals:
                continue
            tried = [*self._given[:index], f"{flag}={probe}" if named else probe, *self._given[index + 1 :]]
            try:
                found = getattr(self._parser.parse_intermixed_args(tried), argument)
            except UserError:
                continue
            if str(found) == probe:
                self._there[index] = [flag, word] if named else [word]
                return

    def add(self, word: Word) -> None:
        """One more, of those that stand without a flag."""
        self._there.append([word])


def _standing_alone(preset: Path) -> str | None:
    """The text of a preset that needs no other file, if it or what it extends is in no folder that goes along."""
    along = (OWN.resolve(), PACKAGED.resolve())
    if all(any(file.resolve().is_relative_to(folder) for folder in along) for file in files_of(preset)):
        return None
    tree: dict[str, Any] = {}
    for key, (value, _) in file_layer(preset).items():
        *parents, last = key.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    return yaml.dump(tree)


def _snapshot(presets: Mapping[str, str], own: Sequence[str]) -> bytes:
    """The code of this machine as one archive: the same bytes for the same code.

    Args:
        presets: texts by their names, that the run cannot do without.
    """
    with tempfile.TemporaryDirectory() as folder:
        run = RunDir(Path(folder))
        withheld = write_code(run, own)
        # The user's own presets and profiles come before the packaged ones there as well. Other files stay here.
        for file in [*OWN.rglob("*.yaml"), *OWN.rglob("*.yml")]:
            if file.is_file():
                fileio.make_folder((run.code / file).parent, run.path)
                fileio.copy(file, run.code / file, run.path)
        for name, text in presets.items():
            fileio.make_folder((run.code / name).parent, run.path)
            fileio.write(run.code / name, text, run.path)
        for file in sorted((run.code / OWN).rglob("*")):
            name = str(file.relative_to(run.code))
            if file.is_file() and (found := withheld_in(file, name)):
                if name in presets:
                    raise refusal(found)
                file.unlink()
                withheld.append(found)
        for item in withheld:
            print(f"Not sent: {item}.", file=sys.stderr)
        write_manifest(run, [])
        git = fileio.read_object(run.manifest)["git"]
        fileio.write(run.code / SENT, json.dumps({"git": git}), run.path)
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
