"""The model card of an exported snapshot: README.md, as the hub reads it, with the run's results and the origin of the weights.

Names and texts that others wrote are code or plain text on the page.
"""

import contextlib
import dataclasses
import re
import shlex
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import huggingface_hub
import jinja2

from tba_jax.outputs import visible_line
from tba_jax.replay import journal
from tba_jax.reporting.gathering import is_number
from tba_jax.roles import results
from tba_jax.roles.results import STDERR, with_stderr
from tba_jax.schemas import flatten
from tba_jax.storage import layout
from tba_jax.telemetry import metrics, status
from tba_jax.telemetry.metrics import without_secrets

CARD = "README.md"
# A folder of the hub's cache, which names the model and the commit.
_OF_HUB = re.compile(r"models--([\w.-]+)/snapshots/([0-9a-f]{7,64})$")
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_LICENCE = re.compile(r"^(license|license_name|license_link):[ \t]*['\"]?(\S[^'\"\n]{0,199}?)['\"]?[ \t]*$", re.MULTILINE)
_LICENCE_NAME = re.compile(r"[\w.+-]{1,96}")
# Figures of reports that have titles; others go by their names.
_TITLES = {
    "greedy_reward": "reward of greedy responses",
    "sampled_reward": "reward of samples",
    "finished": "greedy responses that end by themselves",
    "ref_nll_per_token": "−log π_ref of samples, nats per token",
    "kl_to_initial": "KL to π_ref, nats per response",
    "greedy_ref_perplexity_per_response_token": "perplexity of greedy responses under π_ref, per token of the response",
    "sampled_ref_perplexity_per_response_token": "perplexity of samples under π_ref, per token of the response",
    "greedy_ref_perplexity_paper": "perplexity of greedy responses under π_ref at T = 1, per token of prompt and response",
    "sampled_ref_perplexity_paper": "perplexity of samples under π_ref at T = 1, per token of prompt and response",
}
_TRAJECTORY_BALANCE = ("trajectory_balance", "learned_log_z", "frozen_log_z", "f_trajectory_balance", "gflowrl", "tba_prime")
_NOT_SHOWN = ("step", "time", "queries", "seconds", "unscored")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Base:
    """The checkpoint that a run began with. path: model.path, "" for random weights; hub_id, revision: "" where unknown; licence:
    what the front matter of its card says, by key."""

    path: str = ""
    hub_id: str = ""
    revision: str = ""
    licence: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Exported:
    """An export. name: its folder's name; step: the trainer's; dtype: of the weights; adapter: it holds the adapters alone."""

    name: str
    step: int
    dtype: str
    adapter: bool


def base_of(path: str, source: Path | None) -> Base:
    """Args: path: model.path; source: the local folder of that checkpoint, None where there is none."""
    if source is None:
        return Base()
    cached = _OF_HUB.search(source.absolute().as_posix())
    named = path if _HUB_ID.fullmatch(path) and not Path(path).is_dir() else ""
    hub_id = named or (cached[1].replace("--", "/", 1) if cached else "")
    return Base(path=path, hub_id=hub_id, revision=cached[2] if cached else "", licence=_licence(source / CARD))


def _licence(card: Path) -> dict[str, str]:
    """license, license_name and license_link of a card's front matter; {} where it names none."""
    with contextlib.suppress(OSError):
        front = re.match(r"---\n(.*?)\n---", card.read_text(encoding="utf-8-sig", errors="replace"), re.DOTALL)
        found = dict(_LICENCE.findall(front[1])) if front else {}
        names = {name: value for name, value in found.items() if name == "license_link" or _LICENCE_NAME.fullmatch(value)}
        return {name: visible_line(value) for name, value in names.items()} if "license" in names else {}
    return {}


def text(run: layout.RunDir, config: Any, *, base: Base, exported: Exported) -> str:
    """The card. Args: config: of the run."""
    c = flatten(without_secrets(config.to_dict()))
    balance, stored = c["learner.objective"] in _TRAJECTORY_BALANCE, layout.read_json(run.config)
    reports = {each: report for each in dict.fromkeys((0, exported.step)) if (report := _report(run, each))}
    asked = dict[str, Any](undefined=jinja2.StrictUndefined, trim_blocks=True, keep_trailing_newline=True)
    environment = jinja2.Environment(loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"), **asked)
    # Markdown: the filters make text that is no markup.
    environment.filters |= {"plain": _plain, "code": _code, "quoted": _quoted, "shell": _shell}
    content: dict[str, Any] = dict(
        c=c, base=base, exported=exported, balance=balance, reports=reports, run_id=stored.get("id", ""),
        init_from=stored.get("init_from"), today=time.strftime("%Y-%m-%d", time.gmtime()), start=base.hub_id or base.path,
        front_matter=_front_matter(balance, base, exported), scores=_scores(reports, exported.step), versions=_versions(run),
        told_of_scores=[*_told_of_scores(run, reports, exported.step)], rows_trained=_rows_trained(run, exported.step),
        schedule=_schedule(run, c, exported.step),
        most_rank=1 << max(3, (c["lora.rank"] - 1).bit_length()),  # vLLM takes powers of two
    )  # fmt: skip
    return environment.get_template("model_card.md").render(content)


def _front_matter(balance: bool, base: Base, exported: Exported) -> str:
    tags = ["tba_jax", *balance * ["trajectory-balance"], "reinforcement-learning", *exported.adapter * ["lora"]]
    data: dict[str, Any] = dict(library_name="peft" if exported.adapter else "transformers", tags=tags, **base.licence)
    if base.hub_id:  # the hub refuses what is no id of a model there
        data |= dict(base_model=base.hub_id, base_model_relation="adapter" if exported.adapter else "finetune")
    return huggingface_hub.ModelCardData(pipeline_tag="text-generation", **data).to_yaml()


def _scores(reports: Mapping[int, Mapping[str, Any]], step: int) -> str:
    """The table of step 0 and `step`. Args: reports: of those that have been evaluated, by step."""
    newest = reports[max(reports)] if reports else {}
    score_name = str(newest.get("score_name", "score"))
    ordered = dict.fromkeys((*_TITLES, *newest))
    hidden = {*_NOT_SHOWN, score_name, *(name + STDERR for name in ordered)}
    titles = _TITLES | {"greedy_reward": f"{score_name} ({_TITLES['greedy_reward']})"}
    names = [name for name in ordered if name not in hidden and is_number(newest.get(name))]
    head = ["", *(f"step {each}{' (this model)' if each == step else ''}" for each in reports)]
    rows = [[_plain(titles.get(name, name)), *(with_stderr(report, name) for report in reports.values())] for name in names]
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, ["---", *["---:"] * len(reports)], *rows))


def _told_of_scores(run: layout.RunDir, reports: Mapping[int, Mapping[str, Any]], step: int) -> Iterator[str]:
    """Sentences about how far the scores are to be trusted."""
    if reports and is_number(queries := reports[max(reports)].get("queries")):
        yield f"Means over {queries} held-out queries of the task."
    if step not in reports:
        yield f"Step {step} has not been evaluated."
    scores = results.Scores(run.evaluations)()
    best = results.best(scores.items())
    if best is not None and best.step != step:
        yield f"The best of {len(scores)} evaluated steps is step {best.step}, with {best.score:.3f}."
    elif best is not None and len(scores) > 1:
        yield f"This is the best of {len(scores)} evaluated steps."
        yield "The same queries have chosen it, so expect a little less on other queries."


def _report(run: layout.RunDir, step: int) -> Mapping[str, Any]:
    """The evaluator's report of a step, {} where there is none that can be read."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        return dict(layout.read_json(run.evaluations / f"{layout.step_name(step)}.json"))
    return {}


def _schedule(run: layout.RunDir, c: Mapping[str, Any], step: int) -> str:
    if c["schedule.mode"] == "interleaved":
        updates = f"updates after each batch of the searcher: {c['schedule.updates_per_search']}"
        return f"search and training in turn, fresh rows of the policy of {c['schedule.lag']} steps ago, {updates}"
    told = f"asynchronous, searchers: {c['searchers.count']}, steps between snapshots: {c['publish.every_steps']}"
    lines = (line for line in metrics.each_line(run.metrics("trainer")) if is_number(line.get("step")) and line["step"] <= step)
    ages = [age for line in lines if is_number(age := line.get("staleness_mean"))]
    return f"{told}; rows were {sum(ages) / len(ages):.1f} steps old on average" if ages else told


def _rows_trained(run: layout.RunDir, step: int) -> str:
    """How many rows the updates up to a step were made of, by the trainer's journal."""
    count, last = 0, 0
    try:
        for line in journal.read_lineage(run.journal):
            if line["step"] > step:
                break
            count, last = count + len(line["rows"]), line["step"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return "not known: the journal cannot be read"
    return f"{count:,}" if last == step else "not known: this workdir does not hold the trainer's journal"


def _versions(run: layout.RunDir) -> str:
    """The versions that the trainer's newest process told, or else those of this process."""
    newest = status.read(run.metrics("trainer")).process or status.beginning(())
    try:
        version, commit = newest["code"]["version"], newest["code"]["commit"]
        own = f"tba_jax {version}" + (f" (commit {commit[:12]})" if commit else "")
        return _plain(", ".join([own, *(f"{name} {there}" for name, there in newest["versions"].items())]))
    except (KeyError, TypeError, AttributeError):
        return "not known: the trainer's status cannot be read"


def _plain(text: str) -> str:
    """Text that is no markup."""
    return re.sub(r"([\\`*_{}\[\]<>|#&$~])", r"\\\1", visible_line(text))


def _code(value: Any) -> str:
    """A value as code, in a cell of a table too."""
    shown = visible_line(str(value)).replace("`", "'").replace("|", "\\|")
    return f"`{shown}`" if shown.strip() else "–"


def _quoted(text: str) -> str:
    """Inside of quotes, in a block of code."""
    return visible_line(text).replace("\\", "\\\\").replace('"', '\\"').replace("```", "'''")


def _shell(text: str) -> str:
    return shlex.quote(visible_line(text).replace("```", "'''"))
