"""What a run was made of: a copy of the code that it runs, and a manifest of everything around it."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from trainkit import packaged
from trainkit.records.rundir import RunDir

INSTALLED = Path(__file__).resolve().parents[2]
"""The folder that jobs and trainkit are in: a checkout, site-packages, or the snapshot of another run."""

PACKAGES = (
    "trainkit",
    "torch",
    "torchvision",
    "timm",
    "submitit",
    "hivemind",
    "tensorboard",
    "wandb",
    "pydantic",
    "numpy",
    "safetensors",
)
# What looks like a credential must not reach a shared file system: on a command line, and in a diff, where `key=` is
# code as a rule, so that only the names of credentials and the shapes of well-known ones count.
_SECRET_WORD = re.compile(r"(?i)([\w.-]*(?:key|token|secret|password)[\w.-]*[=:])\S+")
_SECRET_TEXT = re.compile(
    r"""(?ix) ( [\w.-]* (?: api_?key | access_?key(?:_?id)? | secret | token | password ) ["']? \s*[=:]\s* ["']? )
    [^\s"',]+"""
)
_SECRET_SHAPE = re.compile(r"\b(?:hf_|ghp_|github_pat_|sk-|AKIA)[A-Za-z0-9_-]{16,}")
_OWN = ("jobs", "trainkit", "configs")


def write_code(run_dir: RunDir) -> None:
    """Copy the packages that the job runs, so that edits after submission do not change a queued or requeued job.

    The user's own Python files beside them (``package.module:function``) come along, those of the current folder.
    """
    # The snapshot of a wheel is laid out as that of a checkout, where configs and slurm lie beside trainkit.
    unwanted = shutil.ignore_patterns("__pycache__", "*.pyc", "*.ipynb", "configs", "slurm")
    for name in _OWN:
        source = packaged.folder(name) if name == "configs" else INSTALLED / name
        shutil.copytree(source, run_dir.code / name, ignore=unwanted)
    here = Path.cwd()
    for file in _user_modules(here):
        target = run_dir.code / file
        if not target.exists() and (here / file).is_file():  # a link may lead nowhere
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(here / file, target)


def write_manifest(run_dir: RunDir, command: list[str]) -> None:
    """Record git commit, uncommitted changes, package versions, host, command line. Never the environment."""
    manifest: dict[str, Any] = {
        "command": [_without_secrets(word, _SECRET_WORD) for word in command],
        "cwd": str(Path.cwd()),
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "python": sys.version.split()[0],
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
        "git": {
            "commit": _git("rev-parse", "HEAD"),
            "diff": _without_secrets(_git("diff", "HEAD") or "", _SECRET_TEXT),
            "untracked": (_git("ls-files", "--others", "--exclude-standard") or "").splitlines(),
        },
    }
    run_dir.manifest.write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def _without_secrets(text: str, named: re.Pattern[str]) -> str:
    return _SECRET_SHAPE.sub("***", named.sub(r"\1***", text))


def _user_modules(here: Path) -> list[Path]:
    if here == INSTALLED or (here / "trainkit" / "errors.py").is_file():
        skip = {*_OWN, "tests", "slurm", "runs", "data"}
    else:
        skip = {"runs", "data"}
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
        found += [inside / name for name in files if name.endswith(".py")]
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
        done = subprocess.run(["git", *arguments], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
