"""How the rows of an append are packed into bytes."""

import json

import numpy as np

from tba_jax.replay.segment import LogSchema
from tests.support.tiny_log import assert_rows


def test_columns_are_packed_in_the_order_of_the_schema():
    """Unaligned offsets, empty columns and booleans: what is packed comes back, and bytes lie where the schema says."""
    columns = {"flag": ("bool", ()), "key": ("uint32", (3,)), "none": ("float32", (0,)), "row": ("int64", ())}
    schema = LogSchema(rows_per_append=3, segment_appends=2, columns=columns, reward_parts=())
    rows = {
        "flag": np.array([True, False, True]),
        "key": np.arange(9, dtype=np.uint32).reshape(3, 3),
        "none": np.zeros((3, 0), np.float32),
        "row": np.array([-1, 0, 1 << 40]),
    }
    packed = schema.pack(rows)
    assert packed.dtype == np.uint8 and packed.shape == (3 + 36 + 24,) == (schema.append_bytes,)
    assert packed[:8].tolist() == [1, 0, 1, 0, 0, 0, 0, 1] and packed[-3:].tolist() == [1, 0, 0]
    assert_rows(schema.unpack(packed), rows)
    assert LogSchema.from_json(json.loads(json.dumps(schema.to_json(), sort_keys=True))) == schema
