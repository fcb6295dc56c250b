"""What the platform's own description allows, and much that it does not, sent to it by schemathesis."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.platform.support import PATIENCE, Platform, platform

schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed")
checks = pytest.importorskip("schemathesis.specs.openapi.checks")

pytestmark = pytest.mark.xdist_group("platform-schemathesis")
EXAMPLES = 12
"""Generated requests for each operation, beside those at the bounds of what is allowed."""
NOT_TO_BE_HAD = {f"POST /env-instance/{{id}}/{what}" for what in ("fork", "checkpoint", "restore")}
"""What answers 501."""
EXCLUDED = (
    schemathesis.checks.not_a_server_error,  # judged here
    checks.positive_data_acceptance,  # no schema says all that is refused
    checks.allow_header_conformance,  # /env/x/versions is also where a version of that name would be deleted
)


@pytest.fixture(scope="module")
def served() -> Iterator[Platform]:
    with platform() as found:
        found.push(release=False)
        yield found


def _description(served: Platform, **parameters: str) -> Any:
    generation = {
        "max-examples": EXAMPLES,
        "deterministic": True,
        "no-shrink": True,
        "with-security-parameters": False,
    }
    config = {
        "seed": 4,
        "generation": generation,
        "parameters": {f"path.{name}": value for name, value in parameters.items()},
    }
    return schemathesis.openapi.from_url(f"{served.control}/openapi.json", config=schemathesis.Config.from_dict(config))


@pytest.fixture(scope="module")
def anything(served: Platform) -> Any:
    return _description(served)


@pytest.fixture(scope="module")
def what_is_there(served: Platform) -> Any:
    return _description(served, name="desk", version="1.2.0", id=served.create("desk", ttl="1d")["id"])


def _judge(served: Platform, case: Any, *excluded: Any) -> None:
    """Send a request, and judge the answer."""
    headers = {"Authorization": f"Bearer {served.token}"}
    response = case.call(headers=headers, timeout=PATIENCE)
    expected = (501,) if case.operation.label in NOT_TO_BE_HAD else ()
    assert response.status_code < 500 or response.status_code in expected, response.text
    case.validate_response(response, headers=headers, excluded_checks=[*EXCLUDED, *excluded])


@schemathesis.pytest.from_fixture("anything").parametrize()
def test_every_operation(served: Platform, case: Any) -> None:
    _judge(served, case)


@(
    schemathesis.pytest.from_fixture("what_is_there")
    .include(path_regex=r"\{")
    .exclude(method="DELETE")
    .exclude(path_regex="/extend$")  # it would soon be gone
    .parametrize()
)
def test_operations_on_what_is_there(served: Platform, case: Any) -> None:
    if not case.query.get("follow"):  # logs that are followed have no end
        _judge(served, case, checks.negative_data_rejection)
