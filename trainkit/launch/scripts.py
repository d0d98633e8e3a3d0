"""Scripts of the user's own before they are queued: where their code is, and what in them could not run."""

import os
import re
import shutil
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from trainkit.common import fileio
from trainkit.common.errors import UserError
from trainkit.config import own_code, plugins
from trainkit.config.loading import Loaded
from trainkit.config.schema import Config, ScriptConfig
from trainkit.config.script import PLACEHOLDERS, SECTIONS_OF_SCRIPTS, named_in
from trainkit.launch.lab import is_lab, require_jupyter
from trainkit.run.code_files import Project, project_of
from trainkit.run.secrets import refuse_settings

_OF_RANK = ("seed", "strategy", "checkpoint", "train.precision")
"""Settings that `trainkit.rank` reads, where a script calls it."""


def settled_script(loaded: Loaded, cwd: Path) -> Loaded:
    """Find the script of a configuration and the project that it belongs to; other configurations stay as they are.

    Raises:
        UserError: there is no such file, or it is in a folder of more than a project.
    """
    script = loaded.config.script
    if script is None:
        return loaded
    values: dict[str, str] = {"root": str((cwd / (script.root or "")).resolve())}
    if script.path is not None:
        file = (cwd / Path(script.path).expanduser()).resolve()  # Python looks beside the file that a link leads to
        _require_file(script.path, file)
        values["path"] = str(file)
        if script.root is None and not (file.is_relative_to(values["root"]) and _is_project(Path(values["root"]))):
            values["root"] = str(file.parent)
        if not file.is_relative_to(values["root"]):
            why = f"script.root is {values['root']}."
            raise UserError(f"{file} is not in its project.", why=why, fix="Leave script.root out.", key="script.root")
    config = loaded.config.model_copy(update={"script": script.model_copy(update=values)})
    return replace(loaded, config=config, name=_run_name(loaded))


def _run_name(loaded: Loaded) -> str:
    """Name of a script's run: the file without its ending, the last part of a module; of any other run its own."""
    script = loaded.config.script
    if script is None or loaded.source("script.arguments").kind != "flag":
        return loaded.name
    name = Path(script.name).stem if script.module is None else script.module.rpartition(".")[2]
    return re.sub(r"[^\w.+-]", "-", name).strip("-._") or "script"


def _is_project(folder: Path) -> bool:
    with suppress(UserError):
        Project(folder).files()
        return True
    return False


def _require_file(given: str, file: Path) -> None:
    key = "script.path"
    if not file.is_file():
        near = sorted(found.name for found in file.parent.glob("*.py")) if file.parent.is_dir() else []
        fix = f"There is {', '.join(near[:5])}." if near else "Check the path."
        raise UserError(f"There is no script {given}.", why=f"{file} is no file.", fix=fix, key=key)
    if not os.access(file, os.R_OK):
        fix = "Make it readable: chmod u+r, or ask its owner."
        raise UserError(f"{given} cannot be read.", why="Its rights do not let you.", fix=fix, key=key)


def check_script(loaded: Loaded, env: Mapping[str, str]) -> None:
    """Refuse what would fail only once a script runs. Raises UserError, or RefusedError for a secret in its words."""
    config = loaded.config
    script = config.script
    assert script is not None
    launch = config.launch
    here = not launch.has_own_environment
    with loaded.pointing_at_sources():
        _check_placeholders(script, launch.on_restart)
        _check_settings(loaded)
        if script.path is not None:
            file = Path(script.path)
            own_code.check_script(file, "__main__", "script.path", folder=file.parent, installed=here)
        elif is_lab(config):
            require_jupyter(launch)
        elif script.module is not None:
            _check_module(script, installed=here)
        elif here:
            _check_program(str(script.program), env)
        project = project_of(script)
        if project is not None:
            project.files()  # it may be none
    refuse_settings(loaded)


def _check_placeholders(script: ScriptConfig, on_restart: str | None) -> None:
    known = {*PLACEHOLDERS, *script.values}
    used = named_in([*script.arguments, on_restart or ""])
    for name in used:
        if name not in known:
            why = f"These are: {', '.join([*PLACEHOLDERS, *script.values])}; --sweep {name}=... adds it."
            fix = f"Write {{{{{name}}}}} for the text {{{name}}} itself."
            raise UserError(f"Nobody fills in {{{name}}}.", why=why, fix=fix, key="script.arguments")
    for name in script.values:
        if name not in used:
            why = f"No argument has {{{name}}}, so every run of it would be the same."
            fix = f"Write {{{name}}} where its value belongs: -- --{name} {{{name}}}."
            raise UserError(f"'{name}' is used by no argument.", why=why, fix=fix, key=f"script.values.{name}")


def _check_settings(loaded: Loaded) -> None:
    """Refuse settings that were given and mean nothing to the script."""
    allowed = list(SECTIONS_OF_SCRIPTS)
    if _knows_us(loaded.config):
        allowed += _OF_RANK
    for key, source in loaded.sources.items():
        is_meant = any(key == name or key.startswith(f"{name}.") for name in allowed)
        if not is_meant and (source.kind in ("flag", "override") or (source.kind == "file" and not loaded.is_run)):
            why = f"A script reads its own arguments; of ours these count: {', '.join(allowed)}."
            fix = "Give it to the script, behind `--`."
            if key.startswith(_OF_RANK):
                fix += " It would count for one that calls trainkit.rank()."
            raise UserError(f"{key} means nothing to a script.", why=why, fix=fix, key=key)


def _knows_us(config: Config) -> bool:
    """True if the script may call `trainkit.rank`: a file of its project names this package."""
    project = project_of(config.script)
    if project is None:
        return False
    for name, file in project.files():
        with suppress(OSError):
            if name.endswith(".py") and b"trainkit" in fileio.read_bytes(file, follow=True):
                return True
    return False


def _check_module(script: ScriptConfig, *, installed: bool) -> None:
    module = str(script.module)
    folder = Path(str(script.root))
    before = list(sys.path)
    sys.path.insert(0, str(folder))
    try:
        file = plugins.find_module(module)
        if file is not None and file.name == "__init__.py":
            file = plugins.find_module(f"{module}.__main__")
    finally:
        sys.path[:] = before
    if file is None and installed:
        why = f"It is neither installed nor in {folder}, or is a package without __main__.py."
        raise UserError(f"There is no module {module} to run.", why=why, fix="Check its name.", key="script.module")
    if file is not None and plugins.is_own(file):
        own_code.check_script(file, module, "script.module", folder=folder, installed=installed)


def _check_program(program: str, env: Mapping[str, str]) -> None:
    places = os.pathsep.join([os.path.dirname(sys.executable), env.get("PATH", os.defpath)])
    if shutil.which(program, path=places) is None:
        why = "It is not on the PATH, or may not be executed."
        fix = "Load the module or the environment that has it, or give its path."
        raise UserError(f"There is no program {program}.", why=why, fix=fix, key="script.program")


def begins_anew(config: Config) -> str:
    """Say that a script which was interrupted has nothing to go on from, as far as that can be told; else nothing."""
    script = config.script
    launch = config.launch
    if script is None or not launch.requeue or launch.on_restart is not None or _knows_us(config):
        return ""
    if "run" in named_in(script.arguments):  # it may look there by itself
        return ""
    what = f"Note: nothing says where {script.name} goes on after a time limit or a preemption, so it would begin anew."
    return f"{what} If it can resume: launch.on_restart='--resume {{run}}/last.pt' is added from the second start on."


def refuse_script(config: Config, what: str) -> None:
    """Raise UserError for something that a script's run does not have: ``what``, a command or a flag."""
    if config.script is not None:
        why = "What a script trains, saves and measures, only the script knows."
        fix = f"Give {config.script.name} arguments of its own for it, behind `--`."
        raise UserError(f"{what} is not for a run of a script.", why=why, fix=fix)
