"""Ownership of runs and files of settings. What a stranger's starts, sends or fetches needs a yes: ``--allow-code``.

A run is the user's own if nobody else could have written what it would run. Either a command of the user's made the
folder and nobody else may write there: not to a file of it, nor to a folder above it, as OpenSSH asks of
``authorized_keys`` (StrictModes). Or its code and settings are those that the user has submitted, by the digests in
their own state folder, wherever the run is by now and whoever else may write there. A file of settings is the user's
own by modes alone. Access lists of NFSv4 do not show in modes, and are not seen.
"""

import grp
import hashlib
import itertools
import os
import pwd
import stat
import tempfile
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from trainkit.common import imports
from trainkit.common.errors import RefusedError
from trainkit.config.layers import OPEN_MAPPINGS, flatten
from trainkit.config.loading import Loaded
from trainkit.config.presets import PACKAGED
from trainkit.config.schema import Config, reach
from trainkit.run import user_lists
from trainkit.run.code_files import code_digest
from trainkit.run.folder import RunDir
from trainkit.run.snapshot import has_code_in_place, not_code, read_code, write_tree

_OWN_WORDS = ("flag", "override", "environment", "default")
_PROGRAM = ("jobs", "trainkit", "configs")


class Use(NamedTuple):
    """The use that a command makes of settings: it asks about those that do one of these, and about no others."""

    does: Collection[str]
    """Values of `does` in `trainkit.config.schema.Reach`."""
    section: str = ""
    """Only settings whose keys begin so."""


TRAINS = Use(("imports", "starts", "sends", "fetches"))
READS = Use(("imports", "fetches"))
"""It builds the model and the data, and starts and sends nothing."""
SYNCS = Use(("sends",), "monitor.")
"""It sends the records to the loggers' places, and imports nothing of the run's."""


class ImportableCode(NamedTuple):
    """Code of a run that a command may import."""

    code: Path | None
    """The folder of the run's modules; None: the command imports none, or none is named."""
    own: bool
    """True if it is the user's own."""
    content: Mapping[str, bytes] | None = None
    """The files that were checked, of a run that others may write to: the command starts these."""


def require_own_code(
    path: Path, loaded: Loaded, *, allow_code: bool, starts_snapshot: bool = False, use: Use = TRAINS
) -> ImportableCode:
    """Refuse what a run, or a file of settings, of somebody else's would start, send or fetch, unless that is allowed.

    Every verb that goes from a configuration to a process, a logger or data calls this before anything that it names is
    imported, started, sent or fetched. What the user gives on the command line themselves is their own.

    Args:
        path: what the command was given: a run folder, its config.yaml, or a file of settings. The name of a preset
            passes: presets of the current folder are trusted, as a Makefile is.
        loaded: its configuration with the overrides on top.
        starts_snapshot: the command starts the copy of the program in ``code/``, which is code in any case.
        use: what the command does with the settings.

    Raises:
        RefusedError: there is something of that kind, it is not the user's own, and ``allow_code`` is false.
    """
    folder = _run_folder(path)
    if folder is None:
        strange, stranger = _strange_files(path, loaded)
        found = _reaching(loaded, use, strange) if strange else {}
        if found and not allow_code:
            raise _refusal(path, found, stranger)
        return ImportableCode(None, own=True)
    run = RunDir(folder.absolute())
    found = _reaching(loaded, use)
    checked: dict[str, bytes] | None = None
    stranger = _why_foreign(run)
    if stranger:
        files = read_code(run)
        # The settings are those that were loaded, and not read again: nobody can change them in between.
        if files is not None and set(_seals(files, found)) <= user_lists.vouched():
            stranger = ""
            checked = files
    if starts_snapshot:
        found[f"the program in {folder / 'code'}"] = "starts"
    if stranger and found and not allow_code:
        raise _refusal(folder, found, stranger)
    if stranger:
        imports.leave(str(folder))  # even if the user stands in it
    names_module = any(reach(key, value).does == "imports" for key, value in _settings(loaded.config))
    if use != READS or not ("imports" in found.values() if stranger else names_module):
        return ImportableCode(None, own=not stranger, content=checked)
    if checked is None and has_code_in_place(run):
        return ImportableCode(run.code, own=not stranger)
    files = checked or read_code(run)
    if files is None:
        raise not_code(run)
    return ImportableCode(_private_copy(files), own=not stranger)


def vouch(run: RunDir, *configs: Config) -> None:
    """Remember, where only this user can write, that they have submitted a run's code with each of these settings."""
    files = read_code(run)
    if files is None:
        return
    texts: dict[str, None] = {}
    for config in configs:
        for key, value in _settings(config):
            if reach(key, value).does != "nothing":
                texts[f"{key}={value}"] = None
    user_lists.vouch(_seals(files, texts))


def _seals(files: Mapping[str, bytes], settings: Iterable[str]) -> list[str]:
    """Digests of code, alone and with each of some settings."""
    code = code_digest(files)
    texts = [f"{code}\0{text}".encode(errors="surrogateescape") for text in ("", *settings)]
    return [hashlib.sha256(text).hexdigest()[:40] for text in texts]


def why_others_may_write(path: Path, *, owners: Sequence[int]) -> str:
    """Why somebody who is neither this user nor root can write a file or folder, or replace it; empty if nobody can.

    Args:
        owners: who may own it.
    """
    why = _why_writable(path, owners)
    if why:
        return why
    above = {folder for start in (path.absolute(), Path(os.path.realpath(path))) for folder in start.parents}
    return next(filter(None, (_why_writable(folder, (os.geteuid(), 0), above=True) for folder in sorted(above))), "")


def _run_folder(path: Path) -> Path | None:
    """The run folder that a preset's name stands for; None for a preset."""
    if (path / "config.yaml").exists():
        return path
    others = ("manifest.json", "plan.json", "events.jsonl", "metrics.jsonl", "code", "logs", "checkpoints")
    beside = path.name == "config.yaml" and any((path.parent / name).exists() for name in others)
    return path.parent if beside else None


def _strange_files(path: Path, loaded: Loaded) -> tuple[frozenset[str], str]:
    """The file of settings and those that it extends, as far as others could have written them, and why they could.

    They are those that were loaded: what one of them extends now, others may have changed.
    """
    if path.suffix not in (".yaml", ".yml") or not path.is_file():
        return frozenset(), ""
    read = {source.where.rpartition(":")[0] for source in loaded.sources.values() if source.kind == "file"}
    theirs = [Path(file) for file in sorted(read) if not Path(file).is_relative_to(PACKAGED)]
    reasons = {str(file): why_others_may_write(file, owners=(os.geteuid(), 0)) for file in theirs}
    strange = {file: why for file, why in reasons.items() if why}
    return frozenset(strange), next(iter(strange.values()), "")


def _reaching(loaded: Loaded, use: Use, files: frozenset[str] | None = None) -> dict[str, str]:
    """Settings that import, start, send or fetch something, and which of these; not those that the user has just given.

    Args:
        files: only what these say; None: what any file says.
    """

    def is_strange(key: str) -> bool:
        source = loaded.source(key)
        if source.kind == "cluster profile":  # the user may have named the profile themselves
            source = loaded.source("launch.cluster")
        return source.kind not in _OWN_WORDS and (files is None or source.where.rpartition(":")[0] in files)

    found: dict[str, str] = {}
    for key, value in _settings(loaded.config):
        does = reach(key, value).does
        # Of a mapping each entry has a source of its own: with one of the user's the others are still the file's.
        keys = [f"{key}.{name}" for name in value] if key in OPEN_MAPPINGS else [key]
        if does in use.does and key.startswith(use.section) and any(map(is_strange, keys)):
            found[f"{key}={value}"] = does
    return found


def _settings(config: Config) -> Iterable[tuple[str, Any]]:
    return flatten(config.model_dump(mode="json"))


_WOULD = {
    ("imports", "starts"): "run code that is not yours",
    ("sends",): "send to places, or admit people, that you have not named",
    ("fetches",): "fetch data from a place that you have not named",
}
"""Kinds of settings -> what they do, in words."""


def _refusal(path: Path, found: Mapping[str, str], why: str) -> RefusedError:
    parts = []
    for kinds, what in _WOULD.items():
        settings = ", ".join(text for text, does in found.items() if does in kinds)
        if settings:
            parts.append(f"{what}: {settings}")
    return RefusedError(
        f"{path} would {'; and '.join(parts)}.",
        why=f"{why} Its author decides what it does here, with your rights.",
        fix="Read it. Give a value of your own for what you do not want, or if you trust all of it give the same "
        "command with --allow-code.",
    )


def _why_foreign(run: RunDir) -> str:
    """Why others could have written what a run runs; empty if nobody could."""
    if not user_lists.has(run.path):
        return "None of your commands made that run as it is now."
    me = (os.geteuid(),)
    tops = [Path(os.path.realpath(top)) for top in (run.code, run.submitit)]  # they may be links
    whole = [why_others_may_write(path, owners=me) for path in (run.config, run.code_archive, *tops)]
    inside = (Path(folder, name) for top in tops for folder, *names in os.walk(top) for name in (*names[0], *names[1]))
    each = (why_others_may_write(path, owners=me) if path.is_symlink() else _why_writable(path, me) for path in inside)
    return next(filter(None, itertools.chain(whole, each)), "")


def _why_writable(path: Path, owners: Sequence[int], *, above: bool = False) -> str:
    try:
        found = path.stat()
    except FileNotFoundError:
        return ""
    except OSError as error:
        return f"{path} cannot be read ({error.strerror})."
    if found.st_uid not in owners:
        return f"{path} belongs to user {found.st_uid}, and you are {os.geteuid()}."
    if above and found.st_mode & stat.S_ISVTX:
        return ""  # as /tmp: others may make files there, and not replace those of the user
    if found.st_mode & stat.S_IWOTH:
        return f"Anybody may write to {path}."
    if found.st_mode & stat.S_IWGRP and not (_is_private(found.st_gid) and not _has_access_list(path)):
        group: object = found.st_gid
        with suppress(KeyError):
            group = grp.getgrgid(found.st_gid).gr_name
        return f"The members of group {group} may write to {path}."
    return ""


@cache
def _is_private(gid: int) -> bool:
    """True if only this user is in a group, as each user of Debian or Fedora has one of the same name."""
    try:
        me = pwd.getpwuid(os.geteuid())
        group = grp.getgrgid(gid)
    except KeyError:
        return False
    others = {entry.pw_name for entry in pwd.getpwall() if entry.pw_gid == gid} | set(group.gr_mem)
    return group.gr_name == me.pw_name and others <= {me.pw_name}


def _has_access_list(path: Path) -> bool:
    """True if a POSIX access list stands behind the group's bits, which then are those of anybody on it."""
    with suppress(OSError, AttributeError):
        return "system.posix_acl_access" in os.listxattr(path)
    return False


_COPIES: list[tempfile.TemporaryDirectory[str]] = []
"""Removed when this process ends."""


def _private_copy(files: Mapping[str, bytes]) -> Path:
    """The modules whose digest was checked, where nobody can change them before they are imported."""
    _COPIES.append(tempfile.TemporaryDirectory(prefix="trainkit-code-"))
    top = Path(_COPIES[-1].name)
    write_tree({name: data for name, data in files.items() if name.partition(os.sep)[0] not in _PROGRAM}, top, top)
    return top
