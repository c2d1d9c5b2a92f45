"""`ModelRunner`: the device's side of an engine. Holds weights, pools and programs; runs step plans."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fastgen_jax import kv_pool
from fastgen_jax.batch import FEW_TOKENS, Packer, Settings, SettingsOf, SplitsOf, bucket_for
from fastgen_jax.models.layers import Params
from fastgen_jax.orders import Alone, Group, Order
from fastgen_jax.params import check_same, one_dtype
from fastgen_jax.programs import PROGRAMS, Key, Programs
from fastgen_jax.sampling_state import SamplingState
from fastgen_jax.scheduler import Row, StepPlan, Window, widest
from fastgen_jax.scheduler.split_plan import SplitPlanner
from fastgen_jax.types import EngineConfig

Report = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Log-probabilities of rows: of the token [R], the likeliest token ids [R, k] and theirs [R, k]."""


@dataclass(frozen=True)
class Pending:
    """A dispatched step. Its arrays are on their way to the host; `tokens` and the reports wait for them.

    num_padding: tokens it was padded by.
    """

    plan: StepPlan
    num_padding: int
    sampled: Any
    prompt: tuple[Array, Array, Array] | None

    def tokens(self) -> list[int]:
        """The sample of each row of the plan."""
        sampled = self.sampled[0] if isinstance(self.sampled, tuple) else self.sampled
        return np.asarray(sampled)[: len(self.plan.rows)].tolist()

    def report(self) -> Report | None:
        """Log-probabilities of the samples, where the step was asked for them."""
        return jax.tree.map(np.asarray, self.sampled[1:]) if isinstance(self.sampled, tuple) else None

    def prompt_report(self) -> Report | None:
        """Log-probabilities of each token's successor in its prompt, where the step was asked for them."""
        return None if self.prompt is None else jax.tree.map(np.asarray, self.prompt)


class ModelRunner:
    """Runs step plans on the device, in the order they are dispatched.

    max_num_batched_tokens: of the largest step. max_model_len: at most; it shrinks to what the pool holds.
    num_blocks: of the pool, as built; block_size: tokens in each. window: by which sequences hold them.
    group: the processes that share the model. Whatever this runner does with its device is an `Order`, which theirs
        `execute`, too.
    """

    def __init__(
        self,
        model: Any,
        params: Params,
        config: EngineConfig,
        *,
        max_num_batched_tokens: int,
        max_model_len: int,
        max_num_seqs: int,
        block_size: int,
        group: Group | None = None,
    ):
        self._group = group or Alone()
        self.model = model
        self.dtype = one_dtype(params)
        self.kv_dtype = kv_pool.pool_dtype(config.kv_cache_dtype, self.dtype)
        self.params = jax.tree.map(jnp.asarray, params)
        self._device, *self._others = model.shards.devices_of(self.params)
        self.block_size, self.max_num_seqs = block_size, max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        num_blocks = config.num_blocks or self._fit_blocks(config.gpu_memory_utilization, max_model_len)
        self.num_blocks = self._group.least(num_blocks)
        self.window = Window.under(config.policy, widest(model.config.windows), block_size)
        self.max_model_len = min(max_model_len, self.window.longest(self.num_blocks - 1))
        self.programs = self._programs(self.num_blocks, self.max_model_len)
        self._do_reset()

    def execute(self, order: Order) -> Any:
        """Do what the runner that gave the order does."""
        return getattr(self, f"_do_{order.kind}")(*order.numbers, *order.arrays)

    def _order(self, kind: str, *numbers: int, arrays: tuple[np.ndarray, ...] = ()) -> Any:
        order = Order(kind, numbers, arrays)
        try:
            self._group.tell(order)
            return self.execute(order)
        except BaseException:  # Ctrl-C too
            self._group.break_off()
            raise

    @property
    def compiles_at_once(self) -> bool:
        """Whether several programs may be compiled at once; processes that share the model keep to one order."""
        return isinstance(self._group, Alone)

    def check_not_shared(self, method: str) -> None:
        """ValueError where other processes have a part of the model."""
        if not isinstance(self._group, Alone):
            raise ValueError(f"{method} needs the whole model in this process, and others share it")

    def settle(self) -> None:
        """After an error of the device: return if it is not that a process of the group is gone."""
        self._group.settle()

    def close(self) -> None:
        """Let the other processes of the group go."""
        self._group.close()

    def reset(self) -> None:
        """Forget every sequence: empty pools, and no tenant in any slot."""
        self._order("reset")

    def limit(self, max_num_batched_tokens: int) -> None:
        """Keep only the buckets that steps of at most so many tokens need."""
        self._order("limit", max_num_batched_tokens)

    def compile_all(self, keys: list[Key], advance: Callable[[int], Any]) -> None:
        """Have `keys` of `programs.keys()` ready. advance: called with 1 for each."""
        if self.compiles_at_once:
            self.programs.compile_all(keys, advance)
            return
        for name, bucket in keys:
            self._order("compile", PROGRAMS.index(name), bucket)
            advance(1)

    def _do_reset(self) -> None:
        self.kv_pool = self._allocate_pool(self.num_blocks)
        self.state = self._allocate_state(self.max_model_len)
        self.packer = Packer(self.programs.layout, self.programs.buckets, self._split_planner())

    def _do_limit(self, max_num_batched_tokens: int) -> None:
        self.programs.limit(max_num_batched_tokens)
        self.packer.buckets = self.programs.buckets

    def _do_compile(self, index: int, bucket: int) -> None:
        self.programs.get(PROGRAMS[index], bucket)

    def _split_planner(self) -> SplitsOf | None:
        """Dynamic SplitKV's plan for each step, if the backend's kernels take one."""
        config, sizes = self.model.config, self.model.shards.head_sizes(self.model.config)
        limits = self.model.backend.split_limits(
            **sizes, block_size=self.block_size, dtype=self.dtype, kv_dtype=self.kv_dtype
        )
        if limits is None:
            return None
        num_readers, max_extra = limits
        planner = SplitPlanner(
            sizes["num_kv_heads"],
            num_readers,
            self.block_size,
            max_extra=max_extra,
            window=widest(config.windows),
        )
        return planner.plan

    @property
    def is_broken(self) -> bool:
        """Whether an exception struck between a call that took the pools and the assignment of what it returned."""
        return any(array.is_deleted() for array in jax.tree.leaves((self.kv_pool, self.state)))

    def _fit_blocks(self, utilization: float, max_model_len: int) -> int:
        """How many blocks there is memory for."""
        per_block = kv_pool.block_bytes(self.model, self.block_size, self.kv_dtype)
        most = self.max_num_seqs * -(-max_model_len // self.block_size) + 1
        free_bytes = min(kv_pool.free_bytes(device, utilization) for device in (self._device, *self._others))
        if self._device.platform == "cpu":
            return kv_pool.fit_blocks(free_bytes, per_block, most)
        return kv_pool.size_pool(
            free_bytes, per_block, most, lambda blocks: self._programs(blocks, max_model_len).largest_step_bytes()
        )

    def _programs(self, num_blocks: int, max_model_len: int) -> Programs:
        return Programs.of_engine(
            self.model,
            self.params,
            kv_dtype=self.kv_dtype,
            num_blocks=num_blocks,
            block_size=self.block_size,
            max_model_len=max_model_len,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self._max_num_batched_tokens,
            few=FEW_TOKENS if self._device.platform == "cpu" else (),
        )

    def _allocate_pool(self, num_blocks: int) -> list[kv_pool.LayerKV]:
        sharding = self.model.shards.sharding(*kv_pool.axes(self.model.backend))
        allocate = partial(kv_pool.allocate, self.model, num_blocks, self.block_size, self.kv_dtype)
        return self._made(allocate, sharding)

    def _allocate_state(self, max_model_len: int) -> SamplingState:
        vocab_size = self.model.config.vocab_size
        allocate = partial(SamplingState.allocate, self.max_num_seqs, max_model_len, vocab_size)
        return self._made(allocate, self.model.shards.sharding())

    def _made(self, make: Callable[[], Any], sharding: jax.sharding.NamedSharding | None) -> Any:
        """What `make` returns, made where it will lie: no device has to hold all of it first."""
        return make() if sharding is None else jax.jit(make, out_shardings=sharding)()

    def dispatch(
        self, plan: StepPlan, settings_of: SettingsOf, *, report: bool, wants_prompt: Callable[[Row], bool]
    ) -> Pending:
        """Start a step and return at once.

        settings_of: the settings of a sequence, asked when it first appears in its slot.
        report: fetch log-probabilities of the samples. wants_prompt: whether those of a row's prompt are wanted.
        """
        buffer, bucket = self.packer.pack(plan, settings_of)
        num_rows = bucket_for(self.programs.row_buckets, len(plan.rows))
        targets = (prompt_targets(plan, bucket),) if any(wants_prompt(row) for row in plan.rows) else ()
        sampled, prompt = self._order("step", bucket, num_rows, report, arrays=(buffer, *targets))
        for array in jax.tree.leaves((sampled, prompt)):
            array.copy_to_host_async()
        return Pending(plan, bucket - plan.num_tokens, sampled, prompt)

    def _do_step(
        self, bucket: int, num_rows: int, report: bool, buffer: np.ndarray, targets: np.ndarray | None = None
    ) -> tuple[Any, Any]:
        head = "sample_logprobs" if report else "sample"
        if self.compiles_at_once:
            self.programs.compile_step(bucket, head, num_rows)
        hidden, last, rows = self._backbone(bucket, buffer)
        program = self.programs.get(head, num_rows)
        sampled, self.state = program(self._head_params, self.state, last, rows)
        if targets is None:
            return sampled, None
        return sampled, self.programs.get("prompt_logprobs", bucket)(self._head_params, hidden, targets)

    def logits(self, plan: StepPlan) -> np.ndarray:
        """Run a step and return float32 logits [rows, V] after each row's last token."""
        buffer, bucket = self.packer.pack(plan, lambda seq: Settings(num_prompt_tokens=len(seq.prompt_token_ids)))
        num_rows = bucket_for(self.programs.row_buckets, len(plan.rows))
        return np.asarray(self._order("logits", bucket, num_rows, arrays=(buffer,)))[: len(plan.rows)]

    def _do_logits(self, bucket: int, num_rows: int, buffer: np.ndarray) -> Array:
        _, last, _ = self._backbone(bucket, buffer)
        return self.programs.get("logits", num_rows)(self._head_params, last)

    def set_row(self, slot: int, row: tuple[np.ndarray, ...]) -> None:
        """Store what sampling needs to know of a slot beside its settings: masks and biases."""
        self._order("set_row", slot, arrays=row)

    def _do_set_row(self, slot: int, *row: np.ndarray) -> None:
        self.state = self.programs.get("set_row", 1)(self.state, np.int32(slot), *row)

    def update_params(self, params: Params) -> None:
        """Swap the weights; nothing is compiled. ValueError unless names, shapes and dtypes are the same."""
        check_same(self.params, params)
        leaves, tree = jax.tree.flatten(self.params)
        new = [jax.device_put(x, old.sharding) for x, old in zip(jax.tree.leaves(params), leaves, strict=True)]
        self.params = jax.tree.unflatten(tree, new)

    @property
    def params(self) -> Params:
        return self._params

    @params.setter
    def params(self, params: Params) -> None:
        self._params = params
        self._head_params = self.model.head_params(params)

    def _backbone(self, bucket: int, buffer: np.ndarray) -> tuple[Array, Array, Array]:
        program = self.programs.get("backbone", bucket)
        hidden, last, rows, self.kv_pool, token_pool = program(
            self._params, self.kv_pool, self.state.token_pool, buffer
        )
        self.state = replace(self.state, token_pool=token_pool)
        return hidden, last, rows


def prompt_targets(plan: StepPlan, bucket: int) -> np.ndarray:
    """int32 [T]: the prompt token after each token of the step; 0 where there is none."""
    targets = np.zeros(bucket, np.int32)
    first = 0
    for seq, start, num_new, _ in plan.rows:
        after = seq.prompt_token_ids[start + 1 : start + 1 + num_new]
        targets[first : first + len(after)] = after
        first += num_new
    return targets
