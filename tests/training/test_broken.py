"""Broken images in a run: told of once, counted by all ranks, and without influence on what is exact."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from tests.rank_functions import run_ranks, train_run
from trainkit.checkpoint import format
from trainkit.errors import UserError
from trainkit.ranks.env import RankEnv
from trainkit.run.events import read_events
from trainkit.run.folder import RunDir
from trainkit.run.metrics import read_metrics

MODEL = ("data.name=image_folder", "data.in_chans=1", "data.image_size=28", "train.global_batch_size=4",
         "train.max_steps=6", "model.dropout=0", "checkpoint.every_steps=2", "checkpoint.keep=9")  # fmt: skip


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """12 images to train on and 6 to validate; two of the former and one of the latter are broken."""
    root = tmp_path / "images"
    for split, count in (("train", 6), ("val", 3)):
        for label, name in enumerate(("cat", "dog")):
            (root / split / name).mkdir(parents=True)
            for number in range(count):
                Image.new("L", (30, 30), 40 + 100 * label + number).save(root / split / name / f"{number}.png")
    for name in ("train/cat/2", "train/dog/0", "val/dog/1"):
        (root / f"{name}.png").write_bytes(b"nothing")
    return root


def weights(folder: Path) -> bytes:
    step = format.resolve(folder / "checkpoints", "latest")
    return (format.path_of(folder / "checkpoints", step) / "model.safetensors").read_bytes()


def test_broken_images_are_skipped_alike_by_all_ranks_and_named_once(tmp_path: Path, images: Path) -> None:
    settings = (*MODEL, f"data.root={images}", "data.max_broken=3")
    whole, broken = tmp_path / "whole", tmp_path / "run"
    assert run_ranks(2, train_run, broken, "ddp", settings, 4) == ["preempted"] * 2
    assert run_ranks(2, train_run, broken, "ddp", settings) == ["finished"] * 2
    events = read_events(RunDir(broken), "broken_image")
    assert sorted(str(event["file"]).split("images/")[1] for event in events) == [
        "train/cat/2.png", "train/dog/0.png", "val/dog/1.png",
    ]  # fmt: skip
    assert json.loads((broken / "summary.json").read_text())["broken_images"] == 3
    assert {record["samples"] for record in read_metrics(RunDir(broken), "val")} == {5}
    for name, next_whole in (("train/cat/2", "train/cat/3"), ("train/dog/0", "train/dog/1")):
        (images / f"{name}.png").write_bytes((images / f"{next_whole}.png").read_bytes())
    assert run_ranks(2, train_run, whole, "ddp", settings) == ["finished"] * 2
    assert weights(broken) == weights(whole)


def refused(env: RankEnv, folder: Path, settings: tuple[str, ...]) -> str:
    with pytest.raises(UserError) as caught:
        train_run(env, folder, "ddp", settings)
    return str(caught.value)


def test_one_more_than_may_be_ends_the_run_on_all_ranks_alike(tmp_path: Path, images: Path) -> None:
    settings = (*MODEL, f"data.root={images}", "data.max_broken=2")
    one, other = run_ranks(2, refused, tmp_path / "run", settings)
    assert one == other
    assert one.startswith("3 images are broken, and data.max_broken=2.")
