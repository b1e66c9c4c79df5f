"""Supervised warm start: maximum likelihood on a task's worked examples."""

import functools
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from tba_jax import mesh as mesh_lib
from tba_jax import optimizer as optimizer_lib
from tba_jax import trajectory
from tba_jax.models import decoder, scoring
from tba_jax.tasks.interface import Task
from tba_jax.tokenizer import Tokenizer


@flax.struct.dataclass
class Examples:
    """prompt_tokens int32[B, P] left-padded, prompt_length int32[B], response_tokens int32[B, R], response_length int32[B]."""

    prompt_tokens: Any
    prompt_length: Any
    response_tokens: Any
    response_length: Any


def encode_examples(pairs: list[tuple[str, str]], tokenizer: Tokenizer, *, prompt_length: int, response_length: int) -> Examples:
    """Tokenises (prompt, response) pairs; the response ends with the end-of-sequence token.

    Raises:
      ValueError: a prompt or a response with its end does not fit; names the setting.
    """
    prompts = [tokenizer.encode(prompt) for prompt, _ in pairs]
    whole = [tokenizer.encode(prompt + response) for prompt, response in pairs]
    responses = [[*ids[len(prompt) :], tokenizer.eos_id] for ids, prompt in zip(whole, prompts, strict=True)]
    prompt_tokens, lengths = trajectory.left_pad(prompts, prompt_length, tokenizer.pad_id)
    response_lengths = np.array([len(ids) for ids in responses], np.int32)
    if response_lengths.max() > response_length:
        raise ValueError(
            f"a worked example has {response_lengths.max()} response tokens, task.response_length={response_length} allows fewer"
        )
    response_tokens = np.full((len(pairs), response_length), tokenizer.pad_id, np.int32)
    for i, ids in enumerate(responses):
        response_tokens[i, : len(ids)] = ids
    return Examples(prompt_tokens, lengths, response_tokens, response_lengths)


def _logprobs(params: decoder.Params, examples: Examples, config: decoder.DecoderConfig) -> jax.Array:
    logprobs, _ = scoring.response_logprobs(
        params,
        examples.prompt_tokens,
        examples.prompt_length,
        examples.response_tokens,
        examples.response_length,
        config=config,
        temperature=1.0,
        banned_tokens=(),
        rows_per_block=examples.prompt_tokens.shape[0],
        remat=False,
    )
    return logprobs


def sft_step(
    state: tuple[decoder.Params, Any],
    examples: Examples,
    *,
    optimizer: optax.GradientTransformation,
    config: decoder.DecoderConfig,
) -> tuple[tuple[decoder.Params, Any], jax.Array]:
    """One step on the mean negative log-likelihood per response token. Returns the new (params, opt_state) and the loss."""
    params, opt_state = state

    def loss_of(params: decoder.Params) -> jax.Array:
        return -jnp.sum(_logprobs(params, examples, config)) / jnp.sum(examples.response_length)

    loss, grads = jax.value_and_grad(loss_of)(params)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), loss


def warm_start(
    task: Task,
    tokenizer: Tokenizer,
    *,
    config: decoder.DecoderConfig,
    mesh: Mesh,
    seed: int,
    prompt_length: int,
    response_length: int,
    steps: int,
    batch_size: int,
    learning_rate: float,
    warmup_steps: int,
    report_every_steps: int,
    report: Callable[[int, float], None],
) -> decoder.Params:
    """Trains random parameters on fresh worked examples and returns them.

    Args:
      learning_rate: peak of a linear schedule, after warmup_steps.
      report: called as report(step, mean loss since the last report, nats per response token).
    """
    schedule = optimizer_lib.linear(peak=learning_rate, steps=steps, warmup_steps=warmup_steps, decay_steps=0)
    optimizer = optimizer_lib.adamw(schedule, beta1=0.9, beta2=0.95, epsilon=1e-8, weight_decay=0.01, clip_norm=1.0)
    shardings = decoder.param_shardings(config, mesh)
    params = jax.jit(functools.partial(decoder.init_params, config=config), out_shardings=shardings)(jax.random.key(seed))
    state = (params, jax.jit(optimizer.init)(params))
    step_fn = jax.jit(functools.partial(sft_step, optimizer=optimizer, config=config), donate_argnums=0)

    def encoded(rng: np.random.Generator, count: int) -> Examples:
        pairs = task.worked_examples(rng, count)
        examples = encode_examples(pairs, tokenizer, prompt_length=prompt_length, response_length=response_length)
        return mesh_lib.put_rows(mesh, examples)

    rng = np.random.default_rng([seed, 1])
    losses: list[jax.Array] = []
    for step in range(1, steps + 1):
        state, loss = step_fn(state, encoded(rng, batch_size))
        losses.append(loss)
        if step % report_every_steps == 0 or step == steps:
            report(step, float(np.mean(losses)))
            losses.clear()
    return state[0]
