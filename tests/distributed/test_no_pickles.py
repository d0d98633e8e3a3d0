"""Nothing that another process has sent or written is unpickled: not in our sources, and not in what we call."""

import ast
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch.distributed.distributed_c10d as c10d

from tests.rank_functions import run_ranks, train_run
from trainkit.cluster.ranks import RankEnv

PROJECT = Path(__file__).resolve().parents[2]
# Reads CIFAR's pickles, without running what they hold.
PLAIN = "trainkit/data/datasets/cifar10.py"
# Runs the program that its own launcher, at the other end of a pipe, would otherwise have given to a new Python.
PROGRAM = "trainkit/recovery/nursery.py"


# Modules that turn bytes into any object there is, and with it into any call; and functions that do the same.
_PICKLERS = ("pickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "jsonpickle")
_CALLS = ("eval", "exec", "yaml.unsafe_load", "yaml.full_load")
_OF_OBJECTS = re.compile(r"(broadcast|(all_)?gather|scatter|send|recv).*_object(s|_list)?$|ForkingPickler|Unpickler")
# What a source must hold to have any of them: to parse all sources takes seconds.
_WORDS = re.compile(
    rf"\b({'|'.join(_PICKLERS)}|eval|exec|unsafe_load|full_load|load|broadcast_from_rank0)\b|_object|[Pp]ickler"
)


def unpickles(source: str) -> Iterator[str]:
    """Find what would unpickle in a source."""
    if not _WORDS.search(source):
        return
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
            yield from (name for name in names if name.split(".")[0] in _PICKLERS)
        name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
        if _OF_OBJECTS.match(name):
            yield name
        if isinstance(node, ast.Call):
            function = ast.unparse(node.func)
            given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            if function in _CALLS:
                yield function
            if function == "torch.load" and given.get("weights_only") != "True":
                yield "torch.load without weights_only=True"
            if "broadcast_from_rank0" in given:  # torch sends names and shapes pickled
                yield "broadcast_from_rank0"


@pytest.mark.parametrize(
    "source",
    [
        "import pickle", "from pickle import loads", "c10d.broadcast_object_list(box)", "dist.all_gather_object(a, b)",
        "torch.load(file)", "torch.load(file, weights_only=False)", "StateDictOptions(broadcast_from_rank0=True)",
        "eval(text)",
    ],
)  # fmt: skip
def test_a_source_that_unpickles_is_found(source: str) -> None:
    assert list(unpickles(source))


def test_nothing_of_ours_unpickles() -> None:
    files = [file for package in ("jobs", "trainkit") for file in sorted((PROJECT / package).rglob("*.py"))]
    assert len(files) > 50
    found = {file.relative_to(PROJECT).as_posix(): list(unpickles(file.read_text("utf-8"))) for file in files}
    assert {name for name, what in found.items() if what} == {PLAIN, PROGRAM}
    assert found[PROGRAM] == ["exec"]


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise AssertionError("something was sent as a pickle, or unpickled")


def _train_without_pickles(env: RankEnv, folder: Path) -> list[str]:
    for name in [name for name in vars(c10d) if name.endswith(("_object", "_object_list")) or "_to_object" in name]:
        setattr(c10d, name, _refuse)
        if hasattr(__import__("torch").distributed, name):
            setattr(__import__("torch").distributed, name, _refuse)
    pickle.loads = pickle.load = pickle.Unpickler = _refuse  # type: ignore[assignment, misc]
    c10d._unpickler = _refuse  # type: ignore[assignment]
    endings = []
    for preset in ("ddp", "fsdp"):
        settings = ("train.max_steps=4", "train.grad_clip_norm=1.0")
        endings.append(train_run(env, folder / preset, preset, settings, 2))
        endings.append(train_run(env, folder / preset, preset, settings))
    return endings


@pytest.mark.nightly
def test_ddp_and_fsdp_train_save_and_restore_without_a_single_pickle(tmp_path: Path) -> None:
    assert run_ranks(2, _train_without_pickles, tmp_path) == [["preempted", "finished"] * 2] * 2
