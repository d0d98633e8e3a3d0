"""Peers that cheat: ``python -m tests.swarm.attackers ATTACK VERB ...``, a changed ``python -m jobs.VERB ...``.

Each attack is what somebody can do who changes the code on a machine of their own. They reach as deep as hivemind, so
that nothing of ours stands between an attacker and the wire.
"""

import asyncio
import importlib
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib import metadata
from itertools import count
from typing import Any

from jobs import cli
from trainkit.swarm import processes

processes.require_hivemind()

import torch  # noqa: E402
from hivemind.averaging import DecentralizedAverager  # noqa: E402
from hivemind.averaging.control import StepControl  # noqa: E402

from trainkit.swarm import averager, exchange, session  # noqa: E402
from trainkit.swarm.access import Excluded, SignedRecords  # noqa: E402
from trainkit.swarm.average import Averaging  # noqa: E402
from trainkit.swarm.dht import SwarmDHT  # noqa: E402
from trainkit.swarm.exchange import Exchange, digest_of, sign_digest  # noqa: E402
from trainkit.swarm.messages import PeerProgress  # noqa: E402
from trainkit.swarm.sync import OuterState  # noqa: E402


def contribution(change: Callable[[Any], Any], *, weight: float | None = None, honest_rounds: int = 0) -> None:
    """Change what this peer sends (a vector in shared memory), and the weight that it claims."""
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
        if weight is not None:
            self.weight = weight
            if hasattr(averager, "plan"):
                averager.plan[1:] = weight
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


def overstated(change: Callable[[Any], Any]) -> None:
    """Be honest for three rounds, claim three times the speed, then send something else."""
    progress(times=3)
    contribution(change, honest_rounds=3)


def impostor() -> None:
    """Claim to hold the run's state, of a round far ahead, listen as reducers do, and sign random weights as that state
    for whoever asks."""

    init, honest = Averaging.__init__, OuterState.probe
    patched: Any = averager._Averager
    module: Any = session
    opened, prepared = module.open_dht, patched.__init__

    def made(self: Any, *args: Any, **options: Any) -> None:
        init(self, *args, **options)
        self._can_share = True

    def state(self: Any) -> Any:
        print("GAVE AWAY random weights", flush=True)
        round_index, *tensors = self.common.copy()
        wrong = [torch.randn_like(tensor) for tensor in tensors]
        return {"digest": sign_digest(self.own, digest_of(self.run_id, round_index + 1, wrong))}, tuple(wrong), None

    patched.get_current_state = state
    Averaging.__init__ = made  # type: ignore[method-assign]
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
                codec = self._sending.codec_of(self._own_first + index, self._sending.codec_back)
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


def other_torch() -> None:
    """No lie: another version."""
    honest, patched = metadata.version, metadata.__dict__
    patched["version"] = lambda name: "1.13.1" if name == "torch" else honest(name)


def deaf() -> None:
    """Go on after having been told to leave."""
    Excluded.require_welcome = lambda self: None  # type: ignore[method-assign]


ATTACKS: dict[str, Callable[[], None]] = {
    "half": lambda: overstated(half_turned),
    "zeros": lambda: overstated(torch.zeros_like),
    "turned": lambda: contribution(lambda vector: -vector),
    "times-50": lambda: contribution(lambda vector: -50 * vector),
    "weight": lambda: contribution(lambda vector: -vector, weight=1e9),
    "name": lambda: progress(name="\x1b]0;owned\x07\x1b[2J\u202eeve\r\nmallory\n" + "x" * 40),
    "gathered": lambda: progress(samples=1 << 50, samples_per_sec=1e9),
    "ahead": lambda: progress(round=10**6, client=False),
    "reduces": lambda: reduces(lambda average: -9 * average),
    "reduces-within": lambda: reduces(within_norm),
    "stall": stall,
    "deaf": deaf,
    "other-torch": other_torch,
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
