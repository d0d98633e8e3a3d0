from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from pydantic import ValidationError

from trainkit.common.errors import UserError
from trainkit.config.checks import check_combinations
from trainkit.config.schema import SECTIONS, Config, LaunchConfig, Reach, field_of, reach
from trainkit.config.slurm_options import time_minutes


@pytest.mark.parametrize(
    ("text", "minutes"),
    [
        ("30", 30), ("5:30", 5.5), ("1:00:00", 60), ("0:00:30", 0.5), ("1-0", 1440), ("1-12", 2160), ("1-12:30", 2190),
        ("2-00:00:30", 2880.5),
    ],
)  # fmt: skip
def test_a_time_is_read_as_sbatch_reads_it(text: str, minutes: float) -> None:
    assert time_minutes(text) == minutes


@pytest.mark.parametrize("text", ["", "0", "0:00:00", "1h", "-5", "1:2:3:4", "1-1:1:1:1", "1.5", "infinite"])
def test_what_is_no_time_above_zero_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        time_minutes(text)


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        *(("launch", "gpus_per_node", True), ("launch", "job_name", True), ("launch", "mem", -1)),
        *(("optim", "lr", float("inf")), ("optim", "lr", float("nan"))),
    ],
)
def test_what_cannot_be_meant_is_refused(section: str, key: str, value: object) -> None:
    """Those that can be typed as an override stand in test_loading.py."""
    with pytest.raises(ValidationError):
        Config.model_validate({section: {key: value}})


def test_numbers_become_text_and_true_an_option_without_a_value() -> None:
    given = {"comment": "thesis", "nice": 10, "exclusive": True, "overcommit": None, "hold": False}
    launch = LaunchConfig.model_validate({"sbatch": given, "time": 90, "mem": 0})
    assert launch.sbatch == {"comment": "thesis", "nice": "10", "exclusive": "", "overcommit": ""}
    assert (launch.time, launch.mem) == ("90", "0")


@pytest.mark.parametrize(
    ("tree", "keys"),
    [
        ({"train": {"memory_limit_mb": 100}}, "memory_limit_mb=100.*micro_batch_size=null"),
        ({"train": {"memory_limit_mb": 100, "micro_batch_size": 8}}, "memory_limit_mb=100.*micro_batch_size=8"),
        ({"train": {"early_stopping_min_delta": 0.1}}, "min_delta=0.1 and .*patience=null"),
        ({"checkpoint": {"best": "val/ema_acc1"}}, "best=val/ema_acc1 and train.ema_decay=null"),
        ({"launch": {"gres": "gpu:2", "gpus_per_node": 2}}, "gres.*gpus_per_node"),
        ({"launch": {"time": "1", "signal_seconds": 40}}, "signal_seconds=40.*time=1"),
        (
            {"train": {"global_batch_size": 9, "micro_batch_size": 3}, "augment": {"mixup_alpha": 0.2}},
            "micro_batch_size=3.*mixup_alpha",
        ),
        ({"train": {"global_batch_size": 9}, "augment": {"cutmix_alpha": 1}}, "global_batch_size=9.*cutmix_alpha"),
        (
            {"train": {"micro_batch_size": "auto"}, "strategy": {"static_graph": True}},
            "micro_batch_size=auto.*static_graph=true",
        ),
        ({"collaborative": {"round_seconds": 3}}, "round_seconds=3.*matchmaking_seconds=3"),
    ],
)
def test_settings_that_cannot_hold_together_are_refused(tree: dict[str, Any], keys: str) -> None:
    with pytest.raises(UserError, match=keys):
        check_combinations(Config.model_validate(tree))


# What the text of a setting can do


def holds_text(annotation: Any) -> bool:
    if get_origin(annotation) is Literal:
        return False
    return annotation in (str, bytes, Path, Any, object) or any(holds_text(item) for item in get_args(annotation))


def texts() -> Iterator[str]:
    for section, model in SECTIONS.items():
        for name, field in model.model_fields.items():
            if holds_text(field.annotation):
                yield f"{section}.{name}"


def test_a_setting_that_holds_text_says_what_it_can_do() -> None:
    """A new one cannot be forgotten: mark it IMPORTS, STARTS, SENDS or PLAIN (`trainkit.config.schema.Reach`)."""
    fields = {key: field_of(key) for key in texts()}
    assert {"launch.sbatch", "launch.setup", "checkpoint.remote", "collaborative.initial_peers"} <= fields.keys()
    assert "optim.lr" not in fields
    silent = [key for key, field in fields.items() if not any(isinstance(it, Reach) for it in field.metadata)]  # type: ignore[union-attr]
    assert silent == []


@pytest.mark.parametrize(
    ("key", "value", "does"),
    [
        ("model.name", "resnet18", "nothing"), ("model.name", "mine:net", "imports"),
        ("model.name", "hf-hub:eve/net", "imports"), ("monitor.loggers", ["console", "mine:log"], "imports"),
        ("model.checkpoint_path", "/w.pth", "imports"), ("model.pretrained_cfg_overlay.file", "/w.bin", "imports"),
        ("model.pretrained_cfg_overlay.file", "/w.safetensors", "nothing"),
        ("launch.setup", ["curl eve"], "starts"), ("launch.setup", [], "nothing"),
        ("launch.container_python", "python3", "nothing"), ("launch.container_python", "/eve/python3", "starts"),
        ("checkpoint.remote", None, "nothing"), ("checkpoint.remote", "s3://eve/all", "sends"),
        ("monitor.wandb_project", "trainkit", "nothing"), ("monitor.wandb_project", "eve", "sends"),
        ("launch.mail_user", "eve@example.org", "sends"),
        ("collaborative.initial_peers", ["/ip4/1.2.3.4/tcp/1/p2p/Q"], "sends"),
        ("data.root", "/elsewhere", "nothing"),
        ("data.url", "s3://eve/shards", "fetches"), ("data.url", "shards", "nothing"),
        ("data.val_fraction", 0.1, "nothing"),  # an option of a plugin of ours
    ],
)  # fmt: skip
def test_what_a_value_can_do(key: str, value: object, does: str) -> None:
    assert reach(key, value).does == does


def test_carbon_intensity_is_a_number_or_a_country_that_is_known() -> None:
    for given in (381.5, 20, "DE", "NO", None):
        assert Config.model_validate({"launch": {"carbon_intensity": given}}).launch.carbon_intensity == given
    for given in (0, -1, "D", "Germany"):
        with pytest.raises((ValidationError, UserError)):
            Config.model_validate({"launch": {"carbon_intensity": given}})
