"""Inference servers as decoders: what vLLM and SGLang are asked over HTTP, token ids in and token ids out.

Every setting of the sampling is sent with each request, so that no default of the server or of the model's generation_config.json
decides anything; log-probs are asked of the distribution that was sampled.
"""

import abc
import contextlib
import dataclasses
import http.client
import json
import urllib.error
import urllib.request
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

_SHORT_SECONDS = 10.0  # for what costs a server nothing
# What a logit gets that is not to be drawn: e^−100 is nothing beside a float32's rounding. Both servers clip at it.
_BAN = -100.0
_FULL = (408, 425, 429, 500, 502, 503, 504)


class Unavailable(OSError):
    """The server is away, ended, late or full: it may be asked again."""


class Refused(ValueError):
    """The server answered, and its answer is no response that the run may have."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Draw:
    """Asks for one response. context: ids; limit: most tokens; least: without an end of sequence before them.

    temperature, top_k, top_p, min_p: see sampling.Sampling. eos_id: −1 for none. banned: ids; stop: strings that end it, and are
    part of it. There is no seed: vLLM draws by one generator for each seed then, which is slow, and fails on a CPU.
    """

    context: Sequence[int]
    limit: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    eos_id: int
    banned: Sequence[int] = ()
    least: int = 0
    stop: Sequence[str] = ()


@dataclasses.dataclass(frozen=True)
class Drawn:
    """tokens; logprobs: nats, of the distribution that was sampled; context: the ids that the server continued."""

    tokens: list[int]
    logprobs: list[float]
    context: list[int]


class Server(abc.ABC):
    """An inference server at a URL. Several threads may ask it at once. Every method raises Unavailable and Refused."""

    name: str

    def __init__(self, url: str):
        self.url, self._adapter = url.rstrip("/"), ""  # the name of the adapter that draws, "": the model without one
        self._open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open

    @staticmethod
    @abc.abstractmethod
    def command(folder: Path, *, port: int, dtype: str, length: int, seed: int) -> list[str]:
        """Arguments of `python -m` that start a server of a Hugging Face folder. Args: length: most tokens of a sequence."""

    @staticmethod
    @abc.abstractmethod
    def adapter_arguments(rank: int) -> list[str]:
        """Further arguments of the command, for a server that takes adapters of this rank."""

    environment: ClassVar[Mapping[str, str]] = {}  # that it is started with
    _api, _names_adapter = "", "model"  # what the paths of adapters begin with; the key of a request by an adapter

    @abc.abstractmethod
    def draw(self, draw: Draw, *, seconds: float) -> Drawn: ...

    @abc.abstractmethod
    def logprobs(self, tokens: Sequence[int], *, seconds: float) -> list[float]:
        """Nats of each token but the first, given those before it: of the model, at temperature 1, without bans."""

    @abc.abstractmethod
    def load(self, folder: Path, *, seconds: float) -> None:
        """Takes the weights of a folder, and forgets what it has computed by others."""

    def load_adapter(self, folder: Path, *, rank: int, seconds: float) -> None:
        """Draws by the adapter in a folder of PEFT from now on, and drops the one before.

        Each load has a new name, since servers tell cached prefixes of adapters apart by names.
        """
        name, before = f"adapter-{uuid.uuid4().hex}", self._adapter
        try:
            self._ask("POST", f"{self._api}/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)}, seconds)
        except (Unavailable, Refused) as error:
            if isinstance(error, Unavailable) and getattr(error.__cause__, "code", 0) != 500:  # vLLM refuses adapters by a 500
                raise
            self.check_there()
            needs = f"the policy of step 0 with {' '.join(self.adapter_arguments(rank))}, see docs/engines.md"
            raise Refused(f"{error}; adapters of lora.rank={rank} and lora.targets need a server of {needs}") from error
        self._adapter = name
        self._drop(before, seconds)

    def drop_adapter(self) -> None:
        """The server needs the adapter no more."""
        self._drop(self._adapter, _SHORT_SECONDS)

    def _drop(self, name: str, seconds: float) -> None:
        if name:
            with contextlib.suppress(Refused, Unavailable):  # a server that began anew has forgotten it
                self._ask("POST", f"{self._api}/unload_lora_adapter", {"lora_name": name}, seconds)

    def _generate(self, path: str, asked: dict[str, Any], seconds: float) -> Any:
        """Asks the adapter, or the model where there is none. Raises Unavailable also where a server that began anew has none."""
        if not self._adapter:
            return self._ask("POST", path, asked, seconds)
        try:
            return self._ask("POST", path, asked | {self._names_adapter: self._adapter}, seconds)
        except Refused as error:
            if self._adapter in str(error):
                raise Unavailable(str(error)) from error
            raise

    def check_there(self) -> None:
        self._ask("GET", "/health", None, _SHORT_SECONDS)

    def _ask(self, method: str, path: str, body: Any, seconds: float) -> Any:
        """The server's answer, as JSON where it is."""
        data = None if body is None else json.dumps(body).encode()
        asked = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"}, method=method)
        try:
            with self._open(asked, timeout=seconds) as answer:
                content = answer.read()
        except urllib.error.HTTPError as error:
            told = " ".join(error.read(2000).decode(errors="replace").split())[:300]
            sentence = f"{self.url}{path} answered {error.code}: {told or error.reason}"
            raise (Unavailable if error.code in _FULL else Refused)(sentence) from error
        except (OSError, http.client.HTTPException) as error:
            why = f"did not answer within {seconds:g} s" if isinstance(error, TimeoutError) else f"is away: {error}"
            raise Unavailable(f"{self.url}{path} {why}") from error
        try:
            return json.loads(content) if content.strip() else None
        except ValueError:
            return content.decode(errors="replace")


class Vllm(Server):
    """vLLM's server of the OpenAI protocol, version 0.11 and later, with VLLM_SERVER_DEV_MODE=1 for new weights."""

    name, _api = "vllm", "/v1"
    environment: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("VLLM_SERVER_DEV_MODE", "VLLM_ALLOW_RUNTIME_LORA_UPDATING", "VLLM_NO_USAGE_STATS", "DO_NOT_TRACK"), "1"
    )

    @staticmethod
    def command(folder: Path, *, port: int, dtype: str, length: int, seed: int) -> list[str]:
        settings: dict[str, Any] = {"model": folder, "served-model-name": "policy", "host": "127.0.0.1", "port": port}
        settings |= {"dtype": dtype, "max-model-len": length, "seed": seed, "generation-config": "vllm"}
        settings |= {"logprobs-mode": "processed_logprobs"}
        return ["vllm.entrypoints.openai.api_server", *(f"--{name}={value}" for name, value in settings.items())]

    @staticmethod
    def adapter_arguments(rank: int) -> list[str]:
        return ["--enable-lora", f"--max-lora-rank={1 << max(3, (rank - 1).bit_length())}"]  # vLLM takes powers of two

    def draw(self, draw: Draw, *, seconds: float) -> Drawn:
        d = draw
        asked: dict[str, Any] = dict(prompt=list(d.context), max_tokens=d.limit, min_tokens=min(d.least, d.limit))
        asked |= dict(temperature=d.temperature, top_k=d.top_k or -1, top_p=d.top_p, min_p=d.min_p, logprobs=0)
        asked |= dict(frequency_penalty=0.0, presence_penalty=0.0, repetition_penalty=1.0, n=1, echo=False)
        asked |= dict(ignore_eos=True, stop_token_ids=[d.eos_id] if d.eos_id >= 0 else [], stop=list(d.stop))
        asked |= dict(include_stop_str_in_output=True, skip_special_tokens=False, return_token_ids=True)
        if d.banned:
            asked["logit_bias"] = {str(token): _BAN for token in d.banned}
        answer = self._generate("/v1/completions", asked, seconds)
        try:
            (choice,) = answer["choices"]
            return Drawn(choice["token_ids"], choice["logprobs"]["token_logprobs"], choice["prompt_token_ids"])
        except (KeyError, TypeError, ValueError) as error:
            raise Refused(
                f"{self.url}/v1/completions gave no token ids and log-probs: vLLM 0.11 and later gives them by return_token_ids"
            ) from error

    def logprobs(self, tokens: Sequence[int], *, seconds: float) -> list[float]:
        asked = dict(prompt=list(tokens), max_tokens=1, temperature=0.0, prompt_logprobs=0, return_token_ids=True)
        answer = self._generate("/v1/completions", asked, seconds)
        try:
            told = answer["choices"][0]["prompt_logprobs"][1:]
            return [float(each[str(token)]["logprob"]) for token, each in zip(tokens[1:], told, strict=True)]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise Refused(f"{self.url}/v1/completions gave no log-probs of its prompt (prompt_logprobs)") from error

    def load(self, folder: Path, *, seconds: float) -> None:
        how = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        self._ask("POST", "/collective_rpc", how, seconds)
        self._ask("POST", "/reset_prefix_cache", {}, seconds)


class Sglang(Server):
    """SGLang's server, by its own protocol."""

    name, _names_adapter = "sglang", "lora_path"

    @staticmethod
    def command(folder: Path, *, port: int, dtype: str, length: int, seed: int) -> list[str]:
        settings: dict[str, Any] = {"model-path": folder, "host": "127.0.0.1", "port": port, "dtype": dtype}
        settings |= {"context-length": length, "random-seed": seed, "sampling-defaults": "openai"}
        return ["sglang.launch_server", *(f"--{name}={value}" for name, value in settings.items())]

    @staticmethod
    def adapter_arguments(rank: int) -> list[str]:
        return ["--enable-lora", f"--max-lora-rank={rank}", "--lora-target-modules=all"]

    def draw(self, draw: Draw, *, seconds: float) -> Drawn:
        d = draw
        how: dict[str, Any] = dict(max_new_tokens=d.limit, min_new_tokens=min(d.least, d.limit))
        how |= dict(temperature=d.temperature, top_k=d.top_k or -1, top_p=d.top_p, min_p=d.min_p)
        how |= dict(frequency_penalty=0.0, presence_penalty=0.0, repetition_penalty=1.0, n=1, no_stop_trim=True)
        how |= dict(ignore_eos=True, stop_token_ids=[d.eos_id] if d.eos_id >= 0 else [], stop=list(d.stop))
        how |= dict(skip_special_tokens=False, spaces_between_special_tokens=False)
        if d.banned:
            how["logit_bias"] = {str(token): _BAN for token in d.banned}
        asked = dict(input_ids=list(d.context), sampling_params=how, return_logprob=True)
        answer = self._generate("/generate", asked, seconds)
        try:
            told = answer["meta_info"]
            logprobs, tokens = zip(*[(each[0], each[1]) for each in told["output_token_logprobs"]], strict=True)
            if told["prompt_tokens"] != len(d.context):
                raise Refused(f"{self.url}/generate continued {told['prompt_tokens']} of {len(d.context)} tokens")
            return Drawn(list(tokens), list(logprobs), list(d.context))
        except (KeyError, TypeError, IndexError) as error:
            raise Refused(f"{self.url}/generate gave no token ids and log-probs (return_logprob)") from error

    def logprobs(self, tokens: Sequence[int], *, seconds: float) -> list[float]:
        how = dict(max_new_tokens=1, temperature=0.0)
        asked = dict(input_ids=list(tokens), sampling_params=how, return_logprob=True, logprob_start_len=0)
        answer = self._generate("/generate", asked, seconds)
        try:
            told = answer["meta_info"]["input_token_logprobs"][1:]
            if [each[1] for each in told] != list(tokens[1:]):
                raise Refused(f"{self.url}/generate read other tokens than it was given")
            return [float(each[0]) for each in told]
        except (KeyError, TypeError, IndexError) as error:
            raise Refused(f"{self.url}/generate gave no log-probs of its prompt (logprob_start_len)") from error

    def load(self, folder: Path, *, seconds: float) -> None:
        answer = self._ask("POST", "/update_weights_from_disk", {"model_path": str(folder), "flush_cache": True}, seconds)
        if not (isinstance(answer, dict) and answer.get("success")):
            raise Refused(f"{self.url}/update_weights_from_disk did not take {folder}: {str(answer)[:200]}")


SERVERS: dict[str, type[Server]] = {"vllm": Vllm, "sglang": Sglang}
