"""Where a session of tests has its temporary files: a folder of its own, which goes with it.

Whatever the tests start inherits it as TMPDIR. A session that was killed leaves its folder to the next one, which sees
that nobody holds the lock on it. Only hivemind's sockets are elsewhere, in /tmp.
"""

import fcntl
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

_PREFIX = "tkt-"  # short: names of sockets have at most 107 bytes
_YOUNG_SECONDS = 60.0
_OURS = ("trainkit-", "devcluster")
_PATIENCE_SECONDS = 10.0
_END_WITH_US = "from multiprocessing.", "torch_shm_manager"
"""Of a session without workers: multiprocessing's own two, and torch's for shared memory."""


def make() -> tuple[Path, Callable[[], None]]:
    """The folder of this session, and what removes it. Folders of dead sessions are removed first."""
    base = Path(tempfile.gettempdir())
    clear(base)
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
    folder.chmod(0o1777)  # as /tmp: tests become other users, and daemons run as theirs
    lock = os.open(folder, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)

    def remove() -> None:
        os.environ["TMPDIR"] = tempfile.tempdir = str(base)
        _remove(folder)
        os.close(lock)

    return folder, remove


def left_in(folder: Path) -> list[str]:
    """What tests have left: processes that still live, each ended, and files that trainkit or its cluster made."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while (alive := list(_processes(folder))) and time.monotonic() < deadline:
        time.sleep(0.2)
    found = []
    for process in alive:
        try:
            found.append(f"process {process.pid}: {' '.join(process.cmdline())[:200]}")
            process.kill()
        except psutil.Error:
            continue
    stays = f"trainkit-{os.geteuid()}"  # what programs of a user share
    files = [path for path in sorted(folder.iterdir()) if path.name.startswith(_OURS) and path.name != stays]
    return found + [str(path) for path in files]


def _processes(folder: Path) -> Iterator[psutil.Process]:
    """Those that have the folder as TMPDIR, but for this one and those that have started it."""
    me = psutil.Process()
    family = {me.pid, *(parent.pid for parent in me.parents())}
    for process in psutil.process_iter():
        try:
            if process.pid in family or process.environ().get("TMPDIR") != str(folder):
                continue
            if process.ppid() != me.pid or not any(name in " ".join(process.cmdline()) for name in _END_WITH_US):
                yield process
        except psutil.Error:  # it has ended, or is another user's
            continue


def clear(base: Path) -> None:
    """Remove the folders of sessions that are dead."""
    for folder in base.glob(f"{_PREFIX}*"):
        _clear(folder)


def _clear(folder: Path) -> None:
    try:
        state = folder.lstat()
        # A young one may be about to be locked.
        if state.st_uid != os.geteuid() or time.time() - state.st_ctime < _YOUNG_SECONDS:
            return
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _remove(folder)
    except OSError:  # its session lives
        return
    finally:
        os.close(lock)


def _remove(folder: Path) -> None:
    # What is mounted in it belongs to somebody else.
    mounts = Path("/proc/self/mountinfo")
    if mounts.exists() and any(line.split()[4].startswith(f"{folder}/") for line in mounts.read_text().splitlines()):
        return
    for _ in range(5):  # whatever ends just now may still write
        subprocess.run(["rm", "-rf", "--", folder], stderr=subprocess.DEVNULL, check=False)  # of any depth
        if not folder.exists():
            return
        time.sleep(0.2)
