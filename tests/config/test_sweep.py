"""The points of a sweep: each is an override of one setting, and trials are drawn alike whenever they are asked for."""

import statistics

import pytest

from trainkit.common.errors import UserError
from trainkit.config.sweep import axis_of, check_prune, check_sampler, sweep_points


def values(text: str, trials: int) -> list[str]:
    return [point[0].partition("=")[2] for point in sweep_points([text], trials)]


def test_trials_are_the_same_each_time_and_more_begin_with_the_fewer() -> None:
    sweeps = ["optim.lr=1e-4..1e-1:log", "model.dropout=0.0..0.5", "schedule.name=wsd,cosine"]
    twenty, forty = sweep_points(sweeps, 20), sweep_points(sweeps, 40)
    assert (len(twenty), forty[:20]) == (20, twenty)
    assert sweep_points(sweeps[::-1], 20) == [point[::-1] for point in twenty], "each setting is drawn by itself"
    assert len({tuple(point) for point in forty}) == 40


def test_a_value_that_is_given_twice_is_one_run() -> None:
    assert [point[0] for point in sweep_points(["optim.lr=1,2,1"], None)] == ["optim.lr=1", "optim.lr=2"]


def test_a_range_is_drawn_from_evenly_or_on_a_logarithmic_scale() -> None:
    even = [float(value) for value in values("optim.weight_decay=0.0..0.5", 1000)]
    assert 0 <= min(even) < 0.01
    assert 0.49 < max(even) <= 0.5
    assert statistics.fmean(even) == pytest.approx(0.25, abs=0.02)
    rates = [float(value) for value in values("optim.lr=1e-4..1e-2:log", 1000)]
    assert 1e-4 <= min(rates) < max(rates) <= 1e-2
    assert statistics.median(rates) == pytest.approx(1e-3, rel=0.2)
    assert set(values("model.width=8..64:log", 200)) <= {str(width) for width in range(8, 65)}
    assert values("optim.lr=1e-4..1e-2:log", 1)[0].replace(".", "").replace("e-", "").isdigit()


def test_of_lists_and_whole_numbers_each_point_is_drawn_once() -> None:
    assert {*values("seed=0..4", 100)} == {*"01234"}
    assert len(values("schedule.name=wsd,cosine", 100)) == 2


@pytest.mark.parametrize(
    ("sweeps", "trials", "says"),
    [
        (["optim.lr=1e-4..1e-1:log"], None, "Add --trials 20"),
        (["optim.lr=0.1..0.5"], None, "Add --trials 20"),
        (["optim.lr=1e-1..1e-4:log"], 5, "A range must increase"),
        (["optim.lr=0..1:log"], 5, "it starts above 0"),
        (["optim.lr=1e-4..1e999"], 5, "no such range"),
        (["optim.lr=0.1"], 0, "--trials 0 is not possible"),
        ([], 5, "--trials 5 is not possible"),
        (["seed=0..9"], 10_001, "1 to 10000"),
        (["launch.nodes=1,2"], 2, "cannot change resources"),
    ],
)
def test_what_cannot_be_drawn_is_said(sweeps: list[str], trials: int | None, says: str) -> None:
    with pytest.raises(UserError, match=says):
        sweep_points(sweeps, trials)


def test_a_sweep_is_pruned_by_2_or_more() -> None:
    check_prune(None, [])
    check_prune(2, ["seed=0..9"])
    for prune, sweeps in ((1, ["seed=0..9"]), (3, [])):
        with pytest.raises(UserError, match=f"--prune {prune} is not possible"):
            check_prune(prune, sweeps)


def test_what_a_sampler_may_choose_is_looked_at_before_jobs_are_queued() -> None:
    pytest.importorskip("optuna")
    sweeps = ["optim.lr=1e-4..1e-1:log", "schedule.name=wsd,cosine", "seed=0..2"]
    words = [
        "optim.lr=1e-4",
        "optim.lr=1e-1",
        "schedule.name=wsd",
        "schedule.name=cosine",
        "seed=0",
        "seed=1",
        "seed=2",
    ]
    assert check_sampler("tpe", sweeps, 20) == words
    assert check_sampler("random", sweeps, None) == []


@pytest.mark.parametrize(
    "sweep", ["data.root=a,b", "model.checkpoint=a.pth,b.pth", "model.name=resnet18,mine:build", "data={},{}"]
)
def test_a_sampler_chooses_no_code_files_or_data(sweep: str) -> None:
    pytest.importorskip("optuna")
    with pytest.raises(UserError, match="--sampler tpe cannot choose"):
        check_sampler("tpe", [sweep], 20)


def test_tpe_needs_a_number_of_trials_and_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    for sampler, trials in (("tpe", None), ("tep", 20)):
        with pytest.raises(UserError, match=f"--sampler {sampler} is not possible"):
            check_sampler(sampler, ["optim.lr=0.1,0.2"], trials)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="needs optuna") as error:
        check_sampler("tpe", ["optim.lr=0.1,0.2"], 20)
    assert error.value.fix == 'pip install "trainkit-vision[sweep]"'


def test_what_is_drawn_lies_between_the_ends_as_they_are_rounded() -> None:
    axis = axis_of("optim.lr=0.12341..0.12346")
    assert axis.ends == (0.1234, 0.1235)
    assert axis.override(0.12346) == "optim.lr=0.1235"
    assert axis_of("train.max_steps=12345..123456:log").ends == (12345, 123456)
