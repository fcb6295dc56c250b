"""Hostile code reaches nobody under ``none``, and under an allow-list only what is listed, by the proxy alone."""

from __future__ import annotations

import pytest

from tests.engines.hostile.loot import PLACES, Loot

everywhere = pytest.mark.parametrize("place", PLACES)
with_a_list = pytest.mark.parametrize("place", ["allowed tool", "allowed import"])


@everywhere
@pytest.mark.parametrize("what", ["connected", "unix", "neighbour's port", "abstract names", "interfaces"])
def test_nobody_can_be_reached(loot: Loot, place: str, what: str) -> None:
    assert loot.got(place, what) == []


def test_nobody_was_reached(loot: Loot) -> None:
    assert loot.outside["visits"] == []
    assert loot.outside["datagrams"] == []


@pytest.mark.parametrize("place", [*PLACES, "allowed tool", "allowed import"])
def test_no_odd_socket_can_be_made(loot: Loot, place: str) -> None:
    assert loot.got(place, "odd sockets") == []


@with_a_list
def test_a_listed_service_is_reached_by_the_proxy(loot: Loot, place: str) -> None:
    assert list(loot.got(place, "listed").values()) == [[200, f"served {loot.secret}"]]


@with_a_list
def test_an_unlisted_service_is_refused_however_it_is_spelled(loot: Loot, place: str) -> None:
    answers = loot.got(place, "unlisted")
    assert len(answers) > 5
    assert {status for status, _ in answers.values()} <= {400, 403}
    assert not [body for _, body in answers.values() if loot.secret in body]
    tunnels = loot.got(place, "tunnels")
    assert len(tunnels) > 5
    assert not [line for line in tunnels.values() if not line.startswith(("HTTP/1.1 403", "HTTP/1.1 400"))]


@with_a_list
@pytest.mark.parametrize("what", ["connected", "interfaces", "took the proxy's port"])
def test_there_is_no_way_around_the_proxy(loot: Loot, place: str, what: str) -> None:
    assert not loot.got(place, what)


def test_only_the_listed_service_was_reached(loot: Loot) -> None:
    assert set(loot.outside["visits by the list"]) == {loot.ports[0]}


def test_the_attacks_by_the_network_work_where_there_is_no_isolation(loot: Loot) -> None:
    assert {f"127.0.0.1:{port}" for port in loot.ports} <= set(loot.got("open", "connected"))
    assert len(loot.got("open", "unix")) >= 2
    assert {"packet", "raw ip"} <= set(loot.got("open", "odd sockets"))
    assert loot.got("neighbour", "reaches")
