"""The same decodes by torch's scaled_dot_product_attention over dense K and V, beside ours.

It runs in a process of its own: torch and JAX each bring NVIDIA libraries, and each wants the memory.
"""

import importlib.util
import json
import statistics
import subprocess
import sys
from collections.abc import Iterable

from fastgen_jax.bench.device.record import Stage, one_line
from fastgen_jax.bench.device.sizes import Decodes

MOST_BYTES = 16 << 30  # of K and V, padded to the longest row: JAX holds most of the memory
COLD_BYTES = 1 << 29
NUM_CALLS, REPEATS = 10, 3


def measure(stage: Stage, decodes: Iterable[Decodes]) -> None:
    """Add a row of policy "torch" for each batch that fits, or a note why there is none."""
    if importlib.util.find_spec("torch") is None:
        stage.note("torch is not installed")
        return
    cases = [case for case in decodes if dense_bytes(case) < MOST_BYTES]
    works = [[*case.heads[1:], case.kv_lens] for case in cases]
    stage.check_time()
    command = [sys.executable, "-m", __name__]
    try:
        done = subprocess.run(
            command, input=json.dumps(works), capture_output=True, text=True, timeout=stage.left_s, check=False
        )
        out, failure = done.stdout, done.stderr.strip().splitlines()[-1:] if done.returncode else []
    except subprocess.TimeoutExpired as expired:
        out, failure = _text(expired.stdout), ["no time left"]
    for case, line in zip(cases, out.splitlines(), strict=False):
        found = json.loads(line)
        if "refused" in found:
            stage.note(f"torch refused K={case.heads.num_kv_heads} {case.name}: {found['refused']:.100}")
        else:
            stage.add(kv_heads=case.heads.num_kv_heads, batch=case.name, policy="torch", **found)
    if failure:
        stage.note(f"torch: {failure[0]:.200}")


def _text(output: bytes | str | None) -> str:
    return output.decode() if isinstance(output, bytes) else output or ""


def dense_bytes(case: Decodes) -> int:
    """K and V of a batch, padded to its longest row."""
    return 4 * len(case.kv_lens) * max(case.kv_lens) * case.heads.num_kv_heads * case.heads.head_dim


def main() -> None:
    """Read batches [[H, K, D, [tokens of each row]], ..] from stdin; print a line of JSON for each: its seconds, and
    the bytes of K and V that it reads; or why torch refused."""
    import torch

    if not torch.cuda.is_available():
        sys.exit("it sees no GPU")
    for work in json.load(sys.stdin):
        try:
            print(json.dumps(_time(*work)), flush=True)
        except RuntimeError as error:
            print(json.dumps({"refused": one_line(error)}), flush=True)


def _time(num_heads: int, num_kv_heads: int, head_dim: int, kv_lens: list[int]) -> dict[str, float]:
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    num_rows, longest = len(kv_lens), max(kv_lens)
    q = normal(num_rows, num_heads, 1, head_dim)
    # Several, in turn, so that short ones are read from memory and not from a cache.
    num_bytes = 4 * num_rows * num_kv_heads * longest * head_dim
    copies = [
        [normal(num_rows, num_kv_heads, longest, head_dim) for _ in "kv"]
        for _ in range(max(1, min(NUM_CALLS, COLD_BYTES // num_bytes)))
    ]
    mask = None
    if min(kv_lens) < longest:
        lengths = torch.tensor(kv_lens, device="cuda")
        mask = (torch.arange(longest, device="cuda")[None] < lengths[:, None])[:, None, None]

    def run(call: int) -> None:
        k, v = copies[call % len(copies)]
        scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=num_heads != num_kv_heads)

    run(0)
    seconds = []
    for _ in range(REPEATS):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for call in range(NUM_CALLS):
            run(call)
        stop.record()
        stop.synchronize()
        seconds.append(start.elapsed_time(stop) / 1e3 / NUM_CALLS)
    return {"seconds": statistics.median(seconds), "bytes": num_bytes}


if __name__ == "__main__":
    main()
