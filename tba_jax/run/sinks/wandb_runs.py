"""Points of a role as a run of Weights & Biases: all roles of a run are in one group, and a role that starts again goes on."""

from typing import Any

from tba_jax.run.sinks.session import Session, Tell

# For which the server may answer at the start; after it points are kept on disk.
_ANSWER_SECONDS = 30.0


class WandbRuns:
    """A Sink. Without login or network, points are kept in the folder of the role's metrics, and `wandb sync` sends them."""

    def __init__(self, tell: Tell):
        self._tell = tell
        self._run: Any = None

    def begin(self, session: Session) -> None:
        import wandb

        settings = wandb.Settings(
            silent=True, console="off", save_code=False, init_timeout=_ANSWER_SECONDS, x_stats_pid=session.pid
        )
        told: dict[str, Any] = dict(
            project=session.project,
            group=session.group,
            name=session.name,
            job_type=session.kind,
            id=session.id,
            resume="allow",
            dir=session.folder,
            config=session.config,
            settings=settings,
        )
        try:
            self._run = wandb.init(**told)
        except (wandb.errors.UsageError, wandb.errors.CommError, wandb.errors.AuthenticationError) as error:
            self._run = wandb.init(**told, mode="offline")
            reason = str(error).partition("\n")[0].rstrip(".")
            advice = "its points are kept in the workdir, and `wandb sync DIR/metrics/*/wandb/offline-run-*` sends them"
            self._tell(f"wandb is not reached: {reason}", advice)
        # A trainer that resumes does steps again. wandb's own step only grows, so the axis is a metric like any other.
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    def write(self, point: dict[str, Any]) -> None:
        import wandb

        histograms = {
            name: wandb.Histogram(np_histogram=(each["counts"], each["edges"])) for name, each in point["histograms"].items()
        }
        tables = {name: wandb.Table(columns=each["columns"], data=each["rows"]) for name, each in point["tables"].items()}
        self._run.log({"step": point["step"], **point["values"], **histograms, **tables})

    def end(self) -> None:
        import wandb

        self._run.finish()
        wandb.teardown()  # its service writes files after `finish` has returned
