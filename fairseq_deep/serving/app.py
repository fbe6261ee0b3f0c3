"""Routes of the server: LibreTranslate's API, a web page, information about the models, and metrics."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import ipaddress
import re
import time
from collections.abc import AsyncIterator, Collection, Sequence
from concurrent.futures import Future
from importlib import resources
from typing import Any
from urllib.parse import urlsplit

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from fairseq_deep.errors import one_line, printable
from fairseq_deep.runtime.translator import Translation

from .batching import Closed, QueueFull
from .messages import Question, Refused, read_fields, read_question
from .service import Service, hash_key, log

GONE = 499  # the client has disconnected; this status appears only in the log
DRAINED = 64 << 20
"""Maximum size of an oversized body that is still read, in bytes; without reading, the client may miss the answer."""
HELD = 64 << 20
"""Maximum size of all request bodies in memory together, in bytes."""
CLOSE = {"Connection": "close"}


def make_app(service: Service, hosts: Collection[str] = ("*",), origins: Sequence[str] = ()) -> Any:
    """Return the ASGI application; its lifespan starts and closes the batcher of *service*.

    Args:
        hosts: accepted names in the header Host, besides addresses and local names; "*" accepts all
        origins: origins of pages elsewhere that browsers allow to use the server (CORS); "*" for all
    """

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        service.batcher.start()
        yield
        await asyncio.to_thread(service.batcher.close)

    routes = [Route(path, handler, methods=[method]) for path, (method, handler) in _routes(service).items()]
    handlers: dict[Any, Any] = {HTTPException: _on_http, Refused: _on_refused, Exception: _on_error}
    shared = Middleware(CORSMiddleware, allow_origins=origins, allow_headers=["Content-Type"], allow_methods=["*"])
    app = Starlette(routes=routes, exception_handlers=handlers, lifespan=lifespan, middleware=[shared] * bool(origins))
    app.router.redirect_slashes = False  # behind a proxy, the server does not know its own address
    return Recorded(app, service, hosts)


def is_accepted(host: str, names: Collection[str]) -> bool:
    """Return whether the header *host* is an address, a local name or one of *names*.

    A page elsewhere can point its own name to a local server (DNS rebinding), but not an address.
    """
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return False
    if "*" in names or name in names or name == "localhost" or name.endswith(".localhost"):
        return True
    with contextlib.suppress(ValueError):
        return bool(ipaddress.ip_address(name))
    return False


def _routes(service: Service) -> dict[str, tuple[str, Any]]:
    page, policy = _page()

    async def index(_: Request) -> Response:
        return HTMLResponse(page, headers={"Content-Security-Policy": policy, "Referrer-Policy": "no-referrer"})

    async def health(_: Request) -> Response:
        alive = service.batcher.alive
        return JSONResponse({"status": "ok" if alive else "error"}, 200 if alive else 503)

    async def languages(_: Request) -> Response:
        return JSONResponse(service.languages())

    async def models(_: Request) -> Response:
        return JSONResponse(service.information())

    async def metrics(_: Request) -> Response:
        return PlainTextResponse(service.metrics.render(), headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4})

    async def translate(request: Request) -> Response:
        return await _translate(request, service)

    shown = {"/": index, "/health": health, "/languages": languages, "/models": models, "/metrics": metrics}
    return {**{path: ("GET", handler) for path, handler in shown.items()}, "/translate": ("POST", translate)}


def _page() -> tuple[str, str]:
    """Return the page and its security policy, which allows only its script and style and requests to this server."""
    text = resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    sources = {}
    for name in ("script", "style"):
        content = re.search(f"<{name}>(.*?)</{name}>", text, re.DOTALL)
        assert content is not None, name
        sources[name] = base64.b64encode(hashlib.sha256(content[1].encode()).digest()).decode()
    policy = "; ".join([
        "default-src 'none'", f"script-src 'sha256-{sources['script']}'", f"style-src 'sha256-{sources['style']}'",
        "connect-src 'self'", "img-src data:", "base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'",
    ])  # fmt: skip
    return text, policy


async def _translate(request: Request, service: Service) -> Response:
    arrived = time.monotonic()
    limits, state = service.limits, request.state
    body = await _body(request, service)
    fields = read_fields(request.headers.get("content-type", ""), body)
    key = fields.get("api_key")
    if service.keys and not (isinstance(key, str) and hash_key(key) in service.keys):
        raise Refused(403, "api_key: invalid or missing API key")
    question = read_question(fields, service.models, limits)
    del body, fields  # queued requests keep only their texts in memory
    lines = question.lines
    flat = [line for text in lines for line in text]
    state.log = {"source": question.pair.source, "target": question.pair.target, "lines": len(flat),
                 "characters": sum(map(len, flat))}  # fmt: skip
    try:
        answer = service.batcher.submit(question.pair, flat, question.alternatives + 1) if flat else None
    except QueueFull as error:
        raise Refused(429, str(error), {"Retry-After": str(error.retry)}) from error
    except Closed as error:
        raise Refused(503, str(error), CLOSE) from error
    rest = limits.timeout - (time.monotonic() - arrived)
    found = await _wait(request, answer, rest) if answer else []
    longest = service.models[question.pair].translator.max_source
    return JSONResponse(_answer(question, lines, found, longest))


async def _body(request: Request, service: Service) -> bytes:
    """Read the body.

    Raises:
        Refused: the body, or the bodies of all requests together, are too large, or it does not arrive in time
    """
    limits, parts = service.limits, []
    size = held = 0
    declared = int(request.headers.get("content-length", 0))
    refused = Refused(413, f"the body has more than {limits.body:,} bytes", CLOSE)
    if declared > DRAINED or declared > limits.body and "expect" in request.headers:
        raise refused
    try:
        async with asyncio.timeout(limits.body_timeout):
            async for part in request.stream():
                size += len(part)
                if size <= limits.body:
                    parts.append(part)
                    held += len(part)
                    service.held += len(part)
                if service.held > HELD:
                    raise Refused(503, "too many request bodies; try again", {"Retry-After": "5", **CLOSE})
                if size > DRAINED:
                    break
    except TimeoutError as error:
        if size <= limits.body:
            raise Refused(408, f"the body did not arrive within {limits.body_timeout:g} s", CLOSE) from error
    except ClientDisconnect as error:
        raise Refused(GONE, "the client has left") from error
    finally:
        service.held -= held
    if size > limits.body:
        raise refused
    return b"".join(parts)


async def _wait(request: Request, answer: Future, seconds: float) -> list[list[Translation]]:
    """Return the hypotheses of each line.

    Raises:
        Refused: the client disconnects, or the time limit is reached; the request is removed from the queue
    """
    answered = asyncio.wrap_future(answer)
    left = asyncio.ensure_future(request.receive())  # after the body, only a disconnect can be received
    try:
        await asyncio.wait({answered, left}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if answered.done():
            return answered.result()
        if left.done():
            raise Refused(GONE, "the client has left")
        raise Refused(503, "the translation was not ready in time; send less text, or try again")
    finally:
        answered.cancel()
        left.cancel()


def _answer(
    question: Question, lines: Sequence[Sequence[str]], found: Sequence[Sequence[Translation]], longest: int
) -> dict[str, Any]:
    """Return the fields of the answer: translations with the lines of the texts, and requested alternatives."""
    rest, texts, alternatives = iter(found), [], []
    for number, text in enumerate(lines, 1):
        hypotheses = [[each.text for each in next(rest)] for _ in text]
        if not all(hypotheses):
            line = next(index for index, each in enumerate(hypotheses, 1) if not each)
            where = f"text {number}, line {line}"
            raise Refused(400, f"q: {where} has more tokens than the model's {longest} positions; split it")
        ranked = ["\n".join(each[min(rank, len(each) - 1)] for each in hypotheses)
                  for rank in range(max(map(len, hypotheses)))]  # fmt: skip
        best, *others = dict.fromkeys(ranked)  # without duplicates
        texts.append(best)
        alternatives.append(others[: question.alternatives])
    fields: dict[str, Any] = {"translatedText": texts[0] if question.single else texts}
    if question.alternatives:
        fields["alternatives"] = alternatives[0] if question.single else alternatives
    return fields


def _error(status: int, message: str, headers: dict[str, str] | None = None) -> Response:
    return JSONResponse({"error": message}, status, headers)


async def _on_http(_: Request, error: HTTPException) -> Response:
    headers = dict(error.headers or {})
    return _error(error.status_code, error.detail, headers)


async def _on_refused(request: Request, error: Refused) -> Response:
    request.state.log = {**getattr(request.state, "log", {}), "reason": error.message}
    return _error(error.status, error.message, error.headers)


async def _on_error(_: Request, error: Exception) -> Response:
    return _error(500, "internal error; the server's log has the reason")


class Recorded:
    """Middleware that adds headers to the answers of *app*, counts and logs them, and catches exceptions.

    Args:
        app: an ASGI application
        service: the service with the metrics
        hosts: see :func:`make_app`
    """

    def __init__(self, app: Starlette, service: Service, hosts: Collection[str]):
        self.app, self.service, self.hosts = app, service, hosts
        self.known = {route.path for route in app.routes if isinstance(route, Route)}

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        begun, status, more = time.monotonic(), 0, {}

        async def sending(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                common = [(b"x-content-type-options", b"nosniff"), (b"cache-control", b"no-store")]
                message = {**message, "headers": [*message["headers"], *common]}
            await send(message)

        scope["state"] = {**scope.get("state", {})}
        host = Headers(scope=scope).get("host", "localhost")  # only HTTP/1.0 omits it
        app: Any = self.app
        if not is_accepted(host, self.hosts):
            more["reason"] = f"the host {printable(host, 60)} is not accepted; start the server with --allowed-host"
            app = _error(403, more["reason"])
        try:
            await app(scope, receive, sending)
        except Exception as error:  # the client already has the answer (500)
            more = {"error": f"{type(error).__name__}: {one_line(error, 300)}"}
        seconds = time.monotonic() - begun
        route = scope["path"] if scope["path"] in self.known else "other"
        self.service.metrics.requests.labels(route, str(status)).inc()
        if route == "/translate":
            self.service.metrics.seconds.observe(seconds)
        more.update(scope["state"].get("log", {}))
        log("request", method=scope["method"][:20], path=scope["path"][:200], status=status,
            milliseconds=round(seconds * 1000, 1), **more)  # fmt: skip
