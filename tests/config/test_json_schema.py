import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from trainkit.common.errors import UserError
from trainkit.config import json_schema, plugins, yaml
from trainkit.config.json_schema import Setting, settings
from trainkit.config.presets import PACKAGED
from trainkit.config.schema import SECTIONS, OptimConfig

SCHEMA = json.loads((PACKAGED / "schema.json").read_text(encoding="utf-8"))
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)
NAMES = SCHEMA["$defs"]["ModelConfig"]["properties"]["name"]["anyOf"][0]["enum"]
OPTIMIZERS = SCHEMA["$defs"]["OptimConfig"]["properties"]["name"]["anyOf"][0]["enum"][len(OptimConfig.OURS) :]
PRESETS = sorted([*PACKAGED.glob("*.yaml"), *PACKAGED.glob("recipes/*.yaml")])


def test_the_schema_in_configs_is_current() -> None:
    """`python -m trainkit.config.json_schema > configs/schema.json` makes it; other versions have other models."""
    models = [name for name in NAMES if name not in plugins.available("trainkit.models")]
    assert (PACKAGED / "schema.json").read_text(encoding="utf-8") == json_schema.text(models, OPTIMIZERS)
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


WITHOUT_LIBRARIES = """
import sys
from trainkit.config.libraries import check_optimizer
from trainkit.config.json_schema import library_models, text
from trainkit.config.loading import load
from trainkit.config.schema import DataConfig
from trainkit.data.registry import check_data
from trainkit.common.errors import UserError
from trainkit.models.library import check_model
from trainkit.config.plugins import available

text(library_models(), [])
check_optimizer(load("ddp", ["optim.name=muon"]).config)
for name in ("fashion_cnn", "vit_base_patch32_224", "torchvision/resnet50"):
    check_model(load("ddp", [f"model.name={name}"]).config.model)
for name in available("trainkit.data.datasets"):
    try:
        check_data(DataConfig(name=name, root="nowhere"))
    except UserError:
        pass
print([name for name in ("torch", "timm", "torchvision", "sklearn", "PIL", "numpy") if name in sys.modules])
"""


def test_models_data_and_our_optimizers_are_known_without_libraries() -> None:
    assert {"resnet50", "vit_base_patch32_224", "swin_v2_t", "fashion_cnn"} <= set(NAMES)
    command = [sys.executable, "-c", WITHOUT_LIBRARIES]
    assert subprocess.check_output(command, text=True, cwd=PACKAGED.parent).strip() == "[]"


@pytest.mark.parametrize("preset", PRESETS, ids=lambda path: path.stem)
def test_every_preset_is_valid_and_tells_editors_where_the_schema_is(preset: Path) -> None:
    assert problems(yaml.read(preset)[0]) == []
    first = preset.read_text(encoding="utf-8").splitlines()[0]
    assert first.startswith("# yaml-language-server: $schema=")
    assert (preset.parent / first.split("=", 1)[1]).resolve() == PACKAGED / "schema.json"


@pytest.mark.parametrize(
    "wrong",
    [
        {"optimm": {}}, {"optim": {"wieght_decay": 1}}, {"train": {"epochs": 0}}, {"train": {"epochs": "x"}},
        {"optim": {"name": "adaam"}}, {"optim": {"name": "sgd", "eps": 1}}, {"schedule": {"name": "cosin"}},
        {"monitor": {"loggers": "console"}}, {"model": "vit"}, {"model": {"name": "resnet5"}},
        {"model": {"name": "resnet50", "pretrained": "yes"}}, {"model": {"name": "fashion_cnn", "depth": 3}},
        {"data": {"name": "cifar"}}, {"data": {"name": "digits", "image_sise": 8}},
        {"data": {"name": "digits", "image_size": "big"}}, {"strategy": {"name": "dpp"}},
        {"strategy": {"name": "ddp", "comm_hook": "fp8"}}, {"monitor": {"loggers": ["consol"]}}, {"extends": 3},
    ],
)  # fmt: skip
def test_mistakes_are_seen_in_the_editor(wrong: dict[str, Any]) -> None:
    assert problems(wrong)


@pytest.mark.parametrize(
    "right",
    [
        # What the configuration turns into text may be a number
        {"launch": {"time": 90, "mem": 0, "sbatch": {"nice": 10, "exclusive": True}}},
        {"model": {"name": "my_models:vit", "depth": 3}},
        {"model": {"name": "resnet50.a1_in1k", "pretrained": True}},
        {"model": {"name": "timm/one_that_is_new"}},
        {"model": {"width": 3}},  # of the model that the preset has which this one extends
        {"data": {"name": "my_data:photos", "size": 3}},
        {"data": {"image_size": 64}},
        {"strategy": {"name": "fsdp", "shard_within": "node"}},
        {"monitor": {"loggers": ["jsonl", "my_logger:open"]}},
        {"optim": {"name": "adan", "eps": 1e-6}},
        {"optim": {"name": "torch/adafactor"}},
        {"schedule": {"name": "my_rates:linear", "floor": 0.1}},
        {"extends": "my_own"},
        {"extends": "recipes/cifar10_vit"},
    ],
)
def test_what_is_the_users_own_or_named_elsewhere_is_no_mistake(right: dict[str, Any]) -> None:
    assert problems(right) == []


def problems(value: Any) -> list[str]:
    """The errors that editors mark."""
    return [error.message for error in VALIDATOR.iter_errors(value)]


# The same for people


every_setting = cache(settings)


def setting(key: str, of: str = "") -> Setting:
    return next(item for item in every_setting() if (item.key, item.of) == (key, of))


def test_every_setting_has_a_sentence() -> None:
    own = {f"{section}.{name}" for section, model in SECTIONS.items() for name in model.model_fields}
    found = every_setting()
    assert own | {"seed"} == {item.key for item in found if not item.of}
    assert [f"{item.key} of {item.of}" for item in found if len(item.sentence) < 8] == []


@pytest.mark.parametrize(
    ("key", "kind", "default"),
    [
        ("seed", "int >= 0 and <= 4294967295", "0"), ("optim.lr", "float > 0", "0.002"),
        ("train.class_weights", "balanced | [float > 0, ...] | null", "null"),
        ("train.micro_batch_size", "int > 0 | auto | null", "null"), ("train.channels_last", "bool", "false"),
        ("monitor.loggers", "[text, ...]", "[console,jsonl,tensorboard,wandb]"), ("launch.executor", "text", "auto"),
        ("launch.gpu_dialect", "gpus-per-node | gres | constraint", "gpus-per-node"),
        ("launch.sbatch", "{name: text}", "{}"),
    ],
)  # fmt: skip
def test_a_setting_has_its_type_and_its_default(key: str, kind: str, default: str) -> None:
    found = setting(key)
    assert (found.type, found.default) == (kind, default)


@pytest.mark.nightly
def test_the_options_of_plugins_are_settings_and_shared_ones_stand_once() -> None:
    assert setting("strategy.comm_hook", "ddp, zero").type == "none | fp16 | bf16 | powersgd"
    assert setting("strategy.reduce_dtype", "fsdp").sentence.startswith("Format in which gradients are summed")
    assert setting("data.shift", "digits").default == "1"


def test_a_section_alone_and_one_that_is_not_there() -> None:
    assert {item.key.partition(".")[0] for item in settings("schedule")} == {"schedule"}
    with pytest.raises(UserError, match="Unknown section 'optimizer'") as caught:
        settings("optimizer")
    assert "optim" in caught.value.why
