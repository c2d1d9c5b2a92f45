"""The page in Chromium, over a whole server whose engine speaks a script at a device's pace."""

import asyncio
import contextlib
import dataclasses
import os
import random
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from playwright.async_api import Browser, Page, async_playwright, expect
from scripted import TOKENIZER, ScriptedRunner, ScriptedStep, scripted_engine, tokens
from serving import Served, run, served

from fastgen_jax.engine import Engine
from fastgen_jax.scheduler import Sequence

PICTURES = Path(__file__).parent.parent.parent / "build" / "page"

STORY = tokens("Long prompts come in chunks, answers come token by token, and each step is filled to its budget. " * 3)
CHAT = tokens("Good morning.")
MARKUP = "<img src=x onerror=document.title='hacked'><b>bold</b>"

expect.set_options(timeout=20_000)


# A server, a browser and what is between them


class PacedRunner(ScriptedRunner):
    """Takes a device's time for a step, and pads to a power of two of at least 8 tokens."""

    def dispatch(self, plan: Any, *args: Any, **options: Any) -> ScriptedStep:
        num_tokens = sum(row.num_new_tokens for row in plan.rows)
        bucket = max(8, 1 << (num_tokens - 1).bit_length())
        time.sleep(0.008 + 0.0002 * bucket)
        return dataclasses.replace(super().dispatch(plan, *args, **options), num_padding=bucket - num_tokens)


def paced_engine() -> Engine:
    def script(seq: Sequence, index: int) -> int:
        prompt = TOKENIZER.decode(seq.prompt_token_ids, skip_special_tokens=False)
        answer = CHAT if prompt.startswith("<|user|>") else tokens(MARKUP) if prompt == "markup" else STORY
        return answer[index] if index < len(answer) else TOKENIZER.eos_token_id

    engine = scripted_engine(script, max_num_batched_tokens=64, max_num_seqs=16, num_blocks=128)
    vars(engine)["_runner"] = PacedRunner(script)
    return engine


@contextlib.asynccontextmanager
async def browser() -> AsyncIterator[Browser]:
    path = os.environ.get("CHROMIUM")
    assert path, "CHROMIUM names no browser; run `make test-page`"
    async with async_playwright() as playwright:
        chromium = await playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        try:
            yield chromium
        finally:
            await chromium.close()


@contextlib.asynccontextmanager
async def opened(url: str, **options: Any) -> AsyncIterator[Page]:
    """The page in a tab, which may complain of nothing but a connection that is gone."""
    async with browser() as chromium:
        page = await chromium.new_page(**options)
        complaints: list[str] = []
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda said: complaints.append(said.text) if said.type == "error" else None)
        await page.goto(url)
        yield page
        assert [text for text in complaints if "Failed to load resource" not in text] == []


class Cable:
    """A port that leads to another one until it is cut."""

    def __init__(self, port: int) -> None:
        self._to, self.port = port, 0
        self._writers: list[asyncio.StreamWriter] = []

    async def plug(self) -> None:
        self._server = await asyncio.start_server(self._connect, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def cut(self) -> None:
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._to)
        self._writers += [writer, far_writer]
        await asyncio.gather(self._copy(reader, far_writer), self._copy(far_reader, writer))

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        writer.close()


@contextlib.asynccontextmanager
async def traffic(server: Served, headers: dict[str, str] | None = None) -> AsyncIterator[None]:
    """Others who ask too, nine times a second: half of them begin as another one did."""
    rng = random.Random(0)

    async def ask(client: httpx2.AsyncClient) -> None:
        prompt = "Once upon a time, " * rng.randint(0, 3) + "".join(rng.choices("abcdefgh ", k=rng.randint(10, 150)))
        await client.post("/v1/completions", json={"prompt": prompt, "max_tokens": rng.randint(20, 45)})

    async def arrive() -> None:
        async with httpx2.AsyncClient(base_url=server.url, timeout=60) as client, asyncio.TaskGroup() as group:
            while True:
                group.create_task(ask(client))
                await asyncio.sleep(rng.expovariate(9))

    arrivals = asyncio.create_task(arrive())
    try:
        yield
    finally:
        arrivals.cancel()
        await asyncio.gather(arrivals, return_exceptions=True)


async def is_live(page: Page) -> None:
    await expect(page.locator("#status")).to_have_text("Live")


async def length(page: Page, more_than: int) -> int:
    """Of the answer, once it is longer than so many characters."""
    words = "(least) => { const n = document.getElementById('text').textContent.length; return n > least ? n : 0; }"
    return await (await page.wait_for_function(words, arg=more_than)).json_value()


async def last_step(page: Page) -> int:
    return int(await page.locator("#steps-chart").get_attribute("data-last-step") or 0)


async def more_steps_than(page: Page, number: int) -> None:
    """Wait until the chart shows a step after that one."""
    await page.wait_for_function(
        "(number) => document.getElementById('steps-chart').dataset.lastStep > number", arg=number
    )


async def pixels(page: Page, colour: str) -> int:
    """How many pixels of the chart of steps have a colour of the page's own."""
    return await page.evaluate(
        """(name) => {
            const canvas = document.getElementById("steps-chart"), pen = canvas.getContext("2d");
            const probe = document.createElement("canvas").getContext("2d");
            probe.fillStyle = getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
            probe.fillRect(0, 0, 1, 1);
            const wanted = new Uint32Array(probe.getImageData(0, 0, 1, 1).data.buffer)[0];
            const all = new Uint32Array(pen.getImageData(0, 0, canvas.width, canvas.height).data.buffer);
            return all.filter((pixel) => pixel === wanted).length;
        }""",
        colour,
    )


# What it does


def test_an_answer_streams_in_and_the_bars_move():
    async def main() -> None:
        async with served([paced_engine()]) as server, opened(server.url) as page:
            await is_live(page)
            await expect(page.locator("#models")).to_have_text("tiny")
            parts = ("decode", "prompt", "padding")
            assert [await pixels(page, part) for part in parts] == [0, 0, 0]
            await page.get_by_label("Prompt", exact=True).fill("Once upon a time")
            await page.get_by_label("Max tokens").fill("200")
            await page.get_by_role("button", name="Send").click()
            few = await length(page, 0)
            more = await length(page, few)
            await expect(page.get_by_role("button", name="Stop")).to_be_enabled()
            assert 0 < few < more < 200
            steps = await last_step(page)
            bars = await pixels(page, "decode")
            await expect(page.locator("#told")).to_contain_text("200 tokens")
            await expect(page.locator("#told")).to_contain_text("ended at max tokens")
            assert await page.locator("#answer").text_content() == "Once upon a time" + TOKENIZER.decode(STORY[:200])
            await more_steps_than(page, max(steps, 150))
            assert all([await pixels(page, part) > 0 for part in parts])
            assert await pixels(page, "decode") > bars
            for figure in ("#ttft-note", "#gaps-note"):
                await expect(page.locator(figure)).to_contain_text("median")

    run(main())


def test_a_chat():
    async def main() -> None:
        async with served([paced_engine()]) as server, opened(server.url) as page:
            await page.get_by_label("Chat").check()
            await page.get_by_label("Prompt", exact=True).fill("Hi")
            await page.get_by_label("Prompt", exact=True).press("Control+Enter")
            await expect(page.locator("#answer")).to_have_text("Good morning.")
            await expect(page.locator("#told")).to_contain_text("ended by itself")

    run(main())


def test_stop_aborts_the_request():
    async def main() -> None:
        async with served([paced_engine()]) as server, opened(server.url) as page:
            await page.get_by_label("Prompt", exact=True).fill("Once")
            await page.get_by_label("Max tokens").fill("240")
            await page.get_by_role("button", name="Send").click()
            await length(page, 0)
            await page.get_by_role("button", name="Stop").click()
            await expect(page.locator("#told")).to_have_text("Stopped")
            await expect(page.get_by_role("button", name="Send")).to_be_enabled()
            while server.replicas[0].stats(0)[0].running:
                await asyncio.sleep(0.05)
            assert server.replicas[0].stats(0)[0].generated_tokens < 240
            assert b'request_aborted_total{model_name="tiny"} 1.0' in server.router.metrics.text()

    run(main())


def test_a_request_that_is_refused_says_why():
    async def main() -> None:
        async with served([paced_engine()]) as server, opened(server.url) as page:
            await page.get_by_label("Prompt", exact=True).fill("x" * 300)
            await page.get_by_role("button", name="Send").click()
            await expect(page.locator("#told[data-error]")).to_contain_text("300")
            await expect(page.get_by_role("button", name="Send")).to_be_enabled()

    run(main())


def test_text_stays_text():
    async def main() -> None:
        async with served([paced_engine()], models=[MARKUP]) as server, opened(server.url) as page:
            await expect(page.locator("#models")).to_have_text(MARKUP)
            await expect(page.locator("#rows tr td:nth-child(2)")).to_have_text(MARKUP)
            await page.get_by_label("Prompt", exact=True).fill("markup")
            await page.get_by_role("button", name="Send").click()
            await expect(page.locator("#text")).to_have_text(MARKUP)
            assert await page.locator("img, b:has-text('bold')").count() == 0
            assert await page.title() == "fastgen-jax"

    run(main())


def test_it_asks_for_the_key_and_keeps_it_for_the_tab():
    async def main() -> None:
        async with served([paced_engine()], app={"api_keys": ["sesame"]}) as server, opened(server.url) as page:
            dialog = page.get_by_role("dialog", name="API key")
            await expect(dialog).to_be_visible()
            await expect(page.locator("#status")).to_have_text("API key needed")
            await dialog.get_by_label("Key", exact=True).fill("wrong")
            await dialog.get_by_role("button", name="Use this key").click()
            await expect(dialog.get_by_role("alert")).to_have_text("The server refused that key.")
            await dialog.get_by_label("Key", exact=True).fill("sesame")
            await dialog.get_by_label("Key", exact=True).press("Enter")
            await expect(dialog).to_be_hidden()
            await is_live(page)
            await page.reload()
            await is_live(page)
            await page.get_by_label("Chat").check()
            await page.get_by_label("Prompt", exact=True).fill("Hi")
            await page.get_by_role("button", name="Send").click()
            await expect(page.locator("#answer")).to_have_text("Good morning.")
            assert "sesame" not in await page.content() + page.url
            assert await page.evaluate("localStorage.length + document.cookie.length") == 0

    run(main())


def test_a_server_that_is_gone_and_comes_back():
    async def main() -> None:
        async with served([paced_engine()]) as server:
            cable = Cable(int(server.url.rpartition(":")[2]))
            await cable.plug()
            async with opened(f"http://127.0.0.1:{cable.port}") as page:
                await is_live(page)
                await page.get_by_label("Prompt", exact=True).fill("Once")
                await page.get_by_label("Max tokens").fill("240")
                await page.get_by_role("button", name="Send").click()
                await length(page, 0)
                await cable.cut()
                await expect(page.locator("#status")).to_have_text("Connection lost")
                await expect(page.locator("#told")).to_have_text("The connection was lost before the end.")
                await cable.plug()
                await is_live(page)
                last = server.router.fleet.replicas[0].steps[-1].number
                await expect(page.locator("#steps-chart")).to_have_attribute("data-last-step", str(last))
                numbers = await page.evaluate("[...replicas.values()][0].steps.map((step) => step.number)")
                assert numbers == list(range(1, last + 1))

    run(main())


def test_a_server_that_ends_the_events_now_and_then_is_not_lost():
    async def main() -> None:
        async with served([paced_engine()], app={"page_s": 1.0}) as server, opened(server.url) as page:
            await is_live(page)
            await page.evaluate(
                """() => {
                    window.states = [];
                    const look = () => window.states.push(document.getElementById("status").textContent);
                    const all = {subtree: true, childList: true, attributes: true};
                    new MutationObserver(look).observe(document.body, all);
                }"""
            )
            for _ in range(2):
                await page.wait_for_event("request", lambda request: request.url.endswith("/events"))
            await page.get_by_label("Prompt", exact=True).fill("Once")
            await page.get_by_role("button", name="Send").click()
            await expect(page.locator("#told")).to_contain_text("128 tokens")
            assert set(await page.evaluate("window.states")) == {"Live"}

    run(main())


def test_a_server_that_drains():
    async def main() -> None:
        async with served([paced_engine()]) as server, opened(server.url) as page:
            await is_live(page)
            await server.router.drain()
            await expect(page.locator("#status")).to_have_text("Shutting down")

    run(main())


def test_a_replica_of_several_can_be_chosen():
    async def main() -> None:
        engines = [paced_engine(), paced_engine()]
        async with served(engines, classes=["interactive", "batch"]) as server, opened(server.url) as page:
            await expect(page.locator("#rows tr")).to_have_count(2)
            await expect(page.locator("#rows tr td:nth-child(3)")).to_have_text(["interactive", "batch"])
            await page.get_by_label("Prompt", exact=True).fill("Once")
            await page.get_by_role("button", name="Send").click()
            await expect(page.locator("#told")).to_contain_text("128 tokens")
            await expect(page.locator("#steps-chart")).not_to_have_attribute("data-last-step", "0")
            await page.get_by_label("Replica whose steps are shown").select_option(index=1)
            await expect(page.locator("#steps-chart")).to_have_attribute("data-last-step", "0")

    run(main())


def test_the_step_under_the_pointer_is_told_and_bars_can_fill_the_chart():
    async def main() -> None:
        async with served([paced_engine()]) as server, opened(server.url) as page:
            await page.get_by_label("Prompt", exact=True).fill("Once")
            await page.get_by_role("button", name="Send").click()
            await expect(page.locator("#told")).to_contain_text("128 tokens")
            last = server.router.fleet.replicas[0].steps[-1].number
            await expect(page.locator("#which-step")).to_contain_text(f"step {last} took")
            chart, bars = page.locator("#steps-chart"), await pixels(page, "decode")
            width = await chart.evaluate("(canvas) => canvas.clientWidth")
            await chart.hover(position={"x": width - 6 - 10 * 3 - 1, "y": 40})
            await expect(page.locator("#which-step")).to_contain_text(f"step {last - 10} took")
            await expect(page.locator("#step-decode")).to_have_text("1")
            await expect(page.locator("#step-padding")).to_have_text("7")
            await page.get_by_label("Fit").check()
            await expect(page.locator("#which-step")).to_contain_text(f"step {last} took")
            assert await pixels(page, "decode") > 3 * bars

    run(main())


# How it looks


NAMELESS = """() => [...document.querySelectorAll(
    "input, select, textarea, button, canvas, section, form, table, dialog")]
    .filter((e) => !e.labels?.length && !e.ariaLabel && !e.textContent.trim()
        && !document.getElementById(e.getAttribute("aria-labelledby"))?.textContent.trim())
    .map((e) => e.outerHTML)"""

SHIFTS = """() => new Promise((resolve) => {
    const told = ({node, previousRect: from, currentRect: to}) =>
        `${node?.nodeName} ${node?.id}: ${[from, to].map((at) => [at.x, at.y, at.width, at.height])}`;
    const all = (list) => resolve(list.getEntries().flatMap((entry) => entry.sources.map(told)));
    new PerformanceObserver(all).observe({type: "layout-shift", buffered: true});
    setTimeout(() => resolve([]), 500);
})"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name, width, height, scale", [("desktop", 1280, 900, 1), ("phone", 375, 812, 2)])
def test_the_pictures(name, width, height, scale, scheme):
    """Saves them for people to look at, too."""

    async def main() -> None:
        view = {"viewport": {"width": width, "height": height}, "device_scale_factor": scale, "color_scheme": scheme}
        async with served([paced_engine()]) as server, traffic(server), opened(server.url, **view) as page:
            await is_live(page)
            await page.reload()  # a new tab's first page may be laid out before the tab has its size
            await is_live(page)
            await page.get_by_label("Prompt", exact=True).fill("What does a step do?")
            await page.get_by_role("button", name="Send").click()
            await more_steps_than(page, 300)
            await expect(page.locator("#told")).to_contain_text("128 tokens")
            PICTURES.mkdir(parents=True, exist_ok=True)
            await page.screenshot(path=PICTURES / f"{name}-{scheme}.png")
            await page.screenshot(path=PICTURES / f"{name}-{scheme}-whole.png", full_page=True)
            assert await page.evaluate("document.documentElement.scrollWidth") == width
            assert await page.evaluate(NAMELESS) == []
            assert await page.evaluate(SHIFTS) == []

    run(main())
