"""SLURM's compact lists, as SLURM writes them."""

from __future__ import annotations

import pytest

from trainkit.errors import UserError
from trainkit.ranks.env import expand, expand_counts, fold


@pytest.mark.parametrize(
    ("nodelist", "hosts"),
    [
        ("n1", ["n1"]),
        ("a1,b2", ["a1", "b2"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("n[3,1]", ["n3", "n1"]),
        ("gpu[03-05,9],cpu1", ["gpu03", "gpu04", "gpu05", "gpu9", "cpu1"]),
        ("n[08-11]", ["n08", "n09", "n10", "n11"]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
        ("rack[1-2]-n[03-04]", ["rack1-n03", "rack1-n04", "rack2-n03", "rack2-n04"]),
        ("rack[1-2]-n[3-4],login", ["rack1-n3", "rack1-n4", "rack2-n3", "rack2-n4", "login"]),
        ("[1-2]a", ["1a", "2a"]),
        ("n[1-2].cluster.example.org", ["n1.cluster.example.org", "n2.cluster.example.org"]),
        ("10.0.0.[1-2]", ["10.0.0.1", "10.0.0.2"]),
        ("node-7", ["node-7"]),
    ],
)
def test_a_host_list_expands_in_its_own_order(nodelist: str, hosts: list[str]) -> None:
    assert expand(nodelist) == hosts


@pytest.mark.parametrize(
    "nodelist",
    ["", "n[1", "n1]", "n[]", "n[3-1]", "n[a-b]", "n1,", ",n1", "n1,,n2", "n1 n2", "n[1-2-3]"],
)
def test_a_malformed_host_list_is_refused(nodelist: str) -> None:
    with pytest.raises(UserError, match="Cannot read the host list"):
        expand(nodelist)


@pytest.mark.parametrize(
    "nodelist",
    ["n[1-99999999999]", "n[1-9999]m[1-9999]", f"n[{'9' * 5000}]", "n[1-90000],m[1-90000]", "n," * 600_000 + "n"],
    ids=lambda text: text[:20],
)
def test_a_list_of_more_hosts_than_any_machine_has_is_not_made(nodelist: str) -> None:
    with pytest.raises(UserError, match="Cannot read the host list") as caught:
        expand(nodelist)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    ("counts", "numbers"), [("4", [4]), ("2(x3)", [2, 2, 2]), ("2(x3),1", [2, 2, 2, 1]), ("1,3(x2)", [1, 3, 3])]
)
def test_task_counts_give_one_number_per_node(counts: str, numbers: list[int]) -> None:
    assert expand_counts(counts) == numbers


@pytest.mark.parametrize("counts", ["", "x", "2(x)", "2(3)", "2,"])
def test_malformed_task_counts_are_refused(counts: str) -> None:
    with pytest.raises(UserError, match="tasks per node"):
        expand_counts(counts)


@pytest.mark.parametrize(
    ("hosts", "folded"),
    [
        ([], ""),
        (["login"], "login"),
        (["n1", "n2"], "n1, n2"),
        ([f"n{number:02}" for number in range(1, 33)], "n[01-32]"),
        (["n8", "n9", "n10"], "n[8-10]"),
        (["n098", "n099", "n100", "n7"], "n[098-100], n7"),
        (["n1", "n02", "n3"], "n1, n02, n3"),
        (["n3", "n2", "n1"], "n3, n2, n1"),
        (["rack1-n03.hpc", "rack1-n04.hpc", "rack1-n05.hpc", "rack2-n05.hpc"], "rack1-n[03-05].hpc, rack2-n05.hpc"),
    ],
)
def test_many_hosts_are_folded_for_people(hosts: list[str], folded: str) -> None:
    assert fold(hosts) == folded
    assert expand(folded.replace(", ", ",")) == hosts if hosts else not folded
