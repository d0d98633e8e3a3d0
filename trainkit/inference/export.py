"""A saved model as one file that is used without trainkit: safetensors, torch.export's ``.pt2``, ONNX.

Each file says under ``trainkit``, as JSON, what `told_of` gives: how to make the network, its classes, and how images
are prepared. That is left to who uses it: the network takes what comes of it, normalised float32 [N, C, H, W].
"""

import importlib.util
import io
import json
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trainkit.checkpoint import format, safetensors_files
from trainkit.common.errors import UserError
from trainkit.config.schema import Config
from trainkit.data.base import Splits
from trainkit.data.photo_transforms import CenterCrop
from trainkit.models import library
from trainkit.run.folder import RunDir
from trainkit.training.saved_model import STEMS, SavedModel, WeightKind, input_in, open_saved

_NOTE = "trainkit"
_CLOSE = 1e-3
"""Share of the largest score by which the scores of a file may differ from the model's."""
_MOST_ONNX = 2 * 10**9
"""Bytes of a file of protobuf; larger ones keep their weights in a second file."""


class Exported(NamedTuple):
    """The file that was written."""

    step: int
    kind: WeightKind
    about: dict[str, Any]
    """Description in the file; empty where nobody knows which images the model takes."""
    remark: str
    """Comparison with the model, or what the file lacks; empty for weights, which are copied bit for bit."""


def export_model(
    config: Config, run_dir: RunDir, which: str, kind: WeightKind | None, file: Path, form: str, *, imports: bool = True
) -> Exported:
    """Write the model of a checkpoint (``best``, ``latest`` or a step) as ``file``, which is complete or absent.

    Args:
        kind: as `open_saved` takes it.
        form: ``safetensors``, ``torch`` or ``onnx``.
        imports: False: nothing is built or imported that the run names; for ``safetensors``.

    Raises:
        UserError: as `open_saved`; the file cannot be written; the network cannot be exported in this form; what is
            written computes something else.
    """
    if form == "safetensors":
        about, remark = told_of_weights(config, run_dir, which, kind, imports=imports)
        notes = {"run": run_dir.name, "model": config.model.name, "data": config.data.title}
        notes |= {_NOTE: json.dumps(about)} if about else {}
        stems = (STEMS[kind],) if kind else (STEMS["ema"], STEMS["raw"])
        step, stem = safetensors_files.export(run_dir.checkpoints, which, stems, file, notes)
        return Exported(step, "ema" if stem == STEMS["ema"] else "raw", about, remark)
    saved = open_saved(config, run_dir, which, kind)
    about = told_of(saved, run_dir.name)
    shape = (3, saved.info.in_chans, about["size"], about["size"])
    example = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    make: Callable[..., tuple[bytes, str]] = {"torch": _as_torch, "onnx": _as_onnx}[form]
    try:
        with torch.no_grad(), _quiet():
            content, checked = make(saved.module, example, json.dumps(about))
    except UserError:
        raise
    except Exception as error:  # an exporter raises whatever a network of others leads it to
        why = f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"
        fix = "Use --format safetensors, which stores only the weights, or another model."
        raise UserError(f"{config.model.name} cannot be exported as {form}.", why=why, fix=fix) from error
    with safetensors_files.written(file) as out:
        out.write(content)
    return Exported(saved.step, saved.kind, about, checked)


@contextmanager
def _quiet() -> Iterator[None]:
    """The exporters speak of themselves, and of a network that they cannot follow at length."""
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


def told_of(saved: SavedModel, run: str) -> dict[str, Any]:
    """Return what others must know to use a model.

    ``library``, ``name``, ``arguments`` and ``enlarged`` as `models.told_model` has them; ``classes`` in the order of
    the outputs; ``in_chans``; ``resize``, the shorter side in pixels; ``size``, the side of the square that is cut out
    of the middle, and ``crop``, their ratio; ``interpolation``; ``mean`` and ``std`` of pixels scaled to 0..1. A data
    set with transforms of its own has ``size`` only.
    """
    info = saved.info
    crop = saved.crop
    how: dict[str, Any] = {"size": info.image_size}
    if isinstance(crop, CenterCrop):
        how = {"size": crop.image_size, "resize": crop.shorter, "crop": round(crop.image_size / crop.shorter, 4)}
        how["interpolation"] = crop.mode
    return {
        **library.told_model(saved.config.model, info, saved.module), "task": saved.config.task.name,
        "classes": list(info.class_names), "in_chans": info.in_chans, **how,
        "mean": list(info.mean), "std": list(info.std), "run": run, "step": saved.step, "weights": saved.kind,
    }  # fmt: skip


def told_of_weights(
    config: Config, run_dir: RunDir, which: str, kind: WeightKind | None, *, imports: bool
) -> tuple[dict[str, Any], str]:
    """Return what `told_of` does for weights that are copied; nothing, and why, where it is not known.

    A network is built only where its library decides on arguments: it need not be there to be copied.
    """
    step = format.resolve(run_dir.checkpoints, which)
    why = "somebody else's run names code"
    with suppress(format.BrokenCheckpointError):  # whoever copies it says so
        found = input_in(format.manifest_of(run_dir.checkpoints, step).state)
        is_library = library.resolve(config.model.name)[0] in library.LIBRARIES
        if found is not None and not is_library:
            splits = Splits(found[0], (), (), (), found[1], found[1])
            return told_of(SavedModel(nn.Module(), splits, config, step, kind or "raw"), run_dir.name), ""
        if imports:
            try:
                return told_of(open_saved(config, run_dir, which, kind), run_dir.name), ""
            except UserError as error:
                why = f"{error.what[0].lower()}{error.what[1:].rstrip('.')}"
    return {}, f"does not say which images they take: {why}"


def _require_same(run: Callable[[Tensor], Tensor], model: nn.Module, example: Tensor, form: str) -> str:
    """Say by how much the scores of a file differ from the model's, for batches of two sizes.

    Raises UserError where that is more than rounding.
    """
    worst = 0.0
    for images in (example, example[:1]):
        expected = model(images)
        off = float((run(images) - expected).abs().max() / expected.abs().max().clamp(min=1.0))
        if not off <= _CLOSE:
            why = f"For a batch of {len(images)} they differ by {off:.1e} of the largest score."
            fix = "Use another --format, and report it to the exporter's authors with the model's name."
            raise UserError(f"The {form} file gives different scores than the model.", why=why, fix=fix)
        worst = max(worst, off)
    return f"gives the model's scores to {worst:.0e}" if worst else "gives the model's scores to the last bit"


def _as_torch(model: nn.Module, example: Tensor, about: str) -> tuple[bytes, str]:
    name = f"{_NOTE}.json"
    out = io.BytesIO()
    program = torch.export.export(model, (example,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    torch.export.save(program, out, extra_files={name: about})
    content = out.getvalue()
    loaded = torch.export.load(io.BytesIO(content)).module()
    return content, _require_same(loaded, model, example, "torch")


def _as_onnx(model: nn.Module, example: Tensor, about: str) -> tuple[bytes, str]:
    missing = [name for name in ("onnx", "onnxscript") if importlib.util.find_spec(name) is None]
    if missing:
        why = f"torch's exporter needs {' and '.join(missing)}, which this Python does not have."
        fix = 'pip install "trainkit-vision[onnx]", or use --format torch.'
        raise UserError("The model cannot be exported as onnx.", why=why, fix=fix)
    size = sum(value.nbytes for value in model.state_dict().values())
    if size > _MOST_ONNX:
        why = f"A file of ONNX holds up to 2 GB, and these weights have {size / 1e9:.1f}."
        raise UserError("The model is too large for one file of ONNX.", why=why, fix="Use --format torch.")
    program: Any = torch.onnx.export(
        model, (example,), dynamo=True, verbose=False, input_names=["images"], output_names=["scores"],
        dynamic_shapes=({0: torch.export.Dim("batch")},),
    )  # fmt: skip
    program.model.metadata_props[_NOTE] = about
    content: bytes = program.model_proto.SerializeToString()
    if importlib.util.find_spec("onnxruntime") is None:
        return content, "has not been run: onnxruntime is not installed"
    import onnxruntime

    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])

    def run(images: Tensor) -> Tensor:
        return torch.from_numpy(session.run(None, {"images": images.numpy()})[0])

    return content, _require_same(run, model, example, "onnx")
