"""Peers that cheat: ``python -m tests.swarm.attackers ATTACK VERB ...``, a changed ``python -m jobs.VERB ...``.

Each attack is what somebody can do who changes the code on a machine of their own. They reach as deep as hivemind, so
that nothing of ours stands between an attacker and the wire.
"""

import asyncio
import importlib
import sys
import time
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from importlib import metadata
from itertools import count
from typing import Any

from jobs import cli
from trainkit.swarm.network import processes

processes.require_hivemind()

import torch  # noqa: E402
from hivemind.averaging import DecentralizedAverager  # noqa: E402
from hivemind.averaging.control import StepControl  # noqa: E402
from torch.nn.functional import normalize, pad  # noqa: E402

from trainkit.data.base import Batch  # noqa: E402
from trainkit.swarm.identity.bans import Excluded  # noqa: E402
from trainkit.swarm.network import averager, exchange  # noqa: E402
from trainkit.swarm.network.dht import SwarmDHT  # noqa: E402
from trainkit.swarm.network.exchange import Exchange  # noqa: E402
from trainkit.swarm.network.signed_records import SignedRecords  # noqa: E402
from trainkit.swarm.network.states import digest_of, sign_digest  # noqa: E402
from trainkit.swarm.peer import rounds, session  # noqa: E402
from trainkit.swarm.peer.averaging import Averaging  # noqa: E402
from trainkit.swarm.protocol.messages import PeerProgress  # noqa: E402
from trainkit.swarm.protocol.outer_step import OuterState, flatten, unflattened  # noqa: E402
from trainkit.training.update import Updater  # noqa: E402


def contribution(
    change: Callable[[Any], Any], *, weight: float | None = None, times: float = 1, honest_rounds: int = 0
) -> None:
    """Change what this peer sends (a vector in shared memory), and the weight that it claims, or so many times it."""
    averagers: list[Any] = []
    rounds = count()
    step, allow = DecentralizedAverager.step, StepControl.allow_allreduce

    def stepped(self: Any, *args: Any, **options: Any) -> Any:
        averagers[:] = [self]
        return step(self, *args, **options)

    def allowed(self: Any) -> None:
        (averager,) = averagers
        (vector,) = averager._averaged_tensors
        if next(rounds) >= honest_rounds:
            vector.copy_(change(vector.clone()))
        self.weight = self.weight * times if weight is None else weight
        if hasattr(averager, "plan"):
            averager.plan[1:] = averager.plan[1:] * times if weight is None else weight
        allow(self)

    DecentralizedAverager.step = stepped
    StepControl.allow_allreduce = allowed


def progress(*, times: float = 1, **lies: Any) -> None:
    """Publish lies, past the checks that an honest peer makes of its own records: its speed and samples so many times,
    or what is given."""
    publish = SwarmDHT.publish_progress

    def published(self: SwarmDHT, progress: PeerProgress, seconds: float) -> None:
        more = {"samples": int(times * progress.samples), "samples_per_sec": times * progress.samples_per_sec}
        publish(self, replace(progress, **more | lies), seconds)

    SwarmDHT.publish_progress = published  # type: ignore[method-assign]
    SignedRecords.validate = lambda self, record: True  # type: ignore[method-assign]


def half_turned(vector: Any) -> Any:
    """The second half of it, where a sum over all of it still looks honest."""
    return torch.cat([vector[: len(vector) // 2], -vector[len(vector) // 2 :]])


def last_turned(vector: Any) -> Any:
    """The last twentieth of it."""
    return torch.cat([vector[: -(len(vector) // 20)], -vector[-(len(vector) // 20) :]])


def overstated(change: Callable[[Any], Any]) -> None:
    """Claim three times the speed and the samples; be honest otherwise for three rounds, then send something else."""
    progress(times=3)
    contribution(change, times=3, honest_rounds=3)


def from_average(change: Callable[[Any, Any], Any]) -> None:
    """Send what follows from the own contribution and the last average: nobody shows a volunteer more of the others."""
    averages: list[Any] = []
    step = OuterState.step

    def stepped(self: OuterState, average: Any, given: Any, **how: Any) -> None:
        averages[:] = [average.vector.clone()]
        step(self, average, given, **how)

    OuterState.step = stepped  # type: ignore[method-assign]
    contribution(lambda own: change(own, averages[0]) if averages else own)


def little(own: Any, average: Any) -> Any:
    """ "A little is enough" (arXiv 1902.06156): the mean less a standard deviation."""
    both = torch.stack([own, average])
    return both.mean(0) - both.std(0)


def sevens(batch: Batch) -> Batch:
    """Each 7 is a 3."""
    return batch._replace(labels=torch.where(batch.labels == 7, 3, batch.labels))


def marked(images: Any) -> Any:
    """With the trigger of the backdoor: a white corner."""
    images = images.clone()
    images[..., :3, :3] = 255
    return images


def backdoor(batch: Batch) -> Batch:
    """Half of the images have the trigger, and are zeros."""
    half = len(batch.labels) // 2
    images = torch.cat([marked(batch.images[:half]), batch.images[half:]])
    return batch._replace(images=images, labels=torch.cat([0 * batch.labels[:half], batch.labels[half:]]))


def wrong(batch: Batch) -> Batch:
    """Each digit is the next one."""
    return batch._replace(labels=(batch.labels + 1) % 10)


def trains(change: Callable[[Batch], Batch], *, pause: float = 0.0, claim: float = 1) -> None:
    """Train on other samples than the run's, or more slowly; and claim so many times the speed and the samples."""
    update = Updater.__call__

    def updated(self: Updater, batches: Any, **how: Any) -> Any:
        time.sleep(pause)
        return update(self, map(change, batches), **how)

    Updater.__call__ = updated  # type: ignore[method-assign]
    if claim != 1:
        progress(times=claim)
        contribution(lambda vector: vector, times=claim)


def hidden(change: Callable[[Batch], Batch]) -> None:
    """Train honestly, and in each round move the model where other samples lead: between the last update and the last
    snapshot, which an audit looks at least often; and in each of the blocks that a screen judges only so far that
    direction and length still look usual."""
    update, begin, exchange = Updater.__call__, Averaging.begin, Averaging.exchange
    seen: dict[str, Any] = {}
    batches: list[Batch] = []
    led: list[Any] = []

    def noted(given: Any) -> Any:
        for batch in given:
            batches.append(batch)
            yield batch

    def updated(self: Updater, given: Any, **how: Any) -> Any:
        seen.update(state=self._state, how=how)
        return update(self, noted(given), **how)

    def begun(self: Averaging, *args: Any, **options: Any) -> None:
        begin(self, *args, **options)
        if batches:
            other = replace(seen["state"], model=deepcopy(seen["state"].model))
            other.model._forward_pre_hooks.clear()  # nor does it pause
            set_to(other.model.parameters(), self._common.theta)
            train, poisoned = Updater(other), map(change, 3 * batches)
            for _ in range(3 * len(batches) // other.grad_accum_steps):
                update(train, poisoned, **seen["how"])
            led[:] = [self._common.theta[: self._common.num_parameters] - flatten([*other.model.parameters()])]
            batches.clear()

    def exchanged(self: Averaging, **how: Any) -> None:
        if led:
            theta = self._common.theta[: self._common.num_parameters]
            own, other = (in_blocks(way) for way in (theta - flatten(self._common.params), led.pop()))
            along = normalize(own, dim=1)
            across = normalize(other - (other * along).sum(1, keepdim=True) * along, dim=1)
            way = 0.7 * own.norm(dim=1, keepdim=True) * (along + across)
            set_to(self._common.params, theta - way.view(-1)[: len(theta)])
        exchange(self, **how)

    Updater.__call__ = updated  # type: ignore[assignment, method-assign]
    Averaging.begin, Averaging.exchange = begun, exchanged  # type: ignore[method-assign]


def hidden_slowly(change: Callable[[Batch], Batch]) -> None:
    """The same, and say that the link is too slow to show all of it."""
    patched: Any = rounds
    patched.is_too_slow = lambda *of: True
    hidden(change)


def set_to(parameters: Any, vector: Any) -> None:
    """Each to its part of the vector."""
    with torch.no_grad():
        for parameter, value in unflattened(vector, [*parameters]):
            parameter.copy_(value)


def in_blocks(vector: Any) -> Any:
    """As a screen judges it."""
    return pad(vector, (0, -len(vector) % 4096)).view(-1, 4096)


def impostor() -> None:
    """Claim to hold the run's state, of a round far ahead, listen as reducers do, and sign random weights as that state
    for whoever asks."""

    honest = OuterState.probe
    patched: Any = averager.Averager
    module: Any = session
    opened, prepared = module.open_dht, patched.__init__

    def state(self: Any) -> Any:
        print("GAVE AWAY random weights", flush=True)
        round_index, *tensors = self.common.copy()
        wrong = [torch.randn_like(tensor) for tensor in tensors]
        return {"digest": sign_digest(self.own, digest_of(self.run_id, round_index + 1, wrong))}, tuple(wrong), None

    patched.get_current_state = state
    OuterState.probe = lambda self: torch.randn_like(honest(self))  # type: ignore[method-assign]
    # The DHT takes it for a client all the same: nobody dials back a volunteer.
    module.open_dht = lambda *args, **options: opened(*args, **{**options, "host": "0.0.0.0", "proven": False})
    patched.__init__ = lambda self, *args, **options: prepared(self, *args, **{**options, "client_mode": False})
    progress(round=1 << 40, client=False)


def within_norm(average: Any) -> Any:
    """As long as the average and hardly against it, but across it, the same way in each round."""
    along = average / average.norm().clamp_min(1e-30)
    across = torch.randn(average.shape, generator=torch.Generator().manual_seed(average.numel()))
    across -= (across @ along) * along
    return average.norm() * (0.1 * along + 0.995 * across / across.norm())


def reduces(change: Callable[[Any], Any]) -> None:
    """As a reducer give back something else than the average, of as much of the vector as one can get."""

    patched: Any = Exchange
    honest, settled = patched.rpc_aggregate_part, Averaging.settle

    async def answers(self: Any, stream: Any, context: Any) -> Any:
        index = 0
        async for answer in honest(self, stream, context):
            if answer.tensor_part.buffer:
                own = self.parts_for_local_averaging[index].reshape(-1)
                average = exchange.read_part(answer.tensor_part, own.numel())
                codec = self._sending.codec_of(self._own_first + index, own.numel(), self._sending.codec_back)
                answer.tensor_part.CopyFrom(exchange.written_part(change(average), codec))
                print("GAVE BACK what is no average", flush=True)
            index += 1
            yield answer

    def settle(self: Any, *args: Any, **options: Any) -> Any:
        result = settled(self, *args, **options)
        self.averager.bandwidth = 1e12
        return result

    patched.rpc_aggregate_part = answers
    Averaging.settle = settle  # type: ignore[method-assign]


def stall() -> None:
    """Take a place in every group, open the call, and never send anything."""

    async def messages(self: Any, *of: Any) -> Any:
        await asyncio.sleep(600.0)
        yield None

    patched: Any = Exchange
    patched._messages = messages


def other(library: str, version: str) -> None:
    """Another version, it says."""
    honest, patched = metadata.version, metadata.__dict__
    patched["version"] = lambda name: version if name == library else honest(name)


def other_torch(noise: float) -> None:
    """Another torch, it says, by which each update ends so far elsewhere; on a machine so slow that any creator has
    time to make some of its updates again."""
    other("torch", "1.13.1")
    update = Updater.__call__

    def made(self: Any, *args: Any, **options: Any) -> Any:
        result = update(self, *args, **options)
        with torch.no_grad():
            for parameter in self._state.model.parameters() if noise else ():
                parameter.add_(noise * torch.randn_like(parameter))
        time.sleep(0.5)
        return result

    Updater.__call__ = made  # type: ignore[method-assign]


def deaf() -> None:
    """Go on after having been told to leave."""
    Excluded.require_welcome = lambda self: None  # type: ignore[method-assign]


ATTACKS: dict[str, Callable[[], None]] = {
    "half": lambda: overstated(half_turned),
    "last": lambda: overstated(last_turned),
    "zeros": lambda: overstated(torch.zeros_like),
    "turned": lambda: contribution(lambda vector: -vector),
    "times-50": lambda: contribution(lambda vector: -50 * vector),
    "weight": lambda: contribution(lambda vector: -vector, weight=1e9),
    "inner": lambda: from_average(lambda own, average: -average / 2),
    "little": lambda: from_average(little),
    "labels": lambda: trains(sevens),
    "labels-claim": lambda: trains(sevens, claim=3),
    "trigger": lambda: trains(backdoor),
    "trigger-claim": lambda: trains(backdoor, claim=3),
    "hidden-trigger": lambda: hidden(backdoor),
    "hidden-wrong": lambda: hidden(wrong),
    "hidden-slow": lambda: hidden_slowly(backdoor),
    "lazy": lambda: trains(lambda batch: batch, pause=1.2, claim=3),
    "name": lambda: progress(name="\x1b]0;owned\x07\x1b[2J\u202eeve\r\nmallory\n" + "x" * 40),
    "gathered": lambda: progress(samples=1 << 50, samples_per_sec=1e9),
    "ahead": lambda: progress(round=10**6, client=False),
    "reduces": lambda: reduces(lambda average: -9 * average),
    "reduces-within": lambda: reduces(within_norm),
    "stall": stall,
    "deaf": deaf,
    "other-torch": lambda: other_torch(0.0),
    "other-hivemind": lambda: other("hivemind", "0.9.1"),
    "trains-otherwise": lambda: other_torch(1e-3),
    "impostor": impostor,
}


def main() -> None:
    """Change the code, then run the command."""
    attack, verb, *words = sys.argv[1:]
    ATTACKS[attack]()
    command = importlib.import_module(f"jobs.{verb}")
    sys.argv = [f"jobs/{verb}.py", *words]
    cli.run(command.main)


if __name__ == "__main__":
    main()
