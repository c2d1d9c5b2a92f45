"""`fastgen serve`: replicas of a model, a router over them, gRPC and OpenAI's API over that."""

import argparse
from typing import TYPE_CHECKING, Any

from fastgen_jax.cli_flags import HelpFormatter, add_engine_flags, add_model_argument, given
from fastgen_jax.types import DEFAULT_MODEL, EngineConfig

if TYPE_CHECKING:
    from fastgen_jax.serving.server import ServerSettings

DESCRIPTION = """\
Serve a model to many: OpenAI's API over HTTP, a page to watch it on, and gRPC (docs/serving.md).

Each replica is a process with an engine of its own, and is started again if it dies. The router in front of them sends
a request where the fewest tokens are outstanding. SIGTERM or Ctrl-C finishes what runs; a second one stops at once."""

EXAMPLES = """\
examples:
  fastgen serve smollm2-135m
  fastgen serve llama2-7b --replicas 2 --api-key "$KEY" --host 0.0.0.0
  fastgen serve llama2-7b --replicas 2 --replica-class interactive --replica-class batch
  fastgen serve llama2-7b --only-replica --host 0.0.0.0 --grpc-port 50051       on another machine, for:
  fastgen serve --replica gpu1:50051 --replica gpu2:50051
  fastgen serve llama2-70b --tp 16 --nnodes 2 --node-rank 0 --coordinator host0:9000      on host0, and on the other:
  fastgen serve llama2-70b --tp 16 --nnodes 2 --node-rank 1 --coordinator host0:9000
  curl http://127.0.0.1:8000/v1/completions -H 'content-type: application/json' \\
    -d '{"prompt": "The capital of France is", "max_tokens": 8}'

exit status:
  0 after SIGTERM or Ctrl-C; 1 if a port is taken or the model cannot be loaded;
  2 for a mistake in what you gave, such as a model that is not there"""


def add_command(commands: Any) -> None:
    """Add the command to `commands`, the subparsers of `fastgen`."""
    parser = commands.add_parser(
        "serve",
        usage="fastgen serve [MODEL] [--replicas N] [--replica HOST:PORT ...] [options]",
        help="serve a model over HTTP and gRPC",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    add_model_argument(parser, positional=True, default=None)
    parser.add_argument("--revision", metavar="NAME", help="branch, tag or commit of a model on the Hub")
    _add_replica_flags(parser)
    _add_node_flags(parser)
    _add_server_flags(parser)
    add_engine_flags(parser)
    defaults = {name: parser.get_default(name) for name in _NOT_OF_A_REPLICA.values()}
    parser.set_defaults(run=run, defaults=defaults)


def _add_replica_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("replicas")
    text = "processes to start here, with --tp GPUs each if there are GPUs (default 1; 0 with --replica)"
    group.add_argument("--replicas", metavar="N", type=int, help=text)
    text = "a replica that runs elsewhere; repeat it for several"
    group.add_argument("--replica", metavar="HOST:PORT", action="append", default=[], dest="remote", help=text)
    text = "the key that those want to see (default: the first --api-key)"
    group.add_argument("--replica-api-key", metavar="KEY", help=text)
    text = "interactive or batch, or a name of your own: what a replica is for; one for each, or none"
    group.add_argument("--replica-class", metavar="NAME", action="append", default=[], dest="classes", help=text)
    text = "be a replica, for a router elsewhere: gRPC on --grpc-port, and nothing else"
    group.add_argument("--only-replica", action="store_true", help=text)
    text = "what clients call the model (default: what you call it)"
    group.add_argument("--served-model-name", metavar="NAME", default="", help=text)


def _add_node_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("several hosts that share one replica; each runs this command with its own rank")
    group.add_argument("--nnodes", metavar="N", type=int, help="how many they are")
    text = "this one's number; 0 has the server (default: as Slurm or Kubernetes says)"
    group.add_argument("--node-rank", metavar="R", type=int, help=text)
    text = "where they meet: an address of node 0, and a port that is free there (default: as Slurm or Kubernetes says)"
    group.add_argument("--coordinator", metavar="HOST:PORT", help=text)


def _add_server_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("server")
    text = "address to listen on; 0.0.0.0 is all of the machine's (default 127.0.0.1)"
    group.add_argument("--host", metavar="HOST", default="127.0.0.1", help=text)
    group.add_argument("--port", metavar="N", type=int, default=8000, help="of HTTP; 0 is any free one (default 8000)")
    text = "of gRPC; 0 is any free one (default 50050)"
    group.add_argument("--grpc-port", metavar="N", type=int, default=50050, help=text)
    text = "a key that opens the server; repeat it for several (default: it is open)"
    group.add_argument("--api-key", metavar="KEY", action="append", default=[], dest="api_keys", help=text)
    text = "web pages of this origin may call it, as https://example.com or '*'; repeat it for several"
    group.add_argument("--cors-origin", metavar="ORIGIN", action="append", default=[], dest="cors_origins", help=text)
    text = "requests of a model that may wait for their first token; the next gets 429 (default 256)"
    group.add_argument("--max-queue", metavar="N", type=int, default=256, help=text)
    text = "seconds that a request may take (default 600)"
    group.add_argument("--request-timeout", metavar="S", type=float, default=600.0, help=text)
    text = "seconds after which a step counts as hung: the replica ends, and another starts (default 300)"
    group.add_argument("--step-timeout", metavar="S", type=float, default=300.0, help=text)
    text = "of a request's body; a longer one gets 413 (default 4 MiB)"
    group.add_argument("--max-request-bytes", metavar="N", type=int, default=4 << 20, help=text)
    text = "debug, info, warning or error (default info: a line for each request, without its text)"
    group.add_argument("--log-level", choices=("debug", "info", "warning", "error"), default="info", help=text)
    text = "put the text of every request into the log, too"
    group.add_argument("--log-prompts", action="store_true", help=text)
    text = "name under which `fastgen client` finds it (default: the model's)"
    group.add_argument("--name", metavar="NAME", help=text)


_NOT_OF_A_REPLICA = {
    "--replicas": "replicas",
    "--replica": "remote",
    "--replica-api-key": "replica_api_key",
    "--port": "port",
    "--cors-origin": "cors_origins",
    "--max-queue": "max_queue",
    "--request-timeout": "request_timeout",
    "--max-request-bytes": "max_request_bytes",
    "--log-prompts": "log_prompts",
    "--name": "name",
}
"""Flags that say nothing to one replica behind a router, and where they are kept."""


def run(args: argparse.Namespace) -> int:
    """Serve what `args` ask for; the exit status."""
    engine = given(args, EngineConfig)
    EngineConfig(**engine)
    try:
        from fastgen_jax.serving import server
    except ImportError as error:
        raise ValueError(f"serving needs an extra: pip install 'fastgen-jax[serve]' ({error.name})") from error
    nodes, rank = _nodes(args)
    if rank > 0:
        return _follow(args, engine, nodes)
    if args.only_replica:
        return _run_replica(args, engine, nodes)
    return server.run(_settings(args, engine, nodes))


def _nodes(args: argparse.Namespace) -> tuple[dict[str, Any], int]:
    """What `multihost.join` takes, empty for one host, and this host's rank, found out if it was not given."""
    if args.nnodes is None:
        if args.node_rank is not None or args.coordinator is not None:
            raise ValueError("--node-rank and --coordinator are for several hosts; give --nnodes, too")
        return {}, 0
    from fastgen_jax import multihost

    rank = multihost.detected_rank() if args.node_rank is None else args.node_rank
    if args.coordinator is None and args.node_rank is None:
        return {"coordinator": None}, rank  # JAX finds out all of it
    nodes = {"coordinator": args.coordinator, "num_processes": args.nnodes, "process_id": rank}
    multihost.check(**nodes)
    return nodes, rank


def _follow(args: argparse.Namespace, engine: dict[str, Any], nodes: dict[str, Any]) -> int:
    """Be a host without the server."""
    from fastgen_jax import multihost

    group = multihost.join(**nodes)
    assert isinstance(group, multihost.Follower)
    multihost.wait_for_leader()
    group.follow(args.model or DEFAULT_MODEL, revision=args.revision, **engine)
    return 0


def _run_replica(args: argparse.Namespace, engine: dict[str, Any], nodes: dict[str, Any]) -> int:
    from fastgen_jax.serving import replica_process

    for flag, name in _NOT_OF_A_REPLICA.items():
        if getattr(args, name) != args.defaults[name]:
            raise ValueError(f"--only-replica is one replica, behind a router elsewhere; leave out {flag}")
    if len(args.classes) > 1:
        raise ValueError("--only-replica is one replica; give it one --replica-class at most")
    settings = replica_process.ReplicaSettings(
        args.model or DEFAULT_MODEL,
        name=args.served_model_name,
        revision=args.revision,
        engine=engine,
        nodes=nodes,
        host=args.host,
        port=args.grpc_port,
        replica_class="".join(args.classes),
        api_keys=tuple(args.api_keys),
        step_timeout=args.step_timeout,
        log_level=args.log_level,
    )
    status = replica_process.run(settings)
    return replica_process.FAILED if status == replica_process.CANNOT_LOAD else status


def _settings(args: argparse.Namespace, engine: dict[str, Any], nodes: dict[str, Any]) -> "ServerSettings":
    from fastgen_jax.serving import deployments
    from fastgen_jax.serving.server import ServerSettings

    replicas = args.replicas if args.replicas is not None else 0 if args.remote else 1
    if args.remote and not replicas and (args.model or args.revision or args.served_model_name or engine):
        raise ValueError("--replica alone starts no model here; leave out MODEL and its settings, or add --replicas")
    model = (args.model or DEFAULT_MODEL) if replicas else None
    name = args.name or deployments.default_name(model or "router")
    if deployments.find(deployments.check_name(name)) is not None:
        raise ValueError(f"deployment {name!r} runs already; choose another --name")
    return ServerSettings(
        model,
        name=args.served_model_name,
        revision=args.revision,
        replicas=replicas,
        replica_classes=tuple(args.classes),
        remote=tuple(args.remote),
        engine=engine,
        nodes=nodes,
        host=args.host,
        port=args.port,
        grpc_port=args.grpc_port,
        api_keys=tuple(args.api_keys),
        replica_api_key=args.replica_api_key or (next(iter(args.api_keys), None) if args.remote else None),
        cors_origins=tuple(args.cors_origins),
        max_queue=args.max_queue,
        request_timeout=args.request_timeout,
        step_timeout=args.step_timeout,
        max_request_bytes=args.max_request_bytes,
        log_level=args.log_level,
        log_prompts=args.log_prompts,
        deployment=name,
    )
