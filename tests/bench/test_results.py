"""From samples to figures, and when none is given: against numbers worked out by hand."""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from trainkit.bench.base import CONTROL, Arm, BenchRequest, Results, SkippedArm
from trainkit.bench.catalogue import bench_of
from trainkit.bench.results import lines, picture, results_of, write_results
from trainkit.common import jsonl
from trainkit.run.folder import BenchDir

STEADY = [1.0, 1.01, 0.99, 1.0, 1.02]
NOISY = [1.0, 1.25, 0.8, 1.0, 1.0]
"""To itself: 1.00 in the middle, 0.8 to 1.25."""


def records(
    seconds: dict[str, list[float]], memory: dict[str, float] | None = None, *, ended: bool = True,
    about: Callable[[str], dict[str, Any]] = lambda name: {},
) -> list[dict[str, Any]]:  # fmt: skip
    """As a job writes them: what each arm took in each round; the control's are under its own name.

    ``about``: further fields of an arm of that name.
    """
    names = [name for name in seconds if name != CONTROL]
    arms, left_out = [asdict(Arm(name)) | about(name) for name in names], [asdict(SkippedArm("tf32", "not here"))]
    lines: list[dict[str, Any]] = [
        {"kind": "began", "where": "1 rank on here, cpu", "arms": arms, "notes": [], "left_out": left_out}
    ]
    for name, taken in seconds.items():
        peak = (memory or {}).get(names[0] if name == CONTROL else name, 100.0)
        for number, one in enumerate(taken):
            sample = {"kind": "sample", "arm": name, "round": number, "images": 640, "seconds": one, "updates": 10}
            lines.append(sample | {"memory_mb": [peak, 1.0], "loss": 1.0})
    return [*lines, {"kind": "ended", "why": ""}] if ended else lines


def results(told: list[dict[str, Any]], name: str = "amp", rounds: int = 5) -> Results:
    return results_of(bench_of(name), BenchRequest(name, "ddp", rounds=rounds), told)


def test_a_ratio_is_the_median_over_rounds_to_the_mean_of_the_firsts_turns() -> None:
    told = results(records({"fp32": [2.0, 4.0, 2.0], "bf16": [1.0, 1.0, 1.0], CONTROL: [2.0, 4.0, 2.1]}))
    row = told.rows[1]
    assert row.ratios == pytest.approx([2.0, 4.0, 2.05])  # (2 + 2) / 2 / 1, (4 + 4) / 2 / 1, (2 + 2.1) / 2 / 1
    assert row.ratio == pytest.approx(2.05)
    assert told.rows[0].rates == pytest.approx([320.0, 160.0, 320.0])
    beyond = results(records({"fp32": [1.0] * 5, "bf16": [0.5] * 5, CONTROL: NOISY}))
    assert beyond.rows[1].ratio == pytest.approx(2.0, rel=0.01), "of more than the first arm differs from itself"


@pytest.mark.parametrize(
    ("seconds", "taken", "why"),
    [
        ([1.07] * 5, 0.0, "the control is off, fp32 against itself came to 0.93 x: other programs use this machine"),
        (NOISY, 0.0, "bf16 came to 1.20 x, which is within the spread of the first arm (0.80 to 1.25 x)"),
        ([1.0] * 2, 0.0, "2 complete rounds are too few; 3 are needed"),
        ([1.0] * 5, 72.4, "the CPUs were taken: others had 72 % of the time that it wanted"),
    ],
)
def test_no_ratio_where_it_cannot_be_believed(seconds: list[float], taken: float, why: str) -> None:
    told = records({"fp32": [1.0] * len(seconds), "bf16": [1 / 1.2] * len(seconds), CONTROL: seconds})
    said = results([{**one, "cpu_taken": taken} if one["kind"] == "sample" else one for one in told])
    assert said.rows[1].ratio is None
    assert said.rows[1].why_none == why
    assert why in said.meaning
    assert not [line for line in lines(said)[:-1] if line.startswith("bf16") and " x" in line]


def in_series(name: str) -> dict[str, Any]:
    """A number at the front of an arm's name is its size, and its number of ranks where the name says so."""
    word = name.partition(" ")[0]
    about: dict[str, Any] = {"size": int(word), "overrides": [f"data.workers={word}"]} if word.isdecimal() else {}
    if "rank" in name:
        about |= {"ranks": list(range(int(word))), "series": "same batch for all"}
    return about | ({"series": "between"} if name.startswith("between") else {})


ANSWERS = {
    "a faster format is recommended, with its memory": (
        "amp",
        {"fp32": STEADY, "bf16": [0.5] * 5, CONTROL: STEADY[::-1]},
        "bf16 trains 2.01 x as fast as fp32 here and takes 0.60 of the memory; use train.precision=bf16. "
        "All come to the same loss after 10 updates.",
    ),
    "a slower one is not": (
        "amp",
        {"fp32": STEADY, "bf16": [2.0] * 5, CONTROL: STEADY[::-1]},
        "Nothing is clearly faster than fp32 here, bf16 trains 0.50 x as fast; use train.precision=fp32. "
        "All come to the same loss after 10 updates.",
    ),
    "an arm whose rounds contradict each other is passed over": (
        "strategy",
        {"single": STEADY, "ddp": [0.5, 1.3, 0.5, 0.6, 1.2], "fsdp": [2.0] * 5, CONTROL: STEADY[::-1]},
        "Nothing is clearly faster than single here, fsdp trains 0.50 x as fast; use strategy.name=single. "
        "All come to the same loss after 10 updates.",
    ),
    "batches are recommended up to where they hardly gain": (
        "batch-size",
        {"64": [1.0] * 3, "128": [0.5] * 3, "256": [0.49] * 3, "512": [0.6] * 3, CONTROL: [1.0] * 3},
        "Micro batches of 128 train 2.00 x as fast as 64 here, larger ones hardly faster, and the largest that ran is "
        "512; use train.micro_batch_size=128.",
    ),
    "runs that share a device well": (
        "sharing",
        {"1": [1.0] * 3, "2": [0.5] * 3, "4": [0.4] * 3, CONTROL: [1.0] * 3},
        "4 side by side train 2.50 x as many images a second as 1; use launch.runs_per_gpu=4.",
    ),
    "runs that take a whole device each": (
        "sharing",
        {"1": [1.0] * 3, "2": [1.25] * 3, CONTROL: [1.0] * 3},
        "2 side by side train 0.80 x as many images a second as 1: no gain.",
    ),
    "data that keeps up": (
        "loader",
        {"model alone": [1.0] * 3, "0 workers": [2.0] * 3, "2 workers": [1.01] * 3, CONTROL: [1.0] * 3},
        "The data keeps up: with 2 workers the model trains at 0.99 of what it does fed from memory; use "
        "data.workers=2.",
    ),
    "data that does not": (
        "loader",
        {"model alone": [1.0] * 3, "0 workers": [4.0] * 3, "2 workers": [2.0] * 3, CONTROL: [1.0] * 3},
        "The data does not keep up: with 2 workers the model trains at 0.50 of what it does fed from memory, and more "
        "processes gain nothing; use data.workers=2; image files can be packed (python -m jobs.prepare DATASET --pack "
        "256).",
    ),
    "more ranks, with their efficiency": (
        "scaling",
        {"1 rank": [1.0] * 3, "4 ranks": [0.4] * 3, CONTROL: [1.0] * 3},
        "4 ranks train 2.50 x as fast as 1 rank with the same batch (efficiency 62 %); 0 % of an update is "
        "communication that computation does not hide: they help.",
    ),
    "ranks that are faster than they are more": (
        "scaling",
        {"1 rank": [20.0] * 5, "2 ranks": [1.0] * 5, CONTROL: [20.0] * 5},
        "No difference can be measured here: 2 ranks came to 20.00 x with 2 x the ranks, so something slowed 1 rank "
        "down.",
    ),
    "the network roughly, where the control is off": (
        "network",
        {"between, 1.0 MB": [1.0] * 3, "between, gradients, 4.0 MB": [2.0] * 3, CONTROL: [1.2] * 3},
        "An all-reduce moves roughly 5 GB/s between nodes; exchanging this model's gradients (4.0 MB) takes 2 ms an "
        "update.",
    ),
}


@pytest.mark.parametrize(("name", "seconds", "answer"), ANSWERS.values(), ids=ANSWERS)
def test_the_answer_is_one_sentence(name: str, seconds: dict[str, list[float]], answer: str) -> None:
    told = records(seconds, {"fp32": 100.0, "bf16": 60.0}, about=in_series)
    if name == "network":
        for one in told[1:-1]:
            one["bytes"], one["extra"] = 5e9, {"seconds": one["seconds"] / 1000}
    assert results(told, name).meaning == answer


def test_a_job_that_was_killed_keeps_what_it_had_measured_and_says_so() -> None:
    told = results(records({"fp32": [1.0] * 4, "bf16": [0.5] * 3, CONTROL: [1.0] * 3}, ended=False), rounds=7)
    assert told.rows[1].ratio == pytest.approx(2.0)
    assert "Note: It has not finished: 3 of 7 rounds are complete." in lines(told)


def test_an_arm_that_failed_stands_in_the_table_with_its_reason() -> None:
    told = records({"fp32": [1.0] * 3, "bf16": [], CONTROL: [1.0] * 3})
    told.append({"kind": "failed", "arm": "bf16", "why": "\x1b]0;gotcha\x07out of memory: tried to allocate 2 GiB"})
    (line,) = [line for line in lines(results(told)) if line.startswith("bf16")]
    assert line.endswith("out of memory: tried to allocate 2 GiB")
    assert "\x1b" not in line, "nothing that a terminal would obey reaches it"
    assert "only fp32 could run here" in lines(results(told))[-1]


def test_batches_of_which_each_failed_half_way_are_told_without_one() -> None:
    failed = [{"kind": "failed", "arm": name, "why": "out of memory"} for name in ("64", "128")]
    told = records({"64": [1.0] * 3, "128": [0.5] * 3, CONTROL: [1.0] * 3}, about=in_series)
    assert "the largest" not in results([*told, *failed], "batch-size").meaning


def test_a_loss_that_is_worse_is_said() -> None:
    told = records({"fp32": STEADY, "fp16": [0.5] * 5, CONTROL: STEADY})
    for one in told:
        if one.get("arm") == "fp16":
            one["loss"] = 1.5
    assert results(told).meaning.endswith(". But after 10 updates the loss differs: fp32 1, fp16 1.5.")
    next(one for one in told if one.get("arm") == "fp16")["loss"] = None  # in one round of five
    assert results(told).meaning.endswith(". But after 10 updates the loss differs: fp32 1, fp16 not finite.")


@pytest.mark.parametrize("text", ["", "{}\n[1]\nnull\n", '{"kind": "sample"}\n', '{"kind": "began"'])
def test_samples_that_are_empty_torn_or_foreign_are_no_traceback(text: str, tmp_path: Path) -> None:
    run = BenchDir(tmp_path)
    run.request.write_text(BenchRequest("amp", "ddp").to_json())
    run.samples.write_text(text)
    told = write_results(run)
    assert run.results.exists()
    assert not run.picture.exists()
    assert "There is nothing to compare yet" in lines(told)[-1]


def test_results_hold_all_samples_and_a_picture_is_drawn(tmp_path: Path) -> None:
    run = BenchDir(tmp_path)
    run.request.write_text(BenchRequest("amp", "ddp").to_json())
    told = records({"fp32": STEADY, "bf16": [0.5] * 5, CONTROL: STEADY})
    for one in told:
        jsonl.append_jsonl(run.samples, one)
    write_results(run)
    assert [one for one in told if one["kind"] == "sample"] == json.loads(run.results.read_text())["samples"]
    words = " ".join(ElementTree.parse(run.path / "bench.svg").getroot().itertext())
    for part in ("Does mixed precision help here?", "fp32", "bf16", "1,280", "use train.precision=bf16."):
        assert part in words
    assert "Speed-up" not in words


def test_the_picture_of_scaling_has_the_speed_up_by_ranks() -> None:
    seconds = {"1 rank": [1.0] * 3, "2 ranks": [0.6] * 3, "4 ranks": [0.4] * 3, CONTROL: [1.0] * 3}
    drawn = picture(results(records(seconds, about=in_series), "scaling"))
    assert "linear from 1 at ranks 1 to 4 at 4; same batch for all from 1 at ranks 1 to 2.5 at 4" in drawn
