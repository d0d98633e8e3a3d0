"""Each move to a GPU and back, and each wait for one, is needed: without it a test fails, on a simulated accelerator.

Not here are waits before a time is taken, in `trainkit.bench.rank`, `trainkit.swarm.peer.rounds` and `predict --speed`:
the simulated GPU computes at once. Nor are ``non_blocking`` for memory that is not pinned, and who pins a batch: only
CUDA itself tells (test_no_update_waits_for_the_gpu).
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.shell import PROJECT

TESTS = (
    "tests/training/test_gpu.py", "tests/accelerator/test_places.py", "tests/accelerator/test_results.py",
    "tests/accelerator/test_commands.py",
)  # fmt: skip
# Room -> the folder in which what is taken out stands in one place.
LOADER = AUGMENT = POLICIES = "data"
SAVE = STATE = "checkpoint"
DEVICE = HEALTH = DP = "distributed"
PRECISION = BUILD = METER = TIMING = DISTILLATION = SAVED = "training"
DILOCO = "swarm"
# Room, what is taken out of it, what stands there instead, and the test that notices.
MISSING = {
    "the loader's stream is not waited for": (LOADER, "user.wait_stream(stream)", "pass", "wherever"),
    "a batch is given back while it is read": (LOADER, "item.record_stream(user)", "pass", "prefetch"),
    "a batch stays where it was": (LOADER, "return item.to(device, non_blocking=True)", "return item", "prefetch"),
    "the copies of a save are not awaited": (SAVE, "copied.synchronize()", "pass", "save_copies"),
    "they are awaited from before they began": (SAVE, "copied.record()", "pass", "save_copies"),
    "the copies are not pinned": (SAVE, "pin_memory=later", "pin_memory=False", "save_copies"),
    "no optimizer hears of gradients that are no numbers": (
        PRECISION, "optimizer.found_inf = nonfinite", "pass", "no_numbers"),
    "the loss is not scaled": (PRECISION, "self._scaler.scale(loss).backward()", "loss.backward()", "overflow"),
    "the GPU's random numbers are not seeded": (
        DEVICE, 'getattr(module, "manual_seed_all", module.manual_seed)(seed)', "pass", "whole_one and ddp and fp32"),
    "every rank computes on the first GPU": (
        DEVICE, "device_index(local_rank, torch.accelerator.device_count())", "0", "more_ranks"),
    "the model stays on the CPU": (
        BUILD, "        plain = to_device(plain, config, dist.device)\n",
        '        plain = to_device(plain, config, torch.device("cpu"))\n', "EMA"),
    "what replicas compute stays where it is": (DP, "copies, moved).to(first)", "copies, moved)", "together and dp"),
    "replicas have no copies": (DP, "name: tensor.to(device) for", "name: tensor for", "together and dp"),
    "nor their part of the batch": (DP, "item.to(device) for item in part", "item for item in part", "together and dp"),
    "the data stay on the CPU": (LOADER, "(part.images.to(device), part", "(part.images, part", "wherever"),
    "a teacher does": (DISTILLATION, "saved.module.requires_grad_(False).to(device)",
        "saved.module.requires_grad_(False)", "does and teacher"),
    "how it sees an image does": (DISTILLATION, "constants.to(device)", "constants", "does and teacher"),
    "what is known of an image goes where no sums can be": (METER, "mask.to(sums.device)", "mask", "apples and trains"),
    "classes do": (METER, "(known.to(sure.device) for known in (told, target, mask))",
        "(told, target, mask)", "apples and trains"),
    "the labels do": (LOADER, ", part.labels.to(device))", ", part.labels)", "EMA"),
    "what is drawn for an epoch does": (LOADER, "draw(keys).to(device, non_blocking=True)", "draw(keys)", "mixing"),
    "the order of an epoch does": (LOADER, "len(samples)).to(device, non_blocking=True)", "len(samples))", "mixing"),
    "scale and shift do": ("data", "dtype=torch.float32).to(device, non_blocking=True)", "dtype=torch.float32)", "EMA"),
    "the order of a policy does": (POLICIES, "order.to(images.device, non_blocking=True)", "order", "mixing"),
    "the order before it does": (
        POLICIES, "places.argsort().to(images.device, non_blocking=True)", "places.argsort()", "mixing"),
    "the pixels of a rotation do": (
        POLICIES, ".int().flatten().to(device, non_blocking=True)", ".int().flatten()", "mixing"),
    "how strong an operation is does": (
        POLICIES, "strength.float().to(images.device, non_blocking=True)", "strength.float()", "mixing"),
    "the kernel of a sharpness does": (POLICIES, "kernel.to(device, non_blocking=True)", "kernel", "mixing"),
    "what is drawn for pairs does": (AUGMENT, "width).to(images.device, non_blocking=True)", "width)", "mixing"),
    "what fills an erased part does": (AUGMENT, "_NOISE).to(device, non_blocking=True)", "_NOISE)", "mixing"),
    "where a part is erased does": (AUGMENT, "sides[chosen].to(device, non_blocking=True)", "sides[chosen]", "mixing"),
    "the weights of classes do": ("training", "self._weights.to(target.device)", "self._weights", "weights"),
    "zero does not wait for what others send": ("distributed/strategies", "work.wait()", "pass", "together and zero"),
    "a bandwidth is told before it is measured": (
        HEALTH, "group.allreduce([seconds], options).wait()", "group.allreduce([seconds], options)", "check_measures"),
    "another loses its time": (HEALTH, "group.allreduce([message], options).wait()",
        "group.allreduce([message], options)", "is_timed and CPU"),
    "a transfer is timed until it is queued": (HEALTH, "    devices.synchronize(device)\n", "", "is_timed and GPU"),
    "nobody waits for a device": (DEVICE, "torch.accelerator.synchronize(device)", "pass", "is_timed and GPU"),
    "known sums of a product stay on the GPU": (
        HEALTH, "@ devices.as_float64(b)).cpu()", "@ devices.as_float64(b))", "check_measures"),
    "those that came out do": (HEALTH, "(product).sum(0).cpu()", "(product).sum(0)", "check_measures"),
    "its checksum is taken there": (HEALTH, "product.cpu().numpy()", "product.numpy()", "check_measures"),
    "ranks do not make their GPU the current one": (
        DEVICE, "torch.accelerator.set_device_index(device)", "pass", "whole_one and ddp and fp32"),
    "what a rank is sent goes over the host": (
        STATE, "value.to(self._dist.device).contiguous()", "value.contiguous()", "gpu_to_gpu"),
    "counts that it is sent stay on the GPU": (STATE, "value = value.cpu()", "pass", "sees_no"),
    "counts of rows stay with the host": (STATE, "count.to(target.device) if shape else count", "count", "sees_no"),
    "what is written is not copied from the GPU": (STATE, "value.detach().cpu()", "value.detach()", "save_copies"),
    "the clock reads marks that the GPU has not reached": (
        TIMING, "self._marks[-1][1].synchronize()", "pass", "tells_its_time"),
    "its marks keep no time": (TIMING, "torch.Event(enable_timing=True)", "torch.Event()", "tells_its_time"),
    "it takes marks for reached": (
        TIMING, "sum(mark.query() for _, mark in self._marks)", "len(self._marks)", "loses_no_time"),
    "a peak of memory is not forgotten": (
        DEVICE, "torch.accelerator.reset_peak_memory_stats(device)", "pass", "larger_one_took"),
    "nor is freed memory given back": (DEVICE, "torch.accelerator.empty_cache()", "pass", "larger_one_took"),
    "a run tells the memory of trials": ("training", "    forget_peak(dist.device)", "    pass", "its_own_memory"),
    "a loader's batches are not pinned": (
        LOADER, "pin_memory=device is not None and copies_later(device)", "pin_memory=False", "beside_the_loop"),
    "the loop waits for the copy of a batch": (
        LOADER, "return item.to(device, non_blocking=True)", "return item.to(device)", "is_copied"),
    "a batch stays where nothing is pinned": (LOADER, "lambda item: item.to(device))", "lambda item: item)", "gets_to"),
    "training waits for the copies of a save": (SAVE, "non_blocking=later)", "non_blocking=False)", "while_a_save"),
    "sums of metrics are kept by the host": (METER, "torch.zeros(2, device=dist.device)", "torch.zeros(2)", "EMA"),
    "sums of its calibration are": (METER, "3, device=dist.device)", "3)", "EMA"),
    "counts of classes are": (METER, "dtype=torch.int64, device=dist.device)", "dtype=torch.int64)", "EMA"),
    "scores are pooled on the GPU": (METER, "torch.cat(column).cpu()", "torch.cat(column)", "end_of_a_pass"),
    "mistakes are drawn there": (METER, "(tensor.cpu() for tensor in self._kept)", "self._kept", "end_of_a_pass"),
    "a norm of nothing is the host's": (
        PRECISION, ".to(gradients[0].device if gradients else self._dist.device)", "", "without_a_share"),
    "thin gradients begin with the host": ("distributed", "first.to(buffer)", "first", "thin_gradients"),
    "an image whose speed is measured stays there": (
        "inference", ".contiguous().to(saved.device)", ".contiguous()", "told_apart"),
    "predictions stay on the GPU": (SAVED, "self.values(pixels).cpu()[", "self.values(pixels)[", "hosts_memory"),
    "what of a batch is filled in does": (SAVED, "[mask.cpu()]", "[mask]", "told_apart"),
    "features that are told apart do not get there": (
        "inference", "yield some.to(device), labels.to(device)", "yield some, labels", "features_tell"),
    "nor does their mean": ("inference", "mean = mean.to(device)", "pass", "features_tell"),
    "nor does their spread": ("inference", ".sqrt().to(device)", ".sqrt()", "features_tell"),
    "what a peer gives does": (DILOCO, "torch.cat(parts).cpu()", "torch.cat(parts)", "peer_with_a_gpu"),
    "what moves a peer's model does not get there": (
        DILOCO, "part.to(tensor.device, tensor.dtype)", "part", "peer_with_a_gpu"),
    "a snapshot stays on the GPU": (
        DILOCO, "place.view(value.shape).copy_(value.detach())", "value.detach().clone()", "peer_with_a_gpu"),
}  # fmt: skip


def place_of(text: str, room: str, project: Path) -> Path:
    """Return the one file of a room that holds the text."""
    (file,) = (file for file in (project / "trainkit" / room).rglob("*.py") if text in file.read_text("utf-8"))
    return file


@pytest.mark.parametrize("what", MISSING)
def test_what_is_to_be_taken_out_stands_in_one_place(what: str) -> None:
    room, taken, *_ = MISSING[what]
    assert place_of(taken, room, PROJECT).read_text("utf-8").count(taken) == 1


@pytest.mark.long
@pytest.mark.parametrize("what", MISSING)
def test_a_missing_wait_is_noticed(tmp_path: Path, gpu: dict[str, str], what: str) -> None:
    room, taken, instead, noticed_by = MISSING[what]
    for name in ("trainkit", "tests", "jobs", "configs"):
        shutil.copytree(PROJECT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(PROJECT / "pyproject.toml", tmp_path)
    file = place_of(taken, room, tmp_path)
    file.write_text(file.read_text("utf-8").replace(taken, instead), "utf-8")
    options = ("-q", "-x", "-p", "no:cacheprovider", "-m", "long or not long", "-k", noticed_by)
    command = [sys.executable, "-m", "pytest", *options, *TESTS]
    env = {**os.environ, **gpu, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 1, done.stdout[-2000:] + done.stderr[-2000:]
    assert "1 failed" in done.stdout
