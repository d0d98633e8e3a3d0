"""Values of a plugin's options, checked against the annotations of its function.

Every value is of the declared type and the defaults are filled in, so that ``data.image_size=big`` is an error for the
user at submission and not a traceback on the compute node. Which options there are is `plugins.check_options`' part.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

from trainkit.errors import UserError, did_you_mean

_ARTICLE = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "text", "None": "null"}


def fill(build: Callable[..., Any], options: Mapping[str, Any], *, where: str) -> dict[str, Any]:
    """All keyword-only parameters of ``build`` with the values of ``options`` or their defaults.

    ``where`` is the configuration section, for messages. Understands int, float, bool, str, None, Literal and unions of
    them; a value of any other annotation is left as it is.
    """
    filled = dict(options)
    for parameter in inspect.signature(build).parameters.values():
        if parameter.kind is not inspect.Parameter.KEYWORD_ONLY:
            continue
        if parameter.name in options:
            annotation = parameter.annotation
            text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))
            filled[parameter.name] = convert(options[parameter.name], text, key=f"{where}.{parameter.name}")
        elif parameter.default is not inspect.Parameter.empty:
            filled[parameter.name] = parameter.default
    return filled


def convert(value: Any, annotation: str, *, key: str) -> Any:
    """``value`` as ``annotation`` wants it, or a UserError that names ``key``."""
    literal = re.fullmatch(r"Literal\[(.*)\]", annotation)
    if literal:
        choices = [choice.strip().strip("\"'") for choice in literal[1].split(",")]
        if str(value) not in choices:
            raise UserError(
                f"{key}={value} is not possible.",
                why=f"{key} is one of: {', '.join(choices)}.",
                fix=did_you_mean(str(value), choices, otherwise=f"Use {key}={choices[0]}."),
                key=key,
            )
        return value
    types = [part.strip() for part in annotation.split("|")]
    if any(part not in _ARTICLE for part in types):
        return value
    for part in types:
        # YAML has told 1, 1.0, true and text apart already. What is exact is accepted: 3 for a float, 3.0 for an int.
        if part == "None" and value is None:
            return None
        if part == "bool" and isinstance(value, bool):
            return value
        if part == "int" and isinstance(value, int | float) and not isinstance(value, bool) and value % 1 == 0:
            return int(value)
        if part == "float" and isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        if part == "str" and isinstance(value, str | int | float) and not isinstance(value, bool):
            return str(value)
    wanted = " or ".join(_ARTICLE[part] for part in types)
    shown = str(value).lower() if isinstance(value, bool) else "null" if value is None else value
    raise UserError(f"{key}={shown} is not possible.", why=f"{key} is {wanted}.", fix=f"Give {wanted}.", key=key)
