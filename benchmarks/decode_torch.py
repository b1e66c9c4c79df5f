"""The peer of benchmarks.decode: transformers' `generate`, in a process of its own so that the libraries' threads do not mix."""

import os
import time
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, CompileConfig, GenerationConfig

from benchmarks import json_worker


class Peer:
    """What one case needs: a model, its prompts and the longest response."""

    def versions(self) -> dict[str, Any]:
        return {"torch": torch.__version__, "transformers": transformers.__version__, "threads": torch.get_num_threads()}

    def load(
        self,
        *,
        folder: str,
        dtype: str,
        device: str,
        prompts: Sequence[Sequence[int]],
        samples: int,
        response_length: int,
        greedy: int,
    ) -> dict[str, Any]:
        """Forgets the case before and takes the next. Returns the most likely continuation of the first prompt.

        Args:
          folder: of a Hugging Face checkpoint. dtype: "float32" or "bfloat16". device: "cpu" or "cuda".
          prompts: token ids [Q][P]. samples: responses to each. response_length: the most that `generate` will ask for.
          greedy: tokens of the continuation.
        """
        self._model: Any = None
        torch._dynamo.reset()
        if torch.cuda.is_available():  # JAX has the same device's memory
            torch.cuda.empty_cache()
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).to(device).eval()
        # `generate` fills what its settings leave open from here: an end-of-sequence token would end responses early.
        self._model.generation_config = GenerationConfig(pad_token_id=0)
        self._prompts = torch.tensor(prompts, dtype=torch.long, device=device)
        self._samples, self._response_length = samples, response_length
        torch.manual_seed(0)
        settings = GenerationConfig(do_sample=False, max_new_tokens=greedy, pad_token_id=0, disable_compile=True)
        first = self._prompts[:1]
        with torch.inference_mode():
            output = self._model.generate(first, attention_mask=torch.ones_like(first), generation_config=settings)
        return {"tokens": output[0, first.shape[1] :].tolist()}

    def generate(self, *, mode: str, batches: Sequence[Sequence[int]]) -> dict[str, Any]:
        """Seconds of batches of (queries, new tokens), one after the other, from the first prompt on.

        Args: mode: "dynamic": a cache that grows; "static": one of fixed length, as long as the case needs; "compile": that, and
          the decode step goes through torch.compile (inductor); prefill never does, as in transformers.
        """
        self._synchronize()
        begin, first = time.perf_counter(), 0
        for queries, new_tokens in batches:
            self._generate(mode, self._prompts[first : first + queries], new_tokens)
            first += queries
        self._synchronize()
        return {"seconds": time.perf_counter() - begin}

    def _synchronize(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def _generate(self, mode: str, prompts: torch.Tensor, new_tokens: int) -> None:
        """Samples new_tokens for `samples` rows of each of the prompts [Q, P]. Raises RuntimeError: rows ended early."""
        Q, P = prompts.shape
        settings = GenerationConfig(
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=new_tokens,
            pad_token_id=0,
            num_return_sequences=self._samples,
            disable_compile=mode != "compile",
        )
        if mode != "dynamic":
            # One length for all calls: a compiled step is compiled for one.
            settings.cache_implementation, settings.max_cache_len = "static", P + self._response_length
        if mode == "compile":
            settings.compile_config = CompileConfig(mode="default" if prompts.device.type == "cpu" else "reduce-overhead")
            # Without this flag transformers compiles on accelerators only, and says so in a warning at most.
            settings.compile_config._compile_all_devices = True
        with torch.inference_mode():
            output = self._model.generate(prompts, attention_mask=torch.ones_like(prompts), generation_config=settings)
        if output.shape != (Q * self._samples, P + new_tokens):
            raise RuntimeError(f"generate gave {list(output.shape)} tokens, not {[Q * self._samples, P + new_tokens]}")


if __name__ == "__main__":
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    peer = Peer()
    json_worker.serve({"versions": peer.versions, "load": peer.load, "generate": peer.generate})
