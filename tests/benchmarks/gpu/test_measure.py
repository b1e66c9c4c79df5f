"""What a worker tells: a case that needs more memory than the device has is left out by a row that says so."""

import dataclasses
import types

import jax
from absl import flags
from absl.testing import flagsaver
from jax._src.cudnn import fused_attention_stablehlo

from benchmarks import trainer_update
from benchmarks.gpu import measure
from tba_jax import sharding


def test_the_update_attends_by_cudnn_on_a_gpu(monkeypatch):
    """The update of the 0.5B model, lowered for CUDA, which needs no GPU but for the version of cuDNN that jax asks for."""
    flags.FLAGS.mark_as_parsed()
    with flagsaver.flagsaver(preset="qwen2.5-0.5b", tiny=False):
        model = dataclasses.replace(measure.shape(), compute_dtype="bfloat16")
        changes = measure.update_changes(model)
    program = trainer_update.update_program(changes, model.vocab, begins=False)
    placed = program.place(trainer_update.random_rows(program, changes, model.vocab))
    monkeypatch.setattr(fused_attention_stablehlo, "cuda_versions", types.SimpleNamespace(cudnn_get_version=lambda: 91000))
    monkeypatch.setattr(sharding, "platform", lambda: "gpu")
    state, frozen = program.shapes()["state"], program.shapes()["frozen weights"]
    with jax.set_mesh(program.mesh):
        traced = program._update._function.trace(state, frozen, placed.batch, placed.packed, whole_groups=True)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "__cudnn$fmhaScaleBiasSoftmaxBackward" in text and "tensor<9x512x14x64xbf16>" in text
