"""The trajectory: one generated response with all that training needs, and the axis table of the whole project.

Axis table (nobody invents letters):

    Q  queries (prompts)          K  completions per query      B = Q·K  rows
    P  prompt length              R  response length            T = P + R
    S  cache length               L  layers                     N  query heads
    G  key/value heads            H  head size                  D  model width
    F  feed-forward width         V  vocabulary                 M  reward parts
    E  sentence embedding         J  groups of slots            W  slots of a group          U  prompt buffers of a group
    X  places of a group          I  prompts that arrive together

Models besides: t  flat tokens B·T, r  rank of an adapter, C  outputs of a scalar head, A  token types of an encoder; S counts
positions there, and E is the width of an encoder's pooled token.

Layout of a row on every device: `[left-padded prompt | right-padded response]`, so that position P is the first
response token of every row and the response region is a static slice.
"""

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence

import numpy as np

# Columns of a row with a fixed shape whatever the run: name -> (dtype, what it is).
_SCALAR_COLUMNS: dict[str, tuple[str, str]] = {
    "row": ("int64", "sequence number within the writer; (writer, row) is the row's identity"),
    "query_id": ("uint64", "hash of the prompt tokens, see `query_id`"),
    "prompt_length": ("int32", "real tokens in prompt_tokens"),
    "response_length": ("int32", "real tokens in response_tokens, end-of-sequence included"),
    "finished": ("bool", "whether the response ended by an end-of-sequence token or a stop string"),
    "reward": ("float32", "the reward the objective sees"),
    "reward_version": ("int32", "version of the reward that scored the row"),
    "reference_id": ("uint64", "which reference policy ref_logprobs come from"),
    "temperature": ("float32", "sampling temperature (0 = greedy)"),
    "top_k": ("int32", "sampling top-k (0 = off)"),
    "top_p": ("float32", "sampling top-p (1 = off)"),
    "min_p": ("float32", "sampling min-p (0 = off)"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowShape:
    """Sizes that fix the schema of a run's rows: P, R, the names of the M reward parts, E (0: no embedding), and whether rows
    hold values of states."""

    prompt_length: int
    response_length: int
    reward_parts: tuple[str, ...]
    embedding_size: int = 0
    state_values: bool = False

    def columns(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Column name -> (dtype, shape of one row)."""
        P, R, M = self.prompt_length, self.response_length, len(self.reward_parts)
        columns: dict[str, tuple[str, tuple[int, ...]]] = {name: (dtype, ()) for name, (dtype, _) in _SCALAR_COLUMNS.items()}
        columns |= {
            "key": ("uint32", (2,)),
            "reward_parts": ("float32", (M,)),
            "prompt_tokens": ("int32", (P,)),
            "response_tokens": ("int32", (R,)),
            "ref_logprobs": ("float32", (R,)),
            "policy_logprobs": ("float32", (R,)),
            "behavior_logprobs": ("float32", (R,)),
            "policy_step": ("int32", (R,)),
        }
        if self.embedding_size:
            columns["embedding"] = ("float32", (self.embedding_size,))
        if self.state_values:
            columns["state_values"] = ("float32", (R,))
        return columns


# Rows on the host: column name -> array [rows, ...]. Shapes and dtypes are RowShape.columns(); besides the scalars:
#   key: uint32[B, 2]                   the row's random key, a fold of (run seed, writer, row)
#   reward_parts: float32[B, M]         what the reward was made of
#   prompt_tokens: int32[B, P]          left-padded
#   response_tokens: int32[B, R]        right-padded
#   ref_logprobs: float32[B, R]         nats, scoring temperature, 0 where masked
#   policy_logprobs: float32[B, R]      nats, scoring temperature, the sampler's weights, 0 where masked
#   behavior_logprobs: float32[B, R]    nats, the distribution that was sampled, 0 where masked
#   policy_step: int32[B, R]            trainer step of the weights that produced each token, -1 where masked
#   embedding: float32[B, E]            of the response's text, of length 1; only where E > 0
#   state_values: float32[B, R]         mean reward of what was sampled from the state before each token, NaN where that was not
#                                       valued, the first state always is; only where RowShape.state_values
Rows = Mapping[str, np.ndarray]


def check_rows(rows: Rows, shape: RowShape) -> int:
    """Returns the number of rows.

    Raises:
      ValueError: names the column whose presence, dtype or shape is not `shape.columns()`.
    """
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


def left_pad(sequences: Sequence[Sequence[int]], length: int, pad_id: int) -> tuple[np.ndarray, np.ndarray]:
    """Pads prompts on the left.

    Returns:
      tokens int32[len(sequences), length], lengths int32[len(sequences)].

    Raises:
      ValueError: a sequence is longer than `length` or empty.
    """
    tokens = np.full((len(sequences), length), pad_id, np.int32)
    lengths = np.array([len(s) for s in sequences], np.int32)
    for i, sequence in enumerate(sequences):
        if not 0 < len(sequence) <= length:
            raise ValueError(f"prompt {i} has {len(sequence)} tokens, allowed are 1 to {length} (task.prompt_length)")
        tokens[i, length - len(sequence) :] = sequence
    return tokens, lengths


def response_mask(response_length: np.ndarray, R: int) -> np.ndarray:
    """bool[B, R], true on the real response tokens; the end-of-sequence token is one of them."""
    return np.arange(R)[None, :] < np.asarray(response_length)[:, None]
