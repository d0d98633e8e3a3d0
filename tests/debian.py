"""Programs of other packages that tests need: installed where they are missing and this is root's Debian."""

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import pytest

PATH = f"{os.environ.get('PATH', '')}:/usr/local/sbin:/usr/sbin:/sbin"
_LOCKED = Path("/var/lib/dpkg")  # as slurm/devcluster does while it installs SLURM; no file is left behind
_POLICY = Path("/usr/sbin/policy-rc.d")  # which Debian's packages ask whether they may start what they bring


def program(*names: str, package: str) -> str:
    """The path of the first of these programs that there is, after installing the package if need be.

    Skips the test where that cannot be done; on CI, which must run them all, fails it.
    """
    if found := _found(names):
        return found
    if sys.platform != "linux" or not Path("/etc/debian_version").exists() or os.geteuid() != 0:
        cannot_run(f"{names[0]} is not installed, and only root's Debian can install it")
    lock = os.open(_LOCKED, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another worker may be installing
        if not _found(names):
            _install(package)
    finally:
        os.close(lock)
    return _found(names) or cannot_run(f"the package {package} brought no {names[0]}")


def cannot_run(reason: str) -> NoReturn:
    """Skip, but never silently on CI."""
    if os.environ.get("CI", "").lower() in ("true", "1"):
        pytest.fail(f"This test cannot run here, and CI must run it: {reason}")
    pytest.skip(reason)


def _found(names: tuple[str, ...]) -> str | None:
    return next((path for name in names if (path := shutil.which(name, path=PATH))), None)


def _install(package: str) -> None:
    install = ["install", "-y", "-q", "--no-install-recommends", package]
    with _nothing_starts():
        if _apt(install).returncode and not _apt(["update", "-q"]).returncode:
            done = _apt(install)
            if done.returncode:
                cannot_run(f"apt-get install {package} failed: {done.stderr.strip()[-500:]}")


@contextmanager
def _nothing_starts() -> Iterator[None]:
    """No service that a package brings is started for the whole machine."""
    ours = not _POLICY.exists()
    if ours:
        _POLICY.write_text("#!/bin/sh\nexit 101\n")
        _POLICY.chmod(0o755)
    try:
        yield
    finally:
        if ours:
            _POLICY.unlink()


def _apt(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    command = ["apt-get", "-o", "DPkg::Lock::Timeout=300", *arguments]
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)
