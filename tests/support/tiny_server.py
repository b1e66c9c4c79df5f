"""A small inference server that speaks vLLM's protocol, token by token on the CPU: what faults of a server do is tested by it.

python -m tests.support.tiny_server --model=FOLDER --port=P …: as vLLM's own command line; what it does not know is ignored.
"""

import functools
import json
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy

from tba_jax.decoding.servers import Vllm
from tba_jax.models import decoder, parameters
from tba_jax.models.hugging_face import load

LENGTH = 128


class TinyVllm(Vllm):
    """Starts this module in place of vLLM."""

    @staticmethod
    def command(folder: Path, **settings: Any) -> list[str]:
        return ["tests.support.tiny_server", *Vllm.command(folder, **settings)[1:]]


class TinyServer(ThreadingHTTPServer):
    """faults: name -> value: status: (code, how many answers have it); late: seconds before each answer of a completion; cut: the
    prompt's first tokens are left out; no_ids: token ids are not told; stale: new weights are not taken; early: responses end
    after two tokens; drawn: a token that every response begins with; temperature: replaces that of the request.
    most_rank: of adapters; None: it takes none. asked: bodies of the completions that were asked; adapters: name -> weights with
    the adapter merged, of those that are loaded."""

    daemon_threads = True

    def __init__(self, folder: Path, port: int = 0, most_rank: int | None = None):
        super().__init__(("127.0.0.1", port), _Handler)
        self.faults: dict[str, Any] = {}
        self.asked: list[dict[str, Any]] = []
        self.loads, self.most_rank, self.adapters = 0, most_rank, dict[str, Any]()
        self._lock = threading.Lock()
        self.load(folder)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def load(self, folder: Path) -> None:
        self.loads += 1
        if self.faults.get("stale") and self.loads > 1:
            return
        config = load.read_config(folder, compute_dtype="float32")
        on_device = jax.tree.map(lambda _: jax.sharding.SingleDeviceSharding(jax.devices("cpu")[0]), decoder.define(config).specs)
        self.params = load.load_params(folder, config, on_device)
        self.config = config
        self._logits = jax.jit(functools.partial(_logits, config=config))

    def load_adapter(self, asked: dict[str, str]) -> tuple[int, Any]:
        """As vLLM: the status and the body of the answer."""
        name, folder = asked["lora_name"], Path(asked["lora_path"])
        if self.most_rank is None:
            return 404, {"detail": "Not Found"}
        if name in self.adapters:
            return 400, {"error": {"message": f"The lora adapter '{name}' has already been loaded."}}
        values = json.loads((folder / "adapter_config.json").read_text())
        if values["r"] > self.most_rank:
            return 500, {"error": {"message": f"LoRA rank {values['r']} is greater than max_lora_rank {self.most_rank}."}}
        tensors = safetensors.numpy.load_file(folder / "adapter_model.safetensors")
        self.adapters[name] = self.params if self.faults.get("stale") else _merged(self.params, values, tensors)
        return 200, None

    def logits(self, tokens: list[int], params: Any) -> np.ndarray:
        """float32[len(tokens), V]."""
        padded = np.zeros((1, LENGTH), np.int32)
        padded[0, : len(tokens)] = tokens
        with self._lock:
            return np.asarray(self._logits(params, padded))[: len(tokens)]

    def complete(self, asked: dict[str, Any]) -> dict[str, Any]:
        self.asked.append(asked)
        params = self.adapters[asked["model"]] if "model" in asked else self.params
        context = asked["prompt"][2:] if self.faults.get("cut") else asked["prompt"]
        if "prompt_logprobs" in asked:
            every = jax.nn.log_softmax(jnp.asarray(self.logits(context, params)))
            told = [{str(token): {"logprob": float(every[i, token])}} for i, token in enumerate(context[1:])]
            return {"choices": [{"prompt_logprobs": [None, *told], "prompt_token_ids": context, "token_ids": [0]}]}
        rng, tokens, logprobs = np.random.default_rng(), list[int](), list[float]()
        bias = {int(token): value for token, value in asked.get("logit_bias", {}).items()}
        temperature = self.faults.get("temperature", asked["temperature"])
        while len(tokens) < asked["max_tokens"]:
            logits = self.logits([*context, *tokens], params)[-1].astype(np.float64)
            for token, value in bias.items():
                logits[token] += value
            if len(tokens) < asked["min_tokens"]:
                logits[asked["stop_token_ids"]] = -np.inf
            scaled = logits / (temperature or 1.0)
            every = scaled - scaled.max() - np.log(np.exp(scaled - scaled.max()).sum())
            token = int(logits.argmax()) if not temperature else int(rng.choice(len(every), p=np.exp(every)))
            if not tokens and "drawn" in self.faults:
                token = self.faults["drawn"]
            tokens.append(token)
            logprobs.append(float(every[token % len(every)]))
            if token in asked["stop_token_ids"] or (self.faults.get("early") and len(tokens) == 2):
                break
        choice: dict[str, Any] = {"prompt_token_ids": context, "logprobs": {"token_logprobs": logprobs}, "token_ids": tokens}
        if self.faults.get("no_ids"):
            del choice["token_ids"]
        return {"choices": [choice]}


def _logits(params: Any, tokens: jax.Array, *, config: Any) -> jax.Array:
    model = parameters.module(decoder.define(config).graphdef, params)
    return model.head()(model(tokens)[0])


def _merged(params: Any, values: dict[str, Any], tensors: dict[str, np.ndarray]) -> Any:
    """The weights with an adapter of PEFT whose targets are llama's query maps."""
    of_layer = "base_model.model.model.layers.{}.self_attn.q_proj.lora_{}.weight".format
    weight = np.array(params["layers"]["attention"]["query"]["weight"])  # [L, D, N, H]
    for layer in range(len(weight)):
        update = tensors.pop(of_layer(layer, "B")) @ tensors.pop(of_layer(layer, "A"))
        weight[layer] += values["lora_alpha"] / values["r"] * update.T.reshape(weight[layer].shape)
    assert not tensors
    flat = parameters.flatten(params) | {"layers.attention.query.weight": jnp.asarray(weight)}
    return parameters.unflatten(flat)


class _Handler(BaseHTTPRequestHandler):
    server: TinyServer

    def do_GET(self) -> None:
        self._answer(200, None)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or "null")
        faults = self.server.faults
        if self.path == "/v1/completions":
            code, left = faults.get("status", (0, 0))
            if left:
                faults["status"] = code, left - 1
                self._answer(code, {"error": "busy"})
                return
            if body.get("model", "") not in {"", *self.server.adapters}:
                self._answer(404, {"error": {"message": f"The model `{body['model']}` does not exist."}})
                return
            time.sleep(faults.get("late", 0.0))
            self._answer(200, self.server.complete(body))
        elif self.path == "/collective_rpc":
            self.server.load(Path(body["kwargs"]["weights_path"]))
            self._answer(200, {"results": [None]})
        elif self.path == "/v1/load_lora_adapter":
            self._answer(*self.server.load_adapter(body))
        elif self.path == "/v1/unload_lora_adapter":
            self._answer(200 if self.server.adapters.pop(body["lora_name"], None) else 404, None)
        else:
            self._answer(200, None)

    def _answer(self, code: int, content: Any) -> None:
        data = b"" if content is None else json.dumps(content).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


if __name__ == "__main__":
    settings = dict(each.removeprefix("--").split("=", 1) for each in sys.argv[1:] if "=" in each)
    most_rank = settings.get("max-lora-rank")
    TinyServer(Path(settings["model"]), int(settings["port"]), most_rank and int(most_rank)).serve_forever()
