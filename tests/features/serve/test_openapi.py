"""The description of the API: valid, whole, and true."""

from __future__ import annotations

from typing import Any

import pytest
from openapi_spec_validator import validate

from goondan.features.serve.api.routing import ways
from goondan.features.serve.api.swarm import Swarm
from goondan.features.serve.door import OPERATIONS
from goondan.features.serve.door.openapi import document
from goondan.kernel.cli import beside
from goondan.kernel.cli.operations import PREFIX
from goondan.kernel.cli.state import BundleTarget

WAYS: list[Any] = ways(beside.doors(), Swarm(BundleTarget("/no/bundle", "/no/state")))


@pytest.fixture(scope="module")
def told() -> dict[str, Any]:
    return document(WAYS)


def test_a_validator_finds_nothing(told: dict[str, Any]) -> None:
    validate(told)


def test_it_has_every_route_of_the_api(told: dict[str, Any]) -> None:
    every = [
        (route.path, method.lower())
        for route in WAYS
        if route.path.startswith(PREFIX)
        for method in route.methods - {"HEAD"}
    ]
    assert len(every) > 20
    assert sorted(every) == sorted((path, method) for path, row in told["paths"].items() for method in row)


def test_each_operation_has_a_name_of_its_own_and_a_role(told: dict[str, Any]) -> None:
    operations = [one for row in told["paths"].values() for one in row.values()]
    names = [one["operationId"] for one in operations]
    assert len(set(names)) == len(names)
    assert all("role" in one["description"] and one["summary"].endswith(".") for one in operations)
    assert {row.role for row in OPERATIONS} == {"look", "talk", "operate"}


def test_what_changes_something_is_no_get() -> None:
    rows = [route for route in WAYS if route.path.startswith(PREFIX)]
    assert all(route.methods == ({"GET"} if route.role == "look" else {"POST"}) for route in rows)
