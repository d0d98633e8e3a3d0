"""Files of code: those that a snapshot takes, without credentials; and how a tree or an archive of them is read."""

import hashlib
import io
import os
import re
import stat
import sys
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import IO, TYPE_CHECKING, NamedTuple

from trainkit.common import fileio, imports, process, terminal
from trainkit.common.errors import RefusedError, UserError
from trainkit.run import secrets, user_lists

if TYPE_CHECKING:  # its classes take a tenth of a second
    from trainkit.config.schema import ScriptConfig

INSTALLED = Path(__file__).resolve().parents[2]
"""The folder that jobs and trainkit are in: a checkout, site-packages, or the snapshot of another run."""
OWN_FOLDERS = ("jobs", "trainkit", "configs")
_PYTHONS = {*sys.stdlib_module_names, "sitecustomize", "usercustomize"}
"""The interpreter imports some of these at its start, before any finder of ours, and never means the user's files."""
_NEVER = {"__pycache__", "node_modules", "site-packages"}
_DEEPEST_MODULE = 4
"""Folders below the user's in which modules are looked for."""
_MOST_MODULES = 2000
"""Modules of a project; a folder with more is a home directory."""


class Withheld(NamedTuple):
    """Something that was left out of a run folder because it looks like a credential."""

    what: str
    """A file of the user's, ``the diff`` or ``the command line``."""
    line: int
    """0 for a whole file, left out for its name."""
    kind: str

    def __str__(self) -> str:
        where = f"line {self.line} looks like a " if self.line else ""
        return f"{self.what} ({where}{self.kind})"


PROJECT = "project"
"""In a snapshot: the project of a script. It may have packages with the names of ours."""
_OF_PROJECT = (
    ".yaml", ".yml", ".json", ".toml", ".cfg", ".ini", ".txt", ".sh", ".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp",
    ".jinja", ".project-root",
)  # fmt: skip
_MOST_BESIDE = 200
"""Files of such kinds in one folder; a folder with more holds data."""
_NO_PROJECT = {"sweep.json", "pyvenv.cfg"}
"""A file by which a folder is a sweep, or an environment of Python's."""
_LARGEST_BESIDE = 1 << 19
"""Bytes of one of them."""


class Project(NamedTuple):
    """A folder of the user's whose code a script's run keeps a copy of."""

    root: Path
    script: str = ""
    """Name of the script below it, where it is a file."""

    def files(self) -> list[tuple[str, Path]]:
        """List Python files, and small files that programs are configured by, each with its name below the root.

        Raises:
            UserError: there are too many for a project.
        """
        found: list[tuple[str, Path]] = []
        modules = 0
        for folder, folders, names in os.walk(self.root):
            inside = Path(folder).relative_to(self.root)
            is_run = "config.yaml" in names and "logs" in folders
            if is_run or _NO_PROJECT.intersection(names):
                folders.clear()
                continue
            taken = _files_of_project(Path(folder), names)
            count = sum(name.endswith(".py") for name in taken)
            if (not count and len(folders) > _MOST_BESIDE) or len(inside.parts) >= _DEEPEST_MODULE:
                folders.clear()  # of data
            found += [(str(inside / name), Path(folder, name)) for name in taken]
            modules += count
            if modules > _MOST_MODULES:
                what = f"{self.root} has more than {_MOST_MODULES:,} Python files."
                why = "A run keeps a copy of its script's project, and that is a home folder, or many projects."
                raise UserError(what, why=why, fix="Submit from the folder of the project: cd PROJECT.")
            folders[:] = [name for name in folders if not name.startswith(".") and name not in _NEVER]
        return found


def _files_of_project(folder: Path, names: Sequence[str]) -> list[str]:
    """Select the files of a folder that belong to a project."""
    code = []
    beside = []
    for name in names:
        with suppress(OSError):  # a broken link, or just removed
            state = (folder / name).stat()
            if not stat.S_ISREG(state.st_mode):
                continue
            if name.endswith(".py"):
                code.append(name)
            elif name.endswith(_OF_PROJECT) and state.st_size <= _LARGEST_BESIDE:
                beside.append(name)
    return code if len(beside) > _MOST_BESIDE else code + beside


def project_of(script: "ScriptConfig | None") -> Project | None:
    """The project of a script whose paths are absolute; None where there is no script."""
    if script is None or script.root is None:
        return None
    root = Path(script.root)
    if script.path is None:
        return Project(root)
    return Project(root, str(Path(script.path).relative_to(root)))


def code_sources(
    own: Sequence[str], here: Path, project: Project | None = None
) -> tuple[dict[str, Path], list[Withheld]]:
    """Every file of a snapshot by its name there, and what is left out."""
    needed = {name.partition(":")[0] for name in own if ":" in name}
    sources: dict[str, Path] = {}
    withheld: list[Withheld] = []
    if project is not None:
        for name, file in project.files():
            found = withheld_in(file, name)
            if found is None:
                sources[f"{PROJECT}/{name}"] = file
            elif name == project.script:
                raise refusal(found)
            else:
                withheld.append(found)
    for name, file in _user_modules(here) if project is None or needed else ():
        found = withheld_in(file, name)
        if found is None:
            sources[name] = file
        elif re.sub(r"(/__init__)?\.py$", "", name).replace("/", ".") in needed:
            raise refusal(found)
        else:
            withheld.append(found)
    for name in _changed_own_files():
        found = withheld_in(INSTALLED / name, name)
        if found and found.line:
            raise refusal(found)
    for name, file in package_files():
        if any(map(secrets.is_credentials, Path(name).parts)):
            withheld.append(withheld_by_name("/".join(Path(name).parts[-2:])))
        else:
            sources[name] = file
    if _judged:
        user_lists.note_harmless(_judged)
        _judged.clear()
    return sources, withheld


def withheld_by_name(name: str) -> Withheld:
    return Withheld(name, 0, "a file of credentials, judging by its name")


def package_files() -> Iterator[tuple[str, Path]]:
    """Every file of the program's own packages by its name in a snapshot, which is laid out as a checkout is: a wheel
    has configs and slurm inside trainkit."""
    for name in OWN_FOLDERS:
        top = fileio.folder(name) if name == "configs" else INSTALLED / name
        for folder, folders, files in os.walk(top):
            folders[:] = [item for item in folders if item not in ("__pycache__", "configs", "slurm")]
            inside = os.path.join(name, os.path.relpath(folder, top))
            for file in sorted(files):
                if not file.endswith((".pyc", ".ipynb")):
                    yield os.path.normpath(os.path.join(inside, file)), Path(folder, file)


def refusal(essential: Withheld) -> RefusedError:
    """The error for a file that would have to be left out and that the run needs."""
    why = "files of such names are never copied."
    fix = "Give the module another name."
    if essential.line:
        why = "a secret must not lie in it."
        fix = "Read the secret from an environment variable. If it is not a secret, end the line with "
        fix += "`# pragma: allowlist secret`."
    return RefusedError(f"The run needs {essential}.", why=f"Every run keeps a copy of its code, and {why}", fix=fix)


def present_code(project: Project | None = None) -> dict[str, bytes]:
    """Every Python file that `write_code` would copy now, and all of a project, by its name in the snapshot.

    Texts that git does not know may be what the script itself writes, so they do not tell two versions apart.
    """
    content: dict[str, bytes] = {}
    users = _user_modules(Path.cwd()) if project is None else _without_results(project)
    for name, file in (*package_files(), *users):
        if file.suffix == ".py" or project is not None:
            with suppress(OSError):  # just removed
                content[name] = fileio.read_bytes(file, follow=True)
    return content


def _without_results(project: Project) -> list[tuple[str, Path]]:
    """Files of a project, but for ``.json`` and ``.txt`` that its git does not know; without git all of them."""
    files = project.files()
    if git_says("-C", str(project.root), "rev-parse", "--is-inside-work-tree") != "true":
        return files
    known = set(git_says("-C", str(project.root), "ls-files", "-z").split("\0"))
    return [(name, file) for name, file in files if file.suffix not in (".json", ".txt") or name in known]


@cache
def say_once(line: str) -> None:
    """Warn once: a sweep writes the same snapshot many times."""
    terminal.warn(line)


@cache  # the runs of a sweep are written by one process, within seconds
def withheld_in(file: Path, name: str) -> Withheld | None:
    """The first line of a file that looks like a credential; line 0 if its name, or that of its target, does."""
    if secrets.is_credentials(name) or (file.is_symlink() and secrets.is_credentials(file.resolve().name)):
        return withheld_by_name(name)
    try:
        text = fileio.read_text(file, follow=True)
    except OSError:
        return None
    is_python = file.suffix == ".py"
    mark = secrets.mark_of(text, python=is_python)
    if mark in harmless():
        return None
    found = secrets.find(text, python=is_python)
    if found:
        return Withheld(name, found[0].line, found[0].kind)
    _judged.append(mark)
    return None


@cache
def harmless() -> frozenset[str]:
    """Marks of texts that need not be searched for credentials again, as of the first call."""
    return user_lists.harmless()


_judged: list[str] = []
"""Texts that this process has found harmless, and that no list of the user's has yet."""


def _changed_own_files() -> list[str]:
    """Files of the program that differ from the published ones: edited, or added as plugins."""
    options = ("--porcelain", "-z", "--untracked-files=all", "--no-renames")
    found: list[str] = []
    for entry in git_says("-C", str(INSTALLED), "status", *options, "--", *OWN_FOLDERS).split("\0"):
        name = entry[3:]  # behind two letters and a blank
        if name.endswith((".py", ".yaml")) and (INSTALLED / name).is_file():
            found.append(name)
    return found


def _user_modules(here: Path) -> list[tuple[str, Path]]:
    """The Python files in the user's folder, each with its name there; none where it is no project."""
    skipped = {"runs", "data", *imports.OURS}
    if here == INSTALLED or (here / "trainkit" / "__main__.py").is_file():  # a checkout
        skipped |= {*OWN_FOLDERS, "tests", "slurm"}
    theirs = _PYTHONS.union(imports.OURS)
    found: list[tuple[str, Path]] = []
    for folder, folders, files in os.walk(here):
        inside = Path(folder).relative_to(here)
        if {"config.yaml", "manifest.json"} <= set(files):  # a run folder, with a copy of code
            folders.clear()
            continue
        for name in list(folders):
            is_skipped = name in _NEVER or (name in skipped and not inside.parts)
            if is_skipped or name.startswith(".") or len(inside.parts) >= _DEEPEST_MODULE:
                folders.remove(name)
        for name in files:
            path = inside / name
            is_theirs = path.parts[0].removesuffix(".py") in theirs
            if name.endswith(".py") and not is_theirs and (here / path).is_file():  # no broken link
                found.append((str(path), here / path))
        if len(found) > _MOST_MODULES:
            return []
    return found


def git_says(*arguments: str) -> str:
    """Return git's output; empty if it fails."""
    try:
        return process.ask(["git", *arguments], seconds=10).require().strip("\n")
    except process.NoAnswer:
        return ""


LARGEST_CODE = 1 << 26
MOST_FILES = 10_000
DEEPEST = 20
"""Most folders on the way to a file of code."""
_BROKEN: tuple[type[Exception], ...] = (zipfile.BadZipFile, RuntimeError, *fileio.BROKEN_TAR)


def read_tree(top: Path) -> dict[str, bytes] | None:
    """Every file below a folder but Python's caches; None if there is none, a link, or more than code has."""
    return contents(_files_below(top))


def unpacked(archive: Path | bytes) -> dict[str, bytes] | None:
    """The files in an archive of code; None for an archive that `write_code` never makes: it may be a stranger's.

    Nothing is written, and no more unpacked than code has.
    """
    return contents(_members(archive))


def contents(files: Iterable[tuple[str, IO[bytes]]]) -> dict[str, bytes] | None:
    """The files' content by name; None if there are none, more than code has, or an archive of them is broken."""
    room = LARGEST_CODE
    found = dict[str, bytes]()
    try:
        for name, file in files:
            with file:
                found[name] = file.read(room + 1)
            room -= len(found[name])
            if room < 0 or len(found) > MOST_FILES:
                return None
    except _BROKEN:
        return None
    return found or None


def _files_below(top: Path) -> Iterator[tuple[str, IO[bytes]]]:
    for count, (folder, folders, files) in enumerate(os.walk(top)):
        inside = Path(folder).relative_to(top)
        if count > MOST_FILES or len(inside.parts) > DEEPEST:
            raise ValueError
        for name in list(folders):
            if Path(folder, name).is_symlink():
                raise ValueError
            if name == "__pycache__":
                folders.remove(name)
        for name in files:
            yield str(inside / name), fileio.open_regular(Path(folder, name))


def _members(archive: Path | bytes) -> Iterator[tuple[str, IO[bytes]]]:
    data = archive if isinstance(archive, bytes) else fileio.read_bytes(archive)  # its list of names is read whole
    with zipfile.ZipFile(io.BytesIO(data)) as content:
        items = content.infolist()
        if len(items) > MOST_FILES or not are_of_code(content.namelist()):
            raise ValueError
        for item in items:
            if stat.S_ISLNK(item.external_attr >> 16) or item.compress_type != zipfile.ZIP_DEFLATED:
                raise ValueError
            yield item.filename, content.open(item)


def code_digest(files: Mapping[str, bytes]) -> str:
    """SHA-256 of names and contents, in hex."""
    found = hashlib.sha256()
    for name, content in sorted(files.items()):
        found.update(os.fsencode(f"{name}\0{len(content)}\0"))
        found.update(content)
    return found.hexdigest()


def are_of_code(names: Sequence[str]) -> bool:
    """True if each name is another file below one folder, and none is compiled Python."""
    paths: set[str] = set()
    folders: set[str] = set()
    for name in names:
        try:
            fileio.inside(Path(), name)
        except ValueError:
            return False
        parts = name.split("/")
        longest = max(len(os.fsencode(part)) for part in parts)
        if name in paths or "__pycache__" in parts or len(parts) > DEEPEST or longest >= 200:
            return False
        paths.add(name)
        for depth in range(1, len(parts)):
            folders.add("/".join(parts[:depth]))
    return paths.isdisjoint(folders)


def packed(content: Mapping[str, bytes]) -> bytes:
    """An archive of files by their names, which `unpacked` takes."""
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as out:
        for path, data in sorted(content.items()):
            out.writestr(zipfile.ZipInfo(path), data, zipfile.ZIP_DEFLATED)
    return archive.getvalue()
