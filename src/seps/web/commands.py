"""The command `seps serve`."""

from __future__ import annotations

import ipaddress
import logging
import os
import socket
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from seps.web.limits import Limits

logger = logging.getLogger(__name__)

TOKEN = "SEPS_TOKEN"


@dataclass(frozen=True)
class ServeOptions:
    """Serve a gallery: a page and an HTTP API (its description is at /docs)."""

    gallery: str
    """Where the gallery stands."""
    host: str = "127.0.0.1"
    """The address to listen on; this machine alone by default, 0.0.0.0 for all."""
    port: int = 8000
    """The port to listen on; 0 takes a free one."""
    model: str = ""
    """The model's folder, if it is no longer where it was when indexing."""
    token_file: str = ""
    """A file with the token that clients must bring; the environment's SEPS_TOKEN does the same."""
    read_only: bool = False
    """Take no pictures."""
    hosts: list[str] = field(default_factory=list)
    """Names the service may be called by, beside this machine's own; `*` allows any."""
    behind_proxy: bool = False
    """Believe a proxy on this machine who the client is (X-Forwarded-For)."""
    limits: Limits = field(default_factory=Limits)
    """How much the service takes on."""


def run_serve(options: ServeOptions) -> int:
    """Serve until interrupted."""
    import uvicorn

    from seps.gallery import load_gallery
    from seps.web.app import make_app

    token = read_token(options)
    with listen(options.host, options.port) as listener:
        gallery = load_gallery(options.gallery, options.model)
        app = make_app(gallery, options.limits, token, options.read_only, known_hosts(options))
        config = uvicorn.Config(
            app,
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=options.behind_proxy,
            timeout_graceful_shutdown=10,
        )
        if token is None and not is_loopback(options.host):
            logger.warning("no token is set: whoever reaches %s can search the gallery", options.host)
        host, port = listener.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        logger.info("%d pictures at http://%s:%d/ (Ctrl-C ends)", len(gallery), shown, port)
        # Ctrl-C is how one ends it: the server has closed in order when this arrives.
        with suppress(KeyboardInterrupt):
            uvicorn.Server(config).run(sockets=[listener])
    return 0


def read_token(options: ServeOptions) -> str | None:
    """The token of the file or of the environment, None where there is neither."""
    if not options.token_file:
        return os.environ.get(TOKEN, "").strip() or None
    lines = Path(options.token_file).read_text(encoding="utf-8").split()
    if len(lines) != 1:
        raise ValueError(f"{options.token_file}: expected one token, found {len(lines)} words")
    return lines[0]


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens; OSError says where it could not."""
    if not 0 <= port <= 65535:
        raise ValueError(f"port: expected 0 to 65535, found {port}")
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        # The longer text repeats the address.
        known = error.errno is not None and error.errno > 0
        reason = os.strerror(error.errno) if known and error.errno else str(error.strerror or error)
        raise OSError(f"cannot listen on {host}:{port} ({reason.lower()})") from None


def is_loopback(host: str) -> bool:
    """Whether an address is reached from this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def known_hosts(options: ServeOptions) -> frozenset[str]:
    """The names the service may be called by; any where it is open to others and no name is given."""
    from seps.web.app import LOOPBACK

    named = frozenset(name.lower() for name in options.hosts)
    if "*" in named or (not named and not is_loopback(options.host)):
        return frozenset()
    return named | LOOPBACK | {options.host.lower()}
