"""The API against its own description: whatever is sent, no failure inside, and answers as described."""

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from serving import make_world, serving

from seps.web import Limits, make_app

schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed (the dev extra)")

from schemathesis.checks import (  # noqa: E402
    content_type_conformance,
    not_a_server_error,
    response_schema_conformance,
    status_code_conformance,
)

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]


ROUTES = [
    ("POST", "/search"),
    ("GET", "/images"),
    ("POST", "/images"),
    ("GET", "/images/{id}"),
    ("GET", "/explain"),
    ("GET", "/gallery"),
    ("GET", "/metrics"),
    ("GET", "/healthz"),
]


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """A gallery of its own: what is fuzzed also adds pictures."""
    return make_world(tmp_path_factory.mktemp("fuzz") / "gallery", 4)


@pytest.fixture(scope="module")
def description(own):
    with serving(make_app(own.gallery, Limits(rate=1e6, burst=1e6))) as address:
        yield schemathesis.openapi.from_url(f"{address}/openapi.json")


def test_every_route_is_fuzzed(description):
    described = [
        (operation.ok().method.upper(), operation.ok().path) for operation in description.get_all_operations()
    ]
    assert sorted(described) == sorted(ROUTES)


@pytest.mark.parametrize("mode", list(schemathesis.GenerationMode), ids=lambda mode: mode.value)
@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_whatever_is_sent_is_answered_as_described(own, description, method, path, mode):
    operation = description[path][method]

    @settings(
        max_examples=6,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def ask(case):
        case.call_and_validate(checks=CHECKS)
        # No made-up id is ever one of a picture: the same again with one that is.
        for known in (case.path_parameters, case.query):
            if known and "id" in known:
                known["id"] = own.ids[0]
                case.call_and_validate(checks=CHECKS)

    try:
        ask()
    except Unsatisfiable:
        pytest.skip("nothing about this route can be wrong")
