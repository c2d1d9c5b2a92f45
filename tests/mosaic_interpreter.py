"""Mosaic GPU's Pallas interpreter, made asynchronous, eager and complete enough for our kernels.

    with extended_interpreter():
        out = plgpu.kernel(..., interpret=interpret_params())(...)

Outside, the stock interpreter runs: what is jitted has to be traced inside, too. The stock interpreter's memory,
barriers and vector clocks are kept. What changes:

* **Asynchronous operations read and write as late as the kernel's synchronisation allows.** A TMA load lands when all
  threads wait and one of them for the load's barrier; until then its destination holds NaN. A cp.async lands when
  `wait_gmem_to_smem` retires its group (each copy is a group). A TMA store reads shared memory, and writes, when
  `wait_smem_to_gmem` retires its group. A wgmma reads its shared-memory operands (A in registers is captured at issue)
  when `wgmma_wait`, a read of an accumulator that waits, or the end of `pl.run_state` retires it (each wgmma is a
  group); touching its accumulator before that is an error.
* **They take part in race detection** with the clock of their issue, so an operand overwritten too early is reported
  however the threads were scheduled. As in the stock interpreter, what generic code wrote to (or read from) shared
  memory needs `commit_smem` before an asynchronous operation reads (or overwrites) it; cp.async is generic code.
* **Loads, stores and wgmma that nobody waits for, and threads that all wait,** are errors.
* Waiting for a phase of a barrier orders one after the arrivals of that phase, not after later ones.
* Added: `mma`, copies without a barrier, A in registers, `pl.run_state` over accumulators, stores to accumulators,
  predicated copies.
* Kernels run eagerly, in NumPy, their threads in turns (`mosaic_threads`): nothing is compiled and every run is the
  same.

Not modelled: the threads of a warpgroup (nor the barriers among them that the lowering emits by itself), clusters,
Blackwell's MMA.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import jax
import numpy as np
from jax._src import callback
from jax._src.pallas.mosaic.interpret import thread_map
from jax._src.pallas.mosaic.interpret import utils as interpret_utils
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, interpret_pallas_call, jaxpr_interpret
from jax._src.pallas.mosaic_gpu.interpret import shared_memory as memory
from jax.experimental.pallas import mosaic_gpu as plgpu
from mosaic_async import LateBarrier, LateMemory
from mosaic_jaxpr import TOKEN, LateInterpreter, Path, Site, find_sites
from mosaic_threads import Threads


@dataclasses.dataclass
class Session:
    """What the kernels run in one `extended_interpreter()` have in common."""

    deleted: Site | None = None  # the equation to leave out
    reverse: bool = False  # whether the last thread is the first to run
    calls: int = 0
    sites: list[Site] = dataclasses.field(default_factory=list)

    def begin_kernel(self, jaxpr) -> Path | None:
        """Lists the kernel's synchronisation. The path of the equation to leave out, if it is one of this kernel's."""
        call, self.calls = self.calls, self.calls + 1
        self.sites += find_sites(jaxpr, call)
        return self.deleted.path if self.deleted is not None and self.deleted.call == call else None


_session: Session | None = None


def interpret_params(**options: Any) -> plgpu.InterpretGPUParams:
    """For `plgpu.kernel(interpret=)`: race detection, NaN in fresh memory, and enough clocks for what is in flight."""
    return plgpu.InterpretGPUParams(**{"detect_races": True, "num_tma_threads_per_device": 64} | options)


@contextlib.contextmanager
def extended_interpreter(deleted: Site | None = None, reverse: bool = False) -> Iterator[Session]:
    """Interpreted Mosaic GPU kernels run as this module says.

    Without the equation `deleted`, if one is given; the threads of a block from last to first if `reverse`. The
    session yielded lists the synchronisation equations of the kernels that ran, in their order.
    """
    global _session
    outer, _session = _session, Session(deleted, reverse)
    try:
        with mock.patch.object(interpret_pallas_call, "interpret_pallas_call", _interpret_pallas_call):
            yield _session
    finally:
        _session = outer


_stock_interpret_pallas_call = interpret_pallas_call.interpret_pallas_call


def _interpret_pallas_call(*args: Any, **params: Any) -> Sequence[jax.Array]:
    """Traced in the stock function's place: the whole kernel is one callback."""
    out = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in params["out_avals"]]
    return callback.io_callback(lambda *arrays: _run_kernel(arrays, params), out, *args, ordered=True)


def _run_kernel(args: Sequence[Any], params: dict[str, Any]) -> list[np.ndarray]:
    session = _session
    if session is None:
        raise RuntimeError("a kernel traced inside extended_interpreter() runs outside it")
    deleted = session.begin_kernel(params["jaxpr"])

    with (
        mock.patch.object(callback, "io_callback", _call_now),
        mock.patch.object(thread_map, "thread_map", _run_threads),
        mock.patch.object(jax.lax, "fori_loop", _fori_loop),
        mock.patch.object(interpret_utils, "get_uninitialized_array", _uninitialized_array),
        mock.patch.object(jaxpr_interpret, "JaxprInterpreter", functools.partial(LateInterpreter, deleted=deleted)),
        mock.patch.object(memory, "GPUSharedMemory", LateMemory),
        mock.patch.object(memory, "Barrier", LateBarrier),
        np.errstate(all="ignore"),
    ):
        gpu_callbacks.reset_gpu_interpret_mode_state()
        try:
            outs = _stock_interpret_pallas_call(*map(np.asarray, args), **params)
            if gpu_callbacks.get_races().races_found:  # where the stock detector reports and goes on
                raise RuntimeError("RACE DETECTED: see the output")
            return [np.asarray(out) for out in outs]
        finally:
            gpu_callbacks.reset_gpu_interpret_mode_state()


def _call_now(function, result_shapes, *args, sharding=None, ordered=False, **kwargs):
    del result_shapes, sharding, ordered
    return function(*args, **kwargs)


def _fori_loop(lower, upper, body, carry):
    for i in range(lower, upper):
        carry = body(i, carry)
    return carry


def _uninitialized_array(shape, dtype, uninitialized_memory):
    return np.full(shape, interpret_utils.get_uninitialized_value(dtype, uninitialized_memory), dtype)


def _run_threads(body, num_threads, token, *args, **_):
    """In place of `thread_map`: a cluster's threads, in turns."""
    shared = gpu_callbacks._get_shared_memory()

    def run(thread: int) -> None:
        with np.errstate(all="ignore"):
            body(thread, TOKEN, *args)

    order = range(num_threads)[::-1] if _session and _session.reverse else range(num_threads)
    shared.threads = Threads([functools.partial(run, i) for i in order], shared.land_a_load)
    shared.threads.run()
    shared.cluster_finished()
    return token
