import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import chain, islice, repeat
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.nvml import fake_nvml
from tests.runs import script, wait_until
from trainkit.monitor.hardware import Energy, Gpus, open_gpus, sample_hardware, visible_indices
from trainkit.run.folder import RunDir
from trainkit.run.metrics import energy_of, last_sample


def samples(folder: Path) -> list[dict[str, Any]]:
    file = RunDir(folder).hardware("node1")
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def sample_of(folder: Path, device: str = "cpu", meanwhile: Callable[[], object] = lambda: None) -> dict[str, Any]:
    """The one sample of a run that is shorter than the interval."""
    with sample_hardware(RunDir(folder), "node1", 3600.0, device):
        meanwhile()
    (sample,) = samples(folder)
    return sample


def compute(seconds: float, clock: Callable[[], float] = time.process_time) -> None:
    began = clock()
    while clock() - began < seconds:
        pass


def test_samples_of_the_machine_and_of_this_process_are_taken_all_along(tmp_path: Path) -> None:
    with sample_hardware(RunDir(tmp_path), "node1", 0.02, "cpu"):
        deadline = time.monotonic() + 10
        while len(samples(tmp_path)) < 2 and time.monotonic() < deadline:
            compute(0.05)
    first, *_, last = samples(tmp_path)
    assert first["time"] < last["time"]
    assert abs(last["time"] - time.time()) < 60
    assert 0 <= last["cpu_percent"] <= 100
    assert max(sample["process_cpu_percent"] for sample in samples(tmp_path)) > 0
    assert 0 < last["process_memory_mb"] < last["memory_total_mb"]
    assert 0 < last["memory_used_mb"] <= last["memory_total_mb"]


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="the kernel of Linux tells it")
def test_a_sample_has_what_others_had_of_the_cpus(tmp_path: Path) -> None:
    # A shell that ends leaves them to somebody else: they are no children of this process any more.
    count = 4 * len(os.sched_getaffinity(0))
    loops = f"for i in $(seq {count}); do sh -c 'while :; do :; done' > /dev/null 2>&1 & echo $!; done"
    taken = []
    for end in ("", "; wait"):  # others', and this process's own
        folder = tmp_path / f"run{end}"
        folder.mkdir()
        with subprocess.Popen(["sh", "-c", loops + end], stdout=subprocess.PIPE, text=True) as shell:
            assert shell.stdout is not None
            pids = list(map(int, islice(shell.stdout, count)))
            try:
                sample = sample_of(folder, meanwhile=lambda: compute(0.5, time.monotonic))
            finally:
                for pid in pids:
                    os.kill(pid, signal.SIGKILL)
        assert sample["load"] > 0
        taken.append(sample["cpu_taken"])
    assert taken[0] > 50
    assert taken[1] < taken[0] - 5, "its own processes are no others"


@pytest.mark.parametrize(("gpus", "driver", "device"), [(0, True, "cuda"), (0, False, "cuda:0"), (4, True, "cpu")])
def test_without_gpus_or_their_driver_a_machine_is_sampled_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: int, driver: bool, device: str
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(gpus=gpus, driver=driver))
    assert "gpus" not in sample_of(tmp_path, device)
    assert not list(tmp_path.glob("nvidia-smi-*"))


def test_the_gpus_of_the_mask_are_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reading that a GPU does not tell is left out."""
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(gpus=4))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,1")
    assert sample_of(tmp_path, "cuda:0")["gpus"] == [
        {"index": 2, "util_percent": 92, "memory_used_mb": 2000.0, "memory_total_mb": 16000.0, "power_w": 62.5},
        {"index": 1, "util_percent": 91, "memory_used_mb": 1000.0, "memory_total_mb": 16000.0, "power_w": 61.5},
    ]


GROWS = [{"memory_used_mb": 500.0}, {"memory_used_mb": 3000.0}]


@pytest.mark.parametrize(
    ("held", "fails", "shown"),
    [(GROWS, False, ["2"]), (GROWS, True, []), ([], False, ["1"])],
    ids=["it grows", "no answer", "the GPU does not tell"],
)
def test_what_nvidia_smi_shows_is_kept_from_when_they_hold_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held: list[dict[str, float]], fails: bool, shown: list[str]
) -> None:
    answer = "exit 9" if fails else f"echo x >> {tmp_path}/times; wc -l < {tmp_path}/times"
    script(tmp_path / "bin" / "nvidia-smi", answer)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    told = chain(held, repeat({}))
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(gpus=1))
    monkeypatch.setattr(Gpus, "samples", lambda self: [{"index": 0, **next(told)}])
    with sample_hardware(RunDir(tmp_path), "node1", 0.01, "cuda:0"):
        wait_until(lambda: len(samples(tmp_path)) >= 4)
    assert [file.read_text().strip() for file in tmp_path.glob("nvidia-smi-*.txt")] == shown


def test_a_sampler_that_fails_says_so_and_leaves_training_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "system-node1.jsonl").mkdir()
    with sample_hardware(RunDir(tmp_path), "node1", 3600.0, "cpu"):
        pass
    assert "No more hardware samples in system-node1.jsonl: " in capsys.readouterr().err


UUIDS = ["GPU-aa11", "GPU-bb22", "GPU-bb33"]


def test_a_mask_is_read_as_cuda_reads_it() -> None:
    indices = {
        None: [0, 1, 2], "": [], "0": [0], "2,0": [2, 0], " 1 , 2 ": [1, 2], "1,7,0": [1], "-1": [],
        "GPU-bb22,GPU-aa": [1, 0], "GPU-bb": [], "NoDevFiles": [],
    }  # fmt: skip
    assert {mask: visible_indices(mask, UUIDS) for mask in indices} == indices


def fake_amdsmi(gpus: int) -> ModuleType:
    """AMD's library with GPUs of which the first is an MI300X, the others MI250X, as ROCm 6.4 tells of them."""

    class AmdSmiException(Exception):
        pass

    def activity(handle: int) -> dict[str, Any]:
        if handle == 2:
            raise AmdSmiException("not supported")
        return {"gfx_activity": 90 + handle, "umc_activity": "N/A"}

    smi: Any = ModuleType("amdsmi")
    smi.AmdSmiException = AmdSmiException
    smi.AmdSmiMemoryType, smi.AmdSmiTemperatureMetric = SimpleNamespace(VRAM=0), SimpleNamespace(CURRENT=0)
    smi.AmdSmiTemperatureType = SimpleNamespace(JUNCTION=1)
    smi.amdsmi_init = lambda: None
    smi.amdsmi_get_processor_handles = lambda: list(range(gpus))
    smi.amdsmi_get_gpu_device_uuid = lambda handle: f"uuid-{handle}"
    smi.amdsmi_get_gpu_activity = activity
    smi.amdsmi_get_gpu_memory_usage = lambda handle, kind: (1000 + handle) * 2**20
    smi.amdsmi_get_gpu_memory_total = lambda handle, kind: 65536 * 2**20
    smi.amdsmi_get_power_info = lambda handle: {
        "current_socket_power": 700 if handle == 0 else "N/A", "average_socket_power": "N/A" if handle == 0 else 500,
    }  # fmt: skip
    smi.amdsmi_get_temp_metric = lambda handle, kind, metric: 60 + handle
    smi.amdsmi_get_energy_count = lambda handle: (
        {"power": 2_000_000, "counter_resolution": 15.3, "timestamp": 7} if handle else {"energy_accumulator": "N/A"}
    )
    return smi  # type: ignore[no-any-return]


def test_gpus_by_amd_are_sampled_below_both_of_their_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(gpus=0, driver=False))
    monkeypatch.setitem(sys.modules, "amdsmi", fake_amdsmi(4))
    common = {"memory_total_mb": 65536.0}
    first = {"util_percent": 90, "memory_used_mb": 1000.0, "power_w": 700, "temperature_c": 60, **common}
    third = {"memory_used_mb": 1002.0, "power_w": 500, "temperature_c": 62, **common}
    found = open_gpus({"ROCR_VISIBLE_DEVICES": "2,0,3", "HIP_VISIBLE_DEVICES": "1,0", "CUDA_VISIBLE_DEVICES": "2"})
    assert found.samples() == [{"index": 0, **first}, {"index": 2, **third}]
    assert found.joules() == {2: pytest.approx(30.6)}
    assert [*open_gpus({"CUDA_VISIBLE_DEVICES": "3"}).handles] == [3]
    assert [*open_gpus({}).handles] == [0, 1, 2, 3]


class Counted(Gpus):
    """GPUs of which some count their energy."""

    def __init__(self, **joules: float) -> None:
        self.now = {int(name[1:]): value for name, value in joules.items()}

    def joules(self) -> dict[int, float]:
        return dict(self.now)


def test_what_gpus_count_themselves_is_taken_from_where_the_run_began() -> None:
    gpus = Counted(g0=5e6, g1=100.0)
    meter = Energy(gpus, {})
    gpus.now = {0: 5e6 + 1.8e6, 1: 100.0 + 1.8e6}
    assert meter.used() == {"gpu_kwh": 1.0}
    gpus.now[0] += 3.6e6
    assert meter.used() == {"gpu_kwh": 2.0}


def test_energy_goes_on_from_the_attempt_before_and_is_that_of_all_hosts(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    file = run.hardware("n1")
    assert (last_sample(file), energy_of(run)) == ({}, None)
    file.write_text('{"time": 1, "gpu_kwh": 2.0}\n{"time": 2, "gpu_kwh": 3.0}\n{"time": 3, "gp')  # it was killed
    gpus = Counted(g0=0.0)
    meter = Energy(gpus, last_sample(file))
    gpus.now[0] = 3.6e6
    assert meter.used() == {"gpu_kwh": 4.0}

    for host, told in (("n1", {"gpu_kwh": 1.5}), ("n2", {"gpu_kwh": 2.0, "cpu_kwh": 0.25}), ("n3", {"gpu_kwh": "x"})):
        run.hardware(host).write_text(json.dumps({"time": 1.0, "gpu_kwh": 0.1}) + "\n" + json.dumps(told) + "\n")
    assert energy_of(run) == {"gpu_kwh": 3.5, "cpu_kwh": 0.25}
