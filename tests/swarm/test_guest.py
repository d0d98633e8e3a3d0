"""A peer that waits for its swarm, and comes back into it: what it asks and tells, in which order."""

import time
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.swarm.test_states import KEY, RUN, STATE, by
from trainkit.common.errors import RefusedError, RunFailedError, UserError
from trainkit.config.loading import load
from trainkit.swarm.identity.admission import Admission
from trainkit.swarm.network.states import digest_of, sign_digest
from trainkit.swarm.network.wall_clock import WallClock
from trainkit.swarm.peer.place import PATIENCE_SECONDS, Hooks, PeerSpec
from trainkit.swarm.protocol.messages import Manifest, RoundClock

pytestmark = pytest.mark.usefixtures("hivemind_here")


def a_guest(hooks: Hooks, patience: float = PATIENCE_SECONDS) -> Any:
    from trainkit.swarm.peer.guest import Guest

    entry: Any = SimpleNamespace(addresses=("/ip4/203.0.113.7/tcp/4711/p2p/Qm",))
    guest: Any = Guest(ExitStack(), entry, PeerSpec("me", patience=patience), hooks)
    guest.watch = SimpleNamespace(poll=lambda: None, stopped=False, creator="QmCreator", peers={})
    return guest


@dataclass
class World:
    """A clock that nobody waits for, and a swarm that is back at some moment."""

    back_at: float = 3600.0
    ready_at: float = 0.0
    stop_at: float = 1e9
    ahead: float | None = None
    now: float = 0.0
    asked: list[float] = field(default_factory=list)
    said: list[str] = field(default_factory=list)

    def look(self, addresses: Sequence[str]) -> int:
        self.asked.append(self.now)
        return int(self.now >= self.back_at)

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def wait(self, patience: float = PATIENCE_SECONDS) -> bool:
        guest = a_guest(Hooks(lambda: self.now >= self.stop_at, self.said.append), patience)
        guest.dht = SimpleNamespace(reconnect=self.look, in_dht=lambda *asked: self.ahead)
        guest.finds_run = lambda: self.now >= self.ready_at
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                "trainkit.swarm.peer.guest.time", SimpleNamespace(monotonic=lambda: self.now, sleep=self.sleep)
            )
            return guest.wait_until_back() is None


def test_another_torch_is_told_when_it_counts_and_leaves_if_it_differs() -> None:
    said: list[str] = []
    guest = a_guest(Hooks(lambda: False, said.append))
    guest.averaging = SimpleNamespace(require_helpers=lambda: None, averager=SimpleNamespace(standing="differs"))
    guest.manifest = Manifest("r", "n", "seed: 0", 1, "ab" * 32, 10, 1, 8, needs=["torch==2.15.*"])
    guest.hear()
    guest.other = "torch: 2.14 here, 2.15 in the run"
    for standing in ("tried", "counts", "counts", "tried"):
        guest.averaging.averager.standing = standing
        guest.hear()
    waits = "  What this peer learns counts once the creator has repeated a part of its training and agrees."
    assert said == ["  an audit agrees with this peer: from now on it counts", waits]
    guest.averaging.averager.standing = "differs"
    with pytest.raises(RefusedError, match="compute something else than the run's") as refused:
        guest.hear()
    assert refused.value.fix == "python -m pip install 'torch==2.15.*'"


def test_it_asks_until_somebody_answers_ever_less_often() -> None:
    world = World()
    assert world.wait()
    assert 0 <= world.now - world.back_at <= 30.0
    pauses = [later - before for before, later in pairwise(world.asked)]
    assert pauses == sorted(pauses)
    assert [pauses[0], pauses[-1]] == pytest.approx([2.0, 30.0])
    assert world.said[0].startswith("No peer of the swarm answers. Waiting for it for up to 1 d")


def test_it_asks_again_soon_if_somebody_answers_and_leaves_at_once_if_told() -> None:
    nearly, told = World(ready_at=3690.0), World(stop_at=100.0)
    assert (nearly.wait(), told.wait()) == (True, False)
    assert nearly.now < 3725.0
    assert told.now < 101.0


def test_it_gives_up_when_the_stated_time_is_over() -> None:
    for patience, says in ((86400.0, "1 d"), (0.0, "0 s")):
        world = World(back_at=1e9)
        with pytest.raises(RunFailedError, match=f"has not answered for {says}"):
            world.wait(patience)
        assert world.now == pytest.approx(patience, abs=1.0)
        assert patience or world.asked == [0.0]


def test_a_clock_that_was_set_is_named_and_no_swarm_waited_for() -> None:
    with pytest.raises(UserError, match=r"is 10\.0 s ahead of the swarm's"):
        World(back_at=0.0, ahead=10.0).wait()


@pytest.mark.parametrize(("ahead", "may_be_alone"), [(None, False), (None, True), (0.2, True), (-10.0, False)])
def test_a_clock_that_is_set_in_a_round_ends_it_where_it_is_wrong(ahead: float | None, may_be_alone: bool) -> None:
    """Who is alone has nobody to ask, and has gone by the clock as it was."""
    guest = a_guest(Hooks(lambda: False, print))
    averager = SimpleNamespace(standing="counts")
    guest.averaging = SimpleNamespace(require_helpers=lambda: None, averager=averager)
    guest.may_be_alone = may_be_alone
    guest.dht, now = SimpleNamespace(in_dht=lambda *asked: ahead), [100.0]
    guest.wall_clock = WallClock(lambda: now[0], lambda: 5.0)
    guest.hear()
    now[0] -= 10.0
    is_wrong, says = ahead is not None and abs(ahead) > 1.0, r"was set back by 10\.0 s|is 10\.0 s behind the swarm's"
    with pytest.raises(UserError, match=says) if is_wrong or (ahead is None and may_be_alone) else nullcontext():
        guest.hear()
    guest.hear()  # it is told once


CONFIG = load("hivemind", ["collaborative.round_seconds=4", "collaborative.rounds=1000"]).config
OLD = RoundClock.starting(time.time() - 400.0, 4.0, 1000)
MANIFEST = Manifest("id", "run", "", OLD.first + 3, "", 10, 1, 8, facts={"seed": "0"})


def finds_run(
    manifests: Sequence[Manifest], *, gives: bool = True, clock: RoundClock = OLD
) -> tuple[tuple[bool, int], list[str]]:
    """Whether a guest comes back into the swarm that it has lost, and by which clock; and what it has asked of it.

    Args:
        gives: it gives its state to those who have said who they are.
        clock: that of the guest.
    """
    done: list[str] = []

    def adopt(seconds: float, *, newer_than: int) -> bool:
        done.append("adopted")
        return gives and "introduced" in done

    guest = a_guest(Hooks(lambda: len(done) > 5, print))
    guest.manifest, guest.config, guest.clock = MANIFEST, CONFIG, clock
    guest.averaging, guest.common = SimpleNamespace(adopt=adopt), SimpleNamespace(round=1000)
    guest.averaging.give_back = lambda peer, proofs: done.append(f"given back to {peer}")
    guest.dht = SimpleNamespace(
        require_welcome=lambda: done.append("welcome"),
        introduce_myself=lambda seconds, wait: done.append("introduced" if wait else "told"),
        manifests=lambda: dict(enumerate(manifests)),
    )
    return (guest.finds_run(), guest.clock.first), done


def test_it_says_who_it_is_before_it_asks_for_the_state() -> None:
    """Strangers are not given it."""
    asked = ["welcome", "introduced", "given back to QmCreator", "adopted"]
    assert finds_run([MANIFEST]) == ((True, MANIFEST.first_round), asked)


def test_it_gives_nothing_back_to_a_creator_that_was_not_away() -> None:
    same = replace(OLD, first=MANIFEST.first_round)
    assert finds_run([MANIFEST], clock=same) == ((True, same.first), ["welcome", "introduced", "adopted"])


def test_a_newcomer_whom_nobody_gives_the_weights_waits_as_patiently() -> None:
    world = World(back_at=200.0, ready_at=200.0)
    guest = a_guest(Hooks(lambda: False, world.said.append))
    guest.dht, guest.clock, asked = SimpleNamespace(reconnect=world.look, in_dht=lambda *of: None), OLD, []
    guest.averaging = SimpleNamespace(fetched=0.0)
    guest.adopt = lambda seconds, fits: asked.append(seconds)

    def finds_run() -> bool:
        guest.watch.stopped = world.now >= 250.0
        return False

    guest.finds_run = finds_run
    with pytest.MonkeyPatch.context() as patch:
        clock = SimpleNamespace(monotonic=lambda: world.now, sleep=world.sleep, time=time.time)
        patch.setattr("trainkit.swarm.peer.guest.time", clock)
        assert guest.take_part() == "ended"  # as its creator said when it came back
    assert asked == [60.0]
    assert world.said[0].startswith("No peer provides the weights of the run")
    assert "Waiting for it for up to 1 d" in world.said[1]


def test_a_newcomer_with_too_slow_a_line_is_told_so() -> None:
    guest = a_guest(Hooks(lambda: False, print))
    vector = SimpleNamespace(numel=lambda: 88_000_000)
    guest.clock, guest.averaging = OLD, SimpleNamespace(fetched=0.25)
    guest.common = SimpleNamespace(theta=vector, momentum=vector)
    said = (
        "Of the weights of the run, 704 MB, 25% arrived. They must arrive within a round (4 s): that takes 1,408 Mbit"
    )
    assert guest._why_no_weights().startswith(said)


def test_it_says_what_it_has_when_nobody_has_come_back(tmp_path: Path) -> None:
    guest = a_guest(Hooks(lambda: False, print), patience=0.0)
    guest.dht, guest.common = SimpleNamespace(reconnect=lambda peers: 0), SimpleNamespace(round=7)
    guest.rounds, guest.writer = object(), SimpleNamespace(run=SimpleNamespace(path=tmp_path))
    with pytest.raises(RunFailedError, match="has not answered") as ended:
        guest.wait_until_back()
    assert ended.value.fix.startswith(f"Round 7 is kept in {tmp_path}. Ask whoever runs")


def test_it_keeps_what_the_owners_side_has_signed_lately() -> None:
    guest, told = a_guest(Hooks(lambda: False, print)), SimpleNamespace
    guest.averaging = SimpleNamespace(require_helpers=lambda: None, averager=SimpleNamespace(run_id=RUN, standing=""))
    guest.dht = SimpleNamespace(admission=Admission(KEY.public))
    owner, volunteer = by("owner"), by("volunteer")
    said = [sign_digest(owner, digest_of(RUN, number, [STATE[0] + number])) for number in range(10)]
    for statement in said:
        lie = sign_digest(volunteer, digest_of(RUN, 99, STATE))
        guest.watch.peers = {"o": told(signed=statement), "v": told(signed=lie), "old": told(signed=b"")}
        guest.hear()
    assert list(guest.signed.values()) == said[-8:]


@pytest.mark.parametrize(
    ("manifests", "gives"),
    [([], True), ([replace(MANIFEST, first_round=OLD.first - 1)], True), ([MANIFEST], False)],
    ids=["who answers knows no run", "an older manifest", "nobody gives the state"],
)
def test_it_waits_on_while_there_is_nothing_to_go_on_with(manifests: list[Manifest], gives: bool) -> None:
    assert finds_run(manifests, gives=gives)[0] == (False, OLD.first)


def test_what_has_become_another_run_ends_the_waiting() -> None:
    with pytest.raises(RefusedError, match="This peer differs from the run in: seed"):
        finds_run([replace(MANIFEST, facts={"seed": "1"})])
