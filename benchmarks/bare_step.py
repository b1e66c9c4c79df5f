"""What the project's update costs beside a bare JAX step of the same mathematics (bare.py), and where the difference is.

GLIBC_TUNABLES=glibc.malloc.hugetlb=1 taskset -c 0,1 python -m benchmarks.bare_step [--vocab=4096] [--pairs=15] [--profile] […]

32 rows of 64 + 64 tokens, 4 prompts of 8 rows, 6 layers of width 384, float32, trajectory balance, AdamW after clipping. The
project's side is UpdateProgram.apply, as the trainer calls it: rows on the host are packed and placed, and measurements come back
to the host. The bare side transfers the same rows and reads its loss and norm. Both begin from the same weights. Pairs are
interleaved in one process, the side that goes first alternates, and the table has the quartiles of the ratio over the pairs.
The update computes a prompt once for its rows, the bare step for each; "with rows apart" has the update do so as well.

--profile compares the project's update with itself, once for each part that can be left out or set otherwise: a ratio of 0.98
says that the part costs 2 %, one above 1 that it saves time. Only the benchmark leaves a part out.
"""

import contextlib
import functools
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags

from benchmarks import bare, trainer_update
from configs import base
from tba_jax import sharding, trajectory
from tba_jax.learner import descent
from tba_jax.learner import update as update_lib
from tba_jax.models import decoder, layers, scoring
from tba_jax.models.parameters import Params
from tba_jax.objectives.diagnostics import diagnostics
from tba_jax.roles.trainer.update_program import UpdateProgram

# Another benchmark that a process imports may have a flag of the same name.
_VOCAB = flags.DEFINE_list("vocab", ["4096", "32000"], "Vocabularies to measure.", allow_override=True)
_SMALLEST_VOCAB = 16
_PAIRS = flags.DEFINE_integer("pairs", 15, "Measurements of each side.", lower_bound=2, allow_override=True)
_PROFILE = flags.DEFINE_boolean("profile", False, "Also measure what each part of the update costs.", allow_override=True)
_ONLY = flags.DEFINE_list(
    "only", [], "Parts that --profile measures, by the beginning of their names; default: all.", allow_override=True
)
_REMAT = flags.DEFINE_enum(
    "remat", "none", sorted(layers.REMAT), "learner.remat of the project's update. The bare step has none.", allow_override=True
)
_LOGITS = flags.DEFINE_integer(
    "logit_megabytes", 256, "learner.logit_megabytes of the update. The bare step has all.", lower_bound=1, allow_override=True
)


def bare_weights(params: Params) -> bare.Weights:
    """The project's parameters, in any nesting of the policy, as the bare step has them."""
    layers = params["layers"]
    attention, fed = layers["attention"], layers["feed_forward"]
    L, D = layers["attention_norm"]["scale"].shape
    stacked = {name: attention[name]["weight"].reshape(L, D, -1) for name in ("query", "key", "value")}
    stacked |= {"out": attention["out"]["weight"].reshape(L, -1, D)}
    stacked |= {name: fed[name]["weight"] for name in ("gate", "up", "down")}
    stacked |= {name: layers[name]["scale"] for name in ("attention_norm", "feed_forward_norm")}
    return {
        "embedding": jnp.array(params["embedding"]["weight"]),  # a copy: steps work in place
        "final_norm": jnp.array(params["final_norm"]["scale"]),
        "layers": [jax.tree.map(lambda x, layer=layer: x[layer], stacked) for layer in range(L)],
    }


def bare_rows(rows: trajectory.Rows) -> bare.Rows:
    mask = trajectory.response_mask(rows["response_length"], rows["ref_logprobs"].shape[1])
    return bare.Rows(tokens=rows["tokens"], mask=mask, ref_logprobs=rows["ref_logprobs"], reward=rows["reward"])


def bare_sizes(changes: Mapping[str, Any]) -> bare.Sizes:
    sizes = trainer_update.SIZES | dict(changes)
    names = {"heads": "model.heads", "prompt": "task.prompt_length", "completions": "learner.completions"}
    return bare.Sizes(**{name: sizes[key] for name, key in names.items()}, beta=trainer_update.BETA)


def project_side(changes: Mapping[str, Any], vocab: int) -> tuple[UpdateProgram, Callable[[], dict[str, Any]]]:
    """The program, and one update of it on full rows."""
    program = trainer_update.update_program(changes, vocab)
    return program, functools.partial(program.apply, trainer_update.random_rows(program, changes, vocab))


def bare_side(program: UpdateProgram, changes: Mapping[str, Any], vocab: int) -> Callable[[], dict[str, Any]]:
    """One bare step on the same rows, from the weights that the program has now."""
    c = base.get_config().learner
    adamw = optax.adamw(
        trainer_update.LEARNER["learner.learning_rate"], b1=c.adam_beta1, b2=c.adam_beta2, weight_decay=c.weight_decay
    )
    optimizer = optax.chain(optax.clip_by_global_norm(c.clip_norm), adamw)
    weights, rows = bare_weights(program.policy_params), bare_rows(trainer_update.random_rows(program, changes, vocab))
    step, state = bare.make_step(optimizer, bare_sizes(changes)), (weights, optimizer.init(weights))

    def run() -> dict[str, Any]:
        nonlocal state
        state, measurements = step(state, jax.device_put(rows))
        return jax.device_get(measurements)

    return run


def seconds(runs: Sequence[Callable[[], Any]], pairs: int) -> list[list[float]]:
    """Seconds of each run, interleaved; the run that goes first alternates."""
    found: list[list[float]] = [[] for _ in runs]
    for pair in range(pairs):
        for side in range(len(runs)) if pair % 2 == 0 else reversed(range(len(runs))):
            begin = time.perf_counter()
            runs[side]()
            found[side].append(time.perf_counter() - begin)
    return found


def line(name: str, mine: Sequence[float], theirs: Sequence[float]) -> str:
    lower, median, upper = np.quantile(np.array(mine) / np.array(theirs), [0.25, 0.5, 0.75])
    medians = "".join(f"{1e3 * float(np.median(times)):10.1f}" for times in (mine, theirs))
    return f"  {name:34}{medians}   {lower:7.3f}{median:8.3f}{upper:8.3f}"


def compare(vocab: int, pairs: int, changes: Mapping[str, Any]) -> None:
    """The update beside the bare step."""
    program, mine = project_side(changes, vocab)
    theirs = bare_side(program, changes, vocab)
    first = mine(), theirs()
    for name in ("loss", "grad_norm"):
        np.testing.assert_allclose(first[0][name], first[1][name], rtol=1e-4, err_msg=f"the two sides differ in {name}")
    print(line(f"v {vocab}: update / bare step", *seconds((mine, theirs), pairs)), flush=True)
    apart = _under(PARTS["shared prompts"][1], changes, vocab)
    apart()
    print(line(f"v {vocab}: with rows apart / bare step", *seconds((apart, theirs), pairs)), flush=True)


# Parts of the update. Each entry gives the settings and the patches under which the update is traced without the part.
Part = tuple[dict[str, Any], Callable[[], contextlib.AbstractContextManager[Any]]]


@contextlib.contextmanager
def _without_finiteness() -> Iterator[None]:
    def step(state: Any, frozen: Any, batch: Any, *, gradient_of: Any, optimizers: Any) -> Any:
        gradient = gradient_of(state, frozen, batch)
        after = descent._descend(state, gradient.by_part, optimizers)
        norm = optax.tree.norm(gradient.by_part["policy"])
        return after, {"loss": gradient.loss, "grad_norm": norm, **gradient.measurements}

    with mock.patch.object(descent, "step", step):
        yield


def _diagnostics_without_entropy(logprobs: jax.Array, entropy: jax.Array, *args: Any, **options: Any) -> dict[str, jax.Array]:
    return diagnostics(logprobs, jnp.zeros_like(entropy), *args, **options)


PARTS: dict[str, Part] = {
    "nothing left out (noise)": ({}, contextlib.nullcontext),
    "entropy": ({}, lambda: mock.patch.object(update_lib, "diagnostics", _diagnostics_without_entropy)),
    "diagnostics and entropy": ({}, lambda: mock.patch.object(update_lib, "diagnostics", lambda *_, **__: {})),
    "finiteness check": ({}, _without_finiteness),
    "clipping by norm": ({"learner.clip_norm": 0.0}, contextlib.nullcontext),
    "whole logits (blocks of 32 MiB)": ({"learner.logit_megabytes": 32}, contextlib.nullcontext),
    "states kept (learner.remat=full)": ({"learner.remat": "full"}, contextlib.nullcontext),
    "unrolled layers": ({}, lambda: mock.patch.object(decoder, "_UNROLLED", 0)),
    "shared prompts": ({}, lambda: mock.patch.object(scoring, "shares_prompts", lambda *_: False)),
    "parameter gathering": ({}, lambda: mock.patch.object(sharding, "constrain", lambda x, _: x)),
    "kernel over rows": ({}, lambda: mock.patch.object(decoder, "over_rows", lambda x: x)),
}


def _under(
    patched: Callable[[], contextlib.AbstractContextManager[Any]], changes: Mapping[str, Any], vocab: int
) -> Callable[[], dict[str, Any]]:
    """An update that is made and always called under the patches: the program is traced at the first call."""
    with patched():
        update = project_side(changes, vocab)[1]

    def run() -> dict[str, Any]:
        with patched():
            return update()

    return run


def profile(vocab: int, pairs: int, changes: Mapping[str, Any], only: Sequence[str]) -> None:
    """The update without a part, beside the whole update."""
    whole = project_side(changes, vocab)[1]
    whole()
    for name, (leaves, patched) in PARTS.items():
        if only and not name.startswith(tuple(only)):
            continue
        part_less = _under(patched, dict(changes) | leaves, vocab)
        part_less()
        print(line(f"v {vocab} without {name}", *seconds((part_less, whole), pairs)), flush=True)
    host(vocab, pairs, changes)


def host(vocab: int, pairs: int, changes: Mapping[str, Any]) -> None:
    """Milliseconds of an update before its dispatch: rows are packed and placed."""
    program, _ = project_side(changes, vocab)
    rows = trainer_update.random_rows(program, changes, vocab)

    def place() -> None:
        placed = program.place(rows)
        jax.block_until_ready((placed.batch, placed.packed))

    (times,) = seconds((place,), pairs)
    print(f"  v {vocab}: host packs and places rows in {1e3 * float(np.median(times)):.1f} ms", flush=True)


def _vocabularies() -> list[int]:
    """What the flags ask for. Raises ValueError: they name what there is not."""
    for name in _ONLY.value:
        if not name or not any(part.startswith(name) for part in PARTS):
            raise ValueError(f"--only={name} is the beginning of no part; there are: {'; '.join(PARTS)}")
    if _ONLY.value and not _PROFILE.value:
        raise ValueError(f"--only={','.join(_ONLY.value)} needs --profile")
    for value in _VOCAB.value:
        if not value.isdecimal() or int(value) < _SMALLEST_VOCAB:
            raise ValueError(f"--vocab={value} must be a whole number of at least {_SMALLEST_VOCAB}")
    return [int(value) for value in _VOCAB.value]


def main(_: list[str]) -> None:
    try:
        vocabularies = _vocabularies()
    except ValueError as error:
        sys.exit(f"error: {error}")
    changes = {"learner.remat": _REMAT.value, "learner.logit_megabytes": _LOGITS.value}
    told = ", ".join(f"{name}={value}" for name, value in changes.items())
    print(f"{len(os.sched_getaffinity(0))} cores, {told}, {_PAIRS.value} pairs")
    print(f"  {'':34}{'this, ms':>10}{'other, ms':>10}   {'lower':>7}{'median':>8}{'upper':>8}")
    for vocab in vocabularies:
        compare(vocab, _PAIRS.value, changes)
        if _PROFILE.value:
            profile(vocab, _PAIRS.value, changes, _ONLY.value)


if __name__ == "__main__":
    sys.exit(app.run(main))
