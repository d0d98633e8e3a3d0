"""Presets and site profiles: the files that names stand for."""

import itertools
import os
import re
from pathlib import Path

from trainkit.common import fileio
from trainkit.common.errors import UserError, unknown

PACKAGED = fileio.folder("configs")
OWN = Path("configs")
"""The user's own, in the folder where the command is given; they come before the packaged ones."""


def find_preset(preset: str) -> Path:
    """The YAML file of a preset name, a path, or a run folder."""
    if not preset.strip():
        what = "The name of the preset is empty."
        why = "A variable of the shell may be unset."
        raise UserError(what, why=why, fix="For example python -m jobs.submit ddp.")
    given = Path(preset).expanduser()  # os.path takes names that are too long for a file, too: a token, by mistake
    named = presets_named(preset)
    if os.path.isfile(given / "config.yaml"):
        if named:
            why = f"Both exist: {named[0]} and {given.absolute()}."
            fix = f"Give the path of one: ./{preset} is the run."
            raise UserError(f"'{preset}' is both a preset and a run.", why=why, fix=fix)
        return given / "config.yaml"
    if given.suffix in (".yaml", ".yml"):
        if os.path.isfile(given):
            return given
        raise UserError(f"No file {preset}.", why=f"It is not in {Path.cwd()}.", fix="Check the path.")
    if named:
        return named[0]
    if os.path.isdir(given):
        what = f"{preset} is not a run folder, or an incomplete one."
        raise UserError(what, why="It has no config.yaml.", fix="Give a preset, a YAML file, or a run folder.")
    known = sorted(preset_descriptions(), key=lambda name: ("/" in name, name))
    raise unknown("preset", preset, known, otherwise="Use one of them, or the path of a YAML file.")


def preset_descriptions() -> dict[str, str]:
    """Every preset that can be named here, the user's own first, with the first sentence of its comment."""
    found: dict[str, str] = {}
    for pattern in ("*.yaml", "recipes/*.yaml"):
        for folder in (OWN, PACKAGED):
            for file in sorted(folder.glob(pattern)):
                found.setdefault(str(file.relative_to(folder).with_suffix("")), _about(file))
    return found


def _about(file: Path) -> str:
    try:
        lines = fileio.read_text(file, follow=True).splitlines()
    except OSError:  # which loading it says
        return ""
    text = ""
    for line in itertools.takewhile(lambda line: line.startswith("#"), lines):
        if "yaml-language-server" not in line:
            text += " " + line[1:].strip()
    return re.split(r"(?<=[.])\s", text.strip(), maxsplit=1)[0].removesuffix(".")


def presets_named(name: str) -> list[Path]:
    """The files of the presets of that name, the first of which counts; of a path none."""
    if name.startswith(("/", "./", "../", "~")):
        return []
    return list(filter(os.path.isfile, (OWN / f"{name}.yaml", PACKAGED / f"{name}.yaml")))


def find_profile(cluster: str) -> Path:
    """The file of a site profile: a name in a folder ``configs/clusters``, or a path."""
    given = Path(cluster).expanduser()
    if given.suffix in (".yaml", ".yml") and os.path.isfile(given):
        return given
    named = presets_named(f"clusters/{cluster}")
    if named:
        return named[0]
    known = sorted(file.stem for file in [*OWN.glob("clusters/*.yaml"), *PACKAGED.glob("clusters/*.yaml")])
    otherwise = "Write configs/clusters/NAME.yaml, or give the path of a file."
    raise unknown("cluster profile", cluster, known, otherwise=otherwise)
