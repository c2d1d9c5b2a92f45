"""fastgen-jax against other engines on this CPU: the same work, in turns (docs/peers.md).

python scripts/bench_peers.py --json peers.json        # everything: takes hours
python scripts/bench_peers.py --dtype bfloat16 --cases A B --peers hf_generate vllm_cpu --repeats 3

Every contestant of a dtype is loaded, and one runs at a time. Each first runs every case on prompts of its own: that
warms it up, and its tokens are compared with what transformers generates in float32. In each repetition, with new
prompts, the contestants run a case one right after the other, another one first each time, so that a ratio is one of
neighbours. A table goes to standard output, progress to standard error; Ctrl-C keeps what there is.
"""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from peers.comparison import DTYPES, Comparison, Plan, say
from peers.process import CONTESTANTS, MODEL, Unavailable, cores
from peers.report import OURS, as_json, markdown
from peers.workload import CASES, english

from fastgen_jax.bench import machine

BFLOAT16_FLAGS = ("amx_bf16", "avx512_bf16")


def token_ids(text: str) -> list[int]:
    """The text in the model's tokens; ValueError if the model has not been exported."""
    from tokenizers import Tokenizer

    path = MODEL / "tokenizer.json"
    if not path.exists():
        raise ValueError(f"{path} does not exist; make it and the peers with: make peers")
    return Tokenizer.from_file(str(path)).encode(text, add_special_tokens=False).ids


def about() -> dict[str, Any]:
    """What ran where, with the CPU's instructions for bfloat16: without them it is slower than float32."""
    flags = Path("/proc/cpuinfo").read_text().split()
    return machine.about() | {"bfloat16_instructions": [flag for flag in BFLOAT16_FLAGS if flag in flags]}


def report(comparison: Comparison, facts: dict[str, Any]) -> str:
    """The tables, and under them what they need to be read."""
    versions = (
        f"- {name}: " + ", ".join(f"{package} {version}" for package, version in packages.items())
        for name, packages in comparison.versions.items()
    )
    where = (
        f"- {facts['date']}, {facts['machine']['cpu']}, {comparison.plan.threads} threads, "
        f"bfloat16 instructions: {', '.join(facts['bfloat16_instructions']) or 'none'}; `{facts['command']}`"
    )
    lines = [markdown(comparison.results.values()), "", where, *versions, *(f"- {note}" for note in comparison.notes)]
    return "\n".join(lines)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    peers = [name for name in CONTESTANTS if name != OURS]
    titles = ", ".join(f"{case.name} is {case.title}" for case in CASES.values())
    parser.add_argument("--dtype", nargs="+", default=DTYPES, metavar="DTYPE", help=f"of {', '.join(DTYPES)}")
    parser.add_argument("--cases", nargs="+", default=list(CASES), metavar="CASE", help=f"prompts + output: {titles}")
    parser.add_argument("--peers", nargs="+", default=peers, metavar="PEER", help=f"of {', '.join(peers)}")
    parser.add_argument("--repeats", type=int, default=5, help="timed repetitions of each case (default 5)")
    parser.add_argument("--threads", type=int, default=2, help="threads of each contestant (default 2)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep every time here, as they come")
    return parser.parse_args()


def main() -> int:
    args = parse()
    facts = about()
    try:
        contestants = tuple(dict.fromkeys((OURS, *args.peers)))
        plan = Plan(tuple(args.dtype), tuple(args.cases), contestants, args.repeats, args.threads)
        comparison = Comparison(plan, token_ids(english()))
    except ValueError as error:
        print(f"bench_peers.py: {error}", file=sys.stderr)
        return 2
    os.sched_setaffinity(0, cores()[: plan.threads])  # which the contestants inherit

    def save() -> None:
        if args.json:
            results = as_json(comparison.results.values())
            kept = {"about": facts, "versions": comparison.versions, "notes": comparison.notes, "results": results}
            args.json.write_text(json.dumps(kept, indent=1) + "\n")

    try:
        comparison.run(save)
    except KeyboardInterrupt:
        say("interrupted")
    except Unavailable as error:  # the reference: nothing can be checked
        print(f"bench_peers.py: {error}", file=sys.stderr)
        return 1
    print(report(comparison, facts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
