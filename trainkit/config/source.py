"""Origins of values, in settings and in plans."""

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Source:
    """Origin of a value: a kind and, for a person, the place."""

    kind: str  # flag, override, environment, file, cluster profile, default; in a plan also discovered, derived, ...
    where: str = ""

    def __str__(self) -> str:
        return f"{self.kind} {self.where}".strip()

    @classmethod
    def parse(cls, text: str) -> "Source":
        """The source that `str` wrote. The kind is one word, but for ``cluster profile``."""
        kind, where = re.fullmatch(r"(cluster profile|\w*) ?(.*)", text, re.DOTALL).groups()  # type: ignore[union-attr]
        return cls(kind, where)
