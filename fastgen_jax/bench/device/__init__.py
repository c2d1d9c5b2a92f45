"""A check of the kernels and of a whole engine on the GPU at hand, in under five minutes: `scripts/device_check.py`.

`run` is the command. It starts a process for each group of stages (`stages`), so that a crash or a hang on the device
loses that group only; `record` is what they write, `report` what is made of it. Those import the standard library
only. A stage is a function of `peaks`, `parity`, `attention`, `whole_engine` or `token_gaps`.
"""
