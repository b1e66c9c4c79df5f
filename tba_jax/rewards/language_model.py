"""Config and tokenizer of a frozen language model in a Hugging Face folder, checked before weights are loaded."""

from pathlib import Path

from tba_jax.models.config import DecoderConfig
from tba_jax.models.hugging_face import load
from tba_jax.text.tokenizers import HuggingFaceTokenizer


def read_config(folder: Path | str, *, setting: str, compute_dtype: str) -> DecoderConfig:
    """The config of the language model in a folder or hub id. Raises ValueError naming `setting` if there is no usable one."""
    with load.named(setting, folder):
        return load.read_config(folder, compute_dtype=compute_dtype, head="language_model")


def read(
    folder: Path | str, *, setting: str, compute_dtype: str, date: str = ""
) -> tuple[Path, DecoderConfig, HuggingFaceTokenizer]:
    """Local folder, config and tokenizer. Args: date: see HuggingFaceTokenizer.

    Raises:
      ValueError: the model or the tokenizer cannot be used, or the tokenizer has more ids than the model; names `setting`.
    """
    config = read_config(folder, setting=setting, compute_dtype=compute_dtype)
    local = load.resolve_folder(folder)
    with load.named(setting, folder):
        return local, config, HuggingFaceTokenizer(local, vocab=config.vocab, date=date)


def token_bytes(tokenizer: HuggingFaceTokenizer, *, called: str) -> list[bytes | None]:
    """See Tokenizer.token_bytes. The ValueError begins with `called`, the setting and its folder."""
    try:
        return tokenizer.token_bytes()
    except ValueError as error:
        raise ValueError(f"{called}: its tokenizer must be byte-level or SentencePiece, so that each token has bytes") from error
