from __future__ import annotations

from pathlib import Path

import pytest

from trainkit.swarm.admission import Admission, keep_key, own_pass
from trainkit.swarm.bans import Ban, Bans
from trainkit.swarm.invitations import Key

pytestmark = pytest.mark.usefixtures("hivemind_here")


@pytest.mark.parametrize("submitted", [True, False])
def test_who_is_out_is_remembered_in_the_run_folder_even_before_it_has_a_key(tmp_path: Path, submitted: bool) -> None:
    """A submitted run has a folder before it has created its swarm."""
    from trainkit.swarm.bans import Excluded

    key = Key.generate()
    if not submitted:
        keep_key(tmp_path, key)
    excluded = Excluded(own_pass(key, "owner"), "QmOwner", Admission(key.public))
    excluded.remember(tmp_path)
    excluded.bans.add(Ban("QmEve", "eve", "lied"))
    assert list(Bans(tmp_path / "bans.jsonl").read()) == ["QmEve"]
