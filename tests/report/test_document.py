"""Charts: where values are, what is named, and that files with them stand alone."""

import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from trainkit.report import charts
from trainkit.report.charts import Axes, Bar, Picture, Scale, Series, bar_chart, drawing, line_chart

LOSS = Axes("Loss", "", "epoch", may_be_log=True)


def body(picture: Picture | None) -> str:
    assert picture is not None
    return drawing([picture])


def ticks(picture: Picture | None, side: str) -> list[str]:
    """Numbers at the vertical ("end") or horizontal ("middle") axis."""
    return re.findall(rf'class="tick {side}">([^<]*)', body(picture))


def test_without_a_number_there_is_no_chart() -> None:
    assert line_chart(LOSS, [Series("a", [])]) is None
    assert line_chart(LOSS, [Series("a", [(0.0, float("nan"))]), Series("b", [(0.0, 1e999)])]) is None
    assert bar_chart("Speed", "", []) is None
    assert bar_chart("Speed", "", [Bar("a", 0.0)]) is None
    assert drawing([None]) == ""


def test_the_numbers_at_an_axis_are_those_of_its_lines() -> None:
    chart = line_chart(Axes("Loss", "", "step"), [Series("a", [(0.0, 2.31), (1.0, 2.312)])])
    assert ticks(chart, "end") == ["2.31", "2.3105", "2.311", "2.3115", "2.312", "step"]


@pytest.mark.parametrize("least", [0.02, 1e-7])
def test_a_logarithmic_axis_has_room_for_its_numbers(least: float) -> None:
    chart = line_chart(LOSS, [Series("a", [(0.0, 2.0), (1.0, least)])])
    assert chart is not None
    assert chart.data["data-log"] == "y"
    assert 4 <= len(ticks(chart, "end")) - 1 <= 7


@pytest.mark.parametrize(("longest", "named"), [(10, [0, 2, 4, 6, 8, 10]), (25, [0, 5, 10, 15, 20, 25]), (3, None)])
def test_an_axis_is_counted_in_round_numbers(longest: int, named: list[float] | None) -> None:
    assert Scale(0.0, float(longest), 0, 1).ticks(6) == (named or [0, 0.5, 1, 1.5, 2, 2.5, 3])


def paths(drawn: str, style: str) -> list[str]:
    return re.findall(rf'<path d="([^"]*)" class="{style}"', drawn)


def test_a_long_curve_keeps_its_extremes_and_its_trend_has_no_spikes() -> None:
    points = [(float(x), 1.0) for x in range(5000)]
    points[1234] = (1234.0, 99.0)
    drawn = body(line_chart(LOSS, [Series("a", points)]))
    places = re.findall('data-name="a" data-x="([^"]*)"', drawn)[0].split()
    assert "1234" in places
    assert len(places) < 1000
    (trend,) = paths(drawn, "line")
    assert len(set(re.findall(r"[ML]\S+ ([\d.]+)", trend))) == 1


@pytest.mark.parametrize(("lost", "pauses", "parts"), [([], [], 1), ([2.0], [], 2), ([0.5], [2.0], 3)])
def test_no_line_is_drawn_over_a_place_without_a_value(lost: list[float], pauses: list[float], parts: int) -> None:
    curve = Series("a", [(0.0, 1.0), (1.0, 2.0), (3.0, 3.0)], lost=lost, pauses=pauses)
    assert paths(body(line_chart(LOSS, [curve])), "line")[0].count("M") == parts


@pytest.mark.parametrize("end", [0.5, 2.0])
def test_labels_at_the_end_of_equal_curves_are_apart(end: float) -> None:
    equal = [Series(f"run {n}", [(0.0, 1.0), (1.0, end)], n, label=f"run {n}") for n in range(3)]
    places = [float(y) for y in re.findall(r'y="([-\d.]+)" dy="0.35em" class="label"', body(line_chart(LOSS, equal)))]
    assert min(b - a for a, b in pairwise(places)) > 13.9
    assert 0 < min(places) < max(places) <= charts.HEIGHT - 30, "though the curves end at the top, or at the bottom"


def test_bars_are_as_long_as_their_values_and_say_them() -> None:
    picture = bar_chart("Speed", "images/s", [Bar("a", 50.0, "50"), Bar("b", 100.0, spread=(90.0, 110.0))])
    widths = [float(width) for width in re.findall(r'width="([\d.]+)%" height="13" class="part', body(picture))]
    assert widths[0] * 2 == pytest.approx(widths[1], abs=0.02)
    assert picture is not None
    assert picture.words == "Speed: a 50; b 100"
    assert body(picture).count('class="whisker"') == 1


def test_a_bar_below_zero_has_no_length_and_its_spread_begins_at_zero() -> None:
    drawn = body(bar_chart("Gain", "%", [Bar("a", -50.0, spread=(-60.0, 20.0)), Bar("b", 100.0)]))
    assert re.findall(r'width="([-\d.]+)%" height="13" class="part', drawn) == ["0", "72"]
    assert re.findall(r'<line x1="([-\d.]+)%" x2="([-\d.]+)%"', drawn) == [("0", "14.4")]
    assert ">-50</text>" in drawn


def test_a_file_stands_alone_and_what_a_run_says_in_it_is_text() -> None:
    hostile = "</text><script>alert(1)</script>\x1b[31m\ud800\u202e\u2066 & <b>"
    bars, lines = bar_chart(hostile, hostile, [Bar(hostile, 1.0)]), line_chart(LOSS, [Series(hostile, [(0.0, 1.0)])])
    text = drawing([bars, lines], title=hostile, legend=[(hostile, 0)], foot=hostile)
    whole = ElementTree.fromstring(text.encode())
    names = {element.tag.rpartition("}")[2] for element in whole.iter()}
    assert names <= {"svg", "style", "rect", "text", "tspan", "path", "line", "circle", "g"}
    assert not re.search(r"(?:href|src|url\()|[\u202a-\u202e\u2066-\u2069]|\[31m", text)
    words = [element.text for element in whole.iter() if element.text]
    assert len([word for word in words if "<script>alert(1)</script>" in word]) >= 4
