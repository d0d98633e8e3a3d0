"""The measurements of tests/benchmarks: what their table says, and (`long`) that each of them runs."""

import itertools
import os
import re
import subprocess
import sys
import threading
from collections import Counter
from functools import partial
from pathlib import Path

import psutil
import pytest

from tests.benchmarks import machines, swarm_accuracy
from tests.benchmarks.__main__ import BEGIN, BY_NAME, END, NOT_MEASUREMENTS, merged, write
from tests.benchmarks.measuring import CONTROL, Figure, Table, Turn, against, side_by_side, take_turns
from tests.benchmarks.processes import measured
from tests.shell import PROJECT, python

COMMAND = [sys.executable, "-m", "tests.benchmarks"]


@pytest.mark.parametrize(
    ("own", "control", "verdict"), [(0.8, 1.0, "yes"), (1.2, 1.0, "no"), (0.8, 1.3, "void"), (1.2, 0.7, "void")]
)
def test_a_goal_is_met_or_not_unless_the_control_is_off(own: float, control: float, verdict: str) -> None:
    figure = against({"first": [1.0], "own": [own], CONTROL: [control]}, "own", what="it", at_most=1.0)
    assert figure.verdict == verdict


def test_arms_take_turns_and_a_ratio_is_to_both_turns_of_the_first() -> None:
    turns, seconds = list[str](), {"first": iter([2.0, 3.0, 3.0, 5.0]), "own": iter([1.0, 1.0])}

    def arm(name: str) -> float:
        turns.append(name)
        return next(seconds[name])

    times = take_turns({name: partial(arm, name) for name in seconds}, 2)
    assert turns == ["first", "own", "first", "first", "own", "first"], "every other round goes backwards"
    figure = against(times, "own", what="it", at_least=3.0, faster=True)
    assert figure.figure.startswith("3.25 x (2.50 x to 4.00 x")
    assert figure.met


def test_a_command_is_measured_with_what_it_leaves_behind(tmp_path: Path) -> None:
    left = "import time\nwhile time.process_time() < 0.4: pass"
    leaves = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {left!r}], start_new_session=True)"
    code = (
        "import os, psutil, sys; from pathlib import Path; from tests.benchmarks.processes import ran\n"
        f"found = ran([sys.executable, '-c', {leaves!r}], os.environ, Path({str(tmp_path)!r}))\n"
        "print(found.seconds, found.cpu, len(psutil.Process().children()))"
    )
    done = python("-c", code)
    seconds, cpu, children = map(float, done.stdout.split())
    assert cpu > 0.3
    assert children == 0
    assert seconds < 60


def test_arms_side_by_side_alternate_and_each_is_charged_for_its_own() -> None:
    spent, order = 0.0, list[int]()  # threads: the first arm has two

    def arm(cost: float, turn: Turn) -> None:
        nonlocal spent
        spent += 100  # before the first turn
        for _ in range(4):
            turn()
            order.append(threading.get_ident())
            spent += cost
        turn()

    arms = {"bare": partial(arm, 1.0), "kit": partial(arm, 2.0)}
    measured = side_by_side(arms, {"clock": lambda: spent})
    assert measured == {"clock": {"bare": [1.0] * 4, "kit": [2.0] * 4, CONTROL: [1.0] * 4}}
    follows = Counter(itertools.pairwise(order))
    assert len(order) == 12
    assert set(follows) == set(itertools.permutations(order[:3], 2))
    assert max(follows.values()) <= 2


def test_an_arm_that_fails_side_by_side_fails_the_measurement() -> None:
    def fails(turn: Turn) -> None:
        turn()
        raise AssertionError("other weights")

    with pytest.raises(AssertionError, match="other weights"):
        side_by_side({"bare": lambda turn: turn(), "kit": fails}, {})


def test_a_measurement_that_fails_is_a_row_that_says_so(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(PROJECT)  # for the process of its own, which begins with this one's path
    (figure,) = measured("not_there", None)
    assert isinstance(figure, Figure)
    assert figure.verdict == "failed: No module named 'tests.benchmarks.not_there'"
    assert "Traceback" in capfd.readouterr().err


def test_a_table_is_written_in_place_and_rows_measured_alone_replace_theirs(tmp_path: Path) -> None:
    file = tmp_path / "README.md"
    head = ["", "| file | what |", "|---|---|"]
    begin, end = (mark.replace("measured", "swarm_many") for mark in (BEGIN, END))
    file.write_text(f"before\n{BEGIN}{END}{begin}old\n{end}after")
    write(file, ["2026-01-01, here", *head, "| `a` | 1 |", "| `b` | 2 |"])
    write(file, merged(file, ["2026-02-02, here", *head, "| `a` | 3 |", "| `a` | 4 |"], ["a"]))
    goal = Figure("fewer bytes", "31.2 x", goal="at least 20 x", met=True)
    write(file, Table(["arm", "bytes"], [["diloco", "550"]], [goal]).lines(), "swarm_many")
    rows = ["2026-01-01 to 2026-02-02, here", *head, "| `a` | 3 |", "| `a` | 4 |", "| `b` | 2 |"]
    own = ["| arm | bytes |", "| --- | --- |", "| diloco | 550 |", "", "- fewer bytes: 31.2 x; at least 20 x: yes"]
    lines = ["before", BEGIN, *rows, "", f"{END}{begin}", *own, "", f"{end}after"]
    assert file.read_text() == "\n".join(lines)
    with pytest.raises(SystemExit, match="The table is of here; this is elsewhere"):
        merged(file, ["2026-02-02, elsewhere", *head], ["a"])


@pytest.mark.parametrize(("accuracy", "verdict"), [(86.5, "yes"), (86.4, "no"), (88.0, "yes")])
def test_a_swarm_may_be_half_a_point_below_the_mean_of_single_runs(accuracy: float, verdict: str) -> None:
    swarms = [
        swarm_accuracy.Trained(9, 1000, (0.99, 0.97), 60.0, 3000, 4000, accuracy + apart, 0.5) for apart in (-0.3, 0.3)
    ]
    runs = list(zip(swarms, (86.5, 87.5), strict=True))
    (goal,) = swarm_accuracy.table({(800.0, 400.0): runs}).goals
    assert goal.verdict == verdict


@pytest.mark.parametrize(
    ("page", "name"),
    [("docs/bench.md", "measured"), *(("tests/benchmarks/README.md", n) for n in ("measured", *BY_NAME))],
)
def test_a_page_has_one_place_for_each_table(page: str, name: str) -> None:
    text = (PROJECT / page).read_text()
    assert [text.count(mark.replace("measured", name)) for mark in (BEGIN, END)] == [1, 1]


@pytest.mark.long
def test_each_measurement_runs() -> None:
    done = subprocess.run([*COMMAND, "--rounds", "1"], cwd=PROJECT, capture_output=True, text=True, timeout=1200)
    table = done.stdout.split("|---|")[-1]
    assert "failed" not in table, done.stderr
    ran = set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE))
    files = {file.stem for file in (PROJECT / "tests" / "benchmarks").glob("*.py")}
    assert ran == files - {*NOT_MEASUREMENTS, *BY_NAME}


def test_nothing_that_was_started_on_a_machine_outlives_it(tmp_path: Path) -> None:
    if why := machines.absent():
        pytest.skip(why)
    with machines.machines(1, tmp_path) as made:
        shell = [*made.inside(0), "sh", "-c", "sleep 1000 >/dev/null 2>&1 & echo $!"]
        orphan = int(subprocess.run(shell, stdout=subprocess.PIPE, check=True).stdout)
        assert psutil.pid_exists(orphan)
        named = list(Path("/run/netns").glob(f"tk{os.getpid()}-*"))
        assert named == [], "a name would stay when this process is killed"
    assert not psutil.pid_exists(orphan) or psutil.Process(orphan).status() == psutil.STATUS_ZOMBIE
