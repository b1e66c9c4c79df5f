"""The viewer in a real Chromium: what others wrote does not run, nothing is fetched from elsewhere, the keyboard suffices."""

from urllib.parse import urlsplit

import pytest

from tba_jax.reporting import serving
from tba_jax.reporting.live_run import LiveRun
from tests.reporting.test_viewer import PAGES
from tests.support import browser, hostile_runs


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = tmp_path_factory.mktemp("viewed") / "run"
    hostile_runs.make(folder)
    runs = [LiveRun(folder), LiveRun(folder)]
    for run in runs:
        for part in (run.trainer, run.draws, run.table):
            part.advance()
    with serving.serving(runs, serving.listen(0)) as address:
        yield address


def entered(driver, address: str) -> str:
    """Opens the printed address. Returns where the pages are."""
    base = address.partition("/?")[0]
    driver.get(address)
    goes_to(driver, f"{base}/run/0/")  # without the token
    return base


def goes_to(driver, address: str) -> None:
    """Waits until the page that begins with an address is loaded."""
    from selenium.webdriver.support.ui import WebDriverWait

    def is_there(_) -> bool:
        return driver.current_url.startswith(address) and driver.execute_script("return document.readyState") == "complete"

    WebDriverWait(driver, 20).until(is_there, f"the browser stays at {driver.current_url}, expected {address}")


@pytest.mark.parametrize("width", [1280, 500])
def test_nothing_that_others_wrote_runs_or_is_fetched(served, width):
    with browser.chromium(width=width) as driver:
        base = entered(driver, served)
        browser.complaints(driver), browser.requested(driver)
        for page in [*PAGES, "/run/1/row/w0/9"]:
            driver.get(f"{base}{page}")
            assert driver.execute_script("return typeof window.owned") == "undefined", page
            assert driver.execute_script("return document.images.length + document.scripts.length") == 0
            assert driver.execute_script("return getComputedStyle(document.querySelector('main')).display") != "none"
            wide = driver.execute_script("return document.documentElement.scrollWidth - document.documentElement.clientWidth")
            assert wide <= 0, f"{page} is {wide} pixels wider than the window"
            assert browser.complaints(driver) == [], page
        asked = browser.requested(driver)
        assert len(asked) > len(PAGES) and all(urlsplit(each).netloc == urlsplit(base).netloc for each in asked)


def test_a_script_could_not_run_even_if_it_were_in_a_page(served):
    with browser.chromium() as driver:
        base = entered(driver, served)
        driver.get(f"{base}/run/0/")
        driver.execute_script(
            "const s = document.createElement('script'); s.textContent = 'window.owned = 9'; document.body.append(s);"
            "const i = document.createElement('img'); i.src = 'http://127.0.0.1:9/x'; document.body.append(i);"
        )
        assert driver.execute_script("return typeof window.owned") == "undefined"
        assert any("Content Security Policy" in told for told in browser.complaints(driver))


def test_the_keyboard_suffices(served):
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys

    with browser.chromium() as driver:
        base = entered(driver, served)

        def press(*keys: str) -> None:
            ActionChains(driver).send_keys(*keys).perform()

        def focused(script: str) -> str:
            return driver.execute_script(f"const e = document.activeElement; return String({script})")

        press(Keys.TAB)
        assert focused("e.textContent") == "Skip to the content" and float(focused("e.getBoundingClientRect().left")) >= 0
        seen = []
        for _ in range(40):
            press(Keys.TAB)
            seen.append(focused("e.textContent.trim() || e.name"))
            if focused("e.tagName") not in ("BODY", "HTML"):
                assert focused("getComputedStyle(e).outlineStyle") == "solid", seen[-1]
            if seen[-1] == "Worst rows":
                break
        assert seen[-1] == "Worst rows" and "Rows" in seen
        press(Keys.ENTER)
        goes_to(driver, f"{base}/run/0/rows?order=worst")
        driver.find_element("name", "text").send_keys("onload", Keys.ENTER)
        goes_to(driver, f"{base}/run/0/rows?text=onload")
        assert len(driver.find_elements("css selector", "tbody tr")) == 2
        ActionChains(driver).key_down(Keys.ALT).send_keys("s").key_up(Keys.ALT).perform()
        assert focused("e.name") == "number"
        press(Keys.BACKSPACE, "1", Keys.ENTER)
        goes_to(driver, f"{base}/run/0/step/1")
