"""Whose a run is. Code that a stranger's run names is run only where the user has said so: ``--allow-code``.

A run is the user's own if one of their commands made it (it is in their index) and nobody else could have written what
it would run: config.yaml and the snapshot belong to the user. Both, because a folder in a shared place can be replaced,
and a folder that the user owns may be an archive that they unpacked.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from trainkit.config.loading import Loaded
from trainkit.errors import RefusedError
from trainkit.records import index
from trainkit.records.rundir import RunDir

# What a configuration makes a machine do beyond training: functions to import, shell lines and flags of commands, a
# file that holds such lines, and weights in a format that timm may unpickle.
_CODE = (
    *("launch.setup", "launch.sbatch", "launch.srun", "launch.cluster"),
    *("launch.modules", "launch.environment", "launch.container_image", "launch.container_mounts"),
)
_PICKLES = ("model.checkpoint_path", "model.pretrained_cfg", "model.pretrained_cfg_overlay")
_OWN_WORDS = ("flag", "override", "environment")


def require_own_code(path: Path, loaded: Loaded, *, allow_code: bool, starts_snapshot: bool = False) -> None:
    """Refuse to run what a stranger's run names, unless the user allows it.

    Every verb that goes from a run to a process calls this before anything of the run is imported or started. What the
    user gives on the command line themselves is their own, and counts no more against the run.

    Args:
        path: what the command was given: a run folder, or its config.yaml. Anything else is a preset, and passes.
        loaded: its configuration with the overrides on top.
        starts_snapshot: the command starts the copy of the program in ``code/``, which is code in any case.

    Raises:
        RefusedError: it names code, is not the user's own, and ``allow_code`` is false.
    """
    folder = _run_folder(path)
    if allow_code or folder is None:
        return
    named = list(_named_code(loaded)) + ([f"the program in {folder / 'code'}"] if starts_snapshot else [])
    stranger = _why_foreign(RunDir(folder.absolute())) if named else ""
    if stranger:
        raise RefusedError(
            f"{folder} would run code that is not yours: {', '.join(named)}.",
            why=f"{stranger} Whoever wrote it decides what that code does here, with your rights.",
            fix="Read it, and if you trust it give the same command with --allow-code.",
        )


def _run_folder(path: Path) -> Path | None:
    """The run folder that a preset's name stands for; None for a preset."""
    if (path / "config.yaml").exists():
        return path
    others = ("manifest.json", "plan.json", "events.jsonl", "metrics.jsonl", "code", "logs", "checkpoints")
    beside = path.name == "config.yaml" and any((path.parent / name).exists() for name in others)
    return path.parent if beside else None


def _named_code(loaded: Loaded) -> Iterator[str]:
    """Settings of the file (not those that the user has just given) that import, start or unpickle something."""
    values = loaded.config.model_dump(mode="json")
    for key, source in loaded.sources.items():
        if source.kind in _OWN_WORDS:
            continue
        value: object = values
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        # A name with a colon: package.module:function, or a model of timm's from elsewhere (hf-hub:, local-dir:).
        names = value if isinstance(value, list) else [value]
        imports = key.endswith((".name", ".loggers")) and any(":" in str(name) for name in names)
        if key == "model.pretrained_cfg_overlay.file" and str(value).endswith(".safetensors"):
            continue  # by this ending timm chooses a reader that unpickles nothing
        if imports or (value and key.startswith((*_CODE, *_PICKLES))):
            yield f"{key}={value}"


def _why_foreign(run: RunDir) -> str:
    """Why a run is not the user's own; empty if it is."""
    if not index.has(run.path):
        return "No command of yours has made that run."
    me = os.geteuid()
    for file in _what_would_run(run):
        try:
            found = file.stat()
        except FileNotFoundError:  # a run that has no snapshot
            continue
        except OSError as error:
            return f"{file} cannot be looked at ({error.strerror})."
        if found.st_uid != me:
            return f"{file} belongs to user {found.st_uid}, and you are {me}."
        if found.st_mode & stat.S_IWOTH:
            return f"Anybody may write to {file}."
    return ""


def _what_would_run(run: RunDir) -> Iterator[Path]:
    yield from (run.path, run.config, run.code)
    for folder, folders, files in os.walk(run.code):
        yield from (Path(folder, name) for name in (*folders, *files))
