"""What every recipe takes on the devices that it is made for, by the TPU's compiler: the table in docs/fit.md.

python -m benchmarks.fit [--rows=WORDS] [--write]

It needs the extra `tpu` and no TPU. `--rows=gsm8k` compiles the rows in whose recipe or topology these words stand. Each row is
printed as soon as it is compiled, and `--write` puts it into docs/fit.md in place of the same row there. All rows take
hours on four cores. Programs, memory and limits are those of `--dry_run --topology=…` (tba_jax/experiment/dry_run.py). Weights
are not read: a row names the preset that has the policy's shape. Tokenizer and data are those of configs/small_data, but every
prompt is as long as the recipe allows. Models with which a task scores are compiled from their configs, beside the role that has
them.
"""

import dataclasses
import functools
import importlib
import json
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import app, flags, logging

from tba_jax.experiment import composition, dry_run, topologies
from tba_jax.models.config import PRESETS
from tba_jax.models.hugging_face.architectures import ARCHITECTURES
from tba_jax.schemas import flatten
from tba_jax.storage import layout
from tba_jax.tasks.interface import EncodedQuery, Query

_ROWS = flags.DEFINE_string("rows", "", "Words that stand in the recipe or the topology of a row.")
_WRITE = flags.DEFINE_bool("write", False, "Put the rows into docs/fit.md.")

PAGE = Path(__file__).parent.parent / "docs" / "fit.md"
_ROBERTA_BASE = {
    "model_type": "roberta",
    "architectures": ["RobertaForSequenceClassification"],
    **dict(hidden_size=768, num_hidden_layers=12, num_attention_heads=12, intermediate_size=3072, vocab_size=50265),
    **dict(max_position_embeddings=514, type_vocab_size=1, pad_token_id=1, layer_norm_eps=1e-5, hidden_act="gelu"),
    "id2label": {"0": "nothate", "1": "hate"},
}


@dataclasses.dataclass(frozen=True)
class Row:
    """recipe: as after configs/ in --config; topology: as after --topology; preset: of the policy; task_models: setting -> the
    preset that has the shape of this model of the task; settings: that the command line changes; with_model: the model's name
    in the table, where it is not the recipe's."""

    recipe: str
    topology: str
    preset: str = ""
    task_models: tuple[tuple[str, str], ...] = ()
    settings: tuple[tuple[str, Any], ...] = ()
    with_model: str = ""

    @property
    def name(self) -> str:
        return f"{self.recipe}, {self.with_model}" if self.with_model else self.recipe


_ONE_SEARCHER = (("searchers.count", 1),)
_WIDE = (("learner.mesh.fsdp", 64), ("learner.micro_batch_tokens", 262144))
_OVER_16 = (("learner.mesh.fsdp", 16),)
_ALL_OVER_16 = tuple((f"{role}.mesh.{axis}", 4) for role in ("searchers", "evaluation") for axis in ("fsdp", "tensor"))
_ADAPTERS = (("lora.rank", 32), ("searchers.weights", "int8"), *_OVER_16, *_ALL_OVER_16)
# The prompt of attacks has to fit task.prompt_length in bytes, too; small recipes have no encoder of attacks.
_SHORTER = (("task.red_team.attack_prompt", "Write:"),)
_LLAMA = tuple((f"task.red_team.{name}_path", "llama-3.1-8b") for name in ("victim", "classifier"))
_GPT2 = (("task.red_team.victim_path", "gpt2"), ("task.red_team.classifier_path", "roberta-base"))

ROWS: tuple[Row, ...] = (
    Row("demo", "v5e:1x1"),
    *(
        Row(f"tldr_pythia:{size}", topology, f"pythia-{size}", (("task.tldr.reward_path", f"pythia-{size}"),))
        for size in ("2.8b", "1b", "410m")
        for topology in ("A100x4", "v5p:1x1x1")
    ),
    Row("gsm8k_qwen2_5_1_5b:1x80gb", "A100x1", "qwen2.5-1.5b"),
    Row("gsm8k_qwen2_5_1_5b:8x80gb", "A100x8", "qwen2.5-1.5b"),
    Row("gsm8k_qwen2_5_1_5b:8x80gb", "trainer=v5p:2x2x1,v5p:1x1x1", "qwen2.5-1.5b"),
    Row("gsm8k_rho1b", "A100x4", "rho-math-1b"),
    Row("gsm8k_rho1b", "A100x1", "rho-math-1b", settings=_ONE_SEARCHER),
    Row("gsm8k_rho1b", "v5p:1x1x1", "rho-math-1b"),
    Row("gsm8k_rho1b", "A100x8", "rho-math-1b"),
    Row("math_qwen2_5_7b", "trainer=A100x8,searcher=A100x4,evaluator=A100x4", "qwen2.5-7b"),
    Row("math_qwen2_5_7b", "trainer=v5p:2x2x2,v5p:2x2x1", "qwen2.5-7b"),
    Row("math_qwen2_5_7b", "trainer=v5p:4x4x4,v5p:2x2x1", "qwen2.5-7b", settings=_WIDE),
    Row("math_qwen2_5_7b", "trainer=v5p:2x2x4,v5p:2x2x1", "qwen3-30b-a3b", settings=_OVER_16, with_model="Qwen3-30B-A3B"),
    Row("math_qwen2_5_7b", "v6e:4x4", "qwen3-30b-a3b", settings=_ADAPTERS, with_model="adapters of Qwen3-30B-A3B"),
    *(
        Row("red_team_llama3_2_1b", topology, "llama-3.2-1b", _LLAMA, (*_SHORTER, ("replay.merge_cosine_distance", 0.0)))
        for topology in ("A100x3", "v5p:1x1x1")
    ),
    Row("red_team_gpt2", "A100x2", "gpt2", _GPT2, _SHORTER),
    Row("red_team_gpt2", "v5e:1x1", "gpt2", _GPT2, _SHORTER),
)


@functools.cache
def experiment_of(row: Row, folder: Path) -> composition.Experiment:
    """What the recipe of a row means, with prompts of the full length. Args: folder: for configs of the task's models."""
    name, _, variant = row.recipe.partition(":")
    recipe = importlib.import_module(f"configs.{name}")
    config, small = recipe.get_config(*([variant] if variant else [])), recipe.get_config("small")
    paths = {name: value for name, value in flatten(small.to_dict()).items() if name.endswith("_path") or name == "model.path"}
    models = {setting: str(_folder_of(preset, folder)) for setting, preset in row.task_models}
    absent = dict.fromkeys((name for name in paths if "gold" in name), "")
    config.update_from_flattened_dict(paths | models | absent | {"model.preset": row.preset} | dict(row.settings))
    experiment = composition.build(config, reward_models={}, weights=False)
    # As long as the recipe allows, whatever the rows of the data set are.
    prompt = EncodedQuery(query=Query(prompt="longest", answer=""), prompt=(5,) * config.task.prompt_length)
    queries: Any = dict.fromkeys(experiment.queries, [prompt] * max(config.learner.queries, config.evaluation.batch_size))
    # The model's own tokenizer has a token for nearly every row of its embedding.
    banned = tuple(token for token in experiment.contract.banned_tokens if token < experiment.tokenizer.vocab_size)
    contract = dataclasses.replace(experiment.contract, banned_tokens=banned)
    return dataclasses.replace(experiment, contract=contract, queries=queries)


def _folder_of(preset: str, folder: Path) -> Path:
    """A folder with the config of a published model, and no weights."""
    made = folder / preset
    if preset == "roberta-base":
        values: dict[str, Any] = _ROBERTA_BASE
    else:
        model = PRESETS[preset]
        if preset.startswith("pythia"):
            model = dataclasses.replace(model, head="score", labels=1)
        architecture = ARCHITECTURES[model.architecture]
        classes = [name for name, head in architecture.heads.items() if head == model.head]
        values = architecture.write(model) | {"architectures": classes[:1], "num_labels": model.labels}
    made.mkdir(parents=True, exist_ok=True)
    (made / "config.json").write_text(json.dumps(values))
    return made


def fit(row: Row, folder: Path) -> dict[str, dry_run.RoleFit]:
    """Role -> the figures of its programs. Args: folder: for small files."""
    experiment = experiment_of(row, folder)
    asked = topologies.parse(row.topology.split(","))
    devices = topologies.of_roles(experiment, asked, *dry_run.ROLES)
    return {role: dry_run.fit(experiment, layout.RunDir(folder / "run"), role=role, on=on) for role, on in devices.items()}


def cells(row: Row, found: Mapping[str, dry_run.RoleFit]) -> list[str]:
    """The cells of a row in the table of docs/fit.md: GiB of a device that each role takes and may take, and the rest."""
    roles, fits = [], True
    for each in found.values():
        limit = (each.devices.limit or 0) / (1 << 30)
        gib, mesh = each.worst.peak / (1 << 30), each.mesh.rpartition(".mesh ")[2].split(" × ")
        split = " ".join(axis for axis in mesh if not axis.endswith("=1")) or "1 device"
        roles.append(f"{f'{gib:.1f}' if gib >= 1 else f'{gib:.3f}'} of {limit:.1f} ({split}: {each.worst.name})")
        fits &= gib <= limit
    proxy = ", by TPU proxy" if any(topologies.BY_PROXY in each.devices.where for each in found.values()) else ""
    programs = [fit for each in found.values() for fit in each.fits]
    compiled = f"{len(programs)} in {sum(fit.seconds for fit in programs):.0f} s"
    return [row.name, f"`{row.topology}`", *roles, f"{'fits' if fits else '**does not fit**'}{proxy}", compiled]


def row_of(text: str, row: Row) -> str:
    """The line of a page's table that is the row's, "" where there is none."""
    found = re.search(rf"^\| {re.escape(row.name)} \| `{re.escape(row.topology)}` \|.*$", text, re.MULTILINE)
    return found[0] if found else ""


def write(row: Row, made: Sequence[str]) -> None:
    """Puts the cells of a row into docs/fit.md, in place of the same row or where it belongs by ROWS."""
    text, line = PAGE.read_text(), f"| {' | '.join(made)} |"
    if old := row_of(text, row):
        text = text.replace(old, line)
    else:
        above = [each for before in ROWS[: ROWS.index(row)] if (each := row_of(text, before))]
        above = above or re.findall(r"^\| ---.*$", text, re.MULTILINE)
        text = text.replace(above[-1], f"{above[-1]}\n{line}")
    PAGE.write_text(text)


def main(argv: Sequence[str]) -> None:
    del argv
    logging.set_verbosity(logging.INFO)  # each program is told as it is compiled
    topologies.use_no_devices()
    with tempfile.TemporaryDirectory() as folder:
        for row in (row for row in ROWS if _ROWS.value in f"{row.name} on {row.topology}"):
            made = cells(row, fit(row, Path(folder)))
            print(" | ".join(made), flush=True)
            if _WRITE.value:
                write(row, made)


if __name__ == "__main__":
    app.run(main)
