"""Web: a gallery as an HTTP service with a page."""

from seps.web.app import make_app
from seps.web.limits import Limits

__all__ = ["Limits", "make_app"]
