"""What is imported is declared, what is declared is imported, and nobody is told to install a stranger's package."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1]
MODULES = {
    "detect-secrets": "detect_secrets", "nvidia-ml-py": "pynvml", "pillow": "PIL", "pyyaml": "yaml",
    "scikit-learn": "sklearn",
}  # fmt: skip
WITH_ANOTHER = {
    "base58": "hivemind",
    "scipy": "sklearn",
    "fsspec": "torch",
    "huggingface_hub": "timm",
    "msgpack": "hivemind",
    "multiaddr": "hivemind",
}
"""Modules that come with a package that is declared, and must be the one that it works with."""
BY_NAME = {"sklearn"}  # trainkit/data/digits.py looks for its file without importing it
OF_COLAB = {"google", "IPython"}  # a notebook's own


def declared() -> set[str]:
    """Modules of the dependencies and of the extras for users."""
    text = (PROJECT / "pyproject.toml").read_text("utf-8")
    listed = re.search(r"^dependencies = \[\n(.*?)^\]", text, re.DOTALL | re.MULTILINE)
    assert listed
    names = re.findall(r'^    "([\w-]+)>=[\d.]+[";]', listed[1], re.MULTILINE)
    assert len(names) == len([line for line in listed[1].splitlines() if line.strip().startswith('"')])
    return {MODULES.get(name, name) for name in names}


def imported() -> dict[str, str]:
    """Modules of others -> a file that imports them, at its top or in a function."""
    found: dict[str, str] = {}
    for file in sorted(file for room in ("jobs", "trainkit") for file in (PROJECT / room).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level and node.module:
                names = [node.module]
            found |= {name.partition(".")[0]: str(file.relative_to(PROJECT)) for name in names}
    ours = {*sys.stdlib_module_names, "jobs", "trainkit"}
    return {name: file for name, file in found.items() if name not in ours}


def test_what_is_imported_is_declared_with_a_lower_bound() -> None:
    names = declared()
    assert set(WITH_ANOTHER.values()) <= names
    allowed = names | WITH_ANOTHER.keys() | OF_COLAB
    assert {name: file for name, file in imported().items() if name not in allowed} == {}


def test_what_is_declared_is_imported() -> None:
    assert declared() - imported().keys() == BY_NAME


def test_no_text_tells_anybody_to_install_a_name_that_is_not_ours() -> None:
    files = subprocess.check_output(["git", "ls-files", "-z"], cwd=PROJECT, text=True).split("\0")
    kinds = (".md", ".py", ".ipynb", ".yaml", ".toml", ".sbatch", ".sh", ".json")
    texts = {name: (PROJECT / name).read_text("utf-8") for name in files if name.endswith(kinds)}
    assert {"README.md", "jobs/notebooks/join_colab.ipynb", "trainkit/checkpoint/store.py"} <= texts.keys()
    named = re.compile(r"""(?:pip|uv|pipx)["', ]+install\b[^\n|&;#`]*?[\s"']trainkit(?:\[|[\s"'`<>=]|$)|trainkit\[\w""")
    told = {name: match[0] for name, text in texts.items() if (match := named.search(text))}
    assert told.keys() <= {"tests/test_declared.py"}
    assert named.search("pip install 'trainkit" + "[s3]'")
    assert named.search("pip install --upgrade " + "trainkit")
    assert not named.search("pip install -e '.[s3]'")
