"""A DHT that somebody floods: what a node keeps of it, what a reader takes in, and how long that takes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from trainkit.swarm.messages import MOST_PEERS

PROJECT = Path(__file__).parents[2]

# In a process of its own: importing hivemind changes how this one starts processes, and bounds are set for good.
CODE = """
import json, time
from trainkit.swarm import processes
processes.require_hivemind()
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DHTLocalStorage, DictionaryDHTValue
from trainkit.swarm.access import bound_records

asked = []
DHTProtocol._validate_record = lambda self, key, subkey, value, expires: (asked.append(subkey), value != b"bad")[1]
bound_records("news")
news, other, now = DHTID.generate(source="news"), DHTID.generate(source="other"), time.time()
storage, found = DHTLocalStorage(), {}
found["stored"] = sum(storage.store(news, b"x", now + 60.0, subkey=index) for index in range(10_000))
found["renewed"] = storage.store(news, b"y", now + 90.0, subkey=7)
found["late"] = storage.store(news, b"x", now + 90.0, subkey=20_000)
found["lasting"] = storage.store(news, b"y", now + 9e9, subkey=8)
found["others"] = storage.store(other, b"x", now + 9e9, subkey=8)

many = DictionaryDHTValue()
for index in range(10_000):
    many.store(index, b"bad" if index % 2 else b"good", now + 60.0)
protocol = DHTProtocol.__new__(DHTProtocol)
found["read"] = protocol._validate_dictionary(b"news", many)
found["asked"], found["left"] = len(asked), sorted(set(item.value for _, item in many.items()))[0].decode()
found["sizes"] = [len(storage.get(news).value), len(many)]
found["garbage"] = protocol._validate_dictionary(b"news", b"no dictionary")
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found() -> dict[str, object]:
    done = subprocess.run([sys.executable, "-c", CODE], cwd=PROJECT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    loaded: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return loaded


@pytest.mark.swarm
def test_a_node_keeps_so_many_records_and_whoever_is_there_may_stay(found: dict[str, object]) -> None:
    assert (found["stored"], found["renewed"], found["late"]) == (MOST_PEERS, True, False)


@pytest.mark.swarm
def test_news_do_not_outlast_an_hour_and_other_records_may(found: dict[str, object]) -> None:
    assert (found["lasting"], found["others"]) == (False, True)


@pytest.mark.swarm
def test_of_a_flood_a_reader_looks_at_the_first_and_keeps_the_valid_ones(found: dict[str, object]) -> None:
    assert (found["read"], found["asked"], found["left"]) == (True, MOST_PEERS, "good")
    assert found["sizes"] == [MOST_PEERS, MOST_PEERS // 2]
    assert found["garbage"] is False
