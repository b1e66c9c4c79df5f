"""The page of a run: self-contained, obeying nothing that stands in the run, and telling what damage has left."""

import html
import json
import re
import shutil

import numpy as np
import pytest

from tba_jax.experiment import composition
from tba_jax.replay.log import LogWriter
from tba_jax.reporting import gathering, report
from tba_jax.reporting import rows as rows_lib
from tba_jax.run import contract, layout
from tba_jax.telemetry.alarms import Alarms
from tests.support import browser, frozen_runs, hostile_runs, tiny_run


def made(run) -> tuple[gathering.Gathered, str]:
    found = gathering.gather(run.root)
    return found, report.page(found)


def markup(page: str) -> str:
    """The page without the two scripts of the project."""
    return re.sub(r"<script>.*?</script>", "", page, flags=re.DOTALL)


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    return hostile_runs.make(tmp_path_factory.mktemp("hostile") / "run")


def test_nothing_of_a_run_becomes_markup(hostile):
    found, page = made(hostile)
    assert found.problems == []
    text = markup(page)
    assert {tag.lower() for tag in re.findall(r"<([a-zA-Z]+)", text)} <= {
        *(
            "html",
            "head",
            "meta",
            "title",
            "style",
            "body",
            "header",
            "div",
            "span",
            "p",
            "b",
            "a",
            "nav",
            "main",
            "section",
            "h",
        ),
        *("label", "input", "ul", "li", "table", "tr", "th", "td", "code", "details", "summary", "article", "footer", "script"),
    }
    assert text.count("<script") == 1 and text.count("</style>") == 1 and text.count("</script>") == 1
    assert 'href="javascript' not in text
    for string in (hostile_runs.STRINGS[0], hostile_runs.STRINGS[2]):
        assert html.escape(string).replace("&quot;", "&#34;").replace("&#x27;", "&#39;") in text
    assert "49{% raw %}" not in text and "{{7*7}}" in text
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", text)


def test_labels_of_charts_are_escaped(hostile):
    _, page = made(hostile)
    data = json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1])
    texts = []

    def collect(value):
        if isinstance(value, str):
            texts.append(value)
        for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            collect(each)

    collect(data)
    tags = {tag for text in texts for tag in re.findall(r"<(/?\w+)", text)}
    assert tags <= {"br", "extra", "/extra"}, tags


def test_nothing_is_executed_or_fetched_in_a_browser(hostile, tmp_path):
    page = tmp_path / "report.html"
    page.write_text(made(hostile)[1], encoding="utf-8")
    with browser.chromium() as driver:
        driver.get(page.as_uri())
        charts = driver.execute_script("return document.querySelectorAll('.main-svg').length")
        for name in ("time", "step"):
            driver.find_element("css selector", f"input[name=axis][value={name}]").click()
            driver.find_element("css selector", f"input[name=colour][value={'step' if name == 'time' else 'ratio'}]").click()
        assert charts > 5
        assert driver.execute_script("return window.owned") is None
        assert driver.execute_script("return document.images.length") == 0
        assert driver.execute_script("return document.scripts.length") == 3
        assert driver.execute_script("return document.querySelectorAll('a[href^=javascript], svg[onload]').length") == 0
        assert browser.requested(driver) == [page.as_uri()]
        assert browser.complaints(driver) == []


def test_the_policy_of_the_page_stops_what_escaping_would_let_through(hostile, tmp_path):
    page = tmp_path / "report.html"
    injected = "<script>window.owned=1</script><img src='http://127.0.0.1:9/x' onerror='window.owned=2'>"
    page.write_text(made(hostile)[1].replace('<h2 id="learning">', injected + '<h2 id="learning">'), encoding="utf-8")
    with browser.chromium() as driver:
        driver.get(page.as_uri())
        assert driver.execute_script("return window.owned") is None
        assert any("Content Security Policy" in told for told in browser.complaints(driver))


def test_the_top_names_the_worst_rows_and_the_steps_that_drew_them(hostile):
    _, page = made(hostile)
    top = markup(page).partition('<h2 id="learning">')[0]
    rows = re.findall(r'href="#row-\d-worst">(w0:\d+)</a></p>\s*<p class="told">(.*?)</p>', top)
    assert rows == [("w0:0", "trained at steps 1, 2"), ("w0:1", "trained at steps 1, 2"), ("w0:2", "trained at step 1")]


def test_steps_of_a_mounted_run_are_not_taken_for_those_of_the_run(tmp_path):
    other, run = hostile_runs.make(tmp_path / "other"), hostile_runs.make(tmp_path / "run")
    shape = contract.of(contract.read_run(other), called="the test").row_shape()
    rows = {name: np.zeros((4, *size), dtype) for name, (dtype, size) in shape.columns().items()}
    rows["row"], rows["prompt_length"], rows["response_length"] = np.arange(4), *np.ones((2, 4), np.int32)
    rows["policy_step"][:, 0], rows["policy_step"][:, 1:] = 7_000, -1
    LogWriter(other.replay, "w9", shape, rows_per_append=4, segment_appends=4, info={"started": 1_000.0}).append(rows)
    shutil.rmtree(other.replay / "w0")
    (other.replay / "writers" / "w0.json").unlink()
    stored = layout.read_json(run.config)
    stored["config"]["replay"]["mount"] = [str(other.root)]
    layout.write_json(run.config, stored)
    found, page = made(run)
    assert found.problems == [] and "20 rows can be read" in page and "<td>w9</td>" in page
    assert "as of step 20." in page and "Rows of mounted runs are left out" in page
    figures = json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1])["figures"].values()
    ages, steps = (
        next(each["traces"][0] for each in figures if title in str(each["layout"].get("xaxis")))
        for title in ("age of the weights", "step of the policy that sampled")
    )
    assert sum(ages["y"]) == 16 and max(ages["x"]) <= 20 and max(steps["x"]) <= 2
    newest = page.partition('<h3 id="newest">')[2]
    assert re.search(r"<b>(\w+):", newest)[1] == "w0"


@pytest.mark.filterwarnings("error")
def test_rows_that_no_trainer_takes_do_not_hide_the_others(tmp_path):
    run = hostile_runs.make(tmp_path / "run")
    shape = contract.of(contract.read_run(run), called="the test").row_shape()
    rows = {name: np.zeros((4, *size), dtype) for name, (dtype, size) in shape.columns().items()}
    rows["row"], rows["reward"] = np.arange(4), np.array([np.nan, np.inf, -np.inf, -1e30], np.float32)
    rows["prompt_length"], rows["response_length"] = np.array([[-5, 10_000, 0, 3], [10_000, -7, 0, 3]], np.int32)
    rows["tokens"][:] = [[-1], [10**6], [0], [99_999]]
    rows["policy_logprobs"][:] = np.nan
    LogWriter(run.replay, "odd", shape, rows_per_append=4, segment_appends=4, info={"started": 1e300}).append(rows)
    found, page = made(run)
    assert found.problems == [] and "odd:2</a>" in page and "<b>w0:15</b>" in page


@pytest.mark.parametrize("value", [1e300, -1e300, 10**400, "text", None, [1], {"a": 1}, True])
def test_numbers_that_cannot_be_end_no_report(hostile, tmp_path, value):
    run = type(hostile)(tmp_path / "run")
    shutil.copytree(hostile.root, run.root)
    for name in ("metrics.jsonl", "status.json", "alarms.jsonl"):
        path = run.metrics("trainer") / name
        first = json.loads(path.read_text().splitlines()[0])
        changed = [json.dumps(first | {key: value}) for key in first]
        path.write_text("\n".join([*changed, path.read_text()]) if name.endswith("l") else changed[0])
    (run.root / "finished.json").write_text(json.dumps({"step": value, "ledger": value, "balanced": value}))
    run.evaluations.mkdir()
    (run.root / "evaluations" / "00000001.json").write_text(json.dumps({"greedy_reward": value, "queries": value}))
    _, page = made(run)
    assert "w0:0</a>" in page


@pytest.mark.parametrize("part", ["config", "contract"])
@pytest.mark.parametrize("value", [None, [], "text"])
def test_a_config_that_holds_no_settings_is_one_sentence(hostile, tmp_path, part, value):
    stored = layout.read_json(hostile.config)
    (tmp_path / "config.json").write_text(json.dumps(stored | {part: value}))
    with pytest.raises(ValueError, match=r"config\.json is damaged"):
        gathering.gather(tmp_path)


def test_odd_changes_of_settings_end_no_report(hostile, tmp_path):
    run = type(hostile)(tmp_path / "run")
    shutil.copytree(hostile.root, run.root)
    run.config.write_text(json.dumps(layout.read_json(run.config) | {"changes": 5, "id": [1], "init_from": {"a": 1}}))
    assert "w0:0</a>" in made(run)[1]


@pytest.mark.parametrize(
    ("file", "named"),
    [
        ("finished.json", "finished.json"),
        ("evaluations/00000003.json", "the evaluation of step 3"),
        ("metrics/trainer/metrics.jsonl", "metrics.jsonl are left out: 1"),
        ("metrics/trainer/status.json", "status of trainer"),
        ("journal/epoch-000001.jsonl", "epoch-000001.jsonl line 1"),
        ("replay/writers/w1.json", "w1"),
        ("replay/w0/000000/manifest.ocdbt", "w0"),
    ],
)
def test_damage_is_named_and_the_rest_is_shown(hostile, tmp_path, file, named):
    run = type(hostile)(tmp_path / "run")
    shutil.copytree(hostile.root, run.root)
    path = run.root / file
    path.parent.mkdir(exist_ok=True)
    if file.endswith("metrics.jsonl"):
        path.write_text(path.read_text() + '{"step": 21, "ti\n')
    elif file.endswith("epoch-000001.jsonl"):
        path.write_text("[]\n" + path.read_text())
    else:
        path.write_bytes(b"[1, {}")
    found, page = made(run)
    assert any(named in told for told in found.problems), found.problems
    assert "What could not be read" in page and html.escape(found.problems[0])[:30] in page
    assert 'id="settings"' in page or "Settings that differ" in page
    if "w0" not in named:
        assert "w0:0</a>" in page


def test_of_very_many_roles_all_alarms_are_told_and_searchers_are_left_out_first(tmp_path):
    run = hostile_runs.make(tmp_path / "run")
    for name in (*(f"searcher-{i}" for i in range(40)), "evaluator", "trainer-process-1"):
        run.metrics(name).mkdir()
        (run.metrics(name) / "metrics.jsonl").write_text('{"step": 1, "time": 1001.0, "time_evaluate": 1.0}\n')
    for name in ("evaluator", "searcher-9"):
        Alarms(run.metrics(name)).tell(kind="evaluation_fails", sentence=f"{name} is sad", advice="look", step=1)
    found, page = made(run)
    assert {"trainer", "evaluator", "trainer-process-1"} <= set(found.roles) and len(found.roles) == gathering.MOST_ROLES
    assert "evaluator is sad." in page and "searcher-9 is sad." in page and "20 more roles are left out" in page


def test_a_reading_that_takes_long_says_how_far_it_is_and_ends(hostile, monkeypatch):
    told = []
    monkeypatch.setattr(rows_lib, "_BLOCK_BYTES", 1)
    monkeypatch.setattr(gathering, "TELL_SECONDS", 0.0)
    assert gathering.gather(hostile.root, tell=told.append).problems == []
    assert told[0] == "read 4 of 16 rows" and len(told) == 3
    monkeypatch.setattr(gathering, "READ_SECONDS", 0.0)
    assert any("the newest 4 of 16 rows are read" in each for each in gathering.gather(hostile.root).problems)


def test_a_run_that_has_just_begun_has_a_page(tmp_path):
    run, config = layout.RunDir(tmp_path / "run"), tiny_run.config()
    contract.join(run, config, composition.build(config).contract)
    found, page = made(run)
    assert found.problems == [] and "Too early to say" in page and "No role has written anything yet" in page


def test_the_run_is_only_read(hostile):
    before = {path: path.stat().st_mtime_ns for path in hostile.root.rglob("*")}
    made(hostile)
    assert {path: path.stat().st_mtime_ns for path in hostile.root.rglob("*")} == before


@pytest.mark.usefixtures("one_device")
def test_a_whole_run_is_reported_whole(tmp_path):
    run = layout.RunDir(tmp_path / "run")
    frozen_runs.run(run.root, metrics__every_steps=1)
    found, page = made(run)
    text = html.unescape(markup(page))
    assert found.problems == [] and "Finished: step 12 of 12." in text and "the ledger balances" in text
    steps = {int(step) for told in re.findall(r"trained at steps? ([\d, ]+)", text) for step in told.split(",")}
    assert steps and steps <= set(range(1, 13))
    assert found.roles["trainer"].by_step.column("reward").mean.shape == (12,)
    data = json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1])
    assert len(data["figures"]) > 15 and all(figure["traces"] for figure in data["figures"].values())
