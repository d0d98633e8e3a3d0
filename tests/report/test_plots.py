from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest

from trainkit import fileio
from trainkit.report import drawing, plots
from trainkit.report.facts import Facts, collect
from trainkit.report.tables import TIMES
from trainkit.run.folder import RunDir

MakeRun = Callable[..., RunDir]


def test_nothing_is_drawn_of_an_empty_run(make_run: MakeRun, tmp_path: Path) -> None:
    facts = Facts(make_run(steps=0, finished=False), "r")
    path = tmp_path / "plot.png"
    assert not plots.draw_curves(facts, path)
    assert not plots.draw_pace(facts, path)
    assert not plots.draw_hardware(facts, path)
    assert not plots.draw_comparison([facts], path)
    assert not plots.draw_accuracies([facts, facts], path)
    assert not path.exists()


def test_many_gpus_are_drawn_without_a_thicket_of_names(make_run: MakeRun, tmp_path: Path) -> None:
    assert plots.draw_hardware(Facts(make_run(gpus=16), "r"), tmp_path / "plot.png")


def test_more_runs_than_colours_are_compared(make_run: MakeRun, tmp_path: Path) -> None:
    runs = collect([make_run(f"ddp-{index:04}", speed=1000.0 * index) for index in range(1, 9)])
    assert plots.draw_comparison(runs, tmp_path / "speed.png")
    assert plots.draw_accuracies(runs, tmp_path / "accuracy.png")


def test_smoothing_keeps_short_curves_and_takes_spikes_out_of_long_ones() -> None:
    short = [(float(x), float(x % 2)) for x in range(10)]
    assert drawing.smooth(short) == short
    long = [(float(x), 1.0) for x in range(300)]
    long[150] = (150.0, 99.0)
    assert drawing.smooth(long) == [(float(x), 1.0) for x in range(300)]


def test_no_line_is_drawn_over_the_time_between_two_attempts() -> None:
    points = [(0.0, 1.0), (5.0, 2.0), (10.0, 3.0), (60.0, 4.0), (65.0, 5.0)]
    assert [math.isnan(value) for _, value in drawing.with_gaps(points)] == [False, False, False, True, False, False]


@pytest.mark.parametrize(("seconds", "unit"), [(10, "s"), (600, "min"), (5 * 3600, "h")])
def test_time_has_a_fitting_unit(seconds: float, unit: str) -> None:
    assert drawing.time_unit(seconds)[0] == unit


@pytest.mark.parametrize(("least", "most_ticks"), [(0.02, 10), (1e-7, 10)])
def test_a_logarithmic_axis_has_room_for_its_numbers(least: float, most_ticks: int) -> None:
    from matplotlib.figure import Figure

    axes = Figure().subplots()
    axes.plot([0, 1], [least, 2.0])
    drawing.log_if_wide(axes, [least, 2.0])
    low, high = axes.get_ylim()
    shown = [tick for tick in axes.get_yticks() if low <= tick <= high]
    assert 4 <= len(shown) <= most_ticks


@pytest.mark.parametrize(("longest", "ticks"), [(10, list(range(11))), (25, [0, 5, 10, 15, 20, 25]), (3, [0, 1, 2, 3])])
def test_epochs_are_counted_in_whole_numbers_at_even_distances(longest: int, ticks: list[int]) -> None:
    from matplotlib.figure import Figure

    axes = Figure().subplots()
    axes.plot([0, longest], [0.0, 1.0])
    axes.set_xlim(0, longest)
    drawing.whole_ticks(axes)
    assert [tick for tick in axes.get_xticks() if 0 <= tick <= longest] == ticks


def test_a_run_of_one_epoch_is_drawn_over_its_steps(make_run: MakeRun) -> None:
    short, long = Facts(make_run(steps=20), "r"), Facts(make_run("ddp-0002"), "r")
    assert (drawing.x_of(short.train), drawing.x_of(long.train)) == ("step", "epoch")
    assert drawing.points_of(short.train, "acc5", "step") == [(10.0, 100.0), (20.0, 100.0)]


def drawn_text(monkeypatch: pytest.MonkeyPatch, draw: Callable[[], bool]) -> list[str]:
    """All words of a plot."""
    from matplotlib.figure import Figure
    from matplotlib.text import Text

    words: list[str] = []
    monkeypatch.setattr(
        Figure, "savefig", lambda figure, out, format: words.extend(t.get_text() for t in figure.findobj(Text))
    )
    assert draw()
    return words


def test_a_slow_run_is_not_said_to_do_nothing(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = make_run(steps=0, finished=False)
    for step in range(1, 4):
        slow = {"step": step, "epoch": step / 20, "split": "train", "loss": 2.0, "images_per_sec": 0.4}
        fileio.append_jsonl(run_dir.metrics, slow)
    facts = Facts(run_dir, "slow")
    assert "median 0.4" in drawn_text(monkeypatch, lambda: plots.draw_pace(facts, tmp_path / "a.png"))
    assert " 0.4 " in drawn_text(monkeypatch, lambda: plots.draw_comparison([facts], tmp_path / "b.png"))


def test_where_the_loss_was_no_number_the_plot_says_so(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = make_run(steps=20, finished=False)
    for step in (30, 40):
        fileio.append_jsonl(run_dir.metrics, {"step": step, "epoch": step / 20, "split": "train", "loss": None})
    facts = Facts(run_dir, "r")
    assert "loss nan" in drawn_text(monkeypatch, lambda: plots.draw_curves(facts, tmp_path / "a.png"))
    fileio.append_jsonl(run_dir.metrics, {"step": 50, "epoch": 2.5, "split": "train", "loss": 0.5})  # and went on
    assert "loss nan" in drawn_text(monkeypatch, lambda: plots.draw_curves(Facts(run_dir, "r"), tmp_path / "b.png"))


def test_a_speed_that_is_not_compared_has_no_ratio_in_the_picture(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def drawn(*runs: RunDir) -> str:
        facts = [Facts(run, run.name) for run in runs]
        return " ".join(drawn_text(monkeypatch, lambda: plots.draw_comparison(facts, tmp_path / "a.png")))

    first = make_run("a")
    assert f"2.00{TIMES}" in drawn(first, make_run("b", ranks=4, speed=4000.0))
    assert "linear" in drawn(first, make_run("c", ranks=4, speed=4000.0))
    held_up = drawn(first, make_run("d", ranks=4, speed=4000.0, taken=50.0))
    assert TIMES not in held_up
    assert "linear" not in held_up
    assert TIMES not in drawn(make_run("e", steps=0, finished=False), first, make_run("f"))


def test_a_long_name_is_whole_and_leaves_room_for_its_bar(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = Facts(make_run(), "strategy.name=fsdp, train.micro_batch_size=auto")
    words = drawn_text(monkeypatch, lambda: plots.draw_comparison([facts], tmp_path / "a.png"))
    assert "strategy.name=fsdp,\ntrain.micro_batch_size=auto" in words
