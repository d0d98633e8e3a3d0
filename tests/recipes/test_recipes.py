"""Every recipe trains, as it stands, on data in its data set's own format; only its network and batch are small."""

import json
from pathlib import Path

import pytest

from tests.rank_functions import train_run
from tests.recipes.student import SMALL
from trainkit.cluster.ranks import RankEnv
from trainkit.common import fileio
from trainkit.config.loading import load

RECIPES = sorted(file.stem for file in (fileio.folder("configs") / "recipes").glob("*.yaml"))
SWARMS = {"cifar10_vit_hivemind"}  # tests/swarm/test_recipe.py


def test_no_recipe_is_left_out() -> None:
    assert set(RECIPES) == SMALL.keys() | SWARMS


@pytest.mark.nightly
@pytest.mark.parametrize("name", sorted(SMALL))
def test_a_recipe_trains_and_ends_with_test_metrics(name: str, data: Path, vit_weights: Path, tmp_path: Path) -> None:
    preset = load(f"recipes/{name}").config
    small = [*SMALL[name].split(), f"data.root={data}", f"train.precision={preset.train.precision}"]
    if preset.model.options.get("pretrained"):
        small.append(f"model.pretrained_cfg_overlay={{file: {vit_weights}}}")
    train_run(RankEnv.single(), tmp_path / "run", f"recipes/{name}", (*small, "train.max_steps=2"))
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [record["split"] for record in records] == ["train", "train", "val", "test"]
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["outcome"] == "finished"
