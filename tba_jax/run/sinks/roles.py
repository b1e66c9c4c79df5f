"""The session of a role: made in its process, because the process of a tracker reads nothing of the run."""

import os
import re
from typing import Any

from tba_jax.run import contract, layout
from tba_jax.run.secrets_of_config import without_secrets
from tba_jax.run.sinks.session import Session


def session_of(config: Any, run: layout.RunDir, name: str, *, kind: str) -> Session:
    """What trackers are told of the role of this process.

    Args: config: of the run; name: of the folder of the role's metrics; kind: of the role.

    Raises: as contract.read.
    """
    identity = str(contract.read(run)["id"])
    called = f"{run.root.name}-{identity[:8]}"
    return Session(
        project=config.metrics.project,
        group=config.metrics.group or called,
        name=f"{called}-{name}",
        id=re.sub(r"[^\w-]", "-", f"{identity[:16]}-{name}", flags=re.ASCII)[:64],
        kind=kind,
        folder=str(run.metrics(name).absolute()),
        config=without_secrets(contract.plain(config.to_dict())),
        pid=os.getpid(),
    )
