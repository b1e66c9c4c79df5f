"""Language models that tasks ask, from Hugging Face folders: their config and tokenizer, checked before weights are loaded."""

from pathlib import Path

from tba_jax.models.config import DecoderConfig
from tba_jax.models.hugging_face import load
from tba_jax.text.tokenizers import HuggingFaceTokenizer


def read_config(folder: Path | str, *, setting: str, compute_dtype: str) -> DecoderConfig:
    """The language model of a folder or hub id. Raises ValueError naming `setting` where it is none or cannot be used."""
    try:
        return load.read_config(folder, compute_dtype=compute_dtype, head="language_model")
    except ValueError as error:
        raise ValueError(f"{setting}={str(folder)!r}: {error}") from error


def read(folder: Path | str, *, setting: str, compute_dtype: str) -> tuple[Path, DecoderConfig, HuggingFaceTokenizer]:
    """Local folder, config and tokenizer.

    Raises:
      ValueError: the model or its tokenizer cannot be used, or they do not go together; names `setting`.
    """
    config = read_config(folder, setting=setting, compute_dtype=compute_dtype)
    local = load.resolve_folder(folder)
    try:
        tokenizer = HuggingFaceTokenizer(local, vocab=config.vocab)
    except ValueError as error:
        raise ValueError(f"{setting}={str(folder)!r}: {error}") from error
    if tokenizer.vocab_size > config.vocab:
        raise ValueError(
            f"{setting}={str(folder)!r}: the tokenizer has {tokenizer.vocab_size} ids, the embedding only {config.vocab}"
        )
    return local, config, tokenizer


def token_bytes(tokenizer: HuggingFaceTokenizer, *, called: str) -> list[bytes | None]:
    """See Tokenizer.token_bytes. Raises ValueError, which begins with `called`, where the ids have no bytes that can be told."""
    try:
        return tokenizer.token_bytes()
    except ValueError as error:
        raise ValueError(f"{called}: which bytes its tokens stand for cannot be told") from error
