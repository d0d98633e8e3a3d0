"""What peers must have alike to train together: what is computed, and not how it is written down."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from trainkit.config.loading import load
from trainkit.data import build_data
from trainkit.data.base import Splits
from trainkit.data.loader import TensorSamples
from trainkit.errors import RefusedError
from trainkit.swarm import session
from trainkit.swarm.session import (
    code_facts,
    facts_of,
    installed,
    meaning_of,
    meeting_place,
    parameters_in,
    require_same,
)

CONFIG = load("hivemind").config

CODE = b'''
"""Doubles."""
@decorated(by=1)
class A(B):
    """A class."""

    def double(self, number, *more, key=2.0):  # a comment
        """Twice."""
        if (twice := 2 * number) > 5e-1:
            return f"{twice:>{key}} of {number!r}"
        with open("x") as file, other():
            yield from (a for a in file if a)
        match number:
            case [1, *rest]:
                return lambda: -key
'''


def test_comments_docstrings_and_layout_are_no_difference() -> None:
    bare = CODE.replace(b'"""Doubles."""\n', b"").replace(b"  # a comment", b"").replace(b'        """Twice."""\n', b"")
    wrapped = bare.replace(b"(a for a in file if a)", b"(\n  a\n  for a in file if a)").replace(b"5e-1", b"0.5")
    assert meaning_of(CODE) == meaning_of(bare) == meaning_of(wrapped)


@pytest.mark.parametrize(
    ("was", "becomes"),
    [
        (b"2 * number", b"3 * number"),
        (b"2 * number", b"2 + number"),
        (b"> 5e-1", b">= 5e-1"),
        (b"key=2.0", b"key=2"),
        (b"!r", b""),
        (b"-key", b"+key"),
        (b"by=1", b"by=-1"),
        (b'"x"', b'"y"'),
        (b"[1, *rest]", b"[1]"),
    ],
)
def test_whatever_changes_what_is_computed_is_a_difference(was: bytes, becomes: bytes) -> None:
    assert CODE.count(was) == 1
    assert meaning_of(CODE) != meaning_of(CODE.replace(was, becomes))


def test_every_version_of_python_reads_the_same_meaning() -> None:
    assert session._hash([meaning_of(CODE)]) == "214ea2466304"


@pytest.fixture
def package(tmp_path: Path) -> Path:
    for name in ("data/order", "models/net", "training/update", "training/deep/er", "report/page"):
        file = tmp_path / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f'"""{name}"""\nx = 1\n')
    (tmp_path / "swarm").mkdir()
    for name in ("exchange", "link", "messages", "sync", "doctor"):
        (tmp_path / "swarm" / f"{name}.py").write_text("x = 1\n")
    return tmp_path


@pytest.mark.parametrize(
    ("file", "differs"),
    [
        ("data/order", ["code of data"]),
        ("models/net", ["code of models"]),
        ("training/deep/er", ["code of training"]),
        ("training/new", ["code of training"]),
        ("swarm/sync", ["code of swarm"]),
        ("swarm/doctor", []),
        ("report/page", []),
    ],
)
def test_rooms_of_the_code_that_decide_what_is_computed_count(package: Path, file: str, differs: list[str]) -> None:
    before = code_facts(package, ())
    (package / f"{file}.py").write_text('"""New words."""\nx = 2\n')
    after = code_facts(package, ())
    assert [key for key in after if after[key] != before[key]] == differs


def test_the_files_that_are_looked_at_exist() -> None:
    found = code_facts(Path(session.__file__).parents[1], ())
    assert list(found) == ["code of data", "code of models", "code of tasks", "code of training", "code of swarm"]


def test_a_module_of_ones_own_that_the_run_names_counts(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    own = tmp_path / "mine_of_facts.py"
    own.write_text("size = 1\n")
    before = code_facts(package, ["mine_of_facts:build", "digits"])
    own.write_text("size = 1  # tried 3\n")
    assert code_facts(package, ["mine_of_facts:build", "digits"]) == before
    own.write_text("size = 3\n")
    after = code_facts(package, ["mine_of_facts:build", "digits"])
    assert [key for key in after if after[key] != before[key]] == ["code of mine_of_facts"]


def test_each_difference_is_told_with_both_values_and_a_remedy() -> None:
    theirs = {"torch": "2.6", "seed": "0", "data": "digits", "code of training": "ab12", "timm": "1.0.9"}
    ours = {"torch": "2.7", "seed": "0", "data": "digits, 9 classes", "code of training": "cd34"}
    with pytest.raises(RefusedError) as refused:
        require_same(theirs, ours)
    error = refused.value
    assert error.what == "This peer differs from the run in: code of training, data, timm, torch."
    assert error.why == (
        "code of training: cd34 here, ab12 in the run; data: digits, 9 classes here, digits in the run; "
        "timm: none here, 1.0.9 in the run; torch: 2.7 here, 2.6 in the run."
    )
    assert error.fix == (
        "Give data.root the folder of the very same data set. "
        "Use the creator's version of trainkit, and of code of one's own. Install timm 1.0.9, torch 2.6."
    )


def test_who_is_alike_is_welcome_and_meets_the_others() -> None:
    here, there = {"a": "1", "b": "2"}, {"b": "2", "a": "1"}
    require_same(here, there)
    assert meeting_place("run-1", here) == meeting_place("run-1", there)


@pytest.mark.parametrize("changed", [{"a": "1", "b": "3"}, {"a": "1"}, {"a": "1", "b": "2", "c": ""}])
def test_who_differs_would_look_for_the_others_elsewhere(changed: dict[str, str]) -> None:
    assert meeting_place("run-1", changed) != meeting_place("run-1", {"a": "1", "b": "2"})


@pytest.mark.parametrize(
    ("version", "same"),
    [("2.6.1", True), ("2.6.0+cpu", True), ("2.6.0+cu124", True), ("2.7.0", False), ("3.6.0", False)],
)
def test_a_third_digit_or_a_build_for_another_device_is_no_other_version(
    version: str, same: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: "2.6.0")
    before = installed()
    monkeypatch.setattr(metadata, "version", lambda name: version)
    assert (installed() == before) == same


def net(width: int = 4, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.Linear(width, 10))


@pytest.fixture(scope="module")
def splits() -> Splits:
    return build_data(CONFIG.data)


def other_samples(splits: Splits, images: Callable[[Tensor], Tensor], labels: Callable[[Tensor], Tensor]) -> Splits:
    train = splits.train
    assert isinstance(train, TensorSamples)
    return replace(splits, train=TensorSamples(images(train.images), labels(train.labels)))


def other_classes(splits: Splits) -> Splits:
    return replace(splits, info=replace(splits.info, class_names=tuple(reversed(splits.info.class_names))))


@pytest.mark.parametrize(
    ("seed", "model", "data", "differs"),
    [
        pytest.param(0, net, lambda splits: splits, [], id="the same run on another machine"),
        pytest.param(0, lambda: net(seed=1), lambda splits: splits, [], id="other weights: the swarm gives its own"),
        pytest.param(0, lambda: net(width=5), lambda splits: splits, ["model"], id="another shape"),
        pytest.param(0, lambda: net().double(), lambda splits: splits, ["model"], id="another type"),
        pytest.param(1, net, lambda splits: splits, ["seed"], id="another seed"),
        pytest.param(0, net, lambda splits: other_samples(splits, lambda x: x.flip(0), lambda y: y), ["data"]),
        pytest.param(0, net, lambda splits: other_samples(splits, lambda x: x, lambda y: (y + 1) % 10), ["data"]),
        pytest.param(0, net, lambda splits: other_samples(splits, lambda x: x[:-1], lambda y: y[:-1]), ["data"]),
        pytest.param(0, net, other_classes, ["data"], id="other classes"),
    ],
)
def test_seed_shapes_and_samples_must_be_alike_and_weights_need_not(
    splits: Splits,
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
    model: Callable[[], nn.Module],
    data: Callable[[Splits], Splits],
    differs: list[str],
) -> None:
    monkeypatch.setattr(session, "code_facts", lambda package, plugins: {})  # alike here
    before = facts_of(CONFIG, splits, net())
    after = facts_of(CONFIG.model_copy(update={"seed": seed}), data(splits), model())
    assert [key for key in before if before[key] != after[key]] == differs
    assert parameters_in(before) == sum(parameter.numel() for parameter in net().parameters())


@pytest.mark.parametrize("text", ["", "many parameters", "-5 parameters"])
def test_a_number_of_parameters_that_is_none_is_nought(text: str) -> None:
    assert parameters_in({"model": text}) == 0
