"""Which responses a policy can give. Without JAX: commands read it from a run's contract before they load JAX."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResponseSpace:
    """Which responses there are, and at which temperature they are scored: the same for the policy and the reference.

    π(y_t|x, y_<t) = softmax(logits / temperature) over all tokens but the banned ones and, where t + 1 < min_length, the
    end of sequence. t counts response tokens from 0, so none ends by it with fewer than min_length of them.

    temperature: the run's scoring temperature T (TBA paper: one constant that defines the policy and the reference alike);
    banned_tokens: ids below V that no response holds; eos_id: the end of sequence, -1: there is none; min_length: tokens,
    0 and 1: any; force_eos: a response that has not ended before its last token gets the end of sequence there, scored by the
    softmax above.
    """

    temperature: float
    banned_tokens: tuple[int, ...]
    eos_id: int
    min_length: int = 0
    force_eos: bool = False

    def __post_init__(self) -> None:
        if self.min_length > 1 and self.eos_id < 0:
            raise ValueError(f"min_length={self.min_length} holds back the end of sequence, and eos_id={self.eos_id} names none")
        if self.force_eos and self.eos_id < 0:
            raise ValueError(f"force_eos=True puts an end of sequence, and eos_id={self.eos_id} names none")
