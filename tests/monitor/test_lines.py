from __future__ import annotations

import pytest

from trainkit.monitor import lines


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.2, "0:00"),
        (7, "0:07"),
        (59.6, "1:00"),
        (754, "12:34"),
        (3723, "1:02:03"),
        (2 * 86400 + 3 * 3600 + 4 * 60 + 5, "2d 03:04:05"),
        (-3, "0:00"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert lines.duration(seconds) == text


def test_a_training_record_is_one_line_with_units() -> None:
    record = {
        "time": 1.0, "step": 260, "epoch": 3.25, "split": "train", "loss": 0.43125, "acc1": 87.5, "acc5": 99.0,
        "lr": 1.9e-3, "images_per_sec": 2104.2,
    }  # fmt: skip
    assert lines.record_line(record, total_steps=1600, eta_seconds=12) == (
        "train  epoch   3.25  step  260/1600  loss 0.4313  acc1 87.50 %  lr 1.90e-03  2,104 images/s  ETA 0:12"
    )


def test_an_evaluation_has_acc5_and_no_learning_rate() -> None:
    record = {"step": 320, "epoch": 4.0, "split": "val", "loss": 0.21, "acc1": 93.333, "acc5": 99.8}
    assert lines.record_line(record, total_steps=1600) == (
        "val    epoch   4.00  step  320/1600  loss 0.2100  acc1 93.33 %  acc5 99.80 %"
    )


def test_a_loss_that_diverged_is_shown_as_nan() -> None:
    assert "loss nan" in lines.record_line({"step": 1, "split": "train", "loss": None}, total_steps=2)
