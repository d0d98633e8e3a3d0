"""MLflow: a run on the server that MLFLOW_TRACKING_URI names, which MLflow's client reads, as the user's login there.

It gets metrics, the training settings, the run's name, tags and notes: no code, no environment, no host. The experiment
is MLFLOW_EXPERIMENT_NAME, else ``monitor.wandb_project``. The run has a tag by which every attempt finds it again.

MLflow's client waits 120 s for an answer, and asks eight times; here it asks three times and waits 10 s, unless the
user has set that. MLflow cannot take points back.
"""

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from trainkit.common import process, terminal
from trainkit.common.errors import RunFailedError, UserError
from trainkit.config.layers import flatten
from trainkit.config.schema import Config
from trainkit.monitor.base import Logger, Sender, Start, curves, listed_name, run_id, training_settings, without_login
from trainkit.run.folder import RunDir
from trainkit.run.labels import shown_labels

EXTRA = "mlflow"
PEERS = "judge"
SYNC_SECONDS = 600.0
"""For MLflow's server, while somebody waits for it."""
_MOST_METRICS = 1000
"""Metrics that MLflow takes at once."""
_MOST_PARAMS = 100
_LONGEST_PARAM = 500
"""Characters that MLflow takes."""
_LONGEST_TAG = 5000
_LONGEST_NAME = 250
_RUN = "trainkit.run"


class _MLflow:
    def __init__(self, run_dir: RunDir, config: Config, start: Start) -> None:
        ours = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true"}
        patience = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "10", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2"}
        process.set_variables(ours | patience, unless_set=True)
        # Here, not in the thread: data workers are forked meanwhile, and would wait for the lock of a half-done import.
        import mlflow
        from mlflow.environment_variables import MLFLOW_EXPERIMENT_NAME

        if not mlflow.is_tracking_uri_set():
            why = "MLFLOW_TRACKING_URI is not set."
            fix = "export MLFLOW_TRACKING_URI=http://HOST:5000, or remove the logger."
            raise UserError("The logger mlflow has no server.", why=why, fix=fix, key="monitor.loggers")
        try:
            self._client: Any = mlflow.MlflowClient()
        except Exception as error:  # of MLflow, which has several kinds, and of the drivers of its stores
            raise RuntimeError(without_login(str(error)) or type(error).__name__) from None
        self._run_dir = run_dir
        self._id = ""
        self.experiment = MLFLOW_EXPERIMENT_NAME.get() or config.monitor.wandb_project
        settings = flatten(training_settings(config, start))
        self._params = {key: str(value)[:_LONGEST_PARAM] for key, value in settings}

    def begin(self) -> set[tuple[str, int]]:
        from mlflow.entities import Param, RunTag
        from mlflow.exceptions import MlflowException

        with suppress(MlflowException):  # it is there already, or another run of the sweep makes it now
            self._client.create_experiment(self.experiment)
        where = self._client.get_experiment_by_name(self.experiment).experiment_id
        own = run_id(self._run_dir)
        found = self._client.search_runs([where], f"tags.`{_RUN}` = '{own}'", max_results=1)
        run = next(iter(found), None) or self._client.create_run(where, tags={_RUN: own})
        self._id = run.info.run_id
        self._client.update_run(self._id, status="RUNNING", name=listed_name(self._run_dir)[:_LONGEST_NAME])
        labels = shown_labels(self._run_dir)
        notes = "\n\n".join([note.text for note in labels.notes])
        tags = {"tags": ", ".join(labels.tags), "mlflow.note.content": notes}
        # MLflow changes no parameter: what a prolonged run has anew is a tag of that name.
        old = run.data.params
        tags |= {key: value for key, value in self._params.items() if old.get(key, value) != value}
        said = [RunTag(key, value[:_LONGEST_TAG]) for key, value in tags.items() if value or key in run.data.tags]
        new = [Param(key, value) for key, value in self._params.items() if key not in old]
        self._client.log_batch(self._id, tags=said)
        for first in range(0, len(new), _MOST_PARAMS):
            self._client.log_batch(self._id, params=new[first : first + _MOST_PARAMS])
        there = set()
        for key in run.data.metrics:
            if key.startswith("loss/"):
                for point in self._client.get_metric_history(self._id, key):
                    there.add((key.removeprefix("loss/"), point.step))
        return there

    def send(self, records: Sequence[Mapping[str, Any]]) -> None:
        from mlflow.entities import Metric

        points = []
        for record in records:
            milliseconds = int(record.get("time", time.time()) * 1000)
            for key, value in curves(record).items():
                points.append(Metric(key, float(value), milliseconds, record["step"]))
        for first in range(0, len(points), _MOST_METRICS):
            self._client.log_batch(self._id, metrics=points[first : first + _MOST_METRICS])

    def end(self, *, failed: bool) -> None:
        self._client.set_terminated(self._id, "FAILED" if failed else "FINISHED")


def build(run_dir: RunDir, config: Config, start: Start) -> Logger:
    """One MLflow run per run folder. Raises UserError: no server is named."""
    return Sender(_MLflow(run_dir, config, start), run_dir, until=start.resumed_step)


def sync(run_dir: RunDir, config: Config, start: Start) -> str:
    """Send what the server does not have yet; what is there now, and where.

    Raises:
        UserError: no server is named, or its store cannot be opened.
        RunFailedError: it does not answer, or refuses something.
    """
    try:
        client = _MLflow(run_dir, config, start)
    except RuntimeError as error:
        why = f"{terminal.one_line(error).rstrip('.')}."
        fix = "Check MLFLOW_TRACKING_URI: http://HOST:5000, or sqlite:////FOLDER/mlflow.db."
        raise UserError("MLflow cannot open its store.", why=why, fix=fix) from None
    try:
        Sender(client, run_dir, until=math.inf, patience=SYNC_SECONDS).close()
    except (RuntimeError, TimeoutError) as error:
        why = f"{terminal.one_line(error).rstrip('.')}."
        fix = "Repeat the command: it sends what is missing."
        raise RunFailedError(f"{run_dir.name} is not in MLflow yet.", why=why, fix=fix) from None
    return f"all records as {listed_name(run_dir)} in {client.experiment}"
