"""The viewer's pages by a client without a browser: who gets in, what they tell of a run, and what nonsense is answered."""

import html
import json
import re
import shutil
import time
import uuid

import pytest

from tba_jax.reporting import stories
from tba_jax.reporting.live_run import LiveRun
from tba_jax.reporting.viewer import figure, make_app
from tba_jax.run import layout, places
from tba_jax.telemetry.alarms import Alarms
from tba_jax.telemetry.status import Status
from tba_jax.text.visible import visible
from tests.support import frozen_runs, hostile_runs

HOST = {"Host": "127.0.0.1:4242"}
PAGES = [
    "/run/0/",
    "/run/0/?refresh=10",
    "/run/0/rows",
    "/run/0/rows?order=worst",
    "/run/0/rows?text=script",
    "/run/0/row/w0/3",
    "/run/0/row/w0/12?colour=step",
    "/run/0/step/1",
    "/run/0/queries",
    "/run/0/evaluations",
    "/compare",
]


@pytest.fixture
def run(tmp_path):
    hostile_runs.make(tmp_path / "run")
    return read(tmp_path / "run")


def read(folder) -> LiveRun:
    made = LiveRun(folder)
    for part in (made.trainer, made.draws, made.table):
        assert part.advance()
    return made


def enter(*runs: LiveRun):
    """A client that has opened the address with the token."""
    client = make_app(runs, "the-token").test_client()
    assert client.get("/?token=the-token", headers=HOST).status_code == 200
    return client


def page(client, address: str, status: int = 200) -> str:
    answer = client.get(address, headers=HOST)
    assert answer.status_code == status, (address, answer.status_code, answer.text[-300:])
    return answer.text


def texts(page: str) -> str:
    """What a reader of the page sees, in one line."""
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", page.partition("<main")[2])).split())


@pytest.mark.parametrize(
    "address", ["/", "/?token=wrong", "/?token=", "/run/0/rows", "/style.css", "/nowhere", "/?token=the-token2"]
)
def test_nobody_without_the_token_gets_in(run, address):
    client = make_app([run], "the-token").test_client()
    answer = client.get(address, headers=HOST)
    assert answer.status_code == 403 and "w0" not in answer.text and not answer.headers.getlist("Set-Cookie")
    client.set_cookie("tba_view", "the-token", domain="127.0.0.1")
    assert client.get(address, headers=HOST).status_code == 403


def test_the_token_leaves_the_address_for_a_cookie_that_no_script_and_no_other_site_may_send(run):
    client = make_app([run], "the-token").test_client()
    answer = client.get("/?token=the-token", headers=HOST)
    (cookie,) = answer.headers.getlist("Set-Cookie")
    assert "HttpOnly" in cookie and "SameSite=Strict" in cookie and "the-token" not in cookie + answer.text
    assert 'http-equiv="refresh" content="0; url=/"' in answer.text
    assert "the-token" not in page(client, "/run/0/")


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "localhost.evil.example:80", "", "127.0.0.1:80:80", "10.0.0.1"]
)
def test_a_name_of_another_site_is_refused(run, host):
    """A page of that site could otherwise read the run by letting its name point to 127.0.0.1."""
    client = enter(run)
    assert client.get("/run/0/", headers={"Host": host}).status_code == 403
    assert client.get("/?token=the-token", headers={"Host": host}).status_code == 403


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost:9000", "[::1]:80", "127.0.0.1:1"])
def test_the_far_end_of_a_tunnel_may_use_another_port(run, host):
    client = make_app([run], "the-token").test_client()
    base = f"http://{host}"
    assert client.get("/?token=the-token", base_url=base).status_code == 200
    assert client.get("/run/0/", base_url=base).status_code == 200


@pytest.mark.parametrize("method", ["post", "put", "delete", "patch", "options"])
def test_only_reading_is_answered(run, method):
    assert getattr(enter(run), method)("/run/0/rows", headers=HOST).status_code == 405


def test_every_answer_forbids_scripts_frames_and_other_sites(run):
    client = enter(run)
    for address in [*PAGES, "/style.css", "/nowhere", "/run/0/rows?page=x"]:
        headers = client.get(address, headers=HOST).headers
        policy = headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy and "script-src" not in policy and "unsafe" not in policy
        assert headers["Referrer-Policy"] == "no-referrer" and headers["X-Frame-Options"] == "DENY"
        assert headers["X-Content-Type-Options"] == "nosniff" and headers["Cache-Control"] == "no-store"


def test_texts_of_models_tasks_and_files_are_escaped(run):
    Alarms(run.run.metrics("trainer")).tell(kind="reordered", sentence=hostile_runs.STRINGS[6], advice="\x1b[2J", step=1)
    client = enter(run)
    shown = ""
    for address in PAGES:
        content = page(client, address, 404 if address == "/compare" else 200)
        shown += texts(content)
        for text in hostile_runs.STRINGS:
            assert text not in content or not re.search("[<>]", text), (address, text)
        assert not re.search(r"<script|<img|<svg onload|javascript:[^&]*\"|onerror=\"", content), address
        assert visible(content) == content and "49" not in texts(page(client, "/run/0/row/w0/13"))
    assert "<script>window.owned=1</script>" in shown and r"\u202e" in shown and "{{7*7}}" in shown


def test_the_run_is_only_read(tmp_path):
    hostile_runs.make(tmp_path / "run")
    before = frozen_runs.contents(tmp_path / "run")
    client = enter(read(tmp_path / "run"))
    for address in PAGES[:-1]:
        page(client, address)
    assert frozen_runs.contents(tmp_path / "run") == before


def test_a_row_tells_its_steps_and_a_step_its_rows(run):
    client = enter(run)
    row = page(client, "/run/0/row/w0/1")
    assert re.findall(r'href="/run/0/step/(\d+)"', row) == ["1", "2"]
    assert re.findall(r'/step/(\d+)"', page(client, "/run/0/row/w0/3").partition("<main")[2]) == ["1"]
    step = page(client, "/run/0/step/2")
    assert re.findall(r'href="/run/0/row/w0/(\d+)"', step) == ["0", "1"] and "trained on 2 rows" in texts(step)
    assert "loss 1" in texts(step)  # of the line of metrics
    text = texts(row)
    assert "--regenerate=w0:1" in text or "cannot be generated again: the snapshot of step 0 has been removed" in text


def test_a_row_has_a_table_of_its_tokens(run):
    text = page(enter(run), "/run/0/row/w0/12")
    body = text.partition("Token by token")[2]
    (rows, there, _) = run.rows([("w0", 12)])
    assert there == [0] and body.count("<tr>") == 1 + int(rows["response_length"][0])
    assert f"{rows['policy_logprobs'][0, 0]:.3f}" in body and f"{rows['behavior_logprobs'][0, 3]:.3f}" in body
    assert "group" in text and 'href="/run/0/row/w0/13"' in text  # the same plain prompt


@pytest.mark.parametrize(
    "value", ["9" * 400, "1e999", "-1" + "0" * 400, '"text"', "null", "[1]", "9" * 5000, "[" * 10_000 + "]" * 10_000]
)
def test_damaged_numbers_end_no_page(run, value):
    with open(run.run.metrics("trainer") / "metrics.jsonl", "a") as file:
        file.write(f'{{"step": 21, "time": {value}, "reward": {value}}}\n{{"step": 22, "time": 1022.0}}\n')
        file.write(f'{{"step": 23, "time": {value}, "reward": {value}}}\n')
    if len(value) < 999:
        run.run.evaluations.mkdir()
        report = f'{{"greedy_reward": 1.0, "samples": {{"greedy": [{{"query": "q", "response": "r", "reward": {value}}}]}}}}'
        (run.run.evaluations / "00000001.json").write_text(report)
    assert run.trainer.advance() and run.trainer.last["step"] == 22
    client = enter(run)
    page(client, "/run/0/")
    page(client, "/run/0/evaluations")


def test_text_is_searched_in_prompts_and_responses(run):
    client = enter(run)
    found = re.findall(r'href="/run/0/row/w0/(\d+)"', page(client, "/run/0/rows?text=ONERROR"))
    assert set(found) == {"2", "10"}
    assert "All are searched" in texts(page(client, "/run/0/rows?text=nothing+has+this"))


def test_a_search_that_takes_long_goes_on_from_where_it_was(run, monkeypatch):
    monkeypatch.setattr(stories, "SEARCH_SECONDS", -1.0)
    monkeypatch.setattr(stories, "_SEARCHED_AT_ONCE", 5)
    client, address, found, pages = enter(run), "/run/0/rows?text=script", [], 0
    while address:
        content, pages = page(client, address), pages + 1
        found += re.findall(r'href="/run/0/row/w0/(\d+)"', content)
        following = re.search(r'href="([^"]*)">Search on', content)
        address = html.unescape(following[1]) if following else ""
    assert pages == 4 and sorted(map(int, found)) == [0, 1, 4, 8, 9, 12]


def test_pages_of_rows_stay_as_they_were_while_the_run_goes_on(run, monkeypatch):
    monkeypatch.setattr(stories, "PAGE", 6)
    client, address, found = enter(run), "/run/0/rows?order=best", []
    while address:
        content = page(client, address)
        found += map(int, re.findall(r'href="/run/0/row/w0/(\d+)"', content))
        following = re.search(r'rel="next"[^>]* href="([^"]*)"', content)
        address = html.unescape(following[1]) if following else ""
    assert found == [*reversed(range(hostile_runs.ROWS))]


@pytest.mark.parametrize(
    ("address", "status", "told"),
    [
        ("/run/0/rows?page=0", 400, "page='0' must be a whole number of at least 1"),
        ("/run/0/rows?page=99", 400, "page=99 is not there: 16 rows make 1 pages"),
        ("/run/0/rows?reward_from=low", 400, "reward_from='low' must be a number"),
        ("/run/0/rows?order=x", 400, "order='x' must be one of"),
        ("/run/0/?refresh=0", 400, "refresh='0'"),
        ("/run/0/step/0", 400, "step='0'"),
        ("/run/0/step/9", 404, "no step 9; it has 1 to 2"),
        ("/run/0/step/x", 400, "step='x'"),
        ("/run/0/row/w0/x", 400, "'x' of writer w0 is no row number"),
        ("/run/0/row/w0/99", 404, "row w0:99 cannot be read"),
        ("/run/0/row/nobody/1", 404, "the run has no writer nobody"),
        ("/run/0/query/zz", 400, "query='zz'"),
        ("/run/0/query/1", 404, "No row of query 0000000000000001"),
        ("/run/0/queries?order=x", 400, "order='x'"),
        ("/run/0/queries?page=7", 400, "page=7 is not there"),
        ("/run/1/", 404, "no run 1"),
        ("/compare", 404, "--other=DIR"),
        ("/nowhere", 404, "not found"),
    ],
)
def test_nonsense_is_answered_by_one_sentence(run, address, status, told):
    content = texts(page(enter(run), address, status))
    assert told in content and "Traceback" not in content


def test_two_runs_are_compared(run, tmp_path):
    shutil.copytree(tmp_path / "run", tmp_path / "other")
    client = enter(run, read(tmp_path / "other"))
    content = page(client, "/compare")
    assert content.count('class="line1" d="M') >= 1 and str(tmp_path / "other") in texts(content)
    query = re.search(r"/run/0/query/([0-9a-f]{16})", page(client, "/run/0/queries"))[1]
    both = page(client, f"/compare?query={query}")
    assert 'href="/run/0/row/w0/' in both and 'href="/run/1/row/w0/' in both
    page(client, "/run/1/")


def test_rows_of_a_mounted_run_are_shown_as_such(tmp_path):
    other, run = hostile_runs.make(tmp_path / "other"), hostile_runs.make(tmp_path / "run")
    (other.replay / "w0").rename(other.replay / "w9")
    (other.replay / "writers" / "w0.json").rename(other.replay / "writers" / "w9.json")
    stored = layout.read_json(run.config)
    stored["config"]["replay"]["mount"] = [str(other.root)]
    layout.write_json(run.config, stored)
    client = enter(read(run.root))
    assert "32 rows match" in texts(page(client, "/run/0/rows"))
    assert "of a mounted run" in texts(page(client, "/run/0/row/w9/3"))
    assert "of a mounted run" not in texts(page(client, "/run/0/row/w0/3"))
    first = texts(page(client, "/run/0/rows?order=newest")).partition("w9:")
    assert "w0:" in first[0] and first[1], "steps of another run are not newer than those of this one"
    assert "of a mounted run" not in first[0] and "of a mounted run" in first[2]
    assert "16 rows match" in texts(page(client, "/run/0/rows?step_from=0"))
    query = re.search(r"/run/0/query/([0-9a-f]{16})", page(client, "/run/0/queries"))[1]
    assert "Sampled by mounted runs" in texts(page(client, f"/run/0/query/{query}"))
    assert "16 rows match" in texts(page(client, "/run/0/rows?step_from=-1&step_to=-1"))
    shutil.rmtree(other.root)
    client = enter(read(run.root))
    content = texts(page(client, "/run/0/rows"))
    assert "16 rows match" in content and f"{other.replay} of a mounted run is not there" in content


def test_roles_say_what_they_do(run):
    status = run.run.metrics("trainer") / "status.json"
    plain = {"waits": "", "since": 0.0, "trouble": "", "phase": "", "phase_since": 0.0, "phase_of": [0, 0], "time": time.time()}
    client = enter(run)
    for told, shown in [
        ({}, "trainer at work"),
        ({"phase": "compiling the update"}, "trainer compiling the update"),
        ({"phase": "evaluating", "phase_of": [2, 3]}, "trainer evaluating 2 of 3"),
        ({"waits": "rows", "since": time.time() - 300}, "trainer waits for rows (5 min)"),
        ({"trouble": "no rewards"}, "trainer at work no rewards"),
        ({"time": time.time() - 90, "phase": "stopped"}, "trainer stopped"),
        ({"time": time.time() - 90, "phase": "evaluating"}, "trainer silent; it said last: evaluating"),
        ({"time": time.time() - 90}, "trainer silent"),
    ]:
        status.write_text(json.dumps(plain | told))
        assert shown in texts(page(client, "/run/0/"))
    layout.write_json(run.run.finished, {"step": 10**6})
    overview = texts(page(client, "/run/0/"))
    assert "The run is finished" in overview and "trainer ended" in overview


@pytest.mark.parametrize(
    "times, told",
    [
        ({"time_decode": 0.97, "time_wait_policy": 0.02}, "trainer waits most: 25% for rows from searchers."),
        ({"time_decode": 0.6, "time_wait_policy": 0.4}, "searcher-0 waits most: 40% for a newer policy from the trainer."),
    ],
)
def test_a_sentence_says_who_waits_most(run, times, told):
    folder = run.run.metrics("searcher-0")
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 4, "time": time.time(), **times}) + "\n")
    assert told in texts(page(enter(run), "/run/0/"))


def test_a_run_whose_processes_have_ended_is_not_called_live(run):
    run.run.metrics("searcher-0").mkdir()
    Status(run.run.metrics("trainer")).close("stopped")
    searcher, client = Status(run.run.metrics("searcher-0")), enter(run)
    assert "The run is live" in texts(page(client, "/run/0/"))
    searcher.close("stopped")
    assert "The run is stopped" in texts(page(client, "/run/0/"))


def test_a_contract_of_other_types_is_one_sentence(tmp_path):
    run = hostile_runs.make(tmp_path / "run")
    stored = json.loads(run.config.read_text())
    stored["contract"]["embedding"] = "x"
    run.config.write_text(json.dumps(stored))
    with pytest.raises(ValueError, match=r"the contract in .*config.json is damaged"):
        LiveRun(run.root)


@pytest.mark.parametrize(("value", "shown"), [(19134.2, "19,134"), (0.12346, "0.1235"), (1.5, "1.5")])
def test_a_large_number_has_no_exponent(value, shown):
    assert figure(value) == shown


def test_a_damaged_run_shows_what_is_readable_and_names_the_rest(tmp_path):
    run = hostile_runs.make(tmp_path / "run")
    (chunk,) = sorted((run.replay / "w0" / "000000").rglob("d/*"), key=lambda path: path.stat().st_size)[-1:]
    chunk.write_bytes(chunk.read_bytes()[:60])
    with open(run.journal / "epoch-000001.jsonl", "a") as file:
        file.write('{"step": "x"}\n{"step": 4, "epoch": 1, "writers": [], "rows": []}\n')
    with open(run.metrics("trainer") / "metrics.jsonl", "a") as file:
        file.write("torn\n")
    (run.metrics("trainer") / "status.json").write_text("[]")
    run.evaluations.mkdir()
    (run.evaluations / "00000001.json").write_text("{")
    client = enter(read(tmp_path / "run"))
    overview = texts(page(client, "/run/0/"))
    assert "rows 8 to 11 cannot be read" in overview and "line 3 is not a journal line" in overview
    assert (
        "damaged lines of the trainer's metrics.jsonl are left out: 1" in overview
        and "evaluation of step 1 cannot be read" in overview
    )
    rows = re.findall(r'href="/run/0/row/w0/(\d+)"', page(client, "/run/0/rows"))
    assert 0 < len(set(rows)) < hostile_runs.ROWS
    lost = next(str(row) for row in range(hostile_runs.ROWS) if str(row) not in rows)
    assert "cannot be read" in texts(page(client, f"/run/0/row/w0/{lost}", 404))
    page(client, "/run/0/evaluations", 400)


def test_a_folder_that_vanishes_is_told_and_the_tables_stay(run, tmp_path):
    client = enter(run)
    (tmp_path / "run").rename(tmp_path / "moved")
    for part in (run.trainer, run.draws, run.table):
        part.advance()
    overview = texts(page(client, "/run/0/"))
    assert "is not there any more: pages show what was read before" in overview
    assert "16 rows match" in texts(page(client, "/run/0/rows"))
    page(client, "/run/0/row/w0/1", 404)
    page(client, "/run/0/step/1")


def test_a_run_that_has_only_begun_has_all_pages(tmp_path):
    run = hostile_runs.make(tmp_path / "run")
    for folder in ("metrics", "journal", "replay"):
        shutil.rmtree(run.root / folder)
    client = enter(read(tmp_path / "run"))
    for address in ("/run/0/", "/run/0/rows", "/run/0/rows?text=a", "/run/0/queries", "/run/0/evaluations"):
        page(client, address)
    assert "it has none yet" in texts(page(client, "/run/0/step/1", 404))


def test_a_run_whose_roles_meet_in_an_object_store_is_read_there(tmp_path, monkeypatch):
    place, shared = places.place, places.place(f"memory://runs/{uuid.uuid4().hex}")
    monkeypatch.setattr(
        places, "place", lambda text: shared if text == str(shared) else place(text)
    )  # memory is each object's own
    run = hostile_runs.make(tmp_path / "run", shared)
    client = enter(read(run.root))
    assert "16 rows match" in texts(page(client, "/run/0/rows")) and "drawn by step" in texts(page(client, "/run/0/"))
    assert re.findall(r'href="/run/0/step/(\d+)"', page(client, "/run/0/row/w0/1")) == ["1", "2"]


def test_a_run_whose_tokenizer_is_gone_shows_numbers(tmp_path):
    run = hostile_runs.make(tmp_path / "run")
    stored = layout.read_json(run.config)
    stored["config"]["model"]["path"] = str(tmp_path / "gone")
    layout.write_json(run.config, stored)
    client = enter(read(run.root))
    content = texts(page(client, "/run/0/row/w0/12"))
    assert "the tokenizer cannot be read, tokens are shown by their numbers" in content and re.search("⟨[0-9]+⟩⟨[0-9]+⟩", content)
