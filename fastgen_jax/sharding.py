"""How a model's weights and work are cut over the devices that share it: tensor parallelism.

A step's programs run under `jax.shard_map`: each device runs the model with its share of the heads, of the MLP and of
the vocabulary, and the layers add up what they computed (Megatron-LM, arXiv 1909.08053). So the collectives of a step
are the ones that the layers name: two sums a layer, one for the embedding, and around sampling an exchange of logits
for rows and a gather of the sampled tokens.
"""

from dataclasses import dataclass, fields
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

MESH_AXIS = "tp"


@dataclass(frozen=True)
class ShardingRules:
    """Logical axis of a weight or a pool -> the mesh axis that it is cut along; None is whole on every device.

    To cut a mixture of experts by experts instead of within each: `ShardingRules(experts="tp", expert_mlp=None)`.
    """

    vocab: str | None = MESH_AXIS
    heads: str | None = MESH_AXIS
    kv_heads: str | None = MESH_AXIS
    mlp: str | None = MESH_AXIS
    experts: str | None = None
    expert_mlp: str | None = MESH_AXIS
    embed: str | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            if (axis := getattr(self, field.name)) not in (None, MESH_AXIS):
                raise ValueError(f"{field.name}={axis!r} is no mesh axis; it must be {MESH_AXIS!r} or None")
        if (self.experts is None) == (self.expert_mlp is None):
            raise ValueError("a mixture is cut by experts or within each: one of experts and expert_mlp must be None")


def rules_for(config: Any, expert_parallel: bool) -> ShardingRules:
    """Those of a model's config; ValueError if experts are to be shared out and it has none."""
    if not expert_parallel:
        return ShardingRules()
    if getattr(config, "mixture", None) is None:
        raise ValueError("expert_parallel=True is for a mixture of experts, and this model has none")
    return ShardingRules(experts=MESH_AXIS, expert_mlp=None)


@dataclass(frozen=True)
class Shards:
    """What a layer has to know of the devices that share it. Without a mesh it has all the work to itself.

    inside: whether the code runs under `shard_map`, where there is somebody to talk to; shapes need nobody.
    """

    mesh: Mesh | AbstractMesh | None = None
    rules: ShardingRules = ShardingRules()
    inside: bool = True

    @classmethod
    def over(cls, devices: list[Any], rules: ShardingRules | None = None) -> "Shards":
        """One shard on each of `devices`; a single one is no mesh."""
        mesh = Mesh(np.array(devices), (MESH_AXIS,)) if len(devices) > 1 else None
        return cls(mesh, rules or ShardingRules())

    @classmethod
    def of_size(cls, size: int, rules: ShardingRules | None = None) -> "Shards":
        """`size` shards on devices that nobody has yet, for arithmetic."""
        return cls(AbstractMesh((size,), (MESH_AXIS,)) if size > 1 else None, rules or ShardingRules())

    @property
    def size(self) -> int:
        return 1 if self.mesh is None else self.mesh.size

    def cuts(self, axis: str) -> bool:
        """Whether this logical axis is cut."""
        return self.mesh is not None and getattr(self.rules, axis) is not None

    def local(self, size: int, axis: str) -> int:
        """What of `size` along a logical axis one device has; of a vocabulary, that of the fullest."""
        return -(-size // self.size) if self.cuts(axis) else size

    def local_kv_heads(self, num_kv_heads: int) -> int:
        """KV heads of one device: where they are fewer than the devices, some of these hold the same one."""
        return max(1, num_kv_heads // self.size) if self.cuts("kv_heads") else num_kv_heads

    def head_sizes(self, config: Any) -> dict[str, Any]:
        """head_dim, num_heads and num_kv_heads of one device, as attention backends are asked about them."""
        return {
            "head_dim": config.head_dim,
            "num_heads": self.local(config.num_heads, "heads"),
            "num_kv_heads": self.local_kv_heads(config.num_kv_heads),
        }

    def pool_kv_heads(self, num_kv_heads: int) -> int:
        """KV heads of all devices together, repeated ones counted as often as they are there."""
        return self.local_kv_heads(num_kv_heads) * (self.size if self.cuts("kv_heads") else 1)

    def sum(self, x: Array, axis: str) -> Array:
        """The sum over the devices of partial results of a contraction over a logical axis."""
        return jax.lax.psum(x, MESH_AXIS) if self.cuts(axis) and self.inside else x

    def mean(self, x: Array, axis: str) -> Array:
        """The mean over the devices of means over their equal parts of a logical axis."""
        return self.sum(x, axis) / self.size if self.cuts(axis) else x

    def index(self) -> Array | int:
        """Which shard this is, counted from 0."""
        return jax.lax.axis_index(MESH_AXIS) if self.mesh is not None and self.inside else 0

    def columns_to_rows(self, x: Array, width: int) -> Array:
        """Some columns of all rows, [R, C / size], to all columns of some rows: [R / size, width], the rest cut off.

        R must be a multiple of `size`.
        """
        if not self.cuts("vocab"):
            return x
        return jax.lax.all_to_all(x, MESH_AXIS, split_axis=0, concat_axis=1, tiled=True)[:, :width]

    def my_rows(self, x: Array) -> Array:
        """This device's rows of what all have whole: [R, ...] -> [R / size, ...]."""
        if not self.cuts("vocab"):
            return x
        num_rows = x.shape[0] // self.size
        return jax.lax.dynamic_slice_in_dim(x, self.index() * num_rows, num_rows)

    def all_rows(self, x: Array) -> Array:
        """`my_rows` undone: [R / size, ...] -> [R, ...] on every device."""
        return jax.lax.all_gather(x, MESH_AXIS, tiled=True) if self.cuts("vocab") else x

    def spec(self, axes: tuple[str | None, ...]) -> PartitionSpec:
        """That of an array with these logical axes."""
        return PartitionSpec(*(axis and getattr(self.rules, axis) for axis in axes))

    def shape(self, local: tuple[int, ...], axes: tuple[str | None, ...]) -> tuple[int, ...]:
        """The shape of all shards together, laid side by side along the axes that are cut."""
        return tuple(n * self.size if axis and self.cuts(axis) else n for n, axis in zip(local, axes, strict=True))

    def sharding(self, *axes: str | None) -> NamedSharding | None:
        """Where an array with these logical axes lies (more axes than named are whole); None without a mesh."""
        return None if self.mesh is None else NamedSharding(self.mesh, self.spec(axes))

    def everywhere(self, array: np.ndarray) -> Array:
        """A copy of `array` on every device."""
        sharding = self.sharding()
        if sharding is None:
            return jax.device_put(array)
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])

    @property
    def local_devices(self) -> list[tuple[int, jax.Device]]:
        """The devices of this process, each with the number of its shard."""
        if self.mesh is None:
            return [(0, jax.local_devices()[0])]
        mine = jax.process_index()
        return [(i, device) for i, device in enumerate(self.mesh.devices.flat) if device.process_index == mine]

    def devices_of(self, params: Any) -> list[jax.Device]:
        """This process's devices that hold `params`; ValueError unless these are laid out for the shards."""
        found = jax.tree.leaves(params)[0].sharding
        if self.mesh is None:
            if len(found.device_set) > 1:
                raise ValueError(f"the params lie on {len(found.device_set)} devices, and the model has no shards")
            return list(found.device_set)
        if not isinstance(found, NamedSharding) or found.mesh != self.mesh:
            raise ValueError(f"the params are not laid out for the model's {self.size} shards; see `shard_params`")
        return [device for _, device in self.local_devices]


WHOLE = Shards()
"""One device that has everything."""


def check_heads(config: Any, tensor_parallel: int, rules: ShardingRules | None = None) -> None:
    """ValueError, with the numbers that would do, unless a model's heads and MLP can be shared out."""
    heads, kv_heads = config.num_heads, config.num_kv_heads
    widths = {"MLP": config.intermediate_size}
    if mixture := getattr(config, "mixture", None):
        widths |= mixture.widths(rules or ShardingRules())

    def divides(n: int) -> bool:
        shares_kv_heads = kv_heads % n == 0 or n % kv_heads == 0
        return heads % n == 0 and shares_kv_heads and all(width % n == 0 for width in widths.values())

    if not divides(tensor_parallel):
        valid = ", ".join(str(n) for n in range(1, heads + 1) if divides(n))
        sizes = ", ".join(f"{name} {width}" for name, width in widths.items())
        raise ValueError(
            f"tensor_parallel={tensor_parallel} cannot share out {heads} heads over {kv_heads} KV heads ({sizes}); "
            f"it can be {valid}"
        )


def piece(whole: int, local: int, index: int, size: int, axis: str | None) -> slice:
    """Which of `whole` entries along a logical axis shard `index` of `size` has, `local` at most.

    A vocabulary is dealt out in order, and the last shard or shards may get fewer. Where there are fewer KV heads than
    shards, neighbours get the same one.
    """
    if whole == local:
        return slice(0, whole)
    if axis == "vocab":
        return slice(min(index * local, whole), min((index + 1) * local, whole))
    if whole % local or local * size < whole:
        raise ValueError(f"{whole} {axis} cannot be cut into {size} pieces of {local}")
    start = index * (whole // local) // size * local
    return slice(start, start + local)


def multiple_of(size: int, number: int) -> int:
    """The least multiple of `size` from `number` on."""
    return -(-number // size) * size
