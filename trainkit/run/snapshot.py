"""What a run was made of: a copy of the code that it runs, and a manifest of everything around it."""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import os
import platform
import re
import shutil
import socket
import stat
import sys
import time
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from importlib import metadata
from pathlib import Path, PurePosixPath
from secrets import token_hex
from typing import Any

from trainkit import fileio, importing, process
from trainkit.config.schema import Config
from trainkit.errors import RefusedError, UserError
from trainkit.fileio import copy, create, is_own, link, make_folder, write
from trainkit.run import folder as run_folder
from trainkit.run import secrets
from trainkit.run.folder import RunDir

INSTALLED = Path(__file__).resolve().parents[2]
"""The folder that jobs and trainkit are in: a checkout, site-packages, or the snapshot of another run."""
LARGEST_CODE = 1 << 26
MOST_FILES = 10_000
DEEPEST = 20
"""Most folders on the way to a file of code."""
LONGEST_DIFF = 2_000_000
SENT = "sent.json"
"""Beside code that came from another machine: what git said of it there, as a manifest has it."""
PACKAGES = (
    "trainkit", "torch", "torchvision", "timm", "submitit", "hivemind", "tensorboard", "wandb", "pydantic", "numpy",
    "safetensors",
)  # fmt: skip
_OWN = ("jobs", "trainkit", "configs")
# Names of Python's own modules: it starts with some of them, before anything could say that those of the library are
# meant, and never imports the user's.
_PYTHONS = {
    f"{name}{end}" for name in (*sys.stdlib_module_names, "sitecustomize", "usercustomize") for end in ("", ".py")
}
_UNUSED_SECONDS = 3600.0
"""The age at which a shared copy of code goes that no run has any more."""
_LOOKED_AT = 1000
"""Entries of a data folder; a folder with more of them is told by its own time of change."""


@dataclass(frozen=True)
class Withheld:
    """Something that was left out of a run folder because it looks like a credential."""

    what: str
    """A file of the user's, ``the diff`` or ``the command line``."""
    line: int
    """0 for a whole file, which has the name of one that holds credentials."""
    kind: str

    def __str__(self) -> str:
        if not self.line:
            return f"{self.what} ({self.kind})"
        return f"{self.what} (line {self.line} looks like a {self.kind})"


# Code as names and contents: of a folder, and of the one archive that a run keeps. Either may be a stranger's.


def read_tree(top: Path) -> dict[str, bytes] | None:
    """Every file below a folder, but for Python's caches; None where there is none, a link, or more than code has."""
    room, found = LARGEST_CODE, dict[str, bytes]()
    try:
        for turn, (folder, folders, files) in enumerate(os.walk(top)):
            if any(Path(folder, name).is_symlink() for name in folders):
                return None
            folders[:] = [name for name in folders if name != "__pycache__"]
            if turn > MOST_FILES or len(Path(folder).relative_to(top).parts) > DEEPEST:
                return None
            for path in [Path(folder, name) for name in files]:
                if path.is_symlink() or len(found) >= MOST_FILES:
                    return None
                with fileio.open_regular(path) as file:
                    content = file.read(room + 1)
                room -= len(content)
                if room < 0:
                    return None
                found[str(path.relative_to(top))] = content
    except OSError:
        return None
    return found or None


def code_digest(files: Mapping[str, bytes]) -> str:
    """SHA-256 of names and contents, in hex."""
    found = hashlib.sha256()
    for name, content in sorted(files.items()):
        found.update(os.fsencode(f"{name}\0{len(content)}\0"))
        found.update(content)
    return found.hexdigest()


def packed(files: Mapping[str, bytes]) -> bytes:
    """A zip file, of the same bytes for the same code."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in sorted(files.items()):
            archive.writestr(zipfile.ZipInfo(name), data, zipfile.ZIP_DEFLATED)
    return content.getvalue()


def unpacked(file: Path) -> dict[str, bytes] | None:
    """What is in an archive of code; None for what `packed` never makes: it may be a stranger's."""
    room, found = LARGEST_CODE, dict[str, bytes]()
    try:
        with fileio.open_regular(file) as content:
            fileio.require_size(content, fileio.MOST_BYTES)  # its list of names is read at once
            with zipfile.ZipFile(content) as archive:
                items = archive.infolist()
                if len(items) > MOST_FILES or not are_of_code([item.filename for item in items]):
                    return None
                for item in items:
                    if item.compress_type != zipfile.ZIP_DEFLATED:
                        return None
                    with archive.open(item) as data:
                        found[item.filename] = data.read(room + 1)
                    room -= len(found[item.filename])
                    if room < 0:
                        return None
    except (OSError, zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, ValueError):
        return None
    return found or None


def are_of_code(names: Sequence[str]) -> bool:
    """Whether each names another file below one folder, and none that Python has compiled."""
    paths = {name: PurePosixPath(name) for name in names}
    folders = {folder for path in paths.values() if len(path.parts) <= DEEPEST for folder in path.parents}
    return len(paths) == len(names) and all(
        str(path) == name and 0 < len(path.parts) <= DEEPEST and path not in folders and "\0" not in name
        and all(part not in ("/", "..", "__pycache__") and len(os.fsencode(part)) < 200 for part in path.parts)
        for name, path in paths.items()
    )  # fmt: skip


def write_code(run_dir: RunDir, own: Sequence[str] = (), *, store: Path | None = None) -> list[Withheld]:
    """Copy the packages that the job runs, so that edits after submission do not change a queued or requeued job.

    The user's own Python files in the current folder (``package.module:function``) come along, except for files with
    what looks like a credential, or with the name of a file that holds some: these are returned.

    Args:
        own: the run's own functions, ``package.module:function``.
        store: where runs of equal code share one copy, to which ``code`` becomes a link; None: the run has its own.

    Raises:
        RefusedError: a file that would have to be left out is one that the run cannot do without.
    """
    sources, withheld = _sources(own)
    content = {name: fileio.read_bytes(source, 16 * LARGEST_CODE, follow=True) for name, source in sources.items()}
    if store is None or not _share(run_dir, content, store):
        _write_tree(content, run_dir.code, run_dir.path)
    return withheld


def read_code(run_dir: RunDir) -> dict[str, bytes] | None:
    """Every file of a run's code by its name: of ``code.zip`` if it shares a copy, else of its own folder; None where
    there is none, or more than a run has."""
    return unpacked(run_dir.code_archive) if _shares(run_dir) else read_tree(run_dir.code)


def has_code_in_place(run_dir: RunDir) -> bool:
    """Whether what is in ``code`` is the run's: the shared copy may be gone, or changed."""
    if not _shares(run_dir):
        return True
    kept = unpacked(run_dir.code_archive)
    return kept is not None and kept == read_tree(Path(os.path.realpath(run_dir.code)))


def _shares(run_dir: RunDir) -> bool:
    return run_dir.code_archive.exists() and (run_dir.code.is_symlink() or not run_dir.code.is_dir())


def restore_code(run_dir: RunDir, content: Mapping[str, bytes] | None = None) -> None:
    """Give a run its own code back from ``code.zip``, if the copy that it shares is gone or was changed, as after the
    run was moved, copied or unpacked. A folder ``code`` of its own stays as it is.

    ``content``, which was looked at, takes the place of anything: of compiled files too, which Python would run.
    """
    _remove_left(run_dir.path, time.time() - _UNUSED_SECONDS)
    if content is None:
        if has_code_in_place(run_dir):
            return
        if (content := read_code(run_dir)) is None:
            raise not_code(run_dir)
        if os.path.exists(run_dir.code):  # which may be closed to this user
            _say_once(f"{run_dir.name}: its code was changed in {run_dir.code.resolve()}; code.zip is used.")
    new, old = (run_dir.path / f".partial-{token_hex(4)}-code" for _ in range(2))
    try:
        _write_tree(content, new, run_dir.path)
        with suppress(FileNotFoundError):
            run_dir.code.rename(old)
        new.rename(run_dir.code)
    except OSError as error:
        if read_tree(run_dir.code) == content:
            return  # another command was quicker
        raise UserError(
            f"Cannot unpack the code of {run_dir.path}.",
            why=f"{error.strerror}: {error.filename}",
            fix="Copy the run to where you may write, and name the copy.",
        ) from None
    finally:
        for left in (new, old):
            left.unlink() if left.is_symlink() else shutil.rmtree(left, ignore_errors=True)


def not_code(run_dir: RunDir) -> UserError:
    """The error for an archive that no run has written."""
    return UserError(
        f"{run_dir.code_archive} is no snapshot of code.",
        why="It is damaged, or holds what no run has written.",
        fix="Copy the run again from where it was made.",
    )


def _share(run_dir: RunDir, content: Mapping[str, bytes], store: Path) -> bool:
    """Make ``code`` a link to the copy of equal code in ``store``, and ``code.zip`` the run's own archive of it.

    Returns False, and does neither, in a store that is another user's, and on a disk without links.
    """
    mode = stat.S_IMODE(run_dir.path.stat().st_mode)
    store = store.with_name(store.name + (f"-{mode:o}" if mode != 0o700 else ""))
    if len(content) > MOST_FILES or sum(map(len, content.values())) > LARGEST_CODE:
        return False
    try:
        with suppress(FileExistsError):
            store.mkdir(mode=0o700)
            store.chmod(mode)
        if not is_own(store) or stat.S_IMODE(store.stat().st_mode) != mode:  # who else may write there says what runs
            return False
        name = code_digest(content)[:16]
        archive = store / f"{name}.zip"
        if unpacked(archive) != content:
            write(archive, packed(content), store)
            if unpacked(archive) != content:  # it is too long, or has names that are no code's
                archive.unlink()
                return False
        folder = _shared_copy(store, name, content)
        try:
            os.link(archive, run_dir.code_archive)
        except OSError:  # a disk without hard links
            copy(archive, run_dir.code_archive, run_dir.path)
        link(run_dir.code, os.path.relpath(folder, run_dir.path), run_dir.path)
    except OSError:
        for left in (run_dir.code, run_dir.code_archive):
            left.unlink(missing_ok=True)
        return False
    with suppress(OSError):  # as another command may do at the same time
        _remove_unused(store)
    return True


def _shared_copy(store: Path, name: str, content: Mapping[str, bytes]) -> Path:
    """A folder in ``store`` with this content; one that somebody has changed is left to the runs that have it."""
    for turn in itertools.count():
        folder = store / (f"{name}-{turn}" if turn else name)
        if not folder.exists():
            partial = store / f".partial-{token_hex(4)}-{name}"
            try:
                _write_tree(content, partial, store, read_only=True)
                partial.rename(folder)
            except OSError:
                shutil.rmtree(partial, ignore_errors=True)
                if not folder.exists():  # else another command was quicker
                    raise
        if read_tree(folder) == content:
            # What was compiled in it stays as long as only this user can have done that: the store may have come with
            # an archive of runs. When a file of it came to its place nobody else can know or set.
            file = folder / next(iter(content))
            seal = hashlib.sha256(f"{file}\0{file.stat().st_ctime_ns}".encode(errors="surrogateescape")).hexdigest()
            if not is_own(store, private=True) or seal not in run_folder.vouched():
                for compiled in list(folder.rglob("__pycache__")):
                    shutil.rmtree(compiled)
                run_folder.vouch([seal])
            return folder
    raise AssertionError


def _remove_left(folder: Path, before: float) -> None:
    """Remove what killed commands have left half-written."""
    for left in folder.glob(".partial-*"):
        with suppress(OSError):  # another command was quicker
            if left.lstat().st_mtime < before:
                shutil.rmtree(left, ignore_errors=True) if left.is_dir() else left.unlink()


def _remove_unused(store: Path) -> None:
    """Remove the copies that no run has any more, and what killed commands have left.

    A run keeps the archive by a second name of its own, also where it was moved to. A disk without hard links has none
    of these: there the runs beside the store are asked.
    """
    before = time.time() - _UNUSED_SECONDS  # a command may be about to use it
    _remove_left(store, before)
    facts = [(archive, archive.stat()) for archive in store.glob("*.zip")]
    unused = [archive for archive, fact in facts if fact.st_nlink == 1 and fact.st_ctime < before]
    links = [link for deep in ("*/code", "*/*/code") * bool(unused) for link in store.parent.glob(deep)]
    named = {os.path.basename(os.readlink(link)) for link in links if link.is_symlink()}
    for archive in unused:
        copies = [archive.with_suffix(""), *store.glob(f"{archive.stem}-*")]
        if not named & {copy.name for copy in copies}:
            archive.unlink()
            for copy in copies:
                shutil.rmtree(copy, ignore_errors=True)


def _write_tree(content: Mapping[str, bytes], top: Path, within: Path, *, read_only: bool = False) -> None:
    for name, data in content.items():
        file = top / name
        make_folder(file.parent, within)
        with create(file, within) as out:
            out.write(data)
            if read_only:  # it is that of other runs as well
                os.fchmod(out.fileno(), os.fstat(out.fileno()).st_mode & 0o7555)


def _sources(own: Sequence[str]) -> tuple[dict[str, Path], list[Withheld]]:
    """Every file of a snapshot by its name there, and what is left out."""
    here = Path.cwd()
    modules = {str(file): here / file for file in _user_modules(here) if (here / file).is_file()}  # no broken links
    left_behind = {name: found for name, file in modules.items() if (found := withheld_in(file, name))}
    for name in own:
        top = name.partition(":")[0].replace(".", "/") if ":" in name else ""
        for file in (f"{top}.py", f"{top}/__init__.py"):
            if file in left_behind:
                raise refusal(left_behind[file])
    for name in _changed_own_files():
        if (found := withheld_in(INSTALLED / name, name)) and found.line:
            raise refusal(found)
    sources = {name: file for name, file in modules.items() if name not in left_behind}
    for path, source in _packages():
        if any(map(secrets.is_credentials, path.parts)):
            name = str(Path(*path.parts[-2:]))
            left_behind[name] = _by_name(name)
        else:
            sources[str(path)] = source
    return sources, list(left_behind.values())


def _by_name(name: str) -> Withheld:
    return Withheld(name, 0, "a file of credentials, by its name")


def _packages() -> Iterator[tuple[Path, Path]]:
    """Every file of the program's own packages, by its name in a snapshot. That of a wheel is laid out as that of a
    checkout, where configs and slurm lie beside trainkit."""
    for name in _OWN:
        top = fileio.folder(name) if name == "configs" else INSTALLED / name
        for folder, folders, found in os.walk(top):
            folders[:] = [item for item in folders if item not in ("__pycache__", "configs", "slurm")]
            for file in sorted(found):
                if not file.endswith((".pyc", ".ipynb")):
                    yield name / Path(folder, file).relative_to(top), Path(folder, file)


def refusal(essential: Withheld) -> RefusedError:
    """Of a file that would have to be left out, and that the run cannot do without."""
    if not essential.line:
        why = "Every run keeps a copy of its code, and files of such names are never copied."
        return RefusedError(f"The run needs {essential}.", why=why, fix="Give the module another name.")
    return RefusedError(
        f"The run needs {essential}.",
        why="Every run keeps a copy of its code, and a secret must not lie in it.",
        fix="Read the secret from an environment variable. If it is none, end the line with "
        "`# pragma: allowlist secret`.",
    )


def code_files() -> list[tuple[str, Path]]:
    """Every Python file that `write_code` would copy, by its name in the snapshot."""
    own = [(str(name), source) for name, source in _packages() if source.suffix == ".py"]
    return own + [(str(file), Path.cwd() / file) for file in _user_modules(Path.cwd())]


def write_manifest(
    run_dir: RunDir, command: Sequence[str], withheld: Sequence[Withheld] = (), *, fingerprint: str = ""
) -> None:
    """Record git commit, uncommitted changes, package versions, host, command line. Never the environment.

    What looks like a credential is replaced by ``***``. That, and what was ``withheld`` from the snapshot, stands in
    the manifest and is said in one line on stderr.
    """
    left_out = list(withheld)

    def without_secrets(text: str, what: str, *, python: bool) -> str:
        found = secrets.find(text, python=python)
        left_out.extend(Withheld(what, item.line, item.kind) for item in found)
        return secrets.redacted(text, found)

    diff, unread = _diff()
    left_out += unread
    if len(diff) > LONGEST_DIFF:
        diff = f"left out: {len(diff)} characters\n"
    # A file's part of the diff begins with its name, which says what a line of it means.
    parts = re.split(r"(?m)^(?=diff --git )", diff)
    manifest: dict[str, Any] = {
        "command": [without_secrets(word, "the command line", python=False) for word in command],
        "cwd": str(Path.cwd()),
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "python": sys.version.split()[0],
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
        "git": _git_of_sender()
        or {
            "commit": _git("rev-parse", "HEAD"),
            "diff": "".join(
                without_secrets(part, "the diff", python=part.partition("\n")[0].endswith(".py")) for part in parts
            ),
            "untracked": (_git("ls-files", "--others", "--exclude-standard") or "").splitlines(),
        },
        "withheld": [asdict(item) for item in left_out],
        "fingerprint": fingerprint,
    }
    write(run_dir.manifest, json.dumps(manifest, indent=2) + "\n", run_dir.path)
    if left_out:
        _say_once(f"Withheld from the run folder: {'; '.join(dict.fromkeys(map(str, left_out)))}.")


def _diff() -> tuple[str, list[Withheld]]:
    """What has been changed since the commit, and the files that are left out of it: of a renamed one both names."""
    words = (_git("diff", "--name-status", "-M", "-z", "HEAD") or "").split("\0")
    held: list[str] = []
    while len(words) > 1:
        status, *words = words
        count = 2 if status[:1] in ("R", "C") else 1
        names, words = words[:count], words[count:]
        held += names if any(map(secrets.is_credentials, names)) else []
    plain = ("--no-renames", "--no-ext-diff", "--no-textconv", "--no-color", "--src-prefix=a/", "--dst-prefix=b/")
    diff = _git("diff", *plain, "HEAD", "--", ":/", *(f":(top,exclude,literal){name}" for name in held))
    return diff or "", [_by_name(name) for name in held]


def _git_of_sender() -> dict[str, Any] | None:
    try:
        told = fileio.parse(fileio.read_text(INSTALLED / SENT))["git"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return told if isinstance(told, dict) else None


@cache
def _say_once(line: str) -> None:
    """A sweep writes the same snapshot many times."""
    print(line, file=sys.stderr, flush=True)


@cache  # the runs of a sweep are written by one process, within seconds
def withheld_in(file: Path, name: str) -> Withheld | None:
    """The first line of a file that looks like a credential; line 0 where its name, or that of its target, does."""
    if secrets.is_credentials(name) or (file.is_symlink() and secrets.is_credentials(file.resolve().name)):
        return _by_name(name)
    try:
        found = secrets.find(fileio.read_text(file, follow=True), python=file.suffix == ".py")
    except OSError:
        return None
    return Withheld(name, found[0].line, found[0].kind) if found else None


def _changed_own_files() -> list[str]:
    """Files of the program that are not as they were published: edited, or added as plugins."""
    told = _git(
        "-C", str(INSTALLED), "status", "--porcelain", "-z", "--untracked-files=all", "--no-renames", "--", *_OWN
    )
    changed = [entry[3:] for entry in (told or "").split("\0") if len(entry) > 3]
    return [name for name in changed if name.endswith((".py", ".yaml")) and (INSTALLED / name).is_file()]


def _user_modules(here: Path) -> list[Path]:
    if here == INSTALLED or (here / "trainkit" / "errors.py").is_file():
        skip = {*_OWN, "tests", "slurm", "runs", "data"}
    else:
        skip = {"runs", "data", *importing.OURS}
    theirs = _PYTHONS | {f"{name}.py" for name in importing.OURS}
    found: list[Path] = []
    for folder, folders, files in os.walk(here):
        if {"config.yaml", "manifest.json"} <= set(files):  # a run folder: its code is a copy already
            folders.clear()
            continue
        inside = Path(folder).relative_to(here)
        folders[:] = [
            name
            for name in folders
            if not name.startswith(".")
            and name not in ("__pycache__", "node_modules", "site-packages")
            and not (inside == Path() and name in skip)
            and len(inside.parts) < 4
        ]
        found += [inside / name for name in files if name.endswith(".py") and (inside / name).parts[0] not in theirs]
        if len(found) > 2000:  # someone submits from a home directory: that is no project
            return []
    return found


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _git(*arguments: str) -> str | None:
    try:
        return process.ask(["git", *arguments], seconds=10).require().strip("\n")
    except process.NoAnswer:
        return None


# What makes two runs the same: their configuration, their code, their data, and how many ranks train, not where.


def digest_of(files: Iterable[tuple[str, Path]]) -> str:
    """The `code_digest` of files by their names; a link that leads nowhere is no code."""
    content: dict[str, bytes] = {}
    for name, file in files:
        with suppress(OSError):
            content[name] = fileio.read_bytes(file, follow=True)
    return code_digest(content)


def fingerprint(config: Config, code: str) -> str:
    """Of a run to be.

    Args:
        config: as the run stores it, with the absolute folder of its data.
        code: its `code_digest`.
    """
    settings = config.model_dump(mode="json", exclude={"launch"})
    ranks = config.launch.model_dump(mode="json", include={"nodes", "gpus_per_node", "ntasks_per_node"})
    text = json.dumps([settings, ranks, code, _data_state(Path(config.data.root))], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def same_runs(prints: Iterable[str]) -> dict[str, list[RunDir]]:
    """Runs of this user, by fingerprint, oldest first; those alone that are there still, and are still what they were.

    One file is read, and of each run that is found its manifest.
    """
    wanted = set(prints)
    found: dict[str, list[RunDir]] = {}
    for mark, path in run_folder.marked():
        if mark in wanted and os.path.isfile(path / "config.yaml"):
            run = RunDir(path)
            if fileio.read_object(run.manifest).get("fingerprint") == mark:
                found.setdefault(mark, []).append(run)
    return found


def _data_state(root: Path) -> list[list[object]]:
    """What a look into the data's folder shows: names, sizes and times. Nobody has time to read all that is in it."""
    try:
        with os.scandir(root) as entries:
            seen = sorted((entry for entry in entries if not entry.name.startswith(".")), key=lambda entry: entry.name)
            if len(seen) > _LOOKED_AT:
                return [[len(seen), root.stat().st_mtime_ns]]
            stats = [(entry.name, entry.stat()) for entry in seen]
    except OSError:  # digits and synthetic have none
        return []
    return [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]
