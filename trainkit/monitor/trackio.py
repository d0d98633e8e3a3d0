"""trackio: ``trackio show --project trainkit`` shows it; files of its own in TRACKIO_DIR, which nobody else gets.

It is told metrics, the training settings, tags and notes; not the use of this host, which the run's own record has.
With TRACKIO_SPACE_ID or TRACKIO_SERVER_URL, which trackio reads, it sends them there. Where a token of Hugging Face is
stored it asks that hub for the user's name.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from trainkit.config.schema import Config
from trainkit.monitor.base import Logger, Sender, Start, curves, run_id, training_settings
from trainkit.run.folder import RunDir
from trainkit.run.labels import shown_labels

EXTRA = "trackio"
PEERS = "judge"


class _Trackio:
    def __init__(self, run_dir: RunDir, config: Config, start: Start) -> None:
        import trackio  # noqa: F401  here, not in the thread: data workers are forked meanwhile

        labels = shown_labels(run_dir)
        said = {"tags": list(labels.tags), "notes": [note.text for note in labels.notes]}
        self._settings = training_settings(config, start) | said
        # trackio finds a run again by its name alone, and runs of other folders may have the same.
        self._project = config.monitor.wandb_project
        self._name = run_id(run_dir)

    def begin(self) -> set[tuple[str, int]]:
        import trackio
        from trackio.sqlite_storage import SQLiteStorage

        quiet: Any = {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
        self._run: Any = trackio.init(self._project, self._name, resume="allow", config=self._settings, **quiet)
        rows = SQLiteStorage.get_logs(self._project, self._name, run_id=self._run.id)
        return {(key[5:], row["step"]) for row in rows for key in row if key.startswith("loss/")}

    def send(self, records: Sequence[Mapping[str, Any]]) -> None:
        for record in records:
            self._run.log(curves(record), step=record["step"])

    def end(self, *, failed: bool) -> None:
        self._run.finish()


def build(run_dir: RunDir, config: Config, start: Start) -> Logger:
    """One trackio run per run folder, in project ``monitor.wandb_project``."""
    return Sender(_Trackio(run_dir, config, start), run_dir, until=start.resumed_step)
