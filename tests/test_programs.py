"""The compiled programs: their matmuls' precision, their rows, their progress bar, and their cache on disk."""

import os
import subprocess
import sys
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

from fastgen_jax.batch import NUM_SETTINGS, Settings
from fastgen_jax.programs import ROW_COLUMNS, backbone, head, sampling_rows, shapes_of


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
