"""The page of a run: self-contained, obeying nothing that stands in the run, and telling what damage has left."""

import html
import json
import re
import shutil

import pytest

from tba_jax.reporting import gathering, report
from tests.support import browser, hostile_runs


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


@pytest.mark.parametrize(
    ("file", "named"),
    [
        ("finished.json", "finished.json"),
        ("evaluations/00000003.json", "the evaluation of step 3"),
        ("metrics/trainer/metrics.jsonl", "1 lines of"),
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


def test_a_run_that_has_just_begun_has_a_page(tmp_path):
    from tba_jax.experiment import composition
    from tba_jax.run import contract, layout
    from tests.support import tiny_run

    run, config = layout.RunDir(tmp_path / "run"), tiny_run.config()
    contract.join(run, config, composition.build(config).contract)
    found, page = made(run)
    assert found.problems == [] and "Too early to say" in page and "No role has written anything yet" in page


def test_the_run_is_only_read(hostile):
    before = {path: path.stat().st_mtime_ns for path in hostile.root.rglob("*")}
    made(hostile)
    assert {path: path.stat().st_mtime_ns for path in hostile.root.rglob("*")} == before
