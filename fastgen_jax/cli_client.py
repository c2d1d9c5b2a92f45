"""`fastgen client`: a prompt to a server that runs, text on stdout."""

import argparse
import json
import sys
from typing import Any

from fastgen_jax.cli_flags import HelpFormatter, add_sampling_flags, given
from fastgen_jax.cli_output import to_json
from fastgen_jax.cli_prompts import checked_text
from fastgen_jax.types import SamplingParams

DESCRIPTION = """\
Ask a server that `fastgen serve` or `fastgen_jax.serve` started: stdout gets the text as it comes, and nothing else."""

EXAMPLES = """\
examples:
  fastgen client "The capital of France is" --max-tokens 8
  fastgen client --chat "Why is the sky blue?"
  fastgen client --server gpu1:50050 --api-key "$KEY" --json "Hello" --logprobs 2
  fastgen client --stats
  fastgen client --terminate

exit status:
  0; 1 if the server cannot be reached or did not finish; 2 for a mistake in what you gave"""


def add_command(commands: Any) -> None:
    """Add the command to `commands`, the subparsers of `fastgen`."""
    parser = commands.add_parser(
        "client",
        usage="fastgen client [--server NAME | HOST:PORT] [options] [PROMPT]",
        help="ask a server that runs",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("prompt", metavar="PROMPT", nargs="?", help="text to continue; otherwise all of stdin")
    text = "a deployment's name, or a gRPC address (default: the one that runs here)"
    parser.add_argument("--server", metavar="NAME", help=text)
    parser.add_argument("--api-key", metavar="KEY", help="if the server wants one")
    parser.add_argument("--model", metavar="MODEL", help="which, where the server has several")
    parser.add_argument("--timeout", metavar="S", type=float, help="seconds for the whole answer")
    parser.add_argument("--chat", action="store_true", help="the prompt is a user's message, for the chat template")
    parser.add_argument("--system", metavar="TEXT", help="the system message; implies --chat")
    parser.add_argument(
        "--json", action="store_true", help="one JSON object to a sample: text, token ids, timings, ..."
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--stats", action="store_true", help="say how the replicas are, instead")
    what.add_argument("--terminate", action="store_true", help="have the server finish what runs and end, instead")
    add_sampling_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Ask what `args` ask for; the exit status."""
    fields = given(args, SamplingParams)
    SamplingParams(**fields)
    try:
        from fastgen_jax.serving import deployments
        from fastgen_jax.serving.clients import Client, ServerError
    except ImportError as error:
        raise ValueError(f"serving needs an extra: pip install 'fastgen-jax[serve]' ({error.name})") from error
    prompt = None if args.stats or args.terminate else _prompt(args)
    with Client(args.server or _the_only(deployments.names()), api_key=args.api_key, model=args.model) as client:
        try:
            if args.terminate:
                client.terminate_server()
            elif args.stats:
                _show_stats(client)
            else:
                _ask(client, prompt, args, fields)
        except ServerError as error:
            raise OSError(f"{client.address}: {error}") from error
    return 0


def _prompt(args: argparse.Namespace) -> Any:
    text = checked_text(_stdin() if args.prompt is None else args.prompt)
    if not args.chat and args.system is None:
        return text
    system = [] if args.system is None else [{"role": "system", "content": args.system}]
    return [*system, {"role": "user", "content": text}]


def _stdin() -> str:
    """All of it, less the newline that ends it."""
    text = ""
    if sys.stdin is not None and not sys.stdin.isatty():
        try:
            text = sys.stdin.read().rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise ValueError(f"the prompt on stdin is not {error.encoding} text") from error
    if not text.strip():
        raise ValueError("there is no prompt; give one as an argument or on stdin")
    return text


def _the_only(names: list[str]) -> str:
    if len(names) != 1:
        found = f"several servers run here: {', '.join(names)}" if names else "no server runs here"
        raise ValueError(f"{found}; name one with --server, or its gRPC address")
    return names[0]


def _ask(client: Any, prompt: Any, args: argparse.Namespace, fields: dict[str, Any]) -> None:
    if args.json or fields.get("n", 1) > 1:
        ask = client.chat if isinstance(prompt, list) else client.generate
        responses = ask(prompt, timeout=args.timeout, **fields)
        lines = [json.dumps(to_json((0, r.index), r)) if args.json else r.text for r in responses]
        print("\n".join(lines))
        return
    for piece in client.stream(prompt, timeout=args.timeout, **fields):
        print(piece, end="", flush=True)
    print()


def _show_stats(client: Any) -> None:
    for stats in client.stats():
        use = 1 - stats.free_blocks / stats.blocks if stats.blocks else 0
        print(
            f"{stats.address or client.address}  {stats.model}  {stats.state}  running {stats.running}  "
            f"waiting {stats.waiting}  KV {use:.0%}  steps {stats.steps}  tokens {stats.generated_tokens}"
        )
