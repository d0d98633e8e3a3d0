"""Auditing: whom the owner asks to show its work, what of it, and what follows for who has failed an audit."""

import base64
import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import median
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.swarm.audited import NOTHING, TRUE, Swarm, half_turned, leapt, noisy, other_rates
from trainkit.swarm.protocol.addresses import MEGABIT
from trainkit.swarm.protocol.codecs import PART
from trainkit.swarm.trust.accounts import Account, Commitment, is_too_slow, num_stretches, snapshot_bytes
from trainkit.swarm.trust.auditor import Accounts, Heard, drawn_of


@pytest.fixture(autouse=True)
def clock_by_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Snapshots take no time, also where the machine has much to do."""
    monkeypatch.setattr("trainkit.swarm.trust.accounts._SHARE_FOR_SNAPSHOTS", math.inf)


def heard(*owing: str, behind: int = 0) -> Heard:
    return Heard(owing, behind, (), {})


# Whom the owner asks.


def test_who_has_failed_an_audit_is_asked_in_every_second_round() -> None:
    auditor = Swarm().auditor
    auditor._suspects["peer-3"] = 0
    drawn = Counter[str]()
    for _ in range(400):
        drawn.update(auditor.draw([f"peer-{index}" for index in range(10)], heard()).keys())
    assert drawn.total() == 400
    assert 0.45 < drawn["peer-3"] / 400 < 0.65  # half, and a tenth of the rest
    assert len(drawn) == 10


def test_who_has_yet_to_show_something_is_not_drawn() -> None:
    auditor = Swarm().auditor
    assert auditor.draw(["ann", "ben"], heard("ann")) == {"ben": True}
    assert auditor.draw(["ann", "ben"], heard("ann", "ben")) == {}


def test_audits_take_a_share_of_the_owners_time_that_grows_with_the_swarm() -> None:
    auditor = Swarm().auditor
    auditor.round_seconds = 100.0
    auditor._at_once = 16
    for peers, took, suspects, many in (
        (1, 0.0, (), 1.0),  # nobody knows, yet, how long one takes
        (3, 6.0, (), 2.5),
        (10, 6.0, (), 25 / 3),
        (100, 6.0, (), 25 / 3),
        (100, 0.6, (), 16.0),
        (3, 60.0, (), 0.25),
        (3, 60.0, ("peer-0",), 1 / 3),
    ):
        auditor._took = took
        auditor._suspects = dict.fromkeys(suspects, 0)
        rounds = [auditor.draw([f"peer-{index}" for index in range(peers)], heard()) for _ in range(400)]
        assert all(rounds)
        assert abs(sum(sum(drawn.values()) for drawn in rounds) / 400 - many) < 0.15, peers


def test_as_many_are_drawn_as_can_show_all_within_a_round() -> None:
    auditor: Any = Swarm().auditor
    auditor._took = 1e-9
    drawn = list[int]()
    for behind in (0, 0, 0, 0, 2, 0, 9, 0):
        now = heard(behind=behind)
        auditor.owe(now)
        drawn.append(len(auditor.draw([f"peer-{index:02}" for index in range(20)], now)))
    assert drawn == [2, 3, 4, 5, 1, 3, 1, 2]
    auditor.common = SimpleNamespace(theta=torch.empty(88_000_000, device="meta"))  # what is shown has to fit, too
    for _ in range(9):
        auditor.owe(heard())
    assert auditor._at_once == 5


def test_of_the_last_round_as_many_are_drawn_as_there_is_room_for() -> None:
    """For nobody is asked afterwards: who has lied in it would be in the weights for good."""
    auditor = Swarm().auditor
    auditor._took = 1e9  # there is no time to train anything again
    for peers, drawn in ((1, 1), (5, 5), (40, 16)):
        found = auditor.draw([f"peer-{index:02}" for index in range(peers)], heard(), is_last=True)
        assert len(found) == drawn


@pytest.mark.nightly
def test_who_moves_unevenly_is_drawn_more_often() -> None:
    chance = random.Random(0)
    uneven = {"peer-1": 8.0, "peer-2": 1.0}
    drawn = Counter(drawn_of(["peer-0", "peer-1", "peer-2"], (), uneven, chance) for _ in range(600))
    assert abs(drawn["peer-1"] / 600 - (1 / 6 + 64 / 65 / 2)) < 0.08
    assert abs(drawn["peer-0"] / 600 - 1 / 6) < 0.06
    seen = list[list[float]]()
    for number in range(9):  # how uneven somebody looks goes by random signs: those of another CPU are others
        swarm = Swarm(seconds=1.4)
        swarm.rate *= 1 + number / 1e5
        seen.append([])
        for cheat in (lambda swarm: None, leapt, lambda swarm: setattr(swarm, "after_update", lambda: None)):
            cheat(swarm)
            swarm.round_of(drawn="ann")
            seen[-1].append(swarm.accounts.heard().uneven["ben"])
    honest, while_leaping, later = (median(values) for values in zip(*seen, strict=True))
    assert 2 * honest < while_leaping
    assert 0.8 * while_leaping < later < while_leaping


# What a peer that is drawn has to show.


def asked_for(positions: Sequence[int], weights: Sequence[float], moments: Sequence[float]) -> Counter[tuple[int, ...]]:
    """What a peer that is drawn has to show, in 400 rounds of that kind."""
    links = [Commitment(position, 0, NOTHING, NOTHING) for position in positions]
    theta = [0.0]
    for (start, end), (before, after) in zip(pairwise(positions), pairwise(weights), strict=True):
        moved = after - before if start == end else 0.0
        theta.append(theta[-1] + moved)  # as the common weights have moved
    rows = torch.tensor([weights, moments, [0] * len(links), theta]).T.float()
    where = rows[:, :, None].expand(-1, -1, 12).contiguous()
    sums = base64.b64encode(where.numpy().tobytes()).decode()
    account = Account(round=0, links=links, precision="fp32", micro_batch_size=1, sums=sums)
    drawn = Counter[tuple[int, ...]]()
    for _ in range(400):
        accounts = Accounts(1)
        accounts.draw({"ben": True}, 0)
        drawn[accounts.hear("ben", account.model_dump_json().encode()) or ()] += 1
    return drawn


@pytest.mark.parametrize(
    ("positions", "weights", "moments", "place", "share"),
    [
        # Where most is claimed, if nothing has moved: the others count as the average, each.
        ((0, 0, 10, 970, 980), (0, 0, 0, 0, 0), (0, 0, 0, 0, 0), 2, 0.75 * 960 / 1614),
        # Where the weights have leapt, or what the optimizer remembers; a move of the common weights is no matter.
        ((0, 0, 10, 20, 30), (0, 50, 51, 71, 72), (0, 0, 1, 2, 3), 2, 0.5 + 0.375 * (0.4 / 3 + 0.6)),
        ((0, 0, 10, 20, 30), (0, 50, 51, 52, 53), (0, 0, 1, 2, 5), 3, 0.5 + 0.375 * (0.4 / 3 + 0.6 * 81 / 83)),
    ],
)
def test_what_is_drawn_is_where_most_has_happened(
    positions: Sequence[int], weights: Sequence[float], moments: Sequence[float], place: int, share: float
) -> None:
    drawn = asked_for(positions, weights, moments)
    followed = 0.125 if share > 0.5 else 0.25  # how the common weights were followed
    assert abs(drawn.pop((0, 1)) / 400 - followed) < 0.1
    assert abs(drawn[place,] / 400 - share) < 0.1
    assert sorted(drawn) == [(1,), (2,), (3,)]


def test_a_leap_does_not_distract_from_the_rest_of_a_round() -> None:
    """For it may have been trained."""
    drawn = asked_for((0, 10, 20, 30, 40), (0, 20, 21, 22, 23), (0, 1, 2, 3, 4))
    assert abs(drawn[0,] / 400 - (0.5 + 0.5 * (0.4 / 4 + 0.6))) < 0.1
    assert sorted(drawn) == [(0,), (1,), (2,), (3,)]


@pytest.mark.parametrize(
    ("values", "stretches", "bytes_each"),
    [(4_900_000, 16, 12), (11_200_000, 16, 3), (25_600_000, 11, 3), (88_000_000, 4, 3), (7_000_000_000, 4, 3)],
)
def test_larger_models_have_fewer_snapshots_of_fewer_bytes(values: int, stretches: int, bytes_each: int) -> None:
    assert (num_stretches(values), snapshot_bytes(values)) == (stretches, bytes_each * values)


def test_what_a_peer_of_a_large_model_shows_is_a_tenth_of_its_bytes() -> None:
    values = 88_000_000
    accounts = Accounts(8, values)
    accounts.received = {"ben": 2 * values}  # in fp16, and as much comes back
    asked = [accounts._may_ask("ben") for _ in range(2000)]
    assert asked[0]
    assert abs(sum(asked) / 2000 * 3 * values / (0.1 * 4 * values) - 1) < 0.25
    accounts._uneven = {"ben": 2.0}  # who moves unevenly shows more
    often = sum(accounts._may_ask("ben") for _ in range(2000))
    assert abs(often / sum(asked) - 4) < 1
    accounts.received = {}
    assert [accounts._may_ask(peer) for peer in ("ben", "ann", "ann")] == [False, True, False]


@pytest.mark.parametrize(
    ("megabits", "is_slow"),
    [(None, False), (2.0, True), (20.0, True), (30.0, False)],  # 3 million weights in rounds of 12 s
)
def test_who_cannot_show_whole_snapshots_in_time_says_so(megabits: float | None, is_slow: bool) -> None:
    assert is_too_slow(megabits and megabits * MEGABIT, 3_000_000, 12.0) == is_slow


def test_for_a_snapshot_a_slow_peer_has_as_long_as_its_link_takes() -> None:
    accounts = Accounts(32, 1_000_000)
    accounts.received = {"fp16": 2_000_000, "8bit": 1_000_000, "a third of 4bit": 170_000}
    allowed = {peer: accounts._rounds_for(peer) for peer in (*accounts.received, "unheard of")}
    assert allowed == {"fp16": 6, "8bit": 9, "a third of 4bit": 39, "unheard of": 60}


def test_one_slow_peer_shows_a_snapshot_at_a_time_and_nobody_waits_for_it() -> None:
    swarm = Swarm(is_slow=True)
    shown = swarm.shown(shows=False)
    assert shown.wanted
    for _ in range(5):  # rounds in which it is under way
        assert swarm.round_of(drawn="ann", shows=False) is None
        assert ([*swarm.heard.owing], swarm.heard.behind) == (["ben"], 0)
        assert not swarm.auditor.unproven
    assert swarm.verdict(shown).why.startswith(TRUE)  # of a round that is long over


def test_of_parts_that_nobody_has_seen_nothing_is_asked() -> None:
    shown = Swarm(is_slow=True).shown(trains=False)
    for given, asked in ({}, ()), (dict.fromkeys((0, 3 * PART, 4 * PART)), {0, 3, 4}):
        accounts = Accounts(32)
        accounts.draw({"ben": False}, 0)
        assert accounts.hear("ben", shown.account.model_dump_json().encode()) == ()
        parts = accounts.ask_for_parts("ben", given)
        assert set(parts) <= set(asked)
        assert len(parts) == (2 if given else 0)
        now = accounts.heard()
        assert ([*now.owing], now.behind) == ((["ben"], 1) if given else ([], 0))  # parts alone take no longer


@pytest.mark.parametrize(
    "data",
    [b"", b"{}", b"[]", b"x" * 70_000, b'{"round": 1, "links": []}', b'{"round": -1, "links": [[0, 0, "a", "b"]]}'],
)
def test_garbage_in_the_place_of_an_account_is_passed_over(data: bytes) -> None:
    accounts = Accounts(1)
    accounts.draw({"ben": True}, 0)
    assert accounts.hear("ben", data) is None
    assert not accounts.asked


@pytest.mark.parametrize(
    ("given", "asked"),
    [("A" * 256, ()), ("A" * 252, None), ("/" * 256, None), ("-" * 256, None), ("A" * 255, None), ("", None)],
)
def test_an_account_has_finite_sums_of_each_snapshot(given: str, asked: tuple[int, ...] | None) -> None:
    accounts = Accounts(1)
    accounts.draw({"ben": True}, 0)
    link = Commitment(0, 0, NOTHING, NOTHING)
    account = Account(round=0, links=[link], precision="fp32", micro_batch_size=1, sums="")
    told = account.model_copy(update={"sums": given}).model_dump_json().encode()
    assert accounts.hear("ben", told) == asked


# What follows for who has failed one, or has shown nothing.


def test_an_audit_that_failed_is_forgotten_after_twenty_that_were_passed() -> None:
    for passed, action in ((19, "dropped"), (20, "left out")):
        auditor = Swarm().auditor
        assert auditor.note_false("ben", "false").action == "left out"
        counts = list[bool]()
        for _ in range(passed):
            auditor.note_true("ben")
            counts.append("ben" not in auditor.unproven)
        assert counts == [*[False] * 11, *[True] * (passed - 11)]
        assert auditor.note_false("ben", "false").action == action


def test_in_good_standing_is_whose_last_audit_was_true() -> None:
    swarm = Swarm()
    standing = [[*swarm.auditor.in_good_standing]]
    for sent in (torch.clone, half_turned, torch.clone):
        swarm.audited(sent=sent, trains=False)
        standing.append([*swarm.auditor.in_good_standing])
    assert standing == [[], ["ben"], [], ["ben"]]


def test_who_shows_nothing_three_times_does_not_count_until_it_passes() -> None:
    swarm = Swarm()
    verdicts = list[str]()
    while len(verdicts) < 3:
        swarm.round_of(shows=False)
        verdicts += [f"{verdict.action}: {verdict.why}" for verdict in swarm.owes]
    assert verdicts == [*["audited: has shown nothing"] * 2, verdicts[-1]]
    assert verdicts[-1].startswith("left out: has shown nothing; after 3 such audits")
    assert [*swarm.auditor.unproven] == ["ben"]
    shown = swarm.round_of()
    while shown is None:
        shown = swarm.round_of()  # it has been asked once more
    swarm.auditor.audit(shown)
    assert not swarm.auditor.unproven


@pytest.mark.parametrize("takes_part", [True, False])
def test_who_takes_part_and_says_nothing_is_as_who_shows_nothing(takes_part: bool) -> None:
    swarm = Swarm()
    verdicts = list[str]()
    for _ in range(8):
        swarm.round_of(takes_part=False, shows=False)
        if not takes_part:
            swarm.accounts._present.clear()
        verdicts += [verdict.why for verdict in swarm.owes]
    assert verdicts == (["has shown nothing"] if takes_part else [])


# Who has other libraries than the run.


def with_libraries(are_others: bool = True) -> Swarm:
    swarm = Swarm()
    swarm.auditor.hear({"ben": are_others})
    return swarm


def failed(swarm: Swarm, **how: Any) -> tuple[str, str]:
    """The next audit that something is false in."""
    for _ in range(200):
        action, why = swarm.audited(counts=False, **how)
        if not why.startswith(TRUE):
            return action, why
    raise AssertionError("everything is true")


def test_who_has_other_libraries_counts_once_its_updates_were_made_again() -> None:
    swarm = with_libraries()
    assert [*swarm.auditor.unproven] == ["ben"]
    assert swarm.audited(counts=False, trains=False) == ("", "")
    assert [*swarm.auditor.unproven] == ["ben"], "nothing was trained again"
    is_agreed = False
    while not is_agreed:
        shown = swarm.shown(counts=False)
        assert swarm.verdict(shown).why.startswith(TRUE)
        is_agreed = not shown.has_moved
        assert [*swarm.auditor.unproven] == ([] if is_agreed else ["ben"])
    noisy(swarm)  # who has passed cannot plead its libraries
    assert [failed(swarm)[0] for _ in range(2)] == ["left out", "dropped"]


def test_other_libraries_that_train_otherwise_are_no_reason_for_a_ban() -> None:
    swarm = with_libraries()
    noisy(swarm)
    for differ in ([], ["ben"], ["ben"]):
        action, why = failed(swarm)
        assert (action, [*swarm.auditor.differ]) == ("left out", differ)
        assert why.endswith("; it may be its other libraries, with which it does not count yet")
    assert [*swarm.auditor.unproven] == ["ben"]
    swarm.after_update = lambda: None
    while swarm.auditor.unproven:
        assert swarm.audited(counts=False)[1].startswith(TRUE)
    assert not swarm.auditor.differ


def test_who_does_not_leave_when_its_libraries_differ_is_banned() -> None:
    swarm = with_libraries()
    noisy(swarm)
    actions = [failed(swarm)[0] for _ in range(8)]
    assert actions[:2] == ["left out"] * 2
    assert "dropped" in actions


def test_who_is_caught_cannot_plead_other_libraries_afterwards() -> None:
    swarm = with_libraries(are_others=False)
    noisy(swarm)
    assert failed(swarm)[1].endswith("the next time it is banned")
    swarm.auditor.hear({"ben": True})
    assert failed(swarm)[0] == "dropped"


@pytest.mark.parametrize(("cheat", "how"), [(other_rates, {}), (lambda swarm: None, {"sent": half_turned})])
def test_whose_libraries_are_others_is_banned_for_fraud_all_the_same(
    cheat: Callable[[Swarm], None], how: dict[str, Any]
) -> None:
    swarm = with_libraries()
    cheat(swarm)
    assert [failed(swarm, **how)[0] for _ in range(2)] == ["left out", "dropped"]
