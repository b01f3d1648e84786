"""A client of servers that speak the OpenAI chat API: paced, and patient with what passes."""

from __future__ import annotations

import base64
import http.client
import io
import json
import random
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

from PIL import Image

PASSING = {408, 409, 425, 429, 500, 502, 503, 504}
"""Answers after which the same request may succeed."""
LONGEST_PAUSE, LONGEST_ASKED = 60.0, 600.0
"""Seconds between two tries at most: of our own accord, and where the server asks for more."""


class Unanswered(Exception):  # noqa: N818 - it names a result as much as an error
    """A request that failed each time it was sent; its message says how."""


class Pace:
    """Lets callers through at most so many times a minute."""

    def __init__(self, a_minute: float | None) -> None:
        self.gap = 0.0 if a_minute is None else 60.0 / a_minute
        self._next = 0.0
        self._lock = threading.Lock()

    def wait(self) -> None:
        """Until it is the caller's turn."""
        if not self.gap:
            return
        with self._lock:
            now = time.monotonic()
            turn = max(now, self._next)
            self._next = turn + self.gap
        time.sleep(max(0.0, turn - now))


class ChatServer:
    """A server at an address, with its key if it wants one."""

    def __init__(
        self,
        address: str,
        key: str | None = None,
        retries: int = 6,
        patience: float = 120.0,
        requests_per_minute: float | None = None,
        first_pause: float = 1.0,
    ) -> None:
        if not address.startswith(("http://", "https://")):
            raise ValueError(f"server: expected an address with http:// or https://, found {address!r}")
        self.address = address.rstrip("/")
        self.key = key
        self.retries = retries
        self.patience = patience
        self.first_pause = first_pause
        self.pace = Pace(requests_per_minute)
        self._closed = threading.Event()

    def close(self) -> None:
        """Send nothing again: whoever waits for another try gives up."""
        self._closed.set()

    def first_model(self) -> str:
        """The name of the model that the server offers first."""
        try:
            return str(self._send("/models", None)["data"][0]["id"])
        except Unanswered as failure:
            raise ValueError(f"{self.address}: expected a list of models, found {failure}") from None
        except (KeyError, IndexError, TypeError):
            raise ValueError(
                f"{self.address}: expected a list of models, found none; name one with --model"
            ) from None

    def ask(self, model: str, prompt: str, image: Image.Image, request: Mapping[str, Any]) -> str:
        """What the model says of a picture; `Unanswered` once every try has failed."""
        content = [
            {"type": "image_url", "image_url": {"url": _address_of(image)}},
            {"type": "text", "text": prompt},
        ]
        body = {"model": model, "messages": [{"role": "user", "content": content}], **request}
        answer = self._send("/chat/completions", body, _text_of)
        return str(answer)

    def _send(self, path: str, body: Mapping[str, Any] | None, read: Any = lambda answer: answer) -> Any:
        pause, failure = self.first_pause, "not sent"
        for turn in range(self.retries + 1):
            self.pace.wait()
            asked: float | None = None
            try:
                return read(self._send_once(path, body))
            except urllib.error.HTTPError as error:
                failure = self._without_key(f"{error.code} {_reason(error)}")
                if error.code not in PASSING:
                    raise ValueError(f"{self.address}: the server refuses the request: {failure}") from None
                asked = _seconds(error.headers.get("Retry-After"))
            except (OSError, http.client.HTTPException, ValueError) as error:
                failure = self._without_key(_cause(error))
            if turn < self.retries:
                span = min(LONGEST_PAUSE, pause * random.uniform(0.5, 1))
                if self._closed.wait(span if asked is None else min(LONGEST_ASKED, asked)):
                    break
                pause *= 2
        raise Unanswered(f"{failure}, after {self.retries + 1} tries")

    def _without_key(self, text: str) -> str:
        """What may be shown of what a server said: some repeat the key they were sent."""
        return text.replace(self.key, "(key)") if self.key else text

    def _send_once(self, path: str, body: Mapping[str, Any] | None) -> Any:
        headers = {"Content-Type": "application/json"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.address + path, data, headers)
        with urllib.request.urlopen(request, timeout=self.patience) as answer:
            content = answer.read()
        try:
            return json.loads(content)
        except ValueError:
            raise ValueError("the answer is no JSON") from None


def _text_of(answer: Any) -> str:
    """The text of a chat answer; an empty one counts as a failure."""
    try:
        text = answer["choices"][0]["message"]["content"]
    except (KeyError, IndexError, TypeError):
        raise ValueError("the answer holds no message") from None
    if not isinstance(text, str) or not text.strip():
        raise ValueError("the answer is empty")
    return text.strip()


def _reason(error: urllib.error.HTTPError) -> str:
    """What a server says beside its code."""
    try:
        said = json.loads(error.read())
    except (ValueError, OSError):
        return str(error.reason)
    inner = said.get("error", said) if isinstance(said, dict) else said
    return str(inner.get("message", inner) if isinstance(inner, dict) else inner)


def _cause(error: Exception) -> str:
    """What went wrong on the way to a server, without the number of its error."""
    inner = getattr(error, "reason", error)
    return str(getattr(inner, "strerror", None) or inner) or type(error).__name__


def _seconds(value: str | None) -> float | None:
    try:
        return None if value is None else max(0.0, float(value))
    except ValueError:
        return None


def _address_of(image: Image.Image) -> str:
    written = io.BytesIO()
    image.convert("RGB").save(written, "JPEG", quality=90)
    return "data:image/jpeg;base64," + base64.b64encode(written.getvalue()).decode()
