"""Three strikes, and the list of who is out."""

from __future__ import annotations

from pathlib import Path

import pytest

from jobs import swarm
from trainkit.collaborative.bans import STRIKES, Ban, Bans, Strikes
from trainkit.collaborative.screening import Verdict
from trainkit.errors import UserError
from trainkit.records.rundir import RunDir

EVE = Ban("QmEve", "eve", "sent values that are not finite")
DROPPED = Verdict("QmEve", "dropped", EVE.why)


def test_three_rounds_in_a_row_are_too_many_and_a_good_one_between_starts_anew() -> None:
    strikes, both = Strikes(), ["QmEve", "QmAnn"]
    assert [strikes.note([DROPPED], both) for _ in range(STRIKES - 1)] == [{}] * (STRIKES - 1)
    assert strikes.note([], both) == {}
    assert [strikes.note([DROPPED], both) for _ in range(STRIKES - 1)] == [{}] * (STRIKES - 1)
    assert strikes.note([DROPPED], both) == {"QmEve": EVE.why}


def test_staying_away_for_a_round_does_not_wipe_the_slate() -> None:
    strikes = Strikes()
    for _ in range(STRIKES - 1):
        strikes.note([DROPPED], ["QmEve"])
        strikes.note([], ["QmAnn"])
    assert strikes.note([DROPPED], ["QmEve"]) == {"QmEve": EVE.why}


def test_to_be_clipped_is_no_strike() -> None:
    strikes = Strikes()
    assert [strikes.note([Verdict("QmEve", "clipped", "long")], ["QmEve"]) for _ in range(5)] == [{}] * 5


def test_the_memory_of_suspects_is_bounded() -> None:
    strikes = Strikes()
    strikes.note([Verdict(f"Qm{index}", "dropped", "") for index in range(5000)], [])
    assert len(strikes.counts) <= 1000


def test_a_ban_is_read_by_whoever_opens_the_run_and_lifted_by_name(tmp_path: Path) -> None:
    running, command = Bans(tmp_path / "bans.jsonl"), Bans(tmp_path / "bans.jsonl")
    assert running.read() == {}
    running.add(EVE)
    running.add(EVE)
    assert command.read() == {"QmEve": EVE}
    assert command.lift("bob") == []
    assert command.lift("eve") == [EVE]
    assert running.read() == {}


def test_a_torn_or_foreign_line_bans_nobody_and_hides_nobody(tmp_path: Path) -> None:
    file = tmp_path / "bans.jsonl"
    file.write_text('{"id": 5}\n["QmAnn"]\n{"name": "x"}\n{"id": "QmBob", "name"', encoding="utf-8")
    Bans(file).add(EVE)
    assert Bans(file).read() == {"QmEve": EVE}


def test_without_a_run_folder_the_list_lasts_as_long_as_its_peer() -> None:
    bans = Bans(None)
    bans.add(EVE)
    assert bans.read() == {"QmEve": EVE}
    assert bans.lift("QmEve") == [EVE]
    assert bans.read() == {}


def test_unban_lifts_the_ban_of_a_run_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = RunDir.create(tmp_path / "swarm-1", "seed: 0")
    Bans(run.path / "bans.jsonl").add(EVE)
    with pytest.raises(UserError, match="Nobody called bob is banned") as refused:
        swarm.main(["unban", "bob", str(run.path)], {})
    assert "Banned are: eve." in str(refused.value)
    assert swarm.main(["unban", "eve", str(run.path)], {}) == 0
    assert capsys.readouterr().out == "eve may take part again from the next round of swarm-1.\n"
    assert Bans(run.path / "bans.jsonl").read() == {}
