"""A peer that does not train builds the run's model without the run's data."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from trainkit.config.loading import load
from trainkit.config.schema import Config
from trainkit.data import build_data
from trainkit.errors import RefusedError, RunFailedError
from trainkit.models import build_model
from trainkit.swarm.agreement import facts_of, require_same, without_data
from trainkit.swarm.messages import Manifest, no_data

CONFIG = load("hivemind").config
MANIFEST = Manifest("id", "run", "", 1, "", num_classes=10, in_chans=1, image_size=8)


def facts_here(manifest: Manifest, theirs: dict[str, str], config: Config = CONFIG) -> dict[str, str]:
    """Of a machine without the data."""
    splits = no_data("digits", manifest)
    return without_data(facts_of(config, splits, build_model(config.model, splits.info, 0)), theirs, config)


@pytest.fixture(scope="module")
def theirs() -> dict[str, str]:
    """Of the creator, who has the digits."""
    splits = build_data(CONFIG.data)
    return facts_of(CONFIG, splits, build_model(CONFIG.model, splits.info, 0))


def test_its_model_is_the_runs(theirs: dict[str, str]) -> None:
    ours = facts_here(MANIFEST, theirs)
    require_same(theirs, ours)
    assert ours == theirs


@pytest.mark.parametrize("change", [{"num_classes": 9}, {"in_chans": 3}, {"image_size": 16}])
def test_a_manifest_that_says_otherwise_than_the_run_is_leads_to_another_model(
    change: dict[str, Any], theirs: dict[str, str]
) -> None:
    with pytest.raises(RefusedError, match="differs from the run in: model"):
        require_same(theirs, facts_here(replace(MANIFEST, **change), theirs))


def test_whatever_is_not_the_datas_must_still_be_alike(theirs: dict[str, str]) -> None:
    for key in theirs.keys() - {"data"}:
        told = {**theirs, key: "another"}
        with pytest.raises(RefusedError, match=f"differs from the run in: {key}"):
            require_same(told, facts_here(MANIFEST, told))


def test_code_of_a_data_set_need_not_be_there_but_a_models_must() -> None:
    def of(data: str, model: str) -> dict[str, str]:
        config = CONFIG.model_copy(
            update={
                "data": CONFIG.data.model_copy(update={"name": data}),
                "model": CONFIG.model.model_copy(update={"name": model}),
            }
        )
        return without_data({}, {"data": "x", "code of mine": "y", "seed": "0"}, config)

    assert of("mine:data", "fashion_cnn") == {"data": "x", "code of mine": "y"}
    assert of("mine:data", "mine:model") == {"data": "x"}
    assert of("digits", "mine:model") == {"data": "x"}


def test_nothing_of_it_can_be_trained_on() -> None:
    splits = no_data("digits", MANIFEST)
    assert [len(samples) for samples in (splits.train, splits.val, splits.test)] == [0, 0, 0]
    with pytest.raises(RunFailedError):
        splits.eval_transform(None)
