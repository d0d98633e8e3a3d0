"""Errors for users: three lines, an exit code, and settings that exist."""

import ast
import pickle
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from trainkit.common.errors import (
    RefusedError,
    RunFailedError,
    SchedulerError,
    TrainkitError,
    UserError,
    did_you_mean,
    error_from_json,
)
from trainkit.common.process import NoAnswer
from trainkit.config.schema import SECTIONS, ImpossibleError, PluginSection, field_of


def test_an_error_is_three_lines_what_why_and_fix_as_far_as_they_are_known() -> None:
    assert str(UserError("No x.", why="It is gone.", fix="Make one.")) == "No x.\n  why: It is gone.\n  fix: Make one."
    assert str(UserError("No x.", fix="Make one.")) == "No x.\n  fix: Make one."


@pytest.mark.parametrize(
    ("kind", "code"), [(UserError, 2), (RefusedError, 3), (SchedulerError, 4), (RunFailedError, 1), (TrainkitError, 1)]
)
def test_every_kind_has_its_exit_code_and_is_whole_in_another_process(kind: type[TrainkitError], code: int) -> None:
    there = pickle.loads(pickle.dumps(kind("what", why="why", fix="fix", key="optim.lr")))
    assert (type(there), there.exit_code) == (kind, code)
    assert (there.what, there.why, there.fix, there.key) == ("what", "why", "fix", "optim.lr")


@pytest.mark.parametrize(("kind", "told"), [(ImpossibleError, UserError), (NoAnswer, SchedulerError)])
def test_a_finer_kind_has_the_same_exit_code_on_another_rank(
    kind: type[TrainkitError], told: type[TrainkitError]
) -> None:
    there = error_from_json(kind("what", why="why", fix="fix", key="optim.lr").to_json())
    assert (type(there), str(there)) == (told, "what\n  why: why\n  fix: fix")


@pytest.mark.parametrize(
    ("name", "known", "near"),
    [
        ("optm", ["model", "optim"], "optim"), ("zzz", ["model", "optim"], ""),
        # What all names have in common makes none of them near.
        ("--gpus", ["--gres", "--mem", "-h"], ""), ("--node", ["--nodes", "-N"], "--nodes"),
        ("model.lr", ["model.norm", "model.name"], ""), ("model.nrm", ["model.norm", "model.depth"], "model.norm"),
    ],
)  # fmt: skip
def test_the_nearest_name_is_suggested_where_one_is_near(name: str, known: list[str], near: str) -> None:
    expected = f"Did you mean '{near}'?" if near else "Look it up."
    assert did_you_mean(name, known, otherwise="Look it up.") == expected


FILES = [file for room in ("trainkit", "jobs") for file in Path(__file__).parents[1].joinpath(room).rglob("*.py")]


def texts(tree: ast.AST) -> Iterator[str]:
    """What a file says to somebody: its strings, without those that document it."""
    documents = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documents:
            yield node.value


def options_in(room: str) -> set[str]:
    """Names of the keyword-only arguments of functions there, and of fields of classes: a plugin's options are among
    them."""
    found = set()
    for file in FILES:
        if room not in file.parts:
            continue
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.FunctionDef):
                found |= {argument.arg for argument in node.args.kwonlyargs}
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found.add(node.target.id)
    return found


@pytest.mark.nightly
def test_every_setting_that_a_text_tells_somebody_to_give_exists() -> None:
    written = re.compile(rf"\b({'|'.join(SECTIONS)})\.([a-z_0-9]+)=")
    rooms = {"strategy": "strategies", "data": "data", "model": "models", "task": "tasks"}
    open_ones = [name for name, section in SECTIONS.items() if issubclass(section, PluginSection)]
    options = {name: options_in(rooms[name]) if name in rooms else set() for name in open_ones}
    options["optim"] |= {"max_grad_norm"}  # of timm
    options["model"] |= {"pretrained", "pretrained_cfg_overlay", "dynamic_img_size", "weights"}  # timm's, torchvision's
    named = {
        (section, name)
        for file in FILES
        for text in texts(ast.parse(file.read_text("utf-8")))
        for section, name in written.findall(text)
    }
    assert ("train", "activation_checkpointing") in named, "nothing was looked at"
    assert {f"{s}.{n}" for s, n in named if field_of(f"{s}.{n}") is None and n not in options.get(s, ())} == set()


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("s3://KEY:SE/CRET@bucket/x is none", "s3://***@bucket/x is none"),
        ("https://me:pw@host/a and s3://k:s@b", "https://***@host/a and s3://***@b"),
        (
            "https://host/train-{0..9}.tar?X-Amz-Signature=abc&a=1",
            "https://host/train-{0..9}.tar?X-Amz-Signature=***&a=1",
        ),
        ("https://host/x?a=1&sig=abc%2F", "https://host/x?a=1&sig=***"),
        ("hf://datasets/me/pets@main", "hf://datasets/me/pets@main"),
        ("http://host:8080/x", "http://host:8080/x"),
        ("ssh me@login:runs", "ssh me@login:runs"),
    ],
)
def test_an_error_repeats_no_key_of_a_url(given: str, shown: str) -> None:
    error = UserError(given, why=given, fix=given)
    assert (str(error), error.args) == (f"{shown}\n  why: {shown}\n  fix: {shown}", (shown,))
