"""The process behind `plan`: reads a `plan.Request` from stdin, compiles, writes the report to the file it is given."""

import json
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax

from fastgen_jax import progress, roofline
from fastgen_jax.checkpoint.config_only import read_config
from fastgen_jax.compiler_output import count_launches, exchanged, link_seconds
from fastgen_jax.deviceless import compile_only_devices, record_shared_memory
from fastgen_jax.gpus import get_gpu
from fastgen_jax.models import family
from fastgen_jax.plan import MAX_TP, Request, size_text
from fastgen_jax.programs import Key, Programs
from fastgen_jax.sharding import check_heads
from fastgen_jax.sizing import Sizing
from fastgen_jax.types import EngineConfig

CONTEXT = 1024
"""Tokens of each sequence in the roofline of a decode step."""

SEQUENCE_LENGTHS = (1024, 4096, 16384)

MORE_MEMORY = 0.9
"""A share of the GPU's memory that JAX can be given where nothing else runs on it."""

USUAL_LEN = 4096
"""Room that an alternative must have for a sequence, where no length was asked for."""


def make_report(request: Request, *, every_bucket: bool = True) -> dict[str, Any]:
    """Everything that `plan` returns but the kernels. Raises ValueError with one sentence.

    every_bucket: compile them all; otherwise only what the pool's size depends on, and `buckets` is left out.
    """
    config = EngineConfig(**request.config)
    gpu, hf_config = get_gpu(request.gpu), read_config(request.model)

    def sized(
        tp: int = request.tp,
        dtype: str | None = config.dtype,
        kv_cache_dtype: str = config.kv_cache_dtype,
        mem_fraction: float = request.mem_fraction,
        devices: list[jax.Device] | None = None,
    ) -> Sizing:
        other = EngineConfig(**{**request.config, "dtype": dtype, "kv_cache_dtype": kv_cache_dtype})
        return Sizing(hf_config, gpu, other, tp=tp, mem_fraction=mem_fraction, devices=devices)

    check_heads(family(hf_config.get("model_type", "")).from_hf(hf_config), request.tp)
    devices = compile_only_devices(gpu, request.tp)
    sizing = sized(devices=devices)
    report = {
        "model": request.model,
        "gpu": request.gpu,
        "gpu_name": gpu.name,
        "gpu_source": gpu.source,
        "tp": request.tp,
        "link_gb_s": gpu.link_bandwidth / 1e9,
        "dtype": sizing.dtype,
        "quantization": sizing.quantization,
        "kv_dtype": sizing.kv_dtype.name,
        "backend": sizing.backend.NAME,
        "backend_reason": sizing.backend_reason,
        "jax": jax.__version__,
        "block_size": sizing.block_size,
        "max_num_seqs": sizing.max_num_seqs,
        "max_num_batched_tokens": sizing.budget,
        "device_bytes": gpu.memory_bytes,
        "limit_bytes": sizing.limit_bytes,
        "budget_bytes": sizing.budget_bytes,
        "weights_bytes": sizing.weights_bytes,
        "block_bytes": sizing.block_bytes,
    }
    planner = _Planner(request, sizing, sized, devices)
    report |= planner.sizes()
    return report | planner.programs() if report["fits"] and every_bucket else report


class _Planner:
    """The parts of a report that take the compiler."""

    def __init__(
        self, request: Request, sizing: Sizing, sized: Callable[..., Sizing], devices: list[jax.Device]
    ) -> None:
        """sized: the same with another `tp`, `dtype`, `kv_cache_dtype` or `mem_fraction`."""
        self.request, self.sizing, self.sized = request, sizing, sized
        self.device = devices[0]
        self.num_blocks = 0

    def sizes(self) -> dict[str, Any]:
        """Whether it fits, and what it takes or lacks."""
        s = self.sizing
        weights, least = f"{size_text(s.weights_bytes)} of weights", 2 * s.block_bytes  # a block, and the null block
        if s.free_bytes < least:
            return self.does_not_fit(f"{weights} and two blocks of KV", least - s.free_bytes)
        step = 0

        def step_bytes(num_blocks: int) -> int:
            nonlocal step
            programs = s.programs(num_blocks, s.wanted_len)
            largest: list[Key] = [("backbone", programs.buckets[-1]), ("sample_logprobs", programs.row_buckets[-1])]
            self.compile("measuring the largest step", programs, largest)
            step = programs.largest_step_bytes()
            return step

        try:
            self.num_blocks = s.fit_blocks(step_bytes)
        except ValueError:
            return self.does_not_fit(
                f"{weights}, {size_text(step)} for a step and two blocks of KV", least + step - s.free_bytes, step
            )
        max_model_len = s.max_model_len(self.num_blocks)
        if s.config.max_model_len is not None and max_model_len < s.wanted_len:
            needs = f"{weights}, {size_text(step)} for a step and the KV of one sequence of {s.wanted_len:,} tokens"
            blocks = 1 + s.blocks_for(s.wanted_len - 1)
            return self.does_not_fit(needs, blocks * s.block_bytes + step - s.free_bytes, step, max_model_len)
        return {"fits": True, "step_bytes": step} | self.pool(max_model_len)

    def compile(self, title: str, programs: Programs, keys: list[Key]) -> dict[Key, float]:
        show = self.request.show_progress
        if show is None and not progress.is_shown(show):
            print(f"{title}: {len(keys)} programs to compile", file=sys.stderr, flush=True)
        with progress.bar(title, len(keys), show, "programs") as advance, jax.default_device(self.device):
            return programs.compile_all(keys, advance)

    def pool(self, max_model_len: int) -> dict[str, Any]:
        """The pool, and the bounds of what an engine with it can do."""
        s, num_blocks = self.sizing, self.num_blocks
        holds = {n: (num_blocks - 1) // s.blocks_for(n) if n <= s.wanted_len else None for n in SEQUENCE_LENGTHS}
        tokens = (num_blocks - 1) * s.block_size
        context = min(CONTEXT, s.wanted_len, tokens)
        most = min(s.max_num_seqs, (num_blocks - 1) // s.blocks_for(context))
        bounds = [roofline.decode(s.work, s.gpu, s.dtype, n, context) for n in sorted({1, most})]
        bounds.append(roofline.prompt(s.work, s.gpu, s.dtype, s.budget))
        return {
            "pool_bytes": num_blocks * s.block_bytes,
            "pool_blocks": num_blocks,
            "pool_tokens": tokens,
            "sequences": holds,
            "max_model_len": max_model_len,
            "window": s.window.num_tokens,
            "window_blocks": None if s.window.num_tokens is None else s.blocks_for(s.wanted_len),
            "roofline": [asdict(bound) for bound in bounds],
            "knee_tokens": round(roofline.knee(s.work, s.gpu, s.dtype), 1),
        }

    def programs(self) -> dict[str, Any]:
        """What the compiler makes of the engine's steps, with the pool that fits."""
        s = self.sizing
        programs = s.programs(self.num_blocks, s.max_model_len(self.num_blocks))
        keys: list[Key] = [("backbone", bucket) for bucket in programs.buckets]
        head: Key = ("sample_logprobs", programs.row_buckets[-1])
        seconds = self.compile("compiling every bucket", programs, [*keys, head])

        def describe(key: Key, scale: int) -> dict[str, Any]:
            compiled = programs.get(*key)
            memory = compiled.memory_analysis()
            hlo = compiled.as_text()
            counts, sent = count_launches(hlo), exchanged(hlo)
            return {
                "exchanged": {kind: {"count": n, "bytes": total} for kind, (n, total) in sent.items()},
                "link_s": link_seconds(sent, s.tp, s.gpu.link_bandwidth),
                "temp_bytes": memory.temp_size_in_bytes,
                "aliased_bytes": memory.alias_size_in_bytes,
                "output_bytes": memory.output_size_in_bytes - memory.alias_size_in_bytes,
                "compile_s": round(seconds[key], 1),
            } | {name: round(count / scale, 1) for name, count in counts.items()}

        return {
            "buckets": [{"tokens": key[1], **describe(key, s.model_config.num_layers)} for key in keys],
            "head": {"rows": head[1], **describe(head, 1)},
            "reused_bytes": programs.reused_bytes(),
        }

    def does_not_fit(self, needs: str, short: int, step: int = 0, shorter: int | None = None) -> dict[str, Any]:
        """short: bytes that are missing. step: bytes of one, 0 if not known. shorter: the length that would fit."""
        s, would = self.sizing, self.alternatives(step)
        if shorter:
            would.append({"max_model_len": shorter})
        flags = [f"--{name.replace('_', '-')} {value}" for change in would for name, value in change.items()]
        hint = f"{' or '.join(flags)} would fit" if flags else "no other tp, dtype, share or length would fit either"
        where = f"{s.gpu.name}, each of {s.tp}" if s.tp > 1 else s.gpu.name
        more = f"{size_text(short)} more than the {size_text(s.budget_bytes)} to use on {where}"
        message = f"does not fit: {needs} are {more}; {hint}"
        nothing = {"pool_bytes": 0, "pool_blocks": 0, "buckets": []}
        return {"fits": False, "short_bytes": short, "would_fit": would, "message": message} | nothing

    def alternatives(self, step: int) -> list[dict[str, Any]]:
        """Single changes after which weights, a step and one sequence fit, by arithmetic.

        A step that was not measured is taken to need a fiftieth of the memory.
        """
        s = self.sizing

        def fits(**change: Any) -> bool:
            try:
                other = self.sized(**change)
            except ValueError:  # such a tp cannot share the heads out
                return False
            length = s.config.max_model_len or min(s.wanted_len, USUAL_LEN)
            blocks = 1 + other.blocks_for(length)
            return other.free_bytes >= (step or other.budget_bytes // 50) + blocks * other.block_bytes

        shared = next((tp for tp in range(s.tp + 1, MAX_TP + 1) if fits(tp=tp)), None)
        found: list[dict[str, Any]] = [] if shared is None else [{"tp": shared}]
        if s.dtype == "float32" and fits(dtype="bfloat16"):
            found.append({"dtype": "bfloat16"})
        if s.config.kv_cache_dtype != "fp8" and fits(kv_cache_dtype="fp8"):
            found.append({"kv_cache_dtype": "fp8"})
        if self.request.mem_fraction < MORE_MEMORY and fits(mem_fraction=MORE_MEMORY):
            found.append({"mem_fraction": MORE_MEMORY})
        return found


def _is_ours(error: ValueError) -> bool:
    """Whether this package raised it, to be read by the user; from a library it is a bug."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return frame.f_globals.get("__name__", "").startswith("fastgen_jax")


def main() -> None:
    smem_bytes = record_shared_memory()
    try:
        report = make_report(Request(**json.load(sys.stdin))) | {"smem_bytes": smem_bytes}
    except ValueError as error:
        if not _is_ours(error):
            raise
        report = {"error": str(error)}
    Path(sys.argv[1]).write_text(json.dumps(report), encoding="utf-8")


if __name__ == "__main__":
    main()
