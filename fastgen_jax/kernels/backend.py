"""`Backend`: what an attention backend offers."""

from typing import Protocol

from jax import Array
from jax.typing import DTypeLike


class Backend(Protocol):
    """What a backend offers: a module, or for `mosaic_gpu` an object that knows its GPU.

    Letters: N blocks of B slots, S rows of P blocks, T tokens, H query heads over K KV heads of D.
    """

    NAME: str
    DEFAULT_BLOCK_SIZE: int
    HEADS_AXIS: int  # where K is in the pools' shapes

    def supported(
        self,
        head_dim: int,
        num_heads: int,
        num_kv_heads: int,
        block_size: int,
        dtype: DTypeLike,
        platform: str,
        kv_dtype: DTypeLike | None = None,
    ) -> str | None:
        """None if the backend can run this, else the reason why not, to follow "cannot run: ".

        dtype: of queries and output. kv_dtype: of the pools; None is the same.
        """

    def split_limits(
        self,
        head_dim: int,
        num_heads: int,
        num_kv_heads: int,
        block_size: int,
        dtype: DTypeLike,
        kv_dtype: DTypeLike | None = None,
    ) -> tuple[int, int] | None:
        """For Dynamic SplitKV: the thread blocks that read side by side, and the room for splits beyond one a row.

        None where rows are not split.
        """

    def pool_shapes(
        self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of the K and the V pool. Axis 0 is N in both."""

    def pool_dims(self, k_pool: Array, v_pool: Array) -> tuple[int, int, int, int]:
        """(N, B, K, D) of pools of this backend's layout: `pool_shapes` undone."""

    def allocate(
        self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: DTypeLike
    ) -> tuple[Array, Array]:
        """Empty K and V pools."""

    def write_kv(
        self,
        k_pool: Array,
        v_pool: Array,
        k: Array,
        v: Array,
        slot_mapping: Array,
        k_scale: Array | None = None,
        v_scale: Array | None = None,
    ) -> tuple[Array, Array]:
        """The pools with token t's k[t] and v[t] (each [K, D]) in slot slot_mapping[t] = block * B + offset.

        k_scale, v_scale: as `ragged_attention` has them; k / k_scale is what is stored, `fp8.to_stored` says how.
        Slots outside [0, N * B) are dropped; of those inside, none comes twice. In place when the pools are donated.
        """

    def ragged_attention(
        self,
        q: Array,
        k_pool: Array,
        v_pool: Array,
        cu_q_lens: Array,
        kv_lens: Array,
        block_tables: Array,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        num_splits: Array | None = None,
        k_scale: Array | None = None,
        v_scale: Array | None = None,
    ) -> Array:
        """The package's `ragged_attention`, its arguments unchecked."""
