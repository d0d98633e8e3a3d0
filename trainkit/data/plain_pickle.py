"""Pickled arrays without the danger of pickles.

CIFAR-10 comes as pickle files, and unpickling a file that a stranger wrote runs the stranger's code. This reader knows
dicts, lists, text, bytes, numbers and numpy arrays of numbers; it rebuilds the arrays itself from their bytes, and
anything else in the file is an error. So a data set of one's own in CIFAR's format is as safe to read as the official.
"""

from __future__ import annotations

import io
import pickle
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainkit import reading
from trainkit.errors import UserError

if TYPE_CHECKING:
    import numpy


def load(path: Path) -> Any:
    """What ``path`` holds, with numpy arrays in place of pickled arrays; keys that are bytes become text.

    Raises UserError where the file is missing, broken, or holds anything but plain values.
    """
    try:
        value = _PlainUnpickler(io.BytesIO(reading.read_bytes(path, 1 << 30, follow=True)), encoding="bytes").load()
        return _plain(value)
    except OSError as error:
        raise UserError(f"Cannot read {path}.", why=str(error), fix="Check the path and its permissions.") from None
    except Exception as error:  # a broken pickle may raise anything
        raise UserError(
            f"{path} is no file of plain arrays.",
            why=f"{error}" if isinstance(error, pickle.UnpicklingError) else f"It is damaged ({type(error).__name__}).",
            fix="Delete it and fetch the data set again.",
        ) from None


class _Dtype:
    """Stands in for numpy.dtype while a pickle is read."""

    def __init__(self, code: Any, align: object = False, copy: object = False) -> None:
        self.code = code.decode("ascii") if isinstance(code, bytes) else str(code)
        if self.code[:1] not in "uifb" or not re.fullmatch("[0-9]{1,2}", self.code[1:]):
            raise pickle.UnpicklingError(f"It holds an array of '{self.code}', which is not a number.")
        self.order = "="

    def __setstate__(self, state: Any) -> None:
        order = state[1]
        self.order = order.decode("ascii") if isinstance(order, bytes) else str(order)


class _Array:
    """Stands in for numpy.ndarray while a pickle is read."""

    def __init__(self) -> None:
        self.state: tuple[Any, ...] = ()

    def __setstate__(self, state: Any) -> None:
        self.state = tuple(state)

    def rebuild(self) -> numpy.ndarray[Any, Any]:
        import numpy

        _, shape, dtype, fortran, data = self.state
        if isinstance(data, str):
            data = data.encode("latin1")  # how Python 3 keeps bytes in the old protocols
        kind = numpy.dtype(dtype.code).newbyteorder(dtype.order if dtype.order in "<>" else "=")
        flat = numpy.frombuffer(bytearray(data), dtype=kind)
        array: numpy.ndarray[Any, Any] = flat.reshape(shape, order="F" if fortran else "C")
        return array


def _reconstruct(subtype: object, shape: object, kind: object) -> _Array:
    return _Array()


def _encode(text: Any, encoding: Any) -> bytes:
    if encoding not in ("latin1", b"latin1"):
        raise pickle.UnpicklingError(f"It holds text in the encoding {encoding!r}.")
    return text if isinstance(text, bytes) else str(text).encode("latin1")


class _PlainUnpickler(pickle.Unpickler):
    _known = {  # noqa: RUF012  never changed
        ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
        ("numpy._core.multiarray", "_reconstruct"): _reconstruct,
        ("numpy", "ndarray"): _Array,
        ("numpy", "dtype"): _Dtype,
        ("_codecs", "encode"): _encode,
    }

    def find_class(self, module: str, name: str) -> Any:
        try:
            return self._known[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"It wants to run '{module}.{name}', which plain data does not.") from None


def _plain(value: Any) -> Any:
    if isinstance(value, _Array):
        return value.rebuild()
    if isinstance(value, dict):
        return {key.decode() if isinstance(key, bytes) else key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value
