"""The page at `/`, in a real browser where there is one."""

import json
import os
import re
import shutil
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from jaxserve.server.keys import Keys
from tests.server.rig import MODEL, Rig, running, wait_for

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))),
    None,
)


TEXT = "<b>hi</b> 1"
WATCH = """
window.seen = new Set();
new MutationObserver(() => seen.add(document.querySelector("#talk p:last-child").textContent))
    .observe(document.getElementById("talk"), {childList: true, subtree: true});
"""


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            elif name in ("src", "href", "action", "srcset", "data"):
                self.addresses.append(value or "")


def test_the_page_needs_nothing_but_this_server(server: Rig):
    answer = server.get("/")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    tags = _Tags()
    tags.feed(answer.text)
    assert tags.addresses == ["data:,"]
    assert not re.search(r"https?:|@import|url\(|innerHTML|\beval\b", answer.text)
    # What the script looks for is there: elements, routes, metrics.
    wanted = set(re.findall(r'\bat\("([\w-]+)"\)', answer.text))
    assert len(tags.ids) == len(set(tags.ids)) and wanted <= set(tags.ids) and len(wanted) > 10
    routes = re.findall(r'fetch\("([\w/]+)"', answer.text)
    assert sorted(routes) == ["metrics", "ready", "v1/chat/completions", "v1/models"]
    metrics = server.get("/metrics").text
    names = re.findall(r'get\("(\w+)"\)|(?:grown\("|now\.)(jaxserve_\w+)', answer.text)
    assert len(names) >= 8
    for name in map("".join, names):
        assert re.search(rf"^[\w:]*{name}(\{{.*\}})? ", metrics, re.MULTILINE), name


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if BROWSER is None:
        pytest.skip("no Chromium on this machine")
    api = pytest.importorskip("playwright.sync_api")
    with api.sync_playwright() as playwright:
        with playwright.chromium.launch(
            executable_path=BROWSER, args=["--no-sandbox", "--disable-gpu"]
        ) as browser:
            yield browser


def shows(page: Any, name: str, pattern: str) -> None:
    """Waits for it: the page looks once a second."""
    wait_for(lambda: re.fullmatch(pattern, page.locator(name).inner_text()) is not None)


def test_a_chat_in_a_browser(browser: Any, tmp_path: Path):
    with running(tmp_path / "m", keys=Keys(["sesame"])) as rig:
        page = browser.new_page(viewport={"width": 900, "height": 700})
        trouble: list[str] = []
        page.on("pageerror", lambda error: trouble.append(str(error)))
        page.on("requestfailed", lambda request: trouble.append(f"{request.url} {request.failure}"))
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.goto(rig.url)
        page.get_by_text("enter an API key").wait_for()
        page.get_by_label("API key").fill("sesame")
        page.get_by_label("max tokens").fill("120")
        page.get_by_label("temperature").fill("0")
        page.get_by_text(MODEL).wait_for()
        page.get_by_label("Message").fill(TEXT)
        page.evaluate(WATCH)
        page.get_by_label("Message").press("Enter")
        answer = page.locator("#talk p").nth(1)
        wait_for(lambda: page.locator("#send").is_enabled() and len(answer.inner_text()) > 10)
        body = {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 120}
        expected = rig.post(
            "/v1/chat/completions",
            json=body | {"temperature": 0},
            headers={"authorization": "Bearer sesame"},
        ).json()["choices"][0]["message"]["content"]
        assert answer.text_content() == expected
        assert page.evaluate("window.seen.size") > 4  # it came bit by bit
        assert page.locator("#talk p").first.text_content() == TEXT
        shows(page, "#step", r"[\d.]+ ms")
        shows(page, "#queue", r"\d+ / \d+")
        shows(page, "#kv", r"[\d.]+ %")
        shows(page, "#budget", r"[\d.]+ %")
        page.get_by_label("temperature").fill("-1")
        page.get_by_label("Message").fill("again")
        page.locator("#form").evaluate("form => { form.noValidate = true }")
        page.get_by_role("button", name="Send").click()
        error = page.locator("#talk p.error")
        error.wait_for()
        assert "temperature" in error.inner_text()
        folder = os.environ.get("JAXSERVE_SCREENSHOTS")
        if folder:
            page.screenshot(path=f"{folder}/page.png")
        # Chromium calls a stream aborted whose reader stopped behind its last event.
        assert [what for what in trouble if "/chat/completions net::ERR_ABORTED" not in what] == []
        assert {url[: len(rig.url)] for url in asked if not url.startswith("data:")} == {rig.url}
        page.close()


def test_the_page_shows_an_engine_that_has_died(browser: Any, tmp_path: Path):
    with running(tmp_path) as rig:
        page = browser.new_page()
        page.goto(rig.url)
        page.get_by_text(MODEL).wait_for()
        page.get_by_label("Message").fill(json.loads('"\\u0001"') + "x")
        page.get_by_role("button", name="Send").click()
        page.locator("#talk p.error").wait_for()
        page.locator("#state", has_text="dead").wait_for()
        page.close()
