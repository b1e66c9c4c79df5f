"""A run's standing as one line of text, for output that is not a terminal."""

from tba_jax.roles.standing import Standing
from tba_jax.run import best_step

# Of the roles that do something else than their work, so many are named.
_MOST_NAMED = 4


def duration(seconds: float) -> str:
    """M:SS, or H:MM:SS."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def short(count: float) -> str:
    """A count in three digits or so: 950, 21.4k, 3.2M."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if count >= limit:
            return f"{count / (1e3 if unit == 'k' else limit):.1f}{unit}"
    return f"{count:,.0f}" if count >= 100 else f"{count:.3g}"


def line(standing: Standing) -> str:
    """What holds of the run right now."""
    parts = [standing.headline] if standing.headline else _figures(standing)
    named = [f"{who}: {sentence}" for who, sentence in standing.says[:_MOST_NAMED]]
    more = len(standing.says) - len(named)
    return "  ".join([*parts, *named, *([f"and {more} more"] if more else [])])


def _figures(standing: Standing) -> list[str]:
    trainer, parts = standing.trainer, [f"step {standing.step}/{standing.steps}"]
    if standing.is_trained:
        parts.append("all steps are done")
    parts += [f"{title} {trainer[name]:{form}}" for title, name, form in _TRAINER if name in trainer]
    if standing.steps_per_second is not None:
        parts.append(f"{pace(standing.steps_per_second)}")
    if standing.eta_seconds is not None:
        parts.append(f"ETA {duration(standing.eta_seconds)}")
    if (speed := standing.rate("tokens_per_second")) is not None:
        parts.append(f"trainer {short(speed)} tokens/s")
    if (share := standing.rate("mfu")) is not None:
        parts.append(f"MFU {100 * share:.1f} %")
    if any(speed is not None for speed in standing.searchers.values()):
        parts.append("searchers " + searchers(standing))
    if standing.evaluations:
        step, score = standing.evaluations[-1]
        best = best_step.told(standing.best, apart_from=step)
        parts.append(f"held-out {score:.3f} at step {step}" + (f" ({best})" if best else ""))
    return parts


_TRAINER = (
    ("reward", "reward", ".3f"),
    ("own", "reward_own", ".3f"),
    ("mounted", "reward_mounted", ".3f"),
    ("staleness", "staleness_mean", ".1f"),
)


def pace(steps_per_second: float) -> str:
    """Steps per second, or seconds per step where that is the larger figure."""
    return f"{steps_per_second:.1f} steps/s" if steps_per_second >= 1 else f"{1 / steps_per_second:.1f} s/step"


def searchers(standing: Standing) -> str:
    """The speed of each searcher, of many their sum."""
    speeds = list(standing.searchers.values())
    if len(speeds) > 3:
        known = [speed for speed in speeds if speed is not None]
        return f"{short(sum(known))} tokens/s ({len(known)} of {len(speeds)} at work)"
    return " + ".join("–" if speed is None else short(speed) for speed in speeds) + " tokens/s"
