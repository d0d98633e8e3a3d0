"""Verbs for notebooks and scripts: the functions of the commands, which return runs.

Errors for users (`trainkit.common.errors`) are raised instead of printed. ``docs/reference/python.md`` is made from the
docstrings here, and a test runs their examples one after the other in one folder.
"""

from __future__ import annotations

import inspect
import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Unpack

from trainkit.cluster.job_states import job_state
from trainkit.common import fileio, terminal
from trainkit.common.errors import UserError, did_you_mean
from trainkit.config import plugins, script
from trainkit.config.loading import load
from trainkit.launch import deadline, follow, preparation, resume, scripts, submission
from trainkit.launch.flags import LaunchFlags
from trainkit.launch.prolong import Change
from trainkit.report.facts import Facts
from trainkit.report.figures import cost_of
from trainkit.report.writers import report_on
from trainkit.run.find import find_run, find_runs
from trainkit.run.folder import RunDir
from trainkit.run.metrics import read_metrics
from trainkit.run.ownership import READS, require_own_code
from trainkit.run.run_progress import progress_of

if TYPE_CHECKING:
    from torch import Tensor, nn

    from trainkit.training.saved_model import Prediction, SavedModel


class Keywords(LaunchFlags, total=False):
    """Further keywords of `submit`, which explains them."""

    trials: int | None
    sampler: Literal["random", "tpe"]
    prune: int | None
    again: bool
    run_dir: str | Path | None
    allow_code: bool
    join: str | bool | None
    array: int | None
    by: str | None
    budget: float | None


@dataclass(frozen=True)
class Run:
    """A run by its folder. Properties are read anew each time, but for the model of `classes`, `transform`, `predict`.

    Made by `submit` and `open`.

    Args:
        path: its folder.
        checkpoint: which checkpoint to load the model from: ``best``, ``latest`` or a step.
        weights: the model's own (``raw``), or the averaged ones (``ema``); None: the averaged ones, if there are any.
        allow_code: import the model that somebody else's run names.
        outlook: the answer to ``by`` and ``budget`` of the `submit` that made it, as ``outlook`` of ``trainkit submit
            --json``; else None.

    Example:
        >>> run = trainkit.open("single-0001")
        >>> run
        <single-0001: COMPLETED at step 40>
        >>> run.path.name, run.status
        ('single-0001', 'COMPLETED')
    """

    path: Path
    checkpoint: str = "best"
    weights: Literal["raw", "ema"] | None = None
    allow_code: bool = False
    outlook: dict[str, Any] | None = field(default=None, compare=False)

    @property
    def name(self) -> str:
        """Name of its folder."""
        return self.path.name

    @property
    def status(self) -> str:
        """State of its job, asked from the scheduler: ``PENDING``, ``RUNNING``, ``COMPLETED``, ``FAILED``, ..."""
        return job_state(self._folder).state

    @property
    def summary(self) -> dict[str, Any]:
        """Final numbers, as in ``summary.json``; empty before the end.

        ``val`` and ``test`` are records of the best checkpoint, ``train_seconds`` is in seconds, ``max_memory_mb`` in
        MB.

        Raises:
            UserError: the file cannot be read.

        Example:
            >>> sorted(run.summary["test"])[:2]
            ['acc1', 'acc5']
        """
        file = self._folder.summary
        try:
            found = fileio.parse_object(fileio.read_text(file))
            if found is None:
                raise OSError(None, "It holds no JSON object")
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise fileio.unreadable(file, error) from None
        return found

    def metrics(self, split: str | None = None) -> list[dict[str, Any]]:
        """Metrics records in order of steps; `pandas.DataFrame` takes them.

        A record has ``step`` (optimizer updates done), ``epoch``, ``time`` (seconds since 1970), ``split``, ``loss``,
        the metrics of the task (of classification ``acc1`` and ``acc5``, in percent) and, in training, ``lr`` and
        ``images_per_sec``. A value that was not finite is None.

        Args:
            split: ``train``, ``val`` or ``test``; None: all.

        Raises:
            UserError: ``metrics.jsonl`` cannot be read.

        Example:
            >>> [record["step"] for record in run.metrics("train")]
            [10, 20, 30, 40]
        """
        return read_metrics(self._folder, split)

    def wait(self) -> str:
        """Wait for its end, print what it came to, and return its state.

        Raises:
            RunFailedError: it failed; the error says why.

        Example:
            >>> run.wait()
            run folder...
            'COMPLETED'
        """
        follow.wait_for(self._folder)
        return self.status

    def follow(self) -> str:
        """Wait as `wait` does, and show its progress."""
        follow.follow_to_end(self._folder)
        return self.status

    def why(self) -> dict[str, Any]:
        """Say why it failed or does not start, as ``trainkit why RUN --json`` does.

        Returns:
            Keys as docs/reference/json.md names them: ``cause`` (None where nothing has failed), ``what``, ``why``,
            ``evidence``, ``rank``, ``node``, ``fix``, ``command``, ...

        Example:
            >>> found = run.why()
            >>> found["cause"], found["what"]
            (None, 'It has finished; nothing failed.')
        """
        from trainkit.launch.findings import finding_of

        return finding_of(self._folder, job_state(self._folder))

    @property
    def plan(self) -> dict[str, Any]:
        """Its launch plan, as in ``plan.json``: nodes, ranks, limits, and each directive with its source; empty for a
        run that was not submitted.

        Example:
            >>> run.plan["nodes"], run.plan["ntasks_per_node"]
            (1, 1)
        """
        return fileio.read_object(self._folder.plan)

    @property
    def cost(self) -> dict[str, Any]:
        """Time, processor-hours and energy that it has taken, and as ``fit`` what to ask for next time.

        Keys are those of ``trainkit report RUN --json``; what is not known is None.

        Example:
            >>> run.cost["train_seconds"] > 0
            True
        """
        return cost_of(Facts(self._folder, self.name))

    def cancel(self) -> None:
        """Cancel its job. Checkpoints stay, and `resume` goes on from them."""
        follow.cancel([self._folder])

    def resume(
        self,
        overrides: Sequence[str] = (),
        *,
        schedule: Literal["stretch", "restart"] | None = None,
        force: bool = False,
        allow_code: bool = False,
        **flags: Unpack[LaunchFlags],
    ) -> None:
        """Queue it again from its newest checkpoint, to go on as it was.

        Args:
            overrides: settings that may change: ``train.epochs=30`` trains it longer, also if it has finished.
            schedule: what becomes of a schedule that goes by the run's length: it is stretched over the new length, or
                begins anew for the updates to come.
            force: also if nobody can tell whether its job has ended.
            allow_code: run what somebody else's run names.
            flags: as in `submit`.

        Raises:
            UserError: it has finished and is not to train longer, or a setting may not change.
            SchedulerError: the scheduler refused.
        """
        if resume.is_by_hand(self._folder):
            why = "It continues there until it ends."
            fix = f"`{terminal.command('resume', self.path)}`"
            raise UserError(f"{self.name} is a swarm that was started in a terminal.", why=why, fix=fix)
        settings = _launch_settings(flags, LaunchFlags, self.resume)
        runs = [self._folder]
        env = dict(os.environ)
        change = Change(overrides, schedule)
        resume.resume(runs, settings, env, force=force, allow_code=allow_code, change=change)

    def model(self) -> nn.Module:
        """Load its model: a plain `torch.nn.Module` on the CPU, in eval mode; a new one with each call.

        It takes a batch of what `transform` gives, float32 [N, C, H, W], and returns scores, float32 [N, classes].
        Neither training's modules nor its data are loaded. Only a checkpoint that does not say what images it takes, as
        an older one, asks the data.

        Raises:
            UserError: there is no such checkpoint; or the data is asked, and has moved.
            RefusedError: it is somebody else's run with a model of their own, and ``allow_code`` is false.

        Example:
            >>> image = run.transform("digit.png")
            >>> tuple(image.shape)
            (1, 8, 8)
            >>> tuple(run.model()(image[None]).shape)
            (1, 10)
        """
        return self._saved().module

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes, in the order of the model's scores.

        Example:
            >>> run.classes[:3]
            ('0', '1', '2')
        """
        return self._kept.info.class_names

    def transform(self, image: Any) -> Tensor:
        """Prepare an image as the model takes it: resized, cropped, normalised, as for evaluation.

        Args:
            image: a file, a picture of Pillow's, or an array or tensor, uint8 [H, W, C] or [H, W].

        Returns:
            A tensor, float32 [C, H, W].

        Raises:
            UserError: it is no image that can be read.
        """
        return self._kept.transform(image)

    def predict(self, images: str | Path | Sequence[Any], batch_size: int = 64) -> list[Prediction]:
        """Classify images, in the given order.

        Args:
            images: a folder, or images as `transform` takes them.
            batch_size: images in one pass.

        Returns:
            For each image its ``label``, the ``probability`` of that, 0 to 1, and the ``values`` of all classes,
            float32 [classes]. A broken image has no ``label``, but a ``why``.

        Example:
            >>> [prediction.image for prediction in run.predict(["digit.png"])]
            ['digit.png']
        """
        from trainkit.training.saved_model import images_in

        if isinstance(images, str | Path):
            images = images_in(Path(images).expanduser())[0]
        return list(self._kept.predict(images, batch_size))

    @cached_property
    def _kept(self) -> SavedModel:
        return self._saved()

    def _saved(self) -> SavedModel:
        from trainkit.training.saved_model import open_saved

        loaded = load(str(self._folder.config), [])
        scripts.refuse_script(loaded.config, "A model")
        found = require_own_code(self.path, loaded, allow_code=self.allow_code, use=READS)
        plugins.search_snapshot(found.code, own=found.own)
        return open_saved(loaded.config, self._folder, self.checkpoint, self.weights)

    def report(self) -> Path:
        """Write its log book with plots, and its page ``report.html``; return the path of the log book.

        Raises:
            UserError: there is nothing to report on, or a file cannot be written.

        Example:
            >>> run.report().name
            'logbook.md'
        """
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
    args: Sequence[object] | None = None,
    sweep: Mapping[str, Sequence[object]] | None = None,
    **keywords: Unpack[Keywords],
) -> Run | list[Run]:
    """Do what ``python -m jobs.submit`` does; return once the job is queued, or started on this machine.

    If an equal run is queued, running or finished already, it is returned.

    Args:
        preset: a name in configs/, a YAML file, a training script (``train.py``), or the folder of a run to repeat.
        overrides: ``section.key=value``.
        args: arguments of a script.
        sweep: setting -> its values: a run for each, or for all combinations; then a list is returned. With ``trials``
            also a range, ``"1e-4..1e-1:log"``.
        trials: the number of points of the sweep to draw at random.
        sampler: ``tpe``: trials learn from the results of those before them; ``random``, the default: they do not.
        prune: N; runs of the sweep that are not the best 1 in N after 1, N, N², ... validations stop.
        again: train even if an equal run is already there.
        run_dir: the run folder to create.
        allow_code: run what somebody else's settings name.
        join: join the swarm of this token; True: the token is in ``TRAINKIT_TOKEN``.
        array: the number of peers to join it with, as an array of jobs.
        by: say before whether it can be done by then, ``"Friday 9:00"``, on how many nodes, and with which odds; the
            run has it as `Run.outlook`. Nothing is refused.
        budget: say so for at most so many GPU-hours.
        keywords: the settings of launch: ``nodes=2``, ``gpus_per_node=4``, ``time="2:00:00"``, ``executor="local"``.

    Returns:
        The run; with ``sweep`` a list of runs.

    Raises:
        UserError: a setting or flag is wrong.
        RefusedError: it cannot run here, such as on more GPUs than there are.
        SchedulerError: the scheduler refused, or did not answer.

    Example:
        >>> run = trainkit.submit("single", ["train.max_steps=40"], executor="local")
        Running locally...
        >>> run.wait()
        run folder...
        'COMPLETED'
        >>> runs = trainkit.submit("single", ["train.max_steps=20"], sweep={"optim.lr": [1e-3, 3e-3]}, executor="local")
        Running locally...
        >>> [each.wait() for each in runs]
        run folder...
        ['COMPLETED', 'COMPLETED']
    """
    settings = _launch_settings(keywords, Keywords, submit)
    words = None if args is None else list(map(str, args))
    named = script.named(str(preset), None, overrides, words)
    run_dir = keywords.get("run_dir")
    token = keywords.get("join")
    if token is True:
        token = ""
    elif token is False:
        token = None
    request = preparation.Request(
        str(named.preset), named.overrides, settings | named.settings, _axes(sweep or {}),
        run_dir=None if run_dir is None else submission.new_folder(str(run_dir)),
        again=keywords.get("again", False), allow_code=keywords.get("allow_code", False),
        join=str(token) if token is not None else None, array=keywords.get("array"),
        command=["trainkit.submit", str(preset), *overrides, *(words or ())], trials=keywords.get("trials"),
        sampler=keywords.get("sampler", "random"), prune=keywords.get("prune"),
    )  # fmt: skip
    by, budget = keywords.get("by"), keywords.get("budget")
    until = deadline.deadline_of(by, budget, time.time())
    prepared = preparation.prepare(request, dict(os.environ))
    found = None
    if by is not None or budget is not None:
        outlook = deadline.outlook(prepared, until, budget, time.time(), "the same with train.max_steps=200")
        terminal.say("\n".join(deadline.lines(outlook)))
        found = deadline.to_json(outlook)
    started = submission.submit(prepared)
    runs = [Run(run.path, outlook=found) for run in started.runs]
    return runs if sweep is not None else runs[0]


def _axes(sweep: Mapping[str, Sequence[object]]) -> list[str]:
    """Write a sweep as commands take it: ``key=a,b,c``, or ``key=low..high`` for a text."""
    axes = []
    for key, values in sweep.items():
        text = values if isinstance(values, str) else ",".join(map(str, values))
        axes.append(f"{key}={text}")
    return axes


def open(
    reference: str | Path,
    *,
    checkpoint: str = "best",
    weights: Literal["raw", "ema"] | None = None,
    allow_code: bool = False,
) -> Run:
    """Open a run that is there.

    Args:
        reference: its name or folder, or the folder of one of its checkpoints.
        checkpoint: which checkpoint `Run.model` loads: ``best``, ``latest`` or a step.
        weights: the model's own (``raw``), or the averaged ones (``ema``); None: the averaged ones, if there are any.
        allow_code: import the model that somebody else's run names.

    Raises:
        UserError: there is no such run, or there are several.

    Example:
        >>> run = trainkit.open("single-0001")
        >>> best = max(run.metrics("val"), key=lambda record: record["acc1"])
        >>> latest = trainkit.open("single-0001", checkpoint="latest", weights="raw").model()
    """
    word = _word(reference)
    folder, _, name = word.rstrip("/").rpartition("/checkpoints/")
    if folder and (name in ("best", "latest") or name.startswith("step-")):
        word = folder
        checkpoint = name.removeprefix("step-")
    return Run(find_run(word, os.environ).path, checkpoint, weights, allow_code)


def compare(*runs: Run | str | Path, out: str | Path = "report") -> Path:
    """Write a log book of several runs, with speed-ups over the first; return its path.

    A run whose records cannot be read is left out, with a warning.

    Args:
        runs: runs, their names or folders, or those of sweeps.
        out: the folder to write to.

    Raises:
        UserError: there is no such run, or nothing to report on.

    Example:
        >>> trainkit.compare("single-0001", "single-0002").name
        'logbook.md'
    """
    found: list[RunDir] = []
    for reference in runs:
        found += find_runs(_word(reference), os.environ)
    report = report_on(list(dict.fromkeys(found)), Path(out))
    for sentence in report.left_out:
        warnings.warn(sentence, stacklevel=2)
    return Path(out) / "logbook.md"


def _word(reference: Run | str | Path) -> str:
    """Write a reference as commands take it. A `Path` always means a path, though it has lost its ``./``."""
    path = reference.path if isinstance(reference, Run) else reference
    return path if isinstance(path, str) else str(path.expanduser().absolute())


def _launch_settings(given: Mapping[str, object], kind: type, of: Callable[..., object]) -> dict[str, tuple[Any, str]]:
    """Launch flags among the keywords of ``of`` as settings.

    Raises UserError for a keyword that the TypedDict ``kind`` does not have, with the nearest one.
    """
    *named, _ = inspect.signature(of).parameters
    for name in given:
        if name not in kind.__annotations__:
            why = "Flags are the settings of launch, written with underscores."
            otherwise = "`python -m jobs.submit --help` lists them; `run.wait()` and `run.follow()` wait for a run."
            fix = did_you_mean(name, [*named, *kind.__annotations__], otherwise=otherwise)
            raise UserError(f"There is no {name}= (--{name.replace('_', '-')}).", why=why, fix=fix)
    return preparation.launch_settings(given)
