from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trainkit.monitor import energy
from trainkit.monitor.energy import Energy, energy_of, last_sample
from trainkit.run.folder import RunDir

KWH = 3.6e6


class Counted:
    """GPUs of which some count their energy."""

    def __init__(self, **joules: float) -> None:
        self.now = {int(name[1:]): value for name, value in joules.items()}

    def joules(self) -> dict[int, float]:
        return dict(self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(energy, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def package(folder: Path, name: str, joules: float, *, of: str = "package-0", whole: float = 1000.0) -> None:
    found = folder / name
    found.mkdir(parents=True, exist_ok=True)
    (found / "name").write_text(of + "\n")
    (found / "energy_uj").write_text(f"{joules * 1e6:.0f}\n")
    (found / "max_energy_range_uj").write_text(f"{whole * 1e6:.0f}\n")


def measure(gpus: Any, before: dict[str, Any] | None = None, rapl: Path = Path("/nowhere")) -> Energy:
    return Energy(gpus, before or {}, rapl=rapl)


def test_what_gpus_count_themselves_is_taken_from_where_the_run_began() -> None:
    gpus = Counted(g0=5e6, g1=100.0)
    meter = measure(gpus)
    gpus.now = {0: 5e6 + 1.8e6, 1: 100.0 + 1.8e6}
    assert meter.used([{"index": 0, "power_w": 1e9}, {"index": 1}]) == {"gpu_kwh": 1.0}
    gpus.now[0] += 3.6e6
    assert meter.used([]) == {"gpu_kwh": 2.0}


def test_of_others_it_is_their_power_times_the_time_between_two_samples(clock: SimpleNamespace) -> None:
    meter = measure(Counted())
    clock.now += 3600
    assert meter.used([{"index": 3, "power_w": 200.0}]) == {"gpu_kwh": 0.2}
    clock.now += 3600
    assert meter.used([{"index": 3, "power_w": 400.0}, {"index": 4}]) == {"gpu_kwh": 0.5}


def test_processors_count_each_package_once_and_begin_anew_when_the_counter_is_full(tmp_path: Path) -> None:
    for name, of in (("intel-rapl:0", "package-0"), ("intel-rapl:1", "package-1"), ("intel-rapl:0:0", "core")):
        package(tmp_path, name, 900.0, of=of)
    meter = measure(None, rapl=tmp_path)
    package(tmp_path, "intel-rapl:0", 950.0)
    package(tmp_path, "intel-rapl:1", 50.0, of="package-1")
    package(tmp_path, "intel-rapl:0:0", 999.0, of="core")
    assert meter.used([]) == {"cpu_kwh": pytest.approx((50.0 + 150.0) / KWH, rel=0.01)}


def test_where_nobody_tells_nothing_is_claimed(tmp_path: Path) -> None:
    package(tmp_path, "intel-rapl:0", 1.0)
    (tmp_path / "intel-rapl:0" / "energy_uj").unlink()  # as unreadable as it is to all but root
    assert measure(None, rapl=tmp_path).used([]) == {}
    assert measure(Counted()).used([{"index": 0}]) == {}


def test_an_attempt_goes_on_where_the_one_before_has_ended_on_this_host(tmp_path: Path) -> None:
    file = RunDir(tmp_path).hardware("n1")
    assert last_sample(file) == {}
    file.write_text('{"time": 1, "gpu_kwh": 2.0}\n{"time": 2, "gpu_kwh": 3.0}\n{"time": 3, "gp')  # it was killed
    gpus = Counted(g0=0.0)
    meter = measure(gpus, last_sample(file))
    gpus.now[0] = 3.6e6
    assert meter.used([]) == {"gpu_kwh": 4.0}


def test_the_energy_of_a_run_is_that_of_all_its_hosts(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert energy_of(run) is None
    for host, told in (("n1", {"gpu_kwh": 1.5}), ("n2", {"gpu_kwh": 2.0, "cpu_kwh": 0.25}), ("n3", {"gpu_kwh": "x"})):
        run.hardware(host).write_text(json.dumps({"time": 1.0, "gpu_kwh": 0.1}) + "\n" + json.dumps(told) + "\n")
    assert energy_of(run) == {"gpu_kwh": 3.5, "cpu_kwh": 0.25}
