"""The end of a round: find the others, average with them over hivemind, judge the average, and make the outer step.

The average may arrive while the next round is being trained, and a round that fails costs nothing: see `sync`.

The owner tries an average on a part of the validation data before it uses it. All other checks ask how a contribution
looks; this one asks what comes of it. The samples are the same each time, so losses are compared sample by sample:
noise is what differs between samples, not what they have in common. An average is refused if the model would be worse
by it than it is, and worse than by what the owner has trained itself: a high learning rate, or one that begins anew,
makes both worse, and is nobody's lie.

What happens then needs no message. The owner goes on by its own contribution, as where no average has come. The others
have used the average, so that they have other weights than the owner; they find that out when they next meet, and take
over the owner's (`trainkit.swarm.robust.has_drifted`).
"""

import asyncio
import math
import random
import signal
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from hivemind.compression import NoCompression
from torch import Tensor
from torch.utils.data import Subset

from trainkit.config.schema import CollaborativeConfig, Config
from trainkit.data.base import EvalBatch, Samples
from trainkit.data.loader import TensorSamples, eval_batches
from trainkit.swarm import processes
from trainkit.swarm.address import MEGABIT
from trainkit.swarm.admission import Guard, remember
from trainkit.swarm.averager import Averaged, _Averager
from trainkit.swarm.dht import SwarmDHT
from trainkit.swarm.diloco import (
    CODECS,
    PART,
    Average,
    Codec,
    Given,
    Outcome,
    OuterState,
    encoded_bytes,
    num_parts,
)
from trainkit.swarm.exchange import digest_of
from trainkit.swarm.robust import Round, Verdict, slower_than, untrue
from trainkit.training.build import TrainState

_SENDING_SHARE = 0.2
"""Part of a round in which a peer sends its own parts. The others wait a little longer, see `patience`."""

GRACE = 2.0
"""Seconds after the end of a round within which a group must be found."""
_PATIENCE = 0.25
"""Part of a round that the others wait for a peer's parts, in total."""


def exchange_seconds(config: CollaborativeConfig) -> float:
    """How long an exchange may take: until the search for the next one begins."""
    return max(GRACE, config.round_seconds - config.matchmaking_seconds)


def patience(config: CollaborativeConfig) -> float:
    """How long the others wait in an exchange for the parts of a peer that sends them slowly."""
    return min(_PATIENCE * config.round_seconds, exchange_seconds(config) / 2)


@dataclass(frozen=True)
class Load:
    """What a peer sends of its own progress in a round."""

    codec: Codec
    parts: int
    of: int

    @property
    def rounds(self) -> int:
        """Rounds in which each part is sent once."""
        return -(-self.of // self.parts)

    def chosen(self, turn: int) -> list[bool]:
        """Which parts are sent, where ``turn`` rounds have been sent before: they take turns."""
        first = turn * self.parts % self.of
        return [(index - first) % self.of < self.parts for index in range(self.of)]


def codec_back(config: CollaborativeConfig) -> Codec:
    """The codec of averages: what 4 bit round off would be lost, for no reducer keeps it for the next round."""
    return "8bit" if config.compression == "4bit" else config.compression


def load_for(upload: float | None, values: int, config: CollaborativeConfig) -> Load:
    """What a peer can send in time: all of it as the run does, else in a coarser codec, else a share of the parts in
    each round.

    Args:
        upload: bytes per second; None when it is not known.
        values: in the vector.
    """
    parts = num_parts(values)
    if upload is None:
        return Load(config.compression, parts, parts)
    coarser, most = CODECS[CODECS.index(config.compression) :], upload * _SENDING_SHARE * config.round_seconds
    codec = next((codec for codec in coarser if encoded_bytes(values, codec) <= most), coarser[-1])
    return Load(codec, max(1, int(parts * min(most / encoded_bytes(values, codec), 1.0))), parts)


# A wait shorter than this says nothing about a link: what was waited for was there already.
_SHORTEST = 0.05
# What nobody has waited for has come by a link that is faster than was known: by how much is tried out.
_FASTER = 1.5
# Speeds vary from round to round; people are told again when what is sent has changed by so much.
_NOTABLE = 2.0


class Link:
    """A peer's upload, measured by how long those who average have waited for its parts.

    A peer sends everything in its first round, unless it has a limit. What is late is left out and sent later.

    Args:
        values: in the vector.
        config: the run's.
        limit: bytes per second that this peer may use at most.
    """

    def __init__(self, values: int, config: CollaborativeConfig, limit: float | None = None) -> None:
        self._values, self._config, self._limit = values, config, limit
        self._turn = 0
        self.upload = limit
        """Bytes per second; None: not known, so not slow."""
        self.load = self._told = load_for(self.upload, values, config)

    def sent(self, weights: Sequence[float]) -> tuple[float, ...]:
        """Those of the parts' weights that are sent in this round, and 0 for the others."""
        chosen = self.load.chosen(self._turn)
        return tuple(weight if is_sent else 0.0 for weight, is_sent in zip(weights, chosen, strict=True))

    def learn(self, sent: Sequence[float], found: Outcome) -> str:
        """Take note of an exchange. What to tell the person at this machine; empty if nothing changes."""
        if not any(sent):
            return ""
        a_part, late = encoded_bytes(PART, self.load.codec), False
        measured = found.timed_bytes / found.timed_seconds if found.timed_seconds > _SHORTEST else None
        if found.unfinished:  # not all of it was through by then
            measured = sum(map(bool, sent)) * a_part / exchange_seconds(self._config)
        else:
            self._turn += 1
            late = any(weight and not is_in for weight, is_in in zip(sent, found.counted, strict=True))
            if late and all(found.received):  # else it was the others that were gone
                measured = min(measured or math.inf, (found.timed_bytes + a_part) / patience(self._config))
        if measured is None:
            if self.upload is None or late:
                return ""
            measured = _FASTER * self.upload  # it was there before anybody waited for it
        known = measured if self.upload is None else 0.5 * (self.upload + measured)
        self.upload = known if self._limit is None else min(known, self._limit)
        self.load = load_for(self.upload, self._values, self._config)
        told = self._told
        if told.codec == self.load.codec and 1 / _NOTABLE < told.rounds / self.load.rounds < _NOTABLE:
            return ""
        self._told = self.load
        return in_words(self.load, self.upload)


def in_words(load: Load, upload: float) -> str:
    """What a link of ``upload`` bytes per second means, for the person at the machine."""
    words = f"upload {upload / MEGABIT:.1f} Mbit/s: this peer sends {load.codec.replace('bit', ' bit')}"
    if load.rounds == 1:
        return words
    return f"{words}, and each weight only in one of {load.rounds} rounds; nothing it learns is lost"


def fitted(config: CollaborativeConfig, values: int, upload: float) -> CollaborativeConfig:
    """The run's settings for a creator with that upload: 8 bit if need be, and rounds that are long enough.

    Args:
        values: in the vector that peers average.
        upload: bytes per second, of which one volunteer's averages may take their share of a round.
    """
    codec, seconds = config.compression, config.round_seconds
    if encoded_bytes(values, codec_back(config)) > upload * _SENDING_SHARE * seconds:
        codec = "4bit" if codec == "4bit" else "8bit"
        seconds = max(seconds, float(math.ceil(encoded_bytes(values, "8bit") / (_SENDING_SHARE * upload))))
    return config.model_copy(update={"compression": codec, "round_seconds": seconds})


def creators_share(config: CollaborativeConfig, values: int, upload: float) -> str:
    """What to expect of a creator that averages for all, in a line."""
    back = codec_back(config)
    seconds = encoded_bytes(values, back) / upload
    volunteers = int((config.round_seconds - config.matchmaking_seconds) / seconds)
    codec = {"none": "no compression", "8bit": "8 bit"}.get(back, back)
    return (
        f"At {upload / MEGABIT:g} Mbit/s: {codec}, rounds of {config.round_seconds:g} s. Sending to a volunteer takes "
        f"{seconds:.1f} s of each; {volunteers} at most, or others must reduce as well."
    )


@contextmanager
def open_averager(dht: SwarmDHT, common: OuterState, config: Config, run_id: str) -> Iterator[Any]:
    """Start the averager; on leaving, end its process.

    Open it before a GPU is used for the first time: the process is forked.
    """
    agreed, interrupt = config.collaborative, signal.getsignal(signal.SIGINT)
    averager = _Averager(
        common,
        Guard(dht.node, dht.admission),
        dht.own,
        run_id,
        codec_back(agreed),
        config.train.global_batch_size,
        start=False,
        prefix=f"{run_id}_common",
        min_matchmaking_time=agreed.matchmaking_seconds,
        request_timeout=min(1.0, agreed.matchmaking_seconds / 2),
        # Parts are cut alike by all peers, and written by `trainkit.swarm.exchange`.
        compression=NoCompression(),
        part_size_bytes=4 * PART,
        state_compression=NoCompression(),
        client_mode=dht.client_mode,
        allow_state_sharing=False,
        allreduce_timeout=exchange_seconds(agreed),
        sender_timeout=patience(agreed),
        reducer_timeout=exchange_seconds(agreed),
        next_chunk_timeout=min(10.0, max(1.0, agreed.round_seconds / 4)),
        shutdown_timeout=2.0,
        daemon=True,
    )
    try:
        with processes.private_sockets():
            averager.run_in_background(await_ready=True, timeout=processes.at_load(30.0))
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, interrupt)  # hivemind has switched Ctrl-C off in this process
        yield averager
    finally:
        mine = processes.family(averager.pid)
        with suppress(OSError, ValueError):
            if dht.alive:  # else it would end by an error of hivemind's, at length
                averager.shutdown()
        processes.end(mine, patience=1.0 if dht.alive else 0.0)


_MOST_SAMPLES = 512
_TRIAL_SHARE = 0.01
"""Of a round, for one pass over the samples; there is one in a round, and a second one where an average is refused."""
_TRIAL_BATCH = 64
# How many standard errors of the mean an average is worse by: than the model as it is, and than by the owner's part.
_WORSE, _WORSE_THAN_OWN = 4.0, 3.0
# Of the highest loss so far: towards the end losses are nearly zero, and small changes of them say nothing.
_LEAST = 0.005
_LARGEST_LOSS = 100.0  # of a sample; so is what is not finite


class Trial:
    """Tries averages on samples that are drawn once.

    Args:
        state: the model for this rank alone.
        seconds: of a round.
    """

    def __init__(self, state: TrainState, common: OuterState, seconds: float) -> None:
        self._state, self._common, self._seconds = state, common, seconds
        self._batches: list[EvalBatch] = []
        self._known: dict[tuple[float, float], Tensor] = {}
        self._highest = 0.0

    def harm(self, average: Average, own: Average) -> str:
        """Why the model would be worse by ``average``; empty if it would not.

        Args:
            own: the owner's contribution alone.
        """
        now, then = self._losses(self._common.theta), self._losses(self._common.stepped(average)[0])
        before, after = float(now.mean()), float(then.mean())
        self._highest = max(self._highest, before)
        is_worse = after > before + _LEAST * self._highest and worse(then, now, _WORSE)
        if not (is_worse and worse(then, self._losses(self._common.stepped(own)[0]), _WORSE_THAN_OWN)):
            return ""
        return f"by it the loss of {len(now)} validation samples goes from {before:.3g} to {after:.3g}"

    def _losses(self, theta: Tensor) -> Tensor:
        """Of each sample, with the weights ``theta``; those of the last few are known."""
        key = float(theta.sum()), float(theta.norm())
        if key not in self._known:
            model, was_training = self._state.model, self._state.model.training
            model.eval()
            try:
                with self._common.in_model(theta), torch.no_grad():
                    self._batches = self._batches or self._drawn()
                    losses = self._evaluated(self._batches)
            finally:
                model.train(was_training)
            remember(self._known, key, losses, most=4)
        return self._known[key]

    def _evaluated(self, batches: list[EvalBatch]) -> Tensor:
        state, losses = self._state, list[Tensor]()
        for images, labels, mask in batches:
            with state.precision.autocast():
                output = state.model(state.normalized(images))
            losses.append(state.task.loss(output.float(), labels, "none")[mask])
        return torch.cat(losses).double().cpu().nan_to_num(nan=_LARGEST_LOSS).clamp_max(_LARGEST_LOSS)

    def _drawn(self) -> list[EvalBatch]:
        """As many of the samples as can be evaluated in time."""
        state, val = self._state, self._state.splits.val
        order = torch.randperm(len(val), generator=torch.Generator().manual_seed(state.config.seed))[:_MOST_SAMPLES]
        some: Samples = Subset(val, order.tolist())  # type: ignore[arg-type]
        if isinstance(val, TensorSamples):
            some = TensorSamples(val.images[order], val.labels[order])
        with eval_batches(
            some, state.splits.eval_transform, batch_size=min(_TRIAL_BATCH, len(order)),
            rank=0, world_size=1, workers=state.workers, device=state.dist.device, broken=state.broken,
        ) as batches:  # fmt: skip
            first = next(batches)
            for _ in range(2):  # the first time kernels and caches are made, too
                began = time.perf_counter()
                self._evaluated([first])
                took = time.perf_counter() - began
            return [first, *islice(batches, max(0, int(_TRIAL_SHARE * self._seconds / took) - 1))]


def worse(one: Tensor, other: Tensor, errors: float) -> bool:
    """Whether the losses ``one`` of samples are higher than the ``other`` of the same by more than so many standard
    errors of the mean."""
    more = one - other
    return bool(more.mean() > errors * more.std(correction=0) / math.sqrt(len(more)))


# Of a round: time to find out who has done harm.
_SEARCH_SHARE = 0.2


@dataclass(frozen=True)
class _Exchange:
    """A round that has ended, and whose average may still be under way."""

    control: Any
    given: Given
    sent: tuple[float, ...]
    """Weight of each part that this peer sends."""
    trained: float
    next_round: int
    began: float
    failed: str
    """Why there is no exchange; empty if there is one."""

    def own(self, is_used: bool) -> Average:
        """This peer's contribution in the place of the average, or nothing."""
        used = (is_used,) * len(self.given.weights)
        return Average(self.given.vector, self.next_round, used, used)


_Tried = tuple[str, tuple[Verdict, ...] | None]
_NOBODY = Averaged({}, drifted=False, outcome=Outcome())


class Averaging:
    """One peer's rounds."""

    def __init__(
        self, averager: Any, dht: SwarmDHT, common: OuterState, config: CollaborativeConfig, link: Link
    ) -> None:
        self.averager, self.link = averager, link
        self._dht, self._common, self._config = dht, common, config
        self.tried = False
        """This peer has other libraries than the run: it gives nothing before an audit has agreed."""
        self.trial: Trial | None = None
        """What an average must pass at the owner's."""
        self._searched = -2  # the round in which it was last asked who does harm
        self.search: Any = None
        """This round's, for the others; None: not begun."""
        self.under_way: _Exchange | None = None
        """The last round, until its average has been judged."""
        self._signed = -1, b""  # the version of the state, and what is said of it

    def share(self) -> None:
        """From now on others may take over this peer's state, if it is of the owner's side."""
        self.averager.allow_state_sharing = not self.averager.client_mode

    def adopt(self, seconds: float, *, newer_than: int = -1) -> bool:
        """Take over the state that the owner's side has signed. False if nobody gives one that can be used.

        ``newer_than``: a state is of no use that is not of a later round.
        """
        with suppress(FutureTimeoutError, ValueError):
            found = self.averager.load_state_from_peers(wait=False, timeout=seconds).result(seconds)
            if found is not None and found[0].round > newer_than:
                signed, (theta, momentum) = found
                self._common.load(theta, momentum, signed.round)
                return True
        return False

    def signed(self) -> bytes:
        """What this peer says of its state, if it is of the owner's side: others may have to prove that it is the
        run's."""
        if self._dht.own.grant.role != "volunteer" and self._signed[0] != self._common.version:
            self._signed = self._common.version, self.averager.get_current_state()[0]["digest"]
        return self._signed[1]

    def give_back(self, peer: str, signed: Mapping[str, bytes]) -> None:
        """Give the state to the creator, which may have come back with an earlier one.

        ``signed``: what its side has said of states, by their hash. A volunteer must have such a one, and it says of
        which round: rounds that came to nothing have passed since.
        """
        round_index, *tensors = self._common.copy()
        own = digest_of(self.averager.run_id, round_index, tensors).sha256
        if own in signed or self._dht.own.grant.role != "volunteer":
            self.averager.give_back(peer, signed.get(own, b""))

    def take_back(self, newer_than: float) -> int | None:
        """Take over a state that somebody gives back, and which round it was of; None if nobody does.

        In this peer's clock it is of the present round. ``newer_than``: infinity refuses all from now on.
        """
        found = self.averager.given_back(newer_than) if self.under_way is None else None
        if found is None:
            return None
        signed, (theta, momentum) = found
        self._common.load(theta, momentum, self._common.round)
        return int(signed.round)

    def begin(self, boundary: float, samples_per_sec: float) -> None:
        """Look for the others, while training goes on.

        Args:
            boundary: when the round ends. `GRACE` after it the search has failed.
        """
        assert self.search is None
        assert self.under_way is None
        probe = self._common.probe()
        self.averager.probe.copy_(probe)
        # Others compare their weights with those of a peer that gives its own away, and with nobody else's.
        told = b"" if self.averager.client_mode else probe.numpy().tobytes()
        about = {"rate": float(samples_per_sec), "probe": told}
        control: Future[Any] = Future()

        def look() -> None:
            try:
                step = self.averager.step(
                    gather=about,
                    scheduled_time=max(boundary, time.time() + 0.3),
                    timeout=max(boundary - time.time(), 0.0) + GRACE,
                    require_trigger=True,
                    wait=False,
                )
            except Exception as error:
                control.set_exception(error)
            else:
                control.set_result(step)

        # hivemind waits here without limit for a word of its process.
        threading.Thread(target=look, daemon=True).start()
        self.search = processes.answer_of(control, "averager", self.averager.pid)

    def require_helpers(self) -> None:
        """Raises HelperDiedError when one is gone: without them this peer would go on as if it were the only one."""
        for helper, alive in (("node of the DHT", self._dht.alive), ("averager", self.averager.is_alive())):
            if not alive:
                raise processes.HelperDiedError(helper)

    def exchange(self, *, samples: int, trained: float, next_round: int) -> None:
        """The round is over: give this peer's part to the group. `settle` says what came of it.

        Args:
            samples: how many this peer has trained on in the round; its weight in the average.
            trained: the share of the round in which it did.
        """
        assert self.under_way is None
        control, self.search = self.search, None
        given = self._common.give(samples, self.link.load.codec)
        waits = self.tried and self.averager.standing != "counts"
        sent = (0.0,) * len(given.weights) if waits else self.link.sent(given.weights)
        began, failed = time.monotonic(), self._hand_over(control, given.vector, sent)
        self.under_way = _Exchange(control, given, sent, trained, next_round, began, failed)

    def settle(self, seconds: float, *, trained_on: bool, leads: bool) -> Round | None:
        """Wait for the average, at most this long; judge it, and make the outer step. None when it is still under way.

        Args:
            trained_on: the model has been trained since the round ended.
            leads: without an average this peer goes on by itself; else it waits for the next, and keeps till then the
                state that all have in common: the owner's side may need it.
        """
        assert self.under_way is not None
        now, ended = self.under_way, self._await(self.under_way, seconds)
        if ended is None:
            return None
        self.under_way = None
        (rates, drifted, received), average, why = ended
        took, outcome, false = time.monotonic() - now.began, received, tuple[Verdict, ...]()
        common, given = self._common, now.given
        members = max(len(rates), *received.expected, 0)  # in a large group a peer does not know all of them
        if average is not None:
            false = self._audit(now, rates, received, average)
            outcome = received.refusing({verdict.peer for verdict in false}, average, given.vector)
            why = "" if bool(torch.isfinite(average).all()) else "the average is not finite"
        harm, harmful = "", None
        if average is not None and not why:
            step = Average(average, now.next_round, tuple(map(bool, outcome.received)), outcome.counted)
            harm, harmful = self._try(step, now, outcome, rates)
        if harm:
            common.apart = now.next_round
        if average is not None and not (why := why or harm):
            used = "average"
            if false and not outcome.sources:
                used, why = "nothing", "all that has arrived was refused"
        else:
            alone = given.usable and leads
            used, step = "own" if alone else "nothing", now.own(alone)
        if used == "average" and self.trial is not None:
            self.averager.note_used()
        common.step(step, given, trained_on=trained_on)
        advice = self.link.learn(now.sent, received) if received.reducers or received.unfinished else ""
        self.averager.bandwidth = self.link.upload  # who reduces gets a part of the vector in proportion
        return Round(
            group=members if used == "average" else 0,
            used=used,
            why=why,
            samples_per_sec=sum(rates.values()) / max(1, len(rates)) * members,
            drifted=drifted,
            seconds=took,
            outcome=outcome,
            untrue=false,
            refused=bool(harm),
            harmful=harmful,
            advice=advice,
        )

    def _try(self, average: Average, now: _Exchange, outcome: Outcome, members: Iterable[str]) -> _Tried:
        """Why the average does harm, if it does, and which volunteers do; None: they were not tried.

        Each is tried with the owner's side alone, in what this peer has reduced; as many as there is time for.
        """
        own, own_id, found = now.own(now.given.usable), str(self.averager.peer_id), list[Verdict]()
        if self.trial is None or not (harm := self.trial.harm(average, own)):
            return "", None
        if now.next_round < self._searched + 2:
            return harm, None  # all others have trained on from the average that was refused, the honest ones, too
        self._searched, buffers = now.next_round, slice(self._common.num_parameters, None)
        parts = list(zip(outcome.reducers, average.arrived, strict=True))
        mine = tuple(there and peer == own_id for peer, there in parts)
        suspects = [one for one in members if one != own_id and not ((who := self._dht.member(one)) and who.trusted)]
        until = time.monotonic() + _SEARCH_SHARE * self._config.round_seconds
        for peer in random.sample(suspects, len(suspects)):
            if time.monotonic() < until and (alone := self.averager.alone(peer)) is not None:
                alone[buffers] = own.vector[buffers]  # nobody has a part of its own in a median
                if why := self.trial.harm(Average(alone, now.next_round, mine, mine), own):
                    found.append(Verdict(peer, "dropped", why))
        if not found and not self.trial.harm(Average(average.vector, now.next_round, mine, mine), own):
            # Nobody has sent harm, and what is averaged here does none: so it is what others have averaged.
            for peer in outcome.sources - {own_id}:
                theirs = tuple(there and one in (own_id, peer) for one, there in parts)
                if why := self.trial.harm(Average(average.vector, now.next_round, theirs, theirs), own):
                    found.append(Verdict(peer, "dropped", f"as a reducer gave back what does harm: {why}"))
        # Where the owner has trained nothing itself, most are no liars: then it is the run, or its schedule.
        is_run = not now.given.usable and 2 * len(found) > len(suspects) > 1
        return ("", None) if is_run else (harm, tuple(found))

    def undo(self, peers: Iterable[str]) -> bool:
        """At the owner's: take out of the weights what these have put into them, as far as this peer has reduced it.
        Whether there was anything.

        The others find out that they have other weights, as after an average that was refused.
        """
        if self.trial is None:
            return False
        moved = [by for peer in peers if (by := self.averager.taken_back(peer)) is not None]
        for by in moved:
            self._common.undo(by)
        return bool(moved)

    def _audit(
        self, now: _Exchange, rates: Mapping[str, float], outcome: Outcome, average: Tensor
    ) -> tuple[Verdict, ...]:
        """Who has averaged for this peer and must not be believed; nobody judges the owner."""
        own_id, size = str(self.averager.peer_id), self._common.num_parameters
        if not now.given.usable:
            return ()
        known = {peer: self._dht.member(peer) for peer in outcome.sources - {own_id}}
        judged = {own_id, *(peer for peer, member in known.items() if member is None or member.role != "owner")}
        reducers = [peer if peer in judged & outcome.sources else "" for peer in outcome.reducers]
        slower = slower_than(rates, own_id) / max(now.trained, 0.05)
        return untrue(average, now.given.vector, size, reducers, own_id=own_id, slower=slower)

    def _hand_over(self, control: Any, vector: Tensor, sent: Sequence[float]) -> str:
        """Begin the exchange; why that is not possible, or nothing."""
        if control is None:
            return "the round was too short to look for others"
        averager = self.averager
        if not averager.lock_averaged_tensors.acquire(timeout=GRACE):
            control.cancel()
            return "the round before is still being exchanged"
        try:
            averager._averaged_tensors[0].copy_(vector)
            averager.plan.copy_(torch.tensor([CODECS.index(self.link.load.codec), *sent], dtype=torch.float64))
        finally:
            averager.lock_averaged_tensors.release()
        control.weight = float(max(sent))
        control.allow_allreduce()
        return ""

    def _await(self, now: _Exchange, seconds: float) -> tuple[Averaged, Tensor | None, str] | None:
        """What the exchange came to: the group, the average, and why there is none. None: too early to say."""
        if now.failed:
            return _NOBODY, None, now.failed
        control, lock = now.control, self.averager.lock_averaged_tensors
        left = now.began + exchange_seconds(self._config) + 0.5 - time.monotonic()
        try:
            averaged: Averaged = control.result(max(0.0, min(seconds, left)))
        except (FutureTimeoutError, asyncio.TimeoutError):
            if left > seconds:
                return None
            averaged, why = _NOBODY._replace(outcome=Outcome(unfinished=True)), "the exchange took too long"
        except Exception as failure:  # of libp2p, by way of the averager's process: whatever it is
            text = (str(failure).strip() or type(failure).__name__).splitlines()[0][:120]
            averaged, why = _NOBODY, "no others" if "could not find a group" in str(failure) else text
        else:
            if not lock.acquire(timeout=GRACE):
                return averaged, None, "the averager holds on to its result"
            average = self.averager._averaged_tensors[0].clone()
            lock.release()
            return averaged, average, ""
        with suppress(Exception):
            control.cancel()
        return averaged, None, why
