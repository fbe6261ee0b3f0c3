"""serve models over HTTP, with LibreTranslate's API and a web page

POST /translate accepts JSON or a form. Requests are combined into batches; each model serves one language pair. SIGTERM
and SIGINT stop the server after it has answered all accepted requests.
"""

import argparse
import contextlib
import math
import re
import socket
from typing import Any

from fairseq_deep.errors import UsageError
from fairseq_deep.runtime import find_bundle
from fairseq_deep.runtime.text import packages_named
from fairseq_deep.tools import translate
from fairseq_deep.tools.arguments import argument, at_least_one, at_least_zero, digits

EXAMPLE = "fairseq-deep serve exp/demo --port 5000"
PORT = 5000  # LibreTranslate's


port = argument("a whole number from 0 to 65535", digits, range(65536).__contains__)
seconds = argument("a number above 0", float, lambda value: 0 < value < math.inf)
pair = argument("SRC:TGT, such as en:de", lambda text: tuple(text.split(":", 1)),
                lambda pair: len(pair) == 2 and all(pair))  # fmt: skip
host_name = argument("* or a name without a port, such as mt.example.org", str.lower,
                     re.compile(r"\*|[a-z0-9_-]+(\.[a-z0-9_-]+)*").fullmatch)  # fmt: skip
origin = argument("* or an origin such as https://example.org", str.lower,
                  re.compile(r"\*|https?://[^/\s]+").fullmatch)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add models, the address, limits and the search."""
    kinds = "run, package, checkpoint, or directory for CTranslate2 or transformers; one per language pair"
    pairs = "languages, once per MODEL, in the same order (default: as named by the models)"
    hosts = "accept requests to this name of the server; '*': to all "
    hosts += "(default: addresses, localhost, this machine's name and --host)"
    origins = "allow pages of this origin to use the server in browsers; '*': of all"
    keys = "file with one key per line; requests require a key"
    address, any_port = "address to listen on (default: 127.0.0.1, local only)", "port to listen on; 0: any free port"
    window = "time to collect requests for a batch, in milliseconds (default: 10)"
    add = parser.add_argument
    add("models", metavar="MODEL", nargs="+", help=kinds)
    add("--pair", type=pair, action="append", metavar="SRC:TGT", help=pairs)
    add("--host", default="127.0.0.1", metavar="ADDRESS", help=address)
    add("--port", type=port, default=PORT, metavar="N", help=f"{any_port} (default: {PORT})")
    add("--allowed-host", type=host_name, action="append", default=[], metavar="NAME", help=hosts)
    add("--cors-origin", type=origin, action="append", default=[], metavar="ORIGIN", help=origins)
    add("--api-key-file", metavar="FILE", help=keys)
    add = parser.add_argument_group("limits").add_argument
    for flag, default, text in (
        ("--max-body", 1 << 20, "maximum size of a request, in bytes"),
        ("--max-characters", 10_000, "maximum number of characters per request"),
        ("--max-lines", 200, "maximum number of texts and lines per request"),
        ("--max-queue", 1000, "maximum number of queued lines; further requests get status 429"),
    ):
        add(flag, type=at_least_one, default=default, metavar="N", help=f"{text} (default: {default})")
    add("--timeout", type=seconds, default=60.0, metavar="S", help="time limit per request, in seconds (default: 60)")
    add("--window", type=at_least_zero, default=10.0, metavar="MS", help=window)
    translate.add_search(parser)


def run(args: argparse.Namespace) -> int:
    """Serve until a signal; return 0 after all accepted requests are answered."""
    with packages_named("prometheus-client starlette uvicorn"):
        from fairseq_deep.serving import app, server, service
    from fairseq_deep.serving.batching import Batcher
    from fairseq_deep.serving.messages import Limits

    keys = service.read_keys(args.api_key_file) if args.api_key_file else frozenset()
    with contextlib.closing(server.listen(args.host, args.port)) as bound:
        models = load(args)
        translators = {pair: model.translator for pair, model in models.items()}
        batcher = Batcher(translators, args.window / 1000, args.batch_size, args.max_queue)
        limits = Limits(args.max_body, args.max_characters, args.max_lines, args.timeout)
        hosts = {*args.allowed_host} | {name.lower() for name in (args.host, socket.gethostname())}
        served = app.make_app(service.Service(models, batcher, limits, keys), hosts, args.cors_origin)
        return server.run_server(served, bound, args.timeout)


def load(args: argparse.Namespace) -> dict[Any, Any]:
    """Return the models by language pair; they must have different ones."""
    from fairseq_deep.serving.service import ServedModel

    pairs = args.pair or [(None, None)] * len(args.models)
    if len(pairs) != len(args.models):
        raise UsageError(f"--pair is given {len(pairs)} times for {len(args.models)} models; give it once per model")
    options = argparse.Namespace(**{**vars(args), "nbest": 1})
    models = {}
    for path, (source, target) in zip(args.models, pairs):
        bundle = find_bundle(path, source_lang=source, target_lang=target, gnmt_lenpen=args.gnmt_lenpen)
        model = ServedModel(translate.load(options, [bundle], limit_each=True), bundle)
        if model.pair in models:
            first = args.models[list(models).index(model.pair)]
            problem = f"{first} and {path} both translate {model.pair.source} to {model.pair.target}"
            raise UsageError(f"{problem}; omit one, or name other languages with --pair")
        models[model.pair] = model
    return models
