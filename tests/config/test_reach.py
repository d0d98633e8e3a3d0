"""Each setting that holds text says what that text can do, where it is defined."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest

from trainkit.config.schema import PLAIN, SECTIONS, Reach, field_of, reach


def holds_text(annotation: Any) -> bool:
    if get_origin(annotation) is Literal:
        return False
    return annotation in (str, bytes, Path, Any, object) or any(holds_text(item) for item in get_args(annotation))


def texts() -> Iterator[str]:
    for section, model in SECTIONS.items():
        for name, field in model.model_fields.items():
            if holds_text(field.annotation):
                yield f"{section}.{name}"


@pytest.mark.parametrize("key", list(texts()))
def test_a_setting_that_holds_text_says_what_it_can_do(key: str) -> None:
    """A new one cannot be forgotten: mark it IMPORTS, STARTS, SENDS or PLAIN (`trainkit.config.schema.Reach`)."""
    field = field_of(key)
    assert field is not None
    assert [item for item in field.metadata if isinstance(item, Reach)], key


def test_the_look_finds_text_in_lists_and_mappings() -> None:
    assert {"launch.sbatch", "launch.setup", "checkpoint.remote", "collaborative.initial_peers"} <= set(texts())
    assert "optim.lr" not in set(texts())


@pytest.mark.parametrize(
    ("key", "value", "does"),
    [
        ("model.name", "resnet18", "nothing"),
        ("model.name", "mine:net", "imports"),
        ("model.name", "hf-hub:eve/net", "imports"),
        ("monitor.loggers", ["console", "mine:log"], "imports"),
        ("model.checkpoint_path", "/w.pth", "imports"),
        ("model.pretrained_cfg_overlay.file", "/w.bin", "imports"),
        ("model.pretrained_cfg_overlay.file", "/w.safetensors", "nothing"),
        ("launch.setup", ["curl eve"], "starts"),
        ("launch.setup", [], "nothing"),
        ("launch.container_python", "python3", "nothing"),
        ("launch.container_python", "/eve/python3", "starts"),
        ("checkpoint.remote", None, "nothing"),
        ("checkpoint.remote", "s3://eve/all", "sends"),
        ("monitor.wandb_project", "trainkit", "nothing"),
        ("monitor.wandb_project", "eve", "sends"),
        ("launch.mail_user", "eve@example.org", "sends"),
        ("collaborative.initial_peers", ["/ip4/1.2.3.4/tcp/1/p2p/Q"], "sends"),
        ("collaborative.open", True, "sends"),
        ("data.root", "/elsewhere", "nothing"),
    ],
)
def test_what_a_value_can_do(key: str, value: object, does: str) -> None:
    assert reach(key, value).does == does


def test_options_of_plugins_of_ours_do_nothing_else() -> None:
    assert reach("data.val_fraction", 0.1) == PLAIN
