"""The names of timm's and torchvision's models, read from their source.

Importing timm costs seconds of CPU; `submit` has half of one. A model is registered by a decorator above its function,
so that the files say what there is.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from trainkit import reading

_TIMM_MODEL = re.compile(r"^@register_model\b[^\n]*\n(?:@[^\n]*\n)*def (\w+)\(", re.MULTILINE)
_TIMM_RENAMED = re.compile(r"^register_model_deprecations\(__name__, \{(.*?)^\}\)", re.MULTILINE | re.DOTALL)
_TIMM_TAG = re.compile(r"""['"](\w+)\.(\w+)['"]\s*:""")
_TORCHVISION_MODEL = re.compile(r"^@register_model\(\)\n(?:@[^\n]*\n)*def (\w+)\(", re.MULTILINE)


@lru_cache(maxsize=1)
def timm_models() -> dict[str, tuple[str, ...]]:
    """timm's models and the tags of their pretrained weights; empty where timm is not installed."""
    tags: dict[str, list[str]] = {}
    names: set[str] = set()
    for source in _sources("timm"):
        if "register_model" not in source:
            continue
        names.update(_TIMM_MODEL.findall(source))
        for renamed in _TIMM_RENAMED.findall(source):
            names.update(re.findall(r"'([^']+)':", renamed))
        for name, tag in _TIMM_TAG.findall(source):
            tags.setdefault(name, []).append(tag)
    return {name: tuple(tags.get(name, ())) for name in sorted(names)}


@lru_cache(maxsize=1)
def torchvision_models() -> tuple[str, ...]:
    """torchvision's classification models; empty where torchvision is not installed."""
    return tuple(sorted({name for source in _sources("torchvision") for name in _TORCHVISION_MODEL.findall(source)}))


def _sources(package: str) -> Iterator[str]:
    spec = importlib.util.find_spec(package)  # finds, does not import: the package is a top-level one
    for folder in (spec.submodule_search_locations or []) if spec else []:
        # Files of subfolders are detection, segmentation and video models, or helpers.
        for file in sorted(Path(folder, "models").glob("*.py")):
            yield reading.read_text(file, follow=True)
