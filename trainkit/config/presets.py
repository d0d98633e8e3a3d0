"""Presets and site profiles: where their files are, what they extend, and the layer of values that each of them is."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from trainkit import packaged
from trainkit.config import yaml
from trainkit.config.layers import Layer, Source, flatten, merge
from trainkit.config.schema import SECTIONS
from trainkit.errors import UserError, did_you_mean

PACKAGED = packaged.folder("configs")
OWN = Path("configs")
"""The user's own, in the folder where the command is given; they come before the packaged ones."""
_LONGEST_CHAIN = 20
"""Files that extend one another."""
SITE = "site"
"""The section of a profile that holds what is known of the site."""


def find_preset(preset: str) -> Path:
    """The YAML file of a preset name, a path, or a run folder."""
    if not preset.strip():
        raise UserError(
            "The name of the preset is empty.",
            why="A variable of the shell may be unset.",
            fix="For example python -m jobs.submit ddp.",
        )
    given = Path(preset).expanduser()  # os.path takes names that are too long for a file, too: a token, by mistake
    folders = [folder for folder in (OWN, PACKAGED) if folder.is_dir()]
    named = presets_named(preset)
    if os.path.isfile(given / "config.yaml"):
        if named:
            raise UserError(
                f"'{preset}' is a preset and a run.",
                why=f"There are {named[0]} and {given.absolute()}.",
                fix=f"Give the path of one of them: ./{preset} is the run.",
            )
        return given / "config.yaml"
    if given.suffix in (".yaml", ".yml"):
        if os.path.isfile(given):
            return given
        raise UserError(f"No file {preset}.", why=f"It is not in {Path.cwd()}.", fix="Check the path.")
    if named:
        return named[0]
    if os.path.isdir(given):
        raise UserError(
            f"{preset} is not a run folder, or only half of one.",
            why="It has no config.yaml.",
            fix="Give a preset, a YAML file, or a run folder.",
        )
    known = sorted({file.stem for folder in folders for file in folder.glob("*.yaml")})
    known += sorted({f"recipes/{file.stem}" for folder in folders for file in folder.glob("recipes/*.yaml")})
    raise UserError(
        f"Unknown preset '{preset}'.",
        why=f"There are: {', '.join(known)}.",
        fix=did_you_mean(preset, known, otherwise="Use one of them, or the path of a YAML file."),
    )


def presets_named(name: str) -> list[Path]:
    """The files of the presets of that name, the first of which counts; of a path none."""
    if name.startswith(("/", "./", "../", "~")):
        return []
    return [folder / f"{name}.yaml" for folder in (OWN, PACKAGED) if os.path.isfile(folder / f"{name}.yaml")]


def file_layer(path: Path, seen: tuple[Path, ...] = ()) -> Layer:
    """What a preset's file says, on top of what it extends. ``seen``: the files that extend it."""
    if path.resolve() in [item.resolve() for item in seen]:
        chain = " -> ".join(str(item) for item in (*seen, path))
        raise UserError(f"{path} extends itself.", why=chain, fix="Break the circle.")
    if len(seen) > _LONGEST_CHAIN:
        why = f"Each of {_LONGEST_CHAIN} files extends the next."
        raise UserError(f"{seen[0]} extends too many files.", why=why, fix="Write what they say into fewer.")
    values, lines = yaml.read(path)
    base: Layer = {}
    parent = values.pop("extends", None)
    if parent is not None:
        base = file_layer(_parent(path, parent, lines["extends"]), (*seen, path))
    own: Layer = {}
    for key, value in flatten({key: {} if _is_bare(key, value) else value for key, value in values.items()}):
        own[key] = (value, Source("file", f"{path}:{lines.get(key, 1)}"))
    return merge(base, own)


def files_of(path: Path) -> list[Path]:
    """A preset's file, and those that it extends, nearest first."""
    found = [path]
    while True:
        values, lines = yaml.read(found[-1])
        if values.get("extends") is None:
            return found
        parent = _parent(found[-1], values["extends"], lines["extends"])
        if parent.resolve() in [item.resolve() for item in found]:
            return found  # which `file_layer` says
        found.append(parent)


def _parent(path: Path, parent: Any, line: int) -> Path:
    """The file that ``path`` extends: beside it first, then as `find_preset` knows it.

    What extends its own name extends the packaged preset that it stands before.
    """
    if not isinstance(parent, str):
        raise UserError(
            f"extends={parent} is not valid (file {path}:{line}).",
            why="It must be the name of one preset.",
            fix="For example extends: ddp.",
        )
    name = parent if parent.endswith((".yaml", ".yml")) else f"{parent}.yaml"
    beside, packaged_one = path.parent / name, PACKAGED / name
    is_beside = os.path.isfile(beside)  # False for a name that no file can have
    if is_beside and beside.resolve() == path.resolve() and packaged_one.is_file():
        return packaged_one
    try:
        return beside if is_beside else find_preset(parent)
    except UserError as error:
        raise UserError(error.what, why=f"{error.why.removesuffix('.')} (file {path}:{line}).", fix=error.fix) from None


def _is_bare(key: str, value: Any) -> bool:
    # `optim:` with nothing but comments below it says nothing, rather than that there is no optimizer.
    return value is None and key in SECTIONS


def profile_layer(cluster: str) -> Layer:
    """What the site profile of that name, or in that file, says of a launch.

    What it knows of the site itself, below ``site:``, is no setting (`trainkit.cluster.site_facts`).
    """
    path = find_profile(cluster)
    values, lines = yaml.read(path)
    values.pop(SITE, None)
    layer: Layer = {}
    for key, value in flatten({key: {} if _is_bare(key, value) else value for key, value in values.items()}):
        if not key.startswith("launch.") or key == "launch.cluster":
            raise UserError(
                f"'{key}' does not belong into a cluster profile.",
                why=f"{path}:{lines.get(key, 1)}; a profile describes a site, so it holds launch.* only.",
                fix="Move it to a preset.",
            )
        layer[key] = (value, Source("cluster profile", f"{path}:{lines.get(key, 1)}"))
    return layer


def find_profile(cluster: str) -> Path:
    """The file of a site profile: a name in a folder ``configs/clusters``, or a path."""
    given = Path(cluster).expanduser()
    candidates = [given] if given.suffix in (".yaml", ".yml") else []
    candidates += [folder / "clusters" / f"{cluster}.yaml" for folder in (OWN, PACKAGED)]
    for path in candidates:
        if os.path.isfile(path):
            return path
    known = sorted(file.stem for folder in (OWN, PACKAGED) for file in folder.glob("clusters/*.yaml"))
    raise UserError(
        f"Unknown cluster profile '{cluster}'.",
        why=f"There are: {', '.join(dict.fromkeys(known)) or 'none'}.",
        fix=did_you_mean(cluster, known, otherwise="Write configs/clusters/NAME.yaml, or give the path of a file."),
    )
