"""What each policy of Dynamic SplitKV costs the SMs of a GPU: the table and the plot of docs/split-kv.md.

python scripts/split_table.py                          # the table, in Markdown
python scripts/split_table.py --plot docs/split-kv.png # also the plot (pip install 'fastgen-jax[plots]')
python scripts/split_table.py --time                   # instead, what planning a step costs the host
python scripts/split_table.py --random 3000            # instead, `waves` against the others on so many random batches
"""

import argparse
import random
import statistics
import time
from typing import NamedTuple

from fastgen_jax.scheduler.split_plan import (
    STEPS_PER_SEARCH,
    Simulation,
    SplitPlanner,
    plan_splits,
    simulate,
    work_list,
)
from fastgen_jax.scheduler.split_search import UNIT_TOKENS

BLOCK_SIZE = 64
BYTES_PER_TOKEN = 2 * 128 * 2  # K and V, D = 128, 2 bytes each
MIXES = {
    "512, 4096, 16384": [512, 4096, 16384],
    "64 x 512": [512] * 64,
    "1 x 32768": [32768],
    "255 x 256, 1 x 16384": [256] * 255 + [16384],
}
KV_HEADS = (1, 8, 32)
SMS = {108: "A100", 132: "H100, H200", 148: "B200"}
POLICIES = ("none", "fixed(4)", "fixed(8)", "fixed(16)", "proportional", "waves")
COLORS = ("#9aa0a6", "#c6dbef", "#6baed6", "#2171b5", "#fdae6b", "#d94801")


class Case(NamedTuple):
    mix: str
    num_kv_heads: int
    num_sms: int


CASES = [Case(mix, num_kv_heads, num_sms) for mix in MIXES for num_kv_heads in KV_HEADS for num_sms in SMS]


def launch(
    kv_lens: list[int], num_kv_heads: int, num_sms: int, policy: str, unit_tokens: int = 0
) -> tuple[list[int], Simulation]:
    """The splits of the rows under `policy`, and what launching their work list costs.

    unit_tokens: what a unit is taken to cost beside its keys, as tokens read.
    """
    splits = plan_splits(kv_lens, num_kv_heads, num_sms, policy=policy, block_size=BLOCK_SIZE)
    items = work_list(kv_lens, splits, BLOCK_SIZE)
    sizes = [(item.stop - item.start + unit_tokens) * BYTES_PER_TOKEN for item in items for _ in range(num_kv_heads)]
    return splits, simulate(sizes, num_sms)


def run(case: Case, policy: str) -> tuple[list[int], Simulation]:
    """`launch` of one of the table's cases."""
    return launch(MIXES[case.mix], case.num_kv_heads, case.num_sms, policy)


def slowest_tokens(case: Case, policy: str) -> float:
    """Time of the slowest SM, as policy `waves` counts it, in tokens read."""
    _, simulation = launch(MIXES[case.mix], case.num_kv_heads, case.num_sms, policy, UNIT_TOKENS)
    return max(simulation.bytes_per_sm) / BYTES_PER_TOKEN


def cell(simulation: Simulation) -> str:
    """Waves, MB of the slowest SM, and its share of all bytes."""
    slowest = max(simulation.bytes_per_sm) / 1e6
    return f"{simulation.waves}; {slowest:.2f}; {simulation.slowest_share:.2%}"


def table() -> list[str]:
    """The lines of the table, in Markdown."""
    lines = [
        "| rows (tokens) | K | SMs | even: MB; share | " + " | ".join(POLICIES) + " | splits of `waves` |",
        "|---|---|---|---|" + "---|" * (len(POLICIES) + 1),
    ]
    for case in CASES:
        runs = [run(case, policy) for policy in POLICIES]
        splits, simulation = runs[-1]
        even = sum(simulation.bytes_per_sm) / case.num_sms / 1e6
        by_len = dict(zip(MIXES[case.mix], splits, strict=True))
        columns = [
            case.mix,
            case.num_kv_heads,
            case.num_sms,
            f"{even:.2f}; {1 / case.num_sms:.2%}",
            *(cell(simulation) for _, simulation in runs),
            ", ".join(map(str, by_len.values())),
        ]
        lines.append("| " + " | ".join(map(str, columns)) + " |")
    return lines


def plot(path: str) -> None:
    """The slowest SM's bytes as a multiple of an even share, one panel per mix and number of KV heads."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, grid = pyplot.subplots(len(MIXES), len(KV_HEADS), figsize=(12, 11), sharey="row", layout="constrained")
    width = 0.8 / len(POLICIES)
    for mix, row in zip(MIXES, grid, strict=True):
        for num_kv_heads, axes in zip(KV_HEADS, row, strict=True):
            for i, (policy, color) in enumerate(zip(POLICIES, COLORS, strict=True)):
                shares = [run(Case(mix, num_kv_heads, sms), policy)[1].slowest_share * sms for sms in SMS]
                xs = [x + (i - (len(POLICIES) - 1) / 2) * width for x in range(len(SMS))]
                axes.bar(xs, shares, width, color=color, label=policy)
            axes.set_yscale("log", base=2)
            axes.yaxis.set_major_formatter("{x:g}")
            axes.set_ylim(bottom=0.5)
            axes.axhline(1, color="black", linewidth=0.8)
            axes.grid(axis="y", alpha=0.3)
            axes.set_axisbelow(True)
            axes.set_xticks(range(len(SMS)), [f"{sms} SMs" for sms in SMS])
            axes.set_title(f"{mix} tokens, K = {num_kv_heads}", fontsize=11)
    figure.supylabel("bytes of the slowest SM / an even share (1 is ideal)")
    figure.legend(*grid[0][0].get_legend_handles_labels(), loc="outside upper center", ncols=len(POLICIES))
    figure.savefig(path, dpi=110)


def time_table(repeats: int = 50) -> list[str]:
    """The lines of a table of the host's time to plan a step of 256 rows for 132 SMs."""
    rng = random.Random(0)
    batches = {
        "256 x 4096": lambda: [4096] * 256,
        "256 of 1 to 32768": lambda: [rng.randint(1, 32768) for _ in range(256)],
        "240 of 1 to 512, 16 of 8192 to 131072": lambda: (
            [rng.randint(1, 512) for _ in range(240)] + [rng.randint(8192, 131072) for _ in range(16)]
        ),
        "255 of 1 to 512, 1 of 131072": lambda: [rng.randint(1, 512) for _ in range(255)] + [131072],
    }
    lines = [
        "| rows (tokens) | K | splits | plan us: median | largest | planner us a step: median |",
        "|---|---|---|---|---|---|",
    ]
    for name, batch in batches.items():
        for num_kv_heads in KV_HEADS:
            plan_us, planner_us, splits = [], [], [0]
            for _ in range(repeats):
                kv_lens = batch()
                start = time.thread_time()
                splits = plan_splits(kv_lens, num_kv_heads, 132)
                plan_us.append((time.thread_time() - start) * 1e6)
            planner = SplitPlanner(num_kv_heads, 132, BLOCK_SIZE, max_extra=8 * 132 // num_kv_heads)
            for _ in range(repeats):
                kv_lens = batch()
                start = time.thread_time()
                for _ in range(STEPS_PER_SEARCH):
                    planner.plan(kv_lens)
                planner_us.append((time.thread_time() - start) * 1e6 / STEPS_PER_SEARCH)
            lines.append(
                f"| {name} | {num_kv_heads} | {sum(splits)} | {statistics.median(plan_us):.0f} | {max(plan_us):.0f} "
                f"| {statistics.median(planner_us):.0f} |"
            )
    return lines


def random_summary(num_batches: int) -> str:
    """How `waves` does against the best of the others, for every batch the one that does best on it."""
    rng = random.Random(1)
    ratios = []
    for _ in range(num_batches):
        num_rows, longest = rng.choice([1, 2, 3, 5, 8, 16, 32, 64]), rng.choice([2_000, 8_000, 33_000, 130_000])
        kv_lens = [rng.randint(1, longest if rng.random() < 0.8 else 600) for _ in range(num_rows)]
        num_kv_heads, num_sms = rng.choice([1, 2, 4, 8, 32]), rng.choice(list(SMS))
        waves, *others = (
            max(launch(kv_lens, num_kv_heads, num_sms, policy, UNIT_TOKENS)[1].bytes_per_sm)
            for policy in ("waves", *POLICIES[:-1])
        )
        ratios.append(waves / min(others))
    worse = sum(ratio > 1.1 for ratio in ratios) / len(ratios)
    return (
        f"time of the slowest SM under waves / under the best other policy, over {num_batches} random batches: "
        f"mean {statistics.mean(ratios):.3f}, largest {max(ratios):.2f}, above 1.1 in {worse:.1%}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plot", metavar="FILE", help="write the plot here, as PNG")
    parser.add_argument("--time", action="store_true", help="print the host's planning time instead")
    parser.add_argument("--random", type=int, metavar="N", help="print how waves does on N random batches instead")
    args = parser.parse_args()
    if args.random:
        print(random_summary(args.random))
    else:
        print("\n".join(time_table() if args.time else table()))
    if args.plot:
        plot(args.plot)


if __name__ == "__main__":
    main()
