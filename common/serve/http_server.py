"""What our servers share: bodies and heads that come in time and in size, refusals that are JSON, an address
that is bound before the index is built.

A body of more than MAX_BODY bytes is 413, and a connection whose request stands unfinished for PATIENCE
seconds is closed.
"""

import asyncio
import functools
import socket
import sys

import h11
import uvicorn
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from uvicorn.protocols.http.h11_impl import H11Protocol

from common.http_client import HALF_CHARACTER

MAX_QUERY = 20_000      # characters
MAX_BODY = 8_000_000    # bytes
PATIENCE = 20.0         # seconds for the head of a request, and again for its body


def readable(query):
    """A query cut to MAX_QUERY characters, halves of characters replaced."""
    return HALF_CHARACTER.sub("\ufffd", query[:MAX_QUERY])


def application(title, max_body=MAX_BODY, patience=PATIENCE):
    """A FastAPI application with these limits, and without a route."""
    app = FastAPI(title=title)
    app.add_middleware(WholeBody, max_body=max_body, patience=patience)

    @app.exception_handler(RequestValidationError)
    def refuse(_, error):  # FastAPI's own repeats the input, which may be NaN or half a character: no JSON
        problems = []
        for e in error.errors():
            problems.append({key: e[key] for key in ("type", "loc", "msg")})
        return JSONResponse({"detail": problems}, 422)

    return app


class WholeBody:
    """ASGI middleware: reads the body before the application does, unless it is too large or too slow."""

    def __init__(self, app, max_body, patience):
        self.app = app
        self.max_body = max_body
        self.patience = patience

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        body = bytearray()
        more = True
        size = int(Headers(scope=scope).get("content-length", 0))  # an announced excess is not waited for
        try:
            async with asyncio.timeout(self.patience):
                while more and size <= self.max_body:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    body += message.get("body", b"")
                    more = message.get("more_body", False)
                    size = max(size, len(body))
        except TimeoutError:
            return await self._refuse(408, f"no whole body within {self.patience:g} s", scope, receive, send)
        if size > self.max_body:
            return await self._refuse(413, f"the body is over {self.max_body:,} bytes", scope, receive, send)
        messages = [{"type": "http.request", "body": bytes(body), "more_body": False}]

        async def replay():
            return messages.pop() if messages else await receive()

        return await self.app(scope, replay, send)

    @staticmethod
    async def _refuse(status, detail, scope, receive, send):
        response = JSONResponse({"detail": detail}, status, {"connection": "close"})
        await response(scope, receive, send)


class ImpatientProtocol(H11Protocol):
    """uvicorn closes what idles after an answer, but waits for ever for the rest of a request's head."""

    def __init__(self, *args, patience, **kwargs):
        super().__init__(*args, **kwargs)
        self.patience = patience
        self.head_timer = None

    def connection_made(self, transport):
        super().connection_made(transport)
        self._watch()

    def data_received(self, data):
        super().data_received(data)
        self._watch()

    def _watch(self):
        """A timer runs from the first sign of a request until its head is whole; bytes do not rewind it."""
        waiting = self.conn.their_state is h11.IDLE
        if waiting and self.head_timer is None:
            self.head_timer = self.loop.call_later(self.patience, self.transport.close)
        elif not waiting and self.head_timer is not None:
            self.head_timer.cancel()
            self.head_timer = None


class Server(uvicorn.Server):
    """Says when it can be asked."""

    def __init__(self, app, announce="", patience=PATIENCE):
        http = functools.partial(ImpatientProtocol, patience=patience)
        super().__init__(uvicorn.Config(app, http=http, log_level="warning"))
        self.announce = announce

    async def startup(self, sockets=None):
        await super().startup(sockets)
        if self.announce:
            print(self.announce, flush=True)


def bind(host, port):
    """A socket that does not listen yet: the port is free, and clients are refused until the index stands."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        refuse_address(host, port, error)
    return listener


def refuse_address(host, port, error):
    sys.exit(f"error: cannot serve at {host}:{port} ({error.strerror}); give another --host or --port")


def address_flags(parser, port):
    """Adds --host and --port."""
    parser.add_argument("--host", default="127.0.0.1", help="loopback unless told otherwise")
    parser.add_argument("--port", type=int, default=port, help="0: any that is free")


def check_port(port):
    if not 0 <= port <= 65535:
        sys.exit(f"error: --port {port}: 0 to 65535")


def run(app, listener, args, what, path=""):
    """Serves an application on a bound socket until it is stopped; says `what` it serves, and where."""
    host = f"[{args.host}]" if ":" in args.host else args.host
    address = f"http://{host}:{listener.getsockname()[1]}{path}"
    try:
        Server(app, f"serving {what} at {address}").run([listener])
    except OSError as error:  # another server took the port while the index was built
        refuse_address(args.host, args.port, error)
