"""Stage `engine`: a whole Llama with random weights: its steps, its programs, and what overlap and unrolling bring."""

import dataclasses
import random
import tempfile
import time
from collections.abc import Callable
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from fastgen_jax import Engine, SamplingParams, kernels, models
from fastgen_jax.bench.device.record import Stage, one_line
from fastgen_jax.bench.device.sizes import Sizes
from fastgen_jax.bench.device.timing import random_array, seconds_per_call
from fastgen_jax.checkpoint.config_only import read_config
from fastgen_jax.models.layers import Params
from fastgen_jax.sizing import leaves, num_bytes, num_elements, shapes
from fastgen_jax.step_times import Steps

DTYPE = "bfloat16"
STEPS_AT_ONCE = 16
FEW_TOKENS = 16  # of the matmuls of a decode step


class Session:
    """What the engine's stages share: the model, its weights, and the engine once it is there."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        hf_config = read_config(sizes.model) if isinstance(sizes.model, str) else sizes.model
        family = models.family(hf_config["model_type"])
        self.config = family.from_hf(hf_config)
        heads = {name: getattr(self.config, name) for name in ("head_dim", "num_heads", "num_kv_heads")}
        self.model = family.Model(self.config, kernels.choose_backend(**heads, dtype=DTYPE))
        # Any backend has the same parameters, and this one takes the float32 that they are initialised in.
        self._shapes = shapes(family.Model(self.config, kernels.get_backend("xla")), DTYPE, {})

    @cached_property
    def params(self) -> Params:
        """Random, drawn on the device leaf by leaf; norms are ones."""
        leaves, tree = jax.tree.flatten(self._shapes)
        drawn = [
            jnp.ones(leaf.shape, DTYPE) if leaf.ndim == 1 else random_array(seed, leaf.shape, 0.02)
            for seed, leaf in enumerate(leaves)
        ]
        return jax.tree.unflatten(tree, drawn)

    def new_engine(self, budget: int, num_blocks: int) -> Engine:
        """An engine with a step's budget of tokens, none of its programs compiled."""
        return Engine(
            self.model,
            self.params,
            warm_up=False,
            compile_cache=False,
            show_progress=False,
            max_num_batched_tokens=budget,
            max_num_seqs=self.sizes.max_num_seqs,
            max_model_len=self.sizes.max_model_len,
            num_blocks=num_blocks,
        )

    @cached_property
    def engine(self) -> Engine:
        return self.new_engine(self.sizes.budget, self.sizes.num_blocks)

    @property
    def runner(self) -> Any:
        """The engine's own: its steps and its programs are what is measured."""
        return self.engine._runner

    def prompt(self, num_tokens: int) -> list[int]:
        rng = random.Random(num_tokens)
        return [rng.randrange(self.config.vocab_size) for _ in range(num_tokens)]


def compile_programs(engine: Engine, keys: list[tuple[str, int]]) -> tuple[dict[str, float], float]:
    """Compile, several at once; "name bucket" -> seconds of each, and seconds of all."""
    start = time.perf_counter()
    seconds = engine._runner.programs.compile_all(keys)
    return {f"{name} {bucket}": taken for (name, bucket), taken in seconds.items()}, _since(start)


def measure(stage: Stage, session: Session) -> None:
    """Rows `weights`, `step`, `compile`, `generate`, `layers` and `command buffers`."""
    sizes = session.sizes
    start = time.perf_counter()
    jax.block_until_ready(session.params)
    stage.add(of="weights", bytes=num_bytes(session.params), step_bytes=read_bytes(session), seconds=_since(start))

    programs, steps = session.runner.programs, Steps(session.runner)
    few, *more = sizes.decode_rows
    # A decode of few is what is most wanted: it is measured as soon as its own programs are there.
    smallest = [("backbone", programs.buckets[0]), ("sample", programs.row_buckets[0])]
    each, compile_s = compile_programs(session.engine, smallest)
    measure_steps(stage, session, steps, "decode", [(1, sizes.decode_context - 1)] * few)
    stage.check_time()
    keys = [("backbone", bucket) for bucket in programs.buckets] + [("sample", rows) for rows in programs.row_buckets]
    others, others_s = compile_programs(session.engine, [key for key in keys if key not in smallest])
    start = time.perf_counter()
    for bucket in programs.buckets:  # loads them
        steps.run(steps.plan([(bucket, 0)]))
    stage.add(of="compile", programs=each | others, seconds=compile_s + others_s, first_steps_s=_since(start))

    for rows in more:
        measure_steps(stage, session, steps, "decode", [(1, sizes.decode_context - 1)] * rows)
    for bucket in programs.buckets:
        measure_steps(stage, session, steps, "bucket", [(bucket, 0)])
    for rows in sizes.mixed_rows:
        measure_steps(stage, session, steps, "sequences", [(sizes.budget // rows, 0)] * rows)

    for overlap in (False, True, False, True):
        stage.check_time()
        stage.add(of="generate", overlap=overlap, **generate(session, overlap))

    for unrolled in (True, False):
        stage.check_time()
        stage.add(of="layers", unrolled=unrolled, **layer_matmuls(session, unrolled))

    stage.check_time()
    program = programs.get("backbone", programs.buckets[0])
    plan = steps.plan([(1, sizes.decode_context - 1)])
    in_hlo = "command_buffer" in program.as_text()
    stage.add(of="command buffers", in_hlo=in_hlo, in_profile=launch_kinds(lambda: steps.run(plan)))


def measure_steps(stage: Stage, session: Session, steps: Steps, of: str, rows: list[tuple[int, int]]) -> None:
    """A row `step`: seconds of it, the host's part of that, and the bytes and flops that it takes at least."""
    stage.check_time()
    plan = steps.plan(rows)
    steps.run(plan)
    host: list[float] = []
    seconds = seconds_per_call(lambda: host.append(steps.run(plan, STEPS_AT_ONCE)), 0)
    stage.add(
        of="step",
        kind=of,
        tokens=plan.num_tokens,
        rows=len(rows),
        context=rows[0][1],
        seconds=seconds / STEPS_AT_ONCE,
        dispatch_s=min(host) / STEPS_AT_ONCE,
        **least_work(session, rows),
    )


def read_bytes(session: Session) -> int:
    """Of the weights that a step reads whole: all but the embedding table, of which it reads a row a token."""
    params = session.params
    table = num_bytes(leaves(params, "embedding")) - num_bytes(leaves(session.model.head_params(params), "embedding"))
    return num_bytes(params) - table


def least_work(session: Session, rows: list[tuple[int, int]]) -> dict[str, int]:
    """Bytes of weights and of K and V, and operations of matmuls and attention, of a step of such rows."""
    c, params = session.config, session.params
    head = num_elements(leaves(session.model.head_params(params), "weight", "embedding"))
    layers = num_elements(leaves(params, "weight")) - num_elements(leaves(session.model.head_params(params), "weight"))
    kv_token = 2 * c.num_layers * c.num_kv_heads * c.head_dim * jnp.dtype(DTYPE).itemsize
    tokens = sum(num_new for num_new, _ in rows)
    read = sum(num_new + context for num_new, context in rows)
    pairs = sum(num_new * context + num_new * (num_new + 1) // 2 for num_new, context in rows)
    return {
        "bytes": read_bytes(session) + kv_token * (read + tokens),
        "flops": 2 * (layers * tokens + head * len(rows)) + 4 * c.num_layers * c.num_heads * c.head_dim * pairs,
    }


def launch_kinds(run: Callable[[], Any]) -> str:
    """How the CUDA driver was asked to launch kernels while `run` ran: "graph", "kernel", both, or "unknown (why)".

    XLA turns stretches of a program into command buffers after the HLO that it shows is final, so only a profile tells:
    they are CUDA graphs. A profiler that fails costs this answer and nothing else.
    """
    try:
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder):
                run()
            profile = b"".join(path.read_bytes() for path in Path(folder).rglob("*.xplane.pb"))
    except Exception as error:
        return f"unknown ({one_line(error)})"
    kinds = {"graph": (b"cuGraphLaunch", b"cudaGraphLaunch"), "kernel": (b"cuLaunchKernel", b"cudaLaunchKernel")}
    seen = [kind for kind, names in kinds.items() if any(name in profile for name in names)]
    return ", ".join(seen) or "unknown (the profile has no launches)"


def generate(session: Session, overlap: bool) -> dict[str, Any]:
    """Tokens a second of a batch of short requests, from the first prompt token to the last output token."""
    engine, (num_seqs, num_prompt, num_output) = session.engine, session.sizes.generate
    engine.config = dataclasses.replace(engine.config, overlap=overlap)  # asked anew each step; changes no program
    params = SamplingParams(max_tokens=num_output, ignore_eos=True)
    start, compiled = time.perf_counter(), engine.stats().compiled
    responses = engine.generate([session.prompt(num_prompt)] * num_seqs, params, show_progress=False)
    tokens = sum(len(response.token_ids) for response in responses)
    return {"tokens": tokens, "seconds": _since(start), "compiled": engine.stats().compiled - compiled}


def layer_matmuls(session: Session, unrolled: bool) -> dict[str, Any]:
    """The matmuls of all layers on few tokens, in a program of their own, as the model has no scan of its layers.

    Unrolled, each reads its layer's weights; else `lax.scan` goes over all layers' weights in one array.
    """
    decoder = session.params["model"]
    weights = [
        {
            "qkv": layer["self_attn"]["qkv_proj"]["weight"],
            "out": layer["self_attn"]["o_proj"]["weight"],
            "gate_up": layer["mlp"]["gate_up_proj"]["weight"],
            "down": layer["mlp"]["down_proj"]["weight"],
        }
        for layer in (decoder[f"layers_{i}"] for i in range(session.config.num_layers))
    ]

    def one(x: Array, w: dict[str, Array]) -> Array:
        x = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True))
        x = x + (x @ w["qkv"].T)[:, : w["out"].shape[1]] @ w["out"].T
        gate, up = jnp.split(x @ w["gate_up"].T, 2, axis=-1)
        return x + (jax.nn.silu(gate) * up) @ w["down"].T

    def unroll(weights: list[dict[str, Array]], x: Array) -> Array:
        for w in weights:
            x = one(x, w)
        return x

    def scan(weights: dict[str, Array], x: Array) -> Array:
        return jax.lax.scan(lambda x, w: (one(x, w), None), x, weights)[0]

    args: Any = weights if unrolled else jax.tree.map(lambda *arrays: jnp.stack(arrays), *weights)
    x = random_array(0, (FEW_TOKENS, session.config.hidden_size))
    start = time.perf_counter()
    program = jax.jit(unroll if unrolled else scan).lower(args, x).compile()
    compile_s = _since(start)
    return {
        "bytes": num_bytes(weights),
        "temp_bytes": program.memory_analysis().temp_size_in_bytes,
        "compile_s": compile_s,
        "seconds": seconds_per_call(partial(program, args, x), session.sizes.min_time_s),
    }


def _since(start: float) -> float:
    return time.perf_counter() - start
