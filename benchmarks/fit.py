"""What every recipe takes on the devices that it is made for, by the TPU's compiler: the table in docs/fit.md.

python -m benchmarks.fit [--rows=WORDS] [--write]

It needs the extra `tpu` and no TPU. `--rows=gsm8k` compiles the rows in whose recipe or hardware these words stand. Each row is
printed as soon as it is compiled, and `--write` puts it into docs/fit.md in place of the same row there. All rows take
hours on four cores. Programs and memory are those of a dry run (tba_jax/experiment/compiling.py). Weights are not read: a row
names the preset that has the policy's shape. Tokenizer and data are those of configs/small_data, but every prompt is as long as
the recipe allows.

No compiler of GPUs runs without a GPU. A row of GPUs is compiled for as many chips of a TPU v5p, and held against 90 % of a GPU's
memory. What roles take that share a GPU is added up. Models with which a task scores are compiled from their configs, beside the
role that has them.
"""

import dataclasses
import functools
import importlib
import json
import re
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import app, flags, logging

from tba_jax.experiment import compiling, composition, meshes, topologies
from tba_jax.models.hugging_face.architectures import ARCHITECTURES
from tba_jax.models.presets import PRESETS
from tba_jax.run import layout
from tba_jax.schemas import flatten
from tba_jax.tasks.interface import EncodedQuery, Query

_ROWS = flags.DEFINE_string("rows", "", "Words that stand in the recipe or the hardware of a row.")
_WRITE = flags.DEFINE_bool("write", False, "Put the rows into docs/fit.md.")

PAGE = Path(__file__).parent.parent / "docs" / "fit.md"
_GIB = 1 << 30
_GPU_GIB = 72.0  # 90 % of 80 GB, as a share for the programs of a role
_CHIP, _HOST = "v5p:1x1x1", "v5p:2x2x1"
_ROBERTA_BASE = {
    "model_type": "roberta",
    "architectures": ["RobertaForSequenceClassification"],
    **dict(hidden_size=768, num_hidden_layers=12, num_attention_heads=12, intermediate_size=3072, vocab_size=50265),
    **dict(max_position_embeddings=514, type_vocab_size=1, pad_token_id=1, layer_norm_eps=1e-5, hidden_act="gelu"),
    "id2label": {"0": "nothate", "1": "hate"},
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """recipe: as after configs/ in --config; preset: of the policy; hardware: in words; topologies: role -> topology.

    limit: GiB of a device that programs may take; 0: what the compiler says. sharing: roles on the same devices.
    task_models: setting -> the preset that has the shape of this model of the task. settings: that the command line changes.
    """

    recipe: str
    preset: str
    hardware: str
    topologies: tuple[str, str, str]
    limit: float = _GPU_GIB
    sharing: tuple[str, ...] = ()
    task_models: tuple[tuple[str, str], ...] = ()
    settings: tuple[tuple[str, Any], ...] = ()

    @property
    def name(self) -> str:
        return f"{self.recipe} on {self.hardware}"


def _rows() -> Iterator[Row]:
    yield Row(recipe="demo", preset="", hardware="v5e, 3 chips", topologies=("v5e:1x1",) * 3, limit=0)
    alone, everywhere, searching = (_CHIP, _CHIP, _CHIP), compiling.ROLES, ("searcher", "evaluator")
    for size in ("2.8b", "1b", "410m"):
        shape: dict[str, Any] = {"preset": f"pythia-{size}", "task_models": (("task.tldr.reward_path", f"pythia-{size}"),)}
        # The evaluator of the largest has no room beside a searcher, so there are two searchers.
        hardware, sharing = ("4 × 80 GB, two searchers", ()) if size == "2.8b" else ("4 × 80 GB", searching)
        tldr = Row(recipe=f"tldr_pythia:{size}", hardware=hardware, topologies=alone, sharing=sharing, **shape)
        yield tldr
        yield dataclasses.replace(tldr, hardware="v5p, 4 chips", sharing=(), limit=0)
    node = Row(
        recipe="gsm8k_qwen2_5_1_5b:1x80gb", preset="qwen2.5-1.5b", hardware="1 × 80 GB", topologies=alone, sharing=everywhere
    )
    yield node
    node = dataclasses.replace(
        node, recipe="gsm8k_qwen2_5_1_5b", hardware="8 × 80 GB", sharing=(), topologies=(_HOST, _CHIP, _CHIP)
    )
    yield node
    yield dataclasses.replace(node, hardware="v5p, 4 + 3 + 1 chips", limit=0)
    rho = Row(recipe="gsm8k_rho1b", preset="rho-math-1b", hardware="4 × 80 GB", topologies=alone, sharing=searching)
    yield rho
    yield dataclasses.replace(rho, hardware="1 × 80 GB, one searcher", sharing=everywhere)
    yield dataclasses.replace(rho, hardware="v5p, 4 chips", sharing=(), limit=0)
    yield dataclasses.replace(rho, hardware="8 × 80 GB", topologies=(_HOST, _CHIP, _CHIP), sharing=())
    math = Row(recipe="math_qwen2_5_7b", preset="qwen2.5-7b", hardware="8 + 8 × 80 GB", topologies=("v5p:2x2x2", _HOST, _HOST))
    yield math
    yield dataclasses.replace(math, hardware="v5p, 8 + 4 + 4 chips", limit=0)
    hosts = dataclasses.replace(math, hardware="v5p, 64 + 4 + 4 chips, a trainer of 16 hosts", limit=0)
    wide = (("learner.mesh.fsdp", 64), ("learner.micro_batch_tokens", 262144))
    yield dataclasses.replace(hosts, topologies=("v5p:4x4x4", _HOST, _HOST), settings=wide)
    # The prompt of attacks has to fit task.prompt_length in bytes, too.
    shorter = (("task.red_team.attack_prompt", "Write:"),)
    models = {f"task.red_team.{name}_path": "llama-3.1-8b" for name in ("victim", "classifier")}
    merged = (*shorter, ("replay.merge_cosine_distance", 0.0))  # small recipes have no encoder of attacks
    shape = {"preset": "llama-3.2-1b", "settings": merged, "task_models": tuple(models.items())}
    llama = Row(recipe="red_team_llama3_2_1b", hardware="2 × 80 GB", topologies=alone, sharing=("trainer", "evaluator"), **shape)
    yield llama
    yield dataclasses.replace(llama, hardware="v5p, 3 chips", sharing=(), limit=0)
    models = {"task.red_team.victim_path": "gpt2", "task.red_team.classifier_path": "roberta-base"}
    shape = {"preset": "gpt2", "settings": shorter, "task_models": tuple(models.items())}
    gpt2 = Row(recipe="red_team_gpt2", hardware="2 × 80 GB", topologies=alone, sharing=searching, **shape)
    yield gpt2
    yield dataclasses.replace(gpt2, hardware="v5e, 3 chips", topologies=("v5e:1x1",) * 3, sharing=(), limit=0)


ROWS: tuple[Row, ...] = tuple(_rows())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Found:
    """gib: role -> peak of its worst program, beside the models of its task; worst: role -> that program; limit: GiB of a device;
    programs, seconds: how many were compiled, and the time that took; settings: in words."""

    row: Row
    gib: Mapping[str, float]
    worst: Mapping[str, str]
    meshes: Mapping[str, str]
    limit: float
    programs: int
    seconds: float
    settings: str

    @property
    def most(self) -> float:
        """GiB on the device that holds most."""
        shared = sum(self.gib[role] for role in self.row.sharing)
        return max([shared, *(size for role, size in self.gib.items() if role not in self.row.sharing)])

    def cells(self) -> list[str]:
        """The cells of the row in the table of docs/fit.md."""
        fits = "fits" if self.most <= self.limit else "**does not fit**"
        proxy = ", by proxy" if self.row.limit else ""
        sharing = ", shared" if self.row.sharing else ""
        roles = [f"{_told(self.gib[role])} ({self.meshes[role]}: {self.worst[role]})" for role in compiling.ROLES]
        most = f"{_told(self.most)} of {self.limit:.1f}, {self.most / self.limit:.0%}{sharing}"
        compiled = f"{self.programs} in {self.seconds:.0f} s"
        return [self.row.recipe, self.row.hardware, *roles, most, f"{fits}{proxy}", self.settings, compiled]


def _told(gib: float) -> str:
    return f"{gib:.1f}" if gib >= 1 else f"{gib:.3f}"


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


@functools.cache
def _compiled(row: Row, role: str, topology: str, folder: Path) -> tuple[compiling.RoleFit, float]:
    """A role of a row, and the seconds that its programs took to compile."""
    begin = time.monotonic()
    devices = topologies.devices(topology)
    experiment = experiment_of(row, folder)
    found = compiling.fit(experiment, layout.RunDir(folder / "run"), role=role, devices=devices, name=topology)
    return found, time.monotonic() - begin


def fit(row: Row, folder: Path) -> Found:
    """Compiles the programs of all roles of a row. Args: folder: for small files."""
    experiment = experiment_of(row, folder)
    # What only the verdict reads is no reason to compile again.
    same = dataclasses.replace(row, hardware="", limit=0, sharing=(), topologies=("", "", ""))
    found = {
        role: _compiled(same, role, topology, folder) for role, topology in zip(compiling.ROLES, row.topologies, strict=True)
    }
    mesh = {}
    for role in found:
        devices = topologies.devices(row.topologies[compiling.ROLES.index(role)])
        meshed = compiling.of_trainer(experiment, devices) if role == "trainer" else experiment
        sizes = zip(("data", "fsdp", "tensor"), meshes.shape(meshed, role=role, devices=len(devices)), strict=True)
        mesh[role] = " ".join(f"{axis}={size}" for axis, size in sizes if size > 1) or "1 device"
    limits = [each.limit for each, _ in found.values() if each.limit]
    c = experiment.config
    return Found(
        row=row,
        gib={role: each.worst.peak / _GIB for role, (each, _) in found.items()},
        worst={role: each.worst.name for role, (each, _) in found.items()},
        meshes=mesh,
        limit=row.limit or min(limits) / _GIB,
        programs=sum(len(each.fits) for each, _ in found.values()),
        seconds=sum(seconds for _, seconds in found.values()),
        settings=f"{c.learner.micro_batch_tokens:,}, {c.searchers.score_tokens:,}, {c.searchers.slots or 'batch'}",
    )


def row_of(text: str, row: Row) -> str:
    """The line of a page's table that is the row's, "" where there is none."""
    found = re.search(rf"^\| {re.escape(row.recipe)} \| {re.escape(row.hardware)} \|.*$", text, re.MULTILINE)
    return found[0] if found else ""


def write(found: Found) -> None:
    """Puts a row into docs/fit.md, in place of the same row or where it belongs by ROWS."""
    text, line = PAGE.read_text(), f"| {' | '.join(found.cells())} |"
    if old := row_of(text, found.row):
        text = text.replace(old, line)
    else:
        before = ROWS[: ROWS.index(found.row)]
        above = [each for row in before if (each := row_of(text, row))] or re.findall(r"^\| ---.*$", text, re.MULTILINE)
        text = text.replace(above[-1], f"{above[-1]}\n{line}")
    PAGE.write_text(text)


def main(argv: Sequence[str]) -> None:
    del argv
    logging.set_verbosity(logging.INFO)  # each program is told as it is compiled
    topologies.use_no_devices()
    with tempfile.TemporaryDirectory() as folder:
        for row in (row for row in ROWS if _ROWS.value in row.name):
            found = fit(row, Path(folder))
            print(" | ".join(found.cells()), flush=True)
            if _WRITE.value:
                write(found)


if __name__ == "__main__":
    app.run(main)
