"""Shared memory in which asynchronous operations happen as late as the kernel's synchronisation allows."""

import dataclasses
from collections import defaultdict, deque
from typing import Any

import numpy as np
from jax._src import source_info_util
from jax._src.pallas.mosaic.interpret import utils as interpret_utils
from jax._src.pallas.mosaic.interpret.utils import Access
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax._src.pallas.mosaic_gpu.interpret import shared_memory as memory
from jax._src.pallas.mosaic_gpu.interpret.shared_memory import GpuClockBundle as Clock
from jax._src.pallas.mosaic_gpu.interpret.shared_memory import HostAllocationKey as Key
from jax._src.pallas.mosaic_gpu.interpret.shared_memory import Thread
from mosaic_numpy import matmul
from mosaic_threads import Threads


@dataclasses.dataclass(frozen=True, kw_only=True)
class CpAsync:
    """A cp.async of a warpgroup: `src` in global memory to `dst` in shared memory, both by the generic proxy."""

    thread: Thread
    clock: Clock | None  # of the issue
    src: tuple[Key, Access]
    dst: tuple[Key, Access]
    source_info: Any

    def __call__(self, shared: "LateMemory") -> None:
        value = shared.read(*self.src)
        if value is None or value.shape != self.src[1].shape:
            raise IndexError(f"cp.async of {self.src[1]} is out of bounds of the source")
        if self.clock is not None:
            races = gpu_callbacks.get_races()
            races.check_read(self.thread, self.clock.generic_clock, *self.src, source_info=self.source_info)
            races.check_write(self.thread, self.clock.generic_clock, *self.dst, source_info=self.source_info)
        shared.write(*self.dst, value)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wgmma:
    """acc += a @ b. Operands in shared memory, read by the async proxy, are (key, access) pairs."""

    thread: Thread
    clock: Clock | None  # of the issue
    acc: tuple[Key, Access]
    a: np.ndarray | tuple[Key, Access]
    b: tuple[Key, Access]
    source_info: Any

    def __call__(self, shared: "LateMemory") -> None:
        operands = []
        for operand in (self.a, self.b):
            if isinstance(operand, tuple):
                if self.clock is not None:
                    gpu_callbacks.get_races().check_read(
                        self.thread, self.clock.async_smem_clock, *operand, source_info=self.source_info
                    )
                operand = shared.read(*operand)
            operands.append(operand)
        shared.write(*self.acc, matmul(shared.read(*self.acc), *operands))


@dataclasses.dataclass(frozen=True)
class BarrierWait:
    """What a thread that waits waits for, and where in the kernel."""

    barrier: memory.Barrier
    source_info: Any

    def __str__(self) -> str:
        return f"{self.barrier} at {source_info_util.summarize(self.source_info)}"


class LateBarrier(memory.Barrier):
    """Who waits for a phase learns what arrived in it; from the stock barrier, also what arrived for the next one."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.clocks: dict[int, Clock] = {}  # by phase

    def arrive(self, thread, clock=None, logging_info=None):
        if clock is not None:
            self.clocks.setdefault(self.phase, clock.copy()).update(clock)
        super().arrive(thread, clock, logging_info)

    def wait(self, thread, logging_info=None):
        self.clock = self.clocks.get(self.last_observed_phase_by_thread.get(thread, 0))
        super().wait(thread, logging_info)
        self.clock = None


class LateMemory(memory.GPUSharedMemory):
    """The stock memory, with queues of what is in flight. `threads` are those of the cluster that runs."""

    threads: Threads

    def reset_per_cluster_state(self):
        super().reset_per_cluster_state()
        self.loads = defaultdict(deque)  # id of a barrier -> TMA loads that will arrive there
        self.open_stores = defaultdict(list)  # thread -> TMA stores of the group not yet committed
        self.stores = defaultdict(deque)  # thread -> committed groups of TMA stores
        self.wgmmas = defaultdict(deque)
        self.cp_asyncs = defaultdict(deque)

    def read(self, key: Key, access: Access) -> np.ndarray:
        """The value now, whoever wrote it: no clock moves."""
        return self.get_buffer_content(key, access, None)[0]

    def write(self, key: Key, access: Access, value: np.ndarray) -> None:
        self.store_buffer_content(key, access, value, None, increment_clock=False)

    def poison(self, key: Key, access: Access) -> None:
        dtype = self.buffer_shape_and_dtype(key).dtype
        self.write(key, access, np.full(access.shape, interpret_utils.get_uninitialized_value(dtype, "nan"), dtype))

    def issue_clock(self, thread: Thread) -> Clock | None:
        """The clock of an asynchronous operation that `thread` issues now."""
        if not self.detect_races:
            return None
        clock = self.incr_clock(thread)
        clock.inc(self.get_next_tma_thread_id())
        return clock

    def execute_async_task(self, task):
        """Queues TMA copies; anything else runs at once."""
        match task:
            case gpu_callbacks.AsyncCopyGmemToSmemTask():
                self.poison(task.dst_allocation_key, task.dst_access)
                self.loads[id(task.barrier)].append((task, self.get_next_tma_thread_id()))
            case gpu_callbacks.AsyncCopySmemToGmemTask():
                self.open_stores[task.thread].append((task, self.get_next_tma_thread_id()))
            case _:
                return super().execute_async_task(task)
        return None

    def land_a_load(self, waits: list[BarrierWait]) -> bool:
        """Completes the oldest load of a barrier that a thread waits for; False if there is none."""
        for wait in waits:
            if loads := self.loads[id(wait.barrier)]:
                task, tma_thread = loads.popleft()
                task(tma_thread)
                return True
        return False

    def wait_barrier(self, wait: BarrierWait, thread: Thread) -> None:
        """Lets other threads run until the barrier has completed the phase that `thread` waits for."""
        phase = wait.barrier.last_observed_phase_by_thread.get(thread, 0)
        self.threads.wait_until(lambda: wait.barrier.phase > phase, wait)

    def deallocate_barrier(self, key: Key, *args, **kwargs) -> None:
        """Completions nobody waited for are fine at the end of a barrier's life; jax 0.11 objects."""
        barrier = self.get_barrier(key)
        if not hasattr(self, "reallocation_checker") and barrier.ref_count == 1:
            barrier.last_observed_phase_by_thread.clear()
        super().deallocate_barrier(key, *args, **kwargs)

    def issue_wgmma(self, wgmma: Wgmma) -> None:
        self.wgmmas[wgmma.thread].append(wgmma)

    def issue_cp_async(self, copy: CpAsync) -> None:
        self.poison(*copy.dst)
        self.cp_asyncs[copy.thread].append(copy)

    def wait_wgmma(self, thread: Thread, n: int) -> None:
        self._retire(self.wgmmas[thread], thread, n)

    def wait_cp_async(self, thread: Thread, n: int) -> None:
        self._retire(self.cp_asyncs[thread], thread, n)

    def _retire(self, queue: deque, thread: Thread, n: int) -> None:
        """Completes all but the latest n, in order; `thread` has seen them."""
        while len(queue) > n:
            operation = queue.popleft()
            operation(self)
            if operation.clock is not None:
                self.clocks[thread].update(operation.clock)

    def check_accumulator(self, key: Key, thread: Thread) -> None:
        if any(wgmma.acc[0] == key for wgmma in self.wgmmas[thread]):
            raise RuntimeError("an accumulator is accessed while a wgmma on it is in flight: wait for it first")

    def commit_stores(self, thread: Thread) -> None:
        self.stores[thread].append(self.open_stores.pop(thread, []))

    def wait_smem_to_gmem(self, thread: Thread, n: int, wait_read_only: bool) -> None:
        groups = self.stores[thread]
        while len(groups) > n:
            for task, tma_thread in groups.popleft():
                task(tma_thread)
        # Only what was just completed has clocks to be merged: n groups are still queued.
        super().wait_smem_to_gmem(thread, 0, wait_read_only)

    def kernel_thread_finished(self, thread: Thread) -> None:
        """An error if anything that `thread` issued may still be in flight."""
        self.commit_stores(thread)
        if any(self.stores[thread]):
            raise RuntimeError(f"{thread} ended with a TMA store not waited for")
        if self.wgmmas[thread] or self.cp_asyncs[thread]:
            raise RuntimeError(f"{thread} ended with a wgmma or a cp.async not waited for")
        super().kernel_thread_finished(thread)

    def cluster_finished(self) -> None:
        if any(self.loads.values()):
            raise RuntimeError("a TMA load was never waited for")
