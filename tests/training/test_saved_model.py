"""A checkpoint says which images its model takes, and is a model that predicts without training and its data."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from PIL import Image

import trainkit
from tests.rank_functions import run_ranks, train_run
from tests.shell import python
from tests.training.parts import keeper_of, parts_of
from trainkit.checkpoint import format
from trainkit.common.errors import UserError
from trainkit.data.photo_transforms import CenterCrop, Photos, photo_splits
from trainkit.training.progress import Progress
from trainkit.training.saved_model import input_in, told_input

PHOTOS = photo_splits("photos", ("cat", "dog"), [[(torch.zeros(3, 9, 9), 0)]] * 3, Photos(image_size=40))


def test_a_checkpoint_says_how_images_are_prepared_for_its_model(tmp_path: Path) -> None:
    parts = parts_of()
    keeper_of(parts, tmp_path / "run", Progress()).save()
    found = input_in(format.manifest_of(tmp_path / "run" / "checkpoints", 0).state)
    assert found is not None
    info, crop = found
    assert info == parts.splits.info
    assert (crop.image_size, crop.shorter, crop.mode) == (4, 4, "bilinear")
    found = input_in(told_input(PHOTOS))
    assert found is not None
    info, crop = found
    assert info == PHOTOS.info
    image = torch.randint(256, (3, 50, 70), dtype=torch.uint8)
    assert torch.equal(crop(image), PHOTOS.eval_transform(image))


def test_a_peer_without_data_and_transforms_of_ones_own_tell_no_input() -> None:
    assert told_input(replace(PHOTOS, train=[])) == {}
    assert told_input(replace(PHOTOS, eval_transform=lambda image: image)) == {"classes": ["cat", "dog"]}
    assert input_in({"classes": ["cat", "dog"]}) is None, "an older checkpoint"


@pytest.mark.parametrize(
    ("key", "value"),
    [("in_chans", 4), ("image_size", 1 << 40), ("resize", "40"), ("crop", 0), ("mean", [0.5, 0.5]), ("std", [0, 1, 1]),
     ("std", None), ("outputs", 3), ("interpolation", "evil"), ("mean", [1e999, 0, 0]), ("crop", True)],
)  # fmt: skip
def test_an_input_that_cannot_be_is_none(key: str, value: Any) -> None:
    told = told_input(PHOTOS)
    assert input_in(told) is not None
    assert input_in({**told, "input": {**told["input"], key: value}}) is None
    assert input_in({**told, "input": [1]}) is None


def test_the_crop_of_images_of_one_size_is_what_evaluation_makes_of_them() -> None:
    from trainkit.data.datasets.digits import build

    splits = build(Path(), image_size=20)
    found = input_in(told_input(splits))
    assert found is not None
    assert isinstance(found[1], CenterCrop)
    images = [splits.test[index][0] for index in range(20)]
    assert all(torch.equal(found[1](image), splits.eval_transform(image)) for image in images)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on photos, which are no longer where they were."""
    home = tmp_path_factory.mktemp("saved")
    for number in range(16):
        folder = home / "photos" / ("dark", "light")[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (50, 40), (16 * number % 100 + 120 * (number % 2),) * 3).save(folder / f"{number}.png")
    data = ("data.name=image_folder", f"data.root={home / 'photos'}", "data.image_size=32", "data.workers=0")
    model = ("model.name=timm/test_vit.r160_in1k", "train.class_weights=balanced")
    train = ("train.max_steps=4", "train.global_batch_size=4", "train.ema_decay=0.5")
    save = ("checkpoint.every_steps=2", "checkpoint.keep=3")  # a number is kept of a run that is over, too
    run_ranks(1, train_run, home / "run", "single", (*data, *model, *train, *save))
    (home / "photos").rename(home / "elsewhere")
    return home / "run"


@pytest.mark.nightly
def test_a_run_is_a_model_that_predicts_without_training_and_its_data(run: Path) -> None:
    code = f"""
import sys, torch, trainkit
run = trainkit.open({str(run)!r})
model, pictures = run.model(), [{str(run.parent / "elsewhere" / "light")!r} + name for name in ("/1.png", "/3.png")]
assert not model.training and type(model).__module__.startswith("timm."), type(model)
with torch.no_grad():
    scores = model(torch.stack([run.transform(picture) for picture in pictures])).softmax(1)
found = run.predict(pictures)
assert torch.allclose(scores, torch.stack([item.values for item in found]), atol=1e-6)
assert [item.label for item in found] == [run.classes[at] for at in scores.argmax(1)]
print(run.classes, [name for name in sys.modules if name.rpartition(".")[2] in ("experiment", "loop", "update")])
"""
    done = python("-c", code, cwd=run.parent)
    assert done.stdout.strip() == "('dark', 'light') []", done.stderr


@pytest.mark.nightly
def test_files_pictures_arrays_and_a_folder_are_predicted_alike(run: Path) -> None:
    opened = trainkit.open(run)
    files = sorted((run.parent / "elsewhere").rglob("*.png"))
    by_file = opened.predict(files)
    pictures = [Image.open(file) for file in files]
    arrays = [numpy.asarray(picture) for picture in pictures]
    for others in (opened.predict(pictures), opened.predict(arrays), opened.predict(run.parent / "elsewhere")):
        assert torch.equal(*(torch.stack([each.values for each in of]) for of in (by_file, others)))  # type: ignore
    assert opened.predict([]) == []
    with pytest.raises(UserError, match=r"float32 \[3, 9, 9\] is not an image"):
        opened.transform(torch.zeros(3, 9, 9))
    (broken,) = opened.predict([__file__])
    assert (broken.label, broken.why) == (None, "It is not an image in a known format.")
    assert opened.transform(arrays[0][:, :, 0]).shape == (3, 32, 32), "gray"


def test_a_checkpoint_is_opened_by_its_folder_its_step_and_its_kind(run: Path) -> None:
    def weights(opened: trainkit.Run) -> torch.Tensor:
        return torch.nn.utils.parameters_to_vector(opened.model().parameters())

    last = weights(trainkit.open(run, checkpoint="latest"))
    assert torch.equal(weights(trainkit.open(run / "checkpoints" / "step-00000004")), last)
    assert not torch.equal(weights(trainkit.open(run, checkpoint="2")), last)
    assert not torch.equal(weights(trainkit.open(run, checkpoint="latest", weights="raw")), last)
    for absent in ("7", "../x"):
        with pytest.raises(UserError, match=f"No checkpoint '{absent}'"):
            trainkit.open(run, checkpoint=absent).model()
