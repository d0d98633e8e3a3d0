import io
import json
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from trainkit.common.hosts import free_port
from trainkit.config.schema import Config
from trainkit.monitor import tensorboard
from trainkit.monitor.base import Start
from trainkit.run.folder import RunDir
from trainkit.run.metrics import read_metrics

TRAIN = {"time": 1.7e9, "epoch": 0.5, "split": "train", "acc1": 40.0, "acc5": 90.0, "lr": 1e-3, "images_per_sec": 2e3}
VAL = {"time": 1.7e9, "step": 20, "epoch": 1.0, "split": "val", "loss": 1.25, "acc1": 45.0, "acc5": 80.0}


def logged(run_dir: RunDir, *records: dict[str, Any], **start: Any) -> None:
    logger = tensorboard.build(run_dir, Config(), Start(total_steps=60, **start))
    for record in records:
        logger.log({**TRAIN, **record})
    logger.close()
    folder = run_dir.tensorboard / run_dir.name  # attempts have their order by the second in which they began
    for file in folder.glob("*.tfevents.[0-9][0-9][0-9][0-9][0-9][0-9]*"):
        file.rename(folder / f"events.tfevents.{len(list(folder.iterdir())):03}")


def attempt(run_dir: RunDir, resumed_step: int, steps: range, loss: float) -> None:
    records = [{"step": step, "loss": loss} for step in steps]
    logged(run_dir, *records, VAL | {"step": steps[-1]}, resumed_step=resumed_step)


def wait_for(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + 120
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.3)


def events_of(run_dir: RunDir) -> Any:
    module = import_module("tensorboard.backend.event_processing.event_accumulator")
    events = module.EventAccumulator(str(run_dir.tensorboard / run_dir.name))
    events.Reload()
    return events


def scalars(run_dir: RunDir, tag: str) -> list[tuple[int, float]]:
    return [(point.step, point.value) for point in events_of(run_dir).Scalars(tag)]


def points_of_page(run_dir: RunDir, tag: str) -> list[tuple[int, float]]:
    """Read the points as TensorBoard's page does without its data server, or with `--load_fast=false`."""
    module = import_module("tensorboard.backend.event_processing.plugin_event_accumulator")
    number_of = import_module("tensorboard.util.tensor_util").make_ndarray
    events = module.EventAccumulator(str(run_dir.tensorboard / run_dir.name))
    events.Reload()
    return [(point.step, number_of(point.tensor_proto).item()) for point in events.Tensors(tag)]


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path)


def test_train_and_val_of_a_metric_stand_together_and_in_one_plot(run_dir: RunDir) -> None:
    attempt(run_dir, 0, range(10, 30, 10), loss=1.5)
    for tag, value in [("loss/train", 1.5), ("loss/val", 1.25), ("acc1/train", 40), ("acc1/val", 45), ("acc5/val", 80)]:
        assert scalars(run_dir, tag)[-1] == (20, value)
    assert dict(scalars(run_dir, "lr/train")) == pytest.approx({10: 1e-3, 20: 1e-3})
    layout = import_module("tensorboard.plugins.custom_scalar.layout_pb2").Layout()
    layout.ParseFromString(events_of(run_dir).Tensors("custom_scalars__config__")[0].tensor_proto.string_val[0])
    plots = {chart.title: list(chart.multiline.tag) for chart in layout.category[0].chart}
    assert plots["acc1"] == ["acc1/train", "acc1/val"]
    assert list(plots) == ["loss", "acc1", "acc5", "lr"]


def test_after_a_restart_the_curve_has_no_double_points(run_dir: RunDir) -> None:
    attempt(run_dir, 0, range(10, 60, 10), loss=1.5)  # killed at 50; its last checkpoint is that of step 30
    attempt(run_dir, 30, range(40, 70, 10), loss=0.5)
    assert scalars(run_dir, "loss/train") == [(10, 1.5), (20, 1.5), (30, 1.5), (40, 0.5), (50, 0.5), (60, 0.5)]


@pytest.mark.parametrize("read", [scalars, points_of_page])
def test_no_reader_has_double_points_however_often_and_early_a_run_restarts(run_dir: RunDir, read: Any) -> None:
    attempt(run_dir, 0, range(10, 50, 10), loss=4.0)  # killed before its first checkpoint
    assert read(run_dir, "loss/train") == [(10, 4.0), (20, 4.0), (30, 4.0), (40, 4.0)]
    attempt(run_dir, 0, range(10, 60, 10), loss=3.0)
    attempt(run_dir, 30, range(40, 70, 10), loss=2.0)
    expected = [(10, 3.0), (20, 3.0), (30, 3.0), (40, 2.0), (50, 2.0), (60, 2.0)]
    assert read(run_dir, "loss/train") == expected
    back = [{"step": step, "loss": loss} for step, loss in ((70, 1.0), (80, 1.0), (60, 0.5), (70, 0.5))]
    logged(run_dir, *back, resumed_step=60)  # it has diverged at 80, and goes on from the checkpoint of step 50
    assert read(run_dir, "loss/train") == [*expected[:5], (60, 0.5), (70, 0.5)]


SLOW = """
import time
from trainkit.models.fashion_cnn import build

def slow(info):
    model = build(info)
    model.register_forward_hook(lambda *_: time.sleep(0.05))
    return model
"""


@pytest.mark.long
@pytest.mark.parametrize("every_steps", [1000, 12])
def test_a_run_that_is_killed_and_goes_on_shows_each_step_once(tmp_path: Path, every_steps: int) -> None:
    """In both readers, and on the page that `tensorboard --load_fast=false` serves."""
    (tmp_path / "slow_model.py").write_text(SLOW)
    run = RunDir(tmp_path / "killed")
    settings = ("model.name=slow_model:slow", "train.max_steps=38", f"checkpoint.every_steps={every_steps}")
    more = ("checkpoint.every_epochs=null", "monitor.loggers=[tensorboard,jsonl]", "monitor.log_every=1")
    train = [sys.executable, "-m", "jobs.train"]
    first = subprocess.Popen([*train, "single", *settings, *more, "--run-dir", str(run.path)], cwd=tmp_path)
    try:
        wait_for(lambda: len(list(read_metrics(run, "train"))) >= 20)
    finally:
        first.kill()
        first.wait()
    subprocess.run([*train, str(run.path)], cwd=tmp_path, check=True)
    steps = list(range(1, 39))
    for read in (scalars, points_of_page):
        assert [step for step, _ in read(run, "loss/train")] == steps
    address = f"127.0.0.1:{free_port()}"
    words = ["--logdir", str(run.tensorboard), "--load_fast=false", "--host", "127.0.0.1", "--port", address[10:]]
    server = subprocess.Popen([sys.executable, "-m", "tensorboard.main", *words])
    query = f"http://{address}/data/plugin/scalars/scalars?run={run.name}&tag=loss/train"
    found: list[int] = []

    def shows_the_end() -> bool:
        with suppress(OSError), urllib.request.urlopen(query, timeout=5) as answer:
            found[:] = [step for _, step, _ in json.load(answer)]
        return 38 in found

    try:
        wait_for(shows_the_end)
    finally:
        server.terminate()
        server.wait()
    assert found == steps


def test_what_is_no_number_is_left_out_and_time_is_a_group_of_its_own(run_dir: RunDir) -> None:
    more = {"grad_norm": -1e39, "seconds_data": 1.5, "seconds_exposed": None, "mfu": 41.0}
    logged(run_dir, {"step": 10, "loss": None, "note": "text", **more})
    assert not {"loss/train", "note/train", "seconds/exposed"} & set(events_of(run_dir).Tags()["scalars"])
    expected = {"acc1/train": 40.0, "grad_norm/train": float("-inf"), "seconds/data": 1.5, "mfu/train": 41.0}
    for tag, value in expected.items():
        assert scalars(run_dir, tag) == [(10, value)]


def raw_values(run_dir: RunDir) -> list[Any]:
    """All summaries of all attempts, as they stand in the files."""
    loader = import_module("tensorboard.backend.event_processing.event_file_loader").RawEventFileLoader
    event = import_module("tensorboard.compat.proto.event_pb2").Event
    values = []
    for file in sorted((run_dir.tensorboard / run_dir.name).iterdir()):
        for raw in loader(str(file)).Load():
            values += event.FromString(raw).summary.value
    return values


def test_settings_are_a_row_of_the_hparams_tab_with_what_auto_has_come_to(run_dir: RunDir) -> None:
    attempt(run_dir, 0, range(10, 30, 10), loss=1.5)  # it will go on
    assert "_hparams_/session_end_info" not in str(raw_values(run_dir))
    logged(run_dir, VAL | {"split": "test"}, world_size=4, precision="bf16", micro_batch_size=8)
    data = import_module("tensorboard.plugins.hparams.plugin_data_pb2").HParamsPluginData
    found = {}
    for value in raw_values(run_dir):
        if value.metadata.plugin_data.plugin_name == "hparams":
            found[value.tag] = data.FromString(value.metadata.plugin_data.content)
    told = found["_hparams_/session_start_info"].session_start_info.hparams
    assert told["train.precision"].string_value == "bf16"
    assert (told["train.micro_batch_size"].number_value, told["world_size"].number_value) == (8, 4)
    assert told["optim.lr"].number_value == Config().optim.lr
    assert not re.search(r"\b(launch|monitor)\.", str(list(told)))
    assert '"acc1/val"' in str(found["_hparams_/experiment"].experiment.metric_infos)
    assert found["_hparams_/session_end_info"].session_end_info.status == 1, "success"


def test_which_class_was_taken_for_which_is_a_picture_and_a_table(run_dir: RunDir) -> None:
    run_dir.confusion.write_text('{"classes": ["cat", "dog|wolf"], "raw": [[0, 0, 9], [0, 1, 1], [1, 1, 5]]}')
    logged(run_dir, VAL | {"split": "test"})
    (image,) = events_of(run_dir).Images("confusion/test")
    assert (image.width, image.height) == (400, 400)
    from PIL import Image

    pixels = Image.open(io.BytesIO(image.encoded_image_string)).convert("L")
    places = ((10, 10), (390, 10), (10, 390), (390, 390))
    assert list(map(pixels.getpixel, places)) == [25, 229, 255, 0]
    (text,) = events_of(run_dir).Tensors("confusion/test/table/text_summary")
    table = text.tensor_proto.string_val[0].decode().splitlines()
    assert table[0] == "| is \\ taken for | cat | dog\\|wolf |"
    assert table[2:] == ["| cat | 9 | 1 |", "| dog\\|wolf |  | 5 |"]
    for odd in ("", "{}", '{"classes": ["a"], "raw": [[0, 7, 1]]}', '{"classes": 3, "raw": [1]}'):  # which is none
        run_dir.confusion.write_text(odd)
        logged(run_dir, VAL | {"split": "test", "step": 21}, resumed_step=20)
    assert len(events_of(run_dir).Images("confusion/test")) == 1


def test_a_run_is_listed_by_its_name_and_one_of_a_sweep_by_both_names(tmp_path: Path) -> None:
    (tmp_path / "ddp-0002").mkdir()
    (tmp_path / "ddp-0002" / "sweep.json").write_text("[]")
    for folder, name in (("ddp-0001", "ddp-0001"), ("ddp-0002/0", "ddp-0002-0")):
        run = RunDir(tmp_path / folder)
        run.path.mkdir()
        tensorboard.build(run, Config(), Start(total_steps=1)).close()
        assert (run.tensorboard / name).is_dir()
