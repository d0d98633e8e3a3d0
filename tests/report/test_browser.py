"""`report.html` in a browser, opened from disk: of a real run, of several, of hostile ones."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.rank_functions import run_ranks, train_run
from tests.report.browser import Browser, chromium
from tests.report.conftest import write_run, write_sweep_of
from tests.report.test_writers import HOSTILE, confusion
from trainkit.report.collection import collect
from trainkit.report.writers import write_page
from trainkit.run.folder import RunDir
from trainkit.run.metrics import read_metrics

LOSS = "document.querySelector('figure.chart svg')"
READOUT = "document.querySelector('figure.chart .readout').innerText"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with chromium(tmp_path_factory.mktemp("chromium")) as found:
        yield found


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """A real training on digits."""
    path = tmp_path_factory.mktemp("runs") / "single-0001"
    run_ranks(1, train_run, path, "single", ("train.epochs=4", "monitor.log_every=5"))
    return RunDir(path)


@pytest.fixture(scope="module")
def page(run: RunDir) -> Path:
    return write_page(collect([run]), run.path)


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of an interrupted run with GPUs, a smaller one, and a stranger's with long and hostile names."""
    folder = tmp_path_factory.mktemp("several")
    first = write_run(folder / "ddp-0001", ranks=4, speed=3500.0, gpus=2, restarts=(150, 300))
    second = write_run(folder / "single-0002", "optim.lr=1e-3", ranks=1, speed=1000.0)
    third = write_run(folder / f"<script>hacked=1</script>{'long' * 12}", "train.label_smoothing=0.1")
    confusion(third, [f"{HOSTILE}{at} <img src=x onerror=hacked=2>" for at in range(12)], [[1, 2, 3], [4, 4, 9]])
    (first.path / "nvidia-smi-node1.txt").write_text(HOSTILE)
    confusion(first, ["cat", "dog", "owl"], [[0, 0, 8], [0, 1, 2], [1, 1, 5], [2, 2, 9]])
    return write_page(collect([first, second, third]), folder)


def reading(browser: Browser) -> dict[str, str]:
    """The read-out of the first chart, line by line: the place under the name of the axis."""
    first, *lines = [line for line in str(browser.tell(READOUT)).splitlines() if line]
    axis, _, at = first.partition(" ")
    return {axis: at, **dict(zip(lines[::2], lines[1::2], strict=True))}


def recorded(run: RunDir, split: str, epoch: float) -> float:
    """The loss in metrics.jsonl."""
    (record,) = [record for record in read_metrics(run, split) if record["epoch"] == epoch]
    return float(record["loss"])


def point_at(browser: Browser, chart: str, x: float) -> None:
    """Move the mouse over that place of a chart's horizontal axis."""
    browser.tell(f"{chart}.scrollIntoView({{block: 'center'}})")
    place: dict[str, Any] = browser.tell(
        f"(() => {{ const svg = {chart}, box = svg.getBoundingClientRect();"
        "const [left, right] = svg.dataset.plot.split(' ').map(Number);"
        "const [low, high] = svg.dataset.range.split(' ').map(Number);"
        f"const at = left + ({x} - low) / (high - low) * (right - left);"
        "return {x: box.left + at / svg.viewBox.baseVal.width * box.width, y: box.top + box.height / 2}; })()"
    )
    browser.mouse(place["x"], place["y"])


@pytest.mark.parametrize("which", ["page", "several"])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_it_asks_for_nothing_but_itself_and_is_silent(
    browser: Browser, which: str, dark: bool, request: pytest.FixtureRequest
) -> None:
    browser.open(request.getfixturevalue(which), dark=dark)
    unnamed = "[...document.querySelectorAll('svg:not([aria-hidden])')].filter(item => !item.ariaLabel).length"
    unnamed += " + [...document.querySelectorAll('img')].filter(item => !item.alt).length"
    assert browser.tell(unnamed) == 0, "every picture says in words what it shows"
    asked = [url for url in browser.requests() if not url.startswith("data:image/png;")]
    assert asked == [request.getfixturevalue(which).as_uri()]
    assert browser.complaints() == []
    assert browser.tell("typeof hacked") == "undefined"


def test_the_mouse_reads_the_numbers_of_metrics_jsonl(browser: Browser, page: Path, run: RunDir) -> None:
    browser.open(page)
    point_at(browser, LOSS, 3.0)
    told = reading(browser)
    assert told["epoch"] == "3"
    assert float(told["val"]) == pytest.approx(recorded(run, "val", 3.0), rel=1e-4)
    value, _, where = told["train"].partition(" ")  # there is no train record at that very step
    assert float(value) == pytest.approx(recorded(run, "train", float(where.strip("()"))), rel=1e-4)
    browser.mouse(1, 1)
    assert browser.tell("document.querySelector('.readout').hidden") is True


def test_the_mouse_reads_a_logarithmic_axis(browser: Browser, tmp_path: Path) -> None:
    rates = ("1e-4", "1e-3", "1e-2", "1e-1")
    runs = [write_run(tmp_path / "s" / str(n), f"optim.lr={rate}", steps=40) for n, rate in enumerate(rates)]
    write_sweep_of(tmp_path / "s", *((f"optim.lr={rate}",) for rate in rates))
    browser.open(write_page(collect(runs), tmp_path))
    third = "Number(document.querySelectorAll('figure.chart svg circle')[2].getAttribute('cx'))"
    low, high, left, right = (
        browser.tell(f"Number({LOSS}.dataset.{data}.split(' ')[{at}])")
        for data, at in (("range", 0), ("range", 1), ("plot", 0), ("plot", 1))
    )
    at = (browser.tell(third) - left) / (right - left)
    point_at(browser, LOSS, low + at * (high - low))  # the place on the screen where the third run's dot is
    assert reading(browser)["optim.lr"] == "0.01"


def test_the_read_outs_of_all_curves_move_together(browser: Browser, page: Path) -> None:
    browser.open(page)
    point_at(browser, LOSS, 2.0)
    heads = browser.tell("[...document.querySelectorAll('#curves .readout b')].map(item => item.textContent)")
    assert len(heads) == 5
    assert all(float(head.split(" ")[1]) == pytest.approx(2.0, abs=0.2) for head in heads)


def test_keys_move_the_read_out_and_a_screen_reader_is_told(browser: Browser, page: Path, run: RunDir) -> None:
    browser.open(page)
    for _ in range(30):
        browser.press("Tab")
        if browser.tell(f"document.activeElement === {LOSS}"):
            break
    else:
        pytest.fail("the chart is not reached by Tab")
    browser.press("End")
    assert float(reading(browser)["val"]) == pytest.approx(recorded(run, "val", 4.0), rel=1e-4)
    browser.press("Home")
    first = reading(browser)["epoch"]
    browser.press("ArrowRight")
    second = float(reading(browser)["epoch"])
    steps = sorted({record["epoch"] for split in ("train", "val") for record in read_metrics(run, split)})
    assert [float(first), second] == pytest.approx(steps[:2], rel=1e-4)
    browser.press("ArrowLeft")
    assert reading(browser)["epoch"] == first
    spoken = browser.tell(f"{LOSS}.getAttribute('role') + ' ' + {LOSS}.getAttribute('aria-valuetext')")
    assert re.fullmatch(rf"slider epoch {first}: train [\d.]+", spoken), spoken
    browser.press("Escape")
    assert browser.tell("document.querySelector('.readout').hidden") is True


def luminance(colour: str) -> float:
    """Of ``rgb(r, g, b)``, as WCAG has it."""
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(browser: Browser, selector: str, what: str) -> float:
    paper, colour = browser.tell(
        "[getComputedStyle(document.body).backgroundColor,"
        f" getComputedStyle(document.querySelector('{selector}')).{what}]"
    )
    dark, light = sorted((luminance(paper), luminance(colour)))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_it_is_light_or_dark_as_preferred_and_readable(browser: Browser, several: Path, dark: bool) -> None:
    browser.open(several, dark=dark)
    assert (luminance(browser.tell("getComputedStyle(document.body).backgroundColor")) < 0.1) == dark
    for selector, what in (("h1", "color"), (".note", "color"), ("thead th", "color"), ("svg .tick", "fill")):
        assert contrast(browser, selector, what) > 4.5, selector
    for colour in range(3):
        assert contrast(browser, f".series.c{colour} .line", "stroke") > 3, colour


@pytest.mark.parametrize("which", ["page", "several"])
def test_on_a_phone_nothing_is_wider_than_the_screen(
    browser: Browser, which: str, request: pytest.FixtureRequest
) -> None:
    browser.open(request.getfixturevalue(which), width=390)
    assert browser.tell("document.documentElement.scrollWidth") == 390
    wide = browser.tell(
        "[...document.querySelectorAll('main *, header *')].filter(item => !item.closest('.scroll'))"
        ".filter(item => item.getBoundingClientRect().right > 390).map(item => item.outerHTML.slice(0, 200))"
    )
    assert wide == []
    sizes = browser.tell(
        "[...document.querySelectorAll('figure.chart svg text')].map(item =>"
        " parseFloat(getComputedStyle(item).fontSize) * item.ownerSVGElement.getBoundingClientRect().width / 400)"
    )
    assert min(sizes) > 9.5


def test_it_prints_on_white_with_everything_unfolded(browser: Browser, several: Path) -> None:
    browser.open(several, dark=True)
    browser.media("print", dark=True)
    assert luminance(browser.tell("getComputedStyle(document.body).backgroundColor")) == pytest.approx(1.0)
    assert browser.tell("getComputedStyle(document.querySelector('nav')).display") == "none"
    browser.media(dark=True)
    assert browser.pdf().startswith(b"%PDF")
    assert set(browser.tell("[...document.querySelectorAll('details')].map(item => item.open)")) == {True}


def test_the_images_that_were_told_wrong_are_there(browser: Browser, page: Path, run: RunDir) -> None:
    found = [json.loads(run.mistakes(split).read_text())["images"] for split in ("val", "test")]
    assert any(found)
    browser.open(page)
    images = "[...document.querySelectorAll('.gallery img')]"
    whole = browser.tell(f"{images}.map(item => item.complete && item.naturalWidth)")
    assert whole == [8] * sum(map(len, found))
