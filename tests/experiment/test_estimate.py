"""Memory estimates against sums by hand, and how meshes divide them."""

import pytest

from tba_jax.experiment import composition, estimate
from tests.support import tiny_run


def memory(**changes) -> dict[str, dict[str, int]]:
    return estimate.memory(composition.build(tiny_run.config(model__preset="llama-3.1-8b", **changes)))


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


def test_without_a_reference_only_evaluators_and_adapters_need_the_weights_of_step_0():
    whole, adapters = (memory(learner__reference__kind="none", lora__rank=rank) for rank in (0, 16))
    searcher, with_adapters = whole["searcher"], adapters["searcher"]
    assert searcher["frozen weights"] == searcher["scoring"] == with_adapters["scoring"] == 0
    assert with_adapters["frozen weights"] == 4 * 8_030_261_248 == whole["evaluator"]["reference"]
    assert "reference" not in searcher | with_adapters and whole["evaluator"] == memory()["evaluator"]


def test_a_reset_reference_rests_in_the_compute_dtype():
    for kind, size in (("reset", 2), ("ema", 4)):
        found = memory(learner__reference__kind=kind, model__compute_dtype="bfloat16")
        assert found["trainer"]["moving reference"] == size * 8_030_261_248


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


@pytest.mark.parametrize("objective, told", [("ppo", True), ("learned_log_z", True), ("trajectory_balance", False)])
def test_the_head_of_an_objective_is_told(objective, told):
    text = estimate.describe(composition.build(tiny_run.config(learner__objective=objective)))
    assert (f"head of {objective}, trained beside the policy:" in text) == told
