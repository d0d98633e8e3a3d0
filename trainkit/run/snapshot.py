"""The code that a run has copied, the manifest of everything around it, and the fingerprint of both."""

import hashlib
import io
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
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from importlib import metadata
from pathlib import Path, PurePosixPath
from secrets import token_hex
from typing import IO, Any, NamedTuple

from trainkit import fileio, importing, process, terminal
from trainkit.config.schema import Config
from trainkit.errors import RefusedError, UserError
from trainkit.fileio import create, is_own, make_folder
from trainkit.run import folder as run_folder
from trainkit.run import secrets
from trainkit.run.folder import RunDir

INSTALLED = Path(__file__).resolve().parents[2]
"""The folder that jobs and trainkit are in: a checkout, site-packages, or the snapshot of another run."""
STORE = ".code"
"""In a folder of runs: the code that they share."""
LARGEST_CODE = 1 << 26
MOST_FILES = 10_000
DEEPEST = 20
"""Most folders on the way to a file of code."""
LONGEST_DIFF = 2_000_000
SENT = "sent.json"
"""Lies beside code that came from another machine: what git said of it there, as in a manifest."""
DISTRIBUTION = "trainkit-vision"
PACKAGES = (
    DISTRIBUTION, "torch", "torchvision", "timm", "submitit", "hivemind", "tensorboard", "wandb", "pydantic", "numpy",
    "safetensors",
)  # fmt: skip
PUBLIC_URL = r"https://[a-z0-9][a-z0-9.-]*(:[0-9]+)?(/[A-Za-z0-9_~][A-Za-z0-9_.~-]*)+"
"""Of a repository: no credentials, no options, nothing that a shell reads."""
LONGEST_URL = 200
_OWN = ("jobs", "trainkit", "configs")
# The interpreter imports some of these at its start, before any finder of ours, and never means the user's files.
_PYTHONS = {
    f"{name}{end}" for name in (*sys.stdlib_module_names, "sitecustomize", "usercustomize") for end in ("", ".py")
}
_BROKEN: tuple[type[Exception], ...] = (zipfile.BadZipFile, RuntimeError, *fileio.BROKEN_TAR)
_MOST_SHOWN = 40
"""Files of code that was received."""
_UNUSED_SECONDS = 3600.0
"""The age at which a shared copy of code goes that no run uses, and half a copy that a killed command has left."""
_LOOKED_AT = 1000
"""Most entries of a data folder that a fingerprint lists; of a larger folder it takes the time of change."""


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
    room, found = LARGEST_CODE, dict[str, bytes]()
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
        if (
            count > MOST_FILES
            or len(inside.parts) > DEEPEST
            or any(Path(folder, name).is_symlink() for name in folders)
        ):
            raise ValueError
        folders[:] = [name for name in folders if name != "__pycache__"]
        for name in files:
            yield str(inside / name), fileio.open_regular(Path(folder, name))


def _members(archive: Path | bytes) -> Iterator[tuple[str, IO[bytes]]]:
    data = archive if isinstance(archive, bytes) else fileio.read_bytes(archive)  # its list of names is read whole
    with zipfile.ZipFile(io.BytesIO(data)) as content:
        items = content.infolist()
        links = any(stat.S_ISLNK(item.external_attr >> 16) for item in items)
        deflated = all(item.compress_type == zipfile.ZIP_DEFLATED for item in items)
        if links or not deflated or len(items) > MOST_FILES or not are_of_code([item.filename for item in items]):
            raise ValueError
        for item in items:
            yield item.filename, content.open(item)


def code_digest(files: Mapping[str, bytes]) -> str:
    """SHA-256 of names and contents, in hex."""
    found = hashlib.sha256()
    for name, content in sorted(files.items()):
        found.update(os.fsencode(f"{name}\0{len(content)}\0"))
        found.update(content)
    return found.hexdigest()


def are_of_code(names: Sequence[str]) -> bool:
    """Whether each name is another file below one folder, and none is compiled Python."""
    paths = {name: PurePosixPath(name) for name in names}
    if len(paths) < len(names) or any(not 0 < len(path.parts) <= DEEPEST for path in paths.values()):
        return False
    folders = {folder for path in paths.values() for folder in path.parents}
    return all(
        str(path) == name and path not in folders and "\0" not in name
        and all(part not in ("/", "..", "__pycache__") and len(os.fsencode(part)) < 200 for part in path.parts)
        for name, path in paths.items()
    )  # fmt: skip


def write_code(run_dir: RunDir, own: Sequence[str] = (), *, store: Path | None = None) -> list[Withheld]:
    """Copy the packages that the job runs, so that later edits do not change a queued or requeued job.

    The user's own Python files in the current folder (``package.module:function``) are copied too. Files with what
    looks like a credential, or with the name of a file of credentials, are left out and returned.

    Args:
        own: the run's own functions, ``package.module:function``.
        store: where runs of equal code share one copy, to which ``code`` becomes a link; None: the run has its own.

    Raises:
        RefusedError: a file that would have to be left out is one that the run needs.
    """
    sources, withheld = _sources(own)
    content = _content(sources)
    if store is None or not _share(run_dir, content, store):
        write_tree(content, run_dir.code, run_dir.path)
    return withheld


def _content(sources: Mapping[str, Path]) -> dict[str, bytes]:
    read = partial(fileio.read_bytes, most=16 * LARGEST_CODE, follow=True)
    return {name: read(source) for name, source in sources.items()}


def archived(run_dir: RunDir, own: Sequence[str]) -> bytes:
    """The program and those packages and modules of the user's that ``own`` names, as an archive that `unpacked` takes:
    of the run's copy, or as they are now. The same files make the same archive.

    Raises RefusedError as `write_code`.
    """
    content = read_code(run_dir) or _content(_sources(own)[0])
    named = {re.split(r"[.:]", name)[0] for name in own if ":" in name}
    tops = {*_OWN, *named, *(f"{name}.py" for name in named)}
    return packed({name: data for name, data in content.items() if PurePosixPath(name).parts[0] in tops})


def packed(content: Mapping[str, bytes]) -> bytes:
    """An archive of files by their names, which `unpacked` takes."""
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as out:
        for path, data in sorted(content.items()):
            out.writestr(zipfile.ZipInfo(path), data, zipfile.ZIP_DEFLATED)
    return archive.getvalue()


def received(archive: bytes, digest: str) -> tuple[Path, str]:
    """Keep code that somebody has sent, in a folder of its own where only this user can write.

    Returns that folder, and what to show of the code: its size, its SHA-256 ``digest``, and for each file in which it
    differs from this program how many lines it has more and less.

    Raises UserError for what no run has written, and when it cannot be kept.
    """
    if (files := unpacked(archive)) is None:
        why, fix = "It is damaged, or holds what no run has written.", "Ask whoever gives it for a commit instead."
        raise UserError("What was sent is no code.", why=why, fix=fix)
    kept = (store := run_folder.state_file("code")) / digest[:16]
    fix = f"Free some space, or remove {kept} if that was changed."
    with fileio.disk_errors_as(f"The code cannot be kept in {kept}.", fix=fix):
        run_folder.make_state_folder(store)
        if shared_copy(store, kept.name, files) is None:
            raise OSError(None, "Somebody has changed what is there")
    ours, lines = _content(dict(_packages())), list[str]()
    for name in sorted(ours.keys() | files.keys()):
        old, new = (Counter(which.get(name, b"").splitlines()) for which in (ours, files))
        if ours.get(name) != files.get(name):
            lines.append(f"\n  +{(new - old).total()} -{(old - new).total()} {terminal.one_line(name)}")
    more = f"\n  ... {len(lines)} files in all" if len(lines) > _MOST_SHOWN else ""
    about = f"{len(files)} files, {terminal.size(sum(map(len, files.values())))}, SHA-256 {digest}.\nIt is in {kept}."
    return kept, f"{about} Lines more and less than here:{''.join(lines[:_MOST_SHOWN])}{more}"


def read_code(run_dir: RunDir) -> dict[str, bytes] | None:
    """Every file of a run's code by its name, from ``code.zip`` if it shares a copy; None if there is none, or more
    than a run has."""
    return unpacked(run_dir.code_archive) if _shares(run_dir) else read_tree(run_dir.code)


def has_code_in_place(run_dir: RunDir) -> bool:
    """Whether ``code`` holds the run's code: a shared copy may be gone, or changed."""
    if not _shares(run_dir):
        return True
    archived = unpacked(run_dir.code_archive)
    return archived is not None and archived == read_tree(Path(os.path.realpath(run_dir.code)))


def _shares(run_dir: RunDir) -> bool:
    return run_dir.code_archive.exists() and (run_dir.code.is_symlink() or not run_dir.code.is_dir())


def restore_code(run_dir: RunDir, content: Mapping[str, bytes] | None = None) -> None:
    """Unpack ``code.zip`` if the copy that the run shares is gone or was changed, as after the run was moved.

    ``content``, which the caller has checked, replaces anything: also compiled files, which Python would run.
    """
    _remove_partial(run_dir.path)
    if content is None:
        if has_code_in_place(run_dir):
            return
        if (content := read_code(run_dir)) is None:
            raise not_code(run_dir)
        if os.path.exists(run_dir.code):  # which may be closed to this user
            _say_once(f"{run_dir.name}: its code was changed in {run_dir.code.resolve()}; code.zip is used.")
        elif _shares_again(run_dir, content):
            return
    new, old = (run_dir.path / f".partial-{token_hex(4)}-code" for _ in range(2))
    try:
        write_tree(content, new, run_dir.path)
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
        _remove(new, old)


def _shares_again(run_dir: RunDir, content: Mapping[str, bytes]) -> bool:
    """Unpack the shared copy once more, as after `clean`. Returns False where its archive is not beside it."""
    copy = Path(os.path.realpath(run_dir.code))
    with suppress(OSError):
        if is_own(copy.parent) and unpacked(copy.with_suffix(".zip")) == content:
            return shared_copy(copy.parent, copy.name, content) is not None
    return False


def not_code(run_dir: RunDir) -> UserError:
    """The error for an archive that no run has written."""
    return UserError(
        f"{run_dir.code_archive} is no snapshot of code.",
        why="It is damaged, or holds what no run has written.",
        fix="Copy the run again from where it was made.",
    )


def _share(run_dir: RunDir, content: Mapping[str, bytes], store: Path) -> bool:
    """Make ``code`` a link to the copy of equal code in ``store``, and ``code.zip`` the run's own archive of it.

    Returns False, and does neither, in a store that is another user's, on a disk without links, and where somebody has
    changed that copy.
    """
    mode = stat.S_IMODE(run_dir.path.stat().st_mode)
    if mode != 0o700:
        store = store.with_name(f"{store.name}-{mode:o}")
    try:
        with suppress(FileExistsError):
            store.mkdir(mode=0o700)
            store.chmod(mode)
        if not is_own(store) or stat.S_IMODE(store.stat().st_mode) != mode:  # others could replace what runs
            return False
        name = code_digest(content)[:16]
        archive = store / f"{name}.zip"
        with suppress(FileNotFoundError):
            os.utime(archive)  # from now on it is in use
        if unpacked(archive) != content:
            fileio.write(archive, packed(content), store)
            if unpacked(archive) != content:  # it is too large, or a name is not one of code
                archive.unlink()
                return False
        if (folder := shared_copy(store, name, content)) is None:
            return False
        try:
            os.link(archive, run_dir.code_archive)
        except OSError:  # a disk without hard links
            fileio.copy(archive, run_dir.code_archive, run_dir.path)
        fileio.link(run_dir.code, os.path.relpath(folder, run_dir.path), run_dir.path)
    except OSError:
        _remove(run_dir.code, run_dir.code_archive)
        return False
    with suppress(OSError):  # another command may remove the same
        _remove_unused(store)
    return True


def shared_copy(store: Path, name: str, content: Mapping[str, bytes]) -> Path | None:
    """The folder in ``store`` with this content; None if somebody has changed it."""
    folder = store / name
    if not folder.exists():
        partial = store / f".partial-{token_hex(4)}-{name}"
        try:
            write_tree(content, partial, store, read_only=True)
            partial.rename(folder)
        except OSError:
            _remove(partial)
            if not folder.exists():  # else another command was quicker
                raise
    if read_tree(folder) != content:
        return None
    # Compiled files stay only if nobody else can have put them there: the store may have come with an archive of runs.
    # Nobody else can know or set the time when a file of the copy came to its place.
    file = folder / next(iter(content))
    seal = hashlib.sha256(f"{file}\0{file.stat().st_ctime_ns}".encode(errors="surrogateescape")).hexdigest()
    if not is_own(store, private=True) or seal not in run_folder.vouched():
        for compiled in list(folder.rglob("__pycache__")):
            shutil.rmtree(compiled)  # what cannot be removed is not vouched for: the run gets a copy of its own
        run_folder.vouch([seal])
    return folder


def _remove(*paths: Path) -> None:
    """Remove files, links and folders as far as that can be done; a disk may be read-only."""
    for path in paths:
        with suppress(OSError):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink()


def _remove_partial(folder: Path) -> None:
    """Remove what killed commands have left half-written."""
    for left in folder.glob(".partial-*"):
        with suppress(OSError):  # another command was quicker
            if left.lstat().st_mtime < time.time() - _UNUSED_SECONDS:
                _remove(left)


def _remove_unused(store: Path) -> None:
    """Remove the copies that no run uses, and what killed commands have left.

    The archive of a run is a second name of the shared one, also where the run was moved to. On a disk without hard
    links it is not: there the runs beside the store tell which copies they use.
    """
    _remove_partial(store)

    def is_unused(archive: Path) -> bool:
        fact = archive.stat()
        return fact.st_nlink == 1 and fact.st_ctime < time.time() - _UNUSED_SECONDS

    if unused := [archive for archive in store.glob("*.zip") if is_unused(archive)]:
        links = [link for pattern in ("*/code", "*/*/code") for link in store.parent.glob(pattern)]
        used = {os.path.basename(os.readlink(link)) for link in links if link.is_symlink()}
        for archive in unused:
            if archive.stem not in used and is_unused(archive):  # still: a command may have begun to use it
                _remove(archive, archive.with_suffix(""))


def write_tree(content: Mapping[str, bytes], top: Path, within: Path, *, read_only: bool = False) -> None:
    """Write new files below ``top`` by their names there."""
    for name, data in content.items():
        file = top / name
        make_folder(file.parent, within)
        with create(file, within) as out:
            out.write(data)
            if read_only:  # other runs use it too
                os.fchmod(out.fileno(), os.fstat(out.fileno()).st_mode & 0o7555)


def _sources(own: Sequence[str]) -> tuple[dict[str, Path], list[Withheld]]:
    """Every file of a snapshot by its name there, and what is left out."""
    modules = [name.partition(":")[0].replace(".", "/") for name in own if ":" in name]
    needed = [file for module in modules for file in (f"{module}.py", f"{module}/__init__.py")]
    sources: dict[str, Path] = {}
    withheld: list[Withheld] = []
    for name, file in _user_modules():
        if (found := withheld_in(file, name)) is None:
            sources[name] = file
        elif name in needed:
            raise refusal(found)
        else:
            withheld.append(found)
    for name in _changed_own_files():
        if (found := withheld_in(INSTALLED / name, name)) and found.line:
            raise refusal(found)
    for name, file in _packages():
        if any(map(secrets.is_credentials, Path(name).parts)):
            withheld.append(_by_name("/".join(Path(name).parts[-2:])))
        else:
            sources[name] = file
    return sources, withheld


def _by_name(name: str) -> Withheld:
    return Withheld(name, 0, "a file of credentials, by its name")


def _packages() -> Iterator[tuple[str, Path]]:
    """Every file of the program's own packages by its name in a snapshot, which is laid out as a checkout is: a wheel
    has configs and slurm inside trainkit."""
    for name in _OWN:
        top = fileio.folder(name) if name == "configs" else INSTALLED / name
        for folder, folders, files in os.walk(top):
            folders[:] = [item for item in folders if item not in ("__pycache__", "configs", "slurm")]
            for file in sorted(files):
                if not file.endswith((".pyc", ".ipynb")):
                    yield str(name / Path(folder, file).relative_to(top)), Path(folder, file)


def refusal(essential: Withheld) -> RefusedError:
    """The error for a file that would have to be left out and that the run needs."""
    why, fix = "files of such names are never copied.", "Give the module another name."
    if essential.line:
        why, fix = "a secret must not lie in it.", "Read the secret from an environment variable. If it is none, "
        fix += "end the line with `# pragma: allowlist secret`."
    return RefusedError(f"The run needs {essential}.", why=f"Every run keeps a copy of its code, and {why}", fix=fix)


def code_files() -> list[tuple[str, Path]]:
    """Every Python file that `write_code` would copy, by its name in the snapshot."""
    return [(name, file) for name, file in _packages() if file.suffix == ".py"] + _user_modules()


def write_manifest(
    run_dir: RunDir, command: Sequence[str], withheld: Sequence[Withheld] = (), *, fingerprint: str = ""
) -> None:
    """Record git commit, uncommitted changes, package versions, host and command line. Never the environment.

    What looks like a credential is replaced by ``***``. The manifest and one line on stderr name what was replaced and
    what was ``withheld`` from the snapshot.
    """
    left_out = list(withheld)

    def redacted(text: str, what: str, *, python: bool) -> str:
        found = secrets.find(text, python=python)
        left_out.extend(Withheld(what, item.line, item.kind) for item in found)
        return secrets.redacted(text, found)

    diff, excluded = _diff()
    left_out += excluded
    if len(diff) > LONGEST_DIFF:
        diff = f"left out: {len(diff)} characters\n"
    # Each part of the diff begins with the name of its file, by which secrets are looked for.
    parts = re.split(r"(?m)^(?=diff --git )", diff)
    manifest: dict[str, Any] = {
        "command": [redacted(word, "the command line", python=False) for word in command],
        "cwd": str(Path.cwd()),
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "python": sys.version.split()[0],
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
        "git": _git_of_sender()
        or {
            "commit": _git("rev-parse", "HEAD") or None,
            "diff": "".join(
                redacted(part, "the diff", python=part.partition("\n")[0].endswith(".py")) for part in parts
            ),
            "untracked": _git("ls-files", "--others", "--exclude-standard").splitlines(),
        },
        "withheld": [item._asdict() for item in left_out],
        "fingerprint": fingerprint,
    }
    fileio.write(run_dir.manifest, json.dumps(manifest, indent=2) + "\n", run_dir.path)
    if left_out:
        _say_once(f"Withheld from the run folder: {'; '.join(dict.fromkeys(map(str, left_out)))}.")


def _diff() -> tuple[str, list[Withheld]]:
    """The changes since the commit, and the files left out of them: both names of a renamed file of credentials."""
    words = iter(_git("diff", "--name-status", "-M", "-z", "HEAD").split("\0"))
    withheld: list[str] = []
    for status in words:
        names = [next(words, "") for _ in range(2 if status[:1] in ("R", "C") else 1)]
        withheld += names if any(map(secrets.is_credentials, names)) else []
    plain = ("--no-renames", "--no-ext-diff", "--no-textconv", "--no-color", "--src-prefix=a/", "--dst-prefix=b/")
    diff = _git("diff", *plain, "HEAD", "--", ":/", *(f":(top,exclude,literal){name}" for name in withheld))
    return diff, [_by_name(name) for name in withheld]


def _git_of_sender() -> dict[str, Any] | None:
    sent = fileio.read_object(INSTALLED / SENT).get("git")
    return sent if isinstance(sent, dict) else None


@cache
def _say_once(line: str) -> None:
    """A sweep writes the same snapshot many times."""
    print(line, file=sys.stderr, flush=True)


@cache  # the runs of a sweep are written by one process, within seconds
def withheld_in(file: Path, name: str) -> Withheld | None:
    """The first line of a file that looks like a credential; line 0 if its name, or that of its target, does."""
    if secrets.is_credentials(name) or (file.is_symlink() and secrets.is_credentials(file.resolve().name)):
        return _by_name(name)
    try:
        found = secrets.find(fileio.read_text(file, follow=True), python=file.suffix == ".py")
    except OSError:
        return None
    return Withheld(name, found[0].line, found[0].kind) if found else None


def origin(paths: Sequence[str]) -> tuple[str, str]:
    """Which trainkit this program is, in words, and by which requirement pip installs the same elsewhere.

    Of a checkout git says it; else what pip has noted. Each is empty where it is not known.

    Args:
        paths: below `INSTALLED`. Where they are not as they were committed, nobody can install the same.
    """
    git = partial(_git, "-C", str(INSTALLED))
    if (INSTALLED / ".git").exists():  # not `rev-parse --show-toplevel`: a venv may lie in a checkout of the user's
        commit = git("rev-parse", "HEAD")
        if commit and len(git("status", "--porcelain", "--branch", "--", *paths).splitlines()) != 1:
            return f"commit {commit} with changes of its own", ""
        # A commit that no remote branch holds was not pushed, as far as this clone knows.
        known = git("for-each-ref", "--contains", "HEAD", "--format=%(refname:lstrip=2)", "refs/remotes").split()
        remotes = dict.fromkeys(name.partition("/")[0] for name in known)
        return _origin_at(commit, [git("config", f"remote.{remote}.url") for remote in remotes]) if commit else ("", "")
    with suppress(metadata.PackageNotFoundError, ValueError, LookupError, TypeError):
        found = metadata.distribution(DISTRIBUTION)
        if os.path.realpath(str(found.locate_file("trainkit"))) == str(INSTALLED / "trainkit"):
            if (told := found.read_text("direct_url.json")) is None:
                return f"{DISTRIBUTION} {found.version}", f"{DISTRIBUTION}=={found.version}"
            return _origin_at(fileio.parse(told)["vcs_info"]["commit_id"], [fileio.parse(told)["url"]])
    return "", ""


def _origin_at(commit: str, urls: Iterable[str]) -> tuple[str, str]:
    # Who pushes with a key reads what others read without one, if the place is public.
    for url in (re.sub(r"^(ssh://)?git@([^/:]+)[:/]", r"https://\2/", url) for url in urls):
        if len(url) <= LONGEST_URL and re.fullmatch(PUBLIC_URL, url) and _is_public(url):
            return f"commit {commit} of {url}", f"{DISTRIBUTION} @ git+{url}@{commit}"
    return f"commit {commit}", ""


def _is_public(url: str) -> bool:
    """Whether anybody may read that repository: asked without this user's keys, settings and passwords."""
    alone = ("env", "HOME=/dev/null", "XDG_CONFIG_HOME=/dev/null", "GIT_TERMINAL_PROMPT=0", "GIT_ASKPASS=true", "git")
    with suppress(process.NoAnswer):
        return not process.ask([*alone, "ls-remote", url, "HEAD"], cwd=Path("/"), seconds=4).code
    return False


def _changed_own_files() -> list[str]:
    """Files of the program that differ from the published ones: edited, or added as plugins."""
    options = ("--porcelain", "-z", "--untracked-files=all", "--no-renames")
    names = [entry[3:] for entry in _git("-C", str(INSTALLED), "status", *options, "--", *_OWN).split("\0")]
    return [name for name in names if name.endswith((".py", ".yaml")) and (INSTALLED / name).is_file()]


def _user_modules() -> list[tuple[str, Path]]:
    """The Python files in the current folder, each with its name there; none where it is no project."""
    here = Path.cwd()
    is_checkout = here == INSTALLED or (here / "trainkit" / "errors.py").is_file()
    skipped = {"runs", "data", *({*_OWN, "tests", "slurm"} if is_checkout else importing.OURS)}
    theirs = _PYTHONS | {f"{name}.py" for name in importing.OURS}
    found: list[tuple[str, Path]] = []
    for folder, folders, files in os.walk(here):
        if {"config.yaml", "manifest.json"} <= set(files):  # a run folder, with a copy of code
            folders.clear()
            continue
        inside = Path(folder).relative_to(here)
        never = {"__pycache__", "node_modules", "site-packages"} | (set() if inside.parts else skipped)
        folders[:] = [name for name in folders if not name.startswith(".") and name not in never] * (
            len(inside.parts) < 4
        )
        for name in files:
            path = inside / name
            if name.endswith(".py") and path.parts[0] not in theirs and (here / path).is_file():  # no broken link
                found.append((str(path), here / path))
        if len(found) > 2000:  # a home directory
            return []
    return found


def _version(package: str) -> str | None:
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return None


def _git(*arguments: str) -> str:
    """What git says; empty if it fails."""
    try:
        return process.ask(["git", *arguments], seconds=10).require().strip("\n")
    except process.NoAnswer:
        return ""


def digest_of(files: Iterable[tuple[str, Path]]) -> str:
    """The `code_digest` of files by their names."""
    content: dict[str, bytes] = {}
    for name, file in files:
        with suppress(OSError):  # just removed
            content[name] = fileio.read_bytes(file, follow=True)
    return code_digest(content)


def fingerprint(config: Config, code: str) -> str:
    """Equal for two runs of the same configuration, code, data and number of ranks, wherever they train.

    Args:
        config: as the run stores it, with the absolute folder of its data.
        code: its `code_digest`.
    """
    settings = config.model_dump(mode="json", exclude={"launch"})
    ranks = config.launch.model_dump(mode="json", include={"nodes", "gpus_per_node", "ntasks_per_node"})
    text = json.dumps([settings, ranks, code, _data_state(Path(config.data.root))], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def same_runs(prints: Iterable[str]) -> dict[str, list[RunDir]]:
    """Existing and unchanged runs of this user by fingerprint, oldest first.

    Reads one file, and the manifest of each run that it finds there.
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
    """Names, sizes and times in the data's folder; reading all of it would take too long."""
    try:
        with os.scandir(root) as entries:
            seen = sorted((entry for entry in entries if not entry.name.startswith(".")), key=lambda entry: entry.name)
            if len(seen) > _LOOKED_AT:
                return [[len(seen), root.stat().st_mtime_ns]]
            return [[entry.name, entry.stat().st_size, entry.stat().st_mtime_ns] for entry in seen]
    except OSError:  # digits and synthetic have none
        return []
