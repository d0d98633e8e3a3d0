from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from trainkit import plugins
from trainkit.errors import UserError

STRATEGIES = "trainkit.strategies"
SOURCE = """
import torch_is_not_needed_to_read_this

CONSTANT = 3
TYPED: str = "yes"
COMPUTED = 1 + len("x")
_PRIVATE = lower = 4

def build(info, *, depth: int, width: float = 1.0, kind: str | None = None):
    pass

def anything(info, **options):
    pass

def nothing(info):
    pass

@functools.wraps(build)
def wrapping(*args, **options):
    pass
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of the user's own in the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "my_own_plugin.py").write_text(SOURCE)
    return "my_own_plugin"


def test_a_file_with_build_is_a_plugin() -> None:
    assert {"ddp", "single"} <= set(plugins.available(STRATEGIES))


def test_a_file_that_plugins_share_is_none() -> None:
    assert "base" not in plugins.available(STRATEGIES)


def test_options_are_the_keyword_only_parameters(own: str) -> None:
    signature = plugins.signature("trainkit.models", f"{own}:build")
    assert (signature.options, signature.required) == (("depth", "width", "kind"), ("depth",))


def test_options_are_read_without_importing_the_module(own: str) -> None:
    plugins.check_options("trainkit.models", f"{own}:build", {"depth": 1}, where="model")
    assert own not in sys.modules


def test_a_module_in_a_package_is_read_without_importing_the_package(own: str, tmp_path: Path) -> None:
    (tmp_path / "own_package" / "nets").mkdir(parents=True)
    (tmp_path / "own_package" / "__init__.py").write_text("raise SystemExit('imported')\n")
    (tmp_path / "own_package" / "nets" / "small.py").write_text("def build(info, *, depth: int = 3): ...\n")
    assert plugins.signature("trainkit.models", "own_package.nets.small:build").options == ("depth",)
    with pytest.raises(UserError, match=r"No module 'own_package\.nets\.large'"):
        plugins.signature("trainkit.models", "own_package.nets.large:build")


def test_an_unknown_option_is_answered_with_the_nearest(own: str) -> None:
    with pytest.raises(UserError) as caught:
        plugins.check_options("trainkit.models", f"{own}:build", {"depth": 1, "widht": 2}, where="model")
    assert caught.value.what == "Unknown key 'model.widht'."
    assert "depth, width, kind" in caught.value.why
    assert caught.value.fix == "Did you mean 'model.width'?"


def test_an_option_of_the_wrong_type_is_refused(own: str) -> None:
    with pytest.raises(UserError, match=r"model\.depth=deep is not possible"):
        plugins.check_options("trainkit.models", f"{own}:build", {"depth": "deep"}, where="model")


def test_an_option_without_default_must_be_given(own: str) -> None:
    with pytest.raises(UserError, match=r"needs 'model\.depth'"):
        plugins.check_options("trainkit.models", f"{own}:build", {}, where="model")


def test_a_function_that_takes_anything_takes_any_option(own: str) -> None:
    plugins.check_options("trainkit.models", f"{own}:anything", {"whatever": 1}, where="model")


def test_a_function_that_wraps_another_has_the_options_of_that(own: str, tmp_path: Path) -> None:
    (tmp_path / "another.py").write_text(
        f"from {own} import wrapping as inner\n\n@wraps(inner)\ndef build(*args, **options):\n    pass\n"
    )
    whole = plugins.signature("trainkit.models", f"{own}:build")
    assert plugins.signature("trainkit.models", f"{own}:wrapping") == whole
    assert plugins.signature("trainkit.models", "another:build") == whole


def test_a_function_without_options_says_so(own: str) -> None:
    with pytest.raises(UserError, match="no options"):
        plugins.check_options("trainkit.models", f"{own}:nothing", {"depth": 1}, where="model")


def test_an_unknown_plugin_is_answered_with_the_nearest() -> None:
    with pytest.raises(UserError) as caught:
        plugins.load(STRATEGIES, "dpd")
    assert caught.value.what == "Unknown strategy 'dpd'."
    assert "ddp, dp, fsdp, hivemind, single, zero;" in caught.value.why
    assert caught.value.fix.startswith("Did you mean 'd")


def test_a_module_that_is_nowhere_is_refused(own: str) -> None:
    with pytest.raises(UserError, match="No module 'nowhere'"):
        plugins.signature("trainkit.models", "nowhere:build")


def test_a_function_of_ones_own_is_found_in_the_current_folder(own: str, tmp_path: Path) -> None:
    (tmp_path / "another_plugin.py").write_text("def make(): return 3\n")
    assert plugins.load("trainkit.models", "another_plugin:make")() == 3


def test_a_name_that_is_no_function_is_refused(own: str, tmp_path: Path) -> None:
    (tmp_path / "third_plugin.py").write_text("make = 3\n")
    with pytest.raises(UserError, match="names no function"):
        plugins.load("trainkit.models", "third_plugin:make")


@pytest.mark.parametrize("package", [STRATEGIES, "trainkit.data.datasets", "trainkit.models"])
def test_every_option_of_ours_has_a_type(package: str) -> None:
    for name in plugins.available(package):
        signature = plugins.signature(package, name)
        assert set(signature.annotations) == set(signature.options), name


@pytest.mark.parametrize("name", ["os:system", "subprocess:run", "posix:system", "builtins:exec", "json.tool:main"])
def test_python_itself_is_no_plugin(name: str) -> None:
    for ask in (plugins.load, plugins.signature):
        with pytest.raises(UserError, match="is no plugin"):
            ask("trainkit.data.datasets", name)


def test_a_function_not_written_in_python_is_none_by_another_name(own: str, tmp_path: Path) -> None:
    (tmp_path / "fourth_plugin.py").write_text("from os import system as build\n")
    with pytest.raises(UserError, match="names no function"):
        plugins.load("trainkit.data.datasets", "fourth_plugin:build")


@pytest.mark.parametrize(
    ("name", "options", "key"),
    [
        ("dpd", {}, "strategy.name"),
        ("nowhere:build", {}, "strategy.name"),
        ("os:system", {}, "strategy.name"),
        ("ddp", {"bucket": 1}, "strategy.bucket"),
        ("ddp", {"bucket_cap_mb": "big"}, "strategy.bucket_cap_mb"),
    ],
)
def test_a_mistake_in_a_plugin_names_the_setting_to_change(name: str, options: dict[str, Any], key: str) -> None:
    with pytest.raises(UserError) as caught:
        plugins.check_options(STRATEGIES, name, options, where="strategy")
    assert caught.value.key == key


def test_what_a_plugins_file_states_is_read_without_importing_it(own: str) -> None:
    assert plugins.stated("trainkit.models", f"{own}:build") == {"CONSTANT": 3, "TYPED": "yes"}
    assert own not in sys.modules


def test_a_file_that_states_nothing_states_nothing() -> None:
    assert plugins.stated("trainkit.models", "fashion_cnn") == {}


@pytest.mark.parametrize(
    ("logger", "says"),
    [("jsonl", {"FIRST": True}), ("console", {"PEERS": "none"}), ("wandb", {"PEERS": "judge"}), ("tensorboard", {})],
)
def test_a_logger_says_itself_when_and_where_it_is_opened(logger: str, says: dict[str, Any]) -> None:
    stated = plugins.stated("trainkit.monitor", logger)
    assert {name: stated[name] for name in ("FIRST", "PEERS") if name in stated} == says
