"""Where the files are that come with the code: presets, recipes, site profiles, the schema, the sbatch templates."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def folder(name: str) -> Path:
    """The folder ``configs`` or ``slurm``: inside the package in a wheel, beside it in a checkout or a snapshot."""
    inside = _PACKAGE / name
    return inside if inside.is_dir() else _PACKAGE.parent / name
