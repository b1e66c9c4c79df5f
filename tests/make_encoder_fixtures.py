"""Writes tests/fixtures/tiny_{bert,roberta}_{embedding,classifier}: what torch's transformers computes of random encoders.

Run again only when a fixture's content is to change (needs `pip install torch==2.13.0`):

    python tests/make_encoder_fixtures.py

Each folder is a checkpoint and golden.npz: tokens int32[4, 12], right-padded; token_mask bool[4, 12]; hidden float32[4, 12, D];
logits float32[4, 3] of the classifiers. That of BERT's embedding is a sentence-transformers folder, with the pooler and the
files that such folders have. Everything is computed in float64 and stored in float32.
"""

import json
from pathlib import Path

import numpy as np
import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    PreTrainedModel,
    RobertaConfig,
    RobertaForSequenceClassification,
    RobertaModel,
)

FIXTURES = Path(__file__).resolve().parent / "fixtures"
VOCAB = 40
LENGTHS = (12, 7, 1, 4)
LABELS = ("negative", "neutral", "positive")
# name -> (model class, its config class, further settings of the config)
TINY_ENCODERS = {
    "tiny_bert_embedding": (BertModel, BertConfig, {}),
    "tiny_bert_classifier": (BertForSequenceClassification, BertConfig, {"id2label": dict(enumerate(LABELS))}),
    "tiny_roberta_embedding": (RobertaModel, RobertaConfig, {"type_vocab_size": 1}),
    "tiny_roberta_classifier": (
        RobertaForSequenceClassification,
        RobertaConfig,
        {"type_vocab_size": 1, "id2label": dict(enumerate(LABELS)), "hidden_act": "gelu_new"},
    ),
}


def tiny_encoder(name: str, seed: int) -> PreTrainedModel:
    """The random model `name`, float32, with norms away from 1, biases from 0, and attention far from uniform."""
    torch.manual_seed(seed)
    model_class, config_class, settings = TINY_ENCODERS[name]
    config = config_class(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=20,
        initializer_range=0.3,
        layer_norm_eps=1e-5,
        **settings,
    )
    model = model_class(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # biases and norms
                parameter += 0.3 * torch.randn_like(parameter)
        for embedding in (m for m in model.modules() if isinstance(m, torch.nn.Embedding)):
            embedding.weight.normal_(std=0.5)  # the row of the padding token too
    return model


def padded_rows(model: PreTrainedModel, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """tokens int64[4, 12], right-padded, and token_mask bool[4, 12]; no real token is the padding token."""
    pad = model.config.pad_token_id
    token_mask = np.arange(max(LENGTHS))[None, :] < np.array(LENGTHS)[:, None]
    tokens = np.random.default_rng(seed).integers(3, VOCAB, token_mask.shape)
    return np.where(token_mask, tokens, pad), token_mask


def outputs(model: PreTrainedModel, tokens: np.ndarray, token_mask: np.ndarray, **more: torch.Tensor) -> dict[str, np.ndarray]:
    """hidden [B, T, D] and, of a classifier, logits [B, labels], in the model's dtype."""
    with torch.no_grad():
        result = model(
            torch.tensor(tokens, dtype=torch.long),
            attention_mask=torch.tensor(token_mask, dtype=torch.long),
            output_hidden_states=True,
            **more,
        )
    found = {"hidden": result.hidden_states[-1].numpy()}
    return found | ({"logits": result.logits.numpy()} if "logits" in result else {})


def write_sentence_transformers_files(folder: Path) -> None:
    """What a sentence-transformers folder with mean pooling and normalisation holds besides the model."""
    names = (("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize"))
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{name}"}
        for i, (path, name) in enumerate(names)
    ]
    pooling = {
        "word_embedding_dimension": 16,
        "pooling_mode_cls_token": False,
        "pooling_mode_mean_tokens": True,
        "pooling_mode_max_tokens": False,
        "pooling_mode_mean_sqrt_len_tokens": False,
    }
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "modules.json").write_text(json.dumps(modules, indent=2) + "\n")
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling, indent=2) + "\n")


if __name__ == "__main__":
    for seed, name in enumerate(TINY_ENCODERS):
        folder = FIXTURES / name
        model = tiny_encoder(name, seed)
        model.save_pretrained(folder)
        (folder / "model.safetensors").chmod(0o644)
        if name == "tiny_bert_embedding":
            write_sentence_transformers_files(folder)
        tokens, token_mask = padded_rows(model, seed)
        golden = {key: value.astype(np.float32) for key, value in outputs(model.double(), tokens, token_mask).items()}
        np.savez_compressed(folder / "golden.npz", tokens=tokens.astype(np.int32), token_mask=token_mask, **golden)
