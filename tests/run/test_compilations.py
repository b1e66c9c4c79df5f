"""Compilations on the record of a role."""

import time

import jax
import jax.numpy as jnp

from tba_jax.telemetry import status

# GONE ['compilations', 'events', 'timeline']
from tba_jax.telemetry.record import Record


def deep(x: jax.Array) -> jax.Array:
    for i in range(60):  # unrolled: the compiler has something to do
        x = jnp.sin(x @ x + i)
    return x


def test_a_compilation_is_event_span_and_phase(tmp_path, monkeypatch):
    monkeypatch.setattr(compilations, "EVENT_SECONDS", 0.01)
    folder = tmp_path / "trainer"
    record = Record(folder, timeline_megabytes=1.0)
    record.step, phases = 7, []
    with compilations.watched(record), monkeypatch.context() as slow:
        # Written at once, what the thread of the record would write of a compilation of some seconds.
        write = record.status._tell
        slow.setattr(record.status, "_tell", lambda **told: (write(**told | {"begins": True}), phases.append(read())))

        def read() -> str:
            return status.read(folder).phase

        before = time.monotonic()
        jax.jit(deep)(jnp.ones((4, 4)))
        took = time.monotonic() - before
    assert "compiling deep" in phases and status.read(folder).phase == ""
    jax.jit(lambda x: deep(x) + 1)(jnp.ones((4, 4)))  # nobody watches
    record.close("finished")
    (told,) = [event for event in events.read(folder) if event.get("what") == "deep"]
    assert told["event"] == "compiled" and told["step"] == 7 and 0.01 <= told["seconds"] <= took
    lanes = {line["lane"] for line in timeline.each_line(folder)}
    assert lanes == {"compiler"}
    assert not [event for event in events.read(folder) if "lambda" in str(event.get("what"))]
