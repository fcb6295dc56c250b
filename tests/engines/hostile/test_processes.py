"""Hostile code sees, signals and inherits nothing that is not its own."""

from __future__ import annotations

import pytest

from tests.engines.hostile.loot import INSTANCE, PLACES, Loot

everywhere = pytest.mark.parametrize("place", PLACES)
in_instances = pytest.mark.parametrize("place", INSTANCE)


@everywhere
def test_other_processes_are_not_to_be_seen(loot: Loot, place: str) -> None:
    seen = loot.got(place, "processes")
    assert seen["marked"] == []
    assert seen["number"] <= 2


@everywhere
@pytest.mark.parametrize("what", ["signalled", "looked into a victim"])
def test_other_processes_cannot_be_reached(loot: Loot, place: str, what: str) -> None:
    assert loot.got(place, what) == []


@in_instances
def test_the_first_process_of_a_namespace_is_out_of_reach(loot: Loot, place: str) -> None:
    assert loot.got(place, "looked into") == []
    assert not loot.got(place, "kill")


def test_who_kills_everything_kills_nobody_outside(loot: Loot) -> None:
    assert loot.outside["victim"] is None
    assert loot.outside["healthy"] == [True] * 4


@in_instances
def test_an_instance_has_nothing_open_that_is_not_its_own(loot: Loot, place: str) -> None:
    rows = loot.got(place, "descriptors")
    sockets = [row for row in rows if "family" in row]
    listening = [row for row in sockets if row["listening"]]
    assert len(listening) == 1
    own = listening[0]["name"]
    assert {row["name"] for row in sockets} <= {own, ""}
    # Connections to it have its own name. Of those without, one leads outside: its report to the spawner.
    assert len([row for row in sockets if row["name"] == "" and row["peer"] == 0]) == 1
    others = [row["target"].split(":")[0] for row in rows if "family" not in row]
    assert set(others) <= {"/dev/null", "pipe", "anon_inode"} | {f"/proc/{pid}/fd" for pid in range(1, 100)}
    kinds = [row["target"] for row in rows if row["target"].startswith("anon_inode")]
    assert not [kind for kind in kinds if "pidfd" in kind]
    assert kinds.count("anon_inode:[eventpoll]") <= 1


def test_a_zygote_has_nothing_open_but_its_socket_to_the_spawner(loot: Loot) -> None:
    rows = loot.got("zygote", "descriptors")
    sockets = [row for row in rows if "family" in row]
    assert len(sockets) == 1
    assert not sockets[0]["listening"]
    others = {row["target"].split(":")[0] for row in rows if "family" not in row}
    assert others <= {"/dev/null", "pipe", "/proc/1/fd"}


def test_the_attacks_on_processes_work_where_there_is_no_isolation(loot: Loot) -> None:
    assert loot.got("open", "processes")["marked"]
    assert loot.got("open", "signalled")
    assert {"mem", "environ", "fd", "root"} <= set(loot.got("open", "looked into a victim"))
