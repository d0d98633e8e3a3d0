"""Whatever has happened to a checkpoint, training goes on from the newest whole one and says what was wrong."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.checkpoint import reading
from tests.checkpoint.reading import DIST, flip
from trainkit.checkpoint import format
from trainkit.checkpoint.format import (
    LONGEST,
    BrokenCheckpointError,
    CheckpointManifest,
    FileFacts,
    checksum,
    file_name,
    parse,
)
from trainkit.checkpoint.save import Checkpoints, Restored
from trainkit.common.errors import UserError


def write(folder: Path, step: int, value: float = 0.0) -> Path:
    return reading.write(folder, step, {"model": {"w": torch.full((100,), value)}}, {"note": "hello"})


@pytest.mark.parametrize(
    ("best", "latest", "keep", "left"),
    [(2, 6, 3, [2, 4, 5, 6]), (None, 1, 2, [1, 5, 6])],  # after a fall back, later ones are newer by number only
)
def test_pruning_keeps_the_newest_and_what_best_and_latest_name(
    tmp_path: Path, best: int | None, latest: int, keep: int, left: list[int]
) -> None:
    for step in range(1, 7):
        write(tmp_path, step)
    for deleted in (1, 9):  # by a process that was killed
        left_over = tmp_path / f".step-{deleted:08d}.deleted"
        left_over.mkdir()
        (left_over / "model.safetensors").write_bytes(b"half")
    format.point(tmp_path, "latest", latest)
    if best is not None:
        format.point(tmp_path, "best", best)
    format.prune(tmp_path, keep)
    assert format.steps(tmp_path) == left
    assert not list(tmp_path.glob(".step-*"))


def test_names_and_numbers_stand_for_checkpoints(tmp_path: Path) -> None:
    for step in (3, 5, 8):
        write(tmp_path, step)
    format.point(tmp_path, "best", 3)
    format.point(tmp_path, "latest", 5)
    named = {which: format.resolve(tmp_path, which) for which in ("best", "latest", "8", "00005")}
    assert named == {"best": 3, "latest": 5, "8": 8, "00005": 5}
    (tmp_path / "best").unlink()
    assert format.resolve(tmp_path, "best") == 8


@pytest.mark.parametrize("step", [1, 7])  # a time limit saves at a step that the next attempt may pass by
def test_what_a_killed_save_left_is_removed_by_the_next(tmp_path: Path, step: int) -> None:
    left = tmp_path / f".step-{step:08d}.partial"
    left.mkdir(parents=True)
    (left / "model.safetensors").write_bytes(b"half")
    write(tmp_path, 1)
    assert format.steps(tmp_path) == [1]
    assert not left.exists()


def test_a_second_save_of_a_step_renews_what_is_said_of_it(tmp_path: Path) -> None:
    weights = write(tmp_path, 1) / "model.safetensors"
    before = weights.stat()
    reading.write(tmp_path, 1, {"model": {"w": torch.zeros(100)}}, {"note": "again"})
    assert format.verified(tmp_path, 1).state["note"] == "again"
    assert weights.stat().st_ino == before.st_ino  # never taken away


@pytest.mark.parametrize("broken", [False, True])
def test_other_weights_of_a_step_and_a_broken_checkpoint_are_replaced(tmp_path: Path, broken: bool) -> None:
    weights = write(tmp_path, 1, 1.0) / "model.safetensors"
    if broken:
        weights.unlink()
    write(tmp_path, 1, 2.0)
    assert reading.tensors(tmp_path)["w"][0] == 2


OLD, NEW = 1, 2


def make_model(value: float = 0.0) -> tuple[nn.Linear, torch.optim.Optimizer]:
    model = nn.Linear(2, 1)
    nn.init.constant_(model.weight, value)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.fixture
def two(tmp_path: Path) -> Path:
    """Two checkpoints of one model, of which the newer one is about to meet with an accident."""
    folder = tmp_path / "checkpoints"
    checkpoints = Checkpoints(folder, keep=5, dist=DIST)
    for step in (OLD, NEW):
        checkpoints.save(*make_model(step), step=step, state={"note": step})
    return folder


def edited(**changes: Any) -> Callable[[Path], None]:
    """Somebody edits state.json, and knows how to renew its checksum."""

    def edit(checkpoint: Path) -> None:
        body = json.loads((checkpoint / "state.json").read_text())
        body.pop("sha256")
        body.update(changes)
        (checkpoint / "state.json").write_text(json.dumps({**body, "sha256": checksum(body)}))

    return edit


def replaced(name: str, make: Callable[[Path], object]) -> Callable[[Path], None]:
    """Something else takes the place of a file of the checkpoint, or of its folder."""

    def replace(checkpoint: Path) -> None:
        (checkpoint / name).rename(checkpoint.parent / "outside")
        make(checkpoint / name)

    return replace


def text(content: str) -> Callable[[Path], None]:
    return replaced("state.json", lambda file: file.write_text(content))


def cut(name: str, size: int) -> Callable[[Path], None]:
    return lambda checkpoint: os.truncate(checkpoint / name, size)


def named_above(checkpoint: Path) -> None:
    """state.json names a file somewhere else, whose size and hash are right."""
    body = json.loads((checkpoint / "state.json").read_text())
    facts = body["files"].pop("model.safetensors")
    shutil.copy(checkpoint / "model.safetensors", checkpoint.parent / "elsewhere.safetensors")
    edited(files={**body["files"], "../elsewhere.safetensors": facts})(checkpoint)


def not_safetensors(checkpoint: Path) -> None:
    """Its hash is right; but it is no such file."""
    content = b"\xff" * 100
    (checkpoint / "model.safetensors").write_bytes(content)
    facts = {"bytes": 100, "sha256": hashlib.sha256(content).hexdigest()}
    body = json.loads((checkpoint / "state.json").read_text())
    edited(files={**body["files"], "model.safetensors": facts})(checkpoint)


def a_digit_changed(checkpoint: Path) -> None:
    file = checkpoint / "state.json"
    file.write_text(file.read_text().replace('"note": 2', '"note": 3'))


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "a bit flipped in the weights": (lambda c: flip(c / "model.safetensors"), "content of model.safetensors"),
    "weights cut short": (cut("model.safetensors", 50), "has 50 bytes instead of"),
    "weights missing": (replaced("model.safetensors", lambda file: None), "No such file or directory: /"),
    "weights are a link": (replaced("model.safetensors", lambda file: file.symlink_to("../outside")), "It is a link"),
    "weights are no safetensors": (not_safetensors, "not readable"),
    "the folder is a link": (replaced("", lambda folder: folder.symlink_to("outside")), "no folder"),
    "state.json is missing": (replaced("state.json", lambda file: None), "No such file"),
    "state.json is cut short": (cut("state.json", 40), "not readable"),
    "state.json is deep": (text("[" * 100_000), "not readable"),
    "state.json has a long number": (text('{"step": ' + "9" * 10_000 + ', "sha256": ""}'), ""),
    "state.json has no end": (text(" " * (LONGEST + 1)), "a file of this kind has at most"),
    "state.json holds NaN": (text('{"step": NaN, "sha256": ""}'), "has been changed"),
    "state.json has no checksum": (text('{"step": 2}'), "no checksum"),
    "a digit of state.json changed": (a_digit_changed, "has been changed"),
    "made by another version": (edited(format=0), "another version"),
    "of another step": (edited(step=7), "that of step 7"),
    "its step is huge": (edited(step=10**30), "has been changed"),
    "its files are a list": (edited(files=[]), "wrong fields"),
    "its files are odd": (
        edited(files={"model.safetensors": {"bytes": "1", "sha256": "x"}}),
        "does not describe model.safetensors",
    ),
    "it names no weights": (edited(files={}), "no model.safetensors"),
    "it names a file above": (named_above, "names a file"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_said_the_checkpoint_before_restored_and_the_next_whole(
    two: Path, capsys: pytest.CaptureFixture[str], fault: str
) -> None:
    damage, reason = FAULTS[fault]
    damage(format.path_of(two, NEW))
    model, optimizer = make_model()
    checkpoints = Checkpoints(two, keep=5, dist=DIST)
    restored = checkpoints.restore(model, optimizer)
    said = capsys.readouterr().err
    assert restored is not None
    assert (restored.step, restored.state) == (OLD, {"note": OLD})
    assert torch.equal(model.weight, make_model(OLD)[0].weight)
    assert "step-00000002 is broken" in said
    assert reason in said
    assert len(said.splitlines()) == 1
    checkpoints.best = NEW
    checkpoints.save(*make_model(NEW), step=NEW, state={})
    format.verified(two, NEW)
    assert (format.pointed(two, "latest"), format.pointed(two, "best")) == (NEW, NEW)


def test_where_no_checkpoint_is_whole_training_starts_anew(two: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (OLD, NEW):
        flip(format.path_of(two, step) / "model.safetensors")
    assert Checkpoints(two, keep=5, dist=DIST).restore(*make_model()) is None
    assert len(capsys.readouterr().err.splitlines()) == 2


def test_one_that_is_whole_but_of_no_use_is_passed_over_too(two: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def accept(restored: Restored) -> None:
        if restored.state["note"] == NEW:
            raise ValueError("it is not finite")

    restored = Checkpoints(two, keep=5, dist=DIST).restore(*make_model(), accept=accept)
    assert restored is not None
    assert restored.step == OLD
    assert "it is not finite" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("step", "says"),
    [(OLD, "step-00000001 is broken: the content of model.safetensors has changed"),
     (77, "step-00000077 is broken: No such file")],
)  # fmt: skip
def test_a_best_that_is_broken_or_gone_is_said_and_the_newest_whole_taken(
    two: Path, capsys: pytest.CaptureFixture[str], step: int, says: str
) -> None:
    flip(format.path_of(two, OLD) / "model.safetensors")
    model, _ = make_model()
    assert Checkpoints(two, keep=5, dist=DIST).load_weights(model, step, or_newest=True) == NEW
    assert torch.equal(model.weight, make_model(NEW)[0].weight)
    assert says in capsys.readouterr().err


def test_a_step_that_was_asked_for_by_number_is_not_replaced_by_another(two: Path) -> None:
    flip(format.path_of(two, OLD) / "model.safetensors")
    model, _ = make_model(9)
    with pytest.raises(UserError) as error:
        Checkpoints(two, keep=5, dist=DIST).load_weights(model, OLD)
    assert (error.value.why, error.value.fix) == ("the content of model.safetensors has changed.", "Use another: 2.")
    assert torch.equal(model.weight, make_model(9)[0].weight)


def a_folder(link: Path) -> None:
    shutil.copytree(link.parent / "step-00000001", link)
    link.with_name(f"{link.name}-0").mkdir()  # an earlier one


@pytest.mark.parametrize("name", ["latest", "best"])
@pytest.mark.parametrize(
    "make",
    [
        lambda link: None,
        a_folder,
        lambda link: link.write_text("step-00000001"),
        lambda link: link.symlink_to("step-00000009"),
        lambda link: link.symlink_to(link.parent / "step-00000001"),
        lambda link: link.symlink_to("../checkpoints/step-00000001"),
        lambda link: link.symlink_to("step-" + "9" * 200),
        lambda link: link.symlink_to(link.name),
        os.mkfifo,
    ],
    ids=["absent", "folder", "file", "dangling", "absolute", "winding", "huge", "circle", "pipe"],
)
def test_a_link_that_names_no_checkpoint_is_said_and_then_replaced(
    two: Path, capsys: pytest.CaptureFixture[str], name: str, make: Callable[[Path], object]
) -> None:
    (two / name).unlink(missing_ok=True)
    make(two / name)
    assert format.resolve(two, name) == NEW
    assert f"{name} does not name a checkpoint of this run. Taking the newest, of step 2." in capsys.readouterr().err
    checkpoints = Checkpoints(two, keep=5, dist=DIST)
    checkpoints.best = 3
    checkpoints.save(*make_model(3), step=3, state={})
    assert format.pointed(two, name) == 3
    if make is a_folder:
        assert f"has been moved to {name}-1" in capsys.readouterr().err
        assert (two / f"{name}-1" / "model.safetensors").is_file()


@pytest.mark.parametrize("which", ["9", "²", "٣", "-1", "1.0", "", "9" * 5000, "../2", "step-00000002"])
def test_what_is_no_step_is_refused_and_those_that_are_there_named(two: Path, which: str) -> None:
    with pytest.raises(UserError, match=r"No checkpoint[\s\S]*Steps with a checkpoint: 1, 2\."):
        format.resolve(two, which)


@pytest.mark.parametrize(
    "name", ["step-1", "step-000000002", "step-²²²²²²²²", "step-" + "9" * 200, "latest-0", ".step-00000009.partial"]
)
def test_what_else_lies_in_the_folder_is_no_checkpoint(two: Path, name: str) -> None:
    (two / name).mkdir()
    assert format.steps(two) == [OLD, NEW]


def test_a_number_that_is_not_finite_comes_back_as_none(tmp_path: Path) -> None:
    reading.write(tmp_path, 1, {}, {"val": {"loss": float("nan"), "acc1": [1.5, float("inf")]}})
    assert format.verified(tmp_path, 1).state == {"val": {"loss": None, "acc1": [1.5, None]}}
    json.loads((tmp_path / "step-00000001/state.json").read_text(), parse_constant=pytest.fail)


FILES = {file_name("model", 0, 1): FileFacts(0, "0" * 64), file_name("optim", 1, 2): FileFacts(7, "9" * 64)}


def state_json(**changes: Any) -> bytes:
    body = {"format": 2, "step": 3, "state": {}, "files": {name: vars(facts) for name, facts in FILES.items()}}
    return json.dumps({**body, **changes, "sha256": checksum({**body, **changes})}).encode()


def test_records_of_before_are_read_and_the_like_is_written() -> None:
    """What is hashed must stay as it was, and so must the names of files."""
    text = """{"files": {"optim-00002-of-00002.safetensors": {"sha256": "NINES", "bytes": 7},
    "model.safetensors": {"bytes": 0, "sha256": "ZEROS"}}, "step": 3, "format": 2, "state": {"a": 1},
    "sha256": "2bf093f7070da01a1ca7922d4898be49583ee4a1878082d4cd47004575d4a035"}"""
    text = text.replace("NINES", "9" * 64).replace("ZEROS", "0" * 64)
    assert parse(text.encode(), 3) == CheckpointManifest(3, {"a": 1}, FILES)
    assert json.loads(CheckpointManifest(3, {"a": 1}, FILES).to_json()) == json.loads(text)
    one = CheckpointManifest(3, {}, {"model.safetensors": FileFacts(1, "0" * 64)})
    assert one.to_json().startswith('{\n "format": 1,\n'), "for people, too"
    assert parse(one.to_json().encode(), 3) == one


def lists(depth: int) -> Any:
    return [lists(depth - 1)] if depth else {}


@pytest.mark.parametrize("value", [2**63 - 1, -(10**17), 1e300, {"a": [2**62]}, lists(13)])
def test_a_state_of_any_plain_values_is_read(value: Any) -> None:
    assert parse(state_json(state={"value": value}), 3).state == {"value": value}


@pytest.mark.parametrize("value", [2**63, float("-inf"), {"a": [2**63]}, lists(14)])
def test_numbers_and_lists_without_end_are_not(value: Any) -> None:
    text = state_json(state={"value": value}).replace(b"Infinity", b"1e999")
    with pytest.raises(BrokenCheckpointError, match="numbers that are not finite"):
        parse(text, 3)


@pytest.mark.parametrize(
    "facts", [{"bytes": -1, "sha256": "0" * 64}, {"bytes": 1, "sha256": "0" * 63}, {"bytes": 1, "sha256": 0}, [], {}]
)
def test_a_file_that_is_not_described_is_an_error(facts: object) -> None:
    with pytest.raises(BrokenCheckpointError, match=r"does not describe model\.safetensors"):
        parse(state_json(files={"model.safetensors": facts}), 3)


def test_no_save_follows_a_link_out_of_its_folder(two: Path) -> None:
    away = two.rename(two.parent / "away")
    (away / ".step-00000007.partial").mkdir()
    two.symlink_to(away)
    with pytest.raises(UserError, match="is a link to"):
        format.begin(two, NEW)
    assert (away / ".step-00000007.partial").is_dir(), "nor removes anything there"
