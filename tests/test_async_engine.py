"""`AsyncEngine`: many coroutines on one engine, each with its own tokens, ends and errors; and nobody ever hangs."""

import asyncio
import threading
import time
from collections.abc import Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest
from scripted import NUM_TOKENS, TOKENIZER, assert_idle, run, scripted_engine, tokens
from tiny import tiny_engine

from fastgen_jax import AsyncEngine, SamplingParams
from fastgen_jax.types import Delta, Response

TIMEOUT = 60
"""Seconds after which a test says that something hangs."""

ENDLESS = SamplingParams(max_tokens=None)
ANSWERS = {"short": tokens("a"), "text": tokens("one ", "né", "👍", " three"), "endless": tokens("x" * 240)}


def in_a_loop(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, TIMEOUT))


@asynccontextmanager
async def served(engine):
    front = AsyncEngine(engine)
    try:
        yield front
    finally:
        await front.close()


def slowed(engine, seconds: float = 0.002):
    """`engine` with steps that take time, so that what is done meanwhile comes in the middle of a request."""
    runner = vars(engine)["_runner"]
    script = runner.script

    def slow(seq, index):
        time.sleep(seconds)
        return script(seq, index)

    runner.script = slow
    return engine


async def is_idle(front: AsyncEngine) -> bool:
    stats = await front.stats()
    return stats.running == stats.waiting == 0 and stats.free_blocks == stats.blocks


async def joined(stream) -> str:
    return "".join([piece async for piece in stream])


def test_many_generates_and_streams_at_once_equal_the_sync_engine():
    engine = tiny_engine(TOKENIZER)
    prompts = [f"prompt {i} " * (1 + i % 3) for i in range(12)]
    params = [SamplingParams(max_tokens=4 + i, seed=i, temperature=i % 2, ignore_eos=True) for i in range(12)]
    expected = engine.generate(prompts, params)

    async def main():
        async with served(engine) as front:
            both = list(zip(prompts, params, strict=True))
            responses = asyncio.gather(*(front.generate(prompt, p) for prompt, p in both))
            texts = asyncio.gather(*(joined(front.stream(prompt, p)) for prompt, p in both))
            return await responses, await texts

    responses, texts = in_a_loop(main())
    assert [r.token_ids for r in responses] == [r.token_ids for r in expected]
    assert [r.text for r in responses] == texts == [r.text for r in expected]
    assert_idle(engine)


def test_n_samples_come_as_a_list_in_order_whoever_asks_for_them():
    def script(seq, index):
        return tokens("x")[0] if index < 5 - seq.seq_id % 3 else 2

    async def main():
        async with served(scripted_engine(script)) as front:
            asked = await front.generate("text", SamplingParams(n=3))
        async with served(scripted_engine(script, default_params={"n": 3})) as front:
            return asked, await front.generate("text")

    for responses in in_a_loop(main()):
        assert [(r.index, r.text) for r in responses] == [(0, "x" * 5), (1, "x" * 4), (2, "x" * 3)]


def test_chat_goes_through_the_template():
    engine = scripted_engine({"<|user|>hi<|assistant|>": tokens("hello")})

    async def main():
        async with served(engine) as front:
            return await front.chat([{"role": "user", "content": "hi"}])

    assert in_a_loop(main()).text == "hello"


@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlapped"])
@pytest.mark.parametrize("streamed", [False, True], ids=["generate", "stream"])
def test_cancelling_a_coroutine_aborts_its_request_and_no_other(streamed, overlap):
    engine = slowed(scripted_engine(ANSWERS, overlap=overlap))

    async def main():
        async with served(engine) as front:
            request = joined(front.stream("endless", ENDLESS)) if streamed else front.generate("endless", ENDLESS)
            doomed = asyncio.create_task(request)
            other = asyncio.create_task(front.generate("endless", ENDLESS))
            while (await front.stats()).generated_tokens < 10:
                await asyncio.sleep(0.001)
            doomed.cancel()
            with pytest.raises(asyncio.CancelledError):
                await doomed
            stats = await front.stats()
            assert (stats.running, stats.waiting) == (1, 0)
            assert (await other).text == "x" * 240
            assert await is_idle(front)

    in_a_loop(main())
    assert_idle(engine)


def test_cancelling_before_the_request_has_been_added_leaves_nothing():
    engine = scripted_engine(ANSWERS)

    async def main():
        async with served(engine) as front:
            task = asyncio.create_task(front.generate("endless", ENDLESS))
            await asyncio.sleep(0)  # it has asked for the request, and no more
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await is_idle(front)

    in_a_loop(main())


def test_leaving_a_stream_early_aborts_it():
    engine = slowed(scripted_engine(ANSWERS))

    async def main():
        async with served(engine) as front:
            async for piece in front.stream("endless", ENDLESS):
                assert piece == "x"
                break
            for _ in range(3):  # asyncio closes what an `async for` leaves in a task of its own
                await asyncio.sleep(0)
            assert await is_idle(front)

    in_a_loop(main())


def test_a_bad_request_raises_in_its_coroutine_only():
    engine = slowed(scripted_engine(ANSWERS))

    async def main():
        async with served(engine) as front:
            bad = [
                front.generate([NUM_TOKENS]),
                front.generate("x" * 300),
                front.generate(None),
                joined(front.stream("text", SamplingParams(n=2))),
            ]
            good = [front.generate("text"), joined(front.stream("text")), front.generate("short")]
            results = await asyncio.gather(*bad, *good, return_exceptions=True)
            assert await is_idle(front)
            return results[: len(bad)], results[len(bad) :]

    errors, (response, text, short) = in_a_loop(main())
    assert [type(error) for error in errors] == [ValueError, ValueError, TypeError, ValueError]
    assert response.text == text == "one né👍 three"
    assert short.text == "a"


def test_when_the_engine_dies_every_waiter_gets_an_error_and_later_calls_raise_at_once():
    engine = slowed(scripted_engine(ANSWERS))

    async def main():
        front = AsyncEngine(engine)
        waiters = [asyncio.create_task(front.generate("endless", ENDLESS)) for _ in range(3)]
        waiters.append(asyncio.create_task(joined(front.stream("endless", ENDLESS))))
        while (await front.stats()).generated_tokens < 10:
            await asyncio.sleep(0.001)
        vars(engine)["_runner"].broken["dispatch"] = OSError("the device is gone")
        for error in await asyncio.gather(*waiters, return_exceptions=True):
            assert isinstance(error, RuntimeError)
            assert str(error) == "the engine stopped while this request was running"
            assert isinstance(error.__cause__, OSError)
        for call in (front.generate("text"), joined(front.stream("text")), front.stats()):
            with pytest.raises(RuntimeError, match=r"the engine stopped: OSError\(.*the device is gone"):
                await call
        await front.close()

    in_a_loop(main())
    assert_idle(engine)


def test_close_ends_what_runs_and_what_comes_later_and_may_be_called_twice():
    engine = slowed(scripted_engine(ANSWERS))

    async def main():
        front = AsyncEngine(engine)
        waiters = [asyncio.create_task(front.generate("endless", ENDLESS)) for _ in range(3)]
        while (await front.stats()).running < 3:
            await asyncio.sleep(0.001)
        await front.close()
        for error in await asyncio.gather(*waiters, return_exceptions=True):
            assert isinstance(error, RuntimeError)
            assert str(error.__cause__) == "the engine was closed"
        with pytest.raises(RuntimeError, match="the engine is closed"):
            await front.generate("text")
        await front.close()
        assert not vars(front)["_thread"].is_alive()

    in_a_loop(main())
    assert_idle(engine)
    assert run(engine) == {}
    assert engine.generate("text")[0].text == "one né👍 three"


def test_two_event_loops_one_after_another():
    engine = slowed(scripted_engine(ANSWERS))
    front = AsyncEngine(engine)

    async def leave_one_running():
        task = asyncio.create_task(front.generate("endless", ENDLESS))
        response = await front.generate("text")
        assert not task.done()
        return response.text  # asyncio.run cancels the task

    async def second():
        text = await joined(front.stream("text"))
        assert await is_idle(front)
        await front.close()
        return text

    assert in_a_loop(leave_one_running()) == "one né👍 three"
    assert in_a_loop(second()) == "one né👍 three"


def test_an_idle_engine_takes_no_cpu_time():
    engine = scripted_engine(ANSWERS)

    async def main():
        async with served(engine) as front:
            await front.generate("text")
            before = time.process_time()  # of all threads
            await asyncio.sleep(0.3)
            return time.process_time() - before

    assert in_a_loop(main()) < 0.05


def test_requests_run_on_the_engines_thread_while_the_event_loop_goes_on():
    threads = set()

    def script(seq, index):
        threads.add(threading.current_thread().name)
        time.sleep(0.01)
        return tokens("x")[0]

    async def main():
        async with served(scripted_engine(script)) as front:
            task = asyncio.create_task(front.generate("text", SamplingParams(max_tokens=20)))
            num_turns = 0
            while not task.done():
                await asyncio.sleep(0.001)
                num_turns += 1
            return num_turns

    assert in_a_loop(main()) > 20
    assert threads == {"fastgen-engine"}


# Events: what `generate` and `stream` are made of


def joined_deltas(items) -> str:
    return "".join(item.text for item in items if isinstance(item, Delta))


@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlapped"])
def test_events_begin_with_an_empty_list_and_bring_every_delta_and_response(overlap):
    engine = slowed(scripted_engine(ANSWERS, overlap=overlap))

    async def main():
        async with served(engine) as front:
            return [batch async for batch in front.events("text", SamplingParams(n=2))]

    first, *rest = in_a_loop(main())
    assert first == []
    assert all(rest)
    items = [item for batch in rest for item in batch]
    for index in range(2):
        *deltas, response = [item for item in items if item.index == index]
        assert isinstance(response, Response)
        assert joined_deltas(deltas) == response.text == "one né👍 three"
        assert tuple(i for delta in deltas for i in delta.token_ids) == response.token_ids


def test_a_request_is_aborted_by_the_id_that_on_added_gave():
    engine = slowed(scripted_engine(ANSWERS))

    async def main():
        async with served(engine) as front:
            added, items = [], []
            async for batch in front.events("endless", ENDLESS, on_added=added.append):
                items += batch
                if len(items) == 5:
                    were_live = [await front.abort(added[0]), await front.abort(added[0]), await front.abort(999)]
            return items, were_live

    items, were_live = in_a_loop(main())
    assert were_live == [True, False, False]
    assert items[-1].finish_reason == "abort"
    assert joined_deltas(items) == items[-1].text
    assert 5 <= len(items[-1].token_ids) < 240


@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlapped"])
def test_cancelled_at_any_point_a_request_leaves_nothing(overlap):
    engine = scripted_engine(ANSWERS, overlap=overlap)

    async def consume(front):
        async for _ in front.events("endless", ENDLESS):
            pass

    async def main():
        async with served(engine) as front:
            for num_turns in range(60):
                task = asyncio.create_task(consume(front))
                for _ in range(num_turns):
                    await asyncio.sleep(0)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                assert await is_idle(front)
            assert (await front.generate("text")).text == "one né👍 three"

    in_a_loop(main())
    assert_idle(engine)


def test_text_is_tokenised_beside_the_steps_and_the_event_loop(monkeypatch):
    engine = slowed(scripted_engine(ANSWERS))
    threads, steps = [], []
    encode = engine.reader.encode

    def slow_encode(prompt):
        if prompt == "text":
            threads.append(threading.current_thread())
            steps.append(engine.stats().steps)
            time.sleep(0.2)
            steps.append(engine.stats().steps)
        return encode(prompt)

    monkeypatch.setattr(engine.reader, "encode", slow_encode)

    async def main():
        async with served(engine) as front:
            other = asyncio.create_task(front.generate("endless", ENDLESS))
            task = asyncio.create_task(front.generate("text"))
            num_turns = 0
            while not task.done():
                await asyncio.sleep(0.001)
                num_turns += 1
            other.cancel()
            return task.result().text, num_turns

    text, num_turns = in_a_loop(main())
    assert text == "one né👍 three"
    assert num_turns > 20
    assert steps[1] - steps[0] > 5
    assert threads[0] is not threading.main_thread() and threads[0].name != "fastgen-engine"


def test_every_step_is_told_with_its_time():
    told = []

    async def main():
        front = AsyncEngine(slowed(scripted_engine(ANSWERS)), on_step=told.append)
        await front.generate("text")
        steps = (await front.stats()).steps
        await front.close()
        return steps

    steps = in_a_loop(main())
    assert steps <= len(told) <= steps + 2  # the overlapped loop's last one dispatches nothing
    assert max(told) >= 0.002


def test_a_failure_is_told_once_and_a_close_is_none():
    engine = slowed(scripted_engine(ANSWERS))
    failures = []

    async def main():
        front = AsyncEngine(engine, on_failure=failures.append)
        assert not front.is_stopped
        vars(engine)["_runner"].broken["dispatch"] = OSError("the device is gone")
        with pytest.raises(RuntimeError):
            await front.generate("text")
        assert front.is_stopped
        await front.close()

        closed = AsyncEngine(scripted_engine(ANSWERS), on_failure=failures.append)
        await closed.close()
        assert closed.is_stopped

    in_a_loop(main())
    assert [str(error) for error in failures] == ["the device is gone"]
