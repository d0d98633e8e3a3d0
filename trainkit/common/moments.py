"""Moments as people write them: ``Friday 9:00``, ``tomorrow 18:00``, ``2026-12-04 09:00``, ``in 36 hours``."""

import re
from datetime import date, datetime, time, timedelta

from trainkit.common.errors import UserError

_UNITS = {"m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
_AHEAD = re.compile(r"(?:in )?(\d{1,6}(?:\.\d+)?) ?(?:(m)in(?:ute)?s?|(h)(?:ours?)?|(d)(?:ays?)?|(w)(?:eeks?)?)")
_DAY = re.compile(r"(?:(today|tomorrow|[a-z]{3,9}),? ?)?(?:at )?(?:(\d{1,2}):(\d\d))?")
_DAYS = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")


def moment(text: str, now: float) -> float:
    """Return the moment in seconds since 1970. A day without a time is its end; times are those of this machine.

    Raises:
        UserError: it is not understood, or has passed.
    """
    words = " ".join(text.lower().split())
    found = _ahead(words, now) or _by_calendar(text.strip()) or _by_day(words, datetime.fromtimestamp(now))
    examples = "'Friday 9:00', 'tomorrow 18:00', '2026-12-04 09:00', 36h, 2d"
    if found is None:
        raise UserError(f"'{text}' is not a time.", why="It is not understood.", fix=f"For example {examples}.")
    if found <= now:
        why = f"It means {datetime.fromtimestamp(found):%Y-%m-%d %H:%M}."
        raise UserError(f"'{text}' has passed.", why=why, fix=f"For example {examples}.")
    return found


def _ahead(words: str, now: float) -> float | None:
    match = _AHEAD.fullmatch(words)
    if match is None:
        return None
    unit = next(filter(None, match.groups()[1:]))
    return now + float(match[1]) * _UNITS[unit]


def _by_calendar(text: str) -> float | None:
    try:
        if re.fullmatch(r"\d{4}-\d\d-\d\d", text):
            return _at(date.fromisoformat(text), None)
        return datetime.fromisoformat(text).timestamp() if "-" in text else None
    except (ValueError, OverflowError, OSError):
        return None


def _by_day(words: str, now: datetime) -> float | None:
    match = _DAY.fullmatch(words)
    if match is None or not words:
        return None
    name, hour, minute = match.groups()
    try:
        clock = None if hour is None else time(int(hour), int(minute))
    except ValueError:
        return None
    today = now.date()
    days = {"today": 0, "tomorrow": 1, None: 0}
    for number, weekday in enumerate(_DAYS):
        if name and weekday.startswith(name):
            days[name] = (number - today.weekday()) % 7
    if name not in days:
        return None
    found = _at(today + timedelta(days[name]), clock)
    if found > now.timestamp() or name in ("today", "tomorrow"):
        return found
    return _at(today + timedelta(days[name] + (7 if name else 1)), clock)


def _at(day: date, clock: time | None) -> float:
    """Return that time of a day here; without one, the day's last minute."""
    return datetime.combine(day, clock or time(23, 59)).timestamp()
