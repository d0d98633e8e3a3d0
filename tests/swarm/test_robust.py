"""What a reducer makes of contributions, honest and not: tables of one round, in this process."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import pytest
import torch
from torch import Tensor

from trainkit.swarm.messages import PeerProgress
from trainkit.swarm.robust import FRESH_SECONDS, Limits, Screen, Tally, newest_round, tally

SIZE = 4000
POSSIBLE = {f"peer-{index}": 100.0 for index in range(8)}
SLOW = {"peer-1": 100.0, "peer-2": 0.0, "peer-3": 0.0, "peer-4": 0.0}


def contributions(count: int, size: int = SIZE) -> list[Tensor]:
    """Honest ones: what all have learned, and as much noise of each one's own."""
    generator = torch.Generator().manual_seed(0)
    common = torch.randn(size, generator=generator)
    return [common + torch.randn(size, generator=generator) for _ in range(count)]


def screened(
    parts: Sequence[Tensor],
    *,
    weights: Sequence[float] | None = None,
    trusted: Sequence[int] = (),
    parameters: int = SIZE,
    own: Tensor | None = None,
    together: Sequence[int] = (),
    possible: Mapping[str, float] = POSSIBLE,
) -> tuple[Tensor, dict[str, str]]:
    """The average that a reducer makes, and what became of each sender that does not count in full, and why.

    ``together``: those who use one invitation.
    """
    names = [f"peer-{index}" for index in range(len(parts))]
    voices = {names[index]: 1 / len(together) for index in together}
    screen = Screen(names, Limits(frozenset(names[index] for index in trusted), possible, voices), parameters)
    claims = [100.0] * len(parts) if weights is None else weights
    own = torch.zeros(SIZE) if own is None else own
    average = screen.average(0, dict(enumerate(parts)), dict(enumerate(claims)), own)
    return average, {verdict.peer: f"{verdict.action}: {verdict.why}" for verdict in screen.verdicts()}


def distance(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def test_honest_contributions_are_averaged_by_their_samples() -> None:
    parts = contributions(4)
    average, dropped = screened(parts, weights=[100.0, 100.0, 50.0, 50.0])
    wanted = (2 * parts[0] + 2 * parts[1] + parts[2] + parts[3]) / 6
    assert distance(average, wanted) < 0.05  # lengths differ by a little, and are clipped to the median
    assert dropped == {}


@pytest.mark.parametrize(
    ("attack", "why"),
    [
        *((lambda part, by=by: by * part, "points against the others") for by in (-1, -9, -50)),
        *((lambda part, by=by: by * part, "sent values that are not finite") for by in (math.nan, math.inf, 1e30)),
        (lambda part: torch.cat([part, part]), "sent something of the wrong shape"),
        (lambda part: part.to(torch.int8), "sent something of the wrong shape"),
    ],
)
def test_an_attackers_contribution_is_dropped(attack: Callable[[Tensor], Tensor], why: str) -> None:
    *honest, last = contributions(4)
    average, judged = screened([*honest, attack(last)])
    assert list(judged) == ["peer-3"]
    assert judged["peer-3"].startswith(f"dropped: {why}")
    assert distance(average, screened(honest)[0]) < 0.02


@pytest.mark.parametrize("factor", [6.0, 23.0, 1000.0])
def test_who_is_many_times_longer_is_left_out_and_not_blamed(factor: float) -> None:
    """A newcomer's AdamW is fresh where the others' has settled."""
    *honest, last = contributions(4)
    screen = Screen(list("abcd"), Limits(possible=dict.fromkeys("abcd", 1000.0)), SIZE)
    half = SIZE // 2
    parts = [*honest, factor * last]
    found = [
        screen.average(at, {i: part[at : at + half] for i, part in enumerate(parts)}, dict.fromkeys(range(4), 1.0), own)
        for at, own in ((0, torch.zeros(half)), (half, torch.zeros(half)))
    ]
    (verdict,) = screen.verdicts()
    assert (verdict.peer, verdict.action) == ("d", "left out")
    assert "times longer than the group's median" in verdict.why
    assert screen.counted().keys() == {"a", "b", "c"}
    alone, _ = screened(honest)
    assert distance(torch.cat(found), alone) < 0.02


@pytest.mark.parametrize("claim", [1e9, float("nan"), float("inf"), -1.0])
def test_a_claim_that_cannot_be_true_drops_its_sender(claim: float) -> None:
    *honest, last = contributions(5)
    average, dropped = screened([*honest, -last], weights=[100.0] * 4 + [claim])
    assert f"claims {claim:.3g} samples" in dropped["peer-4"]
    assert distance(average, screened(honest)[0]) < 1e-6


def test_a_weight_counts_as_far_as_the_senders_speed_makes_possible() -> None:
    parts = contributions(3)
    believed, _ = screened(parts, weights=[100.0, 100.0, 1000.0])
    assert distance(believed, screened(parts, weights=[100.0, 100.0, 150.0])[0]) < 1e-6


@pytest.mark.parametrize("honest", [1, 2, 3])
@pytest.mark.parametrize("factor", [-1.0, -4.0, -9.0])
def test_who_comes_five_times_with_one_invitation_is_no_majority(honest: int, factor: float) -> None:
    parts = contributions(honest + 5)
    parts[honest:] = [factor * part for part in parts[honest:]]
    many = range(honest, honest + 5)
    average, dropped = screened(parts, trusted=[0], together=many)
    assert set(dropped) == {f"peer-{index}" for index in many}
    assert distance(average, torch.stack(parts[:honest]).mean(0)) < 0.1
    alone, _ = screened(parts, trusted=[0])
    assert distance(alone, torch.stack(parts[:honest]).mean(0)) > 1.0


@pytest.mark.parametrize("others", [0, 1, 2, 3])
def test_eight_honest_peers_with_one_invitation_count_in_full(others: int) -> None:
    parts = contributions(others + 8)
    trusted = [0] if others else []
    average, dropped = screened(parts, trusted=trusted, together=range(others, others + 8))
    assert dropped == {}
    assert distance(average, torch.stack(parts).mean(0)) < 0.1


def test_statistics_of_one_who_comes_five_times_do_not_count_for_more() -> None:
    parts = [torch.full((SIZE,), value) for value in (1.0, 2.0, 3.0, 90.0, 90.0, 90.0, 90.0, 90.0)]
    average, _ = screened(parts, parameters=0, together=range(3, 8))
    assert torch.equal(average, torch.full((SIZE,), 2.5))


def test_a_newcomer_counts_as_much_as_the_median() -> None:
    parts = contributions(3)
    known = {"peer-0": 100.0, "peer-1": 100.0}
    average, _ = screened(parts, weights=[100.0, 100.0, 900.0], possible=known)
    assert distance(average, screened(parts)[0]) < 1e-6


def test_peers_whose_speed_allows_for_nothing_stop_nobody() -> None:
    """Even if they are the most."""
    parts = contributions(5)
    average, judged = screened(parts, trusted=[0], possible=SLOW)
    assert distance(average, (parts[0] + parts[1]) / 2) < 0.05
    assert judged == {}


def test_the_owners_side_counts_in_full_however_fast_it_is() -> None:
    parts = contributions(3)
    average, dropped = screened(parts, weights=[1.0, 1.0, 1000.0], trusted=[2])
    assert distance(average, parts[2]) < 0.01
    assert dropped == {}


def test_a_quick_peer_may_move_further_in_proportion_to_its_samples() -> None:
    quick, *slow = contributions(3)
    average, _ = screened([3 * quick, *slow], weights=[120.0, 40.0, 40.0])
    assert distance(average, (9 * quick + slow[0] + slow[1]) / 5) < 0.05


def test_who_has_trained_nothing_neither_counts_nor_is_blamed() -> None:
    *honest, _ = contributions(4)
    for nothing in (torch.zeros(SIZE), torch.full((SIZE,), float("nan"))):
        average, dropped = screened([*honest, nothing], weights=[100.0, 100.0, 100.0, 0.0])
        assert distance(average, screened(honest)[0]) < 1e-6
        assert dropped == {}


def test_a_tiny_contribution_does_not_shrink_the_others() -> None:
    honest = contributions(2)
    average, _ = screened([*honest, 1e-9 * honest[0]])
    assert distance(average, (honest[0] + honest[1]) / 3) < 0.05


@pytest.mark.parametrize(
    ("factor", "why"), [(-1.0, "points against the owner's side"), (-50.0, ""), (1000.0, "was 1e+03 times longer")]
)
def test_of_two_senders_the_owners_side_is_the_measure_and_blames_nobody(factor: float, why: str) -> None:
    own, other = contributions(2)
    average, judged = screened([own, factor * other], trusted=[0])
    assert list(judged) == ["peer-1"]
    assert judged["peer-1"].startswith("left out: ")
    assert why in judged["peer-1"]
    assert distance(average, own) < 1e-6


def test_of_two_senders_a_tiny_one_does_not_shrink_the_owners_side() -> None:
    own, other = contributions(2)
    average, _ = screened([own, 1e-9 * other], trusted=[0])
    assert distance(average, own / 2) < 1e-6


def test_of_two_strangers_the_shorter_is_the_measure_and_neither_is_against() -> None:
    one, other = contributions(2)
    average, judged = screened([one, -2 * other])
    assert list(judged.values()) == ["clipped: was 2.0 times longer than the group's median"]
    assert float(average.norm()) <= float(one.norm())


def test_two_of_five_that_agree_with_one_another_do_not_win() -> None:
    *honest, last = contributions(4)
    average, dropped = screened([*honest, -last, -last])
    assert set(dropped) == {"peer-3", "peer-4"}
    assert distance(average, screened(honest)[0]) < 1e-6


def test_where_peers_have_nothing_in_common_nobody_is_against() -> None:
    generator = torch.Generator().manual_seed(1)
    noise = [torch.randn(SIZE, generator=generator) for _ in range(4)]
    assert screened([*noise, -(noise[0] + noise[1]) / 2])[1] == {}


def test_nobody_can_put_all_of_their_length_into_one_part() -> None:
    names = [f"peer-{index}" for index in range(4)]
    screen = Screen(names, Limits(possible=POSSIBLE), SIZE)
    first, second = [part[:2000] for part in contributions(4)], [part[2000:] for part in contributions(4)]
    whole = float(torch.cat([first[3], second[3]]).norm())
    first[3], second[3] = torch.zeros(2000), second[3] / second[3].norm() * whole
    weights = dict.fromkeys(range(4), 100.0)
    screen.average(0, dict(enumerate(first)), weights, torch.zeros(2000))
    average = screen.average(2000, dict(enumerate(second)), weights, torch.zeros(2000))
    alone = sum(second[:3], torch.zeros(2000)) / 4
    assert float((average - alone).norm()) <= float(second[0].norm()) / 4 * 1.05


def test_a_sender_that_was_dropped_stays_out_for_the_rest_of_the_round() -> None:
    screen = Screen(["a", "b", "c"], Limits(), SIZE)
    parts, weights, own = contributions(3, 100), dict.fromkeys(range(3), 1.0), torch.zeros(100)
    screen.average(0, {**dict(enumerate(parts)), 2: torch.full((100,), float("nan"))}, weights, own)
    average = screen.average(100, dict(enumerate(parts)), weights, own)
    assert distance(average, (parts[0] + parts[1]) / 2) < 0.2
    assert [(verdict.peer, verdict.action) for verdict in screen.verdicts()] == [("c", "dropped")]


def test_of_the_first_claim_of_a_round_there_is_no_way_back() -> None:
    screen = Screen(["a", "b", "c"], Limits(possible=dict.fromkeys("abc", 1.0)), SIZE)
    parts, own = contributions(3, 100), torch.zeros(100)
    screen.average(0, dict(enumerate(parts)), dict.fromkeys(range(3), 1.0), own)
    average = screen.average(100, dict(enumerate(parts)), {0: 1.0, 1: 1.0, 2: 1e9}, own)
    assert distance(average, sum(parts, own) / 3) < 0.2


def test_buffers_are_medians_and_one_liar_does_not_move_them() -> None:
    parameters = SIZE - 3
    parts = contributions(4)
    for part, value in zip(parts, (1.0, 2.0, 3.0, -1e6), strict=True):
        part[parameters:] = value
    average, _ = screened(parts, parameters=parameters)
    assert average[parameters:].tolist() == [1.5] * 3
    average, _ = screened(parts[:3], parameters=parameters)
    assert average[parameters:].tolist() == [2.0] * 3


def test_of_two_senders_the_buffers_are_those_of_the_owners_side() -> None:
    own, other = contributions(2)
    own[-3:], other[-3:] = 1.0, -1e6
    average, _ = screened([own, other], parameters=SIZE - 3, trusted=[0])
    assert average[-3:].tolist() == [1.0] * 3


def test_where_nobody_counts_nothing_changes() -> None:
    own = torch.cat([torch.ones(SIZE - 3), torch.full((3,), 7.0)])
    average, _ = screened([torch.full((SIZE,), float("nan"))] * 2, own=own, parameters=SIZE - 3)
    assert average[:-3].abs().max() == 0.0
    assert average[-3:].tolist() == [7.0] * 3


def test_a_noticeably_longer_one_is_clipped_and_not_dropped() -> None:
    *honest, last = contributions(4)
    _, judged = screened([*honest, 3 * last])
    assert list(judged) == ["peer-3"]
    assert judged["peer-3"].startswith(("clipped: was 3.0 times longer", "clipped: was 3.1 times longer"))


def test_a_slow_peer_that_sends_every_other_part_counts_in_those() -> None:
    screen = Screen([f"peer-{i}" for i in range(3)], Limits(possible=POSSIBLE), SIZE)
    whole, own = contributions(3), torch.zeros(100)
    for index in range(SIZE // 100):
        parts = dict(enumerate(part[100 * index : 100 * index + 100] for part in whole))
        left_out = 0.0 if index % 2 else 100.0
        average = screen.average(100 * index, parts, {0: 100.0, 1: 100.0, 2: left_out}, own)
        counting = [parts[0], parts[1], *([parts[2]] if left_out else [])]
        assert distance(average, sum(counting, own) / len(counting)) < 0.2
    assert screen.verdicts() == ()


NOW = 1_000_000.0


def told(samples: int, rate: float = 0.0, *, round_index: int = 3, age: float = 0.0) -> PeerProgress:
    return PeerProgress(
        name="x", round=round_index, samples=samples, samples_per_sec=rate, loss=0.0, group=1, time=NOW - age
    )


def counted(own: Tally, *, trusted: tuple[str, ...] = (), is_trusted: bool = False, **others: PeerProgress) -> Tally:
    return tally(own, others, round_index=3, trusted=trusted, is_trusted=is_trusted, now=NOW)


def test_an_update_is_gathered_by_all_who_are_at_it() -> None:
    found = counted(Tally(100, 10), a=told(150, 20), b=told(50, 5), behind=told(999, 50, round_index=2))
    assert found == Tally(300, 35)
    assert found.seconds_left(1000) == 20.0
    assert found.seconds_left(300) == 0.0


def test_who_has_not_spoken_for_a_second_has_gathered_for_one_more() -> None:
    assert counted(Tally(100, 50), a=told(60, 40, age=1.0)).samples == 200


def test_who_is_not_heard_any_more_has_nothing_to_give() -> None:
    assert counted(Tally(100, 50), dead=told(90, 40, age=FRESH_SECONDS + 1)) == Tally(100, 50)


def test_without_any_speed_there_is_no_end_in_sight() -> None:
    assert counted(Tally(0, 0)).seconds_left(1) == math.inf


@pytest.mark.parametrize("samples", [10**9, 1 << 50])
def test_a_volunteers_claim_ends_no_update_for_all(samples: int) -> None:
    found = counted(Tally(100, 10), liar=told(samples, 1e9), a=told(100, 10), b=told(100, 10))
    assert found == Tally(600, 60)


def test_the_owners_side_is_believed_and_may_be_much_faster() -> None:
    fast = told(5000, 500)
    assert counted(Tally(100, 10), fast=fast, trusted=("fast",)).samples == 5100
    assert counted(Tally(100, 10), fast=fast).samples == 400


def test_both_ends_of_a_bound_come_to_the_same_sum() -> None:
    """Else the fast one would wait while the slow one gathers what it thinks is missing."""
    slow, fast = Tally(100, 10), Tally(5000, 500)
    owners = counted(slow, is_trusted=True, other=told(5000, 500))
    assert counted(fast, trusted=("owner",), owner=told(100, 10)) == owners == Tally(400, 40)


def test_only_the_owners_side_says_that_there_is_a_newer_state() -> None:
    others = {"liar": told(0, round_index=10**6), "owner": told(0, round_index=4), "reducer": told(0, round_index=5)}
    assert newest_round(others, {"owner", "reducer"}, NOW) == 5
    assert newest_round(others, set(), NOW) == -1
    assert newest_round({"owner": told(0, age=60.0)}, {"owner"}, NOW) == -1
