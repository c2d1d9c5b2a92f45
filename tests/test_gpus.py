"""GPUs: the built-in figures agree with each other, a file describes another, and mistakes are one sentence."""

import json

import pytest

from fastgen_jax import deviceless
from fastgen_jax.gpus import GPUS, LIMITS, get_gpu

A10 = {
    "name": "NVIDIA A10",
    "capability": [8, 6],
    "num_sms": 72,
    "clock_ghz": 1.695,
    "l2_bytes": 6_291_456,
    "memory_bytes": 23_609_475_072,
    "bandwidth_gb_s": 600,
    "bf16_tflops": 125,
    "fp16_tflops": 125,
    "source": "NVIDIA A10 datasheet",
}


# TFLOP/s in float32 and GB of memory, as the datasheets have them.
@pytest.mark.parametrize(
    ("name", "float32_tflops", "memory_gb"),
    [
        ("a100-80", 19.5, 80),
        ("l4", 30.3, 24),
        ("rtx4090", 82.6, 24),
        ("h100", 67, 80),
        ("h200", 67, 141),
        ("b200", 75, 180),
    ],
)
def test_figures_agree_with_the_datasheets_others(name, float32_tflops, memory_gb):
    gpu = get_gpu(name)
    assert gpu.flops("float32") / 1e12 == pytest.approx(float32_tflops, rel=0.02)
    assert 0.97 * memory_gb * 1e9 < gpu.memory_bytes < memory_gb * 1.075 * 1e9  # a GB may be a GiB
    assert gpu.flops("float16") == gpu.flops("bfloat16") > gpu.flops("float32")
    assert gpu.source
    assert gpu.limits.shared_per_sm - gpu.limits.shared_per_block == 1024  # what the system keeps of each SM's


def test_every_gpu_has_known_limits():
    assert set(GPUS) == {"a100-80", "a6000", "l4", "rtx4090", "h100", "h200", "b200"}
    assert {gpu.capability for gpu in GPUS.values()} <= set(LIMITS)
    assert get_gpu("H200") is GPUS["h200"]


def test_a_file_describes_another(tmp_path):
    path = tmp_path / "a10.json"
    path.write_text(json.dumps(A10))
    gpu = get_gpu(str(path))
    assert (gpu.capability, gpu.num_sms, gpu.bandwidth, gpu.flops("bfloat16")) == ((8, 6), 72, 600e9, 125e12)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "h201",
            "gpu='h201' is not known; did you mean 'h200'? "
            "the GPUs are a100-80, a6000, l4, rtx4090, h100, h200, b200, or",
        ),
        ("tpu", "gpu='tpu' is not known; the GPUs are a100-80"),
        ("A100", "gpu='A100' is not known; did you mean 'a100-80'?"),
        ("", "gpu='' is not known; the GPUs are a100-80"),
        ("nowhere.json", "gpu='nowhere.json' does not exist; give a .json file, or one of a100-80"),
    ],
)
def test_an_unknown_gpu_is_one_sentence(name, message):
    with pytest.raises(ValueError) as raised:
        get_gpu(name)
    assert str(raised.value).startswith(message)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not valid JSON"),
        ("[]", "holds a JSON list, not an object"),
        (json.dumps(A10 | {"tflops": 1}), "has the unknown field 'tflops'; the fields are name, capability"),
        (json.dumps({k: v for k, v in A10.items() if k != "num_sms"}), "lacks the field 'num_sms'; the fields are"),
        (json.dumps(A10 | {"capability": [7, 5]}), "must be one of [8, 0], [8, 6], [8, 9], [9, 0], [10, 0]"),
        (json.dumps(A10 | {"capability": "8.6"}), "must be one of [8, 0]"),
        (json.dumps(A10 | {"num_sms": 72.5}), "num_sms=72.5"),
        (json.dumps(A10 | {"bandwidth_gb_s": 0}), "must be a number above 0"),
        (json.dumps(A10 | {"bf16_tflops": True}), "bf16_tflops=True"),
        (json.dumps(A10 | {"bandwidth_gb_s": float("nan")}), "bandwidth_gb_s=nan in"),
        (json.dumps(A10 | {"bf16_tflops": float("inf")}), "bf16_tflops=inf in"),
        (json.dumps(A10 | {"memory_bytes": 10**27}), "must be a whole number above 0 and below 2**63"),
        (json.dumps(A10 | {"num_sms": 2**31}), "must be a whole number above 0 and below 2**31"),
        (json.dumps(A10 | {"capability": [9.0, 0]}), "capability=[9.0, 0] in"),
        (json.dumps(A10 | {"capability": [[8, 0]]}), "capability=[[8, 0]] in"),
        (json.dumps(A10 | {"capability": [[8], 0]}), "capability=[[8], 0] in"),
        (json.dumps(A10 | {"name": 10}), "must be a string"),
    ],
)
def test_a_bad_file_is_one_sentence(text, message, tmp_path):
    path = tmp_path / "gpu.json"
    path.write_text(text)
    with pytest.raises(ValueError) as raised:
        get_gpu(str(path))
    assert message in str(raised.value)
    assert str(path) in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.skipif(deviceless.missing() is not None, reason=str(deviceless.missing()))
def test_a_name_may_hold_anything(tmp_path):
    name = 'A "quoted"\nGPU of \\ 40 €'
    path = tmp_path / "gpu.json"
    path.write_text(json.dumps(A10 | {"name": name}))
    assert deviceless.compile_only_device(get_gpu(str(path))).device_kind == name
