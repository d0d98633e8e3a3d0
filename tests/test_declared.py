"""What is imported is declared and tried, what is declared is imported, and nobody is told to install a stranger's."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tests.versions.__main__ import RESOLUTIONS, kept

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
    "markupsafe": "jinja2",
    "msgpack": "hivemind",
    "multiaddr": "hivemind",
    "pydantic_core": "pydantic",
}
"""Modules that come with a package that is declared, and must be the one that it works with."""
OF_COLAB = {"google", "IPython"}  # a notebook's own
OF_ROCM = {"amdsmi"}  # fits one version of AMD's driver only, with which it comes

OF_EXTRAS = {
    "aiohttp": ("https", "aiohttp"),
    "apprise": ("notify", "apprise"),
    "mlflow": ("mlflow", "mlflow-skinny"),
    "onnxruntime": ("onnx", "onnxruntime"),
    "optuna": ("sweep", "optuna"),
    "pyarrow": ("hf", "pyarrow"),
    "trackio": ("trackio", "trackio"),
}
"""Modules that only an extra brings, with that extra, which the error names without it, and its package."""


def requirements(table: str) -> list[Requirement]:
    """What pyproject.toml lists there, each with its lower bound."""
    text = (PROJECT / "pyproject.toml").read_text("utf-8")
    listed = re.search(rf"^{table} = \[\n(.*?)^\]", text, re.DOTALL | re.MULTILINE)
    assert listed
    found = [Requirement(item) for item in re.findall(r'^    "([^"]+)",', listed[1], re.MULTILINE)]
    assert len(found) == len([line for line in listed[1].splitlines() if line.strip().startswith('"')])
    return found


def lowest(requirement: Requirement) -> Version:
    """Its lower bound."""
    (bound,) = (item.version for item in requirement.specifier if item.operator == ">=")
    return Version(bound)


def declared() -> set[str]:
    """Modules of the dependencies."""
    return {MODULES.get(item.name, item.name) for item in requirements("dependencies") if lowest(item)}


def tried(name: str) -> dict[str, set[Version]]:
    """Package -> its versions in a set that is tried, which may be several: one for each range of Pythons."""
    versions: dict[str, set[Version]] = {}
    for line in kept(name).read_text("utf-8").splitlines():
        package, _, version = line.partition(" ")[0].partition("==")
        versions.setdefault(package, set()).add(Version(version))
    return versions


def imported() -> dict[str, str]:
    """Modules of others -> a file that imports them, at its top or in a function."""
    found: dict[str, str] = {}
    for file in sorted(file for room in ("jobs", "trainkit") for file in (PROJECT / room).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level and node.module:
                names = [node.module]
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("find_spec"):  # a file of it is read
                names += [str(word.value) for word in node.args if isinstance(word, ast.Constant)]
            found |= {name.partition(".")[0]: str(file.relative_to(PROJECT)) for name in names}
    ours = {*sys.stdlib_module_names, "jobs", "trainkit"}
    return {name: file for name, file in found.items() if name not in ours}


@pytest.mark.nightly
def test_what_is_imported_is_declared_with_a_lower_bound() -> None:
    names = declared()
    assert set(WITH_ANOTHER.values()) <= names
    allowed = names | WITH_ANOTHER.keys() | OF_COLAB | OF_ROCM | OF_EXTRAS.keys()
    assert {name: file for name, file in imported().items() if name not in allowed} == {}


def test_what_an_extra_brings_is_declared_with_a_lower_bound() -> None:
    text = (PROJECT / "pyproject.toml").read_text("utf-8")
    for extra, package in OF_EXTRAS.values():
        assert re.search(rf'^{extra} = \[.*"{package}>=[\d.]+"', text, re.MULTILINE), package


@pytest.mark.nightly
def test_what_is_declared_is_imported() -> None:
    assert declared() - imported().keys() == set()


@pytest.mark.parametrize("table", ["dependencies", "dev", "docs"])
def test_the_lowest_versions_that_are_declared_are_those_tried(table: str) -> None:
    found = tried("lowest")
    assert {item.name: {lowest(item)} for item in requirements(table)} == {
        item.name: found[item.name.lower()] for item in requirements(table)
    }


@pytest.mark.parametrize("name", RESOLUTIONS)
def test_whatever_is_tried_may_be_installed(name: str) -> None:
    for item in (*requirements("dependencies"), *requirements("dev")):
        assert {version for version in tried(name)[item.name.lower()] if version not in item.specifier} == set()


def test_no_text_tells_anybody_to_install_a_name_that_is_not_ours() -> None:
    files = subprocess.check_output(["git", "ls-files", "-z"], cwd=PROJECT, text=True).split("\0")
    kinds = (".md", ".py", ".ipynb", ".yaml", ".toml", ".sbatch", ".sh", ".json")
    texts = {name: (PROJECT / name).read_text("utf-8") for name in files if name.endswith(kinds)}
    assert {"README.md", "jobs/notebooks/join_colab.ipynb", "trainkit/checkpoint/remote.py"} <= texts.keys()
    installing = r"""(?:pip|uv|pipx)["', ]+install\b[^\n|&;#`]*?[ \t"']trainkit(?:\[|[\s"'`<>=]|$)"""
    named = re.compile(rf"{installing}|trainkit\[\w")
    told = {name: match[0] for name, text in texts.items() if (match := named.search(text))}
    assert told.keys() <= {"tests/test_declared.py"}
    assert named.search("pip install 'trainkit" + "[s3]'")
    assert named.search("pip install --upgrade " + "trainkit")
    assert not named.search("pip install -e '.[s3]'")
