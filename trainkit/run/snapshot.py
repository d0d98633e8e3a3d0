"""Snapshot of the code that a run trains with: written, shared, restored."""

import hashlib
import os
import shutil
import stat
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from secrets import token_hex

from trainkit.common import fileio
from trainkit.common.errors import UserError
from trainkit.common.fileio import create, is_own, make_folder
from trainkit.run import code_files, user_lists
from trainkit.run.folder import RunDir


def write_code(
    run_dir: RunDir,
    own: Sequence[str] = (),
    *,
    store: Path | None = None,
    here: Path | None = None,
    project: code_files.Project | None = None,
) -> list[code_files.Withheld]:
    """Copy the packages that the job runs, so that later edits do not change a queued or requeued job.

    The user's own Python files (``package.module:function``) are copied too. Files with what looks like a credential,
    or with the name of a file of credentials, are left out and returned.

    Args:
        own: the run's own functions, ``package.module:function``.
        store: where runs of equal code share one copy, to which ``code`` becomes a link; None: the run has its own.
        here: the folder of the user's own files; None: the current one.
        project: that of a script, in the place of the user's own modules.

    Raises:
        RefusedError: a file that would have to be left out is one that the run needs.
    """
    sources, withheld = code_files.code_sources(own, here or Path.cwd(), project)
    content = _content(sources)
    if store is None or not share(run_dir, content, store):
        write_tree(content, run_dir.code, run_dir.path)
    return withheld


def _content(sources: Mapping[str, Path]) -> dict[str, bytes]:
    return {name: fileio.read_bytes(file, 16 * code_files.LARGEST_CODE, follow=True) for name, file in sources.items()}


def read_code(run_dir: RunDir) -> dict[str, bytes] | None:
    """Every file of a run's code by its name, from ``code.zip`` if it shares a copy; None if there is none, or more
    than a run has."""
    if _shares(run_dir):
        return code_files.unpacked(run_dir.code_archive)
    return code_files.read_tree(run_dir.code)


def has_code(run_dir: RunDir) -> bool:
    """Return whether the run has a copy of its code. `train` makes none: each start takes the code that is there.

    A link that leads nowhere is one as long as ``code.zip`` is there.
    """
    return run_dir.code_archive.exists() or run_dir.code.is_dir()


def take_code(run_dir: RunDir, own: Sequence[str], here: Path, project: code_files.Project | None = None) -> None:
    """Copy the code as it is now for a run that has none. Arguments and errors are those of `write_code`."""
    if run_dir.code.is_symlink():  # and leads nowhere
        run_dir.code.unlink()
    for item in write_code(run_dir, own, here=here, project=project):
        code_files.say_once(f"Withheld from the run folder: {item}.")


def has_code_in_place(run_dir: RunDir) -> bool:
    """True if ``code`` holds the run's code: a shared copy may be gone, or changed."""
    if not _shares(run_dir):
        return True
    content = code_files.unpacked(run_dir.code_archive)
    return content is not None and content == code_files.read_tree(Path(os.path.realpath(run_dir.code)))


def _shares(run_dir: RunDir) -> bool:
    return run_dir.code_archive.exists() and (run_dir.code.is_symlink() or not run_dir.code.is_dir())


def restore_code(run_dir: RunDir, content: Mapping[str, bytes] | None = None) -> None:
    """Unpack ``code.zip`` if the copy that the run shares is gone or was changed, as after the run was moved.

    ``content``, which the caller has checked, replaces anything: also compiled files, which Python would run.
    """
    remove_partial(run_dir.path)
    if content is None:
        if has_code_in_place(run_dir):
            return
        content = read_code(run_dir)
        if content is None:
            raise not_code(run_dir)
        if os.path.exists(run_dir.code):  # which may be closed to this user
            code_files.say_once(f"{run_dir.name}: its code was changed in {run_dir.code.resolve()}; code.zip is used.")
        elif _shares_again(run_dir, content):
            return
    new = run_dir.path / f".partial-{token_hex(4)}-code"
    old = run_dir.path / f".partial-{token_hex(4)}-code"
    try:
        write_tree(content, new, run_dir.path)
        with suppress(FileNotFoundError):
            run_dir.code.rename(old)
        new.rename(run_dir.code)
    except OSError as error:
        if code_files.read_tree(run_dir.code) == content:
            return  # another command was quicker
        raise UserError(
            f"Cannot unpack the code of {run_dir.path}.",
            why=f"{error.strerror}: {error.filename}",
            fix="Copy the run to a folder where you can write, and name the copy.",
        ) from None
    finally:
        remove_copies(new, old)


def _shares_again(run_dir: RunDir, content: Mapping[str, bytes]) -> bool:
    """Unpack the shared copy once more, as after `clean`. Returns False where its archive is not beside it."""
    copy = Path(os.path.realpath(run_dir.code))  # which raises for no loop of links
    with suppress(OSError):
        if is_own(copy.parent) and code_files.unpacked(copy.with_suffix(".zip")) == content:
            return shared_copy(copy.parent, copy.name, content) is not None
    return False


def not_code(run_dir: RunDir) -> UserError:
    """The error for an archive that no run has written."""
    return UserError(
        f"{run_dir.code_archive} is not a snapshot of code.",
        why="It is damaged, or was not written by a run.",
        fix="Copy the run again from its machine.",
    )


STORE = ".code"
"""In a folder of runs: the code that they share."""
_UNUSED_SECONDS = 3600.0
"""The age at which a shared copy of code goes that no run uses, and half a copy that a killed command has left."""


def share(run_dir: RunDir, content: Mapping[str, bytes], store: Path) -> bool:
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
        name = code_files.code_digest(content)[:16]
        archive = store / f"{name}.zip"
        with suppress(FileNotFoundError):
            os.utime(archive)  # from now on it is in use
        if code_files.unpacked(archive) != content:
            with suppress(OSError):  # another command may remove the same
                _remove_unused(store)
            fileio.write(archive, code_files.packed(content), store)
            if code_files.unpacked(archive) != content:  # it is too large, or a name is not one of code
                archive.unlink()
                return False
        folder = shared_copy(store, name, content)
        if folder is None:
            return False
        try:
            os.link(archive, run_dir.code_archive)
        except OSError:  # a disk without hard links
            fileio.copy(archive, run_dir.code_archive, run_dir.path)
        fileio.link(run_dir.code, os.path.relpath(folder, run_dir.path), run_dir.path)
    except OSError:
        remove_copies(run_dir.code, run_dir.code_archive)
        return False
    return True


def share_with(first: RunDir, run_dir: RunDir) -> bool:
    """Give a run of a sweep the code that this command has just given to ``first``, checked and shared.

    Returns False where that one shares none.
    """
    if not first.code.is_symlink() or not first.code_archive.exists():
        return False
    try:
        os.link(first.code_archive, run_dir.code_archive)
        folder = first.path / os.readlink(first.code)
        fileio.link(run_dir.code, os.path.relpath(folder, run_dir.path), run_dir.path)
    except OSError:  # a disk without hard links, or a file that has too many
        remove_copies(run_dir.code, run_dir.code_archive)
        return False
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
            remove_copies(partial)
            if not folder.exists():  # else another command was quicker
                raise
    if code_files.read_tree(folder) != content:
        return None
    # Compiled files stay only if nobody else can have put them there: the store may have come with an archive of runs.
    # Nobody else can know or set the time when a file of the copy came to its place.
    file = folder / next(iter(content))
    seal = hashlib.sha256(f"{file}\0{file.stat().st_ctime_ns}".encode(errors="surrogateescape")).hexdigest()
    if not is_own(store, private=True) or seal not in user_lists.vouched():
        for compiled in list(folder.rglob("__pycache__")):
            shutil.rmtree(compiled)  # what cannot be removed is not vouched for: the run gets a copy of its own
        user_lists.vouch([seal])
    return folder


def remove_copies(*paths: Path) -> None:
    """Remove files, links and folders as far as that can be done; a disk may be read-only."""
    for path in paths:
        with suppress(OSError):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink()


def remove_partial(folder: Path) -> None:
    """Remove what killed commands have left half-written."""
    for left in folder.glob(".partial-*"):
        with suppress(OSError):  # another command was quicker
            if left.lstat().st_mtime < time.time() - _UNUSED_SECONDS:
                remove_copies(left)


def _remove_unused(store: Path) -> None:
    """Remove the copies to which no run beside the store links, and what killed commands have left.

    A run that was moved away restores its code from its own archive.
    """
    remove_partial(store)
    used: set[str] = set()
    for link in (*store.parent.glob("*/code"), *store.parent.glob("*/*/code")):
        if link.is_symlink():
            used.add(os.path.basename(os.readlink(link)))
    for archive in store.glob("*.zip"):
        # The time last: a command may have begun to use it meanwhile.
        if archive.stem not in used and archive.stat().st_ctime < time.time() - _UNUSED_SECONDS:
            remove_copies(archive, archive.with_suffix(""))


def write_tree(content: Mapping[str, bytes], top: Path, within: Path, *, read_only: bool = False) -> None:
    """Write new files below ``top`` by their names there."""
    for name, data in content.items():
        file = top / name
        make_folder(file.parent, within)
        with create(file, within) as out:
            out.write(data)
            if read_only:  # other runs use it too
                os.fchmod(out.fileno(), os.fstat(out.fileno()).st_mode & 0o7555)
