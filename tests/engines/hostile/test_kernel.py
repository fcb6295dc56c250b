"""Hostile code has no rights to speak of, and the calls, mounts and namespaces that lead out are shut."""

from __future__ import annotations

import platform

import pytest

from tests.engines.hostile.loot import INSTANCE, PLACES, Loot

everywhere = pytest.mark.parametrize("place", PLACES)
in_instances = pytest.mark.parametrize("place", INSTANCE)
on_x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="the numbers of the calls are for x86-64")
CAPABILITIES = ("CapEff", "CapPrm", "CapBnd", "CapInh", "CapAmb")
SEALING = {
    *("mount", "umount2", "pivot_root", "chroot", "unshare", "setns", "open_tree", "move_mount", "fsopen", "fsconfig"),
    *("fsmount", "fspick", "mount_setattr", "sethostname", "setdomainname"),
}
"""Calls with which an instance seals itself. Its zygote has them too, without power over anything outside."""


@in_instances
@pytest.mark.parametrize("who", ["own", "child"])
def test_an_instance_and_what_it_starts_have_no_rights(loot: Loot, place: str, who: str) -> None:
    status = loot.got(place, "ids")[who]
    assert {name: int(status[name], 16) for name in CAPABILITIES} == dict.fromkeys(CAPABILITIES, 0)
    assert status["NoNewPrivs"] == "1"
    assert (status["Seccomp"], status["Seccomp_filters"]) == ("2", "2")
    assert len(set(status["Uid"].split())) == 1
    assert int(status["Uid"].split()[0]) >= 1000
    assert status["Groups"] == ""


@pytest.mark.parametrize("who", ["own", "child"])
def test_a_zygote_is_filtered_before_it_imports(loot: Loot, who: str) -> None:
    status = loot.got("zygote", "ids")[who]
    assert status["NoNewPrivs"] == "1"
    assert status["Seccomp"] == "2"
    assert status["Groups"] == ""


@in_instances
def test_programs_that_make_their_user_root_do_not(loot: Loot, place: str) -> None:
    found = loot.got(place, "set user id")
    if not found:
        pytest.skip("this machine has no such programs")
    for _, *others, capabilities in found.values():
        assert "0" not in others
        assert int(capabilities, 16) == 0


@in_instances
def test_nothing_beyond_its_share_is_to_be_had(loot: Loot, place: str) -> None:
    assert loot.got(place, "more than a share") == []


def test_a_zygote_is_root_of_nothing_but_itself(loot: Loot) -> None:
    assert set(loot.got("zygote", "more than a share")) <= {"root", "a group of root's"}


@everywhere
def test_no_memory_of_a_crash_is_written_out(loot: Loot, place: str) -> None:
    assert loot.got(place, "core") == 0


@on_x86
@in_instances
def test_calls_that_lead_out_are_refused(loot: Loot, place: str) -> None:
    assert loot.got(place, "calls") == []


@on_x86
def test_a_zygote_is_left_only_the_calls_that_seal(loot: Loot) -> None:
    assert set(loot.got("zygote", "calls")) <= SEALING


@on_x86
@in_instances
def test_no_namespace_can_be_made(loot: Loot, place: str) -> None:
    assert loot.got(place, "made namespaces") == []


@on_x86
def test_a_zygote_makes_no_user_namespace(loot: Loot) -> None:
    assert not [made for made in loot.got("zygote", "made namespaces") if made.endswith("user") or "clone3" in made]


@everywhere
def test_no_namespace_can_be_entered(loot: Loot, place: str) -> None:
    assert loot.got(place, "joined namespaces") == []


@on_x86
@everywhere
def test_calls_by_other_gates_end_the_caller(loot: Loot, place: str) -> None:
    assert loot.got(place, "other abis") == []


@in_instances
def test_nothing_of_the_kernel_can_be_set(loot: Loot, place: str) -> None:
    assert loot.got(place, "settings") == []
    assert loot.got(place, "maps") == []


def test_a_zygote_sets_nothing_but_what_is_its_own_namespaces(loot: Loot) -> None:
    own = ("/proc/1/", "/proc/sys/user/max_")
    counted = {"/proc/sys/kernel/ns_last_pid", "/proc/sys/kernel/pid_max"}
    assert [path for path in loot.got("zygote", "settings") if not path.startswith(own) and path not in counted] == []
    assert not set(loot.got("zygote", "maps")) & {"uid_map", "gid_map"}


@everywhere
def test_the_kernel_tells_nothing_about_the_machine(loot: Loot, place: str) -> None:
    assert loot.got(place, "kernel") == []


@everywhere
def test_read_only_mounts_stay_so_and_stay(loot: Loot, place: str) -> None:
    assert loot.got(place, "mounts") == []


@everywhere
def test_no_file_system_of_the_kernel_can_be_mounted(loot: Loot, place: str) -> None:
    assert loot.got(place, "new mounts") == []


@everywhere
def test_no_control_group_can_be_changed(loot: Loot, place: str) -> None:
    assert loot.got(place, "control groups") == []


def test_the_stub_of_a_jail_cannot_be_looked_into(loot: Loot) -> None:
    under = loot.got("zygote", "under proc")
    assert not under or under["first"] == []
    assert not [command for command in under.get("commands", ()) if loot.marker in command]


@everywhere
def test_no_process_can_be_debugged(loot: Loot, place: str) -> None:
    assert loot.got(place, "debugged") == []


@on_x86
def test_the_attacks_on_the_kernel_work_where_there_is_no_isolation(loot: Loot) -> None:
    core = {"ptrace", "keyctl", "bpf", "perf_event_open", "mount", "chroot", "unshare", "setns", "fsopen", "reboot"}
    assert core <= set(loot.got("open", "calls"))
    assert {"unshare user", "clone user", "clone3 user", "unshare mount"} <= set(loot.got("open", "made namespaces"))
    assert loot.got("open", "other abis")
    assert loot.got("open", "debugged")
    assert int(loot.got("open", "ids")["child"]["CapEff"], 16)
