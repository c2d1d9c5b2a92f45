"""`StepTable`: step times measured on a machine, and the step model that they make."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

from fastgen_jax.bench.simulator import SimulatedEngine, SimulatorConfig
from fastgen_jax.bench.step_model import keys_and_pairs, padded
from fastgen_jax.scheduler import Row

FORMAT = "fastgen step table 2"

Curve = tuple[tuple[int, float], ...]
"""Sizes, ascending, each with seconds."""


@dataclass(frozen=True)
class StepTable:
    """What steps of one model cost on one machine, all in seconds.

    A step takes: bucket_s of its bucket, and row_s of its bucket of rows, and key_s for each key of its decodes (rows
    of one token), and prompt_s for each row of a prompt, and pair_s for each of its pairs of a query and a key, where
    fewer queries than tile_tokens cost as many, and step_s, and step_row_s for each row. Between two measured sizes,
    times lie on the line between theirs; below the first they are the first's, and above the last they go on along the
    last line. Sliding windows are left out of account: every query sees all, and no block is given back before the end.

    bucket_s: of a step of one prompt that fills the bucket, prompt_s and the attention to its keys left out.
    row_s: what a step of as many decodes takes beyond the bucket of as many tokens, attention left out.
    step_s, step_row_s: what a step of the whole engine takes beyond that, for what its host does and the device
        waits for. They may be below 0, for consecutive steps overlap, while those of the table are timed alone.
    num_blocks, block_size, max_num_batched_tokens, max_num_seqs, max_model_len: the engine's.
    about: which model, where and when.
    """

    bucket_s: Curve
    row_s: Curve
    key_s: float
    pair_s: float
    prompt_s: float
    tile_tokens: float
    step_s: float
    step_row_s: float
    num_blocks: int
    block_size: int
    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    about: dict[str, Any]

    def __post_init__(self) -> None:
        for name in ("bucket_s", "row_s"):
            sizes = [size for size, _ in getattr(self, name)]
            if not sizes or sizes != sorted(set(sizes)):
                raise ValueError(f"{name} has the sizes {sizes}; it takes one at least, ascending")

    def prompt_row_s(self, start: int, num_new: int) -> float:
        """Of a row of a prompt, for its attention."""
        pairs = keys_and_pairs(start, num_new, None)[1] * max(self.tile_tokens / num_new, 1.0)
        return self.prompt_s + pairs * self.pair_s

    def engine(self, config: SimulatorConfig) -> SimulatedEngine:
        """A simulated engine with the measured one's pool; with another block size, one that holds as many tokens."""
        if (config.max_model_len or 0) > self.max_model_len:
            raise ValueError(
                f"max_model_len={config.max_model_len} is more than the measured engine's {self.max_model_len}"
            )
        num_blocks = 1 + (self.num_blocks - 1) * self.block_size // config.block_size
        return SimulatedEngine(
            MeasuredSteps(self, config), config, num_blocks=num_blocks, max_model_len=self.max_model_len
        )

    def to_json(self) -> dict[str, Any]:
        return {"format": FORMAT, **asdict(self)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "StepTable":
        """What `to_json` made; KeyError, TypeError or ValueError for anything else."""
        if value["format"] != FORMAT:
            raise ValueError(f"format={value['format']!r} is not {FORMAT!r}")
        known = {field.name: value[field.name] for field in fields(cls)}
        curves = {name: tuple((int(n), float(s)) for n, s in value[name]) for name in ("bucket_s", "row_s")}
        return cls(**{**known, **curves})

    @classmethod
    def load(cls, path: Path) -> "StepTable":
        """The table of a JSON file; ValueError, one sentence, if it holds none."""
        try:
            return cls.from_json(json.loads(path.read_text(encoding="utf-8")))
        except OSError as error:
            raise ValueError(f"{path} cannot be read: {error.strerror}") from error
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is not a step table, as fastgen simulate --measure writes it") from error


def interpolate(curve: Curve, size: int) -> float:
    """Seconds of a size, by the rule of `StepTable`."""
    if size <= curve[0][0] or len(curve) == 1:
        return curve[0][1]
    for (low, low_s), (high, high_s) in pairwise(curve):
        if size <= high or high == curve[-1][0]:
            return low_s + (high_s - low_s) * (size - low) / (high - low)
    raise AssertionError("a curve ends")


def ladder(curve: Curve, largest: int) -> list[int]:
    """The sizes of a curve as far as `largest`, which closes it."""
    return [*(size for size, _ in curve if size < largest), largest]


class MeasuredSteps:
    """The step model of a table. Hosts cost nothing on their own: the table's steps contain what they cost."""

    def __init__(self, table: StepTable, config: SimulatorConfig) -> None:
        self._table = table
        self._buckets = ladder(table.bucket_s, config.max_num_batched_tokens) if config.pad else []
        self._row_buckets = ladder(table.row_s, config.max_num_seqs) if config.pad else []

    def device_seconds(self, rows: Sequence[Row]) -> float:
        table = self._table
        keys, prompts_s = 0, 0.0
        for _, start, num_new, _ in rows:
            if num_new == 1:
                keys += start + 1
            else:
                prompts_s += table.prompt_row_s(start, num_new)
        return (
            interpolate(table.bucket_s, padded(self._buckets, sum(row[2] for row in rows)))
            + interpolate(table.row_s, padded(self._row_buckets, len(rows)))
            + keys * table.key_s
            + prompts_s
            + table.step_s
            + len(rows) * table.step_row_s
        )

    def host_seconds(self, rows: Sequence[Row]) -> float:
        return 0.0
