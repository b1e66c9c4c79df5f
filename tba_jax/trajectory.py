"""The trajectory: one generated response with all that training needs, and the axis table of the whole project.

Axis table (nobody invents letters):

    Q  queries (prompts)          K  completions per query      B = Q·K  rows
    P  prompt length              R  response length            T = P + R
    S  cache length               L  layers                     N  query heads
    G  key/value heads            H  head size                  D  model width
    F  feed-forward width         V  vocabulary                 M  reward parts
    E  sentence embedding         J  groups of slots            W  slots of a group          U  prompt buffers of a group
    X  places of a group          I  prompts that arrive together

Models besides: t  flat tokens B·T, r  rank of an adapter, C  outputs of a scalar head, A  token types of an encoder, e  experts
of a layer, k  experts of a token, f  feed-forward width of an expert; S counts positions there, and E is the width of an
encoder's pooled token.

Layout of a row, on disk and on every device: `tokens[T]` holds the prompt, then the response, then padding, from index 0 on.
Token t of the response stands at index `prompt_length + t`; an array [R] has its entry at index t. A row's positions follow from
the row alone: nothing depends on P, and causal attention keeps padding from all that is real.

Where an environment answers, the response holds its tokens between those of the policy, in the order in which both came, and R
counts all of them. Only the policy's are trained on, see `trained`: no log-prob, ratio, entropy or length counts others.
"""

import dataclasses
import hashlib
import math
from collections.abc import Mapping, Sequence

import numpy as np

# Columns of a row with a fixed shape whatever the run: name -> (dtype, what it is).
_SCALAR_COLUMNS: dict[str, tuple[str, str]] = {
    "row": ("int64", "sequence number within the writer; (writer, row) is the row's identity"),
    "query_id": ("uint64", "hash of the prompt tokens, see `query_id`"),
    "prompt_length": ("int32", "tokens of the prompt"),
    "response_length": ("int32", "tokens of the response, end-of-sequence and those of an environment included"),
    "finished": (
        "bool",
        "whether the response ended by itself: by a stop string, an end of sequence that was drawn, or the end of "
        "its environment",
    ),
    "reward": ("float32", "the reward the objective sees"),
    "reward_version": ("int32", "version of the reward that scored the row"),
    "reference_id": ("uint64", "which reference policy ref_logprobs come from, 0: none (yet)"),
    "temperature": ("float32", "sampling temperature (0 = greedy)"),
    "top_k": ("int32", "sampling top-k (0 = off)"),
    "top_p": ("float32", "sampling top-p (1 = off)"),
    "min_p": ("float32", "sampling min-p (0 = off)"),
}


# What an environment tells of a row, in the order of the column `environment`: calls of tools, messages of the policy that it
# could not read, and the seconds for which it was waited for.
ENVIRONMENT = ("tool_calls", "errors", "seconds")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowShape:
    """Sizes that fix the schema of a run's rows: P, R, the names of the M reward parts, E (0: no embedding), and whether rows
    hold values of states, or tokens of an environment."""

    prompt_length: int
    response_length: int
    reward_parts: tuple[str, ...]
    embedding_size: int = 0
    state_values: bool = False
    environment: bool = False

    def columns(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Column name -> (dtype, shape of one row)."""
        P, R, M = self.prompt_length, self.response_length, len(self.reward_parts)
        columns: dict[str, tuple[str, tuple[int, ...]]] = {name: (dtype, ()) for name, (dtype, _) in _SCALAR_COLUMNS.items()}
        columns |= {
            "key": ("uint32", (2,)),
            "reward_parts": ("float32", (M,)),
            "tokens": ("int32", (P + R,)),
            "ref_logprobs": ("float32", (R,)),
            "policy_logprobs": ("float32", (R,)),
            "behavior_logprobs": ("float32", (R,)),
            "policy_step": ("int32", (R,)),
        }
        if self.embedding_size:
            columns["embedding"] = ("float32", (self.embedding_size,))
        if self.state_values:
            columns["state_values"] = ("float32", (R,))
        if self.environment:
            columns["environment"] = ("float32", (len(ENVIRONMENT),))
        return columns

    @property
    def row_bytes(self) -> int:
        """Bytes of a row in memory."""
        return sum(np.dtype(dtype).itemsize * math.prod(shape) for dtype, shape in self.columns().values())


# Rows on the host: column name -> array [rows, ...]. Shapes and dtypes are RowShape.columns(); besides the scalars:
#   key: uint32[B, 2]                   the row's random key, a fold of (run seed, writer, row)
#   reward_parts: float32[B, M]         what the reward was made of
#   tokens: int32[B, T]                 prompt, response, padding
#   ref_logprobs: float32[B, R]         nats, scoring temperature, 0 where masked
#   policy_logprobs: float32[B, R]      nats, scoring temperature, the sampler's weights, 0 where masked, or where a server
#                                       drew the row by another distribution
#   behavior_logprobs: float32[B, R]    nats, the distribution that was sampled, 0 where masked
#   policy_step: int32[B, R]            trainer step of the weights that produced each token, -1 where masked: on padding, and on
#                                       tokens of an environment, which this alone tells apart
#   embedding: float32[B, E]            of the response's text, of length 1; only where E > 0
#   state_values: float32[B, R]         mean reward of the samples from the state before each token; NaN where the state has no
#                                       estimate, the first state always has one; only where RowShape.state_values
#   environment: float32[B, 3]          see ENVIRONMENT; only where RowShape.environment
Rows = Mapping[str, np.ndarray]


def check_rows(rows: Rows, shape: RowShape) -> int:
    """Returns the number of rows. Raises ValueError: names the column whose presence, dtype or shape is not `shape.columns()`."""
    columns = shape.columns()
    if unexpected := sorted(set(rows) ^ set(columns)):
        raise ValueError(f"rows must have exactly the columns of the schema; missing or unknown: {unexpected}")
    count = len(rows["row"])
    for name, (dtype, row_shape) in columns.items():
        array = rows[name]
        if array.dtype != np.dtype(dtype) or array.shape != (count, *row_shape):
            raise ValueError(f"column {name} is {array.dtype}{list(array.shape)}, the schema says {dtype}{[count, *row_shape]}")
    return count


def concatenate(parts: Sequence[Rows]) -> Rows:
    """Joins rows along the row axis, column by column."""
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def query_id(prompt_tokens: Sequence[int]) -> int:
    """The query's identity on every machine: 64 bits of a hash over its prompt tokens (without padding)."""
    digest = hashlib.blake2b(np.asarray(prompt_tokens, "<i4").tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def token_columns(
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int] | np.ndarray],
    *,
    prompt_length: int,
    response_length: int,
    pad_id: int,
) -> dict[str, np.ndarray]:
    """Lays out prompts and the response to each as rows. This is the one place where rows get their tokens.

    Args: prompt_length, response_length: P and R, the most tokens that a prompt and a response may have.

    Returns in this order: tokens int32[B, P + R], prompt_length int32[B], response_length int32[B]. Raises ValueError: a prompt
    is longer than P or empty, or a response is longer than R.
    """
    tokens = np.full((len(prompts), prompt_length + response_length), pad_id, np.int32)
    for i, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        begin, end = len(prompt), len(prompt) + len(response)
        if not 0 < begin <= prompt_length:
            raise ValueError(f"prompt {i} has {begin} tokens, allowed are 1 to {prompt_length} (task.prompt_length)")
        if end - begin > response_length:
            raise ValueError(f"response {i} has {end - begin} tokens, allowed are {response_length} (task.response_length)")
        tokens[i, :begin], tokens[i, begin:end] = prompt, response
    lengths = [np.array([len(sequence) for sequence in sequences], np.int32) for sequences in (prompts, responses)]
    return {"tokens": tokens, "prompt_length": lengths[0], "response_length": lengths[1]}


def response(rows: Rows, i: int) -> np.ndarray:
    """int32[n]: the response of row i without padding."""
    begin = rows["prompt_length"][i]
    return rows["tokens"][i, begin : begin + rows["response_length"][i]]


def response_tokens(rows: Rows) -> np.ndarray:
    """int32[B, R]: the responses, padded on the right, each beside the row's arrays per response token."""
    R = rows["policy_step"].shape[1]
    return np.take_along_axis(rows["tokens"], rows["prompt_length"][:, None] + np.arange(R), axis=1)


def response_mask(response_length: np.ndarray, R: int) -> np.ndarray:
    """bool[B, R], true on the real response tokens; the end-of-sequence token is one of them."""
    return np.arange(R)[None, :] < np.asarray(response_length)[:, None]


def trained(rows: Rows) -> np.ndarray:
    """bool[B, R], true on the tokens that the policy drew: those of the response, without those of an environment."""
    real = response_mask(rows["response_length"], rows["policy_step"].shape[1])
    return real & (rows["policy_step"] >= 0) if "environment" in rows else real


def turns(trained: np.ndarray) -> np.ndarray:
    """bool[B, R], true on the first token of each turn of the policy. Args: trained: bool[B, R], see `trained`."""
    return trained & ~np.pad(trained, ((0, 0), (1, 0)))[:, :-1]
