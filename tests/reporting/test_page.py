"""The page of a run: its sentences, self-contained, obeying nothing that stands in the run, and right about whole runs."""

import html
import importlib.util
import json
import re
import shutil

import numpy as np
import pytest

from tba_jax.reporting import page as page_lib
from tba_jax.reporting.gathering import Gathered, Source
from tba_jax.storage import layout
from tba_jax.telemetry import metrics
from tests.support import hostile_runs
from tests.support.tiny_log import objects

CHROMIUM = ["chromium", "chromium-browser", "google-chrome"]


def made(run) -> tuple[Gathered, str]:
    found = Source(run.root).gather()
    return found, page_lib.page(found)


def markup(page: str) -> str:
    return re.sub(r"<script>.*?</script>", "", page, flags=re.DOTALL)


def data(page: str) -> dict:
    return json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1])


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    return hostile_runs.make(tmp_path_factory.mktemp("hostile") / "run")


@pytest.fixture
def copy(hostile, tmp_path):
    shutil.copytree(hostile.root, tmp_path / "run")
    return layout.RunDir(tmp_path / "run")


def test_nothing_of_a_run_becomes_markup(hostile):
    found, page = made(hostile)
    assert found.problems == []
    text = markup(page)
    template = (page_lib.TEMPLATES / "report.html").read_text()
    assert set(re.findall(r"<([a-zA-Z]+)", text)) <= set(re.findall(r"<([a-zA-Z]+)", template))
    assert text.count("<script") == text.count("</script>") == text.count("</style>") == 1
    assert 'href="javascript' not in text and "49{% raw %}" not in text and "{{7*7}}" in text
    for string in (hostile_runs.STRINGS[0], hostile_runs.STRINGS[2]):
        assert html.escape(string).replace("&quot;", "&#34;").replace("&#x27;", "&#39;") in text
    tags = set(re.findall(r"<(/?\w+)", json.dumps(data(page)["charts"])))
    assert tags <= {"extra", "/extra"}, "labels of charts"
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", text)


@pytest.fixture
def driver():
    program, driver = (next(filter(None, map(shutil.which, names)), None) for names in (CHROMIUM, ["chromedriver"]))
    if not (program and driver and importlib.util.find_spec("selenium")):
        pytest.skip("Chromium, chromedriver or selenium is not installed (Debian: apt-get install chromium chromium-driver)")
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = program
    for flag in ("headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage", "window-size=1400,1000"):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    made = webdriver.Chrome(options=options, service=Service(driver))
    yield made
    made.quit()


def test_in_a_browser_samples_can_be_searched_and_nothing_of_others_is_executed_or_fetched(hostile, tmp_path, driver):
    page, address = tmp_path / "report.html", "http://127.0.0.1:9/injected"
    injected = f"<script>window.owned=1</script><img src='{address}' onerror='window.owned=2'>"
    page.write_text(made(hostile)[1].replace('<h2 id="learning">', injected + '<h2 id="learning">'), encoding="utf-8")

    def count(script: str) -> int:
        return driver.execute_script(f"return document.querySelectorAll('{script}').length")

    driver.get(page.as_uri())
    assert count(".main-svg") > 5 and count("article") == 12
    for each in ("input[name=axis][value=time]", "#colour option[value=step]", "#group option[value='']"):
        driver.find_element("css selector", each).click()
    assert count("article") == hostile_runs.ROWS
    driver.find_element("id", "step").send_keys("2")
    assert sorted(each.text for each in driver.find_elements("css selector", "article b")) == ["w0:0", "w0:1"]
    driver.find_element("id", "step").clear()
    driver.find_element("id", "text").send_keys("ONLOAD")
    assert count("article") == 2
    assert driver.execute_script("return window.owned") is None and count("a[href^=javascript], svg[onload]") == 0
    told = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
    asked = {each["params"]["request"]["url"] for each in told if each["method"] == "Network.requestWillBeSent"}
    fetched = {each for each in asked if not each.startswith(("data:", "blob:", "chrome:", "chrome-extension:"))}
    assert fetched <= {page.as_uri(), address}, "a browser tells of the second, and its policy stops it"
    assert all("Content Security Policy" in entry["message"] for entry in driver.get_log("browser"))


def test_the_worst_rows_come_with_the_steps_that_drew_them(hostile):
    page = made(hostile)[1]
    rows = re.findall(r"</b> · (w0:\d+)</p>\s*<p class=\"told\">(.*?)</p>", markup(page))
    assert rows == [("w0:0", "trained at steps 1, 2"), ("w0:1", "trained at steps 1, 2"), ("w0:2", "trained at step 1")]
    drawn = {each["name"]: each["steps"] for each in data(page)["samples"] if each["steps"]}
    assert drawn == {"w0:0": [1, 2], "w0:1": [1, 2], "w0:2": [1], "w0:3": [1]}
    for each in data(page)["samples"]:
        if each["name"] == "w0:3":
            assert each["ratio"] is None and {ratio for _, ratio, _ in each["tokens"]} == {None}
            continue
        assert each["ratio"] == pytest.approx(sum(ratio for _, ratio, _ in each["tokens"]), abs=0.001 * len(each["tokens"]))


def test_steps_of_a_mounted_run_are_not_taken_for_those_of_the_run(copy, tmp_path):
    other = hostile_runs.make(tmp_path / "other")
    hostile_runs.more_rows(other, "w9", prompt_length=1, response_length=1, policy_step=7_000)
    for path in objects(other.replay):
        path.unlink()
    (other.replay / "writers" / "w0.json").unlink()
    stored = layout.read_json(copy.config)
    stored["config"]["replay"]["mount"] = [str(other.root)]
    layout.write_json(copy.config, stored)
    found, page = made(copy)
    assert found.problems == [] and "20 rows can be read" in page and "<td>w9</td>" in page and "of a mounted run" in page
    steps = found.table.rows["newest_step"]
    assert (steps >= 0).sum() == 16 and steps.max() <= 20


@pytest.mark.parametrize("value", [1e300, {"a": "text"}])
def test_numbers_that_cannot_be_end_no_report(copy, value):
    for name in ("metrics.jsonl", "status.json", "alarms.jsonl"):
        path = copy.metrics("trainer") / name
        first = json.loads(path.read_text().splitlines()[0])
        changed = [json.dumps(first | {key: value}) for key in first]
        path.write_text("\n".join([*changed, path.read_text()]) if name.endswith("l") else changed[0])
    (copy.root / "finished.json").write_text(json.dumps({"step": value, "balanced": value}))
    copy.evaluations.mkdir()
    (copy.root / "evaluations" / "00000001.json").write_text(json.dumps({"greedy_reward": value, "queries": value}))
    copy.config.write_text(json.dumps(layout.read_json(copy.config) | {"changes": value, "id": [1], "init_from": {"a": 1}}))
    page = made(copy)[1]
    assert "· w0:0</p>" in page and data(page)["charts"]


def test_a_whole_run_is_reported_whole(finished):
    found, page = made(finished.run)
    text, shown = html.unescape(markup(page)), data(page)
    assert found.problems == [] and "Finished: step 6 of 6." in text and "ledger of the rows balances" in text
    steps = {step for each in shown["samples"] for step in each["steps"]}
    assert steps and steps <= {*range(1, 7)}
    titles = {chart["title"]: chart for chart in shown["charts"]}
    assert {"Reward", "Loss", "Distance from the reference", "Gradient norm", "Where the time goes"} <= titles.keys()
    steps = [line["step"] for line in metrics.each_line(found.run.metrics("trainer"))]
    assert titles["Loss"]["traces"][-1]["x_by"]["step"] == steps
    assert all(chart["traces"] for chart in shown["charts"])


def test_held_out_rewards_decide_where_they_differ_by_more_than_chance():
    for first, last, stderr, verdict in (
        (0.4, 0.9, None, "yes"),
        (0.9, 0.4, None, "no"),
        (0.50, 0.52, None, "unclear"),
        (0.25, 0.75, 0.1, "yes"),  # 0.5 is more than twice √2 · 0.1, and less than twice √2 · 0.2
        (0.25, 0.75, 0.2, "unclear"),
    ):
        more = {"queries": 256} if stderr is None else {"greedy_reward_stderr": stderr}
        found = [{"step": step, "greedy_reward": reward, **more} for step, reward in ((0, first), (100, last))]
        told, sentence = page_lib.held_out(found)
        assert told == verdict and f"{first:.3f}" in sentence and f"{last:.3f}" in sentence and "step 100" in sentence
        assert f"the best is {max(first, last):.3f}" in page_lib.held_out([*found, {"step": 200, "greedy_reward": 0.0}])[1]
    assert page_lib.held_out([]) == ("", "There is no held-out score.") and page_lib.held_out(found[:1])[0] == ""
    # Trained rewards are compared with their noise, and held-out ones outrank them.
    noise = np.random.default_rng(0).normal(size=400)
    slopes = {"unclear": 0, "yes": 9, "no": -9}
    assert {page_lib.trained(noise + np.linspace(0, slope, 400))[0]: slope for slope in slopes.values()} == slopes
    told = {("no", "yes"): "It gets worse", ("yes", "no"): "It learns", ("unclear", "yes"): "The trained reward rises"}
    assert all(page_lib.verdict(*each) == heading for each, heading in told.items())
    assert page_lib.trained(np.full(4, 0.5))[0] == "" and page_lib.verdict("", "") == "Too early to say"
