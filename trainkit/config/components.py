"""The task, the optimizer and the schedule that a configuration names: what they state, and whether they fit.

All is read from source, a task's own file as well as timm's and torch's: importing these costs seconds of CPU time, and
`submit` has half a second.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainkit import plugins
from trainkit.config import yaml
from trainkit.errors import UserError, did_you_mean, require, unknown

if TYPE_CHECKING:  # the schema takes a tenth of a second, and what only reads records does without it
    from trainkit.config.schema import Config, ScheduleConfig

_PACKAGE = "trainkit.tasks"
_OF_TRAIN = {"label_smoothing": 0.0, "class_weights": None, "loss": "cross_entropy", "bce_threshold": None}
"""Settings of ``train`` that a task may take, by ``TAKES`` in its file; and what they are where it takes none."""
_NAME = re.compile(r"(?!ema_|seconds_)[A-Za-z]\w{0,40}")
# Further keys of a metrics record.
_TAKEN = frozenset(
    ("time", "step", "epoch", "split", "loss", "samples", "lr", "images_per_sec", "mfu", "grad_norm", "round", "peers")
)


@dataclass(frozen=True)
class Metric:
    """A number that a task measures on a split."""

    unit: str = ""
    """``%``: it lies between 0 and 100."""
    higher_is_better: bool = True
    label: str = ""
    """For headings and axes."""

    @property
    def spec(self) -> str:
        """How its values are formatted."""
        return ".2f" if self.unit == "%" else ".4f"

    def fits(self, value: float) -> bool:
        """Whether it can have that value."""
        return self.unit != "%" or 0.0 <= value <= 100.0

    def text(self, value: float | None) -> str:
        """A value with its unit; ``nan`` for what a record holds as null."""
        number = "nan" if value is None else format(value, self.spec)
        return f"{number} {self.unit}".rstrip()


LOSS = Metric("", False, "Loss")
"""Every task has one."""


@dataclass(frozen=True)
class TaskMetrics:
    """The metrics of a task, ``loss`` first. Records have them by these names; ``ema_NAME`` is that of averaged
    weights."""

    headline: str
    """The one to judge by."""
    metrics: Mapping[str, Metric]

    def find(self, key: str) -> Metric | None:
        """The metric of a record's key; None for one that is no metric."""
        return self.metrics.get(key.removeprefix("ema_"))

    def words(self, key: str, value: float | None) -> str:
        """Name and value of a record's metric: ``ema acc1 71.20 %``."""
        return f"{key.replace('ema_', 'ema ')} {(self.find(key) or LOSS).text(value)}"


def metrics_of(task: str) -> TaskMetrics:
    """The metrics that the file of a task states: ``METRICS`` and ``HEADLINE``, as literals.

    Raises UserError where they are missing or not what they should be.
    """
    constants = plugins.stated(_PACKAGE, task)
    stated, headline = constants.get("METRICS"), constants.get("HEADLINE")
    metrics, wrong = {"loss": LOSS}, ""
    for name, about in stated.items() if isinstance(stated, dict) else ():
        is_name = isinstance(name, str) and _NAME.fullmatch(name) is not None and name not in _TAKEN
        match about:
            case (str(unit), "higher" | "lower" as better, str(label)) if is_name:
                metrics[name] = Metric(unit, better == "higher", label)
            case _:
                wrong = wrong or f"METRICS[{name!r}] is {about!r}."
    if not isinstance(stated, dict) or not isinstance(headline, str) or headline not in metrics:
        wrong = wrong or f"METRICS is {stated!r}, HEADLINE is {headline!r}."
    if wrong:
        what = f"The file of task '{task}' does not state its metrics."
        fix = "State them as literals, by names that no record has yet: "
        fix += 'METRICS = {"mae": ("years", "lower", "Mean absolute error")} and HEADLINE = "mae".'
        raise UserError(what, why=wrong, fix=fix, key="task.name")
    return TaskMetrics(str(headline), metrics)


def judged_by(config: Config) -> str:
    """What the best model is judged by: ``checkpoint.best``, or the headline of the task."""
    return config.checkpoint.best or f"val/{metrics_of(config.task.name).headline}"


def taken_of_train(config: Config) -> dict[str, Any]:
    """What the task takes of ``train``, for its ``build``."""
    taken = plugins.stated(_PACKAGE, config.task.name).get("TAKES", ())
    return {name: getattr(config.train, name) for name in _OF_TRAIN if name in taken}


def check_task(config: Config) -> None:
    """Refuse options that the task does not have, settings that it does not take, and metrics that it does not measure.

    Without importing it.
    """
    name = config.task.name
    metrics = metrics_of(name)
    plugins.check_options(_PACKAGE, name, config.task.options, where="task")
    stated = plugins.stated(_PACKAGE, name)
    for setting, default in _OF_TRAIN.items():
        if getattr(config.train, setting) != default and setting not in stated.get("TAKES", ()):
            what = f"train.{setting} does not go with task.name={name}."
            why = "That task does not take it: its file does not name it in TAKES."
            raise UserError(what, why=why, fix=f"Leave train.{setting} out.", key=f"train.{setting}")
    wanted = stated.get("LABELS")
    given = plugins.stated("trainkit.data.datasets", config.data.name).get("LABELS", "one")
    if wanted not in (None, given):
        what = f"task.name={name} does not go with data.name={config.data.name}."
        why = f"The task takes {wanted} label{'s' * (wanted != 'one')} an image, the data has {given}."
        fix = f"Use task.name={'multilabel' if given == 'several' else 'classification'}, or other data; "
        fix += 'a data set of your own with several labels states LABELS = "several" in its file.'
        raise UserError(what, why=why, fix=fix, key="task.name")
    measured = [f"val/{prefix}{metric}" for prefix in ("", "ema_") for metric in metrics.metrics]
    if config.checkpoint.best is not None and config.checkpoint.best not in measured:
        what = f"checkpoint.best={config.checkpoint.best} is not valid."
        fix = did_you_mean(config.checkpoint.best, measured, otherwise=f"Use val/{metrics.headline}.")
        raise UserError(what, why=f"Task '{name}' measures: {', '.join(measured)}.", fix=fix, key="checkpoint.best")


# Optimizers and schedules


@dataclass(frozen=True)
class Listed:
    """An optimizer of a library."""

    library: str
    name: str
    """In timm's registry; of torch's the class."""
    class_name: str
    file: Path | None
    """Where its class is; None: in a package that timm would import."""
    defaults: Mapping[str, Any] | None = None
    """What timm's registry gives to the class."""

    @property
    def signature(self) -> plugins.Signature:
        """The options of its class."""
        return plugins.class_signature(self.file, self.class_name) if self.file else plugins.Signature()


def find_optimizer(name: str) -> Listed:
    """The optimizer of that name: ``adan``, ``timm/adafactor``, ``torch/adafactor``.

    Raises UserError for one that neither has.
    """
    from trainkit.config.schema import OptimConfig

    known = library_optimizers()
    for key in (name, f"timm/{name}", f"torch/{name}"):
        if key in known:
            return known[key]
    raise unknown("optimizer", name, [*OptimConfig.OURS, *usable_names()], own=True, key="optim.name")


def usable_names() -> list[str]:
    """Names of timm's and torch's optimizers that are not refused whatever their options, beside ours."""
    from trainkit.config.schema import OptimConfig

    usable = {name for name, listed in library_optimizers().items() if not any(objection(listed, {}, sharded=False))}
    return sorted({name.partition("/")[2] for name in usable} - OptimConfig.OURS.keys())


def check_optimizer(config: Config) -> None:
    """Refuse an optimizer that does not exist or cannot be used, and options that it does not have.

    Raises UserError.
    """
    from trainkit.config.checks import strategy_traits

    optim = config.optim
    if optim.name == "airbench":
        must_be = "0 with optim.name=airbench, which has a decay of its own"
        require(optim.weight_decay == 0, "optim.weight_decay", f"{optim.weight_decay:g}", must_be)
    if optim.name in optim.OURS:
        return
    given = optim.given()
    if optim.is_own:
        plugins.check_options("trainkit.optim", optim.name, given, where="optim")
        return
    listed = find_optimizer(optim.name)
    signature = listed.signature
    sharded = strategy_traits(config.strategy.name).sharded
    why, fix = objection(listed, {**(listed.defaults or {}), **given}, sharded=sharded)
    if why:
        raise UserError(f"optim.name={optim.name} is not possible.", why=why, fix=fix, key="optim.name")
    if "weight_decay" not in signature.options and optim.weight_decay:
        what = f"optim.weight_decay={optim.weight_decay:g} does not go with optim.name={optim.name}."
        raise UserError(what, why="It has no weight decay.", fix="Use optim.weight_decay=0.", key="optim.weight_decay")
    usual = signature.defaults.get("betas") or (0.9, 0.999)
    if optim.betas is not None and "betas" in signature.options and len(optim.betas) != len(usual):
        what = f"optim.name={optim.name} does not take {len(optim.betas)} numbers as optim.betas."
        fix = f"Give {len(usual)}, or leave optim.betas out."
        raise UserError(what, why=f"It has {len(usual)}.", fix=fix, key="optim.betas")
    plugins.check_against(signature, optim.name, given, where="optim")


def objection(listed: Listed, given: Mapping[str, Any], *, sharded: bool) -> tuple[str, str]:
    """Why an optimizer cannot be used, and what to do instead; empty if it can."""
    told, other = yaml.packaged("optimizers"), "Use another one: adamw, sgd, lamb, muon."
    if listed.file is None:
        return f"It is {listed.class_name}: its state is in formats of its own, which checkpoints do not hold.", other
    for name in (listed.class_name, f"{listed.library}.{listed.class_name}"):
        if name in told["refused"]:
            return told["refused"][name], other
    if given.get("max_grad_norm"):
        return "optim.max_grad_norm would be the norm of a rank's part.", "Use train.grad_clip_norm."
    by_norms = listed.class_name in told["whole_only"] or given.get("caution") or given.get("algo") == "adamuon"
    if sharded and by_norms:
        why = "It goes by norms or means of a whole weight, in ways that torch does not compute over the ranks' parts."
        return why, "Use it with a strategy that holds whole weights, such as strategy.name=zero."
    return "", ""


def check_schedule(schedule: ScheduleConfig) -> None:
    """Refuse a schedule that does not exist, and options that it does not have. Raises UserError."""
    if schedule.is_own:
        asked = plugins.signature("trainkit.schedule", schedule.name).options
        plugins.check_options("trainkit.schedule", schedule.name, given_to_own(schedule, asked, 1), where="schedule")
    elif schedule.name not in schedule.OURS:
        raise unknown("schedule", schedule.name, list(schedule.OURS), own=True, key="schedule.name")


def given_to_own(schedule: ScheduleConfig, asked: Sequence[str], steps_per_epoch: int) -> dict[str, Any]:
    """What a schedule of the user's own is given: its options, and what else it asks for by name."""
    known = {name: getattr(schedule, name) for name in type(schedule).model_fields if name != "name"}
    known["steps_per_epoch"] = steps_per_epoch
    return {**{name: value for name, value in known.items() if name in asked}, **schedule.options}


@lru_cache(maxsize=1)
def library_optimizers() -> dict[str, Listed]:
    """``timm/NAME`` and ``torch/NAME`` -> optimizer; nothing of a library that is not installed."""
    torchs = ((name.lower(), Listed("torch", name, name, file)) for name, file in _torch_classes().items())
    return {f"{listed.library}/{name}": listed for name, listed in [*torchs, *_timms()]}


def _timms() -> Iterator[tuple[str, Listed]]:
    if (folder := _folder("timm")) is None:
        return
    files = {f"torch.optim.{name}": file for name, file in _torch_classes().items()}
    tree = plugins.parse(folder / "_optim_factory.py", None)
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.level == 1:
            files.update({alias.name: folder / f"{node.module}.py" for alias in node.names})
    calls = [(ast.unparse(node.func), node) for node in ast.walk(tree) if isinstance(node, ast.Call)]
    found: dict[str, Listed] = {}
    for call in (call for function, call in calls if function == "OptimInfo"):
        given = dict(zip(("name", "opt_class"), call.args, strict=False))
        given |= {str(word.arg): word.value for word in call.keywords}
        name = str(ast.literal_eval(given["name"]))
        defaults = ast.literal_eval(given["defaults"]) if "defaults" in given else None
        class_name = ast.unparse(given["opt_class"]).strip("'\"")
        found[name] = Listed("timm", name, class_name.removeprefix("torch.optim."), files.get(class_name), defaults)
    for function, call in calls:
        if function.endswith(".register_alias"):
            alias, target = map(ast.literal_eval, call.args)
            found[alias] = found[target]
    yield from found.items()


def _torch_classes() -> dict[str, Path]:
    if (folder := _folder("torch")) is None:
        return {}
    imported = [node for node in plugins.parse(folder / "__init__.py", None).body if isinstance(node, ast.ImportFrom)]
    return {
        alias.name: folder / f"{str(node.module).rpartition('.')[2]}.py"
        for node in imported
        for alias in node.names
        if alias.name[0].isupper() and alias.name != "Optimizer"
    }


def _folder(library: str) -> Path | None:
    spec = importlib.util.find_spec(library)  # finds, does not import: the package is a top-level one
    folders = [Path(folder, "optim") for folder in (spec.submodule_search_locations or [])] if spec else []
    return next((folder for folder in folders if (folder / "__init__.py").is_file()), None)
