"""Fixes: the command to give where a run was started, and the settings that the advice of an error changes."""

import re
import shlex
from itertools import islice, pairwise

from trainkit.common import fileio, jsonl
from trainkit.config.script import SECTIONS_OF_SCRIPTS
from trainkit.diagnosis.rank_log import WORDS
from trainkit.run.folder import RunDir
from trainkit.run.history import history_of

TO_FILL_IN = "..."
"""Stands for a value that only the user knows; every setting that can be meant refuses it."""


def without_foreign_settings(command: str) -> str:
    """Return the command for a script without settings that mean nothing to one, which would be refused."""
    words = []
    for word in command.split(" "):
        section, _, rest = word.partition(".")
        is_setting = re.fullmatch(r"[a-z_]+=.*", rest) is not None
        if not is_setting or section in SECTIONS_OF_SCRIPTS:
            words.append(word)
    return " ".join(words)


def on_every_machine(run: RunDir, command: str) -> str:
    """The command to give on every machine of a run that `jobs.launch` started on several; else the same command.

    Args:
        command: may resume the run by ``jobs.resume`` or start it anew by ``jobs.submit``.
    """
    submission = history_of(run).submission
    nodes = fileio.read_object(run.plan).get("nodes")
    typed = fileio.read_object(run.manifest).get("command")
    if submission is None or submission.executor != "launch" or not jsonl.is_whole(nodes) or nodes < 2:
        return command
    # `NCCL_DEBUG=INFO python -m jobs.resume RUN`: variables, or `env -u NAME`, go before the command of each machine.
    before, _, after = command.partition("python -m jobs.")
    verb = after.partition(" ")[0]
    if not isinstance(typed, list) or "jobs.launch" not in typed or verb not in ("resume", "submit"):
        return command
    words, options = _words_and_options([str(word) for word in typed[typed.index("jobs.launch") + 1 :]])
    if verb == "resume":
        words = [str(run.path)]
        settings = []
    else:
        settings = [word for word in shlex.split(after)[2:] if "=" in word]
    return before + shlex.join(["python", "-m", "jobs.launch", *words, *options, *settings])


def _words_and_options(typed: list[str]) -> tuple[list[str], list[str]]:
    """Split what was typed after `jobs.launch`; without the options that a further start gets anew."""
    words = list[str]()
    options = list[str]()
    rest = iter(typed)
    for word in rest:
        if not word.startswith("-"):
            words.append(word)
            continue
        option = [word]
        if "=" not in word and word != "--allow-code":
            option += islice(rest, 1)
        if word.partition("=")[0] not in ("--run-dir", "--master-port"):
            options += option
    return words, options


def settings_of(what: str, fix: str) -> list[str]:
    """``section.key=value`` of the change that ``fix`` asks for, the first one where it offers several.

    A setting that it names without a value gets its default where it is to be left out, else ``...``; so does the one
    that ``what`` complains of. Empty where the words name no setting: the machine or the data is to be mended then.
    """
    from trainkit.config.schema import SECTIONS

    key = rf"(?<![\w.])(?P<section>{'|'.join(SECTIONS)})\.(?P<key>(?!py\b)[a-z_][a-z0-9_]*)"
    advice = WORDS["example"].split(fix)[0]
    given = _first_way(advice, key)
    if given:
        return given
    left_out = re.search(f"(?:[Ll]eave (?:out )?|[Oo]mit ){key}", advice)
    if left_out is not None and left_out["key"] in SECTIONS[left_out["section"]].model_fields:
        default = str(SECTIONS[left_out["section"]].model_fields[left_out["key"]].default)
        text = {"None": "null", "True": "true", "False": "false"}.get(default, default)
        return [f"{left_out['section']}.{left_out['key']}={text}"]
    named = re.compile(rf"{key}\b(?!\.py\b)")
    match = named.search(fix) or named.search(what)
    return [f"{match['section']}.{match['key']}={TO_FILL_IN}"] if match else []


def _first_way(advice: str, key: str) -> list[str]:
    """The settings with values that an advice names, up to where another way begins."""
    value = r"(?P<value>\[(?:\"[^\"]*\"|[^\]\"])*\]|[^\s,;`]+)"
    found = list(re.finditer(rf"{key}=(?![A-Z_]+\.?(?:[\s,;`]|$)){value}", advice))
    chosen = found[:1]
    for before, after in pairwise(found):
        if advice[before.end() : after.start()].strip() not in ("", "and"):
            break
        chosen.append(after)
    return [f"{match['section']}.{match['key']}={match['value'].rstrip('.')}" for match in chosen]
