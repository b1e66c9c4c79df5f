"""Steps of Tunix' GRPO learner, in its own environment: python -m benchmarks.peers.run_tunix SPEC RESULT. See run_trl."""

import importlib.metadata
import json
import random
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from transformers import PreTrainedTokenizerFast
from tunix.models.llama3 import model as llama
from tunix.models.llama3 import params as llama_params
from tunix.rl import rl_cluster
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rollout.base_rollout import RolloutConfig

from benchmarks.peers import recording


class TextTokenizer(PreTrainedTokenizerFast):
    """Takes NumPy's strings, in which Tunix' batches hold prompts."""

    def encode(self, text: Any, **settings: Any) -> list[int]:
        return super().encode(str(text), **settings)


def load(folder: str, mesh: jax.sharding.Mesh) -> llama.Llama3:
    """The checkpoint in float32."""
    told = json.loads((Path(folder) / "config.json").read_text())
    config = llama.ModelConfig(
        num_layers=told["num_hidden_layers"],
        vocab_size=told["vocab_size"],
        embed_dim=told["hidden_size"],
        hidden_dim=told["intermediate_size"],
        num_heads=told["num_attention_heads"],
        head_dim=told["head_dim"],
        num_kv_heads=told["num_key_value_heads"],
        rope_theta=int(told["rope_theta"]),
        norm_eps=told["rms_norm_eps"],
        weight_tying=told["tie_word_embeddings"],
    )
    return llama_params.create_model_from_safe_tensors(folder, config, mesh, dtype=jax.numpy.float32)


def cluster(spec: dict[str, Any], mesh: jax.sharding.Mesh) -> rl_cluster.RLCluster:
    actor = load(spec["checkpoint"], mesh)
    adam = optax.adamw(spec["learning_rate"], *spec["adam_betas"], eps=spec["adam_epsilon"], weight_decay=0.0)
    return rl_cluster.RLCluster(
        actor=actor,
        reference=nnx.clone(actor) if spec["beta"] else None,
        tokenizer=TextTokenizer.from_pretrained(spec["checkpoint"]),
        cluster_config=rl_cluster.ClusterConfig(
            role_to_mesh=dict.fromkeys((rl_cluster.Role.ACTOR, rl_cluster.Role.ROLLOUT, rl_cluster.Role.REFERENCE), mesh),
            rollout_engine="vanilla",
            training_config=rl_cluster.RLTrainingConfig(
                actor_optimizer=optax.chain(optax.clip_by_global_norm(spec["clip_norm"]), adam),
                eval_every_n_steps=10**6,
                max_steps=spec["steps"],
                mini_batch_size=spec["queries"],
                train_micro_batch_size=spec["queries"],
            ),
            rollout_config=RolloutConfig(
                max_tokens_to_generate=spec["response_length"],
                max_prompt_length=spec["prompt_length"],
                kv_cache_size=spec["prompt_length"] + spec["response_length"],
                temperature=1.0,
                top_p=1.0,
                top_k=None,
                eos_tokens=[spec["eos"]],
            ),
        ),
    )


def batches(spec: dict[str, Any]) -> list[dict[str, np.ndarray]]:
    """The prompts of each step."""
    prompts = random.Random(spec["seed"]).sample(spec["prompts"], spec["steps"] * spec["queries"])
    return [{"prompts": np.array(prompts[i : i + spec["queries"]])} for i in range(0, len(prompts), spec["queries"])]


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text())
    record = recording.Recording()

    def generated(output: Any) -> None:
        record.count(sum(len(tokens) for tokens in output.tokens))

    def scored(batch: Any) -> None:
        jax.block_until_ready(batch.ref_per_token_logps)  # computed beside the reward; the update would be timed with it

    def updated(_: Any) -> None:
        jax.block_until_ready(jax.tree.leaves(nnx.state(made.actor_trainer.model)))
        updates.append(None)

    def reward(prompts: Any, completions: list[str], **_: Any) -> list[float]:
        return recording.digits(completions, seconds=spec["reward_seconds"])

    updates: list[None] = []
    mesh = jax.make_mesh((1, 1), ("fsdp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    with mesh:
        made = cluster(spec, mesh)
        settings = GRPOConfig(num_generations=spec["samples"], num_iterations=1, beta=spec["beta"], epsilon=0.2)
        learner = GRPOLearner(rl_cluster=made, algo_config=settings, reward_fns=reward)
        record.timed(made, "generate", "generate", after=generated)
        record.timed(learner, "_generate_and_compute_advantage", "score", after=scored)
        record.timed(made, "update_actor", "update", after=updated)
        update = made.update_actor

        def update_and_end(*arguments: Any, **more: Any) -> Any:
            result = update(*arguments, **more)
            record.step_ends()
            return result

        made.update_actor = update_and_end
        record.begin()
        learner.train(batches(spec))
    if len(updates) != spec["steps"]:
        raise RuntimeError(f"{len(updates)} updates were made in {spec['steps']} steps")
    versions = {name: importlib.metadata.version(name) for name in ("google-tunix", "jax", "flax")}
    record.write(sys.argv[2], versions=versions)


if __name__ == "__main__":
    main()
