"""Trials of a sweep that choose their settings when they begin, from what the records of the others say."""

import json
import math
import os
import statistics
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests import readme
from tests.fork_server import server
from tests.shell import PROJECT, python
from trainkit.common import jsonl
from trainkit.config.loading import load, to_yaml
from trainkit.config.sweep import axis_of
from trainkit.launch import sampler
from trainkit.launch.sampler import FEWEST, Trial, choose, suggest
from trainkit.report.sweep_points import points_of
from trainkit.run.events import append_event, chosen_point, read_events, sampled
from trainkit.run.folder import SAMPLER, RunDir
from trainkit.run.run_lease import Holder, lease_on

pytest.importorskip("optuna")

SWEEP = ("optim.lr=1e-5..1e-0:log", "optim.weight_decay=0.0..0.5")
AXES = [axis_of(text) for text in SWEEP]


# What is asked


def accuracy(point: Sequence[str]) -> float:
    """The accuracy of a made-up training: the best rate is 0.0025, the best decay 0.08."""
    rate, decay = (float(word.partition("=")[2]) for word in point)
    return 90 - 8 * (math.log10(rate) + 2.6) ** 2 - 200 * (decay - 0.08) ** 2


def lost(seed: int, trials: int = 30) -> tuple[float, float]:
    """The distances of the best of some trials by TPE, and of as many that are drawn, from the optimum."""
    drawn = [[axis.drawn(1000 * seed + number) for axis in AXES] for number in range(trials)]
    done: list[Trial] = []
    for number in range(trials):
        point = suggest(AXES, done, f"{seed} {number}") if number >= FEWEST else drawn[number]
        done.append((point, accuracy(point)))
    return 90 - max(accuracy(point) for point, _ in done), 90 - max(map(accuracy, drawn))


def test_tpe_beats_as_many_draws_by_more_than_half() -> None:
    by_tpe, by_draws = zip(*(lost(seed) for seed in range(10)), strict=True)
    assert statistics.median(by_tpe) < statistics.median(by_draws) / 1.5


def test_the_same_trials_and_seed_are_answered_alike() -> None:
    done: list[Trial] = [(drawn(number), float(number)) for number in range(12)]
    assert suggest(AXES, done, "a") == suggest(AXES, done, "a") != suggest(AXES, done, "b")


@pytest.mark.parametrize("sweep", [SWEEP, ("schedule.name=wsd,cosine", "model.width=1..8:log")])
def test_trials_that_begin_at_once_get_different_settings(sweep: tuple[str, ...]) -> None:
    axes = [axis_of(text) for text in sweep]
    points = {tuple(axis.drawn(number) for axis in axes): float(number) for number in range(10)}
    begun: list[Trial] = [([*point], result) for point, result in points.items()]
    for _ in range(6):
        begun.append((suggest(axes, begun, "one seed for all"), None))
    assert len({tuple(point) for point, _ in begun}) == len(begun)


def test_a_point_at_the_rounded_end_of_its_range_counts() -> None:
    axes = [axis_of("optim.lr=0.12341..0.12346")]
    assert suggest(axes, [(["optim.lr=0.1235"], 1.0)] * 12, "") == ["optim.lr=0.1234"]


# What a run is given


@pytest.fixture
def sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Ten trials that have come to their ends, and 10 and 11, which are to begin."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    folder = tmp_path / "sweep"
    folder.mkdir()
    for number in range(FEWEST + 2):
        make(folder, number)
    points = [{"run": str(number), "overrides": ["seed=7", *drawn(number)]} for number in range(FEWEST + 2)]
    (folder / "sweep.json").write_text(json.dumps(points))
    (folder / SAMPLER).write_text(json.dumps({"sampler": "tpe", "sweep": SWEEP, "others": []}))
    return folder


def drawn(number: int) -> list[str]:
    return [axis.drawn(number) for axis in AXES]


def make(folder: Path, number: int) -> RunDir:
    run = RunDir.create(folder / str(number), to_yaml(load("single", ["seed=7", *drawn(number)]).config))
    if number < FEWEST:
        sampled(run, "random", drawn(number))
        record: dict[str, Any] = {
            "step": 19,
            "epoch": 1.0,
            "split": "val",
            "loss": 1.0,
            "acc1": accuracy(drawn(number)),
        }
        jsonl.append_jsonl(run.metrics, record)
        append_event(run, "ended", attempt=0, state="COMPLETED")
    return run


def settings(run: RunDir) -> list[str]:
    config = load(str(run.config)).config
    assert config.seed == 7
    return [f"optim.lr={config.optim.lr:.4g}", f"optim.weight_decay={config.optim.weight_decay:.4g}"]


def test_a_trial_is_given_what_tpe_chooses_and_keeps_it(sweep: Path) -> None:
    run = RunDir(sweep / "10")
    choose(run)
    (event,) = read_events(run, "sampled")
    assert event["by"] == "tpe, 10 results"
    assert settings(run) == event["overrides"] != drawn(10)
    before = run.config.read_bytes()
    make(sweep, 12)
    choose(run)  # of another attempt, when more is known
    assert (run.config.read_bytes(), len(read_events(run, "sampled"))) == (before, 1)
    assert [f"{key}={value}" for key, value in points_of(sweep)["10"].items()] == chosen_point(run)
    assert points_of(sweep)["11"] == dict(word.split("=", 1) for word in drawn(11))


def test_a_trial_killed_before_it_wrote_down_what_it_has_asks_anew(sweep: Path) -> None:
    run = RunDir(sweep / "10")
    choose(run)
    chosen, events = chosen_point(run), run.events.read_text().splitlines()
    run.events.write_text("".join(line for line in events if '"sampled"' not in line))
    choose(run)
    assert settings(run) == chosen_point(run) == chosen


@pytest.mark.parametrize("state", ["running", "failed", "diverged"])
def test_before_ten_results_a_trial_keeps_what_it_has_drawn(sweep: Path, state: str) -> None:
    other, run = RunDir(sweep / "3"), RunDir(sweep / "10")
    ends = {"running": "", "failed": json.dumps({"event": "ended", "attempt": 0, "state": "FAILED"})}
    other.events.write_text(f"{other.events.read_text().splitlines()[0]}\n{ends.get(state, '')}\n")
    if state == "diverged":
        append_event(other, "ended", attempt=0, state="COMPLETED")
        other.metrics.write_text(json.dumps({"step": 19, "epoch": 1.0, "split": "val", "loss": None, "acc1": None}))
    before = run.config.read_bytes()
    choose(run)
    assert (chosen_point(run), run.config.read_bytes()) == (drawn(10), before)
    assert read_events(run, "sampled")[0]["by"] == "random"


def test_runs_of_an_earlier_sweep_are_learned_from(sweep: Path, tmp_path: Path) -> None:
    asked = json.loads((sweep / SAMPLER).read_text())
    later = tmp_path / "later"
    later.mkdir()
    run = RunDir.create(later / "0", (sweep / "10" / "config.yaml").read_text())
    (later / "sweep.json").write_text(json.dumps([{"run": "0", "overrides": drawn(10)}]))
    others = [str(sweep / str(number)) for number in range(FEWEST)]
    (later / SAMPLER).write_text(json.dumps({**asked, "others": [*others, str(tmp_path / "gone")]}))
    choose(run)
    assert read_events(run, "sampled")[0]["by"] == "tpe, 10 results"


def test_of_a_task_whose_headline_is_a_loss_the_lower_is_the_better(
    sweep: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Trial] = []

    def suggested(axes: object, trials: list[Trial], seed: str) -> list[str]:
        asked.extend(trials)
        return drawn(20)

    monkeypatch.setattr(sampler, "suggest", suggested)
    for number in range(FEWEST):
        of_task = {"headline": "loss", "metrics": {"loss": {"unit": "", "higher_is_better": False, "label": "Loss"}}}
        RunDir(sweep / str(number)).task.write_text(json.dumps(of_task))
    choose(RunDir(sweep / "10"))
    assert {result for _, result in asked} == {-1.0}


def test_a_pruned_trial_is_a_result(sweep: Path) -> None:
    append_event(RunDir(sweep / "3"), "pruned", attempt=0, step=19)
    choose(RunDir(sweep / "10"))
    assert read_events(RunDir(sweep / "10"), "sampled")[0]["by"] == "tpe, 10 results"


@pytest.mark.parametrize(
    "said",
    [
        {"sweep": ["data.name=digits,strange:build", "optim.lr=1e-5..1e-0:log"]},
        {"sweep": ["checkpoint.remote=s3://eve/all"]}, {"sweep": ["model.checkpoint=/home/me/key"]},
        {"sweep": ["launch.setup=[touch it]"]}, {"sweep": "optim.lr=1..2"}, {"sweep": [["optim.lr"]]},
        {"others": [7]}, {"sweep": None},
    ],
    ids=str,
)  # fmt: skip
def test_a_file_that_others_have_written_gives_a_run_no_code_and_no_place(
    sweep: Path, capsys: pytest.CaptureFixture[str], said: dict[str, Any]
) -> None:
    """The gate has passed by then, and has seen what was submitted."""
    (sweep / SAMPLER).write_text(json.dumps({"sampler": "tpe", "sweep": SWEEP, "others": [], **said}))
    run = RunDir(sweep / "10")
    before = run.config.read_bytes()
    choose(run)
    assert run.config.read_bytes() == before
    assert "10 keeps its random draw" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "others"),
    [
        (["optim.lr", "x"], []), (["optim.lr=inf", "optim.weight_decay=-1"], []), ([""], []),
        (None, ["a\0b", "", "/etc"]),
    ],
    ids=str,
)  # fmt: skip
def test_records_that_others_have_written_keep_no_trial_from_beginning(
    sweep: Path, words: list[str] | None, others: list[str]
) -> None:
    run = RunDir(sweep / "10")
    if words is not None:
        append_event(RunDir(sweep / "3"), "sampled", by="random", overrides=words)
        (sweep / "3" / "events.jsonl").write_text((sweep / "3" / "events.jsonl").read_text().partition("\n")[2])
    (sweep / SAMPLER).write_text(json.dumps({"sampler": "tpe", "sweep": SWEEP, "others": others}))
    choose(run)
    assert settings(run) == chosen_point(run)


def test_a_sweep_names_no_run_outside_of_its_folder(sweep: Path) -> None:
    for name in ("../elsewhere", "/tmp/elsewhere", ""):
        (sweep / "sweep.json").write_text(json.dumps([{"run": name, "overrides": ["seed=7"]}]))
        assert points_of(sweep) == {}


@pytest.mark.parametrize("why", ["not installed", "not possible"])
def test_what_cannot_be_is_said_and_the_draw_is_kept(
    sweep: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], why: str
) -> None:
    run = RunDir(sweep / "10")
    before = run.config.read_bytes()
    if why == "not installed":
        monkeypatch.setitem(sys.modules, "optuna", None)
    else:
        monkeypatch.setattr(sampler, "suggest", lambda *_: ["optim.lr=-1", "optim.weight_decay=0.1"])
    choose(run)
    assert (chosen_point(run), run.config.read_bytes()) == (drawn(10), before)
    said = capsys.readouterr().err
    assert said.startswith("10 keeps its random draw.")
    assert ("optuna" if why == "not installed" else "optim.lr") in said


def test_a_run_of_any_other_sweep_is_left_alone(sweep: Path) -> None:
    (sweep / SAMPLER).unlink()
    choose(RunDir(sweep / "10"))
    assert not RunDir(sweep / "10").events.exists()


def test_two_that_begin_at_the_same_moment_take_turns(sweep: Path) -> None:
    runs = [RunDir(sweep / name) for name in ("10", "11")]
    started = [server().start(choose, run) for run in runs]
    for process in started:
        process.join(60)
    assert [process.exitcode for process in started] == [0, 0]
    assert [read_events(run, "sampled")[0]["by"] for run in runs] == ["tpe, 10 results"] * 2
    assert chosen_point(runs[0]) != chosen_point(runs[1])
    assert not (sweep / "lease.json").exists()


def test_one_that_is_choosing_is_waited_for(sweep: Path) -> None:
    held, over = threading.Event(), threading.Event()

    def hold() -> None:
        with lease_on(RunDir(sweep), Holder.me()):
            held.set()
            over.wait()

    other = threading.Thread(target=hold)
    other.start()
    assert held.wait(60)
    threading.Timer(0.5, over.set).start()
    choose(RunDir(sweep / "10"))
    other.join()
    assert read_events(RunDir(sweep / "10"), "sampled")[0]["by"] == "tpe, 10 results"


def test_one_that_was_killed_while_it_chose_holds_up_nobody(sweep: Path) -> None:
    dead = {"token": "0", "job_id": "", "host": os.uname().nodename, "pid": 2**22 - 1, "process_started": "1"}
    (sweep / "lease.json").write_text(json.dumps(dead))
    os.utime(sweep / "lease.json", (1e9, 1e9))
    choose(RunDir(sweep / "10"))
    assert read_events(RunDir(sweep / "10"), "sampled")[0]["by"] == "tpe, 10 results"


@pytest.mark.long
def test_the_command_of_the_page_trains_a_sweep_that_learns(tmp_path: Path) -> None:
    ((line,),) = readme.blocks("sampler", readme.DOCS / "training.md", typed=True)
    words = [*line.removeprefix("trainkit ").split(), "monitor.loggers=[jsonl]", "--name", "hunt", "--wait"]
    env = {"TRAINKIT_RUNS": str(tmp_path), "PYTHONPATH": os.pathsep.join([str(PROJECT), *sys.path])}
    done = python("-m", "jobs", *words, cwd=tmp_path, **env)
    assert done.returncode == 0, done.stderr
    runs = [RunDir(tmp_path / "hunt" / str(number)) for number in range(12)]
    assert [read_events(run, "sampled")[0]["by"] for run in runs] == [
        *["random"] * 10, "tpe, 10 results", "tpe, 11 results"
    ]  # fmt: skip
    for run in runs:
        config = load(str(run.config)).config
        values = (f"optim.lr={config.optim.lr:.4g}", f"optim.weight_decay={config.optim.weight_decay:.4g}")
        assert chosen_point(run) == [*values]
    table = python("-m", "jobs", "report", "hunt", cwd=tmp_path, **env).stdout
    assert "| tpe, 11 results |" in table
