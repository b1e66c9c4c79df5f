"""--step=N of commands that take one snapshot of a run: the newest where it is not given."""

from typing import TYPE_CHECKING

from absl import flags

from tba_jax.run import layout

if TYPE_CHECKING:
    from tba_jax.run.places import Place


def add_flag(values: flags.FlagValues) -> None:
    flags.DEFINE_integer("step", None, "trainer step of the snapshot; default: the newest", flag_values=values)


def chosen(policies: "Place", step: int | None, *, called: str) -> int:
    """The step that --step asks for.

    Raises:
      ValueError: it has no snapshot in the run that messages call `called`; names the steps that have one.
    """
    from tba_jax.run import snapshots

    steps = snapshots.committed_steps(policies)
    if not steps:
        raise ValueError(f"{policies} holds no snapshot yet")
    if step is not None and step not in steps:
        raise ValueError(f"--step={step} is not a snapshot of {called}; there are {layout.listed(steps)}")
    return steps[-1] if step is None else step
