"""What a cluster says of a pod, as far as it matters here, and in words. Pure.

Of these structs there may be many thousands for as long as their pods live, and none is part of a cycle: the garbage
collector need not look at them.
"""

from __future__ import annotations

import msgspec
from msgspec import Struct, field

from aenv.engines.kubernetes.access import moment
from aenv.engines.kubernetes.manifests import BESIDE, ENDED, EXPIRES, FACTS, MAIN, PORT, PORTER, STATE, Facts

_KILLED = 128 + 9
_SIGNALS = 128
_PULLS = frozenset(("ErrImagePull", "ImagePullBackOff", "RegistryUnavailable"))
_NEVER = frozenset(("InvalidImageName", "ErrImageNeverPull", "ImageInspectError"))
"""Why a container waits that will never start."""
_CONFIGURED = frozenset(("CreateContainerConfigError", "CreateContainerError", "RunContainerError"))
_TAKEN = ("Insufficient ", "Too many pods")
"""What a scheduler says of a node on which others have what is asked for."""
_BEGINNING = 8.0
"""Seconds after which a node has told of what it began in a pod that was to end."""
WHO = {MAIN: "it", BESIDE: "the second container", PORTER: "what brings the agent"}


class Meta(Struct, rename="camel", gc=False):
    name: str
    uid: str = ""
    resource_version: str = ""
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    deletion_timestamp: str | None = None


class Waiting(Struct, gc=False):
    reason: str = ""
    message: str = ""


class Terminated(Struct, rename="camel", gc=False):
    exit_code: int = 0
    signal: int = 0
    reason: str = ""
    message: str = ""
    finished_at: str | None = None


class ContainerState(Struct, gc=False):
    waiting: Waiting | None = None
    running: dict[str, object] | None = None
    terminated: Terminated | None = None


class ContainerStatus(Struct, gc=False):
    name: str
    state: ContainerState = field(default_factory=ContainerState)


class Condition(Struct, gc=False):
    type: str
    status: str = ""
    reason: str = ""
    message: str = ""


class PodStatus(Struct, rename="camel", gc=False):
    phase: str = "Pending"
    reason: str = ""
    message: str = ""
    pod_ip: str = msgspec.field(name="podIP", default="")
    container_statuses: list[ContainerStatus] = []
    init_container_statuses: list[ContainerStatus] = []
    conditions: list[Condition] = []


class Container(Struct, gc=False):
    name: str = ""
    image: str = ""


class PodSpec(Struct, rename="camel", gc=False):
    node_name: str = ""
    containers: list[Container] = []
    init_containers: list[Container] = []


class Pod(Struct, gc=False):
    """A pod, without what nobody here asks for."""

    metadata: Meta
    spec: PodSpec = field(default_factory=PodSpec)
    status: PodStatus = field(default_factory=PodStatus)

    @property
    def name(self) -> str:
        return self.metadata.name

    @property
    def url(self) -> str:
        ip = self.status.pod_ip
        return f"http://{f'[{ip}]' if ':' in ip else ip}:{PORT}" if ip else ""

    @property
    def state(self) -> str:
        return self.metadata.labels.get(STATE, "")

    @property
    def going(self) -> bool:
        """Whether it was asked to end."""
        return self.metadata.deletion_timestamp is not None

    @property
    def ready(self) -> bool:
        """Whether its node has seen that it is well."""
        return any(one.type == "Ready" and one.status == "True" for one in self.status.conditions)

    @property
    def runs(self) -> bool:
        """Whether its main container does."""
        found = self.container(MAIN)
        return bool(self.url) and found is not None and found.state.running is not None

    @property
    def runs_since(self) -> float:
        """When its main container began; 0 when nobody says."""
        found = self.container(MAIN)
        running = found.state.running if found is not None else None
        return moment(str((running or {}).get("startedAt", "")))

    @property
    def expires_at(self) -> float | None:
        try:
            return float(self.metadata.annotations[EXPIRES])
        except (KeyError, ValueError):
            return None

    @property
    def ended_because(self) -> str:
        """Why an engine ended it, where the cluster itself would say less."""
        return self.metadata.annotations.get(ENDED, "")

    def container(self, name: str) -> ContainerStatus | None:
        found = [*self.status.container_statuses, *self.status.init_container_statuses]
        return next((one for one in found if one.name == name), None)

    def end_of(self, name: str) -> Terminated | None:
        found = self.container(name)
        return found.state.terminated if found is not None else None

    @property
    def over(self) -> bool:
        """Whether the sandbox in it has ended, or one of its containers has, without which it is none."""
        if self.status.phase in ("Failed", "Succeeded"):
            return True
        return any(
            one.state.terminated is not None for one in self.status.container_statuses if one.name in (MAIN, BESIDE)
        )

    @property
    def began(self) -> bool:
        """Whether all its containers run, or have ended."""
        found = self.status.container_statuses
        return bool(found) and all(one.state.waiting is None for one in found)

    def is_empty(self, now: float, *, began: bool) -> bool:
        """Whether nothing runs in it, and nothing will: it was asked to end, and its containers have, or none began.
        ``began``: all of them had, so what waits now was removed already, which nodes tell like that."""
        if not self.going:
            return False
        found = [*self.status.container_statuses, *self.status.init_container_statuses]
        if not self.spec.node_name or any(one.state.running is not None for one in found):
            return not self.spec.node_name
        if began or any(one.state.terminated is not None for one in found if one.name != PORTER):
            return True
        return now > moment(self.metadata.deletion_timestamp or "") + _BEGINNING  # what waited may have begun since

    @property
    def over_since(self) -> float:
        """When it ended; 0 when nobody says."""
        ends = [one for one in map(self.end_of, (MAIN, BESIDE, PORTER)) if one is not None]
        return max((moment(one.finished_at or "") for one in ends), default=0.0)


class PodList(Struct, rename="camel"):
    class ListMeta(Struct, rename="camel"):
        resource_version: str = ""
        continue_: str = msgspec.field(name="continue", default="")

    metadata: ListMeta
    items: list[Pod] = []


decode = msgspec.json.Decoder(Pod).decode
decode_list = msgspec.json.Decoder(PodList).decode


def facts_of(pod: Pod) -> Facts | None:
    """What is known of a sandbox; None for a pod that is none of ours."""
    try:
        found = msgspec.json.decode(pod.metadata.annotations[FACTS], type=Facts)
    except (KeyError, msgspec.MsgspecError):
        return None
    return found if found.id == pod.name else None


def stalled(pod: Pod) -> str:
    """Why it does not run yet, where that is worth a word."""
    for condition in pod.status.conditions:
        if condition.type == "PodScheduled" and condition.status == "False":
            return f"no node has room for it: {condition.message or condition.reason}"
    for one in (*pod.status.init_container_statuses, *pod.status.container_statuses):
        waiting = one.state.waiting
        if waiting is not None and waiting.reason in _PULLS | _NEVER | _CONFIGURED:
            return f"{_words(waiting.reason)} {_image(pod, one.name)}: {waiting.message or waiting.reason}"
    return ""


def lacks_room(pod: Pod) -> bool:
    """Whether it waits for what others have: a node that would do, but is full."""
    return any(
        one.type == "PodScheduled" and one.status == "False" and any(word in one.message for word in _TAKEN)
        for one in pod.status.conditions
    )


def hopeless(pod: Pod) -> bool:
    """Whether waiting longer helps nobody."""
    waiting = [one.state.waiting for one in (*pod.status.init_container_statuses, *pod.status.container_statuses)]
    return any(one is not None and one.reason in _NEVER for one in waiting)


def pulls_in_vain(pod: Pod) -> bool:
    """Whether an image is not to be had, for now."""
    waiting = [one.state.waiting for one in (*pod.status.init_container_statuses, *pod.status.container_statuses)]
    return any(one is not None and one.reason in _PULLS for one in waiting)


def _words(reason: str) -> str:
    if reason in _PULLS:
        return "it cannot be pulled, the image"
    return "that is no image:" if reason == "InvalidImageName" else "it cannot be started, the image"


def _image(pod: Pod, name: str) -> str:
    containers = (*pod.spec.containers, *pod.spec.init_containers)
    found = next((one.image for one in containers if one.name == name), "that its pod does not name")
    return f"{found} (of {WHO.get(name, name)})" if name != MAIN else found


def ended(pod: Pod, known: Facts, words: str) -> tuple[bool, str]:
    """Whether a sandbox ended well, and why it did, in words for a person. ``words`` is what it printed last."""
    if pod.ended_because:
        return False, pod.ended_because
    printed = f"; it printed last:\n{words}" if words.strip() else ""
    status = pod.status
    if status.reason in ("Evicted", "Preempting", "NodeLost", "NodeShutdown", "Shutdown", "Terminated", "NodeAffinity"):
        return False, f"the cluster ended it ({status.reason}): {status.message or 'it does not say why'}"
    if status.reason == "DeadlineExceeded" and pod.end_of(MAIN) is None:
        return False, "it lived as long as this platform lets any instance live (AENV_LONGEST_LIFE)"
    for name, memory in zip((PORTER, BESIDE, MAIN), (0, known.memory[1], known.memory[0]), strict=True):
        end = pod.end_of(name)
        if end is None or (end.exit_code == 0 and not end.signal and (name == PORTER or _others_failed(pod, name))):
            continue
        return end.exit_code == 0 and not end.signal and name == MAIN, _told(end, name, memory) + printed
    return False, f"its pod is {status.phase.lower()}: {status.message or status.reason or 'nobody says why'}"


def _others_failed(pod: Pod, name: str) -> bool:
    return any(
        (end := pod.end_of(other)) is not None and other != name and end.exit_code != 0 for other in (MAIN, BESIDE)
    )


def _told(end: Terminated, name: str, memory: int) -> str:
    who, much = WHO[name], f"took more than the {memory / 1024**2:g} MiB it may have"
    if end.reason == "OOMKilled":
        return f"out of memory: {who} {much}"
    number = end.signal or (end.exit_code - _SIGNALS if end.exit_code > _SIGNALS else 0)
    if number == _KILLED - _SIGNALS:
        return f"signal 9 ended {who}: somebody's, or out of memory: it {much}"
    if number:
        return f"signal {number} ended {who}"
    said = f" ({end.message})" if end.message and end.reason not in ("Error", "Completed") else ""
    return f"{who} ended with exit code {end.exit_code}{said}"
