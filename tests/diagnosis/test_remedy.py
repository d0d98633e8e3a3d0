from __future__ import annotations

import pytest

from trainkit.config.loading import load
from trainkit.diagnosis.remedy import TO_FILL_IN, settings_of
from trainkit.errors import UserError


@pytest.mark.parametrize(
    ("what", "fix", "changes"),
    [
        ("", "Use train.global_batch_size=1024, or more data.", ["train.global_batch_size=1024"]),
        ("", "Use train.global_batch_size=96 or 128.", ["train.global_batch_size=96"]),
        ("", "Use train.precision=bf16, or strategy.comm_hook=fp16.", ["train.precision=bf16"]),
        ("", "Give optim.lr=5e-4 train.grad_clip_norm=1.0.", ["optim.lr=5e-4", "train.grad_clip_norm=1.0"]),
        ("", 'Use model.freeze=["blocks.[0-5].*"].', ['model.freeze=["blocks.[0-5].*"]']),
        ("", "Use model.freeze=[head,norm].", ["model.freeze=[head,norm]"]),
        ("", "Give 10 numbers, or train.class_weights=balanced.", ["train.class_weights=balanced"]),
        ("", "Leave train.ema_decay out.", ["train.ema_decay=null"]),
        ("", "Leave out strategy.static_graph, or use train.micro_batch_size=8.", ["train.micro_batch_size=8"]),
        ("model.freeze: no parameter fits 'x'.", "Name whole ones, for example model.freeze=[a].",
         [f"model.freeze={TO_FILL_IN}"]),
        ("data.image_size=7 is not possible.", "Give data.image_size such a value.", [f"data.image_size={TO_FILL_IN}"]),
        ("my_model.py:3 could not be imported.", "Correct that line.", []),
        ("train.py is missing.", "Bring train.py along.", []),
        ("own_data:build returned no Splits.", "Return trainkit.data.base.Splits(info=DataInfo(...), train=...).", []),
        ("The ranks differ.", "Give data.name=NAME on every node.", [f"data.name={TO_FILL_IN}"]),
    ],
)  # fmt: skip
def test_the_change_that_an_error_tells_of_is_read_from_its_own_words(what: str, fix: str, changes: list[str]) -> None:
    assert settings_of(what, fix) == changes


@pytest.mark.parametrize("key", ["model.freeze", "train.global_batch_size", "optim.lr", "train.class_weights"])
def test_what_only_the_user_knows_is_refused_as_it_stands(key: str) -> None:
    with pytest.raises(UserError):
        load("single", [f"{key}={TO_FILL_IN}"])
