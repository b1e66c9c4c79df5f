"""On-policy distillation of TinyStories-656K into a smaller policy: KL to the teacher before and after.

    python -m benchmarks.distill --workdir=runs/distill --data=DATA [--steps=300] [--seeds=2]

The student is the first of the teacher's two layers, which supervised training on stories makes a language model again. The run
is configs/distill.py. KL(student‖teacher) is the mean of Σ_t log π_student − log π_teacher over responses of the student to
held-out openings, which a run without learning makes as rows of its log. Finished parts are kept: the command resumes where it
was stopped.
"""

import dataclasses
import functools
import json
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
from absl import app, flags

from benchmarks import side_by_side, summary
from tba_jax import sharding
from tba_jax.models import decoder, parameters
from tba_jax.models.hugging_face import export, load
from tba_jax.models.policy import Policy
from tba_jax.replay.reader import LogReader
from tba_jax.storage import contract as contract_lib
from tba_jax.storage import layout
from tba_jax.text.tokenizers import HuggingFaceTokenizer

_WORKDIR = flags.DEFINE_string("workdir", None, "Folder for the results.", required=True)
# It holds models/TinyStories-656K and tinystories/tinystories_1000.json, a JSON list of texts.
_DATA = flags.DEFINE_string("data", None, "Folder of the model and the stories.", required=True)
_STEPS = flags.DEFINE_integer("steps", 300, "Updates of a run.", lower_bound=1)
_SEEDS = flags.DEFINE_integer("seeds", 2, "Students.", lower_bound=1)

RECIPE = "configs/distill.py"
OPENING_WORDS, HELDOUT = 10, 128
# Settings of a run that measures: the policy stays the same, so that all rows are of it.
_MEASURES = {
    "learner.learning_rate": 1e-12,
    "learner.warmup_steps": 0,
    "learner.steps": 4,
    "evaluation.enabled": False,
    "schedule.mode": "interleaved",
}


def make_data(root: Path, stories: Path) -> dict[str, Path]:
    """Openings of stories for runs, the last ones held out, and stories for supervised training."""
    texts = [story.split() for story in json.loads(stories.read_bytes())]
    prompts = [{"prompt": " ".join(words[:OPENING_WORDS])} for words in texts]
    told = [{"prompt": " ".join(words[:5]), "response": " " + " ".join(words[5:65])} for words in texts[:-HELDOUT]]
    files = {"train": prompts[:-HELDOUT], "heldout": prompts[-HELDOUT:], "stories": told}
    root.mkdir(parents=True, exist_ok=True)
    for name, rows in files.items():
        (root / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {name: root / f"{name}.jsonl" for name in files}


def make_student(folder: Path, teacher: Path, stories: Path, seed: int) -> Path:
    """A Hugging Face folder, trained on stories, unless it is there."""
    if (folder / "student").exists():
        return folder / "student"
    if not (folder / "pruned").exists():
        model = load.read_config(teacher, compute_dtype="float32", head="language_model")
        pruned = dataclasses.replace(model, layers=1, layer_pattern=model.layer_pattern[:1])
        mesh = sharding.make_mesh((1, 1, 1), setting="devices", devices=jax.devices()[:1])
        whole = parameters.flatten(load.load_params(teacher, model, Policy(model=model).model_shardings(mesh)))
        shapes = parameters.flatten(parameters.shapes(decoder.define(pruned).specs))
        params = parameters.unflatten({name: each[: shapes[name].shape[0]] for name, each in whole.items()})
        read, tokenizer = HuggingFaceTokenizer(teacher), functools.partial(export.copy_tokenizer, teacher)
        ids = {"eos_token_id": read.eos_id, "pad_token_id": read.pad_id}
        export.save(folder / "pruned", pruned, params, dtype="float32", token_ids=ids, more=[tokenizer])
    settings = {"model.path": folder / "pruned", "data.train": stories, "data.unfit": "skip", "training.epochs": 8, "seed": seed}
    settings |= {"data.prompt_length": 16, "data.response_length": 96, "training.learning_rate": 1e-3, "training.remat": "none"}
    words = ["tba_jax", "supervised", "--config=configs/supervised.py", f"--workdir={folder / 'supervised'}"]
    side_by_side.call([*words, f"--output={folder / 'student'}"], settings, folder / "supervised.out", cores=[0, 1])
    return folder / "student"


def kl(job: side_by_side.Job) -> tuple[float, float, float]:
    """KL(policy‖teacher) of the rows of a run, nats per response with its standard error, and nats per token."""
    run = layout.open_run_dir(job.workdir)
    contract = contract_lib.of(contract_lib.read_run(run), called=str(job.workdir))
    reader = LogReader(run.replay, contract.row_shape())
    ((writer, head),) = reader.heads().items()
    rows = reader.read(writer, 0, head)
    each = (rows["policy_logprobs"] - rows["ref_logprobs"]).sum(axis=1)
    # Responses to one opening are alike, so openings are the units; each has as many responses.
    of_query = np.array([each[rows["query_id"] == query].mean() for query in np.unique(rows["query_id"])])
    error = float(of_query.std(ddof=1) / len(of_query) ** 0.5)
    return float(each.mean()), error, float(each.sum() / rows["response_length"].sum())


def main(argv: Sequence[str]) -> None:
    del argv
    data, root = Path(_DATA.value).absolute(), Path(_WORKDIR.value).absolute()
    teacher, stories = data / "models" / "TinyStories-656K", data / "tinystories" / "tinystories_1000.json"
    if missing := [str(path) for path in (teacher, stories) if not path.exists()]:
        raise app.UsageError(f"--data={_DATA.value} lacks {', '.join(missing)}")
    files = make_data(root / "data", stories)

    def job(name: str, policy: Path, prompts: str, **settings: object) -> side_by_side.Job:
        paths = {"model.path": policy, "learner.reference.path": teacher, "task.prompts.heldout_path": files["heldout"]}
        paths |= {"task.prompts.train_path": files[prompts]}
        return side_by_side.Job(root=root, name=name, recipe=RECIPE, settings={**paths, **settings})

    summary.table("student", "parameters", "", "KL(student‖teacher), nats per response", "nats per token")
    for seed in range(_SEEDS.value):
        folder = root / f"student{seed}"
        folder.mkdir(exist_ok=True)
        student = make_student(folder, teacher, files["stories"], seed)
        run = job(f"student{seed}/run", student, "train", seed=seed, **{"learner.steps": _STEPS.value})
        side_by_side.run_all([run])
        if not (folder / "distilled").exists():
            words = ["tba_jax", "export", f"--workdir={run.workdir}", "--step=last", f"--output={folder / 'distilled'}"]
            side_by_side.call(words, {}, folder / "export.out", cores=[0, 1])
        for when, policy in {"before": student, "after": folder / "distilled"}.items():
            measure = job(f"student{seed}/{when}", policy, "heldout", seed=seed, **_MEASURES)
            side_by_side.run_all([measure])
            mean, error, per_token = kl(measure)
            model = load.read_config(policy, compute_dtype="float32", head="language_model")
            count = sum(np.prod(spec.shape) for spec in jax.tree.leaves(decoder.define(model).specs))
            summary.row(f"{seed}", f"{count:,}", when, f"{mean:.2f} ± {error:.2f}", f"{per_token:.3f}")


if __name__ == "__main__":
    app.run(main)
