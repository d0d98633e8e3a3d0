"""What `swarm status` shows of what a swarm has published, strangers' nonsense included."""

import json
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from base58 import b58decode

from jobs.measured_shapes import SwarmStatus
from jobs.swarm import as_object, leaderboard_lines, status_lines
from tests.jobs.test_json import shape_of
from trainkit.config.loading import load, to_yaml
from trainkit.config.task_metrics import metrics_of
from trainkit.run.contributions import Contribution
from trainkit.swarm.peer.status import PeerRow, SwarmRecords, View, view_of
from trainkit.swarm.protocol.addresses import EXAMPLE
from trainkit.swarm.protocol.messages import PROGRESS, Manifest, PeerProgress, records_in

ANNAS = PeerProgress("anna", 3, 640, 1234.5, 0.25, 2, 0.0, parts=6, expected=6, sent=4_510_000, received=800)
ANNA = PeerRow(ANNAS, "anna", "QmAnna12345", "creator", 4, 3.2)
BOS = PeerProgress("bo", 2, 64, 10.0, 2.5, 0, 0.0, signed=b"not for JSON")
BO = PeerRow(BOS, "bo", "QmBo1234567", "client", 3, 9.0)
VIEW = View(
    "hivemind-0001", 5, 15, True, (ANNA, BO), 0.4545, {"loss": 0.3, "acc1": 93.217}, metrics_of("classification"),
    (Contribution("anna", 4, 3000.0, 7200.0, 18_000_000), Contribution("carl", 1, 1000.0, 900.0, 0)),
)  # fmt: skip


def test_status_shows_the_run_and_every_peer_with_who_only_calls_out() -> None:
    assert status_lines(VIEW) == [
        "hivemind-0001: running, round 5/15, 2 peers, 1,244 samples/s, loss 0.4545, val acc1 93.22 %",
        "  peer  role     round  parts  samples  samples/s  loss    up      down   seen     id",
        "  anna  creator  4      6/6    640      1,234      0.2500  4.5 MB  800 B  3 s ago  ..a12345",
        "  bo    client   3      alone  64       10         2.5000  -       -      9 s ago  ..234567",
    ]


def test_the_leaderboard_says_who_has_contributed_how_much_and_trains_now() -> None:
    """By the name of its invitation."""
    dora = Contribution("dora", 1, 0.0, 900.0, 0)
    view = replace(VIEW, peers=(ANNA, replace(BO, credited="carl")), contributions=(*VIEW.contributions, dora))
    assert leaderboard_lines(view) == [
        "hivemind-0001: round 5/15, 4,000 samples of 3 contributors",
        "  name  samples  share   rounds  hours  bytes    now",
        "  anna  3,000    75.0 %  4       2.00   18.0 MB  training",
        "  carl  1,000    25.0 %  1       0.25   0 B      training",
        "  dora  0        0.0 %   1       0.25   0 B      -",
    ]


def test_the_object_for_programs_holds_everything_and_is_json() -> None:
    found = SwarmStatus.model_validate(as_object(VIEW)).plain()
    assert [error.message for error in shape_of("swarm status")[1].iter_errors(found)] == []
    assert [row["role"] for row in found["peers"]] == ["creator", "client"]
    assert (
        found["peers"][0].items()
        >= {"name": "anna", "parts": 6, "sent": 4_510_000, "round": 4, "credited": "anna"}.items()
    )
    assert (found["samples_per_sec"], found["val"]["acc1"]) == (1244.5, 93.217)
    assert (found["contributions"][0]["name"], found["contributions"][0]["bytes"]) == ("anna", 18_000_000)


CREATOR = EXAMPLE.rpartition("/")[2]


def seen(names: dict[str, str] | None = None, **own: Any) -> View:
    """A swarm of its creator and one stranger, whose record says ``own``."""
    manifest = Manifest("id", "run\x1b[2J", to_yaml(load("hivemind").config), int(time.time() / 8), "", 10, 1, 8)
    plain: dict[str, Any] = {"name": "x", "round": 0, "samples": 64, "samples_per_sec": 10.0, "loss": 1.0, "group": 2}
    said = {
        CREATOR: {**plain, "time": time.time(), "val_loss": 0.5, "val_headline": 90.0},
        "QmStranger": {**plain, "time": time.time(), "client": True, "val_headline": 1.0, **own},
    }
    found = SimpleNamespace(value={b58decode(peer): SimpleNamespace(value=record) for peer, record in said.items()})
    progress = records_in(PROGRESS, found)
    accounts = {peer: [Contribution(peer, 1, 64.0, 8.0, 0)] for peer in said}
    return view_of(SwarmRecords({CREATOR: manifest}, progress, accounts, names or {}))


def test_accuracy_and_credit_are_the_creators_account_not_what_a_peer_says() -> None:
    """Credit goes by the name of an invitation."""
    view = seen({"QmStranger": "mallory", CREATOR: "owner"})
    assert {row.peer: row.credited for row in view.peers} == {"QmStranger": "mallory", CREATOR: "x"}
    assert view.val == {"loss": 0.5, "acc1": 90.0}
    assert [item.name for item in view.contributions] == [CREATOR]


@pytest.mark.parametrize(
    "own",
    [
        *({"name": name} for name in ("\x1b]0;evil\x07two\nlines", "x" * 5000)),
        *({"loss": float("inf")}, {"loss": float("nan")}, {"samples_per_sec": 1e300}, {"time": 1e300}),
        {"samples": 10**400, "round": 10**30, "sent": -5},
    ],
)
def test_what_a_stranger_writes_about_itself_cannot_harm_who_looks(own: dict[str, Any]) -> None:
    """Nonsense is not shown; what can be cleaned is."""
    view = seen(**own)
    lines = status_lines(view)
    assert len(lines) == (4 if len(own.get("name", "x" * 200)) <= 128 else 3)
    assert all(line.isprintable() and len(line) < 250 for line in lines)
    assert view.samples_per_sec == pytest.approx(10.0 * len(view.peers))
    assert view.loss == pytest.approx(1.0)
    json.dumps(as_object(view), allow_nan=False)
