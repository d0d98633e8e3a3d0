from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from trainkit.config.loading import load, to_yaml
from trainkit.run.events import append_event
from trainkit.run.folder import RunDir
from trainkit.schedulers.states import CALLS_A_MINUTE, Poller


class Clock:
    """Seconds that pass when the test says so."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("answers", [True, False])
@pytest.mark.parametrize("soon", [True, False])
def test_whatever_happens_a_follower_gives_at_most_six_commands_in_a_minute(
    tmp_path: Path,
    fake_command: Callable[[str, str], Path],
    answers: bool,
    soon: bool,
) -> None:
    run = RunDir.create(tmp_path / "ddp-0001", to_yaml(load("ddp").config))
    append_event(run, "submitted", executor="slurm", job_id="7")
    clock, when = Clock(), []
    calls = [fake_command("squeue", "echo '7|RUNNING|None|0:39|n1'" if answers else "exit 1")]
    calls.append(fake_command("sacct", "exit 1"))
    asker, seen = Poller(run, clock), 0
    while clock.now < 1240:
        assert asker.state(soon=soon).alive == ("yes" if answers else "unknown")
        given = sum(len(file.read_text().splitlines()) for file in calls if file.exists())
        when += [clock.now] * (given - seen)
        seen, clock.now = given, clock.now + 0.5
    assert max(sum(start <= time < start + 60 for time in when) for start in when) <= CALLS_A_MINUTE
    assert len(when) >= 8, "and it goes on asking"


def test_once_something_has_happened_it_is_asked_again_within_seconds(
    tmp_path: Path,
    fake_command: Callable[[str, str], Path],
) -> None:
    run = RunDir.create(tmp_path / "ddp-0001", to_yaml(load("ddp").config))
    append_event(run, "submitted", executor="slurm", job_id="7")
    clock = Clock()
    fake_command("squeue", "echo '7|RUNNING|None|0:39|n1'")
    asker = Poller(run, clock)
    clock.now += 5
    fake_command("squeue", "echo '7|COMPLETED|None|0:44|n1'")
    assert asker.state().state == "RUNNING"
    assert asker.state(soon=True).state == "COMPLETED"
