"""Models that score texts, and their passes: sequence classifiers, language models whose next token is a verdict (Llama Guard,
Inan et al. 2023), sentence encoders, and linear classifiers on the CPU."""

import functools
import hashlib
import json
import logging
import re
import threading
import zipfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from tokenizers import Tokenizer

from tba_jax import sharding
from tba_jax.models import decoder, hardware, parameters, scoring
from tba_jax.models.config import DecoderConfig, EncoderConfig
from tba_jax.models.decoder import Decoder
from tba_jax.models.hugging_face import encoders, files
from tba_jax.models.hugging_face import load as load_lib
from tba_jax.models.hugging_face.encoders import Encoder
from tba_jax.models.parameters import Definition, Params
from tba_jax.programs import Program, shaped
from tba_jax.tasks.interface import ModelUse
from tba_jax.text.escaping import Escaper, without_rows
from tba_jax.text.prompts import PromptTemplate
from tba_jax.text.tokenizers import HuggingFaceTokenizer, open_transformers

log = logging.getLogger(__name__)

Config = DecoderConfig | EncoderConfig

_SHORTEST = 16  # tokens of the shortest pass
_BLOCK_BYTES = 1 << 16  # read at the beginning and at the end of each tensor by a digest
# Files whose whole content is part of a digest; generation_config.json holds the end-of-sequence ids of a victim.
_SMALL_FILES = "config.json generation_config.json tokenizer.json tokenizer_config.json chat_template.jinja vocab.json merges.txt"
_EMBEDDER_ROWS = 32  # texts in one pass of a sentence encoder, which bounds its memory
# scikit-learn's definition of a word: at least two word characters.
_WORD = re.compile(r"\b\w\w+\b")
_SHAPES = {"terms": ("V",), "idf": ("V",), "coef": ("E", "V"), "intercept": ("E",), "platt_a": ("E",), "platt_b": ("E",)}


def definition(config: Config) -> Definition[Any]:
    return encoders.define(config) if isinstance(config, EncoderConfig) else decoder.define(config)


def weight_shapes(config: Config, mesh: Mesh) -> Params:
    """The weights as they are loaded, in the compute dtype, as jax.ShapeDtypeStruct."""
    return parameters.sharded_shapes(definition(config).specs, mesh, dtype=config.compute_dtype)


def most_tokens(config: Config) -> int:
    """The tokens of the longest text that a model takes."""
    return config.position_limit if isinstance(config, EncoderConfig) else config.max_positions


def on_device(config: Any, mesh: Mesh, *, setting: str) -> Any:
    """The config as the devices of a mesh compute it. Args: setting: the one that names the model's folder."""
    return hardware.on_device(config, mesh.devices.flat[0], section=setting.rpartition(".")[0])


def padded_length(longest: int, limit: int) -> int:
    """The length of a pass whose longest text has `longest` tokens: a multiple of 1/8 of the next power of two, at most `limit`.

    A long pass is less than 1.25 times as long as its longest text, and few programs are compiled."""
    step = max(_SHORTEST, (1 << max(longest - 1, 0).bit_length()) // 8)
    return min(max(_SHORTEST, -(-longest // step) * step), limit)


class Pass:
    """A forward pass of a frozen model over rows that are split over a mesh. Making it compiles and allocates nothing.

    weights: see weight_shapes. function: (weights, tokens int32[rows, T], right-padded, length int32[rows]) -> float32[rows, …].
    """

    def __init__(self, config: Config, score: Callable[..., jax.Array], mesh: Mesh):
        """Args: score: (module, tokens int32[rows, T], length int32[rows]) -> float32[rows, …]."""
        self.config, self.mesh, defined = config, mesh, definition(config)
        self.weights = weight_shapes(config, mesh)

        def forward(weights: Params, tokens: jax.Array, length: jax.Array) -> jax.Array:
            return score(parameters.module(defined.graphdef, weights), tokens, length)

        rows, shardings = sharding.rows_sharding(mesh), jax.tree.map(lambda x: x.sharding, self.weights)
        jitted = jax.jit(forward, in_shardings=(shardings, rows, rows), out_shardings=rows)
        self.function = sharding.on_mesh(mesh, jitted)

    def program(self, *, rows: int, length: int) -> Program:
        """A call with so many rows of so many tokens."""
        shapes = jax.ShapeDtypeStruct((rows, length), jnp.int32), jax.ShapeDtypeStruct((rows,), jnp.int32)
        return Program(function=self.function, arguments=(self.weights, *shaped(shapes, sharding.rows_sharding(self.mesh))))


class Loaded:
    """A pass with the weights of a folder. Several threads may call it at once; a lock lets one pass run at a time."""

    def __init__(self, forward: Pass, folder: Path, *, rows: int, limit: int, pad_id: int = 0):
        """Args: limit: the most tokens of a text."""
        shardings = jax.tree.map(lambda x: x.sharding, forward.weights)
        self.params = load_lib.load_params(folder, forward.config, shardings, dtype=forward.config.compute_dtype)
        self.forward, self._lock = forward, threading.Lock()
        self._rows, self._limit, self._pad_id = rows, limit, pad_id

    def __call__(self, encoded: Sequence[Sequence[int]]) -> np.ndarray:
        """float32[n, …]: the scores of n texts, at least one. Texts of similar length share a pass; copies fill the last one."""
        order = np.argsort([len(ids) for ids in encoded], kind="stable")
        found = []
        with self._lock:
            for start in range(0, len(order), self._rows):
                part = order[start : start + self._rows]
                texts = [encoded[i] for i in (*part, *[part[-1]] * (self._rows - len(part)))]
                length = np.array([len(ids) for ids in texts], np.int32)
                tokens = np.full((self._rows, padded_length(int(length.max()), self._limit)), self._pad_id, np.int32)
                for row, ids in zip(tokens, texts, strict=True):
                    row[: len(ids)] = ids
                scores = self.forward.function(self.params, *sharding.put_rows(self.forward.mesh, (tokens, length)))
                found.append(np.asarray(scores)[: len(part)])
        return np.concatenate(found)[np.argsort(order)]


def digest(folder: Path | str) -> str:
    """Hex digest of a folder's model: settings, tokenizer, chat template, and the beginning and end of each tensor."""
    folder = load_lib.resolve_folder(folder)
    found = hashlib.blake2b(digest_size=8)
    for path in (folder / name for name in _SMALL_FILES.split()):
        content = path.read_bytes() if path.is_file() else b""
        found.update(f"{path.name} {len(content)} ".encode() + content)
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            header = file.read(int.from_bytes(file.read(8), "little"))
            found.update(f"{path.name} {len(header)} ".encode() + header)
            begin = file.tell()
            tensors = (tensor["data_offsets"] for name, tensor in json.loads(header).items() if name != "__metadata__")
            for start, stop in sorted(tensors):
                for place in (start, max(start, stop - _BLOCK_BYTES)):
                    file.seek(begin + place)
                    found.update(file.read(min(_BLOCK_BYTES, stop - start)))
    return found.hexdigest()


def classifier_config(use: ModelUse) -> Config:
    """A decoder with head="score", or an encoder with head="classification". Raises ValueError if there is no such model."""
    with load_lib.named(use.setting, use.path):
        config = load_lib.read_config(use.path, compute_dtype=use.compute_dtype)
    if config.head not in ("score", "classification"):
        what = "a sequence classifier or reward model (…ForSequenceClassification)"
        raise ValueError(f"{use.setting}={use.path!r} is not {what}: its head is {config.head!r}")
    return config


def score(model: Encoder | Decoder, tokens: jax.Array, length: jax.Array) -> jax.Array:
    """float32[B, labels]: logits of the rows. Args: tokens: int32[B, T], right-padded; length: int32[B]."""
    if isinstance(model, Encoder):
        return model.classify(tokens, jnp.arange(tokens.shape[1]) < length[:, None])
    return scoring.sequence_scores(model, tokens, length, remat="none")


class SequenceClassifier:
    """Logits of texts. Every device has all of the weights; texts are split over the devices, none of which waits for another.

    The model's own tokenizer encodes the texts with the special tokens that it adds; one that a text spells is read as text. A
    text that is longer than the model's positions loses its beginning before a decoder, which scores the last token, and its end
    before an encoder, with one warning. Several threads may call `scores` at once.
    """

    def __init__(self, use: ModelUse, mesh: Mesh, *, load: bool = True):
        """Args: use: a model of kind "sequence"; mesh: (n, 1, 1); load: False checks `use` and loads no weights.

        Raises ValueError naming `use.setting` if the folder cannot be used, or has not `use.labels` labels.
        """
        self._config = config = classifier_config(use)
        self._called = called = f"{use.setting}={use.path!r}"
        with load_lib.named(use.setting, use.path):
            folder = load_lib.resolve_folder(use.path)
            if isinstance(config, EncoderConfig):
                self.labels = config.labels
            else:  # as in transformers, logit i is called LABEL_i if config.json does not name it
                named: dict[str, Any] = files.read_settings(folder / "config.json").table("id2label")
                self.labels = tuple(str(named.get(str(i), f"LABEL_{i}")) for i in range(config.labels))
            self._tokenizer, self._eos_id = open_transformers(folder)
            without_rows(self._tokenizer.backend_tokenizer, config.vocab, eos_id=self._eos_id if use.ends else None)
        if use.labels and len(self.labels) != use.labels:
            what = "one label, as a reward model has" if use.labels == 1 else f"{use.labels} labels"
            raise ValueError(f"{called} must have {what}; it has {len(self.labels)}, {', '.join(self.labels)}")
        if use.ends and self._eos_id is None:
            raise ValueError(f"{called}: its tokenizer has no end-of-sequence token, which the task appends to finished texts")
        if not load:
            return
        self._tokenizer.truncation_side = "right"
        names, ids = self._tokenizer.all_special_tokens, self._tokenizer.all_special_ids
        self._escaped = Escaper(self._tokenizer.backend_tokenizer, names=names, ids=ids)
        self._limit, self._lock, self._warned = most_tokens(config), threading.Lock(), False
        forward = Pass(on_device(config, mesh, setting=use.setting), score, mesh)
        self.model = Loaded(forward, folder, rows=use.rows * mesh.size, limit=self._limit)

    def scores(self, texts: Sequence[str], *, ended: Sequence[bool] | np.ndarray | None = None) -> np.ndarray:
        """See tasks.interface.SequenceScorer. Raises ValueError where a text has no tokens, or the end that it needs."""
        if not texts:
            return np.zeros((0, len(self.labels)), np.float32)
        result = self.model(self._encode(texts, [False] * len(texts) if ended is None else ended))
        broken = ~np.isfinite(result).all(axis=1)
        if broken.any():
            told = f"{self._called} gave {broken.sum()} of {len(texts)} texts a score that is not finite; the first ends in "
            raise FloatingPointError(f"{told}{texts[int(broken.argmax())][-60:]!r}")
        return result

    def _encode(self, texts: Sequence[str], ended: Sequence[bool] | np.ndarray) -> list[list[int]]:
        """Token ids of each text, cut to the model's positions."""
        if self._eos_id is None and any(ended):
            raise ValueError(f"the tokenizer of {self._called} has no end-of-sequence token to append")
        escaped = self._escaped(texts)
        with self._lock:  # a call of a transformers tokenizer sets the truncation of concurrent calls
            given: list[list[Any]] = self._tokenizer(escaped, verbose=False)["input_ids"]
            too_long = max(map(len, given)) > self._limit
            if too_long and isinstance(self._config, EncoderConfig):
                given = self._tokenizer(escaped, truncation=True, max_length=self._limit, verbose=False)["input_ids"]
        encoded = [ids + [self._eos_id] * bool(end) for ids, end in zip(given, ended, strict=True)]
        if empty := [text for text, ids in zip(texts, encoded, strict=True) if not ids]:
            raise ValueError(f"{self._called} cannot score {empty[0]!r}, which has no tokens")
        if not self._warned and (too_long or max(map(len, encoded)) > self._limit):
            self._warned = True
            log.warning("texts for %s exceed its %d positions and are cut", self._called, self._limit)
        return [ids[-self._limit :] for ids in encoded]


def language_model(
    folder: Path | str, *, setting: str, compute_dtype: str, date: str = ""
) -> tuple[Path, DecoderConfig, HuggingFaceTokenizer]:
    """Local folder, config and tokenizer of a language model. Raises ValueError naming `setting` where they cannot be used.

    Args: date: see HuggingFaceTokenizer.
    """
    with load_lib.named(setting, folder):
        config = load_lib.read_config(folder, compute_dtype=compute_dtype, head="language_model")
        local = load_lib.resolve_folder(folder)
        return local, config, HuggingFaceTokenizer(local, vocab=config.vocab, date=date)


def token_bytes(tokenizer: HuggingFaceTokenizer, *, called: str) -> list[bytes | None]:
    """See HuggingFaceTokenizer.token_bytes. Args: called: the model, with which a ValueError begins."""
    try:
        return tokenizer.token_bytes()
    except ValueError as error:
        raise ValueError(f"{called}: its tokenizer must be byte-level or SentencePiece, so that each token has bytes") from error


class UnsafeTokenScorer:
    """Log-probabilities of a verdict. Devices share the work, and threads may call it, as with SequenceClassifier."""

    def __init__(self, use: ModelUse, mesh: Mesh, *, date: str = "", load: bool = True):
        """Args: use: a model of kind "unsafe_token"; date: see HuggingFaceTokenizer. Others, errors: see SequenceClassifier."""
        called, prefix, settings = f"{use.setting}={use.path!r}", use.setting.removesuffix("path"), use.judge
        assert settings is not None, "ModelUse checks it"
        folder, config, tokenizer = language_model(use.path, setting=use.setting, compute_dtype=use.compute_dtype, date=date)
        if settings.length > config.max_positions:
            raise ValueError(f"{prefix}length={settings.length} exceeds the {config.max_positions} positions of {called}")
        texts = token_bytes(tokenizer, called=called)
        verdicts = [token for token, text in enumerate(texts) if text == settings.token.encode()]
        if len(verdicts) != 1:
            what = f"must be the text of one token of {called}, but {len(verdicts)} tokens have this text"
            raise ValueError(f"{prefix}label={settings.token!r} {what}; a space before a word is part of its token")
        self._template = PromptTemplate(
            tokenizer,
            settings.template,
            fields=("attack", "reply"),
            limit=settings.length,
            template_setting=f"{prefix}template",
            limit_setting=f"{prefix}length",
            ending=settings.ending,
        )
        if load:
            verdict = functools.partial(verdict_logprobs, token=verdicts[0])
            forward = Pass(on_device(config, mesh, setting=use.setting), verdict, mesh)
            shape = dict(rows=use.rows * mesh.size, limit=settings.length, pad_id=tokenizer.pad_id)
            self.model = Loaded(forward, folder, **shape)

    def __call__(self, attacks: Sequence[str], replies: Sequence[str]) -> np.ndarray:
        """float32[n], nats: log-probability, over the whole vocabulary, of the verdict on reply i to attack i."""
        encoded = self._template.encode(list(zip(attacks, replies, strict=True)))
        return self.model(encoded) if encoded else np.zeros(0, np.float32)


def verdict_logprobs(model: Decoder, tokens: jax.Array, length: jax.Array, *, token: int) -> jax.Array:
    """float32[B], nats: log π(token | a row's tokens), at temperature 1.

    Args: tokens: int32[B, T], right-padded; length: int32[B], at least 1.
    """
    last = jnp.take_along_axis(model(tokens), (length - 1)[:, None, None], axis=1)[:, 0]
    return jax.nn.log_softmax(model.head()(last), axis=-1)[:, token]


def encoder_config(folder: Path | str, *, setting: str = "task.embedding_path") -> EncoderConfig:
    """The config of the sentence encoder in a folder or hub id. Raises ValueError if it or its tokenizer.json is missing."""
    with load_lib.named(setting, folder):
        config = load_lib.read_config(folder, compute_dtype="float32")
        folder = load_lib.resolve_folder(folder, weights=False)
    if not isinstance(config, EncoderConfig) or config.head != "embedding":
        raise ValueError(f"{setting}={str(folder)!r} is not a sentence encoder (BERT or RoBERTa without a head)")
    if not (folder / "tokenizer.json").is_file():
        raise ValueError(f"{setting}={str(folder)!r} has no tokenizer.json")
    return config


def describe_encoder(folder: Path | str, *, fetch: bool = True) -> dict[str, Any]:
    """The contract's entry of an encoder. Raises as `encoder_config`. Args: fetch: whether weights of a hub id are fetched."""
    config = encoder_config(folder)
    return {"width": config.width, "weights": digest(load_lib.resolve_folder(folder, weights=fetch))}


def encoder_rows(mesh: Mesh) -> int:
    """Texts of one pass of a sentence encoder, a multiple of the devices."""
    return -(-_EMBEDDER_ROWS // mesh.size) * mesh.size


def embed(model: Encoder, tokens: jax.Array, length: jax.Array) -> jax.Array:
    """float32[B, E]: vectors of length 1. Args: see `score`."""
    return model.sentence_embeddings(tokens, jnp.arange(tokens.shape[1]) < length[:, None])


class ResponseEmbedder:
    """Embeddings of texts by a sentence encoder. Texts are split over the devices of the mesh."""

    def __init__(self, folder: Path | str, mesh: Mesh, *, setting: str = "task.embedding_path"):
        """Args and errors: see encoder_config."""
        config, folder = encoder_config(folder, setting=setting), load_lib.resolve_folder(folder)
        self._width = config.width
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._tokenizer.no_padding()
        self._escaped = Escaper(self._tokenizer)
        self._tokenizer.enable_truncation(config.position_limit)
        with load_lib.named(setting, folder):
            without_rows(self._tokenizer, config.vocab)
        self.model = Loaded(Pass(config, embed, mesh), folder, rows=encoder_rows(mesh), limit=config.position_limit)

    def __call__(self, texts: Sequence[str]) -> np.ndarray:
        """float32[n, E]: vectors of length 1, 0 for a text without tokens. Texts are cut at the encoder's positions, and special
        tokens that they spell are read as text."""
        encoded = [encoding.ids for encoding in self._tokenizer.encode_batch(self._escaped(texts))]
        return self.model(encoded) if encoded else np.zeros((0, self._width), np.float32)


class LinearScorer:
    """P(label | text) as the mean of E SVMs, each calibrated by a sigmoid (Platt 1999), as scikit-learn fits them to TF-IDF.

    x = l2-normalised counts · idf of the text's lower-case words that are terms; f_e = w_e · x + c_e;
    P = mean_e 1 / (1 + exp(a_e f_e + b_e)).
    """

    def __init__(self, path: Path | str, *, setting: str):
        """Raises ValueError naming setting, file and array where one is missing, has another shape or is not finite.

        Args: path: an .npz of terms str[V], idf float[V], coef float[E, V] (w), intercept float[E] (c), platt_a float[E] and
          platt_b float[E]; other arrays are ignored.
        """
        called = f"{setting}={str(path)!r}"
        try:
            with zipfile.ZipFile(path):  # np.load would accept other formats, too
                stored = np.load(path, allow_pickle=False)
            with stored:
                arrays = {name: stored[name] for name in _SHAPES if name in stored.files}
        except (OSError, EOFError, ValueError, zipfile.BadZipFile) as error:
            raise ValueError(f"{called} cannot be read as .npz: {' '.join(str(error).split())}") from error
        if missing := _SHAPES.keys() - arrays.keys():
            raise ValueError(f"{called} lacks the arrays {', '.join(sorted(missing))}")
        sizes = dict(zip("EV", arrays["coef"].shape, strict=False))
        for name, axes in _SHAPES.items():
            if arrays[name].shape != tuple(sizes.get(axis, -1) for axis in axes):
                raise ValueError(f"{called}: {name} has shape {list(arrays[name].shape)}, coef {list(arrays['coef'].shape)}")
            if name != "terms" and not np.isfinite(arrays[name]).all():
                raise ValueError(f"{called}: {name} holds numbers that are not finite")
        self._index = {term: i for i, term in enumerate(arrays.pop("terms").tolist())}
        self._arrays = {name: array.astype(np.float64) for name, array in arrays.items()}

    def __call__(self, texts: Sequence[str]) -> np.ndarray:
        """float32[n], nats: log P(label | text), always finite."""
        return np.array([self._log_probability(text) for text in texts], np.float32)

    def _log_probability(self, text: str) -> float:
        a = self._arrays
        counts = Counter(index for word in _WORD.findall(text.lower()) if (index := self._index.get(word)) is not None)
        terms = np.fromiter(counts.keys(), np.int64, len(counts))
        weights = np.fromiter(counts.values(), np.float64, len(counts)) * a["idf"][terms]
        norm = np.linalg.norm(weights)
        margins = a["coef"][:, terms] @ (weights / norm if norm else weights) + a["intercept"]
        # log 1 / (1 + exp z) = −log(exp 0 + exp z), which does not overflow.
        log_sigmoids = -np.logaddexp(0.0, a["platt_a"] * margins + a["platt_b"])
        return float(np.logaddexp.reduce(log_sigmoids) - np.log(len(log_sigmoids)))
