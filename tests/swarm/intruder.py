"""Somebody with plain hivemind and no invitation: ``python -m tests.swarm.intruder TOKEN``.

It knows everything but the token, by which it only learns where the creator is and where the run's peers meet. It asks
for what only members get; then it opens many calls and is silent, and at last talks without end. It prints as JSON what
it got: of the run, and with the very same calls of a stock averager of its own, to see that these calls are right.
"""

import asyncio
import json
import sys
from typing import Any

from trainkit.swarm.network import processes

processes.require_hivemind()

import hivemind  # noqa: E402
import torch  # noqa: E402
from hivemind.averaging import DecentralizedAverager  # noqa: E402
from hivemind.dht.protocol import DHTProtocol  # noqa: E402
from hivemind.dht.routing import DHTID  # noqa: E402
from hivemind.p2p import P2P, PeerID, ServicerBase  # noqa: E402
from hivemind.proto import averaging_pb2, dht_pb2  # noqa: E402
from hivemind.utils import MSGPackSerializer, get_dht_time  # noqa: E402

from trainkit.swarm.identity.invitations import with_token  # noqa: E402
from trainkit.swarm.peer.same_run import meeting_place  # noqa: E402
from trainkit.swarm.peer.status import open_reader  # noqa: E402


class _Averager(DecentralizedAverager):  # type: ignore[misc]
    """hivemind's own, under the name by which the run's averagers are called."""


CALLS = ("join_group", "aggregate_part", "download_state")
KEYS = ("trainkit_progress", "trainkit_manifest", "trainkit_banned")


async def averager_gives(p2p: P2P, peer: PeerID, prefix: str) -> dict[str, str]:
    """What an averager answers to somebody whom it does not know."""
    stub = _Averager.get_stub(p2p, peer, namespace=prefix)

    async def state() -> str:
        size = 0
        async for message in await stub.rpc_download_state(averaging_pb2.DownloadRequest()):
            size += len(message.SerializeToString())
        return "gave its state" if size else "nothing"

    async def group() -> str:
        request = averaging_pb2.JoinRequest(
            schema_hash=b"x", expiration=get_dht_time() + 3, gather=b"", client_mode=False, group_key=f"{prefix}.0b"
        )
        async for message in await stub.rpc_join_group(request):
            return str(averaging_pb2.MessageCode.Name(message.code))
        return "nothing"

    async def part() -> str:
        async def parts() -> Any:
            yield averaging_pb2.AveragingData(code=averaging_pb2.PART_FOR_AVERAGING, group_id=b"x" * 20)

        async for message in await stub.rpc_aggregate_part(parts()):
            return str(averaging_pb2.MessageCode.Name(message.code))
        return "nothing"

    return {"state": await _in_words(state()), "group": await _in_words(group()), "part": await _in_words(part())}


async def dht_gives(p2p: P2P, peer: PeerID) -> dict[str, str]:
    """What a node of the DHT answers to somebody whom it does not know."""
    stub = ServicerBase.get_stub.__func__(DHTProtocol, p2p, peer)  # its own is of an instance, which signs requests
    keys = [DHTID.generate(source=key).to_bytes() for key in KEYS]

    async def find() -> str:
        response = await stub.rpc_find(dht_pb2.FindRequest(keys=keys), timeout=3.0)
        return "found" if any(result.type != dht_pb2.NOT_FOUND for result in response.results) else "nothing"

    async def store() -> str:
        count = len(keys)
        request = dht_pb2.StoreRequest(
            keys=keys,
            subkeys=[MSGPackSerializer.dumps(p2p.peer_id.to_bytes())] * count,
            values=[MSGPackSerializer.dumps({"name": "intruder"})] * count,
            expiration_time=[get_dht_time() + 60] * count,
            in_cache=[False] * count,
        )
        return "stored" if any((await stub.rpc_store(request, timeout=3.0)).store_ok) else "nothing"

    return {"find": await _in_words(find()), "store": await _in_words(store())}


async def holds_calls(p2p: P2P, peer: PeerID, prefix: str, *, count: int = 20, seconds: float = 14.0) -> int:
    """Open so many calls of each kind, say nothing, and see how many are still open after a while."""
    names = [_Averager._get_handle_name(prefix, f"rpc_{what}") for what in CALLS]
    calls = [await p2p.call_binary_stream_handler(peer, name) for name in names for _ in range(count)]
    ended = [asyncio.ensure_future(reader.read(1)) for _, reader, _ in calls]
    _, held = await asyncio.wait(ended, timeout=seconds)
    for _, _, writer in calls:
        writer.close()
    return len(held)


async def pours_in(p2p: P2P, peer: PeerID, prefix: str, *, most: int = 64) -> int:
    """Announce a message of 8 GB, and begin to send it; megabytes until the other side hangs up."""
    name = _Averager._get_handle_name(prefix, "rpc_aggregate_part")
    _, reader, writer = await p2p.call_binary_stream_handler(peer, name)
    over = asyncio.ensure_future(reader.read(1))
    writer.write(P2P.MESSAGE_MARKER + (1 << 33).to_bytes(P2P.HEADER_LEN, P2P.BYTEORDER))
    sent = 0
    while sent < most and not over.done():
        try:
            writer.write(bytes(1 << 20))
            await asyncio.wait_for(writer.drain(), 5.0)
            await asyncio.sleep(0.05)
        except (TimeoutError, OSError):
            break
        sent += 1
    over.cancel()
    writer.close()
    return sent


async def _in_words(asked: Any) -> str:
    try:
        return str(await asyncio.wait_for(asked, 5.0))
    except Exception as error:
        return f"nothing ({type(error).__name__})"


def starts_a_node(address: str) -> str:
    """As `hivemind.DHT` is started by everybody else."""
    try:
        dht = hivemind.DHT(initial_peers=[address], client_mode=True, start=True, startup_timeout=10.0, daemon=True)
    except Exception as error:
        return f"refused ({type(error).__name__})"
    dht.shutdown()
    return "started"


async def _ask(address: str, prefix: str) -> dict[str, Any]:
    p2p = await P2P.create(initial_peers=[address])
    peer = PeerID.from_base58(address.rsplit("/p2p/", 1)[1])
    try:
        return {
            "got": {**await dht_gives(p2p, peer), **await averager_gives(p2p, peer, prefix)},
            "held": await holds_calls(p2p, peer, prefix),
            "poured": await pours_in(p2p, peer, prefix),
        }
    finally:
        await p2p.shutdown()


def main() -> None:
    """See the module."""
    # Its node has a process of its own, forked before ours bounds what the nodes of this process store.
    own = hivemind.DHT(start=True, daemon=True)
    entry = with_token(sys.argv[1])
    with open_reader(entry) as read:
        (manifest,) = read().manifests.values()
    address, prefix = entry.addresses[0], f"{meeting_place(manifest.run_id, manifest.facts)}_common"

    async def both(stock: str) -> dict[str, Any]:
        of_stock, of_run = await asyncio.gather(_ask(stock, prefix), _ask(address, prefix))
        return {"stock": of_stock, "run": of_run}

    averager = _Averager([torch.zeros(100)], own, start=True, prefix=prefix, allow_state_sharing=True, daemon=True)
    try:
        started = starts_a_node(address)
        print(json.dumps({"node": started, **asyncio.run(both(str(own.get_visible_maddrs()[0])))}), flush=True)
    finally:
        averager.shutdown()
        own.shutdown()


if __name__ == "__main__":
    main()
