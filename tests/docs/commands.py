"""Reads the commands of a page without running them: flags by the command's own parser, settings by loading."""

import argparse
import importlib
import importlib.util
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from tests import readme
from trainkit.common.errors import TrainkitError
from trainkit.config.loading import load
from trainkit.config.presets import presets_named
from trainkit.config.script import split

PROJECT = readme.README.parent
OTHERS = {"python3", "source", "pip", "docker", "eval", "sinfo", "[", "ruff", "mypy", "pytest"}
"""Programs whose flags are not ours to know."""


def inline(page: Path) -> Iterator[str]:
    """Commands in the text of a page, without those that leave something out."""
    text = re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.DOTALL)
    for found in re.findall(r"`([^`]+)`", text):
        if re.search(r"-m (jobs|tests)\.[a-z]|^slurm/devcluster |^trainkit [a-z]+ ", found) and "..." not in found:
            yield " ".join(found.split())


def mistake_in(line: str) -> str:
    """What is wrong with a command: its verb, a flag, a setting, a file that it names; empty if nothing is."""
    try:
        if (arguments := _understood(line)) is not None:
            _load_settings(arguments)
    except (TrainkitError, ImportError, AssertionError) as error:
        return str(error) or repr(error)
    return ""


def _understood(line: str) -> argparse.Namespace | None:
    """What a command understands of a line; None for a program of others. Raises UserError as the command would."""
    words = shlex.split(line.replace(".venv/bin/", ""))
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words = words[1:]
    if words[0] == "trainkit":
        words = ["python", "-m", ".".join(["jobs", *words[1:2]]), *words[2:]]
    if words[0] == "torchrun":
        words = ["python", *words[words.index("-m") :]]
    if words[0] == "sbatch":
        (script,) = (number for number, word in enumerate(words) if word.endswith(".sbatch"))
        assert (PROJECT / words[script]).is_file(), line
        words = ["python", "-m", "jobs.train", *words[script + 1 :]]
    if words[0] == "slurm/devcluster":
        assert re.search(rf"^ +{words[1]}\b", (PROJECT / words[0]).read_text("utf-8"), re.MULTILINE), line
        return None
    if words[0] in OTHERS:
        return None
    assert words[0] == "python", line
    if words[1] == "-c" or words[2] in ("jobs", "pip", "venv"):
        return None
    if not words[2].startswith("jobs."):
        assert importlib.util.find_spec(words[2]), line
        return None
    module, words = importlib.import_module(words[2]), split(words[3:])[0]  # what follows `--` is a script's
    of_a_word = {name: found.parser for name, found in getattr(module, "VERBS", {}).items()}
    parser = of_a_word[words.pop(0)]() if words and words[0] in of_a_word else module.parser()
    found: argparse.Namespace = parser.parse_intermixed_args(words)
    return found


def _load_settings(arguments: argparse.Namespace) -> None:
    """Load the preset with the settings of a command. Raises UserError for one that does not exist."""
    given = vars(arguments)
    words = [*map(str, given.get("words") or ()), *(given.get("overrides") or ())]
    settings = [word for word in words if "=" in word]
    swept = [text for text in given.get("sweep") or () if "." in text.partition("=")[0]]  # others vary placeholders
    settings += [re.split(r",|\.\.", text)[0] for text in swept]
    named = [str(given[name]) for name in ("preset", "run") if given.get(name)] + words
    if named and presets_named(named[0]):
        load(named[0], settings, env={})
    elif settings:
        load("ddp", settings, env={})
