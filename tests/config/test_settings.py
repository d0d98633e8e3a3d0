"""What can be set, as people are told."""

from __future__ import annotations

import pytest

from trainkit.config.json_schema import Setting, settings
from trainkit.config.schema import SECTIONS
from trainkit.errors import UserError


def setting(key: str, of: str = "") -> Setting:
    return next(item for item in settings() if (item.key, item.of) == (key, of))


def test_every_setting_has_a_sentence() -> None:
    own = {f"{section}.{name}" for section, model in SECTIONS.items() for name in model.model_fields}
    found = settings()
    assert own | {"seed"} == {item.key for item in found if not item.of}
    assert [f"{item.key} of {item.of}" for item in found if len(item.sentence) < 8] == []


@pytest.mark.parametrize(
    ("key", "kind", "default"),
    [
        ("seed", "int >= 0, <= 4294967295", "0"),
        ("optim.lr", "float > 0", "0.002"),
        ("optim.betas", "[float, float] | [float, float, float] | null", "[0.9,0.999]"),
        ("train.micro_batch_size", "int > 0 | auto | null", "null"),
        ("train.channels_last", "bool", "false"),
        ("monitor.loggers", "[text, ...]", "[console,jsonl,tensorboard,wandb]"),
        ("launch.executor", "text", "auto"),
        ("launch.gpu_dialect", "gpus-per-node | gres | constraint", "gpus-per-node"),
        ("launch.sbatch", "{name: text}", "{}"),
    ],
)
def test_a_setting_has_its_type_and_its_default(key: str, kind: str, default: str) -> None:
    found = setting(key)
    assert (found.type, found.default) == (kind, default)


def test_the_options_of_plugins_are_settings_and_shared_ones_stand_once() -> None:
    assert setting("strategy.comm_hook", "ddp, zero").type == "none | fp16 | bf16 | powersgd"
    assert setting("strategy.reduce_dtype", "fsdp").sentence.startswith("What gradients are summed as")
    assert setting("data.shift", "digits").default == "1"


def test_a_section_alone_and_one_that_is_not_there() -> None:
    assert {item.key.partition(".")[0] for item in settings("schedule")} == {"schedule"}
    with pytest.raises(UserError, match="Unknown section 'optimizer'") as caught:
        settings("optimizer")
    assert "optim" in caught.value.why
