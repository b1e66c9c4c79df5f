"""Estimates of memory against sums by hand, and how meshes divide them; and the disk that a run takes."""

import pytest

from tba_jax.experiment import composition, dry_run, sizes, training
from tba_jax.models import parameters
from tba_jax.storage import layout
from tests.support import tiny_run

TOO_MANY = 10**13  # steps whose snapshots no disk holds


def memory(**changes) -> dict[str, dict[str, int]]:
    return sizes.memory(composition.build(tiny_run.config(model__preset="llama-3.1-8b", **changes)))


def test_weights_are_counted_as_they_are_held():
    params, trained = 8_030_261_248, 41_943_040
    found = memory()
    assert found["trainer"]["weights, gradient, update, AdamW"] == 5 * 4 * params
    # In use, and to be used next.
    assert found["searcher"]["reference"] == 4 * params and found["searcher"]["policies"] == 2 * 4 * params
    assert memory(searchers__swap_memory="in_place")["searcher"]["policies"] == 4 * params
    embedding_and_norms = 128256 * 4096 + 65 * 4096
    found = memory(searchers__weights="int8", model__compute_dtype="bfloat16")
    assert found["searcher"]["policies"] == 2 * params + 2 * ((params - embedding_and_norms) + 2 * embedding_and_norms)
    found = memory(lora__rank=16, model__compute_dtype="bfloat16")
    assert found["trainer"]["weights, gradient, update, AdamW"] == 5 * 4 * trained
    assert found["trainer"]["frozen weights"] == 2 * params
    for kind, size in (("reset", 2), ("ema", 4)):
        found = memory(learner__reference__kind=kind, model__compute_dtype="bfloat16")
        assert found["trainer"]["moving reference"] == size * params
    for full_every, copies in ((1, 0), (8, 1)):
        found = memory(publish__dtype="bfloat16", publish__full_every=full_every)
        held = [found[role].get("base of deltas (host)", 0) for role in ("trainer", "searcher", "evaluator")]
        assert held == [2 * copies * 2 * params, copies * 2 * params, 0]


def test_without_a_reference_only_evaluators_and_adapters_need_the_weights_of_step_0():
    whole, adapters = (memory(learner__reference__kind="none", lora__rank=rank) for rank in (0, 16))
    searcher, with_adapters = whole["searcher"], adapters["searcher"]
    assert searcher["frozen weights"] == searcher["scoring"] == with_adapters["scoring"] == 0
    assert with_adapters["frozen weights"] == 4 * 8_030_261_248 == whole["evaluator"]["reference"]
    assert "reference" not in searcher | with_adapters and whole["evaluator"] == memory()["evaluator"]


@pytest.mark.parametrize("role, section", [("trainer", "learner"), ("searcher", "searchers"), ("evaluator", "evaluation")])
def test_meshes_divide(role, section):
    whole = memory()
    split = memory(**{f"{section}__mesh__data": 1, f"{section}__mesh__fsdp": 4, f"{section}__mesh__tensor": 2})
    weights = "weights, gradient, update, AdamW" if role == "trainer" else "reference"
    assert split[role][weights] == whole[role][weights] // 8
    for other in {"trainer", "searcher", "evaluator"} - {role}:
        assert split[other] == whole[other]
    if role != "trainer":  # 16 and 4 rows over 4 ways, heads over 2
        assert split[role]["KV cache"] == whole[role]["KV cache"] // 8


def test_caches_of_prompts_have_room_for_responses_that_go_on():
    """16 slots in groups of 2, each with two prompts: of 7 tokens, or of 7 and 5 of the response's 6."""
    plain, valued = memory(), memory(task__step_ends=("=",))
    layers, heads, size, entries = 32, 8, 128, {"prompts": 8 * 2, "own": 16 * 5}
    for found, length in ((plain, 7), (valued, 7 + 5)):
        expected = 2 * layers * heads * size * 4 * (entries["prompts"] * length + entries["own"])
        assert found["searcher"]["KV cache"] == expected
    assert valued["evaluator"] == plain["evaluator"]
    assert valued["trainer"].pop("replay (host)") - plain["trainer"].pop("replay (host)") == 50_000 * 6 * 4
    assert valued["trainer"] == plain["trainer"]


def experiment(**changes):
    return composition.build(tiny_run.config(**changes))


@pytest.mark.parametrize(
    "steps, every, evaluated, keep", [(12, 2, 100, 0), (12, 2, 5, 3), (7, 3, 2, 0), (6, 2, 3, 4), (40, 4, 6, 3)]
)
def test_snapshots_are_counted(steps, every, evaluated, keep):
    c = tiny_run.config(learner__steps=steps, publish__every_steps=every, evaluation__every_steps=evaluated, publish__keep=keep)
    published = [step for step in range(steps + 1) if step % every == 0 or step % evaluated == 0 or step == steps]
    kept = [step for step in published if step % evaluated == 0 or step == steps]
    assert sizes.snapshot_count(c) == (min(len(published), len(kept) + keep + 1) if keep else len(published))


def test_what_is_published_and_kept(tmp_path):
    """13 snapshots in bfloat16, of which 9 count as halves, the reference policy in float32, two checkpoints of three or four
    float32 of each weight."""
    run, weights = layout.RunDir(tmp_path / "run"), parameters.count(experiment().policy.model_specs)
    steps = dict(learner__steps=12, publish__every_steps=1, publish__dtype="bfloat16", checkpoint__every_steps=12)
    steps |= dict(publish__full_every=8)
    for kind, moments in (("initial", 3), ("ema", 4)):
        (demand,) = sizes.demands(experiment(**steps, learner__reference__kind=kind), run)
        assert demand.size == (13 * 2 - 9 + 4 + 2 * 4 * moments) * weights
    (searchers,) = sizes.demands(experiment(**steps), run, trains=False)
    assert searchers.size == (13 * 2 - 9 + 4) * weights
    (searchers,) = sizes.demands(experiment(**(steps | dict(publish__full_every=1))), run, trains=False)
    assert searchers.size == (13 * 2 + 4) * weights


def test_every_new_run_is_refused_whose_snapshots_the_disk_does_not_hold(tmp_path):
    s = tiny_run.settings(tmp_path / "run", tiny_run.config(learner__steps=TOO_MANY))
    with pytest.raises(ValueError, match=r"would fill its disk.*GiB left on .*publish.keep=0, all.*--workdir") as told:
        training.join(s, may_change_schedule=True)
    assert str(tmp_path / "run") in str(told.value) and not s.run.root.exists()
    said = [line for line in dry_run.describe(s.experiment, s.run).splitlines() if line.startswith("disk ")]
    assert len(said) == 1 and said[0].startswith("disk       does not fit: about") and "publish.keep=0, all" in said[0]
    small = tiny_run.settings(tmp_path / "run", tiny_run.config())
    assert "disk       fits: about" in dry_run.describe(small.experiment, small.run)
    training.join(small, may_change_schedule=True)
    training.join(tiny_run.settings(tmp_path / "run", s.config), may_change_schedule=False)  # a run that is there has an alarm
