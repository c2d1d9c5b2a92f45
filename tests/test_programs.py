"""The compiled programs: their matmuls' precision, their rows, their progress bar, and their cache on disk."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.lax import Precision
from tiny import tiny_engine

from fastgen_jax import SamplingParams
from fastgen_jax.batch import NUM_SETTINGS, Settings
from fastgen_jax.programs import PROGRAMS, ROW_COLUMNS, backbone, head, sampling_rows, shapes_of


def precisions(jaxpr: Jaxpr) -> Iterator[tuple | None]:
    """Of every matmul, those inside loops and calls too."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            yield eqn.params["precision"]
        for value in eqn.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                if isinstance(inner, ClosedJaxpr | Jaxpr):
                    yield from precisions(getattr(inner, "jaxpr", inner))


TRUE_FLOAT32 = (Precision.HIGHEST, Precision.HIGHEST)


@pytest.mark.parametrize(
    ("backend", "dtype", "precision"),
    [("xla", "float32", TRUE_FLOAT32), ("reference", "float32", TRUE_FLOAT32), ("xla", "bfloat16", None)],
)
def test_a_float32_model_multiplies_in_true_float32(backend, dtype, precision):
    """A GPU's default for float32 is TF32."""
    runner = tiny_engine(backend=backend)._runner
    layout = runner.programs.layout

    def cast(tree):
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, dtype if x.dtype == jnp.float32 else x.dtype), shapes_of(tree)
        )

    params, pool, state = cast(runner.params), cast(runner.kv_pool), shapes_of(runner.state)
    buffer = jax.ShapeDtypeStruct((layout.buffer_size(16),), jnp.int32)
    steps = jax.make_jaxpr(partial(backbone, runner.model, layout, 16))(params, pool, state.token_pool, buffer)
    last = jax.ShapeDtypeStruct((8, runner.model.config.embed_dim), dtype)
    rows = jax.ShapeDtypeStruct((8, ROW_COLUMNS), jnp.int32)
    logits = jax.make_jaxpr(partial(head, runner.model, True, 8))(
        cast(runner.model.head_params(params)), state, last, rows
    )
    found = [*precisions(steps.jaxpr), *precisions(logits.jaxpr)]
    assert len(found) >= 2 * (4 + 2) + 1  # two layers of four projections and q k, p v; the logits
    assert set(found) == {precision}


def test_rows_arrive_as_they_were_packed_and_those_that_do_not_sample_ask_for_nothing():
    settings = Settings(5, 3, 7, 2**32 - 1, 2**31, 1, 0, 0.7, 0.9, 0.05, 1.2, -0.5, 1.5)
    row = [4, 9, 1, *settings.to_row().tolist()]
    rows, samples = sampling_rows(jnp.array([row, [4, 9, 0, *row[3:]], [0] * (3 + NUM_SETTINGS)], jnp.int32))
    assert samples.tolist() == [True, False, False]
    assert rows.seed[0].tolist() == [2**31, 2**32 - 1]
    for name in ("num_prompt_tokens", "min_tokens", "top_k"):
        assert getattr(rows, name)[0] == getattr(settings, name)
    for name in Settings._fields[Settings._fields.index("temperature") :]:
        np.testing.assert_array_equal(getattr(rows, name)[0], np.float32(getattr(settings, name)))
        assert set(getattr(rows, name)[1:].tolist()) == {getattr(Settings(), name)}
    assert rows.has_bias.tolist() == [True, False, False]


def test_warm_up_builds_every_program_and_says_how_far_it_is(capsys):
    engine = tiny_engine(warm_up=True, show_progress=True)
    num_programs = len(list(engine._runner.programs.keys()))
    assert engine.stats().compiled == num_programs
    assert f"{num_programs}/{num_programs} programs" in capsys.readouterr().err


class StandIn:
    """A lowered program whose compiling is `compile`."""

    def __init__(self, compile):
        self.compile, self.traced_by = compile, threading.get_ident()


def test_several_programs_compile_at_once_each_traced_by_the_caller(monkeypatch):
    """A thread of its own would trace without the caller's `jax.default_matmul_precision` and the like."""
    programs = tiny_engine()._runner.programs
    keys, met = list(programs.keys())[:4], threading.Barrier(2)
    lowered, told = [], []

    def compile():
        met.wait(timeout=60)
        return "compiled"

    def lower(*key):
        lowered.append(StandIn(compile))
        return lowered[-1]

    monkeypatch.setattr("os.cpu_count", lambda: 2)
    monkeypatch.setattr(programs, "lower", lower)
    assert set(programs.compile_all(keys, told.append)) == set(keys)
    assert {each.traced_by for each in lowered} == {threading.get_ident()}
    assert [programs.get(*key) for key in keys] == ["compiled"] * 4
    assert programs.num_compiled == 4
    assert programs.compile_all(keys, told.append) == {}  # they are there
    assert (told, len(lowered)) == ([1] * 8, 4)


def test_a_program_that_does_not_compile_ends_the_warm_up_with_its_error(monkeypatch):
    programs = tiny_engine()._runner.programs
    begun = []

    def compile():
        begun.append(1)
        if len(begun) == 2:
            raise MemoryError("out of memory")
        time.sleep(0.05)

    monkeypatch.setattr("os.cpu_count", lambda: 1)
    monkeypatch.setattr(programs, "lower", lambda *key: StandIn(compile))
    with pytest.raises(MemoryError, match="out of memory"):
        programs.compile_all(programs.keys())
    assert len(begun) < len(list(programs.keys()))
    assert programs.num_compiled == 1  # what was done is kept


def test_without_a_warm_up_a_step_compiles_what_it_and_the_decode_after_it_need():
    engine = tiny_engine(max_num_batched_tokens=32)
    programs = engine._runner.programs
    engine.add([5] * 20, SamplingParams(max_tokens=4, ignore_eos=True))
    engine.step()
    assert set(programs._compiled) == {("backbone", 32), ("backbone", 1), ("sample", 1)}
    for _ in range(3):
        engine.add([5] * 5, SamplingParams(max_tokens=4, ignore_eos=True))
    engine.step()  # the decode and three prompts
    assert set(programs._compiled) >= {("backbone", 16), ("backbone", 4), ("sample", 4)}
    assert programs.num_compiled == 6
    while engine.has_work:
        engine.step()
    assert programs.num_compiled == 6


class Told:
    """A group of two, the other of which only hears what it is told."""

    leads = True

    def __init__(self):
        self.orders = []

    def tell(self, order):
        self.orders.append((order.kind, *order.numbers))

    def least(self, number):
        return number


def test_processes_that_share_a_model_compile_in_one_order(monkeypatch):
    """Of two that compiled several programs at once, each could wait for what the other has not begun."""
    group = Told()
    monkeypatch.setattr("fastgen_jax.programs.in_threads", None)
    engine = tiny_engine(group=group, warm_up=True)
    keys = list(engine._runner.programs.keys())
    assert group.orders[-len(keys) :] == [("compile", PROGRAMS.index(name), bucket) for name, bucket in keys]
    lazy = tiny_engine(group=group)
    lazy.generate([[5, 6]], SamplingParams(max_tokens=3))
    assert lazy.stats().compiled > 0


COUNT_CACHE_EVENTS = """
import jax
from tiny import tiny_engine

events = []
jax.monitoring.register_event_listener(lambda event, **_: events.append(event.rpartition("/")[2]))
tiny_engine(warm_up=True)
print(events.count("cache_hits"), events.count("cache_misses"))
"""


@pytest.mark.slow
def test_the_second_start_compiles_nothing(tmp_path):
    """Without any setting of the user's, and small programs too, are kept on disk."""
    env = {name: value for name, value in os.environ.items() if "CACHE" not in name}
    env |= {"XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": str(Path(__file__).parent)}

    def start() -> tuple[int, int]:
        command = [sys.executable, "-c", COUNT_CACHE_EVENTS]
        run = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
        hits, misses = map(int, run.stdout.split())
        return hits, misses

    hits, misses = start()
    assert misses > 0
    assert start() == (hits + misses, 0)
    assert list((tmp_path / "fastgen_jax" / "xla").iterdir())
