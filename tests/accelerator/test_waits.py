"""Each wait for a GPU is needed: without it the tests of training on one fail, on the simulated accelerator."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.shell import PROJECT

pytestmark = [pytest.mark.long]
GPU = "tests/training/test_gpu.py"
LOADER, SAVE, DEVICE = "trainkit/data/loader.py", "trainkit/checkpoint/save.py", "trainkit/distributed/device.py"
PRECISION, BUILD, DP = "trainkit/training/precision.py", "trainkit/training/build.py", "trainkit/strategies/dp.py"
AUGMENT, HEALTH = "trainkit/data/augment.py", "trainkit/distributed/health.py"
# File, what is taken out of it, what stands there instead, and the test that notices.
MISSING = {
    "the loader's stream is not waited for": (LOADER, "user.wait_stream(stream)", "pass", "wherever"),
    "a batch is given back while it is read": (LOADER, "item.record_stream(user)", "pass", "prefetch"),
    "a batch stays where it was": (LOADER, "pinned(item).to(device, non_blocking=True)", "item", "prefetch"),
    "the copies of a save are not awaited": (SAVE, "copied.synchronize()", "pass", "save_copies"),
    "they are awaited from before they began": (SAVE, "copied.record()", "pass", "save_copies"),
    "the copies are not pinned": (SAVE, "pin_memory=later", "pin_memory=False", "save_copies"),
    "no optimizer hears of gradients that are no numbers": (
        PRECISION, "optimizer.found_inf = nonfinite", "pass", "no_numbers",
    ),
    "the loss is not scaled": (PRECISION, "self._scaler.scale(loss).backward()", "loss.backward()", "overflow"),
    "the GPU's random numbers are not seeded": (
        DEVICE, 'getattr(module, "manual_seed_all", module.manual_seed)(seed)', "pass", "whole_one and ddp and fp32",
    ),
    "every rank computes on the first GPU": (
        DEVICE, "device_index(local_rank, torch.accelerator.device_count())", "0", "more_ranks",
    ),
    "the model stays on the CPU": (
        BUILD, "to_device(plain, config, dist.device)", 'to_device(plain, config, torch.device("cpu"))', "EMA",
    ),
    "what replicas compute stays where it is": (DP, "copies, moved).to(first)", "copies, moved)", "together and dp"),
    "replicas have no copies": (DP, "name: tensor.to(device) for", "name: tensor for", "together and dp"),
    "nor their part of the batch": (DP, "item.to(device) for item in part", "item for item in part", "together and dp"),
    "the data stay on the CPU": (LOADER, "(part.images.to(device), part", "(part.images, part", "wherever"),
    "the labels do": (LOADER, ", part.labels.to(device))", ", part.labels)", "EMA"),
    "what is drawn for an epoch does": (LOADER, "draw(keys).to(device, non_blocking=True)", "draw(keys)", "mixing"),
    "the order of an epoch does": (LOADER, "share.to(device, non_blocking=True)", "share", "mixing"),
    "scale and shift do": (
        "trainkit/data/base.py", "dtype=torch.float32).to(device, non_blocking=True)", "dtype=torch.float32)", "EMA",
    ),
    "the order of RandAugment does": (
        AUGMENT, "order.to(images.device, non_blocking=True)", "order", "mixing",
    ),
    "the order before it does": (
        AUGMENT, "places.argsort().to(images.device, non_blocking=True)", "places.argsort()", "mixing",
    ),
    "the pixels of a rotation do": (
        AUGMENT, ".flatten().to(device, non_blocking=True)", ".flatten()", "mixing",
    ),
    "what is drawn for pairs does": (
        AUGMENT, "width).to(images.device, non_blocking=True)", "width)", "mixing",
    ),
    "what fills an erased part does": (
        AUGMENT, "_NOISE).to(device, non_blocking=True)", "_NOISE)", "mixing",
    ),
    "where a part is erased does": (
        AUGMENT, "(item.to(device, non_blocking=True) for item in (sides", "(item for item in (sides", "mixing",
    ),
    "the weights of classes do": (
        "trainkit/tasks/classification.py", "self._weights.to(target.device)", "self._weights", "weights",
    ),
    "zero does not wait for what others send": (
        "trainkit/strategies/zero.py", "work.wait()", "pass", "together and zero",
    ),
    "a bandwidth is told before it is measured": (
        HEALTH, "group.allreduce([seconds], options).wait()", "group.allreduce([seconds], options)", "check_measures",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", MISSING)
def test_a_missing_wait_is_noticed(tmp_path: Path, gpu: dict[str, str], what: str) -> None:
    file, taken, instead, noticed_by = MISSING[what]
    for name in ("trainkit", "tests", "jobs", "configs"):
        shutil.copytree(PROJECT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(PROJECT / "pyproject.toml", tmp_path)
    text = (tmp_path / file).read_text("utf-8")
    assert text.count(taken) == 1, "it stands elsewhere by now"
    (tmp_path / file).write_text(text.replace(taken, instead), "utf-8")
    options = ("-q", "-x", "-p", "no:cacheprovider", "-m", "long or not long", "-k", noticed_by)
    command = [sys.executable, "-m", "pytest", *options, GPU, "tests/accelerator/test_commands.py"]
    env = {**os.environ, **gpu, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 1, done.stdout[-2000:] + done.stderr[-2000:]
    assert "1 failed" in done.stdout
