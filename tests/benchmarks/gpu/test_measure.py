"""What a worker tells: a case that needs more memory than the device has is left out by a row that says so."""

import dataclasses
import types

import jax
import pytest
from absl import flags
from absl.testing import flagsaver
from jax._src.cudnn import fused_attention_stablehlo

from benchmarks import trainer_update
from benchmarks.gpu import measure
from tba_jax import sharding


@pytest.fixture
def planned():
    """The update of the 0.5B model without a state, and its rows, at the size that is measured."""
    flags.FLAGS.mark_as_parsed()
    with flagsaver.flagsaver(preset="qwen2.5-0.5b", tiny=False):
        model = dataclasses.replace(measure.shape(), compute_dtype="bfloat16")
        changes = measure.update_changes(model)
    program = trainer_update.update_program(changes, model.vocab, begins=False)
    return program, program.place(trainer_update.random_rows(program, changes, model.vocab))


def test_the_update_attends_by_cudnn_on_a_gpu(planned, monkeypatch):
    """It is lowered for CUDA, which needs no GPU, but for the version of cuDNN that jax asks for."""
    monkeypatch.setattr(fused_attention_stablehlo, "cuda_versions", types.SimpleNamespace(cudnn_get_version=lambda: 91000))
    monkeypatch.setattr(sharding, "platform", lambda: "gpu")
    program, placed = planned
    state, frozen = program.shapes()["state"], program.shapes()["frozen weights"]
    with jax.set_mesh(program.mesh):
        traced = program._update._function.trace(state, frozen, placed.batch, placed.packed, whole_groups=True)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "__cudnn$fmhaScaleBiasSoftmaxBackward" in text and "tensor<9x512x14x64xbf16>" in text


def test_operations_of_the_update_are_those_counted_by_hand(planned):
    """Two queries of eight rows of 512 + 512 tokens: the prompts once; every token goes through the layers, those of responses to
    the vocabulary, three times; a token attends to itself and to those before it."""
    _, placed = planned
    weights = 24 * (896 * 64 * (2 * 14 + 2 * 2) + 3 * 896 * 4864)
    tokens, drawn = 2 * 512 + 16 * 512, 16 * 512
    pairs = 2 * 512 * 513 // 2 + 16 * (1024 * 1025 - 512 * 513) // 2
    assert placed.work.flops == 3 * (2 * (weights * tokens + 151936 * 896 * drawn) + 4 * 14 * 64 * 24 * pairs)
    assert placed.work.tokens == tokens == 9216
