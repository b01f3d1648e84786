"""What stands before every route: who may ask, how often, how much; and what every answer carries."""

from __future__ import annotations

import hmac
import logging
import time
from collections.abc import MutableMapping
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from seps.web.limits import Buckets, Limits, Refusal, client_key
from seps.web.metrics import Metrics

logger = logging.getLogger(__name__)

# A page may load what this service serves, pictures it made itself, and nothing else.
PAGE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
# The reader of the API's description styles its elements one by one and brings its icons inline.
DOCS_POLICY = PAGE_POLICY.replace("style-src 'self'", "style-src 'self' 'unsafe-inline'").replace(
    "blob:", "data:"
)
HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), microphone=(), geolocation=()",
}
# What a page needs before it can ask for the token, and what says nothing of the gallery.
OPEN = ("/", "/healthz", "/favicon.ico", "/openapi.json", "/docs")
OPEN_BELOW = ("/static/", "/docs/")
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
# A page of thumbnails costs about as much as the search that found them.
_PICTURE_COST = 1 / 24


class Guard:
    """Middleware around the whole service."""

    def __init__(
        self,
        app: ASGIApp,
        limits: Limits,
        metrics: Metrics,
        token: str | None = None,
        hosts: frozenset[str] = frozenset(),
    ) -> None:
        self.app = app
        self.limits = limits
        self.metrics = metrics
        self.token = None if token is None else token.encode()
        self.hosts = hosts
        self.buckets = Buckets(limits.rate, limits.burst)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Admit, pass on, measure."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began = time.perf_counter()
        status = 0

        async def send_guarded(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                add_headers(scope["path"], message)
            await send(message)

        try:
            self.admit(scope)
            await self.app(scope, self.metered(scope, receive), send_guarded)
        except Refusal as refusal:
            await answer(refusal)(scope, receive, send_guarded)
        except ClientDisconnect:
            status = status or 499
        except Exception:
            logger.exception("%s %s failed", scope["method"], scope["path"])
            if status:
                raise
            failure = Refusal(500, "something went wrong inside the service; its log says what")
            await answer(failure)(scope, receive, send_guarded)
        finally:
            self.count(scope, status, time.perf_counter() - began)

    def count(self, scope: MutableMapping[str, Any], status: int, seconds: float) -> None:
        """Note an answer under its route, so that clients cannot invent labels."""
        route = getattr(scope.get("route"), "path", None) or "other"
        method = scope["method"] if scope["method"] in METHODS else "other"
        self.metrics.requests.add(method=method, route=route, status=str(status))
        self.metrics.seconds.observe(seconds, route=route)

    def admit(self, scope: Scope) -> None:
        """Refuse who may not ask."""
        headers = Headers(scope=scope)
        self.check_origin(headers)
        client = client_key(scope["client"][0] if scope.get("client") else None)
        path, method = scope["path"], scope["method"]
        if not (path in OPEN or path.startswith(OPEN_BELOW)):
            if not self.knows(headers):
                self.buckets.spend(client, 1)  # guessing is no cheaper than searching
                raise Refusal(401, "expected the service's token (Authorization: Bearer ...)")
            self.buckets.spend(client, cost(method, path))

    def check_origin(self, headers: Headers) -> None:
        """Refuse other sites' pages: their requests, and names they made to point here."""
        host = headers.get("host", "")
        name = urlsplit(f"//{host}").hostname if well_formed(host) else None
        if self.hosts and name not in self.hosts:
            raise Refusal(400, "expected the host to be one this service is known by; see the option --hosts")
        origin = headers.get("origin")
        if origin is not None and origin.partition("://")[2] != host:
            raise Refusal(403, "requests from pages of other sites are not served")

    def knows(self, headers: Headers) -> bool:
        """Whether a request brings the token, where there is one."""
        if self.token is None:
            return True
        scheme, _, given = headers.get("authorization", "").partition(" ")
        return scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), self.token)

    def metered(self, scope: Scope, receive: Receive) -> Receive:
        """The body, up to the size that is allowed."""
        headers = Headers(scope=scope)
        form = headers.get("content-type", "").lower().startswith("multipart/form-data")
        most = (self.limits.upload_bytes if form else 0) + self.limits.body_bytes
        refusal = Refusal(413, f"expected a body of at most {most:,} bytes, found more")
        declared = headers.get("content-length", "0")
        if declared.isdigit() and int(declared) > most:
            raise refusal
        received = 0

        async def receive_metered() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > most:
                raise refusal
            return message

        return receive_metered


def cost(method: str, path: str) -> float:
    """What a request takes from its client's bucket."""
    if path.startswith("/images/") or (path == "/images" and method == "GET"):
        return _PICTURE_COST
    return 1.0 if path in ("/search", "/explain", "/images") else 0.0


def well_formed(host: str) -> bool:
    """Whether a Host header can be taken apart."""
    try:
        return bool(urlsplit(f"//{host}").hostname)
    except ValueError:
        return False


def add_headers(path: str, message: Message) -> None:
    """What every answer carries."""
    headers = MutableHeaders(scope=message)
    for name, value in HEADERS.items():
        headers[name] = value
    docs = path == "/docs" or path.startswith("/docs/")
    headers["Content-Security-Policy"] = DOCS_POLICY if docs else PAGE_POLICY
    headers.setdefault("Cache-Control", "no-store")


def answer(refusal: Refusal) -> JSONResponse:
    """A refusal as JSON."""
    return JSONResponse({"error": refusal.sentence}, refusal.status, refusal.headers)
