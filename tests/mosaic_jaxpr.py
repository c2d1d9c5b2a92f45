"""One thread of a kernel: its jaxpr, equation by equation, on a `LateMemory`. And where its synchronisation is."""

import dataclasses
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
from jax._src import core as jax_core
from jax._src import source_info_util
from jax._src.pallas.mosaic.interpret import thread_map
from jax._src.pallas.mosaic_gpu import core as gpu_core
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, jaxpr_interpret
from jax._src.pallas.mosaic_gpu.interpret import shared_memory as memory
from jax._src.state import indexing
from jax._src.state.types import AbstractRef
from jax.experimental.pallas import mosaic_gpu as plgpu
from mosaic_async import Access, BarrierWait, CpAsync, Key, LateMemory, Wgmma
from mosaic_numpy import evaluate, matmul

Path = tuple[int, ...]  # of an equation: its index in the kernel, of a nested jaxpr in it, of an equation in that, ...

TOKEN = np.int32(thread_map.NESTED_TOKEN_VALUE)  # what the stock interpreter threads through; it orders nothing here

SYNCHRONISATION = {
    "barrier_wait",
    "barrier_arrive",
    "barrier_arrive_and_wait",
    "commit_smem",
    "commit_group",
    "wgmma_wait",
    "wgmma_accumulator_deref",  # for the wait it implies
    "wait_gmem_to_smem",
    "wait_smem_to_gmem",
}

CALLS = {"jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "remat"}


@dataclasses.dataclass(frozen=True)
class Site:
    """A synchronisation equation: of the `call`-th kernel of a session, at `path` in its nested jaxprs."""

    call: int
    path: Path
    name: str
    line: str

    def __str__(self) -> str:
        return f"kernel {self.call}: {self.name} at {self.line}"


def find_sites(jaxpr, call: int, prefix: Path = ()) -> Iterator[Site]:
    for i, eqn in enumerate(jaxpr.eqns):
        path, name = (*prefix, i), eqn.primitive.name.removesuffix("_p")
        if name in SYNCHRONISATION and eqn.params.get("wait_n", 0) is not None:
            yield Site(call, path, name, source_info_util.summarize(eqn.source_info))
        for j, nested in enumerate(_nested_jaxprs(eqn)):
            yield from find_sites(nested, call, (*path, j))


def _nested_jaxprs(eqn) -> list[Any]:
    values = [v for p in eqn.params.values() for v in (p if isinstance(p, (list, tuple)) else (p,))]
    return [v for v in values if hasattr(v, "eqns") and hasattr(v, "invars")]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LateInterpreter(jaxpr_interpret.JaxprInterpreter):
    """Interprets the equations that wait, or that NumPy knows, itself, and leaves the others to its base class.

    A method `_name` is the rule of the primitive `name`: the equation and its inputs to its outputs.
    """

    deleted: Path | None  # the synchronisation equation to leave out
    frames: list[tuple[Path, Any]] = dataclasses.field(default_factory=list)  # the running equation of each open jaxpr

    @property
    def shared(self) -> LateMemory:
        return gpu_callbacks._get_shared_memory()

    def interpret(self, jaxpr, token, *args):
        env = dict(zip([*jaxpr.constvars, *jaxpr.invars], args, strict=True))
        prefix: Path = ()
        if self.frames:
            path, caller = self.frames[-1]
            prefix = (*path, [id(nested) for nested in _nested_jaxprs(caller)].index(id(jaxpr)))
        for i, eqn in enumerate(jaxpr.eqns):
            self.frames.append(((*prefix, i), eqn))
            outs = self._equation(eqn, (*prefix, i), [_read(env, v) for v in eqn.invars])
            self.frames.pop()
            env.update(zip(eqn.outvars, outs, strict=True))
        return token, [_read(env, v) for v in jaxpr.outvars]

    def _equation(self, eqn, path, inputs) -> Sequence[Any]:
        name = eqn.primitive.name.removesuffix("_p")
        if path == self.deleted:
            if name != "wgmma_accumulator_deref":
                return []
            eqn = _with_params(eqn, wait_n=None)
        if rule := getattr(self, f"_{name}", None):
            return rule(eqn, *inputs)
        if name in CALLS:
            return self.interpret(_nested_jaxprs(eqn)[0], TOKEN, *inputs)[1]
        out = evaluate(name, eqn.params, inputs)
        if out is NotImplemented:
            return self._stock(eqn, inputs)
        outs = out if eqn.primitive.multiple_results else [out]
        return [np.asarray(o, v.aval.dtype) for o, v in zip(outs, eqn.outvars, strict=True)]

    def _stock(self, eqn, inputs) -> Sequence[Any]:
        """What the stock interpreter does."""
        values = {v: x for v, x in zip(eqn.invars, inputs, strict=True) if not isinstance(v, jax_core.Literal)}
        alone = SimpleNamespace(constvars=[], invars=list(values), eqns=[eqn], outvars=eqn.outvars)
        _, outs = super().interpret(alone, TOKEN, *values.values())
        return [np.asarray(out) for out in outs]

    # Control flow.

    def _cond(self, eqn, index, *operands):
        branches = eqn.params["branches"]
        return self.interpret(branches[min(max(int(index), 0), len(branches) - 1)], TOKEN, *operands)[1]

    def _while(self, eqn, *operands):
        p = eqn.params
        num_cond, num_body = p["cond_nconsts"], p["body_nconsts"]
        cond_consts, body_consts = operands[:num_cond], operands[num_cond : num_cond + num_body]
        carry = operands[num_cond + num_body :]
        while self.interpret(p["cond_jaxpr"], TOKEN, *cond_consts, *carry)[1][0]:
            carry = self.interpret(p["body_jaxpr"], TOKEN, *body_consts, *carry)[1]
        return carry

    def _scan(self, eqn, *operands):
        p = eqn.params
        consts, carry, xs = (list(group) for group in p["ft_in"].update(operands).unpack())
        stacked = []
        for i in range(p["length"]):
            step = p["length"] - 1 - i if p["reverse"] else i
            outs = self.interpret(p["jaxpr"], TOKEN, *consts, *carry, *(x[step] for x in xs))[1]
            carry, ys = (list(group) for group in p["ft_out"].update(outs).unpack())
            stacked.append(ys)
        avals = [v.aval for v in eqn.outvars[len(carry) :]]
        stacked = stacked[::-1] if p["reverse"] else stacked
        return [*carry, *(np.array([ys[i] for ys in stacked], a.dtype).reshape(a.shape) for i, a in enumerate(avals))]

    def _run_state(self, eqn, *operands):
        """Arrays become buffers; the accumulators' last values are read when all wgmma have retired."""
        is_array = [not isinstance(v.aval, AbstractRef) for v in eqn.invars]
        keys = [self._allocate_registers(x) if array else x for x, array in zip(operands, is_array, strict=True)]
        self.interpret(eqn.params["jaxpr"], TOKEN, *keys)
        self.shared.wait_wgmma(self.thread, 0)
        outs = []
        for var, key, array in zip(eqn.invars, keys, is_array, strict=True):
            outs.append(self.shared.read(*self._place(var, key)) if array else key)
            if array:
                self.shared.deallocate_buffer(Key.from_array(key))
        return outs

    def _allocate_registers(self, value) -> np.ndarray:
        space = memory.get_memory_space_idx(plgpu.MemorySpace.REGS)
        _, request = gpu_callbacks._make_allocation_request_array(
            token=TOKEN, compute_unit=self.thread, memory_space_id=space
        )
        return gpu_callbacks._allocate_buffer(TOKEN, self.mesh_location, self.thread, request, np.array(value))[1]

    def _axis_index(self, eqn):
        return [np.asarray(self._interpret_axis_index_p(eqn))]

    # Barriers and copies.

    def _barrier_wait(self, eqn, *inputs):
        self._wait_barrier(eqn, *inputs)
        return self._stock(eqn, inputs)

    def _barrier_arrive_and_wait(self, eqn, *inputs):
        self._interpret_barrier_arrive_p(eqn, TOKEN, lambda: inputs)
        self._wait_barrier(eqn, *inputs)
        self._interpret_barrier_wait_p(eqn, TOKEN, lambda: inputs)
        return []

    def _wait_barrier(self, eqn, barrier, *leaves):
        """Lets others run until the stock wait will find its phase completed."""
        key = jaxpr_interpret._get_barrier_allocation_key_from_inval(barrier, eqn.params["transforms_treedef"], leaves)
        wait = BarrierWait(self.shared.get_barrier(Key.from_array(key)), eqn.source_info)
        self.shared.wait_barrier(wait, self.thread)

    def _copy_gmem_to_smem(self, eqn, *inputs):
        eqn, inputs = _without_predicate(eqn, inputs)
        if eqn is None:
            return []
        leaves = inputs[3 if eqn.params["has_barrier"] else 2 :]
        trees = eqn.params["src_transforms_treedef"], eqn.params["dst_transforms_treedef"]
        src_transforms, dst_transforms = _split(trees, leaves)
        if eqn.params["has_barrier"]:
            _check_box(src_transforms, dst_transforms)
            return self._stock(eqn, inputs)
        src, dst = inputs[:2]
        copy = CpAsync(
            thread=self.thread,
            clock=self.shared.issue_clock(self.thread),
            src=self._place(eqn.invars[0], src, src_transforms),
            dst=self._place(eqn.invars[1], dst, dst_transforms),
            source_info=eqn.source_info,
        )
        self.shared.issue_cp_async(copy)
        return []

    def _wait_gmem_to_smem(self, eqn):
        self.shared.wait_cp_async(self.thread, eqn.params["n"])
        return []

    def _copy_smem_to_gmem(self, eqn, *inputs):
        eqn, inputs = _without_predicate(eqn, inputs)
        if eqn is None:
            return []
        self._stock(eqn, inputs)
        if eqn.params["commit_group"]:
            self.shared.commit_stores(self.thread)
        return []

    def _commit_group(self, eqn):
        self.shared.commit_stores(self.thread)
        return []

    # Matrix products.

    def _mma(self, eqn, acc, a, b):
        return [matmul(acc, a, b)]

    def _inline_mgpu(self, eqn, x):
        """Of it our kernels have changes of layout and of dtype only (test_mosaic_gpu_portable.py)."""
        return [np.asarray(x).astype(eqn.outvars[0].aval.dtype)]

    def _wgmma_ref(self, eqn, acc, a, b, *leaves):
        trees = [eqn.params[f"{name}_transforms_tree"] for name in ("acc", "a", "b")]
        acc_transforms, a_transforms, b_transforms = _split(trees, leaves)
        acc_var, a_var, b_var = eqn.invars[:3]
        wgmma = Wgmma(
            thread=self.thread,
            clock=self.shared.issue_clock(self.thread),
            acc=self._place(acc_var, acc, acc_transforms),
            a=self._place(a_var, a, a_transforms) if isinstance(a_var.aval, AbstractRef) else np.array(a),
            b=self._place(b_var, b, b_transforms),
            source_info=eqn.source_info,
        )
        self.shared.issue_wgmma(wgmma)
        return []

    def _wgmma_wait(self, eqn):
        self.shared.wait_wgmma(self.thread, eqn.params["n"])
        return []

    def _wgmma_accumulator_deref(self, eqn, acc):
        if eqn.params["wait_n"] is not None:
            self.shared.wait_wgmma(self.thread, eqn.params["wait_n"])
        self.shared.check_accumulator(Key.from_array(acc), self.thread)
        return [self.shared.read(*self._place(eqn.invars[0], acc))]

    def _wgmma_accumulator_store(self, eqn, acc, value):
        self.shared.check_accumulator(Key.from_array(acc), self.thread)
        self.shared.write(*self._place(eqn.invars[0], acc), np.asarray(value))
        return [value]

    def _place(self, var, ref, transforms: Sequence[Any] = ()) -> tuple[Key, Access]:
        """The buffer, and the part of it, that the value `ref` of `var` means under `transforms`."""
        ref, transforms = jaxpr_interpret.resolve_ref(var.aval, ref, tuple(transforms))
        transforms = jax.tree.map(int, gpu_callbacks._remove_noop_transforms(transforms))
        return (key := Key.from_array(ref)), self.shared.access(key, transforms)


def _check_box(src_transforms: Sequence[Any], dst_transforms: Sequence[Any]) -> None:
    """Raises if a TMA load into tiled shared memory does not begin at a tile of global memory.

    TMA sees a tile's rows as an axis of their own: a box that begins inside one is out of bounds at its end, and the
    rows there are filled with zeros.
    """
    starts: list[int] = []  # of the axes that the source still has
    for i, transform in enumerate(t for t in src_transforms if isinstance(t, indexing.NDIndexer)):
        before = starts if i else [0] * len(transform.indices)
        indices = zip(before, transform.indices, strict=True)
        starts = [int(start + x.start) for start, x in indices if isinstance(x, indexing.Slice)]
    for transform in dst_transforms:
        if isinstance(transform, gpu_core.UntilingTransform) and starts:
            tiling = transform.tiling
            if any(start % size for start, size in zip(starts[-len(tiling) :], tiling, strict=True)):
                raise RuntimeError(f"a TMA load begins at {starts}, which is no multiple of its tiles, {tiling}")


def _read(env, var):
    return np.asarray(var.val, var.aval.dtype) if isinstance(var, jax_core.Literal) else env[var]


def _split(trees, leaves) -> list[Any]:
    """A list of leaves, made into the structures `trees`; () for a tree that is None."""
    out, start = [], 0
    for tree in trees:
        stop = start + (tree.num_leaves if tree is not None else 0)
        out.append(tree.unflatten(leaves[start:stop]) if tree is not None else ())
        start = stop
    return out


def _with_params(eqn, **changes):
    return eqn.replace(params=eqn.params | changes)


def _without_predicate(eqn, inputs):
    """The copy without its predicate, or (None, []) where that is false."""
    if not eqn.params.get("has_user_predicate"):
        return eqn, inputs
    *inputs, predicate = inputs
    if not predicate:
        return None, []
    return _with_params(eqn, has_user_predicate=False).replace(invars=eqn.invars[:-1]), inputs
