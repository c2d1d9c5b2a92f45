"""`ModelRunner`: the device's side of an engine. Holds weights, pools and programs; runs step plans."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fastgen_jax import kv_pool
from fastgen_jax.batch import Layout, Packer, bucket_ladder
from fastgen_jax.models.layers import Params
from fastgen_jax.programs import Programs
from fastgen_jax.sampling_state import SamplingState
from fastgen_jax.scheduler import Row, Sequence, StepPlan
from fastgen_jax.types import EngineConfig

Report = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Log-probabilities of rows: of the token [R], the likeliest token ids [R, k] and theirs [R, k]."""


@dataclass(frozen=True)
class Pending:
    """A dispatched step. Its arrays are on their way to the host; `tokens` and the reports wait for them."""

    plan: StepPlan
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

    `settings_of(seq)` gives a sequence's row of settings when it first appears in a slot.
    """

    def __init__(
        self,
        model: Any,
        params: Params,
        config: EngineConfig,
        *,
        max_model_len: int,
        max_num_seqs: int,
        block_size: int,
        settings_of: Callable[[Sequence], np.ndarray],
    ):
        self.model = model
        self.params = params
        self.dtype = jax.tree.leaves(params)[0].dtype
        blocks_per_seq = -(-max_model_len // block_size)
        layout = Layout(max_num_seqs, blocks_per_seq, block_size)
        buckets = bucket_ladder(config.max_num_batched_tokens)
        row_buckets = bucket_ladder(max_num_seqs)
        self.packer = Packer(layout, buckets, settings_of)
        self._row_buckets = row_buckets
        self.state = SamplingState.allocate(max_num_seqs, max_model_len, model.config.vocab_size)

        def programs(num_blocks: int) -> Programs:
            pool = jax.eval_shape(lambda: self._allocate(num_blocks, block_size))
            return Programs(model, layout, buckets, row_buckets, params, pool, self.state)

        num_blocks = config.num_blocks
        if num_blocks is None:
            bytes_per_block = kv_pool.block_bytes(model.config, model.backend, block_size, self.dtype)
            most = max_num_seqs * blocks_per_seq + 1
            device = jax.tree.leaves(params)[0].devices().pop()
            needed = programs(2).largest_step_bytes() if device.platform == "gpu" else 0
            left = kv_pool.free_bytes(device, config.gpu_memory_utilization, needed)
            num_blocks = kv_pool.fit_blocks(left, bytes_per_block, most)
        self.num_blocks = num_blocks
        self.kv_pool = self._allocate(num_blocks, block_size)
        self.programs = programs(num_blocks)

    def _allocate(self, num_blocks: int, block_size: int) -> list:
        return kv_pool.allocate(self.model.config, self.model.backend, num_blocks, block_size, self.dtype)

    def dispatch(self, plan: StepPlan, *, report: bool, wants_prompt: Callable[[Row], bool]) -> Pending:
        """Start a step and return at once.

        report: fetch log-probabilities of the samples. wants_prompt: whether a row's prompt
            log-probabilities are wanted.
        """
        hidden, last, rows = self._backbone(plan)
        num_rows = self._row_bucket(len(plan.rows))
        program = self.programs.get("sample_logprobs" if report else "sample", num_rows)
        sampled, self.state = program(self._head_params, self.state, last, rows)
        prompt = None
        if any(wants_prompt(row) for row in plan.rows):
            bucket = hidden.shape[0]
            targets = prompt_targets(plan, bucket)
            prompt = self.programs.get("prompt_logprobs", bucket)(self._head_params, hidden, targets)
        for array in jax.tree.leaves((sampled, prompt)):
            array.copy_to_host_async()
        return Pending(plan, sampled, prompt)

    def logits(self, plan: StepPlan) -> np.ndarray:
        """Run a step and return float32 logits [rows, V] after each row's last token."""
        _, last, _ = self._backbone(plan)
        program = self.programs.get("logits", self._row_bucket(len(plan.rows)))
        return np.asarray(program(self._head_params, last))[: len(plan.rows)]

    def set_row(self, slot: int, row: tuple[np.ndarray, ...]) -> None:
        """Store what sampling needs to know of a slot beside its settings: masks and biases."""
        self.state = self.programs.get("set_row", 1)(self.state, np.int32(slot), *row)

    def update_params(self, params: Params) -> None:
        """Swap the weights; nothing is compiled. ValueError unless names, shapes and dtypes are the same."""
        check_same(self.params, params)
        self.params = jax.tree.map(lambda new, old: jax.device_put(new, old.sharding), params, self.params)

    @property
    def params(self) -> Params:
        return self._params

    @params.setter
    def params(self, params: Params) -> None:
        self._params = params
        self._head_params = self.model.head_params(params)

    def _backbone(self, plan: StepPlan) -> tuple[Array, Array, Array]:
        buffer, bucket = self.packer.pack(plan)
        program = self.programs.get("backbone", bucket)
        hidden, last, rows, self.kv_pool, token_pool = program(
            self._params, self.kv_pool, self.state.token_pool, buffer
        )
        self.state = replace(self.state, token_pool=token_pool)
        return hidden, last, rows

    def _row_bucket(self, num_rows: int) -> int:
        return next(bucket for bucket in self._row_buckets if bucket >= num_rows)


def prompt_targets(plan: StepPlan, bucket: int) -> np.ndarray:
    """int32 [T]: the prompt token after each token of the step; 0 where there is none."""
    targets = np.zeros(bucket, np.int32)
    first = 0
    for seq, start, num_new, _ in plan.rows:
        after = seq.prompt_token_ids[start + 1 : start + 1 + num_new]
        targets[first : first + len(after)] = after
        first += num_new
    return targets


def check_same(old: Params, new: Params) -> None:
    """ValueError naming the first leaf of `new` that is missing, surplus, or of another shape or dtype."""

    def leaves(tree: Params) -> dict[str, Any]:
        return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}

    have, want = leaves(new), leaves(old)
    if names := sorted(set(have) ^ set(want)):
        raise ValueError(f"the new params {'lack' if names[0] in want else 'have a surplus'} {names[0]}")
    for name, leaf in want.items():
        found = have[name]
        if (found.shape, jnp.dtype(found.dtype)) != (leaf.shape, jnp.dtype(leaf.dtype)):
            raise ValueError(f"{name} is {found.dtype}{list(found.shape)}; it must be {leaf.dtype}{list(leaf.shape)}")
