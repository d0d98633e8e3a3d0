"""When a run waited, ran, saved and was interrupted: one lane a run, and its events in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from trainkit import fileio
from trainkit.report.drawing import time_unit
from trainkit.report.facts import Facts
from trainkit.report.page_markup import Html, section, table, tag
from trainkit.report.page_scales import linear_ticks, shown
from trainkit.report.tables import NONE, Row, duration

_MOST_LANES, _MOST_ROWS, _MOST_MARKS = 40, 100, 300
_LANE = 22
# kind of event -> what marks it on the time line, and its colour; in shapes that differ, for colours may not be seen
_GLYPHS = {
    "handed_back": ("▲", 4, "told to stop, saved"),
    "requeued": ("↻", 0, "put back into the queue"),
    "failed": ("✕", 1, "failed"),
    "cancelled": ("■", 1, "cancelled"),
    "excluded": ("⊘", 3, "a node is left out"),
    "nonfinite": ("!", 1, "not finite"),
    "rolled_back": ("↶", 3, "went back to a checkpoint"),
}
_WORDS = {
    "submitted": "queued", "refused": "refused", "started": "training begins", "ended": "ended",
    "swarm_lost": "has lost the swarm", "swarm_back": "is back in the swarm", "save_failed": "a save failed",
    "upload_failed": "the copy elsewhere failed",
} | {kind: words for kind, (_, _, words) in _GLYPHS.items()}  # fmt: skip


@dataclass
class _Attempt:
    began: float
    ended: float
    bad: bool = False


@dataclass
class _Lane:
    """What a run's events say about its time."""

    facts: Facts
    began: float
    ended: float
    attempts: list[_Attempt] = field(default_factory=list)
    marks: list[dict[str, Any]] = field(default_factory=list)
    saved: list[float] = field(default_factory=list)


def timeline(runs: Sequence[Facts]) -> Html:
    """The section with the time lines."""
    lanes = [lane for facts in runs if (lane := _lane(facts))]
    if not lanes:
        return Html()
    longest = max(lane.ended - lane.began for lane in lanes)
    pictures: list[object] = []
    for lane in lanes[:_MOST_LANES]:
        head = f"{lane.facts.label}: {_said(lane)}" if len(runs) > 1 else _said(lane)
        pictures.append(tag("p", head, class_="note"))
        pictures += [_picture(lane, longest)] * (lane.ended > lane.began)
    pictures += [_axis(longest)] * (longest > 0)
    happened = [_rows(lane) for lane in lanes]
    marked = {event["event"] for lane in lanes[:_MOST_LANES] for event in _apart(lane.marks, longest)}
    note = "From the first submission. Bars: training; dotted: waiting; ticks: checkpoints. " + " ".join(
        f"{glyph} {words}." for kind, (glyph, _, words) in _GLYPHS.items() if kind in marked
    )
    tables = [
        table(("after", "event", ""), rows, caption=lane.facts.label if len(lanes) > 1 else "What happened")
        for lane, rows in zip(lanes, happened, strict=True)
        if rows
    ][:_MOST_LANES]
    if len(tables) > 3:
        tables = [tag("details", tag("summary", "What happened, run by run"), *tables)]
    return section("timeline", "Time line", tag("div", *pictures, class_="lanes"), *tables, note=note)


def _lane(facts: Facts) -> _Lane | None:
    events = [event for event in facts.events if fileio.is_time(event.get("time"))]
    told = [record["time"] for record in (*facts.train[-1:], *facts.val[-1:]) if fileio.is_time(record.get("time"))]
    starts = [event["time"] for event in events if event["event"] in ("submitted", "started")]
    if not starts:
        return None
    lane = _Lane(facts, min(starts), max([*told, *(event["time"] for event in events)]))
    last = lane.began
    for event in events:
        kind, at = event["event"], event["time"]
        running = lane.attempts and lane.attempts[-1].ended < 0
        if kind == "started":
            if running:
                lane.attempts[-1].ended = last
                lane.attempts[-1].bad = True  # nobody has said how it ended
            lane.attempts.append(_Attempt(at, -1.0))
        elif running and kind in ("ended", "handed_back", "requeued", "failed"):
            lane.attempts[-1].ended = at
            lane.attempts[-1].bad = kind == "failed" or event.get("state") not in (None, "COMPLETED", "PREEMPTED")
        if kind in _GLYPHS:
            lane.marks.append(event)
        elif kind == "saved":
            lane.saved.append(at)
        last = max(last, at)
    for attempt in lane.attempts:
        attempt.ended = lane.ended if attempt.ended < 0 else attempt.ended
    return lane


def _said(lane: _Lane) -> str:
    facts = lane.facts
    if not facts.begun:
        waited = lane.ended - lane.began
        return f"It has not begun, {duration(waited)} after it was queued." if waited > 0 else "It has not begun."
    running = sum(attempt.ended - attempt.began for attempt in lane.attempts)
    words = [f"{facts.attempts} attempt{'s' if facts.attempts != 1 else ''}", f"{duration(running)} of training"]
    waited = lane.ended - lane.began - running
    if waited > 0.02 * running:
        words.append(f"{duration(waited)} waiting and starting")
    if facts.requeues:
        words.append(f"{facts.requeues} requeue{'s' if facts.requeues != 1 else ''}")
    return ", ".join(words) + "."


def _picture(lane: _Lane, longest: float) -> Html:
    def at(time: float) -> str:
        return f"{100 * min(1.0, max(0.0, (time - lane.began) / (longest or 1.0))):.2f}%"

    marks = _apart(lane.marks, longest)
    top = 16 if marks else 2
    middle = top + _LANE / 2
    ends = [lane.began, *(attempt.ended for attempt in lane.attempts)]
    begins = [*(attempt.began for attempt in lane.attempts), lane.ended]
    found = [
        tag("line", x1=at(before), x2=at(after), y1=middle, y2=middle, class_="waiting")
        for before, after in list(zip(ends, begins, strict=True))[:_MOST_MARKS]
        if after > before
    ]
    for attempt in lane.attempts[:_MOST_MARKS]:
        width = f"{max(0.15, 100 * (attempt.ended - attempt.began) / (longest or 1.0)):.2f}%"
        style = "attempt bad" if attempt.bad else "attempt"
        found.append(tag("rect", x=at(attempt.began), y=top, width=width, height=_LANE, rx=2, class_=style))
    every = max(1, len(lane.saved) // _MOST_MARKS)
    for time in lane.saved[::every]:
        found.append(tag("line", x1=at(time), x2=at(time), y1=top + _LANE - 6, y2=top + _LANE, class_="saved"))
    for event in marks:
        glyph, colour, words = _GLYPHS[event["event"]]
        said = tag("title", f"{words}, after {duration(event['time'] - lane.began)}")
        found.append(tag("text", glyph, said, x=at(event["time"]), y=12, class_=f"glyph c{colour}"))
    label = f"Time line of {lane.facts.label}: {_said(lane)}"
    return tag("svg", *found, width="100%", height=top + _LANE + 2, role="img", aria_label=label, class_="fluid")


def _apart(events: Sequence[dict[str, Any]], longest: float) -> list[dict[str, Any]]:
    """Those that are shown, no two marks on each other: of several in one place a failure, else the first."""
    kept: list[dict[str, Any]] = []
    for event in sorted(events, key=lambda event: float(event["time"])):
        if kept and event["time"] - kept[-1]["time"] < 0.015 * longest:
            if event["event"] == "failed":
                kept[-1] = event
            continue
        kept.append(event)
    return kept[:_MOST_MARKS]


def _axis(longest: float) -> Html:
    unit, seconds = time_unit(longest)
    ticks = linear_ticks(0.0, longest / seconds, 6)
    found = []
    for tick in ticks:
        share = 100 * tick * seconds / (longest or 1.0)
        anchor = "" if share < 3 else " end" if share > 96 else " middle"
        text = f"{shown(tick)} {unit}" if tick == ticks[-1] or not tick else shown(tick)
        found.append(tag("text", text, x=f"{share:.2f}%", y=13, class_="tick" + anchor))
    return tag("svg", *found, width="100%", height=18, aria_hidden="true", class_="fluid")


def _rows(lane: _Lane) -> list[Row]:
    told: list[dict[str, Any]] = []
    for event in lane.facts.events:
        said = [(told[-1]["event"], told[-1].get("state"))] if told else []
        if ("ended", event.get("state")) in said and event["event"] == "ended":
            continue  # the ranks and who looks after them may both have the last word
        if event["event"] in _WORDS and fileio.is_time(event.get("time")):
            told.append(event)
    left_out = max(0, len(told) - _MOST_ROWS)
    shown_ones = told[: _MOST_ROWS // 2] + told[-_MOST_ROWS // 2 :] if left_out else told
    rows: list[Row] = []
    for event in shown_ones:
        after = duration(max(0.0, event["time"] - lane.began))
        rows.append((after, _WORDS[event["event"]], _details(event)))
    if left_out:
        rows.insert(_MOST_ROWS // 2, ("", f"{left_out} more", ""))
    if told:
        when = datetime.fromtimestamp(lane.began).astimezone().strftime("%Y-%m-%d %H:%M:%S %Z")
        rows[0] = (rows[0][0], rows[0][1], ", ".join(part for part in (rows[0][2], when) if part))
    return rows


def _details(event: dict[str, Any]) -> str:
    words = []
    if event["event"] == "submitted":
        words.append(f"job {event.get('job_id', NONE)}, {event.get('executor', NONE)}")
    elif "attempt" in event:
        words.append(f"attempt {event['attempt']}")
    if event["event"] == "started" and isinstance(event.get("world_size"), int):
        ranks = event["world_size"]
        words.append(f"{ranks} rank{'s' if ranks != 1 else ''} on {', '.join(event.get('hosts') or ['?'])}")
    if event.get("step"):
        words.append(f"step {event['step']}")
    if event.get("signals"):
        words.append(", ".join(map(str, event["signals"])))
    if event.get("rank") is not None:
        words.append(f"rank {event['rank']}")
    words += [str(event[key]) for key in ("host", "node", "state", "why", "error") if event.get(key)]
    return ", ".join(words)
