"""In processes of their own: importing hivemind changes how this one starts processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[2]
PREPARE = """
import dataclasses
from trainkit.collaborative import processes
processes.require_hivemind()
from hivemind.dht.crypto import RSASignatureValidator
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import CompositeValidator, DHTRecord
from hivemind.p2p import PeerID
from hivemind.utils import MSGPackSerializer
from trainkit.collaborative import trust
from trainkit.collaborative.messages import Manifest, Progress

def record(identity, key, value):
    return DHTRecord(DHTID.generate(source=key).to_bytes(), MSGPackSerializer.dumps(identity.subkey),
                     MSGPackSerializer.dumps(value), 1e10)

progress = dataclasses.asdict(Progress("anna", 3, 64, 10.0, 0.5, 2, 1e9))
"""


def run(code: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", PREPARE + code],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(PROJECT)},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.swarm
def test_a_peer_is_known_by_its_key_and_writes_under_it_alone() -> None:
    assert run("""
with trust.identity() as anna, trust.identity() as eve:
    print(trust.peer_id_of(anna.subkey) == str(PeerID.from_identity(anna.path.read_bytes())))
    signs, checks = CompositeValidator(anna.validators()), CompositeValidator(eve.validators())
    own = record(anna, trust.PROGRESS, progress)
    signed = dataclasses.replace(own, value=signs.sign_value(own))
    print(checks.validate(signed), checks.strip_value(signed) == own.value)
    print(checks.validate(own))  # unsigned
    forged = dataclasses.replace(own, value=checks.sign_value(own))
    print(checks.validate(forged))  # signed by another
    changed = dataclasses.replace(signed, value=signed.value.replace(b"anna", b"hans"))
    print(checks.validate(changed))
""") == ["True", "True True", "False", "False", "False"]


@pytest.mark.swarm
def test_records_of_a_wrong_shape_are_refused() -> None:
    assert run("""
with trust.identity() as anna:
    both = CompositeValidator(anna.validators())
    for change in ({}, {"round": -1}, {"round": "3"}, {"samples_per_sec": -1.0}, {"name": "x" * 200}, {"more": 1}):
        own = record(anna, trust.PROGRESS, {**progress, **change})
        print(both.validate(dataclasses.replace(own, value=both.sign_value(own))))
""") == ["True", "False", "False", "False", "False", "False"]


@pytest.mark.swarm
def test_an_identity_that_is_kept_is_the_same_next_time_and_private(tmp_path: Path) -> None:
    assert run(f"""
from pathlib import Path
file = Path({str(tmp_path)!r}) / "key"
ids = []
for _ in range(2):
    with trust.identity(file) as anna:
        ids.append(trust.peer_id_of(anna.subkey))
print(len(set(ids)), oct(file.stat().st_mode & 0o077))
with trust.identity() as passing:
    pass
print(passing.path.exists())
file = Path({str(tmp_path)!r}) / "nonsense"
file.write_text("nonsense")
try:
    with trust.identity(file): pass
except Exception as error:
    print(type(error).__name__)
""") == ["1 0o0", "False", "UserError"]
