"""Auditing: whom the owner asks to show its work, and what follows for those who have."""

import math
import random
import time
from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Annotated, Any, Literal, NamedTuple

import torch
from pydantic import Field, TypeAdapter
from torch import Tensor

from trainkit.swarm.identity.admission import remember
from trainkit.swarm.protocol.codecs import PART, num_parts
from trainkit.swarm.protocol.outer_step import OuterState, put_away
from trainkit.swarm.trust import accounts
from trainkit.swarm.trust.accounts import ROUNDS_TO_SHOW, TINY, Account, Shown
from trainkit.swarm.trust.replay import InconclusiveError, Replay, TrainedOtherwiseError, UnableError
from trainkit.swarm.trust.screening import MOST_KEPT, Verdict
from trainkit.training.train_state import TrainState

# The share of audits that go by the updates that are claimed, not by how far they lead; that look at how the common
# weights were followed, at least; and that look at a leap: else one that was trained would distract from the rest of
# the round.
_BY_UPDATES = 0.4
_OF_MOVES = 0.2
_OF_LEAPS = 0.5
# How many times further than usual, in squares, is a leap. Real honest peers came to more than 5 in 27 of 539 rounds of
# six updates, and to more than 10 in three; who went as far sideways at once as in a round otherwise to 5 to 70 in two
# rounds of three.
_LEAP = 5.0
# Of that so much is even; and how much is left after a round of how unevenly a peer has moved.
_EVEN = 2.0
LEFT = 0.85
# Parts that a peer is asked for which cannot show all in time, and of a large model; and rounds that it has at most to
# show one snapshot.
_PARTS_TO_SHOW = 2
_PARTS_OF_LARGE = 32
_MOST_ROUNDS_TO_SHOW = 60
_MOST_PARTS = 256
# Of what a peer sends and receives, what it shows of a large model in the long run.
_SHARE_OF_BYTES = 0.1


def most_given(values: int) -> int:
    """Return of how many parts of a contribution it may be asked whether they were trained."""
    return _PARTS_OF_LARGE if accounts.is_large(values) else num_parts(values)


LibraryStanding = Literal["counts", "tried", "differs"]
"""Standing of a peer with other libraries than the run: an audit has agreed; none has, yet; they train otherwise."""
_Wanted = tuple[Annotated[int, Field(ge=0, lt=accounts.LONGEST_CHAIN)], ...]
_Parts = Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(max_length=_MOST_PARTS)]


class AuditAnswer(NamedTuple):
    """Answer of the owner to an account."""

    wanted: _Wanted = ()
    """Snapshots that it wants to see."""
    parts: _Parts = ()
    """The same of the last one."""
    standing: LibraryStanding | Literal[""] = ""


ANSWER = TypeAdapter(AuditAnswer)


class _Owed(NamedTuple):
    """Debt of a peer that is about to be asked, or has to show something."""

    allowed: int = ROUNDS_TO_SHOW
    """Rounds that it has."""
    rounds: int = 0

    @property
    def is_long(self) -> bool:
        """It is a snapshot over a slow link."""
        return self.allowed > ROUNDS_TO_SHOW


class Heard(NamedTuple):
    """News for the owner of accounts, before each round."""

    owing: Collection[str]
    """Peers that are showing something, or are about to."""
    behind: int
    """Number of them whose links are not slow."""
    refused: Collection[str]
    """Peers that have not shown it in time, and are not asked any more."""
    uneven: Mapping[str, float]
    """Measure of how unevenly each peer has moved in one of the last rounds."""


class Accounts:
    """Hears accounts, and says what has to be shown, and by whom; in the averager's process.

    Args:
        batch: samples of an update.
        values: of the model.
    """

    def __init__(self, batch: int, values: int = 0) -> None:
        self._batch = batch
        self._values = values
        self.stated: dict[str, float] = {}
        """Samples of each peer's last account."""
        self.received: Mapping[str, int] = {}
        """Bytes of each peer's parts that have arrived in the last round."""
        self.drawn: dict[str, bool] = {}
        """Peers of whom the owner wants an account; and whether some of that is to be trained again."""
        self._round = -1
        self._told, self._present = set[str](), set[str]()
        """Among those who are drawn: whose account has come, and who has averaged in that round."""
        self.asked: dict[str, Shown] = {}
        """Requests that peers have yet to meet."""
        self._owed: dict[str, _Owed] = {}
        self._uneven: dict[str, float] = {}
        self._begun: dict[str, None] = {}
        """Peers of a large model that were asked for a snapshot."""
        self._last: dict[str, Account] = {}

    def draw(self, drawn: Mapping[str, bool], round_index: int) -> None:
        """A round ends. Want accounts of it from those who are drawn, and to train some of it again, or only see what
        came of it."""
        self.drawn = {**drawn}
        self._round = round_index
        self._told = set()
        self._present = set()
        self._owed |= dict.fromkeys(drawn, _Owed())

    def took_part(self, members: Iterable[str]) -> None:
        """These have averaged in the round that was drawn for."""
        self._present |= {*members}

    def heard(self) -> Heard:
        """Ask once in each round, before `draw`."""
        for peer in self.drawn.keys() - self._present - self._told:  # they were not there
            self.excuse(peer)
        self.drawn = {}
        refused = [peer for peer, one in self._owed.items() if one.rounds >= one.allowed]
        for peer in refused:
            self.excuse(peer)
        for peer, one in self._owed.items():
            self._owed[peer] = one._replace(rounds=one.rounds + 1)
        behind = sum(not one.is_long for one in self._owed.values())
        return Heard([*self._owed], behind, refused, self._uneven)

    def take(self, peer: str) -> Shown | None:
        """Return what that peer was asked for, and begins to show."""
        return self.asked.pop(peer, None)

    @property
    def awaited(self) -> int:
        """Peers that have yet to show something, and whose links are not slow."""
        return sum(not one.is_long for peer, one in self._owed.items() if peer in self._present or peer in self.asked)

    def excuse(self, peer: str) -> None:
        """It has shown all, or need not."""
        self.asked.pop(peer, None)
        self._owed.pop(peer, None)

    def hear(self, peer: str, data: bytes) -> tuple[int, ...] | None:
        """Return which snapshots the peer has to show, besides what it has given; None if it was not drawn."""
        account = accounts.read_account(data)
        if account is None:
            return None
        last = self._last.get(peer)
        begins = account.links[0]
        before = last if last is not None and last.links[-1] == begins else None  # rounds may be missed meanwhile
        remember(self._last, peer, account)
        remember(self.stated, peer, float(self._batch * max(0, account.links[-1].position - begins.position)))
        far = accounts.ratios_in(account)
        uneven = float((far - _EVEN).clamp_min(0.0).sum())
        remember(self._uneven, peer, max(uneven, LEFT * self._uneven.get(peer, 0.0)))
        if last is not None and before is None and begins.moments != accounts.NO_MOMENTS:
            return None  # nobody vouches for what its optimizer remembers: that is as if it had said nothing
        if account.round != self._round or peer not in self.drawn.keys() - self._told:
            return None
        self._told.add(peer)
        wanted = self._wanted(account, far) if self.drawn[peer] and self._may_ask(peer) else ()
        self.asked[peer] = Shown(peer, account, before, wanted, {})
        if account.is_slow and wanted:
            self._owed[peer] = _Owed(self._rounds_for(peer))
        return wanted

    def _wanted(self, account: Account, far: Tensor) -> tuple[int, ...]:
        """Snapshots by which it can be seen how a peer has trained, or how it has followed the common weights."""
        if account.is_slow and any(one.is_long for one in self._owed.values()):
            return ()  # slow peers show theirs one after the other
        updates = [end.position - start.position for start, end in pairwise(account.links)]
        trained = [place for place, number in enumerate(updates) if number > 0]
        moved = [place for place, number in enumerate(updates) if number <= 0]
        share = max(_OF_MOVES, len(moved) / max(1, len(updates)))
        is_move = bool(moved) and (not trained or random.SystemRandom().random() < share)
        if far.max() > _LEAP and random.SystemRandom().random() < _OF_LEAPS:
            chosen = int(far.argmax())
            is_move = chosen in moved
        elif places := moved if is_move else trained:
            chosen = self._chosen(places, updates, far)
        else:
            return ()
        return tuple(dict.fromkeys((chosen, chosen + 1, 0))) if is_move else (chosen,)

    def _may_ask(self, peer: str) -> bool:
        """Return whether a peer may be asked for a snapshot; of a large model by chance, so that in the long run it is
        no more than a share of what it sends and receives. In any case the first one; and who moves unevenly is asked
        as much more often as it is drawn."""
        if not accounts.is_large(self._values):
            return True
        share = _SHARE_OF_BYTES * 2 * self.received.get(peer, 0) / accounts.snapshot_bytes(self._values)
        share *= max(1.0, self._uneven.get(peer, 0.0) ** 2)
        asked = peer not in self._begun or random.SystemRandom().random() < share
        remember(self._begun, peer, None)
        return asked

    def _rounds_for(self, peer: str) -> int:
        """For a snapshot a slow peer has as long as it takes with the link by which its parts have come: these within a
        quarter of a round, and half of the link is for what is shown."""
        under_way = math.ceil(accounts.snapshot_bytes(self._values) / max(1, 2 * self.received.get(peer, 0)))
        return min(ROUNDS_TO_SHOW + under_way, _MOST_ROUNDS_TO_SHOW)

    def ask_for_parts(self, peer: str, given: Mapping[int, Any]) -> tuple[int, ...]:
        """Return which parts of its last weights the peer has to show, when it has given all: else it could give the
        others as it likes.

        Args:
            given: position -> what it has given there.
        """
        shown = self.asked[peer]
        positions = list(given)
        if shown.account.is_slow or accounts.is_large(self._values):
            many = _PARTS_TO_SHOW if shown.account.is_slow else _PARTS_OF_LARGE
            positions = random.SystemRandom().sample(positions, min(many, len(positions)))
        parts = tuple(position // PART for position in positions)
        if not (shown.wanted or parts):  # it has nothing to show
            self.excuse(peer)
            return ()
        self.asked[peer] = shown._replace(parts=parts, given={position: given[position] for position in positions})
        return parts

    @staticmethod
    def _chosen(places: Sequence[int], updates: Sequence[int], far: Tensor) -> int:
        """One of the places: the likelier the further the peer has moved there, in squares of what `ratios_in` says;
        or the more updates are claimed there, few of them as often as the average."""
        by_updates = torch.tensor([updates[place] for place in places]).double()
        by_updates = by_updates.clamp_min(max(1.0, float(by_updates.mean())))
        by_length = far[list(places)].square()
        weights = by_updates / by_updates.sum() * _BY_UPDATES
        weights += by_length / by_length.sum().clamp_min(TINY) * (1 - _BY_UPDATES)
        (place,) = random.SystemRandom().choices(places, weights.tolist())
        return place


# Of its time that the owner gives to audits for each other peer, and in all; and in any case for who has failed one.
_SHARE_FOR_AUDITS = 0.05
_MOST_FOR_AUDITS = 0.5
_SHARE_FOR_SUSPECTS = 0.2
# Messages get lost: so many audits in a row may come to nothing. And so many must be passed for a speed to be known.
_MOST_IN_VAIN = 3
_LEAST_PASSED = 2
# Peers of whose rounds the common weights are kept until they have shown what they owe; and that are drawn in a round.
_MOST_PINNED = _MOST_DRAWN = 16
# Until all have the owner's weights again, where it has gone another way than they.
_ROUNDS_APART = 3
_SUSPECTED = 0.5
"""Share of rounds in which one that has failed an audit is asked again, for most cheats are found once in many rounds
only.
"""
_PROVEN = 12
"""Audits passed, after which one that has failed one counts again."""
_CLEARED = 20
"""The same, after which that is forgotten."""
_ONCE = f"it counts when it has passed {_PROVEN} audits; the next time it is banned"
_BY_LIBRARIES = "it may be its other libraries, with which it does not count yet"
"""Words on what follows for who was found false."""


@dataclass
class Auditor:
    """The owner's: whom to draw, and whether what a peer shows is true.

    Args:
        state: the model for this rank alone.
        seed_of: a peer's order of the data.
        rates: the lowest and the highest learning rate that a peer can have used for a round.
        seconds: that updates may take that are made again; an audit may take twice as long, and four times where it
            finds something false.
        round_seconds: of a round.
    """

    state: TrainState
    common: OuterState
    seed_of: Callable[[str], int]
    rates: Callable[[int], tuple[float, float]]
    seconds: float
    round_seconds: float
    verified: dict[str, float] = field(default_factory=dict, init=False)
    """Samples of a round that a peer has trained on beyond doubt."""
    differ: dict[str, int] = field(default_factory=dict, init=False)
    """Peers whose libraries train otherwise, and since which round that is known."""
    _tried: dict[str, bool] = field(default_factory=dict, init=False)
    """Peers, and whether they have other libraries than the run."""
    _strange: dict[str, None] = field(default_factory=dict, init=False)
    """Peers whose libraries have trained otherwise once."""
    _agreed: dict[str, None] = field(default_factory=dict, init=False)
    """Peers whose updates, made again here, have led to the same."""
    _passed: Counter[str] = field(default_factory=Counter, init=False)
    in_good_standing: dict[str, None] = field(default_factory=dict, init=False)
    """Peers whose last audit was true."""
    _times: Counter[str] = field(default_factory=Counter, init=False)
    """Audits in a row of which nothing came."""
    _suspects: dict[str, int] = field(default_factory=dict, init=False)
    """Peers that have failed one audit, as an honest peer may whose network fails in the midst of a round; and how many
    it has passed since.
    """
    _thetas: dict[int, Tensor] = field(default_factory=dict, init=False)
    """The common weights before each of the last rounds."""
    _pinned: dict[str, Mapping[int, Tensor]] = field(default_factory=dict, init=False)
    """The same of the rounds of which a peer has yet to show something."""
    _took: float = field(default=0.0, init=False)
    """Seconds of the last audit in which something was trained again."""
    _at_once: int = field(default=1, init=False)
    """Peers that can show something in one round."""

    @property
    def unproven(self) -> set[str]:
        """Return who does not count: who has shown nothing too often, until it has passed an audit, or something false,
        until it has passed some; and who has other libraries, until some of its updates were made again.
        """
        found = set[str]()
        for peer in self._times.keys() | self._suspects.keys() | self._tried.keys():
            is_suspect = self._suspects.get(peer, _PROVEN) < _PROVEN
            if is_suspect or self._is_strange(peer) or self._times[peer] >= _MOST_IN_VAIN:
                found.add(peer)
        return found

    def _is_strange(self, peer: str) -> bool:
        """Return whether a peer has other libraries, by which nothing was trained here that led to the same."""
        return self._tried.get(peer, False) and peer not in self._agreed

    def hear(self, tried: Mapping[str, bool]) -> None:
        """Hear who says that it has other libraries. Its first word counts: else who is caught would plead them."""
        for peer in tried.keys() - self._tried.keys():
            remember(self._tried, peer, tried[peer])

    @property
    def _fit(self) -> int:
        """Peers of whom there is room for what they show."""
        return min(_MOST_DRAWN, max(1, MOST_KEPT // accounts.most_bytes(self.common.theta.numel())))

    def owe(self, heard: Heard) -> list[Verdict]:
        """Take note of who has yet to show something; what to say of those who do not show it. Call it once in each
        round, before `draw`."""
        # As many are drawn at once as have shown all within a round, whatever holds up the others, and as fit here.
        self._at_once = max(1, self._at_once // 2 if heard.behind else min(self._at_once + 1, self._fit))
        for peer in heard.owing:
            remember(self._pinned, peer, self._pinned.get(peer) or {**self._thetas}, _MOST_PINNED)
        for peer in heard.refused:
            self._pinned.pop(peer, None)
        return [self._in_vain(peer, "has shown nothing") for peer in heard.refused]

    def draw(self, known: Iterable[str], heard: Heard, *, is_last: bool = False) -> dict[str, bool]:
        """Return whom to ask about the round that ends, each with whether some of it is to be trained again, for which
        there is not always time. Call it once in each round, before the exchange.

        Args:
            known: who takes part, without this peer.
            is_last: of the last round as many are asked as can be: nobody is asked afterwards.
        """
        most = 3 if accounts.is_large(self.common.theta.numel()) else 4
        remember(self._thetas, self.common.round, put_away({"": self.common.theta})[""], most)
        free = sorted({*known} - {*heard.owing})
        drawn = dict[str, bool]()
        chance = random.SystemRandom()
        share = min(_SHARE_FOR_AUDITS * len(free), _MOST_FOR_AUDITS)
        if self._suspects.keys() & {*free}:
            share = max(share, _SHARE_FOR_SUSPECTS)
        # So many audits take that share of a round, on average.
        times = share * self.round_seconds / self._took if self._took else 1.0
        many = min(math.floor(min(times, _MOST_DRAWN) + chance.random()), self._at_once - heard.behind)
        while free and len(drawn) < (self._fit if is_last else max(1, many)):
            peer = drawn_of(free, self._suspects, heard.uneven, chance)
            drawn[peer] = len(drawn) < many
            free.remove(peer)
        return drawn

    def _in_vain(self, peer: str, why: str) -> Verdict:
        remember(self._times, peer, self._times[peer] + 1)
        if self._times[peer] < _MOST_IN_VAIN:
            return Verdict(peer, "audited", why)
        return Verdict(peer, "left out", f"{why}; after {_MOST_IN_VAIN} such audits it counts when it has passed one")

    def audit(self, shown: Shown) -> Verdict | None:
        """Look at what a peer has shown: "audited" if it is true, or nothing can be said.

        None: it is what the peer has given, and nothing was trained again.
        """
        peer = shown.peer
        began = time.monotonic()
        by_libraries = False
        number = shown.account.round
        known = {**self._pinned.get(peer, {}), **self._thetas}
        thetas = {base: theta[: self.common.num_parameters] for base, theta in known.items()}
        try:
            why = Replay(self.state, shown, thetas, self.seed_of(peer), self.rates(number), self.seconds).falsehood()
        except TrainedOtherwiseError as reason:
            # Who is told to leave, and does not, pleads its libraries in vain.
            by_libraries = self._is_strange(peer) and number <= self.differ.get(peer, math.inf) + ROUNDS_TO_SHOW
            why = str(reason)
        except UnableError as reason:
            return Verdict(peer, "audited", str(reason))
        except InconclusiveError as reason:
            if number <= self.common.apart + _ROUNDS_APART:  # that is this peer's own doing
                return Verdict(peer, "audited", str(reason))
            return self._in_vain(peer, str(reason))
        finally:
            self._pinned.pop(peer, None)
            took = time.monotonic() - began
            if len(shown.wanted) == 1:
                self._took = took
        if why:
            self.in_good_standing.pop(peer, None)
            if by_libraries:
                self.verified.pop(peer, None)
                if peer in self._strange:
                    remember(self.differ, peer, self.differ.get(peer, number))
                remember(self._strange, peer, None)
                return Verdict(peer, "left out", f"{why}; {_BY_LIBRARIES}")
            return self.note_false(peer, why)
        self.note_true(peer)
        if not shown.wanted:
            return None
        if not shown.has_moved:
            remember(self._agreed, peer, None)
            self.differ.pop(peer, None)
        self._passed[peer] += 1
        if self._passed[peer] >= _LEAST_PASSED:
            updates = shown.account.links[-1].position - shown.account.links[0].position
            remember(self.verified, peer, float(updates * self.state.config.train.global_batch_size))
        return Verdict(peer, "audited", f"true, as was seen in {took:.2f} s")

    def note_false(self, peer: str, why: str) -> Verdict:
        """It was found false: it does not count for a while, or the second time is out."""
        self.verified.pop(peer, None)
        if peer in self._suspects:
            return Verdict(peer, "dropped", why)
        remember(self._suspects, peer, 0)
        return Verdict(peer, "left out", f"{why}; {_ONCE}")

    def note_true(self, peer: str) -> None:
        """It has passed an audit."""
        remember(self.in_good_standing, peer, None)
        self._times.pop(peer, None)
        if peer in self._suspects:
            self._suspects[peer] += 1
            if self._suspects[peer] >= _CLEARED:
                del self._suspects[peer]


def drawn_of(known: Sequence[str], suspects: Container[str], uneven: Mapping[str, float], chance: random.Random) -> str:
    """Return whom to audit: a suspect in half of the rounds; else in half of them anybody, and in the others the
    likelier the more unevenly one moves, in squares.
    """
    held = [peer for peer in known if peer in suspects and chance.random() < _SUSPECTED]
    if held:
        return chance.choice(held)
    squares = [uneven.get(peer, 0.0) ** 2 for peer in known]
    (peer,) = chance.choices(known, [1 / len(known) + square / max(sum(squares), TINY) for square in squares])
    return peer
