"""Steps of a bare JAX update (benchmarks/bare.py) of a case: python -m benchmarks.peers.run_bare SPEC RESULT. See run_trl.

It neither generates nor scores: rows are random, and all have P + R tokens.
"""

import importlib.metadata
import json
import sys
import types
from pathlib import Path

from benchmarks import bare_step, trainer_update
from benchmarks.peers import recording


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text())
    changes = {
        "task.prompt_length": spec["prompt_length"],
        "task.response_length": spec["response_length"],
        "learner.queries": spec["queries"],
        "learner.completions": spec["samples"],
    }
    program = trainer_update.update_program(changes, spec["vocab"])
    bare = types.SimpleNamespace(step=bare_step.bare_side(program, changes, spec["vocab"]))
    record = recording.Recording()
    record.timed(bare, "step", "update")
    record.begin()
    for _ in range(spec["steps"]):
        bare.step()
        record.count(spec["queries"] * spec["samples"] * spec["response_length"])
        record.step_ends()
    record.write(sys.argv[2], versions={"jax": importlib.metadata.version("jax")})


if __name__ == "__main__":
    main()
