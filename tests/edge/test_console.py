"""The console in a browser: what it shows of a real cluster, and what can be done with it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from edge.http_cluster import Edge, body

pytest.importorskip("playwright", reason="the console is tested with playwright: pip install playwright")
from playwright.async_api import Browser, Page, Route, async_playwright, expect

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(200),
    pytest.mark.asyncio(loop_scope="package"),
    pytest.mark.skipif(CHROMIUM is None, reason="the console is tested in Chromium, and none is installed"),
]
STATE = "**/console/api/state"


@pytest_asyncio.fixture(scope="module", loop_scope="package")
async def browser() -> AsyncIterator[Browser]:
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        await browser.close()


class Watched:
    """A page, and what it did besides showing itself."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.hosts: set[str] = set()
        self.complaints: list[str] = []
        page.on("request", lambda request: self.hosts.add(request.url.split("/")[2]))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("console", lambda said: self.complaints.append(said.text) if said.type == "error" else None)


@pytest_asyncio.fixture(loop_scope="package")
async def watched(browser: Browser, edge: Edge) -> AsyncIterator[Watched]:
    context = await browser.new_context(base_url=str(edge.http.base_url), viewport={"width": 1280, "height": 900})
    context.set_default_timeout(20_000)
    watched = Watched(await context.new_page())
    await watched.page.goto("/console")
    await expect(watched.page.locator("#router")).to_contain_text("ready", timeout=20_000)
    yield watched
    # A poll may be on its way through a test's own answer.
    await watched.page.unroute_all(behavior="ignoreErrors")
    await context.close()


async def picture(page: Page, name: str) -> None:
    """Kept for people to look at, where a folder is named for it."""
    if folder := os.environ.get("CONSOLE_PICTURES"):
        await page.screenshot(path=str(Path(folder) / f"{name}.png"), full_page=True)


async def test_it_shows_the_cluster_and_nothing_comes_from_elsewhere(watched: Watched, edge: Edge) -> None:
    page = watched.page
    await expect(page.locator("#topology")).to_contain_text("prefill-0")
    await expect(page.locator("#topology")).to_contain_text("decode-0")
    await expect(page.locator("#topology path.ready")).to_have_count(1)
    await expect(page.locator("#topology")).to_contain_text("GB/s")
    row = page.locator("#workers tr", has_text="decode-0").locator("td")
    assert (await row.all_text_contents())[:5] == ["decode-0", "decode", "ready", "0", "0"]
    await expect(page.locator("#figures li")).to_have_count(7)
    await expect(page.locator("#placing")).to_contain_text("Ways open: p_then_d. KV blocks known")
    assert watched.hosts == {str(edge.http.base_url).split("/")[2]}
    assert watched.complaints == []


async def test_a_router_that_cannot_change_its_cluster_shows_no_buttons(watched: Watched) -> None:
    async def unable(route: Route) -> None:
        await route.fulfill(json={**await (await route.fetch()).json(), "actions": []})

    await watched.page.route(STATE, unable)
    await watched.page.reload()
    await expect(watched.page.locator("#workers tr")).to_have_count(2)
    await expect(watched.page.locator("#workers button")).to_have_count(0)
    await expect(watched.page.locator("th.act")).to_be_hidden()


async def test_a_chat_shows_where_its_time_went(watched: Watched) -> None:
    page = watched.page
    await page.locator("#tokens").fill("12")
    await page.locator("#text").fill("Where is Paris?")
    await page.keyboard.press("Enter")
    facts = page.locator("#talk p.facts")
    await expect(facts).to_contain_text("first token after", timeout=20_000)
    await expect(facts).to_contain_text("12 tokens in")
    request_id = (await facts.inner_text()).rpartition("; ")[2]
    detail = page.locator(f'[id="request-{request_id}"] .detail')
    await expect(detail).to_contain_text("answer 12")
    strokes = await detail.locator("tbody tr td:first-child").all_text_contents()
    assert strokes == ["queue", "prefill", "hand-off", "decode"]
    workers = await detail.locator("tbody tr td:nth-child(4)").all_text_contents()
    assert workers == ["", "prefill-0", "", "decode-0"]
    assert watched.complaints == []
    await picture(page, "light")


async def test_the_keyboard_is_enough(watched: Watched, edge: Edge) -> None:
    assert (await edge.ask()).status_code == 200
    page = watched.page
    first = page.locator("#list button.row").first
    await expect(first).to_be_visible()
    await page.locator("#hold").focus()
    await page.keyboard.press("Space")
    await expect(page.locator("#hold")).to_have_attribute("aria-pressed", "true")
    await page.keyboard.press("Tab")
    await expect(first).to_be_focused()
    assert await first.get_attribute("aria-expanded") == "false"
    await page.keyboard.press("Enter")
    assert await first.get_attribute("aria-expanded") == "true"
    await expect(page.locator("#list li").first.locator(".detail")).to_be_visible()
    await expect(first).to_be_focused()


async def test_a_request_is_found_by_its_id_and_failures_are_told(watched: Watched, edge: Edge) -> None:
    page = watched.page

    async def failing(route: Route) -> None:
        state = await (await route.fetch()).json()
        state["trace_url"] = "http://127.0.0.1:16686/trace/"
        state["requests"] = [made_up("one", "FAILED"), made_up("two", "RUNNING")]
        await route.fulfill(json=state)

    await page.route(STATE, failing)
    await page.locator("#find").fill("one")
    await expect(page.locator("#list li")).to_have_count(1)
    await expect(page.locator("#list li .state")).to_have_text("failed")
    await page.locator("#list button.row").click()
    detail = page.locator("#list .detail")
    await expect(detail).to_contain_text("worker prefill-9 went away")
    link = detail.locator("a")
    assert await link.get_attribute("href") == "http://127.0.0.1:16686/trace/0af7651916cd43dd8448eb211c80319c"
    assert await detail.locator("tbody tr td:first-child").all_text_contents() == [
        *("place", "attempt 1", "queue", "prefill", "hand-off", "decode")
    ]
    await expect(page.locator("#list .slow")).to_have_text("decode 500 ms, 50%")
    await page.locator("#find").fill("")
    await page.locator("#filter").select_option("RUNNING")
    await expect(page.locator("#list .id")).to_have_text("two")
    await picture(page, "failed")


def made_up(name: str, state: str) -> dict[str, Any]:
    timeline = {
        "prefill_worker_id": "prefill-0",
        "decode_worker_id": "decode-0",
        "placed_ms": 110,
        "prefill_started_ms": 200,
        "prefill_finished_ms": 400,
        "first_token_ms": 400,
        "decode_started_ms": 500,
        "finished_ms": 1000,
        "decode_computed_tokens": 1,
        "transferred_tokens": 32,
        "transferred_bytes": "1048576",
        "attempts": 2,
    }
    workers = {"prefill_worker_id": "prefill-9", "decode_worker_id": ""}
    attempt = {"placed_ms": 10, "failed_ms": 100, "reason": "it died", **workers}
    return {
        "request_id": name,
        "state": f"REQUEST_STATE_{state}",
        "age_ms": 1000,
        "timeline": timeline,
        "prompt_tokens": 40,
        "completion_tokens": 6,
        "failure": "worker prefill-9 went away",
        "failed_attempts": [attempt],
        "trace_id": "0af7651916cd43dd8448eb211c80319c",
    }


async def test_buttons_are_there_when_the_router_can_and_use_the_admin_key(watched: Watched) -> None:
    page, sent = watched.page, []

    async def able(route: Route) -> None:
        await route.fulfill(json={**await (await route.fetch()).json(), "actions": ["Drain", "SetRole"]})

    async def act(route: Route) -> None:
        sent.append((route.request.url.rpartition("/")[2], route.request.headers, route.request.post_data))
        await route.fulfill(json={})

    await page.route(STATE, able)
    await page.route("**/console/api/actions/*", act)
    await page.locator("#keys-open").click()
    await page.locator("#admin-key").fill("secret")
    await page.keyboard.press("Enter")
    row = page.locator("#workers tr", has_text="decode-0")
    await row.locator("button", has_text="Drain").click()
    await expect(page.locator("#confirm-text")).to_contain_text("Drain decode-0?")
    await page.locator("#confirm button", has_text="No").click()
    await row.locator("button", has_text="Drain").click()
    await page.locator("#confirm button", has_text="Yes").click()
    await row.locator("select").select_option("prefill")
    await page.locator("#confirm button", has_text="Yes").click()
    await expect(page.locator("#confirm")).to_be_hidden()
    await page.wait_for_function("() => !document.querySelector('#confirm').open")
    assert [(name, json.loads(data)) for name, _, data in sent] == [
        ("Drain", {"worker_id": "decode-0"}),
        ("SetRole", {"worker_id": "decode-0", "role": "ROLE_PREFILL"}),
    ]
    assert {headers["authorization"] for _, headers, _ in sent} == {"Bearer secret"}


async def test_a_router_with_keys_is_asked_with_one(watched: Watched) -> None:
    page = watched.page

    async def locked(route: Route) -> None:
        if route.request.headers.get("authorization") == "Bearer k1":
            await route.continue_()
        else:
            await route.fulfill(status=401, json={"error": {"message": "a key is needed"}})

    await page.route(STATE, locked)
    await expect(page.locator("#keys")).to_be_visible()
    await page.locator("#api-key").fill("k1")
    await page.keyboard.press("Enter")
    await expect(page.locator("#router")).to_contain_text("ready")


async def test_dark_light_and_as_the_system_has_it(watched: Watched) -> None:
    page = watched.page
    paper = "() => getComputedStyle(document.body).backgroundColor"
    await page.emulate_media(color_scheme="dark")
    await expect(page.locator("html")).to_have_attribute("data-theme", "dark")
    dark = await page.evaluate(paper)
    await picture(page, "dark")
    await page.locator("#theme").click()
    assert await page.evaluate(paper) != dark
    await page.locator("#theme").click()
    assert await page.evaluate(paper) == dark
    await page.reload()
    await expect(page.locator("#theme")).to_have_text("Dark")


async def test_it_fits_a_phone(watched: Watched, edge: Edge) -> None:
    page = watched.page
    assert (await edge.ask(**body(max_tokens=4))).status_code == 200
    await page.set_viewport_size({"width": 360, "height": 740})
    await page.locator("#list button.row").first.click()
    await expect(page.locator("#list .detail").first).to_be_visible()
    await picture(page, "phone")
    assert await page.evaluate("() => document.documentElement.scrollWidth") <= 360
    for control in await page.locator("#ask button, .bar select, .bar input").all():
        size = await control.bounding_box()
        if size:
            assert size["height"] >= 36
