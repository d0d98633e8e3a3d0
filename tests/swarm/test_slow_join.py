"""A peer that joins, by hand and as a job, where torch takes longer to load than a start may take without a word."""

from pathlib import Path

import pytest

from tests.launch.test_slow_starts import REAL, SECONDS
from tests.swarm.conftest import PROJECT, Commands
from trainkit.run.events import read_events
from trainkit.run.folder import RunDir


@pytest.mark.swarm
@pytest.mark.long
def test_who_loads_slowly_joins_and_takes_part(commands: Commands, tmp_path: Path) -> None:
    (tmp_path / "slow").mkdir()
    (tmp_path / "slow" / "sitecustomize.py").write_text(REAL.format(seconds=SECONDS))
    slowly = {"PYTHONPATH": f"{tmp_path / 'slow'}:{PROJECT}"}
    creator, token = commands.create("collaborative.round_seconds=4", "collaborative.rounds=500")
    joined = commands._start("jobs.join", token, "--allow-code", *commands.folder_of("guest"), env=slowly)
    here = ("--executor", "local", "--gpus-per-node", "0", "--wait", "--allow-code", "data.workers=0")
    words = ("hivemind", "--join", token, *here, *commands.folder_of("job"))
    submitted = commands._start("jobs.submit", *words, env=slowly)
    creator.says("3 peers averaged", 240)
    assert commands.start("swarm", "stop").ends() == 0
    assert [peer.ends() for peer in (creator, joined, submitted)] == [0, 0, 0]
    for name in ("guest", "job"):
        assert read_events(RunDir(commands.run(name)), "started"), commands.run(name)
