"""Requests that begin with the same tokens, with and without the prefix cache: time to their first tokens.

python scripts/bench_prefix.py                                  # 32 requests, 1,024 tokens in common, 32 of their own
python scripts/bench_prefix.py --requests 8 --shared 256
"""

import argparse
import statistics
import sys

from fastgen_jax import Engine, SamplingParams
from fastgen_jax.bench.load import make_prompts, word_salad
from fastgen_jax.types import DEFAULT_MODEL, EngineStats


def measure(args: argparse.Namespace, *, prefix_caching: bool) -> tuple[list[float], EngineStats, EngineStats]:
    """Seconds to each first token, and the engine's totals before and after."""
    engine = Engine.from_pretrained(args.model, prefix_caching=prefix_caching, max_model_len=args.shared + 1024)
    corpus = engine.tokenizer.encode(word_salad(), add_special_tokens=False)
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    # Prompts of another beginning first, for what a process does only once.
    engine.generate(make_prompts([64] * 4, corpus[::-1]), params)
    before = engine.stats()
    prompts = make_prompts([args.own] * args.requests, corpus, shared_prefix=args.shared)
    responses = engine.generate(prompts, params)
    return [response.timings.tokens[0] for response in responses], before, engine.stats()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--shared", type=int, default=1024, help="tokens that all prompts begin with")
    parser.add_argument("--own", type=int, default=32, help="tokens of each prompt after them")
    args = parser.parse_args()
    print(f"{args.requests} requests at once, {args.shared} tokens in common and {args.own} of their own")
    print("| prefix cache | tokens computed | found | TTFT median s | TTFT of the last s |")
    print("|---|---:|---:|---:|---:|")
    for prefix_caching in (False, True):
        ttfts, before, after = measure(args, prefix_caching=prefix_caching)
        computed, found = after.tokens - before.tokens, after.cached_tokens - before.cached_tokens
        name = "on" if prefix_caching else "off"
        print(f"| {name} | {computed} | {found} | {statistics.median(ttfts):.2f} | {max(ttfts):.2f} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
