"""Ports and head nodes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from trainkit.errors import UserError
from trainkit.ranks import env as ranks_env
from trainkit.ranks.env import PORTS, candidates, check_head, derived_port, ephemeral_range, free_port, start_for

LINUX = range(32768, 61000)


def test_derived_ports_are_outside_the_default_ephemeral_range() -> None:
    assert not {derived_port(str(job), attempt) for job in range(200) for attempt in range(5)} & set(LINUX)


def test_ranks_of_one_attempt_derive_the_same_port() -> None:
    assert derived_port("4711", 3) == derived_port("4711", 3)


def test_every_attempt_of_a_job_derives_a_port_of_its_own() -> None:
    assert len({derived_port("4711", attempt) for attempt in range(1000)}) == 1000


def test_jobs_next_to_each_other_derive_ports_of_their_own() -> None:
    assert len({derived_port(str(job), 0) for job in range(100, 110)}) == 10


def test_the_kernels_text_of_the_ephemeral_range_includes_its_last_port() -> None:
    assert ephemeral_range("32768\t60999\n") == LINUX


def test_the_search_begins_at_the_given_port_and_wraps() -> None:
    ports = list(candidates(29998, LINUX))
    assert ports[:3] == [29998, 29999, 20000]
    assert len(ports) == len(PORTS)


def test_a_site_with_a_wide_ephemeral_range_gets_ports_outside_of_it() -> None:
    assert set(candidates(20000, range(15000, 65000))) <= {*range(1024, 15000), *range(65000, 65536)}


def test_a_site_where_every_port_is_ephemeral_still_gets_one() -> None:
    assert next(iter(candidates(20005, range(1024, 65536)))) == 20005


def test_a_port_in_use_is_not_free() -> None:
    with socket.socket() as taken:
        port = free_port()
        taken.bind(("127.0.0.1", port))
        taken.listen()
        assert free_port(port) != port


def test_no_free_port_at_all_is_an_error_for_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks_env, "_is_free", lambda port: False)
    with pytest.raises(UserError, match="No free port"):
        free_port()


def test_a_restart_begins_its_search_elsewhere() -> None:
    first, second = start_for({"SLURM_JOB_ID": "7"}), start_for({"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"})
    assert first != second


def test_outside_of_slurm_the_search_begins_anywhere() -> None:
    assert start_for({}) is None


def test_the_module_prints_one_port_outside_the_ephemeral_range_and_imports_no_torch() -> None:
    code = (
        "import runpy, sys; runpy.run_module('trainkit.ranks.env', run_name='__main__'); print('torch' in sys.modules)"
    )
    env = {**os.environ, "SLURM_JOB_ID": "99", "SLURM_RESTART_COUNT": "2"}
    root = Path(__file__).parents[2]
    out = subprocess.run([sys.executable, "-c", code], env=env, cwd=root, capture_output=True, text=True, check=True)
    port, torch_loaded = out.stdout.split()
    assert int(port) in PORTS
    assert torch_loaded == "False"


def test_a_head_node_whose_name_does_not_resolve_is_refused() -> None:
    with pytest.raises(UserError, match=r"no-such-host\.invalid.*cannot be found"):
        check_head("no-such-host.invalid", 2)


@pytest.mark.parametrize("addr", ["localhost", "127.0.0.1", "127.0.1.1", "::1"])
def test_a_loopback_head_node_is_refused_on_several_nodes(addr: str) -> None:
    with pytest.raises(UserError, match="is loopback"):
        check_head(addr, 2)


def test_a_loopback_head_node_is_fine_on_one_node() -> None:
    check_head("127.0.0.1", 1)


def test_an_address_of_the_network_is_fine_on_several_nodes() -> None:
    check_head("10.1.2.3", 2)
