"""The same update by PyTorch and transformers: forward, trajectory-balance loss, backward, AdamW, on rows of the same size.

python -m benchmarks.gpu.torch_update --preset=NAME --answer=FILE [--tiny]

Weights and moments are float32, products are bfloat16 (autocast), layers are recomputed in the backward pass (gradient
checkpointing), as learner.remat=full does, and a micro-batch is the rows of one query. Attention is transformers' default (SDPA).
Every row computes its own prompt.
"""

import statistics
import time
from collections.abc import Sequence

import torch
import transformers
from absl import app

from benchmarks.gpu import worker
from benchmarks.gpu.worker import row
from tba_jax.models import hardware
from tba_jax.models.hugging_face.architectures import ARCHITECTURES
from tba_jax.telemetry.metrics import PEAKS

_BETA = 0.1


def make_model(device: torch.device) -> torch.nn.Module:
    """Random weights in the preset's shape, float32."""
    ours = worker.shape("bfloat16")
    values = ARCHITECTURES[ours.architecture].write(ours)
    kind = values.pop("model_type")
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **values), dtype=torch.float32)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.config.use_cache = False
    return model.to(device).train()


def logprob_sums(model: torch.nn.Module, tokens: torch.Tensor, prompt: int) -> torch.Tensor:
    """float32[K]: log π of the responses that follow `prompt` tokens."""
    with torch.autocast(tokens.device.type, dtype=torch.bfloat16, enabled=tokens.device.type != "cpu"):
        hidden = model.base_model(input_ids=tokens[:, :-1], use_cache=False).last_hidden_state[:, prompt - 1 :]
        logits = model.get_output_embeddings()(hidden).float()
    return (
        -torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, prompt:].flatten(), reduction="none")
        .view(len(tokens), -1)
        .sum(1)
    )


def utilisation(device: torch.device, took: float, *, rows: int, P: int, R: int) -> str:
    """The model's FLOPs as a share of the device's peak, in words; "" where that is not known."""
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    if kind not in PEAKS:
        return ""
    operations = hardware.passes(adapters=False, held_reference=False) * rows
    operations *= hardware.forward_flops(worker.shape("bfloat16"), positions=P + R - 1, logits=R)
    return f"{100 * operations / took / PEAKS[kind].flops:.1f} % MFU, a prompt for each row, attention counted causally"


def main(argv: Sequence[str]) -> None:
    del argv
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = make_model(device)
    Q, K, P, R = (2, 4, 16, 16) if worker.TINY.value else (2, 8, 512, 512)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.0, fused=device.type == "cuda")
    torch.manual_seed(0)
    tokens = torch.randint(3, model.config.vocab_size, (Q, K, P + R), device=device)
    reference, reward = torch.randn(Q, K, device=device), torch.randn(Q, K, device=device)

    def update() -> None:
        for query in range(Q):
            ratio = logprob_sums(model, tokens[query], P) - reference[query] - reward[query] / _BETA
            loss = ((ratio - ratio.mean().detach()) ** 2).mean() / Q
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if device.type == "cuda":
            torch.cuda.synchronize()

    times = []
    for _ in range(2 + worker.REPEATS.value):
        begin = time.perf_counter()
        update()
        times.append(time.perf_counter() - begin)
    took = statistics.median(times[2:])
    value = f"{1e3 * took:.1f} ms, {Q * K * (P + R) / took:.0f} tokens/s of rows"
    rows = [row(f"torch: an update of {Q * K} rows of {P + R}", value, utilisation(device, took, rows=Q * K, P=P, R=R))]
    if device.type == "cuda":
        rows.append(row("torch: memory", f"{torch.cuda.max_memory_allocated() / 2**30:.2f} GiB"))
    worker.write(rows)


if __name__ == "__main__":
    app.run(main)
