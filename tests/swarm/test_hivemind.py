"""What the swarm relies on in hivemind: where a version has drifted, this says so before a swarm does.

`trainkit.swarm.network` alone imports it (`tests/test_architecture.py`). What its overrides do has tests of its own:
groups and states in `test_averager`, parts in `test_exchange`, records and requests in `test_signed_records` and
`test_dht`, bounds in `test_siege`, helper processes in `test_surviving`.
"""

import importlib
import inspect
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("hivemind_here")

# Class -> what we call or set of it, beside what we override.
USED = {
    "averaging.averager.DecentralizedAverager": (
        "step get_tensors load_state_from_peers get_current_state get_stub run_in_background shutdown is_alive "
        "_get_current_state_from_host_process rpc_join_group rpc_aggregate_part rpc_download_state"
    ),
    "averaging.allreduce.AllReduceRunner": ("_check_reasons_to_reject _ban_sender should_delay_results _get_peer_stub"),
    "averaging.partition.TensorPartContainer": ("get_raw_input_parts register_processed_part register_failed_reducer"),
    "averaging.matchmaking.Matchmaking": "_request_join_group look_for_group",
    "averaging.control.StepControl": "allow_allreduce weight result cancel",
    "dht.protocol.DHTProtocol": "_validate_record _validate_dictionary add_p2p_handlers call_ping",
    "dht.storage.DHTLocalStorage": "store_subkey get",
    "dht.node.DHTNode": "get_many find_nearest_nodes",
    "dht.DHT": "get store run_coroutine get_visible_maddrs start wait_until_ready shutdown",
    "p2p.P2P": "create add_binary_stream_handler add_protobuf_handler call_protobuf_handler list_peers",
    "utils.mpfuture.MPFuture": "set_result result done exception",
}


@pytest.mark.parametrize("name", USED)
def test_what_is_called_is_there(name: str) -> None:
    module, _, kind = name.rpartition(".")
    theirs = getattr(importlib.import_module(f"hivemind.{module}"), kind)
    assert [one for one in USED[name].split() if not hasattr(theirs, one)] == []


def overridden() -> list[tuple[str, Callable[..., Any], Callable[..., Any]]]:
    """Name of each method that a class of ours has in the place of hivemind's, ours, and theirs."""
    from trainkit.swarm.network import averager, dht, exchange, groups, signed_records

    ours = (averager.Averager, exchange.Exchange, groups.GuardedMatchmaking, dht.DHT, signed_records.SignedRecords,
            signed_records.Authorizer)  # fmt: skip
    found = list[tuple[str, Callable[..., Any], Callable[..., Any]]]()
    for kind in ours:
        (theirs,) = kind.__bases__
        assert theirs.__module__.startswith("hivemind.")
        for name, own in vars(kind).items():
            if inspect.isfunction(own) and hasattr(theirs, name) and not name.startswith("__"):
                found.append((f"{kind.__name__}.{name}", own, getattr(theirs, name)))
    return found


def takes(own: Callable[..., Any], theirs: Callable[..., Any]) -> bool:
    """Whether ours can be called as theirs is: what must be given in order or by name, what may be given by name."""
    (me, _), *wanted = inspect.signature(theirs).parameters.items()
    plain = [name for name, one in wanted if one.kind == one.POSITIONAL_OR_KEYWORD and one.default is one.empty]
    named = {name: None for name, one in wanted if one.kind != one.VAR_KEYWORD and name not in plain}
    for given, by_name in ((plain, named), ([], {**dict.fromkeys(plain), **named})):
        with suppress(TypeError):
            inspect.signature(own).bind(me, *given, **by_name)
            return True
    return False


def test_an_override_takes_what_hivemind_gives() -> None:
    """Else a version with one more argument would end every round, far from here."""
    found = overridden()
    assert len(found) > 15
    assert [name for name, own, theirs in found if not takes(own, theirs)] == []
    for kind in (inspect.isasyncgenfunction, inspect.iscoroutinefunction):
        assert [name for name, own, theirs in found if kind(own) != kind(theirs)] == []
