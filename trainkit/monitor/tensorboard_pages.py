"""What TensorBoard shows besides curves, as the summaries that its plugins read; made without TensorFlow."""

from __future__ import annotations

import struct
import time
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from trainkit import terminal
from trainkit.monitor.described import Taken

OVERLAID = ("loss", "acc1", "acc5", "lr")
JUDGED_BY = ("acc1/val", "loss/val", "acc1/test", "loss/test")
"""Metrics in the columns of the HParams tab."""
_LEGIBLE = 30
"""More classes make no table that anybody reads."""


def layout(*, averaged: bool) -> Any:
    """What the Custom Scalars tab draws together."""
    from tensorboard.compat.proto import summary_pb2
    from tensorboard.plugins.custom_scalar import layout_pb2, metadata

    def chart(metric: str) -> Any:
        tags = [f"{metric}/train", f"{metric}/val", *[f"ema_{metric}/val"] * (averaged and metric != "lr")]
        return layout_pb2.Chart(title=metric, multiline=layout_pb2.MultilineChartContent(tag=tags))

    found = layout_pb2.Layout(category=[layout_pb2.Category(title="train and val", chart=map(chart, OVERLAID))])
    # As the plugin's own `summary.pb` does, which needs TensorFlow.
    text = _strings([found.SerializeToString()])
    value = {"tag": metadata.CONFIG_SUMMARY_TAG, "metadata": metadata.create_summary_metadata(), "tensor": text}
    return summary_pb2.Summary(value=[summary_pb2.Summary.Value(**value)])


def hparams(values: Mapping[str, float | str | bool], name: str) -> Any:
    """A row of the HParams tab: with what it was trained. Its metrics are the curves of the same folder."""
    from tensorboard.compat.proto import summary_pb2
    from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2

    kinds = {bool: "DATA_TYPE_BOOL", str: "DATA_TYPE_STRING"}
    infos = [
        api_pb2.HParamInfo(name=key, type=api_pb2.DataType.Value(kinds.get(type(value), "DATA_TYPE_FLOAT64")))
        for key, value in values.items()
    ]
    metrics = [api_pb2.MetricInfo(name=api_pb2.MetricName(tag=tag)) for tag in JUDGED_BY]
    started = plugin_data_pb2.SessionStartInfo(group_name=name, start_time_secs=time.time())
    for key, value in values.items():
        field = {bool: "bool_value", str: "string_value"}.get(type(value), "number_value")
        setattr(started.hparams[key], field, value)
    experiment, version = api_pb2.Experiment(hparam_infos=infos, metric_infos=metrics), metadata.PLUGIN_DATA_VERSION
    told = {
        metadata.EXPERIMENT_TAG: plugin_data_pb2.HParamsPluginData(experiment=experiment, version=version),
        metadata.SESSION_START_INFO_TAG: plugin_data_pb2.HParamsPluginData(session_start_info=started, version=version),
    }
    return summary_pb2.Summary(value=[_hparams_value(tag, data) for tag, data in told.items()])


def ended(*, failed: bool) -> Any:
    """That row's state."""
    from tensorboard.compat.proto import summary_pb2
    from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2

    status = api_pb2.Status.Value("STATUS_FAILURE" if failed else "STATUS_SUCCESS")
    info = plugin_data_pb2.SessionEndInfo(status=status, end_time_secs=time.time())
    data = plugin_data_pb2.HParamsPluginData(session_end_info=info, version=metadata.PLUGIN_DATA_VERSION)
    return summary_pb2.Summary(value=[_hparams_value(metadata.SESSION_END_INFO_TAG, data)])


def _hparams_value(tag: str, data: Any) -> Any:
    from tensorboard.compat.proto import summary_pb2
    from tensorboard.plugins.hparams import metadata

    about = summary_pb2.SummaryMetadata()
    about.plugin_data.plugin_name = metadata.PLUGIN_NAME
    about.plugin_data.content = data.SerializeToString()
    return summary_pb2.Summary.Value(tag=tag, metadata=about)


def confusion(taken: Taken) -> Any:
    """A picture for the Images tab, a row a class, dark where samples are; of few classes a table for Text as well."""
    from tensorboard.compat.proto import summary_pb2

    counts = taken.rows()
    side = max(1, 400 // len(counts))
    image = summary_pb2.Summary.Image(
        height=side * len(counts), width=side * len(counts), colorspace=1, encoded_image_string=_heat_map(counts, side)
    )
    values = [summary_pb2.Summary.Value(tag="confusion/test", image=image)]
    if len(counts) <= _LEGIBLE:
        about = summary_pb2.SummaryMetadata()
        about.plugin_data.plugin_name = "text"
        text = _strings([_markdown(taken.classes, counts).encode()])
        values.append(summary_pb2.Summary.Value(tag="confusion/test/table", metadata=about, tensor=text))
    return summary_pb2.Summary(value=values)


def _strings(values: Sequence[bytes]) -> Any:
    from tensorboard.compat.proto import tensor_pb2, types_pb2

    text = tensor_pb2.TensorProto(dtype=types_pb2.DT_STRING, string_val=list(values))
    text.tensor_shape.SetInParent()
    return text


def _markdown(classes: Sequence[str], counts: Sequence[Sequence[int]]) -> str:
    rows = [[name, *(str(count or "") for count in row)] for name, row in zip(classes, counts, strict=True)]
    return terminal.markdown_table(["is \\ taken for", *classes], rows)


def _heat_map(counts: Sequence[Sequence[int]], side: int) -> bytes:
    """A grey PNG, ``side`` pixels a class: white for none of the class's samples, black for all of them.

    By hand: matplotlib takes half a second to import, for which GPUs would wait.
    """
    lines = b""
    for row in counts:
        total = sum(row) or 1
        line = b"".join(bytes([255 - round(255 * count / total)]) * side for count in row)
        lines += (b"\0" + line) * side
    size = side * len(counts)

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", size, size, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(lines)) + chunk(b"IEND", b"")
