"""The one exception tree.

    TrainkitError            shown to users as three lines, what / why / fix, without a traceback
    ├── UserError            exit 2   the input is wrong: a key, a flag, a file
    ├── RefusedError         exit 3   the input is well-formed but cannot run here: no such GPUs, time over the limit
    ├── SchedulerError       exit 4   the scheduler said no
    └── RunFailedError       exit 1   the run itself failed
        └── DiskError                 a file of the run cannot be written, most often because the disk is full

Everything else that is raised is a bug of ours and keeps its traceback.
"""

import difflib
import importlib.util
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

_KEYS_OF_URLS = (
    (re.compile(r"(?<=://)[^\s/:@]+:[^\s@]+(?=@)"), "***"),
    (re.compile(r"([?&][\w.-]*(?:sig|token|key|secret|credential|passw)[\w.-]*=)[^&\s]+", re.IGNORECASE), r"\1***"),
)
"""A user with a password in front of a host, and what signs a URL."""


def without_keys(text: str) -> str:
    """A text without the passwords and signatures of URLs in it: errors repeat what was given, and are kept in logs."""
    for pattern, shown in _KEYS_OF_URLS:
        text = pattern.sub(shown, text)
    return text


class TrainkitError(Exception):
    """An error for users: what happened, why, and how to fix it. ``key``: the setting to change, where it is one."""

    exit_code = 1

    def __init__(self, what: str, *, why: str = "", fix: str = "", key: str | None = None) -> None:
        what = without_keys(what)
        super().__init__(what)
        self.what = what
        self.why = without_keys(why)
        self.fix = without_keys(fix)
        self.key = key

    def __str__(self) -> str:
        text = self.what
        if self.why:
            text += f"\n  why: {self.why}"
        if self.fix:
            text += f"\n  fix: {self.fix}"
        return text

    def __reduce__(self) -> tuple[object, ...]:
        # Exceptions are pickled with their `args` only; ours carry the rest across processes too.
        return partial(type(self), why=self.why, fix=self.fix, key=self.key), (self.what,)

    def to_json(self) -> dict[str, str]:
        """Plain text, for another rank, which knows the kinds of this module."""
        kind = next(kind.__name__ for kind in type(self).__mro__ if kind.__module__ == __name__)
        return {"kind": kind, "what": self.what, "why": self.why, "fix": self.fix}


class UserError(TrainkitError):
    """The user's input is wrong.

    It has ``what`` happened, ``why``, and how to ``fix`` it; ``key`` is the setting to change, where it is one.

    Example:
        >>> try:
        ...     trainkit.submit("single", ["optim.wieght_decay=0"])
        ... except trainkit.UserError as error:
        ...     print(error.fix)
        Did you mean 'optim.weight_decay'?
    """

    exit_code = 2


class RefusedError(TrainkitError):
    """The input is well-formed, but validation refuses it: it cannot run on this machine or site."""

    exit_code = 3


class SchedulerError(TrainkitError):
    """The scheduler refused, or did not answer."""

    exit_code = 4


class RunFailedError(TrainkitError):
    """The run itself failed."""


class DiskError(RunFailedError):
    """A file of the run cannot be written; what was there before is as it was. Trying again may help."""


def error_from_json(told: Mapping[str, object]) -> TrainkitError:
    """The error that another rank has told with `to_json`; of a kind that is not known here a plain one."""
    found = TrainkitError
    for kind in (UserError, RefusedError, SchedulerError, RunFailedError, DiskError):
        if kind.__name__ == told.get("kind"):
            found = kind
    return found(str(told.get("what", "")), why=str(told.get("why", "")), fix=str(told.get("fix", "")))


def unknown(
    kind: str, name: str, known: Sequence[str], *, own: bool = False, otherwise: str = "", key: str | None = None
) -> UserError:
    """No ``kind`` has that name: says which names there are, and the nearest.

    Args:
        own: a function of the user's own may be named as well.
        otherwise: the fix where no name is near.
    """
    listed = ", ".join(dict.fromkeys(known)) or "none"
    if own:
        listed += "; or package.module:function of your own"
    why = f"There are: {listed}."
    fix = did_you_mean(name, known, otherwise=otherwise or "Use one of them.")
    return UserError(f"Unknown {kind} '{name}'.", why=why, fix=fix, key=key)


def did_you_mean(name: str, known: Iterable[str], *, otherwise: str = "") -> str:
    """``Did you mean 'x'?`` with the nearest of ``known``, or ``otherwise`` when nothing is near."""
    found = list(known)
    # What all of them begin with says nothing: `--gpus` is not near to `--gres`, nor `model.lr` to `model.norm`.
    section, dot, _ = name.rpartition(".")
    begin = section + dot if all(item.startswith(section + dot) for item in found) else ""
    bare = {item.lstrip("-").removeprefix(begin): item for item in reversed(found)}
    near = difflib.get_close_matches(name.lstrip("-").removeprefix(begin), list(bare), n=1, cutoff=0.6)
    return f"Did you mean '{bare[near[0]]}'?" if near else otherwise


def require(condition: bool, key: str, value: object, must_be: str, *, why: str = "") -> None:
    """Refuse the value of a setting. ``why``: a sentence before the one that says what it must be."""
    if not condition:
        why = f"{why}{key} must be {must_be}."
        fix = f"Correct {key}, or omit it."
        raise UserError(f"{key}={value} is not possible.", why=why, fix=fix, key=key)


def require_package(package: str, what: str, *, extra: str, key: str | None = None) -> None:
    """Raise UserError, which says ``what``, unless a package is installed that an extra of ours brings."""
    if importlib.util.find_spec(package) is None:
        fix = f'pip install "trainkit-vision[{extra}]"'
        raise UserError(what, why="It is not installed in this environment.", fix=fix, key=key)
