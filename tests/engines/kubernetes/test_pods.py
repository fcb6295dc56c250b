"""What a cluster says of a pod, in words for a person."""

from __future__ import annotations

import json
from typing import Any

import pytest

from aenv.engines.kubernetes import pods
from aenv.engines.kubernetes.manifests import ENDED, EXPIRES, FACTS, Facts
from aenv.engines.kubernetes.pods import Pod

KNOWN = Facts(id="one", env="probe@1.0.0", created_at=1.0, memory=(256 * 1024**2, 768 * 1024**2))
TOO_MUCH = "out of memory: it took more than the 256 MiB it may have"


def pod(
    phase: str = "Running",
    *,
    main: dict[str, Any] | None = None,
    second: dict[str, Any] | None = None,
    porter: dict[str, Any] | None = None,
    going: bool = False,
    node: str = "node1",
    notes: dict[str, str] | None = None,
    conditions: list[dict[str, Any]] | None = None,
    **status: Any,
) -> Pod:
    """A pod as a cluster tells of it, with the states of its containers."""
    given = {"main": main, "second": second}
    metadata: dict[str, Any] = {"name": "one", "uid": "u1", "annotations": notes or {}}
    if going:
        metadata["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    body = {
        "metadata": metadata,
        "spec": {
            "nodeName": node,
            "containers": [{"name": "main", "image": "env:1"}, {"name": "second", "image": "task:2"}],
            "initContainers": [{"name": "porter", "image": "env:1"}],
        },
        "status": {
            "phase": phase,
            "containerStatuses": [{"name": name, "state": state} for name, state in given.items() if state is not None],
            "initContainerStatuses": [{"name": "porter", "state": porter}] if porter is not None else [],
            "conditions": conditions or [],
            **status,
        },
    }
    return pods.decode(json.dumps(body).encode())


def ended(code: int = 0, reason: str = "Error", **more: Any) -> dict[str, Any]:
    return {"terminated": {"exitCode": code, "reason": reason, "finishedAt": "2026-01-01T00:00:05Z", **more}}


def waiting(reason: str, message: str = "") -> dict[str, Any]:
    return {"waiting": {"reason": reason, "message": message}}


RUNNING: dict[str, Any] = {"running": {"startedAt": "2026-01-01T00:00:00Z"}}


def why(found: Pod, words: str = "") -> str:
    well, reason = pods.ended(found, KNOWN, words)
    assert not well
    return reason


# Its end


def test_one_that_ended_well() -> None:
    assert pods.ended(pod("Succeeded", main=ended(0, "Completed")), KNOWN, "bye") == (
        True,
        "it ended with exit code 0; it printed last:\nbye",
    )


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (ended(3), "it ended with exit code 3"),
        (ended(137, "OOMKilled"), TOO_MUCH),
        (ended(1, "OOMKilled"), TOO_MUCH),  # a child of it was killed, and it ended for that
        (ended(137), f"signal 9 ended it: somebody's, or {TOO_MUCH}"),
        (ended(139), "signal 11 ended it"),
        (ended(0, signal=15), "signal 15 ended it"),
        (
            ended(128, "StartError", message='exec: "nothing": not found'),
            'it ended with exit code 128 (exec: "nothing": not found)',
        ),
        (
            ended(127, "ContainerCannotRun", message="no such file"),
            "it ended with exit code 127 (no such file)",
        ),
    ],
)
def test_how_a_container_ended(state: dict[str, Any], words: str) -> None:
    assert why(pod("Failed", main=state)) == words
    assert why(pod("Failed", main=state), "Traceback\n") == f"{words}; it printed last:\nTraceback\n"


@pytest.mark.parametrize("reason", ["Evicted", "Preempting", "NodeLost", "Shutdown", "NodeShutdown", "Terminated"])
def test_the_cluster_ended_it(reason: str) -> None:
    told = pod("Failed", main=ended(137), reason=reason, message="The node was low on resource: memory.")
    assert why(told) == f"the cluster ended it ({reason}): The node was low on resource: memory."
    assert "does not say why" in why(pod("Failed", reason=reason))


def test_it_lived_as_long_as_any_may() -> None:
    assert "AENV_LONGEST_LIFE" in why(pod("Failed", reason="DeadlineExceeded", message="Pod was active"))


def test_an_engine_ended_it_and_says_why() -> None:
    told = pod("Failed", main=ended(137), reason="DeadlineExceeded", notes={ENDED: "it was not ready within 5 s"})
    assert why(told) == "it was not ready within 5 s"


def test_the_second_container_ended() -> None:
    found = pod("Running", main=RUNNING, second=ended(2))
    assert found.over
    assert why(found) == "the second container ended with exit code 2"
    assert why(pod(main=RUNNING, second=ended(137, "OOMKilled"))).startswith(
        "out of memory: the second container took more than the 768 MiB"
    )


def test_a_second_container_that_ended_well_ends_it_too() -> None:
    found = pod("Running", main=RUNNING, second=ended(0, "Completed"))
    assert found.over
    assert why(found).startswith("the second container ended with exit code 0")


def test_the_one_that_failed_is_named_and_not_the_one_that_ended_with_it() -> None:
    assert why(pod("Failed", main=ended(1), second=ended(0, "Completed"))).startswith("it ended with exit code 1")
    assert why(pod("Failed", main=ended(0, "Completed"), second=ended(4))).startswith("the second container")


def test_what_brings_the_agent_failed() -> None:
    found = pod("Failed", porter=ended(1), main=waiting("PodInitializing"), second=waiting("PodInitializing"))
    assert why(found).startswith("what brings the agent ended with exit code 1")


def test_a_pod_of_which_nobody_says_anything() -> None:
    assert why(pod("Failed")) == "its pod is failed: nobody says why"
    assert why(pod("Failed", message="it was so")) == "its pod is failed: it was so"


def test_when_it_ended() -> None:
    assert pod("Failed", main=ended(1)).over_since == pytest.approx(1767225605.0)
    assert pod("Failed").over_since == 0.0
    assert pod("Failed", main={"terminated": {"exitCode": 1, "finishedAt": None}}).over_since == 0.0


@pytest.mark.parametrize("phase", ["Failed", "Succeeded"])
def test_what_is_over(phase: str) -> None:
    assert pod(phase).over
    assert not pod("Running", main=RUNNING, porter=ended(0, "Completed")).over
    assert not pod("Pending").over


# On its way


def test_no_node_has_room() -> None:
    said = "0/1 nodes are available: 1 Insufficient cpu."
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": said}
    found = pod("Pending", node="", conditions=[condition])
    assert pods.stalled(found) == f"no node has room for it: {said}"
    assert not pods.hopeless(found)


@pytest.mark.parametrize("reason", ["ErrImagePull", "ImagePullBackOff", "RegistryUnavailable"])
def test_an_image_that_cannot_be_pulled(reason: str) -> None:
    found = pod("Pending", main=waiting(reason, "manifest unknown"))
    assert pods.stalled(found) == "it cannot be pulled, the image env:1: manifest unknown"
    assert pods.pulls_in_vain(found)
    assert not pods.hopeless(found)
    beside = pod("Pending", main=RUNNING, second=waiting(reason))
    assert pods.stalled(beside) == f"it cannot be pulled, the image task:2 (of the second container): {reason}"


def test_the_image_of_what_brings_the_agent_is_named() -> None:
    found = pod("Pending", porter=waiting("ErrImagePull", "no"), main=waiting("PodInitializing"))
    assert pods.stalled(found) == "it cannot be pulled, the image env:1 (of what brings the agent): no"


@pytest.mark.parametrize("reason", ["InvalidImageName", "ErrImageNeverPull", "ImageInspectError"])
def test_what_will_never_start(reason: str) -> None:
    found = pod("Pending", main=waiting(reason, "couldn't parse"))
    assert pods.hopeless(found)
    assert "env:1: couldn't parse" in pods.stalled(found)


@pytest.mark.parametrize("reason", ["CreateContainerConfigError", "CreateContainerError", "RunContainerError"])
def test_what_cannot_be_started(reason: str) -> None:
    found = pod("Pending", main=waiting(reason, "runAsNonRoot"))
    assert pods.stalled(found) == "it cannot be started, the image env:1: runAsNonRoot"


@pytest.mark.parametrize("state", [waiting("ContainerCreating"), waiting("PodInitializing"), RUNNING, {}])
def test_nothing_is_wrong(state: dict[str, Any]) -> None:
    assert pods.stalled(pod("Pending", main=state)) == ""


# What there is of it


@pytest.mark.parametrize(
    ("told", "is_empty"),
    [
        ({"main": RUNNING}, False),
        ({"main": ended(0)}, False),  # nobody asked it to end
        ({"going": True, "main": RUNNING}, False),
        ({"going": True, "main": ended(137)}, True),
        ({"going": True, "main": ended(137), "second": RUNNING}, False),
        ({"going": True, "main": ended(137), "second": ended(0)}, True),
        ({"going": True, "node": ""}, True),
        ({"going": True, "main": waiting("ContainerCreating")}, False),  # it may have begun since
        ({"going": True}, False),
        ({"going": True, "porter": ended(0), "main": waiting("PodInitializing")}, False),
    ],
)
def test_whether_nothing_runs_in_it(told: dict[str, Any], is_empty: bool) -> None:
    assert pod(**told).is_empty(0.0, began=False) is is_empty


@pytest.mark.parametrize(
    ("told", "is_empty"),
    [
        ({"main": waiting("ContainerCreating")}, False),  # nobody asked it to end
        ({"going": True, "main": waiting("ContainerCreating")}, True),
        ({"going": True, "main": waiting("ContainerCreating"), "second": RUNNING}, False),
    ],
)
def test_what_waits_after_it_began_is_gone(told: dict[str, Any], is_empty: bool) -> None:
    assert pod(**told).is_empty(0.0, began=True) is is_empty


@pytest.mark.parametrize(
    ("told", "began"),
    [
        ({}, False),
        ({"main": RUNNING}, True),
        ({"main": ended(0)}, True),
        ({"main": RUNNING, "second": waiting("ContainerCreating")}, False),
        ({"porter": ended(0), "main": waiting("PodInitializing")}, False),
    ],
)
def test_whether_all_of_it_began(told: dict[str, Any], began: bool) -> None:
    assert pod(**told).began is began


def test_since_when_it_runs() -> None:
    assert pod(main={"running": {"startedAt": "1970-01-01T00:01:00Z"}}).runs_since == 60.0
    assert [pod(**told).runs_since for told in ({}, {"main": {"running": {}}}, {"main": ended(0)})] == [0.0] * 3


def test_where_it_is() -> None:
    assert pod(podIP="10.1.2.3").url == "http://10.1.2.3:8081"
    assert pod(podIP="fd00::1").url == "http://[fd00::1]:8081"
    assert pod().url == ""


def test_whether_its_node_has_seen_that_it_is_well() -> None:
    assert pod(conditions=[{"type": "Ready", "status": "True"}]).ready
    assert not pod(conditions=[{"type": "Ready", "status": "False"}]).ready
    assert not pod().ready


@pytest.mark.parametrize(("written", "expected"), [("12.5", 12.5), ("soon", None), ("", None)])
def test_when_its_time_is_over(written: str, expected: float | None) -> None:
    assert pod(notes={EXPIRES: written}).expires_at == expected


@pytest.mark.parametrize("notes", [{}, {FACTS: "{"}, {FACTS: "[]"}, {FACTS: '{"id":"two","env":"e","created_at":1}'}])
def test_a_pod_that_is_none_of_ours(notes: dict[str, str]) -> None:
    assert pods.facts_of(pod(notes=notes)) is None


def test_what_was_written_down_is_found_again() -> None:
    known = Facts(id="one", env="e", created_at=1.0, ttl=5.0, labels={"a": "b"}, volumes=[("ann", "notes")])
    assert pods.facts_of(pod(notes={FACTS: json.dumps(_plain(known))})) == known


def _plain(known: Facts) -> Any:
    import msgspec

    return msgspec.to_builtins(known)
