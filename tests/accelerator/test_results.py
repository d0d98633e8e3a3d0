"""Results of a run that was trained on a GPU, real or simulated: metrics, predictions, weights to take away."""

import importlib
import json
import os
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from tests.checkpoint.reading import tensors
from tests.rank_functions import run_ranks, train_run
from trainkit.checkpoint import format
from trainkit.cluster.ranks import RankEnv
from trainkit.config.loading import load
from trainkit.data.datasets.digits import build
from trainkit.distributed.device import device_of_rank, peak_memory_mb
from trainkit.inference.predict import predicting
from trainkit.run.folder import RunDir
from trainkit.training.saved_model import images_in

pytestmark = pytest.mark.gpu
IS_REAL = torch.accelerator.is_available()
Gpu = dict[str, str]
ON_CPU = "launch.gpus_per_node=0"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, gpu: Gpu) -> Path:
    """Trained on a GPU, with averaged weights."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    settings = ("launch.gpus_per_node=1", "train.max_steps=40", "train.ema_decay=0.9")
    assert run_ranks(1, train_run, folder, "single", settings, gpu=gpu) == ["finished"]
    return folder


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some of the test split as files, and a broken one."""
    folder = tmp_path_factory.mktemp("images")
    test = build(folder).test
    for index in range(20):
        Image.fromarray(test[index][0][0].numpy()).save(folder / f"{index:02}.png")
    (folder / "broken.png").write_bytes(b"nothing of the kind")
    return folder


def _said(env: RankEnv, verb: str, *words: str) -> tuple[str, str, bool]:
    """Return what a command prints, on stdout and stderr, and True if it has used the GPU."""
    with TemporaryFile("w+") as out, TemporaryFile("w+") as beside:
        with redirect_stdout(out), redirect_stderr(beside):
            code = importlib.import_module(f"jobs.{verb}").main(words, os.environ)
        told = []
        for file in (out, beside):
            file.seek(0)
            told.append(file.read())
    assert not code, told
    return told[0], told[1], peak_memory_mb(device_of_rank(0)) > 0


def said(gpu: Gpu, verb: str, *words: str) -> tuple[str, str, bool]:
    ((out, beside, is_used),) = run_ranks(1, _said, verb, *words, gpu=gpu)
    return out, beside, is_used


def test_the_gpu_and_the_cpu_measure_what_training_has(run: Path, gpu: Gpu) -> None:
    found: list[dict[str, Any]] = []
    for words, on_gpu in (((), True), ((ON_CPU,), False)):
        out, _, is_used = said(gpu, "evaluate", str(run), "--json", *words)
        assert is_used == on_gpu
        found.append(json.loads(out))
    there, here = found
    trained = json.loads((run / "summary.json").read_text())["test"]
    for name in ("acc1", "loss", "ema_acc1", "ema_loss"):
        assert there[name] == pytest.approx(trained[name], rel=1e-5)
        assert there[name] == (pytest.approx(here[name], rel=2e-3) if IS_REAL else here[name])
    assert IS_REAL or there["confusion"] == here["confusion"]


@pytest.mark.long
@pytest.mark.skipif(IS_REAL, reason="a real one has what it has")
def test_a_gpu_without_float64_such_as_apples_measures_the_same(run: Path, gpu: Gpu) -> None:
    words = ("evaluate", str(run), "--json", "--per-class", "--knn")
    there, without = (json.loads(said(own, *words)[0]) for own in (gpu, {**gpu, "SIM_FLOAT64": "0"}))
    assert "ece" in there
    assert there == without


def test_features_tell_classes_on_the_gpu_as_on_the_cpu(run: Path, gpu: Gpu) -> None:
    probes = ("--knn", "--linear-probe", "--weights", "raw")
    there, here = (json.loads(said(gpu, "evaluate", str(run), "--json", *probes, *on)[0]) for on in ((), (ON_CPU,)))
    for name in ("knn_acc1", "linear_acc1"):
        assert there[name] == (pytest.approx(here[name], abs=1.0) if IS_REAL else here[name])


def test_images_are_told_apart_on_the_gpu_as_on_the_cpu(run: Path, gpu: Gpu, images: Path) -> None:
    there, beside, is_used = said(gpu, "predict", str(run), str(images), "--batch-size", "8", "--speed", "2")
    here, _, is_used_here = said(gpu, "predict", str(run), str(images), "--batch-size", "8", ON_CPU)
    assert (is_used, is_used_here) == (True, False)
    assert len(there.splitlines()) == 22
    classes = [[line.split(",")[:2] for line in told.splitlines()] for told in (there, here)]
    assert classes[0] == classes[1]
    assert IS_REAL or there == here
    assert "broken.png" in beside
    assert "batch size     2: " in beside


def _places_of(env: RankEnv, folder: Path, images: Path) -> set[str]:
    config = load(str(folder / "config.yaml"), []).config
    with predicting(config, RunDir.open(folder), "best") as predictor:
        assert next(predictor.module.parameters()).device == device_of_rank(0)
        told = predictor.predict(images_in(images)[0], 8)
        return {one.values.device.type for one in told if one.values is not None}


def test_predictions_lie_in_the_hosts_memory(run: Path, gpu: Gpu, images: Path) -> None:
    assert run_ranks(1, _places_of, run, images, gpu=gpu) == [{"cpu"}]


def test_weights_are_exported_without_the_gpu(run: Path, gpu: Gpu, tmp_path: Path) -> None:
    for kind, stem in (("raw", "model"), ("ema", "ema")):
        file = tmp_path / f"{kind}.safetensors"
        out, _, is_used = said(gpu, "export", str(run), str(file), "--weights", kind)
        step = format.resolve(run / "checkpoints", "best")
        assert f"weights of step {step} (best)" in out
        assert not is_used
        taken, saved = load_file(file), tensors(run / "checkpoints", stem, "best")
        assert taken.keys() == saved.keys()
        assert all(torch.equal(taken[name], saved[name]) for name in saved)
