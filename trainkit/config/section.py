"""What every section of the configuration is: frozen, with no keys but its own, and honest about what cannot be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]


@dataclass(frozen=True)
class Reach:
    """What the text of a setting can do beyond training, noted where the setting is defined: ``Annotated[str, SENDS]``.

    A setting that starts or sends something counts only from a file that is the user's own
    (`trainkit.records.ownership`).
    """

    does: Literal["imports", "starts", "sends", "nothing"]


IMPORTS = Reach("imports")
"""It may name a function, ``package.module:function``."""
STARTS = Reach("starts")
"""It becomes a command, a flag of one, or the place that programs come from."""
SENDS = Reach("sends")
"""It says where weights, code, records or messages go, or lets somebody in."""
PLAIN = Reach("nothing")
"""A name, a size, a folder to read."""


class ImpossibleError(ValueError):
    """Settings that are each well-formed and cannot hold together.

    ``keys``: those that one may change; ``secret``: what was written must not be repeated.
    """

    def __init__(self, what: str, *, keys: tuple[str, ...], why: str, fix: str, secret: bool = False) -> None:
        super().__init__(what)
        self.keys, self.why, self.fix, self.secret = keys, why, fix, secret


class Section(BaseModel):
    """A section whose keys are exactly its fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _true_is_no_number(cls, value: Any, info: ValidationInfo) -> Any:
        # pydantic would take true for 1: `train.epochs=true` is a mistake.
        annotation = cls.model_fields[str(info.field_name)].annotation
        if isinstance(value, bool) and bool not in (annotation, *get_args(annotation)):
            raise ValueError
        return value


class PluginSection(Section):
    """A section that names a plugin; keys beyond its fields are that plugin's options."""

    model_config = ConfigDict(extra="allow")  # added to what `Section` says

    name: str

    @property
    def options(self) -> dict[str, Any]:
        """Options of the plugin, as written in the configuration."""
        return dict(self.model_extra or {})
