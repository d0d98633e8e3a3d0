"""A run whose data is elsewhere: planned, and tried on made-up images that everybody hears of."""

import json
import re
from pathlib import Path

import pytest
from PIL import Image
from safetensors import safe_open

from tests.jobs.conftest import Command
from tests.rank_functions import run_command
from trainkit.config.loading import load
from trainkit.run.events import read_events
from trainkit.run.folder import RunDir

pytestmark = pytest.mark.usefixtures("no_slurm")
RECIPE = ("recipes/imagenet_resnet50", "data.fake=true", "train.precision=auto")
SMALL = (
    "model.name=resnet9",
    "model.width=8",
    "data.image_size=32",
    "train.global_batch_size=48",
    "launch.gpus_per_node=0",
)
NOTE = "made-up images in place of imagenet: 1000 classes, 32 pixels. Metrics on them mean nothing."


def test_without_the_data_the_plan_is_that_of_the_real_run(command: Command) -> None:
    command("submit", RECIPE[0], "--dry-run").refused(2, "To rehearse without it: data.fake=true")
    err = command("submit", *RECIPE, "--dry-run").ok().err
    assert re.search(r"\ntotal_steps +90072 .*18 epochs, 5004 an epoch: 1,281,167 images", err)
    assert re.search(r"\nimages +made up .*metrics on them mean nothing", err)
    err = command("submit", *RECIPE, "--dry-run", "--executor", "debug").ok().err
    assert re.search(r"\ntrain\.max_steps +1 +rehearsal ", err)
    err = command("submit", *RECIPE, "train.max_steps=3", "--executor", "debug", "--dry-run").ok().err
    assert re.search(r"\ntrain\.max_steps +3 +override ", err)


def test_of_data_of_the_users_own_nobody_knows_the_shape(command: Command, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def data(root):\n    ...\n")
    command("submit", "single", "data.name=mine:data", "data.fake=true").refused(2, "data.name=synthetic")
    assert not (tmp_path / "runs").exists()


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunDir, str, str]:
    folder = tmp_path_factory.mktemp("rehearsal")
    done = run_command("submit", *RECIPE, *SMALL, "--executor", "debug", "--run-dir", "here", cwd=folder)
    assert done.returncode == 0, done.stderr
    return RunDir(folder / "here"), done.stdout, done.stderr


@pytest.mark.nightly
def test_one_update_of_whole_size_is_made_a_few_images_at_a_time(rehearsed: tuple[RunDir, str, str]) -> None:
    run, out, err = rehearsed
    (started,) = read_events(run, "started")
    assert (started["total_steps"], started["micro_batch_size"], started["grad_accum_steps"]) == (1, 8, 6)
    assert (started["steps_per_epoch"], started["made_up"]) == (1_281_167 // 48, True)
    assert f"Note: {NOTE}" in err
    told = re.search(r"Memory of a rank: weights ([\d.]+) MiB, .*image: \d+ MiB with 8 at a time, \d+ MiB with 48", out)
    assert told, out
    assert float(told[1]) == pytest.approx(4 * started["params"] / 2**20, rel=0.1)


@pytest.mark.nightly
def test_all_who_report_of_it_say_that_images_were_made_up(
    rehearsed: tuple[RunDir, str, str], command: Command, tmp_path: Path
) -> None:
    run, out, _ = rehearsed
    here = str(run.path)
    assert "\nmade-up images · val acc1" in out
    assert json.loads(run.summary.read_text())["made_up"] is True
    assert "made-up images" in command("status", here).ok().out
    assert "made-up images, test of step 1" in command("evaluate", here).ok().out
    assert json.loads(command("evaluate", here, "--json").ok().out)["made_up"] is True
    command("report", here).ok()
    for page in ("logbook.md", "report.html"):
        assert "Its images were made up (data.fake)" in (run.path / page).read_text()
    Image.new("RGB", (32, 32)).save(tmp_path / "new.png")
    assert "The model was trained on made-up images" in command("predict", here, str(tmp_path / "new.png")).ok().err
    command("export", here, str(tmp_path / "model.safetensors")).ok()
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata()["data"] == "made-up images in place of imagenet"


@pytest.mark.nightly
def test_what_is_resumed_stays_a_rehearsal_as_it_was(rehearsed: tuple[RunDir, str, str]) -> None:
    config = load(str(rehearsed[0].config)).config
    assert (config.train.max_steps, config.train.micro_batch_size, config.data.fake) == (1, 8, True)


def test_a_real_run_says_nothing_of_the_kind(command: Command, tmp_path: Path) -> None:
    quick = ("train.max_steps=1", "monitor.loggers=[jsonl]", "launch.gpus_per_node=0")
    done = command("train", "single", *quick, "--run-dir", "real").ok()
    told = done.out + done.err + command("status", "real").out + command("evaluate", "real").out
    command("report", "real").ok()
    told += (tmp_path / "real" / "logbook.md").read_text() + (tmp_path / "real" / "summary.json").read_text()
    assert not re.search(r"made.up|fake|Memory of a rank", told)
