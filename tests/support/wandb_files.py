"""What a run of wandb has written to disk: the records of a .wandb file, which is a log of LevelDB's with a header of its own."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_BLOCK, _HEADER = 32768, 7


def _records(path: Path) -> Iterator[bytes]:
    data, at, parts = path.read_bytes(), _HEADER, b""  # the header of the file is that long, too
    while at + _HEADER <= len(data):
        if _BLOCK - at % _BLOCK < _HEADER:  # the rest of a block has no room for a record
            at += _BLOCK - at % _BLOCK
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + _HEADER])
        parts += data[at + _HEADER : at + _HEADER + length]
        at += _HEADER + length
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


def read(path: Path) -> dict[str, Any]:
    """{"run": the message of the run, "history": [{name: value}], "axes": {glob of names: metric of their x-axis}}."""
    from wandb.proto import wandb_internal_pb2

    found: dict[str, Any] = {"history": [], "axes": {}}
    for record in map(wandb_internal_pb2.Record.FromString, _records(path)):
        if record.WhichOneof("record_type") == "run":
            found["run"] = record.run
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            found["history"].append({item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items})
        if record.WhichOneof("record_type") == "metric" and record.metric.step_metric:
            found["axes"][record.metric.glob_name or record.metric.name] = record.metric.step_metric
    return found
