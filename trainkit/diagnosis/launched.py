"""The commands that go on with a run, or start it again, where `jobs.launch` has started it on several machines."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from trainkit import reading
from trainkit.records.history import life_of
from trainkit.records.rundir import RunDir

EVERYWHERE = "On each of its machines, with its own --node-rank and one secret for all:"
_LEFT_OUT = ("--run-dir", "--master-port")
"""Options that a further start gets anew."""


def on_every_machine(run: RunDir, command: str) -> str:
    """A command of one machine as it must be given on every machine of the run; as it was where there is only one.

    Args:
        command: may queue the run again by ``jobs.resume`` or start it anew by ``jobs.submit``.
    """
    submission = life_of(run).submission
    nodes = reading.read_object(run.plan).get("nodes")
    typed = reading.read_object(run.manifest).get("command")
    one = submission is None or submission.executor != "launch" or not reading.is_whole(nodes) or nodes < 2
    if one or not isinstance(typed, list) or "jobs.launch" not in typed:
        return command
    # `NCCL_DEBUG=INFO python -m jobs.resume RUN`: variables, or `env -u NAME`, go before the command of each machine.
    before, verb, after = command.partition("python -m jobs.")
    name = after.partition(" ")[0]
    if not verb or name not in ("resume", "submit"):
        return command
    options, words = _split([str(word) for word in typed[typed.index("jobs.launch") + 1 :]])
    if name == "resume":
        return before + shlex.join(["python", "-m", "jobs.launch", str(run.path), *options])
    settings = [word for word in shlex.split(after)[2:] if "=" in word]
    return before + shlex.join(["python", "-m", "jobs.launch", *words, *options, *settings])


def _split(typed: Sequence[str]) -> tuple[list[str], list[str]]:
    """Options with their values, without those that are given anew; and the preset with its settings."""
    options: list[str] = []
    words: list[str] = []
    rest = list(typed)
    while rest:
        word = rest.pop(0)
        if not word.startswith("-"):
            words.append(word)
            continue
        both = [word, rest.pop(0)] if "=" not in word and rest and word != "--allow-code" else [word]
        if word.partition("=")[0] not in _LEFT_OUT:
            options += both
    return options, words
