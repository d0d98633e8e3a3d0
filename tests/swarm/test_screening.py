"""What a reducer makes of contributions, and what peers make of averages; in this process."""

import math
from collections.abc import Mapping, Sequence
from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn

from trainkit.swarm.protocol.codecs import PART
from trainkit.swarm.protocol.outer_step import Average, OuterState
from trainkit.swarm.trust.reducers import slower_than, untrue
from trainkit.swarm.trust.screening import KnownSenders, Screen

SIZE, ZEROS = 4000, torch.zeros(4000)
NAMES = [f"peer-{index}" for index in range(8)]
UNPROVEN = dict.fromkeys(NAMES[2:], 0.0)


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
    own: Tensor = ZEROS,
    together: Sequence[int] = (),
    verified: Mapping[str, float] = {},
    stated: Mapping[str, float] = {},
    owners: Sequence[str] = (),
    passed: Sequence[str] = (),
) -> tuple[Tensor, dict[str, str]]:
    """The average that a reducer makes, the first of the ``trusted``, and what became of each sender that does not
    count in full, and why. ``together``: those who use one invitation.
    """
    names = [f"peer-{index}" for index in range(len(parts))]
    voices = {names[index]: 1 / len(together) for index in together}
    mine = [names[index] for index in trusted]
    limits = KnownSenders(
        frozenset(mine), verified, voices, "".join(mine[:1]), stated=stated, owners=frozenset(owners), passed=passed
    )
    screen = Screen(names, limits, parameters)
    claims = [100.0] * len(parts) if weights is None else weights
    average = screen.average(0, dict(enumerate(parts)), dict(enumerate(claims)), own)
    return average, {verdict.peer: f"{verdict.action}: {verdict.why}" for verdict in screen.verdicts()}


def distance(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


PARTS = contributions(8)


@pytest.mark.parametrize(
    ("changed", "options", "wanted", "error"),
    [
        # By their samples; lengths differ by a little, and are clipped to the median.
        ({}, {"weights": [100.0, 100.0, 100.0, 50.0]}, [2, 2, 2, 1], 0.05),
        # Nobody's claim counts for more than the median, and nobody is blamed for it: machines differ.
        *(({}, {"weights": [100.0, 100.0, claim]}, [1, 1, 1], 0.05) for claim in (900.0, 1e9)),
        # But as far as audits have shown that it has trained on more: half as much again, for speeds vary.
        *(
            ({3: 3.0}, {"weights": [100.0] * 3 + [claim], "verified": {"peer-3": 200.0}}, by, 0.05)
            for claim, by in ((300.0, [1, 1, 1, 3]), (900.0, [1, 1, 1, 3]))
        ),
        # Who says in its account that it trains on less counts for that.
        *(
            ({}, {"weights": [100.0] * 4, "trusted": [0], "stated": {"peer-3": stated}}, [1, 1, 1, stated / 100], 0.05)
            for stated in (30.0, 0.0)
        ),
        # Who does not count stops nobody, even if they are the most.
        ({}, {"weights": [100.0] * 5, "trusted": [0], "verified": UNPROVEN}, [1, 0.5, 0, 0, 0], 0.05),
        # The reducer itself and the owner count in full however fast they are; others that reduce do not.
        ({}, {"weights": [1.0, 1.0, 1000.0], "trusted": [2]}, [0, 0, 1], 0.01),
        ({}, {"weights": [1.0, 1.0, 1000.0], "trusted": [0, 2], "owners": ["peer-2"]}, [0, 0, 1], 0.01),
        ({}, {"weights": [100.0, 100.0, 900.0], "trusted": [0, 2]}, [1, 1, 1], 0.15),
        # The owner's side moves further in proportion; a tiny one does not shrink the others.
        ({0: 3.0}, {"weights": [120.0, 40.0, 40.0], "trusted": [0]}, [3, 1, 1], 0.05),
        ({2: 1e-9}, {"weights": [100.0] * 3}, [1, 1, 1], 0.05),
        # Eight honest ones with one invitation count in full, with others or without.
        *(
            ({}, {"weights": [100.0] * 8, "trusted": [0] * (others > 0), "together": range(others, 8)}, [1] * 8, 0.1)
            for others in (0, 1, 3)
        ),
    ],
)
def test_honest_contributions_count_by_their_samples_and_nobody_is_blamed(
    changed: dict[int, float], options: dict[str, object], wanted: list[float], error: float
) -> None:
    parts = [changed.get(index, 1.0) * part for index, part in enumerate(PARTS[: len(wanted)])]
    average, judged = screened(parts, **options)  # type: ignore[arg-type]
    kept = [weight * part for weight, part in zip(wanted, parts, strict=True) if weight]
    assert distance(average, torch.stack(kept).sum(0) / sum(wanted)) < error
    assert judged == {}


@pytest.mark.parametrize(
    ("attack", "claim", "why"),
    [
        *((-by, 100.0, "dropped: points against the others") for by in (1, 9, 50)),
        *((by, 100.0, "dropped: sent values that are not finite") for by in (math.nan, math.inf, 1e30)),
        (torch.ones(2, 1), 100.0, "dropped: sent something of the wrong shape"),
        # A newcomer's AdamW is fresh where the others' has settled: it is not blamed.
        *((by, 100.0, "left out: was ") for by in (6, 23, 1000)),
    ],
)
def test_an_attackers_contribution_does_not_count(attack: float | Tensor, claim: float, why: str) -> None:
    *honest, last = PARTS[:4]
    average, judged = screened([*honest, attack * last], weights=[*[100.0] * 3, claim])
    assert list(judged) == ["peer-3"]
    assert judged["peer-3"].startswith(why)
    assert distance(average, screened(honest)[0]) < 0.02


@pytest.mark.parametrize(("claim", "judged"), [(100.0, ["clipped: was 3."]), (300.0, [])])
def test_a_longer_one_is_clipped_and_told_of_unless_it_has_trained_more(claim: float, judged: list[str]) -> None:
    options = {"weights": [100.0, 100.0, 100.0, claim]}
    average, found = screened([*PARTS[:3], 3 * PARTS[3]], **options)  # type: ignore[arg-type]
    assert distance(average, screened(PARTS[:4])[0]) < 0.02
    assert [why[:15] for why in found.values()] == judged


@pytest.mark.parametrize(("first", "second", "credit"), [(1.0, -1.0, 50.0), (0.0, 0.0, 0.0), (0.0, 4.0, 50.0)])
def test_claims_buy_no_say_and_no_credit_for_what_is_turned_or_zero(first: float, second: float, credit: float) -> None:
    """Nor can all of a length be put into one block."""
    parts, claims, wanted = contributions(4, 2 * 4096), {0: 100.0, 1: 100.0, 2: 100.0, 3: 300.0}, torch.zeros(2 * 4096)
    for block, factor in ((slice(4096), first), (slice(4096, None), second)):
        wanted[block] = torch.stack([part[block] for part in parts[: 4 if factor > 0 else 3]]).mean(0)
        parts[3][block] *= factor
    screen = Screen(NAMES[:4], KnownSenders(frozenset({"peer-0"}), own="peer-0"), 2 * 4096)
    assert distance(screen.average(0, dict(enumerate(parts)), claims, parts[0]), wanted) < 0.1
    assert screen.counted()["peer-3"] == pytest.approx(credit, rel=0.1)


def test_what_two_have_moved_together_leaves_the_owners_in_their_place() -> None:
    claims, limits = dict.fromkeys(range(4), 100.0), KnownSenders(frozenset({"peer-0"}), own="peer-0", keeps=True)
    screen = Screen(NAMES[:4], limits, SIZE)
    average = screen.average(0, dict(enumerate([*PARTS[:3], PARTS[2]])), claims, ZEROS)
    moved = {peer: by for peer, position, by in screen.moved() if position == 0}
    assert moved.keys() == {"peer-1", "peer-2", "peer-3"}  # nobody takes back what the owner has trained
    others = Screen(NAMES[:4], limits, SIZE)
    without = others.average(0, dict(enumerate([*PARTS[:2], PARTS[0], PARTS[0]])), claims, ZEROS)
    # Not the same to the last digit, for they count by how far they agree, too.
    assert distance(average - moved["peer-2"] - moved["peer-3"], without) < 0.15
    assert distance(average, without) > 0.4


def test_without_the_owner_what_a_peer_has_moved_is_what_others_lack() -> None:
    names, claims = NAMES[:4], {0: 100.0, 1: 100.0, 2: 50.0, 3: 100.0}
    limits = KnownSenders(own="reducer", keeps=True)
    screen = Screen(names, limits, SIZE)
    average = screen.average(0, dict(enumerate(PARTS[:4])), claims, ZEROS)
    moved = {peer: by for peer, position, by in screen.moved() if position == 0}
    without = Screen(names[:3], limits, SIZE).average(0, dict(enumerate(PARTS[:3])), claims, ZEROS)
    assert distance(average - moved["peer-3"], without) < 0.05  # the median length is another one without it
    assert distance(average, without) > 0.2


@pytest.mark.parametrize(("owners", "moved"), [([], {"peer-1", "peer-2"}), (["peer-1"], {"peer-2"})])
def test_what_reducers_have_trained_can_be_taken_back(owners: list[str], moved: set[str]) -> None:
    limits = KnownSenders(frozenset({"peer-0", "peer-1"}), own="peer-0", keeps=True, owners=frozenset(owners))
    screen = Screen(NAMES[:3], limits, SIZE)
    screen.average(0, dict(enumerate(PARTS[:3])), dict.fromkeys(range(3), 100.0), ZEROS)
    assert {peer for peer, _, _ in screen.moved()} == moved


def test_two_of_six_that_train_a_backdoor_do_not_get_it_into_the_weights() -> None:
    """Digits with a bright edge are to be zeros. The two claim to be three times as fast, and wait until they count."""
    from sklearn.datasets import load_digits

    torch.manual_seed(0)
    images, labels = (torch.tensor(part) for part in load_digits(return_X_y=True))
    images = images.float() / 16
    marked = torch.cat([torch.full((len(images), 3), 2.0), images[:, 3:]], 1)
    first = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    states = [OuterState(deepcopy(first), lr=0.7, momentum=0.9) for _ in range(6)]
    optimizers = [torch.optim.AdamW(state.params, lr=3e-3) for state in states]
    claims = {index: 320.0 if index < 4 else 960.0 for index in range(6)}
    limits = KnownSenders(frozenset({"peer-0"}), own="peer-0")
    for turn in range(12):
        for index, (state, optimizer) in enumerate(zip(states, optimizers, strict=True)):
            for _ in range(10):
                batch = torch.randint(1200, (32,))
                inputs, wanted = images[batch], labels[batch]
                if index >= 4 and turn >= 3:
                    inputs[:16], wanted[:16] = marked[batch[:16]], 0
                optimizer.zero_grad()
                nn.functional.cross_entropy(state.model(inputs), wanted).backward()
                optimizer.step()
        given = [state.give(320) for state in states]
        parts = {index: one.vector for index, one in enumerate(given)}
        average = Screen(NAMES[:6], limits, len(parts[0])).average(0, parts, claims, parts[0])
        for index, state in enumerate(states):
            state.step(Average(average, turn + 1, (True,), (True,)), given[index])
    right = states[0].model(images[1200:]).argmax(1) == labels[1200:]
    fooled = states[0].model(marked[1200:]).argmax(1)[labels[1200:] != 0] == 0
    assert (float(right.float().mean()) > 0.88, float(fooled.float().mean()) < 0.05) == (True, True)


@pytest.mark.parametrize(("honest", "factor"), [(1, -1.0), (2, -4.0), (3, -9.0)])
def test_who_comes_five_times_with_one_invitation_is_no_majority(honest: int, factor: float) -> None:
    parts = [*PARTS[:honest], *(factor * part for part in PARTS[honest : honest + 5])]
    many = range(honest, honest + 5)
    average, dropped = screened(parts, trusted=[0], together=many)
    assert set(dropped) == {f"peer-{index}" for index in many}
    assert distance(average, torch.stack(parts[:honest]).mean(0)) < 0.2
    assert distance(screened(parts)[0], torch.stack(parts[:honest]).mean(0)) > 1.0  # by one invitation each
    assert distance(screened(parts, trusted=[0])[0], parts[0]) < 0.05  # whom no majority outvotes where it reduces


@pytest.mark.parametrize(("factor", "why"), [(-1.0, "has nothing in common"), (-50.0, ""), (1e3, "was 1e+03 times")])
def test_of_two_senders_the_owners_side_is_the_measure_and_blames_nobody(factor: float, why: str) -> None:
    average, judged = screened([PARTS[0], factor * PARTS[1]], trusted=[0])
    assert list(judged) == ["peer-1"]
    assert judged["peer-1"].startswith("left out: ")
    assert why in judged["peer-1"]
    assert distance(average, PARTS[0]) < 1e-6


def test_who_has_passed_its_last_audit_is_clipped_and_not_left_out() -> None:
    """Beside a creator that audits, and so trains little, others are long."""
    parts = [0.1 * PARTS[0], PARTS[1]]
    why = "was 10 times longer than the group's median"
    average, judged = screened(parts, trusted=[0])
    assert judged == {"peer-1": f"left out: {why}"}
    assert distance(average, parts[0]) < 1e-6
    average, judged = screened(parts, trusted=[0], passed=["peer-1"])
    assert judged == {"peer-1": f"clipped: {why.replace('10', '10.0')}"}
    assert distance(average, torch.stack([parts[0], 0.1 * parts[1]]).mean(0)) < 0.2


def test_of_two_strangers_the_shorter_is_the_measure_and_neither_is_against() -> None:
    average, judged = screened([PARTS[0], -2 * PARTS[1]])
    assert list(judged.values()) == ["clipped: was 2.0 times longer than the group's median"]
    assert float(average.norm()) <= float(PARTS[0].norm())


def test_two_of_five_that_agree_with_one_another_do_not_win() -> None:
    *honest, last = PARTS[:4]
    average, dropped = screened([*honest, -last, -last])
    assert set(dropped) == {"peer-3", "peer-4"}
    assert distance(average, screened(honest)[0]) < 1e-6


def test_where_peers_have_nothing_in_common_nobody_is_against() -> None:
    noise = [torch.randn(SIZE, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]
    assert screened([*noise, -(noise[0] + noise[1]) / 2])[1] == {}


@pytest.mark.parametrize(
    ("first", "claim", "counting", "out"),
    [(math.nan, 1.0, 2, ["c"]), (1.0, 1e9, 3, [])],
    ids=["who was dropped stays out", "the first claim counts"],
)
def test_what_a_sender_did_in_one_part_holds_for_all(first: float, claim: float, counting: int, out: list[str]) -> None:
    screen = Screen(["a", "b", "c"], KnownSenders(), SIZE)
    parts, own = contributions(3, 100), torch.zeros(100)
    screen.average(0, {**dict(enumerate(parts)), 2: first * parts[2]}, dict.fromkeys(range(3), 1.0), own)
    average = screen.average(100, dict(enumerate(parts)), {0: 1.0, 1: 1.0, 2: claim}, own)
    assert distance(average, sum(parts[:counting], own) / counting) < 0.2
    assert [verdict.peer for verdict in screen.verdicts() if verdict.action == "dropped"] == out


def test_a_slow_peer_that_sends_one_part_of_two_counts_in_that() -> None:
    screen, own = Screen(["a", "b", "c"], KnownSenders(), SIZE), torch.zeros(SIZE // 2)
    for index in range(2):
        parts = dict(enumerate(part[SIZE // 2 * index :][: SIZE // 2] for part in PARTS[:3]))
        sent = dict(list(parts.items())[: 2 + index])
        average = screen.average(SIZE // 2 * index, sent, dict.fromkeys(sent, 100.0), own)
        assert distance(average, sum(sent.values(), own) / (2 + index)) < 0.2
    assert (screen.verdicts(), screen.counted()) == ((), {"a": 100.0, "b": 100.0, "c": 50.0})


@pytest.mark.parametrize("keeps", [True, False])
def test_what_each_has_put_into_an_average_is_kept_for_the_owner_to_try(keeps: bool) -> None:
    names, half = ["me", "anna", "mallory"], SIZE // 2
    screen = Screen(names, KnownSenders(frozenset({"me"}), own="me", keeps=keeps), SIZE)
    for first in (0, half):  # of mallory nothing has come in the second part
        parts = {place: PARTS[place][first:][:half] for place in range(2 + (first == 0))}
        screen.average(first, parts, dict.fromkeys(parts, 100.0), parts[0])
    found = screen.alone("anna")
    assert [(position, len(values)) for position, values in found] == [(0, half), (half, half)] * keeps
    assert not keeps or distance(torch.cat([values for _, values in found]), (PARTS[0] + PARTS[1]) / 2) < 0.2
    assert not keeps or distance(screen.alone("mallory")[1][1], PARTS[0][half:]) < 0.05


@pytest.mark.parametrize(
    ("values", "options", "median"),
    [
        ([1.0, 2.0, 3.0, -1e6], {}, 1.5),
        ([1.0, 2.0, 3.0], {}, 2.0),
        ([1.0, -1e6], {"trusted": [0]}, 1.0),  # of two the owner's side
        ([1.0, 2.0, 3.0, *[90.0] * 5], {"together": range(3, 8)}, 2.5),  # who comes five times has one voice
        ([math.nan, math.nan], {}, 7.0),  # where nobody counts nothing changes
    ],
)
def test_buffers_are_medians_and_one_liar_does_not_move_them(
    values: list[float], options: dict[str, Sequence[int]], median: float
) -> None:
    parts = [part.clone() for part in PARTS[: len(values)]]
    for part, value in zip(parts, values, strict=True):
        part[-3:] = value
        part[:-3] *= value * 0.0 + 1.0
    own = torch.cat([torch.ones(SIZE - 3), torch.full((3,), 7.0)])
    average, _ = screened(parts, parameters=SIZE - 3, own=own, **options)  # type: ignore[arg-type]
    assert average[-3:].tolist() == [median] * 3
    assert bool(average[:-3].abs().max() == 0.0) == math.isnan(values[0])


# What others have averaged.

VALUES, PARAMETERS = 3 * PART, 3 * PART - 100  # the last hundred are running statistics
ANNA, BOB, STATISTICS = slice(PART, 2 * PART), slice(2 * PART, VALUES), slice(PARAMETERS, VALUES)


def trained(seed: int) -> Tensor:
    """What a peer sends: in part what all have learned."""
    vectors = [torch.randn(VALUES, generator=torch.Generator().manual_seed(one)) for one in (0, seed)]
    vector = 0.3 * vectors[0] + vectors[1]
    vector[PARAMETERS:] = 1.0 + 0.01 * vectors[1][PARAMETERS:]
    return vector


OWN = trained(1)
AVERAGE = (OWN + trained(2) + trained(3)) / 3
OPPOSITE = "as a reducer returned the opposite of what it received (cosine -0."
LONG = "as a reducer returned an average"


@pytest.mark.parametrize(
    ("where", "factor", "options", "judged"),
    [
        (ANNA, 1.0, {}, {}),
        *((ANNA, factor, {}, {"anna": ("dropped", OPPOSITE)}) for factor in (-1.0, -9.0, -50.0)),
        (BOB, 100.0, {}, {"bob": ("dropped", "as a reducer returned impossible running statistics")}),
        (BOB, math.nan, {}, {"bob": ("dropped", "as a reducer returned values that are not finite")}),
        (ANNA, 9.0, {}, {"anna": ("left out", LONG)}),
        (ANNA, 100.0, {}, {"anna": ("dropped", LONG)}),
        (ANNA, 9.0, {"slower": 4.0}, {}),  # what others have learned in more updates may be longer
        # So may everything be if what this peer has averaged itself is.
        (slice(PARAMETERS), 9.0, {}, {}),
        (slice(PARAMETERS), 9.0, {"reducers": ("anna", "anna", "")}, {"anna": ("left out", LONG)}),
        *((STATISTICS, factor, {}, {"bob": ("dropped", "as a reducer")}) for factor in (1e6, math.inf)),
        (ANNA, -9.0, {"reducers": ("me", "", "bob")}, {}),  # what has not arrived is nobody's
        (ANNA, -1.0, {"own": torch.cat([torch.zeros(PARAMETERS), OWN[PARAMETERS:]])}, {}),  # it has trained nothing
    ],
)
def test_only_reducers_whose_averages_cannot_be_true_are_not_believed(
    where: slice, factor: float, options: dict[str, object], judged: dict[str, tuple[str, str]]
) -> None:
    average = AVERAGE.clone()
    average[where] *= factor
    given = {"own": OWN, "reducers": ("me", "anna", "bob"), "slower": 1.0, **options}
    found = untrue(average, num_parameters=PARAMETERS, own_id="me", **given)  # type: ignore[arg-type]
    assert {verdict.peer: verdict.action for verdict in found} == {peer: action for peer, (action, _) in judged.items()}
    assert all(verdict.why.startswith(judged[verdict.peer][1]) for verdict in found)


@pytest.mark.parametrize(
    ("others", "own", "times"),
    [
        ({}, 100.0, 1.0),
        ({"a": 400.0}, 100.0, 4.0),
        ({"a": 50.0}, 100.0, 1.0),
        ({"a": 400.0}, 0.0, 1.0),
        ({"a": 100.0, "liar": 1e9}, 100.0, 1.0),  # one that claims any speed changes nothing
    ],
)
def test_how_much_slower_a_peer_is_is_what_all_say(others: dict[str, float], own: float, times: float) -> None:
    assert slower_than({"me": own, **others}, "me") == times


def test_of_a_large_contribution_only_some_parts_are_kept_any_of_them() -> None:
    kept = set[int]()
    for _ in range(30):
        screen = Screen(["me", "anna"], KnownSenders(drawn=["anna"], most_given=2), 5 * 8)
        for position in range(0, 40, 8):
            part = torch.full((8,), float(position + 1))
            screen.average(position, {0: part, 1: part}, {0: 1.0, 1: 1.0}, part)
        assert len(screen.given["anna"]) == 2
        assert all(values.tolist() == [position + 1.0] * 8 for position, values in screen.given["anna"].items())
        kept |= screen.given["anna"].keys()
    assert kept == {0, 8, 16, 24, 32}
