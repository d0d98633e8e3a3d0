"""The verbs for notebooks and scripts: the same functions, which return runs.

Errors for users (`trainkit.errors`) are raised instead of printed.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from trainkit import fileio, finish, plugins, resumption, start, terminal
from trainkit.config.loading import load
from trainkit.config.schema import LaunchConfig
from trainkit.errors import UserError, did_you_mean
from trainkit.log_book import report_on
from trainkit.prolongation import Change
from trainkit.run.folder import RunDir, find_run, find_runs
from trainkit.run.metrics import progress_of, read_metrics
from trainkit.run.ownership import require_own_code
from trainkit.schedulers.base import job_state

if TYPE_CHECKING:
    from torch import Tensor, nn

    from trainkit.saved_model import Prediction, SavedModel

Flag = str | int | bool | None | Sequence[str]


@dataclass(frozen=True)
class Run:
    """A run by its folder. Every property is read anew, but for the model of `transform`, `classes` and `predict`."""

    path: Path
    checkpoint: str = "best"
    """Whose weights are the model's: ``best``, ``latest`` or a step."""
    weights: Literal["raw", "ema"] | None = None
    """The model's own, or the averaged ones; None: the averaged ones, if there are any."""
    allow_code: bool = False
    """Import the model that somebody else's run names."""

    @property
    def name(self) -> str:
        """The name of its folder."""
        return self.path.name

    @property
    def status(self) -> str:
        """``PENDING``, ``RUNNING``, ``COMPLETED``, ``FAILED``, ``CANCELLED``, ...: its scheduler's answer."""
        return job_state(self._folder).state

    @property
    def summary(self) -> dict[str, Any]:
        """``summary.json`` of a run that has ended: best and test metrics, time, memory. Empty before.

        Raises UserError where it cannot be read.
        """
        file = self._folder.summary
        try:
            if (found := fileio.parse_object(fileio.read_text(file))) is None:
                raise OSError(None, "It holds no JSON object")
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise fileio.unreadable(file, error) from None
        return found

    def metrics(self, split: str | None = None) -> list[dict[str, Any]]:
        """Records of ``train``, ``val`` or ``test``, or all, by step. `pandas.DataFrame` takes them."""
        return read_metrics(self._folder, split)

    def wait(self) -> str:
        """Wait for its end and return its state. Raises an error with the cause if it failed."""
        finish.wait_for(self._folder)
        return self.status

    def follow(self) -> str:
        """As `wait`, and show its progress."""
        finish.follow_to_end(self._folder)
        return self.status

    def cancel(self) -> None:
        """Cancel its job. Checkpoints stay, and `resume` goes on from them."""
        finish.cancel([self._folder])

    def resume(
        self,
        overrides: Sequence[str] = (),
        *,
        schedule: Literal["stretch", "restart"] | None = None,
        force: bool = False,
        allow_code: bool = False,
        **flags: Flag,
    ) -> None:
        """Queue it again from its newest checkpoint, to go on as it was.

        Args:
            overrides: settings that may change: ``train.epochs=30`` trains it longer, also if it has finished.
            schedule: what becomes of a schedule that goes by the run's length: it is stretched over the new length, or
                begins anew for the updates to come.
            flags: as in `submit`.
        """
        if resumption.is_by_hand(self._folder):
            why, fix = "There it goes on, until its end.", f"`{terminal.command('resume', self.path)}`"
            raise UserError(f"{self.name} is a swarm that was started in a terminal.", why=why, fix=fix)
        settings = _launch_settings(flags, self.resume)
        runs, env, change = [self._folder], dict(os.environ), Change(overrides, schedule)
        resumption.resume(runs, settings, env, force=force, allow_code=allow_code, change=change)

    def model(self) -> nn.Module:
        """Its model, a new one with each call: plain, as its library makes it, on the CPU, in eval mode.

        It takes a batch of what `transform` gives, and returns scores, float32 [N, classes]; neither training's modules
        nor its data are loaded. Only a checkpoint that does not say what images it takes, as an older one, asks the
        data.

        Raises:
            UserError: there is no such checkpoint; or the data is asked, and has moved.
            RefusedError: it is somebody else's run with a model of their own, and ``allow_code`` is false.
        """
        return self._saved().module

    @property
    def classes(self) -> tuple[str, ...]:
        """Of the model's scores, in order."""
        return self._kept.info.class_names

    def transform(self, image: Any) -> Tensor:
        """An image as the model takes it, float32 [C, H, W]: resized, cropped, normalised, as for evaluation.

        Args:
            image: a file, a picture of Pillow's, or an array or tensor, uint8 [H, W, C] or [H, W].
        """
        return self._kept.transform(image)

    def predict(self, images: str | Path | Sequence[Any], batch_size: int = 64) -> list[Prediction]:
        """For each image, in the given order, a ``label``, its ``probability``, and the ``values`` of all classes.

        Args:
            images: a folder, or images as `transform` takes them. A broken one has no ``label``, but a ``why``.
        """
        from trainkit.saved_model import images_in

        given = images_in(Path(images).expanduser()) if isinstance(images, str | Path) else images
        return list(self._kept.predict(given, batch_size))

    @cached_property
    def _kept(self) -> SavedModel:
        return self._saved()

    def _saved(self) -> SavedModel:
        from trainkit.saved_model import open_saved

        loaded = load(str(self._folder.config), [])
        found = require_own_code(self.path, loaded, allow_code=self.allow_code, only_loads=True)
        plugins.search_snapshot(found.code, own=found.own)
        return open_saved(loaded.config, self._folder, self.checkpoint, self.weights)

    def report(self) -> Path:
        """Write its log book with plots and return the path."""
        report_on([self._folder])
        return self.path / "logbook.md"

    @property
    def _folder(self) -> RunDir:
        return RunDir(self.path)

    def __repr__(self) -> str:
        standing = progress_of(self._folder)
        step = f" at step {standing.last['step']}" if "step" in standing.last else ""
        return f"<{self.name}: {self.status}{step}>"


def submit(
    preset: str | Path,
    overrides: Sequence[str] = (),
    *,
    sweep: Mapping[str, Sequence[object]] | None = None,
    trials: int | None = None,
    sampler: Literal["random", "tpe"] = "random",
    prune: int | None = None,
    again: bool = False,
    run_dir: str | Path | None = None,
    allow_code: bool = False,
    join: str | bool | None = None,
    array: int | None = None,
    **flags: Flag,
) -> Run | list[Run]:
    """Do what ``python -m jobs.submit`` does; return once the job is queued, or started on this machine.

    If an equal run is queued, running or finished already, it is returned (``again=True`` makes another one).

    Args:
        preset: in configs/, a YAML file, or the folder of a run to repeat.
        overrides: ``section.key=value``.
        sweep: setting -> its values: a run for each, or for all combinations; then a list is returned. With ``trials``
            also a range, ``"1e-4..1e-1:log"``.
        trials: so many points of the sweep are drawn at random.
        sampler: ``tpe``: trials learn from the results of those before them.
        prune: of so many runs of the sweep one goes on at epochs 1, N, N*N, ...; the others stop.
        flags: the command's own, with underscores: ``nodes=2``, ``gpus_per_node=4``, ``time="2:00:00"``,
            ``executor="local"``.

    Raises:
        TrainkitError: what the command would have said.
    """
    request = start.Request(
        str(preset), overrides, _launch_settings(flags, submit),
        [f"{key}={it if isinstance(it, str) else ','.join(map(str, it))}" for key, it in (sweep or {}).items()],
        None if run_dir is None else start.new_folder(str(run_dir)), again, allow_code,
        join=None if join is None else "" if join is True else str(join),
        array=None if array is None else int(array),
        command=["trainkit.submit", str(preset), *overrides], trials=trials, sampler=sampler, prune=prune,
    )  # fmt: skip
    runs = [Run(run.path) for run in start.submit(start.prepare(request, dict(os.environ))).runs]
    return runs if sweep is not None else runs[0]


def open(
    reference: str | Path,
    *,
    checkpoint: str = "best",
    weights: Literal["raw", "ema"] | None = None,
    allow_code: bool = False,
) -> Run:
    """The run of that name or folder, or of the folder of one of its checkpoints. Raises UserError if there is none, or
    several.

    Args:
        checkpoint: whose weights `Run.model` has: ``best``, ``latest`` or a step.
        weights: the model's own (``raw``), or the averaged ones (``ema``); None: the averaged ones, if there are any.
        allow_code: import the model that somebody else's run names.
    """
    word = _word(reference)
    folder, _, name = word.rstrip("/").rpartition("/checkpoints/")
    if folder and (name in ("best", "latest") or name.startswith("step-")):
        word, checkpoint = folder, name.removeprefix("step-")
    return Run(find_run(word, os.environ).path, checkpoint, weights, allow_code)


def compare(*runs: Run | str | Path, out: str | Path = "report") -> Path:
    """Write a log book of several runs, with speed-ups over the first, into ``out``; return its path."""
    found = [run for one in runs for run in find_runs(_word(one), os.environ)]
    report_on(list(dict.fromkeys(found)), Path(out))
    return Path(out) / "logbook.md"


def _word(reference: Run | str | Path) -> str:
    """A reference as commands take it. A `Path` always means a path, though it has lost its ``./``."""
    path = reference.path if isinstance(reference, Run) else reference
    return path if isinstance(path, str) else str(path.expanduser().absolute())


def _launch_settings(flags: Mapping[str, Flag], of: Callable[..., object]) -> dict[str, tuple[Any, str]]:
    """Launch flags as settings. Raises UserError for others, with the nearest parameter of the function ``of``."""
    known = [*LaunchConfig.model_fields, *inspect.signature(of).parameters]
    for name in flags:
        if name not in LaunchConfig.model_fields:
            why = "The flags are the settings of launch, by their names with underscores."
            otherwise = "`python -m jobs.submit --help` lists them; `run.wait()` and `run.follow()` wait for a run."
            fix = did_you_mean(name, known, otherwise=otherwise)
            raise UserError(f"There is no {name}= (--{name.replace('_', '-')}).", why=why, fix=fix)
    return start.launch_settings(flags)
