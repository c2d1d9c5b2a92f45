"""Dynamic SplitFuse in plain Python: sequences, blocks, and the plan of each step. No JAX."""

from fastgen_jax.scheduler.blocks import BlockPool
from fastgen_jax.scheduler.sequence import Row, Sequence, StepPlan
from fastgen_jax.scheduler.splitfuse import Scheduler
from fastgen_jax.scheduler.window import Window, widest

__all__ = ["BlockPool", "Row", "Scheduler", "Sequence", "StepPlan", "Window", "widest"]
