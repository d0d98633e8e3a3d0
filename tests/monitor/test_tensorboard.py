import io
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from trainkit.config.schema import Config
from trainkit.monitor import Start, tensorboard
from trainkit.run.folder import RunDir

TRAIN = {"time": 1.7e9, "epoch": 0.5, "split": "train", "acc1": 40.0, "acc5": 90.0, "lr": 1e-3, "images_per_sec": 2e3}
VAL = {"time": 1.7e9, "step": 20, "epoch": 1.0, "split": "val", "loss": 1.25, "acc1": 45.0, "acc5": 80.0}


def logged(run_dir: RunDir, *records: dict[str, Any], **start: Any) -> None:
    logger = tensorboard.build(run_dir, Config(), Start(total_steps=60, **start))
    for record in records:
        logger.log({**TRAIN, **record})
    logger.close()


def attempt(run_dir: RunDir, resumed_step: int, steps: range, loss: float) -> None:
    records = [{"step": step, "loss": loss} for step in steps]
    logged(run_dir, *records, VAL | {"step": steps[-1]}, resumed_step=resumed_step)


def events_of(run_dir: RunDir) -> Any:
    module = import_module("tensorboard.backend.event_processing.event_accumulator")
    events = module.EventAccumulator(str(run_dir.tensorboard / run_dir.name))
    events.Reload()
    return events


def scalars(run_dir: RunDir, tag: str) -> list[tuple[int, float]]:
    return [(point.step, point.value) for point in events_of(run_dir).Scalars(tag)]


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path)


def test_train_and_val_of_a_metric_stand_together_and_in_one_plot(run_dir: RunDir) -> None:
    attempt(run_dir, 0, range(10, 30, 10), loss=1.5)
    for tag, value in [("loss/train", 1.5), ("loss/val", 1.25), ("acc1/train", 40), ("acc1/val", 45), ("acc5/val", 80)]:
        assert scalars(run_dir, tag)[-1] == (20, value)
    assert [round(lr, 6) for _, lr in scalars(run_dir, "lr/train")] == [1e-3, 1e-3]
    layout = import_module("tensorboard.plugins.custom_scalar.layout_pb2").Layout()
    layout.ParseFromString(events_of(run_dir).Tensors("custom_scalars__config__")[0].tensor_proto.string_val[0])
    plots = {chart.title: list(chart.multiline.tag) for chart in layout.category[0].chart}
    assert plots["acc1"] == ["acc1/train", "acc1/val"]
    assert list(plots) == ["loss", "acc1", "acc5", "lr"]


def test_after_a_restart_the_curve_has_no_double_points(run_dir: RunDir) -> None:
    attempt(run_dir, 0, range(10, 60, 10), loss=1.5)  # killed at 50; its last checkpoint is that of step 30
    attempt(run_dir, 30, range(40, 70, 10), loss=0.5)
    assert scalars(run_dir, "loss/train") == [(10, 1.5), (20, 1.5), (30, 1.5), (40, 0.5), (50, 0.5), (60, 0.5)]


def test_what_is_no_number_is_left_out_and_time_is_a_group_of_its_own(run_dir: RunDir) -> None:
    more = {"grad_norm": -1e39, "seconds_data": 1.5, "seconds_exposed": None, "mfu": 41.0}
    logged(run_dir, {"step": 10, "loss": None, "note": "text", **more})
    shown = {tag: scalars(run_dir, tag) for tag in events_of(run_dir).Tags()["scalars"]}
    assert not {"loss/train", "note/train", "seconds/exposed"} & shown.keys()
    expected = {"acc1/train": 40.0, "grad_norm/train": float("-inf"), "seconds/data": 1.5, "mfu/train": 41.0}
    assert {tag: [(10, value)] for tag, value in expected.items()}.items() <= shown.items()


def raw_values(run_dir: RunDir) -> list[Any]:
    """All summaries of all attempts, as they stand in the files."""
    loader = import_module("tensorboard.backend.event_processing.event_file_loader").RawEventFileLoader
    event = import_module("tensorboard.compat.proto.event_pb2").Event
    raws = [raw for file in sorted((run_dir.tensorboard / run_dir.name).iterdir()) for raw in loader(str(file)).Load()]
    return [value for raw in raws for value in event.FromString(raw).summary.value]


def test_settings_are_a_row_of_the_hparams_tab_with_what_auto_has_come_to(run_dir: RunDir) -> None:
    attempt(run_dir, 0, range(10, 30, 10), loss=1.5)  # it will go on
    assert "_hparams_/session_end_info" not in [value.tag for value in raw_values(run_dir)]
    logged(run_dir, VAL | {"split": "test"}, world_size=4, precision="bf16", micro_batch_size=8)
    data = import_module("tensorboard.plugins.hparams.plugin_data_pb2").HParamsPluginData
    own = [value for value in raw_values(run_dir) if value.metadata.plugin_data.plugin_name == "hparams"]
    found = {value.tag: data.FromString(value.metadata.plugin_data.content) for value in own}
    told = found["_hparams_/session_start_info"].session_start_info.hparams
    assert told["train.precision"].string_value == "bf16"
    assert (told["train.micro_batch_size"].number_value, told["world_size"].number_value) == (8, 4)
    assert told["optim.lr"].number_value == Config().optim.lr
    assert not [key for key in told if key.startswith(("launch.", "monitor."))]
    assert "acc1/val" in [info.name.tag for info in found["_hparams_/experiment"].experiment.metric_infos]
    assert found["_hparams_/session_end_info"].session_end_info.status == 1, "success"


def test_which_class_was_taken_for_which_is_a_picture_and_a_table(run_dir: RunDir) -> None:
    run_dir.confusion.write_text('{"classes": ["cat", "dog|wolf"], "raw": [[0, 0, 9], [0, 1, 1], [1, 1, 5]]}')
    logged(run_dir, VAL | {"split": "test"})
    (image,) = events_of(run_dir).Images("confusion/test")
    assert (image.width, image.height) == (400, 400)
    from PIL import Image

    pixels = Image.open(io.BytesIO(image.encoded_image_string)).convert("L")
    assert [pixels.getpixel(place) for place in ((10, 10), (390, 10), (10, 390), (390, 390))] == [25, 229, 255, 0]
    (text,) = events_of(run_dir).Tensors("confusion/test/table/text_summary")
    table = text.tensor_proto.string_val[0].decode().splitlines()
    assert table[0] == "| is \\ taken for | cat | dog\\|wolf |"
    assert table[2:] == ["| cat | 9 | 1 |", "| dog\\|wolf |  | 5 |"]
    for odd in ("", "{}", '{"classes": ["a"], "raw": [[0, 7, 1]]}', '{"classes": 3, "raw": [1]}'):  # which is none
        run_dir.confusion.write_text(odd)
        logged(run_dir, VAL | {"split": "test", "step": 21})
    assert len(events_of(run_dir).Images("confusion/test")) == 1


def test_a_run_is_listed_by_its_name_and_one_of_a_sweep_by_both_names(tmp_path: Path) -> None:
    alone, swept = RunDir(tmp_path / "ddp-0001"), RunDir(tmp_path / "ddp-0002" / "0")
    for folder in (alone.path, swept.path):
        folder.mkdir(parents=True)
    (swept.path.parent / "sweep.json").write_text("[]")
    for run in (alone, swept):
        tensorboard.build(run, Config(), Start(total_steps=1)).close()
    assert [folder.name for run in (alone, swept) for folder in run.tensorboard.iterdir()] == ["ddp-0001", "ddp-0002-0"]
