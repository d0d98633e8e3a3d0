"""Pretrained weights see images as those that they were trained on, whatever the data set would do with them."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from PIL import Image
from torchvision.transforms import v2

from tests.rank_functions import QUICK, run_ranks, train_run
from trainkit.cluster.ranks import RankEnv
from trainkit.common.image_input import ModelInput
from trainkit.config.loading import load
from trainkit.data.registry import build_data
from trainkit.distributed.process_group import Distributed
from trainkit.report import text_sections
from trainkit.report.document import Table
from trainkit.report.facts import Facts
from trainkit.run.events import read_events
from trainkit.run.folder import RunDir
from trainkit.training.train_state import TrainState, build

NAME = "test_vit.r160_in1k"
WANTS = ModelInput(NAME, (0.5,) * 3, (0.5,) * 3, "bicubic", 0.95)


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """The overrides for a model whose pretrained weights are in a file: there is no need of a network."""
    import timm
    from safetensors.torch import save_file

    file = tmp_path_factory.mktemp("weights") / "model.safetensors"
    save_file(timm.create_model(NAME, num_classes=1000).state_dict(), file)
    return (f"model.name={NAME}", "model.pretrained=true", f"model.pretrained_cfg_overlay={{file: {file}}}")


@pytest.fixture
def parts_of(tmp_path: Path) -> Callable[..., TrainState]:
    """Builds what trains on a folder of photographs."""
    random = torch.Generator().manual_seed(0)
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        for number in range(8):
            pixels = torch.randint(0, 256, (90, 120, 3), dtype=torch.uint8, generator=random)
            Image.fromarray(pixels.numpy()).save(tmp_path / name / f"{number}.png")

    def made(*overrides: str) -> TrainState:
        data = ("data.name=image_folder", f"data.root={tmp_path}", "data.image_size=38", "train.global_batch_size=2")
        config = load("single", (*QUICK, *data, *overrides)).config
        dist = Distributed(RankEnv.single(), torch.device("cpu"))
        return build(config, dist, build_data(config.data))

    return made


def test_mean_std_interpolation_and_crop_are_those_of_the_weights(
    parts_of: Callable[..., TrainState], pretrained: tuple[str, ...]
) -> None:
    splits = parts_of(*pretrained).splits
    assert (splits.info.mean, splits.info.std) == (WANTS.mean, WANTS.std)
    assert splits.expected == WANTS
    image = splits.val[0][0]
    resized = v2.functional.resize(image, [40], interpolation=v2.InterpolationMode.BICUBIC, antialias=True)
    assert torch.equal(splits.eval_transform(image), v2.functional.center_crop(resized, [38, 38]))
    splits = parts_of(f"model.name={NAME}").splits  # without its weights, images are as they are
    assert splits.expected is None
    assert splits.info.mean == (0.485, 0.456, 0.406)


def test_what_the_weights_expected_is_in_the_events_and_log_book(tmp_path: Path, pretrained: tuple[str, ...]) -> None:
    folder = tmp_path / "run"
    settings = ("data.name=synthetic", "data.val_size=8", "data.test_size=8", "train.global_batch_size=4")
    run_ranks(1, train_run, folder, "single", (*settings, *pretrained, "train.max_steps=1"))
    (started,) = read_events(RunDir(folder), "started")
    assert started["input"] == {
        "source": NAME, "mean": [0.5] * 3, "std": [0.5] * 3, "interpolation": "bicubic", "crop": 0.95
    }  # fmt: skip
    (table,) = text_sections.settings(Facts(RunDir(folder), "run"))
    assert isinstance(table, Table)
    (row,) = [row for row in table.rows if row[0] == "images as expected by"]
    assert row[1] == f"{NAME} (mean: [0.5, 0.5, 0.5], std: [0.5, 0.5, 0.5], interpolation: bicubic, crop: 0.95)"
