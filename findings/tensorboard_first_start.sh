#!/usr/bin/env bash
# TensorBoard without its data server takes a run's first mark of a restart for the run's beginning.
#
# Version:  tensorboard 2.21.0, tensorboard-data-server 0.7.2, numpy 2.4.6, Python 3.11
# Expected: A job writes steps 1 to 5 and is killed; its restart writes SessionLog.START at step 4 (what SummaryWriter does
#           for purge_step=4) and steps 4 to 8. Every reader forgets the steps 4 and 5 of the first file.
# Seen:     EventAccumulator of event_accumulator.py does. The reader of the page (plugin_event_accumulator.py), which
#           `tensorboard --load_fast=false` uses, and every platform without a binary of the data server, does not: the
#           first START that it meets "does not indicate a restart", so the steps 4 and 5 are shown twice. With a START at
#           step 0 in the first file too, both readers do what is expected.
# Source:   tensorboard/backend/event_processing/plugin_event_accumulator.py, _CheckForRestartAndMaybePurge
#
# Exit: 0 while it is as seen, 1 if it has changed.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet tensorboard==2.21.0 tensorboard-data-server==0.7.2 numpy==2.4.6 setuptools==80.9.0
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import sys

from tensorboard.backend.event_processing import event_accumulator, plugin_event_accumulator
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter


def write(folder, steps, start):
    writer = EventFileWriter(folder)
    if start is not None:
        writer.add_event(Event(step=start, file_version="brain.Event:2"))
        writer.add_event(Event(step=start, session_log=SessionLog(status=SessionLog.START)))
    for step in steps:
        writer.add_event(Event(step=step, summary=Summary(value=[Summary.Value(tag="loss", simple_value=1.0)])))
    writer.close()


def shown(folder):
    old = event_accumulator.EventAccumulator(folder)
    page = plugin_event_accumulator.EventAccumulator(folder)
    for reader in (old, page):
        reader.Reload()
    return [point.step for point in old.Scalars("loss")], [point.step for point in page.Tensors("loss")]


def told(name, first_start):
    write(name, range(1, 6), first_start)
    write(name, range(4, 9), 4)
    by_old, by_page = shown(name)
    print(f"first START {first_start}: EventAccumulator {by_old}, page {by_page}")
    return by_old, by_page


once, twice = [1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 5, 4, 5, 6, 7, 8]
as_seen = told("without", None) == (once, twice) and told("with", 0) == (once, once)
print("as seen" if as_seen else "CHANGED")
sys.exit(not as_seen)
PYTHON
