"""What the commands of all peers share."""

from __future__ import annotations

from pathlib import Path

import pytest

from jobs.join import say_end
from trainkit import fileio
from trainkit.run.folder import RunDir


def test_who_leaves_is_told_what_it_has_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = RunDir.create(tmp_path / "run", "seed: 0\n")
    for index, peers in enumerate((3, 1, 2)):
        told = {"split": "train", "step": index, "peers": peers, "bytes_up": 0 if peers == 1 else 700_000}
        fileio.append_jsonl(run.metrics, {"time": 1.8e9, "epoch": 1.0, "loss": 1.0, **told})
    say_end("stopped", run)
    said = capsys.readouterr().out.splitlines()
    assert said[:2] == ["Left the swarm.", "Averaged with others in 2 rounds, 1.4 MB sent."]


def test_who_has_met_nobody_has_given_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    say_end("stopped", RunDir.create(tmp_path / "run", "seed: 0\n"))
    assert "Averaged" not in capsys.readouterr().out
