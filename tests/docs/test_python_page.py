"""What `trainkit` hands to users: documented, importable by short names, and with examples that run as they stand."""

import doctest
import importlib
import inspect
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import trainkit
from tests.docs import python_page
from trainkit.config.schema import LaunchConfig
from trainkit.data.datasets.digits import build
from trainkit.launch.flags import LaunchFlags

PARAMETERS = ("submit", "open", "compare", "Run", "Run.resume", "Run.metrics", "Run.predict", "Run.transform")


@pytest.mark.nightly
def test_the_examples_run_as_they_stand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other, as a reader would type them."""
    monkeypatch.chdir(tmp_path)
    pixels, _ = build(tmp_path / "data").test[0]
    Image.fromarray(pixels[0].numpy()).save("digit.png")
    finder, runner = doctest.DocTestFinder(), doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    names = {"trainkit": trainkit}
    said: list[str] = []
    for name in python_page.VERBS:
        examples = finder.find(getattr(trainkit, name), name, globs={})
        for example in sorted(examples, key=lambda found: found.lineno or 0):
            example.globs = names
            runner.run(example, out=said.append, clear_globs=False)
    assert runner.failures == 0, "".join(said)
    assert runner.tries >= 20


@pytest.mark.parametrize("name", PARAMETERS)
def test_every_parameter_is_explained(name: str) -> None:
    found: Any = trainkit
    for part in name.split("."):
        found = getattr(found, part)
    doc = inspect.getdoc(found) or ""
    parameters = [each.name for each in python_page.parameters(found) if each.name != "self"]
    assert [each for each in parameters if f"{each}: " not in doc] == []


def test_launch_settings_are_keywords_in_the_same_order() -> None:
    assert list(LaunchFlags.__annotations__) == list(LaunchConfig.model_fields)


@pytest.mark.parametrize(("short", "former"), python_page.ROOMS.items())
def test_short_and_former_names_mean_the_same(short: str, former: str) -> None:
    room, deep = importlib.import_module(short), importlib.import_module(former)
    assert [name for name in room.__all__ if getattr(room, name) is not getattr(deep, name)] == []
