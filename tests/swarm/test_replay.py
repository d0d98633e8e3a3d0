"""Audits by replay: what honest volunteers show is true, on whatever machine; and what is found of those that cheat."""

import base64
import hashlib
import json
import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import median
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from tests.rank_functions import QUICK
from trainkit.checkpoint.state import weights_of
from trainkit.config.loading import load
from trainkit.config.schema import Config
from trainkit.data import build_data
from trainkit.data.base import derive_seed
from trainkit.distributed.process_group import Distributed
from trainkit.ranks import RankEnv
from trainkit.swarm import replay
from trainkit.swarm.accounts import (
    Account,
    Accounts,
    Heard,
    Journal,
    Link,
    Shown,
    digests_of,
    is_too_slow,
    num_stretches,
    parameters_of,
)
from trainkit.swarm.address import MEGABIT
from trainkit.swarm.diloco import BLOCK, PART, Average, Codec, Given, OuterState, cuts, decode, encode, flatten, rounded
from trainkit.swarm.replay import Auditor, drawn_of, misgiven, misled
from trainkit.training.build import TrainState, alone, build
from trainkit.training.update import Updater

CONFIG = load("hivemind", [*QUICK, "data.workers=0", "train.precision=fp32", "train.global_batch_size=32"]).config
CPU = Distributed(RankEnv.single(), torch.device("cpu"))
SPLITS = build_data(CONFIG.data)
RATE, SEED = 3e-3, 7
NOTHING = hashlib.sha256().hexdigest()


@pytest.fixture(autouse=True)
def clock_by_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Snapshots take no time, also where the machine has much to do."""
    monkeypatch.setattr("trainkit.swarm.accounts._SHARE_FOR_SNAPSHOTS", math.inf)


def made(config: Config, codec: Codec, width: int = 32) -> tuple[TrainState, OuterState]:
    torch.manual_seed(0)
    norm = nn.LayerNorm(width) if codec == "4bit" else nn.BatchNorm1d(width)  # whose statistics are never sent in 4 bit
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, width), norm, nn.ReLU(), nn.Linear(width, 10))
    return build(alone(config), CPU, SPLITS, model=model), OuterState(model, lr=0.7, momentum=0.5)


class Swarm:
    """The owner and one volunteer, ben, whose clock goes by the updates: it takes a snapshot after every eighth."""

    def __init__(
        self,
        *,
        precision: str = "fp32",
        micro_batch_size: int = 32,
        seconds: float = 8.0,
        codec: Codec = "8bit",
        is_slow: bool = False,
        wide: bool = False,
    ) -> None:
        self.codec, self.is_slow, width = codec, is_slow, 2500 if is_slow or wide else 32  # in three parts
        settings = {"precision": precision, "micro_batch_size": micro_batch_size}
        theirs = CONFIG.model_copy(update={"train": CONFIG.train.model_copy(update=settings)})
        (owner, self.owner), (self.state, self.common) = made(CONFIG, codec, width), made(theirs, codec, width)
        self.auditor = Auditor(owner, self.owner, lambda peer: SEED, lambda index: (RATE, RATE), 60.0, 1e9)
        with owner.batches(0, 1, seed=0, workers=0) as batches:
            Updater(owner)(batches, lr=RATE, seed=0)
        self.owner.into_model()
        self.accounts = Accounts(32, self.common.theta.numel())
        self.journal = Journal(self.state, self.common, seconds)
        self.update, self.round, self.position = Updater(self.state), 0, 0
        self.late: tuple[Average, Given] | None = None
        self.first = {name: value.clone() for name, value in weights_of(self.state.model).items()}
        # What a cheat changes.
        self.rate = RATE
        self.labels: Callable[[Tensor], Tensor] = lambda labels: labels
        self.after_update: Callable[[], None] = lambda: None

    def train(self, updates: int) -> None:
        with self.state.batches(self.position, self.position + updates, seed=SEED, workers=0) as batches:
            wanted = (batch._replace(labels=self.labels(batch.labels)) for batch in batches)
            for _ in range(updates):
                self.journal.before_update(self.position, self.rate, self.position)
                self.update(wanted, lr=self.rate, seed=derive_seed(SEED, self.position))
                self.position += 1
                self.after_update()

    def round_of(
        self,
        *,
        settles_after: int = 0,
        sent: Callable[[Tensor], Tensor] = lambda vector: vector,
        counts: bool | Sequence[bool] = True,
        arrives: bool = True,
        adopts: bool = False,
        trains: bool = True,
        drawn: str = "ben",
        shows: bool = True,
        takes_part: bool = True,
    ) -> Shown | None:
        """A round of 24 updates, of which some come before the last round's average; what the volunteer shows.

        Args:
            counts: its contribution is in the average, or some parts of it.
            arrives: the average arrives at the volunteer as well.
            adopts: the volunteer takes over the owner's weights after the last round's average.
            trains: the owner has time to train some of it again.
            drawn: whose work the owner wants to see.
            shows: what it is asked for.
            takes_part: the volunteer says something of the round.
        """
        self.state.model.train()
        if self.late is not None:
            self.train(settles_after)
            self.common.step(*self.late, trained_on=settles_after > 0)
        if adopts:
            self.train(1)
            self.common.load(self.owner.theta, self.owner.momentum, self.round)
        self.train(24 - settles_after - adopts)
        self.heard = self.accounts.heard()
        self.owes = self.auditor.owe(self.heard)
        self.auditor.draw([], self.heard)  # it keeps the common weights
        free = drawn not in self.heard.owing
        self.accounts.draw({drawn: trains} if free else {}, self.round)
        told, given = self.journal.close(self.round, is_slow=self.is_slow), self.common.give(24 * 32, self.codec)
        assert told is not None
        vector, size = sent(given.vector.clone()), self.common.num_parameters
        arrived = {
            part.start: decode(encode(vector[:size][part], self.codec), self.codec, len(vector[:size][part])).numpy()
            for part in cuts(size)
        }
        self.accounts.took_part(["ben"])
        wanted = self.accounts.hear("ben", told.account.model_dump_json().encode()) if takes_part else None
        parts = self.accounts.ask_for_parts("ben", arrived) if wanted is not None else ()
        asked, self.round = self.accounts.take("ben"), self.round + 1
        many = len(given.weights)
        counted = (counts,) * many if isinstance(counts, bool) else tuple(counts)
        average = Average(0.5 * given.vector, self.round, (True,) * many, counted)
        self.owner.step(average, replace(self.owner.nothing(), sound=True))
        self.late = replace(average, arrived=(arrives,) * many), given
        if shows:
            self.accounts.excuse("ben")
        return asked._replace(data=told.show(wanted or (), parts)) if asked is not None else None

    def audited(self, *, precision: str = "", **how: Any) -> tuple[str, str]:
        shown = self.round_of(**how)
        assert shown is not None
        if precision:  # what it claims to have trained in
            shown = shown._replace(account=shown.account.model_copy(update={"precision": precision}))
        verdict = self.auditor.audit(shown)
        return (verdict.action, verdict.why) if verdict is not None else ("", "")


def with_sums(account: Account, change: Callable[[Tensor], Any]) -> Account:
    """That account with other sums."""
    where = account.where().float()
    change(where)
    return account.model_copy(update={"sums": base64.b64encode(where.numpy().tobytes()).decode()})


def other_labels(swarm: Swarm) -> None:
    swarm.labels = lambda labels: torch.where(labels == 7, 3, labels)


def other_rates(swarm: Swarm) -> None:
    swarm.rate = 5 * RATE


def turned(swarm: Swarm) -> None:
    """Once in a round, between two updates, the model is moved against what it has learned."""

    @torch.no_grad()
    def move() -> None:
        if swarm.position % 24 == 13:
            swarm.journal.note()
            theta = flatten(swarm.common._tensors())
            swarm.common.into_model(theta + 0.5 * (swarm.common.theta - theta))

    swarm.after_update = move


def poisoned(swarm: Swarm) -> None:
    """Once in a round the optimizer is told to remember what it has not seen."""

    def poison() -> None:
        if swarm.position % 24 == 13:
            for state in swarm.state.optimizer.state.values():
                state["exp_avg"].mul_(-1.0)

    swarm.after_update = poison


def leapt(swarm: Swarm) -> None:
    """Once in a round, between two updates, the model is moved as far as it has come in the round, but elsewhere."""
    swarm.after_update = lambda: aside(swarm, 1.0) if swarm.position % 24 == 13 else None


def crept(swarm: Swarm) -> None:
    """The same, but by a fifth of that, five times in a round."""
    swarm.after_update = lambda: aside(swarm, 0.2) if swarm.position % 24 in (5, 9, 13, 17, 21) else None


@torch.no_grad()
def aside(swarm: Swarm, share: float) -> None:
    """The model moves sideways by that share of how far it has come in the round."""
    way = (flatten(swarm.common._tensors()) - swarm.common.theta)[: swarm.common.num_parameters]
    swarm.common._move(share * way.norm() / way.numel() ** 0.5 * torch.randn(way.shape))
    swarm.common.version -= 1


def forgetful(swarm: Swarm) -> None:
    """Once in a round the optimizer forgets, and it says that the common weights have moved."""

    def forget() -> None:
        if swarm.position % 24 == 13:
            swarm.journal.note()
            swarm.state.optimizer.state.clear()
            swarm.common.version += 1

    swarm.after_update = forget


TRUE = "true, as was seen in "


@pytest.mark.parametrize("codec", ["8bit", "4bit"])
@pytest.mark.parametrize("how", [{}, {"settles_after": 5}, {"counts": False}, {"settles_after": 5, "counts": False}])
def test_what_an_honest_volunteer_shows_is_true(how: dict[str, Any], codec: Codec) -> None:
    swarm = Swarm(codec=codec)
    for number in range(10):
        action, why = swarm.audited(**how)
        assert (action, why[: len(TRUE)]) == ("audited", TRUE)
        assert swarm.auditor.verified == ({"ben": 24 * 32} if number else {})
        assert swarm.accounts.stated == swarm.auditor.verified or not number


@pytest.mark.parametrize("settles_after", [0, 5])
@pytest.mark.parametrize("rounds", [1, 2])
def test_who_has_missed_an_average_and_takes_over_the_weights_is_not_blamed(rounds: int, settles_after: int) -> None:
    swarm = Swarm()
    swarm.audited()
    swarm.audited(arrives=False)
    found = [swarm.audited(adopts=number == rounds - 1, settles_after=settles_after) for number in range(rounds)]
    found += [swarm.audited() for _ in range(4)]
    assert {action for action, _ in found} == {"audited"}, found
    assert found[-1][1].startswith(TRUE)


@pytest.mark.parametrize("other", [{"precision": "bf16"}, {"micro_batch_size": 8}])
def test_volunteers_with_other_hardware_are_believed(other: dict[str, Any]) -> None:
    swarm = Swarm(**other)
    assert {swarm.audited()[1][: len(TRUE)] for _ in range(6)} == {TRUE}


def test_two_ranks_that_are_one_peer_keep_a_journal() -> None:
    swarm = Swarm()
    swarm.journal._state = replace(swarm.state, model=nn.DataParallel(swarm.state.model))
    vars(swarm.journal._state)["optimizer"] = swarm.state.optimizer
    assert {swarm.audited()[1][: len(TRUE)] for _ in range(6)} == {TRUE}


def half_turned(vector: Tensor) -> Tensor:
    return torch.cat([vector[: len(vector) // 2], -vector[len(vector) // 2 :]])


@pytest.mark.parametrize(("trains", "codec"), [(True, "8bit"), (False, "8bit"), (True, "4bit")])
@pytest.mark.parametrize("sent", [half_turned, torch.zeros_like, lambda vector: 3 * vector])
def test_who_gives_something_else_than_it_has_trained_is_caught_at_once(
    sent: Callable[[Tensor], Tensor], trains: bool, codec: Codec
) -> None:
    swarm = Swarm(codec=codec)
    assert swarm.audited(trains=trains)[0] == ("audited" if trains else "")
    for action in ("left out", "dropped"):
        found, why = swarm.audited(trains=trains, sent=sent)
        assert (found, why[:53]) == (action, "has given something else than it has trained (cosine ")
        assert why.endswith("; the next time it is banned") == (action == "left out")
        assert swarm.audited()[0] == "audited" or action == "dropped"  # and one that passes clears nobody


@pytest.mark.parametrize("codec", ["8bit", "4bit"])
def test_who_has_a_slow_link_shows_two_parts_of_what_it_has_given(codec: Codec) -> None:
    swarm = Swarm(codec=codec, is_slow=True)
    for settles_after in range(4):
        shown = swarm.round_of(settles_after=settles_after, trains=False)
        assert shown is not None
        assert len(set(shown.parts)) == 2
        assert 2 * 4 * PART // 2 < len(shown.data) < 2 * 4 * PART + 2000
        assert swarm.auditor.audit(shown) is None
    found = swarm.audited(sent=half_turned, trains=False)
    assert found[0] == "left out"
    assert found[1].startswith("has given something else than it has trained (cosine ")


@pytest.mark.parametrize("is_slow", [True, False])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("counts", [True, False, (True, False, True)])
def test_an_audit_looks_at_one_snapshot_or_at_a_move(precision: str, counts: Any, is_slow: bool) -> None:
    swarm, kinds = Swarm(is_slow=is_slow, precision=precision, wide=True), set[bool]()
    for settles_after in 15 * (0, 5, 7, 3):  # which of them is drawn
        if swarm.round > 8 and kinds == {False, True}:
            break
        shown = swarm.round_of(settles_after=settles_after, counts=counts)
        assert shown is not None
        assert len(shown.data) < (15 if is_slow else 18) * swarm.common.theta.numel()
        kinds.add(shown.has_moved)
        verdict = swarm.auditor.audit(shown)
        assert verdict is not None
        assert verdict.why.startswith(TRUE), verdict
    assert kinds == {False, True}
    assert swarm.auditor.verified


def test_for_a_snapshot_a_slow_peer_has_as_long_as_its_link_takes() -> None:
    accounts = Accounts(32, 1_000_000)
    accounts.received = {"fp16": 2_000_000, "8bit": 1_000_000, "a third of 4bit": 170_000}
    peers = (*accounts.received, "unheard of")
    allowed = {peer: accounts._rounds_for(peer) for peer in peers}
    assert allowed == {"fp16": 6, "8bit": 9, "a third of 4bit": 39, "unheard of": 60}


def test_one_slow_peer_shows_a_snapshot_at_a_time_and_nobody_waits_for_it() -> None:
    swarm = Swarm(is_slow=True)
    shown = swarm.round_of(shows=False)
    assert shown is not None
    assert shown.wanted
    for _ in range(10):  # rounds in which it is under way
        assert swarm.round_of(drawn="ann", shows=False) is None
        assert ([*swarm.heard.owing], swarm.heard.behind) == (["ben"], 0)
        assert not swarm.auditor.unproven
    verdict = swarm.auditor.audit(shown)  # of a round that is long over
    assert verdict is not None
    assert verdict.why.startswith(TRUE)


@pytest.mark.parametrize(
    "what", ["nothing", "another part", "a column", "other digests", "weights of a strange kind", "few weights"]
)
def test_parts_are_those_that_a_peer_has_committed_itself_to(what: str) -> None:
    swarm = Swarm(is_slow=True)
    shown = swarm.round_of(trains=False)
    assert shown is not None
    tensors = safetensors.torch.load(shown.data)
    name = f"part.{shown.parts[0]}"
    if what == "nothing":
        del tensors[name]
    elif what == "a column":  # of the same bytes: its difference from a row would have four billion values
        tensors[name] = tensors[name].view(-1, 1)
    elif what == "other digests":
        tensors["digests"] = tensors["digests"] + 1
    else:
        changed = {"another part": -tensors[name], "few weights": tensors[name][1:]}
        tensors[name] = changed.get(what, tensors[name].view(torch.int32))
    verdict = swarm.auditor.audit(shown._replace(data=safetensors.torch.save(tensors)))
    assert verdict is not None
    reason = {"nothing": f"'{name}'", "other digests": "other digests"}.get(what, "other weights")
    assert verdict.why.startswith(f"has shown something else than it had committed itself to: {reason}; ")


def test_of_parts_that_nobody_has_seen_nothing_is_asked() -> None:
    shown = Swarm(is_slow=True).round_of(trains=False)
    assert shown is not None
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
    ("megabits", "is_slow"),
    [(None, False), (2.0, True), (20.0, True), (30.0, False)],  # 3 million weights in rounds of 12 s
)
def test_who_cannot_show_whole_snapshots_in_time_says_so(megabits: float | None, is_slow: bool) -> None:
    assert is_too_slow(megabits and megabits * MEGABIT, 3_000_000, 12.0) == is_slow


def heard(*owing: str, behind: int = 0) -> Heard:
    return Heard(owing, behind, (), {})


def test_who_has_failed_an_audit_is_asked_in_every_second_round() -> None:
    auditor, peers = Swarm().auditor, [f"peer-{index}" for index in range(10)]
    auditor._suspects["peer-3"] = 0
    drawn = Counter(peer for _ in range(400) for peer in auditor.draw(peers, heard()))
    assert drawn.total() == 400
    assert 0.45 < drawn["peer-3"] / 400 < 0.65  # half, and a tenth of the rest
    assert len(drawn) == 10


def test_who_has_yet_to_show_something_is_not_drawn() -> None:
    auditor = Swarm().auditor
    assert auditor.draw(["ann", "ben"], heard("ann")) == {"ben": True}
    assert auditor.draw(["ann", "ben"], heard("ann", "ben")) == {}


def test_an_audit_that_failed_is_forgotten_after_twenty_that_were_passed() -> None:
    for passed, action in ((19, "dropped"), (20, "left out")):
        swarm = Swarm()
        assert swarm.audited(sent=half_turned, trains=False)[0] == "left out"
        counts = list[bool]()
        for _ in range(passed):
            assert swarm.audited(trains=False)[0] == ""
            counts.append("ben" not in swarm.auditor.unproven)
        assert counts == [*[False] * 11, *[True] * (passed - 11)]
        assert swarm.audited(sent=half_turned, trains=False)[0] == action


def test_rounding_is_allowed_for_by_what_comes_of_it_in_those_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "_ALIKE", 0.0)
    honest, cheat = Swarm(precision="bf16"), Swarm(precision="bf16")
    cheat.labels = lambda labels: torch.where(labels == 7, 3, labels)
    for _ in range(6):
        # Of a number format that this machine has not: what was trained in bf16 is trained again in fp32.
        assert honest.audited(precision="fp16")[1].startswith(TRUE)
    assert "has not trained so" in {cheat.audited(precision="fp16")[1][:18] for _ in range(8)}


def test_smaller_than_any_number_that_is_sent_is_nothing() -> None:
    learned = torch.full((100,), 1e-9)
    assert misgiven({0: torch.zeros(100).numpy()}, learned) == ""
    assert misgiven({0: torch.zeros(100).numpy()}, 1e4 * learned).startswith("has given something else")


@pytest.mark.parametrize("weights", ["alike", "with outliers", "nearly all small"])
@pytest.mark.parametrize("values", [7, 1000, 70_000])
@pytest.mark.parametrize("rounds", [1, 3])
@pytest.mark.parametrize("off", [0.0, 1e-6, 0.01])
def test_what_4_bit_make_of_honest_work_is_never_held_against_it(
    weights: str, values: int, rounds: int, off: float
) -> None:
    """Also where the owner's weights are off by as much as an audit puts up with, of what was learned."""
    torch.manual_seed(values)
    learned = {
        "alike": torch.randn(values),
        "with outliers": torch.randn(values) / torch.rand(values),
        "nearly all small": torch.where(torch.arange(values) % BLOCK == 0, 7.0, 0.51),
    }[weights]
    seen = learned + off * learned.norm() * torch.nn.functional.normalize(torch.randn(values), dim=0)
    for part in cuts(values):
        given = -rounded(learned[part] / rounds)
        assert misgiven({0: given.numpy()}, seen[part]) == ""
        later = 0.3 * learned.norm() * torch.nn.functional.normalize(torch.randn(len(given)), dim=0)
        moved, length = (later + learned[part] + rounds * given, later + learned[part]), 2 * off * 1e6 * learned.norm()
        assert misled(*moved, seen[part], float(length)) == ""


def biased(learned: Tensor, by: float) -> Tensor:
    """What 4 bit make of it, one level off in so many values."""
    steps = learned.view(-1, BLOCK).abs().amax(dim=1).repeat_interleave(BLOCK) / 7
    return rounded(learned) + torch.where(torch.rand(learned.shape) < by, steps, 0.0)


def test_who_rounds_to_other_levels_in_4_bit_is_found() -> None:
    torch.manual_seed(0)
    learned, later = torch.randn(64 * BLOCK), torch.randn(64 * BLOCK)
    for by, is_found in ((0.0, False), (0.1, True)):
        given = biased(learned, by)
        assert bool(misgiven({0: -given.numpy()}, learned)) == is_found
        assert bool(misled(later + learned - given, later + learned, learned, 1.0)) == is_found


@pytest.mark.parametrize(
    ("seconds", "has_trained", "why"),
    [
        (0.0, True, "trains more than can be trained again here in 0 s"),
        (60.0, False, "has trained when nothing had been trained here"),
    ],
)
def test_what_the_owner_cannot_do_is_nobodys_fault(seconds: float, has_trained: bool, why: str) -> None:
    swarm, found = Swarm(), TRUE
    swarm.auditor.seconds = seconds
    if not has_trained:
        swarm.auditor.state.optimizer.state.clear()
    while found.startswith(TRUE):  # a move of the common weights was drawn
        action, found = swarm.audited()
        assert action == "audited"
    assert found == why
    assert not swarm.auditor._times


def test_audits_take_a_share_of_the_owners_time_that_grows_with_the_swarm() -> None:
    auditor = Swarm().auditor
    auditor.round_seconds, auditor._at_once = 100.0, 16
    for peers, took, suspects, many in (
        (1, 0.0, (), 1.0),  # nobody knows, yet, how long one takes
        (3, 6.0, (), 2.5),
        (10, 6.0, (), 25 / 3),
        (100, 6.0, (), 25 / 3),
        (100, 0.6, (), 16.0),
        (3, 60.0, (), 0.25),
        (3, 60.0, ("peer-0",), 1 / 3),
    ):
        auditor._took, auditor._suspects = took, dict.fromkeys(suspects, 0)
        rounds = [auditor.draw([f"peer-{index}" for index in range(peers)], heard()) for _ in range(400)]
        assert all(rounds)
        assert abs(sum(sum(drawn.values()) for drawn in rounds) / 400 - many) < 0.15, peers


def test_as_many_are_drawn_as_can_show_all_within_a_round() -> None:
    auditor: Any = Swarm().auditor
    auditor._took, drawn = 1e-9, list[int]()
    for behind in (0, 0, 0, 0, 2, 0, 9, 0):
        auditor.owe(now := heard(behind=behind))
        drawn.append(len(auditor.draw([f"peer-{index:02}" for index in range(20)], now)))
    assert drawn == [2, 3, 4, 5, 1, 3, 1, 2]
    auditor.common = SimpleNamespace(theta=torch.empty(28_000_000, device="meta"))  # what is shown has to fit, too
    for _ in range(9):
        auditor.owe(heard())
    assert auditor._at_once == 4


def test_who_shows_weights_that_fit_what_it_has_given_is_held_to_its_digests() -> None:
    swarm = Swarm()
    shown = swarm.round_of(sent=torch.zeros_like, trains=False)  # as if it had learned nothing
    assert shown is not None
    weights = torch.cat(parameters_of(swarm.state.model, swarm.first))
    digests = digests_of(swarm.state.model, swarm.first)
    for shows, said in ((digests, "other digests"), (None, "other weights")):
        tensors = safetensors.torch.load(shown.data) | {"part.0": weights}
        if shows is not None:
            tensors["digests"] = torch.frombuffer(bytearray(shows), dtype=torch.uint8)
        verdict = swarm.auditor.audit(shown._replace(data=safetensors.torch.save(tensors)))
        assert verdict is not None
        assert verdict.why.startswith(f"has shown something else than it had committed itself to: {said}")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"goes on": {"before": None}}, "has begun anew with other weights than the run's"),
        ({"sums": None}, "went on from other weights than the run's"),
        ({"base": 77}, "went on from other rounds' weights"),
    ],
)
def test_of_what_cannot_be_compared_nothing_is_said(change: dict[str, Any], why: str) -> None:
    swarm = Swarm()
    swarm.round_of()
    shown = swarm.round_of()
    assert shown is not None
    account, links = shown.account, shown.account.links
    if "base" in change:
        account = account.model_copy(update={"links": [link._replace(base=77) for link in links]})
    if "sums" in change:
        account = with_sums(account, lambda where: where[:, 3].mul_(1.01))
    shown = shown._replace(account=account, **change.get("goes on", {}))
    said = list[tuple[str, str]]()
    for swarm.owner.apart in (-9, -9, account.round, -9):  # the owner has gone its own way before the third
        verdict = swarm.auditor.audit(shown)
        assert verdict is not None
        said.append((verdict.action, verdict.why.partition(";")[0]))
    assert said == [*[("audited", why)] * 3, ("left out", why)]


@pytest.mark.parametrize(
    ("cheat", "why"),
    [
        (other_labels, "has not trained so: "),
        (other_rates, "has trained with other learning rates than the run's"),
        (turned, "has other weights than those that it had trained and those that all have in common"),
        (poisoned, "has not trained so: "),
        (leapt, "has not trained so: "),
        (forgetful, "has changed its optimizer without an update"),
    ],
)
def test_who_trains_otherwise_is_caught_when_that_is_drawn(cheat: Callable[[Swarm], None], why: str) -> None:
    swarm = Swarm()
    cheat(swarm)
    said = TRUE
    for _ in range(200):  # one link of six is drawn in each
        said = swarm.audited()[1]
        if not said.startswith(TRUE):
            break
    assert said.startswith(why)


@pytest.mark.long
@pytest.mark.parametrize(("cheat", "share"), [(other_labels, 0.8), (leapt, 0.8), (poisoned, 0.8), (crept, 0.5)])
def test_cheats_are_caught_as_often_as_the_security_page_says(cheat: Callable[[Swarm], None], share: float) -> None:
    """In every second round; all the time, or in one of 12 stretches. One volunteer is drawn in each round."""
    caught = rounds = 0
    for _ in range(10):
        swarm = Swarm(seconds=1.4)
        swarm.audited()
        for _ in range(5):
            cheat(swarm)
            caught, rounds = caught + (swarm.audited()[0] != "audited"), rounds + 1
            swarm.labels, swarm.after_update = (lambda labels: labels), (lambda: None)
            swarm.audited()
    print(f"caught in {caught} of {rounds}")
    assert abs(caught / rounds - share) < 0.2


def test_who_moves_unevenly_is_drawn_more_often() -> None:
    chance, uneven = random.Random(0), {"peer-1": 8.0, "peer-2": 1.0}
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


def test_who_hides_where_it_has_ended_is_caught_by_audits_of_the_next_round() -> None:
    """It would have gone somewhere else after its last snapshot but one."""
    swarm, said = Swarm(), list[str]()
    while len(said) < 100 and said[-1:] != ["has said that it was elsewhere than it was"]:
        swarm.round_of()
        told = swarm.accounts._last["ben"]
        swarm.accounts._last["ben"] = with_sums(told, lambda where: where[-1, 0].mul_(1.001))
        said.append(swarm.audited()[1].partition(";")[0])
    assert said[-1] == "has said that it was elsewhere than it was"


def test_who_shows_nothing_three_times_does_not_count_until_it_passes() -> None:
    swarm, verdicts = Swarm(), list[str]()
    while len(verdicts) < 3:
        swarm.round_of(shows=False)
        verdicts += [f"{verdict.action}: {verdict.why}" for verdict in swarm.owes]
    assert verdicts == [*["audited: has shown nothing"] * 2, verdicts[-1]]
    assert verdicts[-1].startswith("left out: has shown nothing; after 3 such audits")
    assert [*swarm.auditor.unproven] == ["ben"]
    while (shown := swarm.round_of()) is None:
        pass  # it has been asked once more
    swarm.auditor.audit(shown)
    assert not swarm.auditor.unproven


@pytest.mark.parametrize("takes_part", [True, False])
def test_who_takes_part_and_says_nothing_is_as_who_shows_nothing(takes_part: bool) -> None:
    swarm, verdicts = Swarm(), list[str]()
    for _ in range(8):
        swarm.round_of(takes_part=False, shows=False)
        if not takes_part:
            swarm.accounts._present.clear()
        verdicts += [verdict.why for verdict in swarm.owes]
    assert verdicts == (["has shown nothing"] if takes_part else [])


def test_who_has_other_libraries_counts_once_its_updates_were_made_again() -> None:
    swarm = Swarm()
    swarm.auditor.hear({"ben": True})
    assert [*swarm.auditor.unproven] == ["ben"]
    assert swarm.audited(counts=False, trains=False) == ("", "")
    assert [*swarm.auditor.unproven] == ["ben"], "nothing was trained again"
    is_agreed = False
    while not is_agreed:
        shown = swarm.round_of(counts=False)
        assert shown is not None
        verdict, is_agreed = swarm.auditor.audit(shown), not shown.has_moved
        assert verdict is not None
        assert verdict.why.startswith(TRUE)
        assert [*swarm.auditor.unproven] == ([] if is_agreed else ["ben"])


def noisy(swarm: Swarm) -> None:
    """Each update ends a little elsewhere, as by libraries that compute something else."""

    @torch.no_grad()
    def add_noise() -> None:
        for parameter in swarm.state.model.parameters():
            parameter.add_(1e-2 * torch.randn_like(parameter))

    swarm.after_update = add_noise


def failed(swarm: Swarm, **how: Any) -> tuple[str, str]:
    """The next audit that something is false in."""
    found = (swarm.audited(counts=False, **how) for _ in range(200))
    return next((action, why) for action, why in found if not why.startswith(TRUE))


def test_other_libraries_that_train_otherwise_are_no_reason_for_a_ban() -> None:
    swarm = Swarm()
    swarm.auditor.hear({"ben": True})
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
    swarm = Swarm()
    swarm.auditor.hear({"ben": True})
    noisy(swarm)
    actions = [failed(swarm)[0] for _ in range(8)]
    assert actions[:2] == ["left out"] * 2
    assert "dropped" in actions


def test_who_is_caught_cannot_plead_other_libraries_afterwards() -> None:
    swarm = Swarm()
    swarm.auditor.hear({"ben": False})
    noisy(swarm)
    assert failed(swarm)[1].endswith("the next time it is banned")
    swarm.auditor.hear({"ben": True})
    assert failed(swarm)[0] == "dropped"


@pytest.mark.parametrize(("cheat", "how"), [(other_rates, {}), (lambda swarm: None, {"sent": half_turned})])
def test_whose_libraries_are_others_is_banned_for_fraud_all_the_same(
    cheat: Callable[[Swarm], None], how: dict[str, Any]
) -> None:
    swarm = Swarm()
    swarm.auditor.hear({"ben": True})
    cheat(swarm)
    assert [failed(swarm, **how)[0] for _ in range(2)] == ["left out", "dropped"]


def test_who_has_passed_cannot_plead_its_libraries() -> None:
    swarm = Swarm()
    swarm.auditor.hear({"ben": True})
    while swarm.auditor.unproven:
        assert swarm.audited(counts=False)[1].startswith(TRUE)
    noisy(swarm)
    assert [failed(swarm)[0] for _ in range(2)] == ["left out", "dropped"]


def test_nobody_is_asked_whose_account_does_not_go_on_from_the_last_one() -> None:
    """Else it could forget what it has done, and begin with an optimizer that nobody has trained."""
    swarm = Swarm()
    swarm.audited()
    swarm.journal._kept[-1] = replace(swarm.journal._kept[-1], link=swarm.journal._kept[-1].link._replace(position=3))
    assert swarm.round_of() is None
    assert swarm.audited()[0] == "audited"


def test_who_has_missed_a_round_is_asked_as_others_are() -> None:
    swarm = Swarm()
    swarm.audited()
    swarm.round += 3
    assert swarm.audited()[1].startswith(TRUE)


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
    [("A" * 256, True), ("A" * 252, False), ("/" * 256, False), ("-" * 256, False), ("A" * 255, False), ("", False)],
)
def test_an_account_has_finite_sums_of_each_snapshot(given: str, asked: bool) -> None:
    link, accounts = Link(0, 0, NOTHING, NOTHING), Accounts(1)
    accounts.draw({"ben": True}, 0)
    account = Account(round=0, links=[link], precision="fp32", micro_batch_size=1, sums="")
    heard = accounts.hear("ben", account.model_copy(update={"sums": given}).model_dump_json().encode())
    assert heard == (() if asked else None)


@pytest.mark.parametrize("data", [b"", b"\xff" * 100, safetensors.torch.save({"rates": torch.zeros(1)})])
def test_garbage_in_the_place_of_snapshots_is_a_lie(data: bytes) -> None:
    swarm = Swarm()
    shown = swarm.round_of()
    assert shown is not None
    verdict = swarm.auditor.audit(shown._replace(data=data))
    assert verdict is not None
    assert verdict.action == "left out"
    assert "has shown something else than it had committed itself to" in verdict.why


def as_file(tensors: Mapping[str, Tensor]) -> bytes:
    """A safetensors file, also of what older versions of the library do not write."""
    kinds = {torch.float32: "F32", torch.float64: "F64", torch.int64: "I64", torch.uint8: "U8", torch.bool: "BOOL"}
    header, body = dict[str, Any](), b""
    for name, value in tensors.items():
        data = value.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        kind, places = kinds.get(value.dtype, "C64"), [len(body), len(body) + len(data)]
        header[name], body = {"dtype": kind, "shape": [*value.shape], "data_offsets": places}, body + data
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


@pytest.mark.parametrize(
    ("what", "rates"),
    [
        ("weights", torch.zeros(8, dtype=torch.float64)),
        *(("rates", of) for of in (torch.zeros(8, dtype=torch.complex64), torch.zeros(8, 2), torch.zeros(8).bool())),
    ],
)
def test_tensors_of_a_strange_kind_end_nobodys_training(what: str, rates: Tensor) -> None:
    """Also where they are what the peer had committed itself to."""
    swarm = Swarm()
    shown = swarm.round_of()
    assert shown is not None
    tensors = safetensors.torch.load(shown.data) | {"rates": rates}
    if what == "weights":
        tensors = {name: value.view(-1) if ".weights." in name else value for name, value in tensors.items()}
    verdict = swarm.auditor.audit(shown._replace(data=as_file(tensors)))
    assert verdict is not None
    said = "the weights of another model" if what == "weights" else "something else than it had committed itself to: "
    assert verdict.why.startswith(f"has shown {said}")


@pytest.mark.parametrize("what", [0, 1, 2])
def test_who_says_that_a_snapshot_was_elsewhere_is_caught_when_it_shows_it(what: int) -> None:
    swarm, shown = Swarm(), None
    swarm.round_of()  # its optimizer has nothing to remember before
    while shown is None or shown.has_moved:
        shown = swarm.round_of()
    (index,) = shown.wanted
    shown = shown._replace(account=with_sums(shown.account, lambda where: where[index, what].mul_(1.001)))
    verdict = swarm.auditor.audit(shown)
    assert verdict is not None
    assert verdict.why.startswith("has said that it was elsewhere than it was")


def test_who_claims_micro_batches_that_cannot_be_does_not_escape() -> None:
    swarm = Swarm()
    action, why = "", TRUE
    while why.startswith(TRUE):  # a move of the common weights was drawn
        shown = swarm.round_of()
        assert shown is not None
        verdict = swarm.auditor.audit(shown._replace(account=shown.account.model_copy(update={"micro_batch_size": 7})))
        assert verdict is not None
        action, why = verdict.action, verdict.why
    assert (action, why[:35]) == ("left out", "has trained in micro batches of 7, ")


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
    has_leapt = share > 0.5
    assert abs(drawn.pop((0, 1)) / 400 - (0.125 if has_leapt else 0.25)) < 0.1  # how the common weights were followed
    assert abs(drawn[place,] / 400 - share) < 0.1
    assert sorted(drawn) == [(1,), (2,), (3,)]


def test_a_leap_does_not_distract_from_the_rest_of_a_round() -> None:
    """For it may have been trained."""
    drawn = asked_for((0, 10, 20, 30, 40), (0, 20, 21, 22, 23), (0, 1, 2, 3, 4))
    assert abs(drawn[0,] / 400 - (0.5 + 0.5 * (0.4 / 4 + 0.6))) < 0.1
    assert sorted(drawn) == [(0,), (1,), (2,), (3,)]


def asked_for(positions: Sequence[int], weights: Sequence[float], moments: Sequence[float]) -> Counter[tuple[int, ...]]:
    """What a peer that is drawn has to show, in 400 rounds of that kind."""
    links, nothing, theta = [Link(position, 0, NOTHING, NOTHING) for position in positions], [0] * len(positions), [0.0]
    for (start, end), (before, after) in zip(pairwise(positions), pairwise(weights), strict=True):
        theta.append(theta[-1] + (after - before if start == end else 0.0))  # as the common weights have moved
    where = torch.tensor([weights, moments, nothing, theta]).T.float()[:, :, None].expand(-1, -1, 12).contiguous()
    sums, drawn = base64.b64encode(where.numpy().tobytes()).decode(), Counter[tuple[int, ...]]()
    account = Account(round=0, links=links, precision="fp32", micro_batch_size=1, sums=sums)
    for _ in range(400):
        accounts = Accounts(1)
        accounts.draw({"ben": True}, 0)
        drawn[accounts.hear("ben", account.model_dump_json().encode()) or ()] += 1
    return drawn


@pytest.mark.parametrize(("values", "stretches"), [(10_000, 16), (11_200_000, 5), (25_600_000, 1), (86_000_000, 0)])
def test_larger_models_have_fewer_snapshots_and_the_largest_none(values: int, stretches: int) -> None:
    assert num_stretches(values) == stretches
