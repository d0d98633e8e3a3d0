"""``python -m tests.benchmarks.arms.counted_swarm FILE VERB ...``: `jobs.swarm`, whose DHT node counts requests.

FILE holds two numbers of 8 bytes: requests to find and to store something.
"""

from __future__ import annotations

import functools
import mmap
import struct
import sys
from pathlib import Path

from jobs import cli, swarm
from trainkit.swarm import processes

COUNTS = struct.Struct("<QQ")


def counting(file: Path) -> None:
    """Count in the node's own process, which is forked from this one."""
    from hivemind.dht.protocol import DHTProtocol

    file.write_bytes(bytes(COUNTS.size))
    with file.open("r+b") as opened:
        shared = mmap.mmap(opened.fileno(), COUNTS.size)

    def count(name: str, place: int) -> None:
        rpc = getattr(DHTProtocol, name)

        @functools.wraps(rpc)
        async def counted(self, request, context):
            numbers = list(COUNTS.unpack(shared[: COUNTS.size]))
            numbers[place] += 1
            shared[: COUNTS.size] = COUNTS.pack(*numbers)
            return await rpc(self, request, context)

        setattr(DHTProtocol, name, counted)

    count("rpc_find", 0)
    count("rpc_store", 1)


def main(argv, env) -> int:
    processes.require_hivemind()
    counting(Path(argv[0]))
    return swarm.main(argv[1:], env)


if __name__ == "__main__":
    sys.argv[0] = "swarm"
    cli.run(main)
