"""Metrics as text: the one place that decides how numbers look on a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def duration(seconds: float) -> str:
    """``0:07``, ``12:34``, ``1:02:03``, ``2d 03:04:05``."""
    whole = max(0, round(seconds))
    minutes, second = divmod(whole, 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}d {hour:02}:{minute:02}:{second:02}"
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def number(value: Any, spec: str, unit: str = "") -> str:
    """A number in ``spec``; ``nan`` for what the record holds as null, because JSON has no NaN."""
    return ("nan" if value is None else format(value, spec)) + unit


def metric_words(record: Mapping[str, Any]) -> list[str]:
    """The measured values of a record, each with its name and unit; what is absent is left out."""
    formats = {
        "loss": lambda value: f"loss {number(value, '.4f')}",
        "acc1": lambda value: f"acc1 {number(value, '.2f', ' %')}",
        "lr": lambda value: f"lr {number(value, '.2e')}",
        "images_per_sec": lambda value: number(value, ",.0f", " images/s"),
    }
    words = [formats[key](record[key]) for key in formats if key in record]
    if record.get("split") != "train" and "acc5" in record:
        words.append(f"acc5 {number(record['acc5'], '.2f', ' %')}")
    if "ema_acc1" in record:
        words.append(f"ema acc1 {number(record['ema_acc1'], '.2f', ' %')}")
    return words


def record_line(record: Mapping[str, Any], *, total_steps: int, eta_seconds: float | None = None) -> str:
    """One record as one line: split, epoch, step, metrics and, when known, the time to go."""
    width = len(str(total_steps))
    head = f"{record.get('split', '?'):5}"
    if "epoch" in record:
        head += f"  epoch {number(record['epoch'], '6.2f')}"
    # A swarm's peers make as many updates as time allows: there is no total.
    of_total = f"/{total_steps}" if total_steps else ""
    words = [f"{head}  step {record.get('step', 0):>{width}}{of_total}", *metric_words(record)]
    if eta_seconds is not None:
        words.append(f"ETA {duration(eta_seconds)}")
    return "  ".join(words)


def setback_line(event: Mapping[str, Any]) -> str | None:
    """An event about an update that came to nothing, as one line; None for every other event."""
    kind, step = event.get("event"), event.get("step", "?")
    if kind == "skipped":
        before, after = (number(event.get(key), "g") for key in ("scale_before", "scale_after"))
        where = f" of {event['parameter']}" if "parameter" in event else ""
        scale = f"loss scale {before} -> {after}"
        return f"Overflow after step {step}, skipping step: a gradient{where} was not finite; {scale}"
    if kind == "nonfinite":
        norm = event.get("grad_norm")
        of_norm = f", gradients' norm {norm}" if norm is not None else ""
        return f"Step {step} came to nothing: a gradient was not finite; loss {event.get('loss', '?')}{of_norm}"
    if kind == "rolled_back":
        return f"Rolled back from step {event.get('from_step', '?')} to step {step}; goes on with other data."
    return None
