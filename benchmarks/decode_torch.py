"""The peer of benchmarks.decode: transformers' `generate`, in a process of its own so that the libraries' threads do not mix.

Requests come as lines of JSON on stdin, {"request": name, ...arguments}; answers go as lines of JSON to stdout, whatever
libraries print to stderr. It ends with its stdin. A request that fails ends the process with a traceback.
"""

import contextlib
import dataclasses
import functools
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, TextIO

import torch
import transformers
from transformers import AutoModelForCausalLM, CompileConfig, DynamicCache, GenerationConfig


@dataclasses.dataclass(frozen=True)
class Mode:
    """A way to call `generate`.

    static: a cache of fixed length, as long as the case needs, in place of one that grows. compiled: the decode step goes
    through torch.compile (inductor); prefill never does, as in transformers. bfloat16: weights, cache and arithmetic;
    otherwise the case's dtype. shared: `generate` begins from caches of the prompts that were computed once a query.
    """

    static: bool = False
    compiled: bool = False
    bfloat16: bool = False
    shared: bool = False


MODES: dict[str, Mode] = {
    "dynamic": Mode(),
    "static": Mode(static=True),
    "static_bf16": Mode(static=True, bfloat16=True),
    "compile": Mode(static=True, compiled=True),
    "compile_bf16": Mode(static=True, compiled=True, bfloat16=True),
    "shared": Mode(shared=True),
}

# New tokens of a call that is not timed: everything is compiled and allocated by then, caches have their final length anyway.
WARM_UP_TOKENS = 8


class Peer:
    """What one case needs: a model a dtype, its prompts and the longest response."""

    def __init__(self) -> None:
        self._models: dict[torch.dtype, Any] = {}

    def versions(self) -> dict[str, Any]:
        return {"torch": torch.__version__, "transformers": transformers.__version__, "threads": torch.get_num_threads()}

    def modes(self) -> dict[str, Any]:
        return {"modes": list(MODES)}

    def load(
        self, *, folder: str, dtype: str, device: str, prompts: Sequence[Sequence[int]], samples: int, response_length: int
    ) -> dict[str, Any]:
        """Forgets the case before and takes the next.

        Args:
          folder: of a Hugging Face checkpoint. dtype: "float32" or "bfloat16". device: "cpu" or "cuda".
          prompts: token ids [Q][P]. samples: responses to each. response_length: the most that `generate` will ask for.
        """
        self._models.clear()
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        if torch.cuda.is_available():  # JAX has the same device's memory
            torch.cuda.empty_cache()
        self._folder, self._dtype, self._device = folder, getattr(torch, dtype), torch.device(device)
        self._prompts = torch.tensor(prompts, dtype=torch.long, device=self._device)
        self._samples, self._response_length = samples, response_length
        torch.manual_seed(0)
        return {}

    def greedy(self, *, prompt: int, new_tokens: int) -> dict[str, Any]:
        """The most likely continuation of one prompt, in the case's dtype."""
        settings = GenerationConfig(do_sample=False, max_new_tokens=new_tokens, pad_token_id=0, disable_compile=True)
        model, prompts = self._model(self._dtype), self._prompts[prompt : prompt + 1]
        with torch.inference_mode():
            output = model.generate(prompts, attention_mask=torch.ones_like(prompts), generation_config=settings)
        return {"tokens": output[0, prompts.shape[1] :].tolist()}

    def warm_up(self, *, mode: str, queries: int) -> dict[str, Any]:
        """Calls once what `generate` will call, for its first `queries` prompts.

        Returns:
          seconds; for a compiled mode further: graphs compiled, breaks of the graph, frames compiled so far, and how many
          times compiled graphs ran per decode step of a profiled call: 0 would mean that nothing compiled is used.
        """
        begin = time.perf_counter()
        new_tokens = min(WARM_UP_TOKENS, self._response_length)
        self._generate(MODES[mode], self._prompts[:queries], new_tokens)
        answer: dict[str, Any] = {"seconds": time.perf_counter() - begin}
        if MODES[mode].compiled:
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
                self._generate(MODES[mode], self._prompts[:queries], new_tokens)
            runs = sum(event.count for event in profile.key_averages() if "Call CompiledFxGraph" in event.key)
            counters = torch._dynamo.utils.counters
            answer |= {
                "graphs": counters["stats"]["unique_graphs"],
                "graph_breaks": sum(counters["graph_break"].values()),
                "runs_per_step": runs / (new_tokens - 1) if new_tokens > 1 else 0.0,
            }
        return answer

    def generate(self, *, mode: str, batches: Sequence[Sequence[int]]) -> dict[str, Any]:
        """Times batches of (queries, new tokens), one after the other, from the first prompt on.

        Returns:
          seconds; compilations: graphs compiled meanwhile, 0 unless the warm-up did not cover the shapes.
        """
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        self._synchronize()
        begin, first = time.perf_counter(), 0
        for queries, new_tokens in batches:
            self._generate(MODES[mode], self._prompts[first : first + queries], new_tokens)
            first += queries
        self._synchronize()
        seconds = time.perf_counter() - begin
        return {"seconds": seconds, "compilations": torch._dynamo.utils.counters["stats"]["unique_graphs"] - graphs}

    def roofline(self, *, device: str, dtypes: Sequence[str], bandwidth_bytes: int, sizes: dict[str, int]) -> dict[str, Any]:
        """What the device gives this library: bytes/s of a long vector and FLOP/s of a square matrix product, best of 5.

        On a CPU the vector is summed (read once), elsewhere copied (read and written).
        """
        vector = torch.ones(bandwidth_bytes // 4, dtype=torch.float32, device=device)
        into = torch.empty_like(vector)
        seconds = self._best(vector.sum) if device == "cpu" else self._best(lambda: into.copy_(vector)) / 2
        answer: dict[str, Any] = {"bytes_per_second": bandwidth_bytes / seconds, "flops_per_second": {}}
        for dtype in dtypes:
            size = sizes[dtype]
            a, b = (torch.randn(size, size, device=device).to(getattr(torch, dtype)) for _ in range(2))
            answer["flops_per_second"][dtype] = 2 * size**3 / self._best(functools.partial(torch.matmul, a, b))
        return answer

    def _best(self, function: Callable[[], Any]) -> float:
        times = []
        for _ in range(6):
            self._synchronize()
            begin = time.perf_counter()
            function()
            self._synchronize()
            times.append(time.perf_counter() - begin)
        return min(times[1:])

    def _synchronize(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def _model(self, dtype: torch.dtype) -> Any:
        if dtype not in self._models:
            model = AutoModelForCausalLM.from_pretrained(self._folder, dtype=dtype).to(self._device).eval()
            # `generate` fills what its settings leave open from here: an end-of-sequence token would end responses early.
            model.generation_config = GenerationConfig(pad_token_id=0)
            self._models[dtype] = model
        return self._models[dtype]

    def _generate(self, mode: Mode, prompts: torch.Tensor, new_tokens: int) -> None:
        """Samples new_tokens for `samples` rows of each of the prompts [Q, P]. Raises RuntimeError: rows ended early."""
        P = prompts.shape[1]
        settings = GenerationConfig(
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=new_tokens,
            pad_token_id=0,
            disable_compile=not mode.compiled,
        )
        if mode.static:
            # One length for all calls: a compiled step is compiled for one.
            settings.cache_implementation, settings.max_cache_len = "static", P + self._response_length
        if mode.compiled:
            settings.compile_config = CompileConfig(mode="default" if self._device.type == "cpu" else "reduce-overhead")
            # Without this flag transformers compiles on accelerators only, and says so in a warning at most.
            settings.compile_config._compile_all_devices = True
        model = self._model(torch.bfloat16 if mode.bfloat16 else self._dtype)
        more: dict[str, Any] = {}
        with torch.inference_mode():
            if mode.shared:
                cache = DynamicCache(config=model.config)
                model.base_model(input_ids=prompts[:, :-1], past_key_values=cache, use_cache=True)
                cache.batch_repeat_interleave(self._samples)
                prompts, more = prompts.repeat_interleave(self._samples, dim=0), {"past_key_values": cache}
            elif self._samples > 1:
                settings.num_return_sequences = self._samples
            output = model.generate(prompts, attention_mask=torch.ones_like(prompts), generation_config=settings, **more)
        rows = prompts.shape[0] * (1 if mode.shared else self._samples)
        if output.shape != (rows, P + new_tokens):
            raise RuntimeError(f"generate gave {list(output.shape)} tokens, not {[rows, P + new_tokens]}")


def serve(requests: TextIO, answers: TextIO) -> None:
    peer = Peer()
    handlers: dict[str, Callable[..., dict[str, Any]]] = {
        "versions": peer.versions,
        "modes": peer.modes,
        "load": peer.load,
        "greedy": peer.greedy,
        "warm_up": peer.warm_up,
        "generate": peer.generate,
        "roofline": peer.roofline,
    }
    for line in requests:
        arguments = json.loads(line)
        answers.write(json.dumps(handlers[arguments.pop("request")](**arguments)) + "\n")
        answers.flush()


def main() -> None:
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    # Libraries print to stdout as they like; the answers have it for themselves.
    with os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8") as answers:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        with contextlib.suppress(KeyboardInterrupt):  # the parent's Ctrl-C comes here as well
            serve(sys.stdin, answers)


if __name__ == "__main__":
    main()
