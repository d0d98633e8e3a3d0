"""Peers that cheat: ``python -m tests.collaborative.attackers ATTACK VERB ...``, a changed ``python -m jobs.VERB ...``.

Each attack is what somebody can do who changes the code on a machine of their own. They reach as deep as hivemind, so
that nothing of ours stands between an attacker and the wire.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

from jobs import cli
from trainkit.collaborative import processes


def contribution(change: Callable[[Any], Any], *, weight: float | None = None) -> None:
    """Change what this peer sends (a vector in shared memory), and the weight that it claims."""
    from hivemind.averaging import DecentralizedAverager
    from hivemind.averaging.control import StepControl

    averagers: list[Any] = []
    step, allow = DecentralizedAverager.step, StepControl.allow_allreduce

    def stepped(self: Any, *args: Any, **options: Any) -> Any:
        averagers[:] = [self]
        return step(self, *args, **options)

    def allowed(self: Any) -> None:
        (averager,) = averagers
        (vector,) = averager._averaged_tensors
        vector.copy_(change(vector.clone()))
        if weight is not None:
            self.weight = weight
            if hasattr(averager, "plan"):
                averager.plan[1:] = weight
        allow(self)

    DecentralizedAverager.step = stepped
    StepControl.allow_allreduce = allowed


def gather(data: bytes) -> None:
    """Tell the group ``data`` about this peer."""
    from hivemind.averaging.control import StepControl

    init = StepControl.__init__

    def made(self: Any, **options: Any) -> None:
        init(self, **{**options, "data_for_gather": data})

    StepControl.__init__ = made


def progress(**lies: Any) -> None:
    """Publish lies, past the checks that an honest peer makes of its own records."""
    from dataclasses import replace

    from hivemind.dht.schema import SchemaValidator

    from trainkit.collaborative.dht import SwarmDHT
    from trainkit.collaborative.messages import Progress

    publish = SwarmDHT.publish_progress

    def published(self: SwarmDHT, progress: Progress, seconds: float) -> None:
        publish(self, replace(progress, **lies), seconds)

    SwarmDHT.publish_progress = published  # type: ignore[method-assign]
    SchemaValidator.validate = lambda self, record: True


ATTACKS: dict[str, Callable[[], None]] = {
    "times-9": lambda: contribution(lambda vector: -9 * vector),
    "times-50": lambda: contribution(lambda vector: -50 * vector),
    "times1000": lambda: contribution(lambda vector: 1000 * vector),
    "nan": lambda: contribution(lambda vector: vector * float("nan")),
    "weight": lambda: contribution(lambda vector: -vector, weight=1e9),
    "gather": lambda: gather(b"\xc1garbage"),
    "name": lambda: progress(name="\x1b]0;owned\x07\x1b[2J\u202eeve\r\nmallory\n" + "x" * 40),
    "loss": lambda: progress(loss=float("inf")),
    "speed": lambda: progress(samples_per_sec=1e300),
    "gathered": lambda: progress(samples=1 << 50, samples_per_sec=1e9),
    "ahead": lambda: progress(round=10**6, client=False),
}


def main() -> None:
    """Change the code, then run the command."""
    attack, verb, *words = sys.argv[1:]
    processes.require_hivemind()
    ATTACKS[attack]()
    command = importlib.import_module(f"jobs.{verb}")
    sys.argv = [f"jobs/{verb}.py", *words]
    cli.run(command.main)


if __name__ == "__main__":
    main()
