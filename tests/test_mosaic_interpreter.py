"""The extended interpreter, on kernels small enough to read: results against NumPy, and no synchronisation to spare."""

import functools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from mosaic_interpreter import extended_interpreter, interpret_params
from mosaic_threads import Deadlock, Threads
from mutations import mutations, survivors, verdict

N = 64  # every tile is N x N
TILED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
WGMMA = plgpu.Layout.WGMMA


def tile(*stages: int, dtype=jnp.bfloat16):
    return plgpu.SMEM((*stages, N, N), dtype, transforms=TILED if dtype == jnp.bfloat16 else ())


def run(body, args, scratch, *, out_shape=(N, N), out_dtype=jnp.float32, **options):
    out_type = jax.ShapeDtypeStruct(out_shape, out_dtype)
    options = {"interpret": interpret_params()} | options
    return plgpu.kernel(body, out_type=out_type, scratch_types=scratch, **options)(*args)


def load(ref, layout=None):
    """`plgpu.load` of a whole ref; jax 0.11 wants an index to be given."""
    return plgpu.load(ref, layout=layout) if jax.__version_info__ >= (0, 12) else plgpu.load(ref, (), layout=layout)


def registers_a(a, b):
    """A through registers, one stage, a TMA store at the end; a [N, 3N] @ b [3N, N]."""

    def body(a, b, out, a_s, b_s, out_s, ready):
        def step(k, acc):
            columns = pl.ds(k * N, N)
            plgpu.copy_gmem_to_smem(a.at[:, columns], a_s, ready)
            plgpu.copy_gmem_to_smem(b.at[columns], b_s, ready)
            plgpu.barrier_wait(ready)
            rows = load(a_s, WGMMA)
            plgpu.commit_smem()  # the next load overwrites what was read here

            def dot(ref):
                plgpu.wgmma(ref, rows, b_s)
                plgpu.wgmma_wait(0)
                return plgpu.wgmma_accumulator_load(ref, wait_n=None)

            return acc + pl.run_scoped(dot, plgpu.ACC((N, N), jnp.float32))

        out_s[...] = lax.fori_loop(0, a.shape[1] // N, step, plgpu.layout_cast(jnp.zeros((N, N), jnp.float32), WGMMA))
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_s, out)
        plgpu.wait_smem_to_gmem(0)

    scratch = [tile(), tile(), tile(dtype=jnp.float32), plgpu.Barrier(num_arrivals=2)]
    return run(body, (a, b), scratch)


def pipelined(a, b, **options):
    """Two stages, a producer and two consumers, each releasing a stage one wgmma late; a [2N, KN] @ b [KN, N]."""
    steps = a.shape[1] // N

    def body(a, b, out, a_s, b_s, out_s, ready, consumed):
        wg = lax.axis_index("wg")

        @pl.when(wg == 2)
        def _():
            plgpu.set_max_registers(40, action="decrease")

            @pl.loop(0, steps)
            def _(k):
                slot = lax.rem(k, 2)
                pl.when(k >= 2)(lambda: plgpu.barrier_wait(consumed.at[slot]))
                for half in range(2):
                    rows, columns = pl.ds(half * N, N), pl.ds(k * N, N)
                    plgpu.copy_gmem_to_smem(a.at[rows, columns], a_s.at[slot, half], ready.at[slot])
                plgpu.copy_gmem_to_smem(b.at[:, pl.ds(k * N, N)], b_s.at[slot], ready.at[slot])

        @pl.when(wg < 2)
        def _():
            plgpu.set_max_registers(232, action="increase")

            def dot(acc):
                @pl.loop(0, steps)
                def _(k):
                    slot = lax.rem(k, 2)
                    plgpu.barrier_wait(ready.at[slot])
                    plgpu.wgmma(acc, a_s.at[slot, wg], b_s.at[slot].T)
                    plgpu.wgmma_wait(1)
                    pl.when(k > 0)(lambda: plgpu.barrier_arrive(consumed.at[1 - slot]))

                return acc[...]

            out_s[wg] = pl.run_scoped(dot, plgpu.ACC((N, N), jnp.float32))
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(out_s.at[wg], out.at[pl.ds(wg * N, N)])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    scratch = [
        *(tile(2, 2), tile(2), tile(2, dtype=jnp.float32)),
        *(plgpu.Barrier(num_arrivals=3, num_barriers=2), plgpu.Barrier(num_arrivals=2, num_barriers=2)),
    ]
    return run(body, (a, b.T), scratch, out_shape=(2 * N, N), num_threads=3, thread_name="wg", **options)


def cp_async(a, b):
    """Copies without a barrier, two in flight, and warp mma; a [N, KN] @ b [KN, N]."""
    steps = a.shape[1] // N

    def body(a, b, out, a_s, b_s):
        def fetch(k):
            columns, slot = pl.ds(k * N, N), lax.rem(k, 2)
            plgpu.copy_gmem_to_smem(a.at[:, columns], a_s.at[slot])
            plgpu.copy_gmem_to_smem(b.at[columns], b_s.at[slot])

        def step(k, acc):
            slot = lax.rem(k, 2)
            plgpu.wait_gmem_to_smem(0)
            x, y = load(a_s.at[slot]), load(b_s.at[slot])
            pl.when(k + 1 < steps)(lambda: fetch(k + 1))
            return plgpu.mma(acc, x, y)

        fetch(0)
        out[...] = lax.fori_loop(0, steps, step, jnp.zeros((N, N), jnp.float32))

    return run(body, (a, b), [tile(2), tile(2)])


def run_state(a, b):
    """An accumulator that starts from a value, its A written to shared memory by the kernel; 1 + 2 a @ b, a [N, 2N]."""

    def body(a, b, out, a_s, b_s, ready):
        acc = plgpu.layout_cast(jnp.ones((N, N), jnp.float32), WGMMA)
        for k in range(2):
            plgpu.copy_gmem_to_smem(b.at[pl.ds(k * N, N)], b_s, ready)
            a_s[...] = plgpu.layout_cast(a[:, pl.ds(k * N, N)], WGMMA) * 2
            plgpu.commit_smem()
            plgpu.barrier_wait(ready)
            acc = pl.run_state(lambda ref: plgpu.wgmma(ref, a_s, b_s))(plgpu.ACC.init(acc))
        out[...] = acc

    return run(body, (a, b), [tile(), tile(), plgpu.Barrier()])


def exchange(x):
    """Two warpgroups, each with its own code, give each other two rows; one barrier used twice."""

    def body(x, out, x_s, ready):
        def as_warpgroup(me: int):
            for step in range(2):
                x_s[step, me] = x[step, me]
                plgpu.barrier_arrive(ready)
                plgpu.barrier_wait(ready)
                out[step, me] = x_s[step, 1 - me]

        for me in range(2):
            pl.when(lax.axis_index("wg") == me)(functools.partial(as_warpgroup, me))

    scratch = [plgpu.SMEM(x.shape, x.dtype), plgpu.Barrier(num_arrivals=2)]
    return run(body, (x,), scratch, out_shape=x.shape, num_threads=2, thread_name="wg")


def matrices(m: int, k: int, n: int = N) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(m + k)
    return tuple(jnp.asarray(rng.integers(-3, 4, shape), jnp.bfloat16) for shape in ((m, k), (k, n)))


def dot(a, b) -> np.ndarray:
    return np.asarray(a, np.float32) @ np.asarray(b, np.float32)


KERNELS = {
    registers_a: (matrices(N, 3 * N), dot),
    pipelined: (matrices(2 * N, 5 * N), dot),
    cp_async: (matrices(N, 3 * N), dot),
    run_state: (matrices(N, 2 * N), lambda a, b: 1 + 2 * dot(a, b)),
    exchange: ((jnp.arange(4 * N, dtype=jnp.float32).reshape(2, 2, N),), lambda x: x[:, ::-1]),
}


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.__name__)
def test_kernel_is_right_and_needs_all_its_synchronisation(kernel):
    args, expected = KERNELS[kernel]
    (out,), mutants = mutations(kernel, *args)
    np.testing.assert_array_equal(out, expected(*args))
    assert len(mutants) >= 1
    assert [name for name, mutant in mutants if verdict(mutant, [out], 0.0) is None] == []


@pytest.mark.parametrize("reverse", [False, True])
def test_a_missing_wait_is_found_whoever_runs_first(reverse):
    """What one arrives with for the next phase of a barrier does not count for this one."""
    args, _ = KERNELS[exchange]
    reference, mutants = mutations(exchange, *args)
    assert len(mutants) == 8
    assert [name for name, mutant in mutants if verdict(mutant, reference, 0.0, [reverse]) is None] == []


def test_being_late_shows_without_race_detection():
    """All but the fences: the values that an early reader gets are wrong by themselves."""
    args, _ = KERNELS[pipelined]
    left = survivors(functools.partial(pipelined, interpret=interpret_params(detect_races=False)), *args)
    assert [name.split()[2] for name in left] == ["commit_smem"]


def wgmma_groups(n: int, used: int):
    """Two wgmma, one accumulator each: all but n are waited for, then accumulator `used` is read."""

    def body(x, out, x_s, ready):
        plgpu.copy_gmem_to_smem(x, x_s, ready)
        plgpu.barrier_wait(ready)

        def dots(*accs):
            for acc in accs:
                plgpu.wgmma(acc, x_s, x_s)
            plgpu.wgmma_wait(n)
            out[...] = plgpu.wgmma_accumulator_load(accs[used], wait_n=None)
            plgpu.wgmma_wait(0)

        pl.run_scoped(dots, *[plgpu.ACC((N, N), jnp.float32)] * 2)

    x = matrices(N, N)[0]
    return run(body, (x,), [tile(), plgpu.Barrier()]), dot(x, x)


def cp_async_groups(n: int, used: int):
    """Two copies: all but n are waited for, then copy `used` is read."""

    def body(x, out, x_s):
        for i in range(2):
            plgpu.copy_gmem_to_smem(x, x_s.at[i])
        plgpu.wait_gmem_to_smem(n)
        out[...] = load(x_s.at[used]).astype(jnp.float32)
        plgpu.wait_gmem_to_smem(0)

    x = matrices(N, N)[0]
    return run(body, (x,), [tile(2)]), np.asarray(x, np.float32)


def store_groups(n: int, used: int):
    """Two stores of ones: all but n are waited for, then the source of store `used` is overwritten."""

    def body(out, x_s):
        x_s[...] = jnp.ones((2, N, N), jnp.float32)
        plgpu.commit_smem()
        for i in range(2):
            plgpu.copy_smem_to_gmem(x_s.at[i], out.at[i])
        plgpu.wait_smem_to_gmem(n, wait_read_only=True)
        x_s[used] = jnp.zeros((N, N), jnp.float32)
        plgpu.wait_smem_to_gmem(0)

    return run(body, (), [tile(2, dtype=jnp.float32)], out_shape=(2, N, N)), np.ones((2, N, N))


@pytest.mark.parametrize("reverse", [False, True])
def test_the_order_of_threads_does_not_matter(reverse):
    args, expected = KERNELS[pipelined]
    with extended_interpreter(reverse=reverse):
        np.testing.assert_array_equal(pipelined(*args), expected(*args))


@pytest.mark.parametrize("kernel", [wgmma_groups, cp_async_groups, store_groups])
@pytest.mark.parametrize(("n", "used", "right"), [(0, 1, True), (1, 0, True), (1, 1, False), (2, 0, False)])
def test_a_wait_leaves_the_latest_groups_in_flight(kernel, n, used, right):
    with extended_interpreter():
        if right:
            np.testing.assert_array_equal(*kernel(n, used))
        else:
            with pytest.raises(Exception, match=r"RACE|in flight"):
                kernel(n, used)


def test_outside_the_context_the_stock_interpreter_runs_and_agrees():
    np.testing.assert_array_equal(*wgmma_groups(0, 1))


def test_a_box_beyond_the_array_reads_zeros_and_writes_nothing():
    def body(x, out, x_s, ready):
        rows = pl.ds(lax.axis_index("i") * N, N)
        plgpu.copy_gmem_to_smem(x.at[rows], x_s, ready)
        plgpu.barrier_wait(ready)
        x_s[...] = x_s[...] + 1
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(x_s, out.at[rows])
        plgpu.wait_smem_to_gmem(0)

    x = jnp.ones((100, N), jnp.float32)
    scratch = [tile(dtype=jnp.float32), plgpu.Barrier()]
    with extended_interpreter():
        out = run(body, (x,), scratch, out_shape=(100, N), grid=(2,), grid_names=("i",))
    np.testing.assert_array_equal(out, x + 1)


def test_arithmetic_and_control_flow():
    """What kernels do between copies, against the same function of arrays outside of a kernel."""

    def compute(x, n):
        row = lax.broadcasted_iota(jnp.int32, x.shape, 0)
        m = x.max(axis=1)
        p = jnp.exp2(x - lax.broadcast_in_dim(m, x.shape, [0]))
        p = jnp.where((row % 5 < n) & ~(row == 3), p, -jnp.tanh(p))
        p, m = lax.optimization_barrier((p, m))
        p = lax.fori_loop(0, n, lambda i, p: p * (1 + i.astype(jnp.float32)), p)
        p = lax.cond(n > 2, lambda p: p / lax.broadcast_in_dim(p.sum(axis=1), p.shape, [0]), lambda p: p, p)
        p, sums = lax.scan(lambda c, i: (c + i, c.min()), p, jnp.arange(3, dtype=jnp.float32))
        return p.astype(jnp.bfloat16).astype(jnp.float32) + lax.rem(-n, 4) + lax.div(-n, 2) + sums[2]

    def body(x, n, out, x_s):
        x_s[...] = x[...]
        out[...] = compute(x_s.at[...][...], n[1])

    x = jnp.asarray(np.random.default_rng(0).standard_normal((N, N)), jnp.float32)
    with extended_interpreter():
        out = run(body, (x, jnp.array([0, 3])), [tile(dtype=jnp.float32)])
    np.testing.assert_allclose(out, jax.jit(compute)(x, 3), rtol=1e-2)


def test_fresh_memory_is_nan_and_refs_are_written_in_place():
    def body(x, out, x_s):
        out[...] = x_s[...]
        x[0] = jnp.zeros((N,), jnp.float32)

    ref = jax.new_ref(jnp.ones((N, N), jnp.float32)) if hasattr(jax, "new_ref") else jax.array_ref(jnp.ones((N, N)))
    with extended_interpreter():
        out = run(body, (ref,), [tile(dtype=jnp.float32)])
    assert np.isnan(out).all()
    np.testing.assert_array_equal(ref[...], np.r_[np.zeros((1, N)), np.ones((N - 1, N))])


def test_a_kernel_stays_in_its_context():
    double = jax.jit(lambda x: run(lambda x, out: out.__setitem__(..., x[...] * 2), (x,), []))
    with extended_interpreter():
        np.testing.assert_array_equal(double(jnp.ones((N, N))), np.full((N, N), 2))
    with pytest.raises(Exception, match="runs outside it"):
        np.asarray(double(jnp.ones((N, N))))


def test_threads_that_all_wait_are_a_deadlock():
    before = threading.active_count()
    log, landed = [], []

    def body(i):
        log.append(i)
        threads.wait_until(lambda: len(log) == 3, "the others")
        threads.wait_until(lambda: i in landed, f"copy {i}")
        log.append(i + 10)
        threads.wait_until(lambda: i < 2, "nothing")

    def land(waits):
        landed.append(len(landed))
        return len(landed) <= 3 and waits

    threads = Threads([functools.partial(body, i) for i in range(3)], land)
    with pytest.raises(Deadlock, match="every thread waits: for nothing"):
        threads.run()
    assert log == [0, 1, 2, 10, 11, 12]
    assert threading.active_count() == before


def test_an_error_ends_all_threads():
    def fail():
        raise ValueError("one")

    threads = Threads([lambda: threads.wait_until(lambda: False, "ever"), fail, fail], lambda _: False)
    with pytest.raises(ValueError, match="one"):
        threads.run()


@pytest.mark.parametrize("first", [0, 8, 4])
def test_a_tma_load_into_tiles_begins_at_a_tile(first: int):
    """On a GPU the rows past the first tile's end would be zeros."""

    def body(x, out, smem, ready):
        plgpu.copy_gmem_to_smem(x.at[pl.ds(first, N)], smem, ready)
        plgpu.barrier_wait(ready)
        out[...] = load(smem, WGMMA).astype(jnp.float32)

    x = jnp.arange(2 * N * N, dtype=jnp.bfloat16).reshape(2 * N, N)
    with extended_interpreter():
        if first % 8:
            with pytest.raises(Exception, match="no multiple of its tiles"):
                run(body, (x,), [tile(), plgpu.Barrier()]).block_until_ready()
        else:
            got = run(body, (x,), [tile(), plgpu.Barrier()])
            np.testing.assert_array_equal(got, x[first : first + N].astype(jnp.float32))
