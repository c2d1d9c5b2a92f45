"""Compile for an NVIDIA GPU on a machine that has none.

    device = compile_only_device(get_gpu("h200"))
    with jax.default_device(device):
        compiled = jax.jit(step).lower(*shapes).compile()
    compiled.memory_analysis()

needs the extra `plan`: JAX's CUDA plugin and NVIDIA's assembler, and no driver. Under `default_device` the Pallas
kernels in `step` are lowered for that GPU too. Such a program cannot run, and it is not autotuned. A process
should compile for one GPU only: after kernels for an older one, ptxas is asked for the wrong chip and refuses.
"""

import importlib.util
import json
import re
import shutil
from pathlib import Path

import jax
from jax.experimental import topologies

from fastgen_jax.compiler_output import shared_memory
from fastgen_jax.gpus import Gpu

INSTALL = "pip install 'fastgen-jax[plan]'"


def missing() -> str | None:
    """What compiling takes and is not installed, in one sentence; None if all is there."""
    for what, is_there in (("JAX's CUDA plugin", _has_plugin()), ("NVIDIA's assembler, ptxas", _has_ptxas())):
        if not is_there:
            return f"compiling for a GPU needs {what}, which is not installed; get it with: {INSTALL}"
    return None


def _has_plugin() -> bool:
    """A namespace package's parts are looked up without importing it."""
    plugins = importlib.util.find_spec("jax_plugins")
    folders = plugins.submodule_search_locations or () if plugins else ()
    return any((Path(folder) / name).is_dir() for folder in folders for name in ("xla_cuda12", "xla_cuda13"))


def _has_ptxas() -> bool:
    nvidia = importlib.util.find_spec("nvidia")
    folders = nvidia.submodule_search_locations or () if nvidia else ()
    wheels = (Path(folder) / name / "bin" / "ptxas" for folder in folders for name in ("cuda_nvcc", "cu13"))
    return shutil.which("ptxas") is not None or any(path.is_file() for path in wheels)


def compile_only_device(gpu: Gpu) -> jax.Device:
    """A device that programs can be compiled for, and nothing else. No driver is asked and no GPU is touched.

    ValueError, one sentence, where the extra is not installed.
    """
    return compile_only_devices(gpu, 1)[0]


def compile_only_devices(gpu: Gpu, count: int) -> list[jax.Device]:
    """`count` such devices of one host, for programs that share their work."""
    if sentence := missing():
        raise ValueError(sentence)
    shape = f"1x1x{count}"
    topology = topologies.get_topology_desc(
        platform="cuda", topology_name=shape, target_config=target_config(gpu), topology=shape
    )
    return list(topology.devices)


def target_config(gpu: Gpu) -> str:
    """XLA's description of the GPU: a GpuTargetConfigProto in text form."""
    limits, (major, minor) = gpu.limits, gpu.capability
    return f"""
        gpu_device_info {{
          threads_per_block_limit: 1024
          threads_per_warp: 32
          shared_memory_per_block: 49152
          shared_memory_per_core: {limits.shared_per_sm}
          shared_memory_per_block_optin: {limits.shared_per_block}
          threads_per_core_limit: {limits.threads_per_sm}
          registers_per_core_limit: {limits.registers_per_sm}
          registers_per_block_limit: {limits.registers_per_sm}
          fpus_per_core: {limits.float32_lanes}
          core_count: {gpu.num_sms}
          block_dim_limit_x: 2147483647
          block_dim_limit_y: 65535
          block_dim_limit_z: 65535
          memory_bandwidth: {gpu.bandwidth:.0f}
          l2_cache_size: {gpu.l2_bytes}
          clock_rate_ghz: {gpu.clock_ghz}
          device_memory_size: {gpu.memory_bytes}
          cuda_compute_capability {{ major: {major} minor: {minor} }}
        }}
        platform_name: "CUDA"
        dnn_version_info {{ major: 9 minor: 8 }}
        device_description_str: {json.dumps(gpu.name)}
    """


def record_shared_memory() -> dict[str, int]:
    """A dict that fills, as kernels are lowered from now on, with each one's shared memory in bytes, by name.

    ptxas does not know it: a kernel takes its shared memory at launch. Where a name comes several times, the most.
    For the life of the process, under MOSAIC_GPU_DUMP_RESOURCES=1, which makes Mosaic report what a kernel takes;
    JAX has no public way to have the report with the kernel's name.
    """
    from jax.experimental.mosaic.gpu import utils

    found: dict[str, int] = {}
    dump = utils.dump_to_file_or_stdout

    def record(content: str, name: str, path: str) -> None:
        if not name.endswith(".resources.txt"):
            return dump(content, name, path)
        kernel = re.sub(r"(_\d+)?\.resources\.txt$", "", name)
        found[kernel] = max(found.get(kernel, 0), shared_memory(content))
        return None

    utils.dump_to_file_or_stdout = record
    return found
