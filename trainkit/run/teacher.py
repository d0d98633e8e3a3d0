"""The run whose model another one learns from: ``train.distill_from``."""

from pathlib import Path

from trainkit.common.errors import UserError
from trainkit.config.layers import flatten
from trainkit.config.loading import load
from trainkit.config.schema import PLAIN, Config, reach
from trainkit.run.find import named
from trainkit.run.folder import RunDir

_KEY = "train.distill_from"


def teacher_of(config: Config) -> tuple[RunDir, Config] | None:
    """The run that ``config`` learns from, and ``config`` with that run's model; None: it learns from none.

    Of what that run's settings say only the model counts. Code of the user's own is that of ``config``: a run of
    somebody else's brings none into this one.

    Raises UserError where there is no such run, it has no checkpoint, or it names code that ``config`` does not.
    """
    reference = config.train.distill_from
    if reference is None:
        return None
    folder = Path(reference).expanduser()
    if not folder.exists() and len(found := named(reference)) == 1:
        folder = found[0]
    run = RunDir.open(folder)
    if not any(run.checkpoints.glob("step-*")):
        why = f"{run.path} has no checkpoint yet."
        raise UserError(f"{_KEY}={reference} has no model.", why=why, fix="Give a run that has trained.", key=_KEY)
    model = load(str(run.config)).config.model
    theirs, own = (
        {f"{key}={value}" for key, value in flatten({"model": each.model_dump()}) if reach(key, value) is not PLAIN}
        for each in (model, config.model)
    )
    if theirs - own:
        raise UserError(
            f"{_KEY}={reference} would import code that is not this run's.",
            why=f"Its settings name {', '.join(sorted(theirs - own))}, and those of this run do not.",
            fix="Give a run with a model of trainkit, timm or torchvision, or with this run's own.",
            key=_KEY,
        )
    return run, config.model_copy(update={"model": model})
