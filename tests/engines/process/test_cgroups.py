"""Control groups: the writer of version 1 against this kernel's, that of version 2 against a copy of how it behaves."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from aenv.engines.process import cgroups
from aenv.engines.process.cgroups import Limits
from aenv.engines.process.freezer import Freezer

GROUP = f"aenv-{os.getpid()}-x"
EVERYTHING = Limits(cpu=1.5, memory=64 * 1024**2, pids=20)


# Version 1, for real


@pytest.fixture
def tree(pen):
    try:
        found = cgroups.make(f"test-{os.getpid()}")
    except OSError as exc:
        pytest.skip(f"needs control groups: {exc}")
    if found.version != 1:
        found.remove()
        pytest.skip("this machine has version 2")
    yield found
    cgroups.remove_soon(found)


def value(tree, controller, leaf, file):
    return (tree.roots[controller] / leaf / file).read_text().strip()


def test_a_tree_is_below_our_own_groups(tree):
    own = cgroups._own()
    for controller, root in tree.roots.items():
        assert root.is_dir()
        assert root.name == f"aenv-{os.getpid()}-test-{os.getpid()}"
        assert str(root.parent).endswith(own[controller].rstrip("/"))
    with pytest.raises(FileExistsError):
        cgroups.make(f"test-{os.getpid()}")
    assert all(root.is_dir() for root in tree.roots.values()), "it removed what was another's"


def test_limits_are_written(tree):
    tree.add("i0", EVERYTHING)
    assert value(tree, "memory", "i0", "memory.limit_in_bytes") == str(64 * 1024**2)
    assert value(tree, "pids", "i0", "pids.max") == "20"
    assert value(tree, "cpu", "i0", "cpu.cfs_period_us") == "100000"
    assert value(tree, "cpu", "i0", "cpu.cfs_quota_us") == "150000"


def test_without_limits_nothing_is_limited(tree):
    tree.add("i0", Limits())
    assert value(tree, "pids", "i0", "pids.max") == "max"
    assert value(tree, "cpu", "i0", "cpu.cfs_quota_us") == "-1"
    assert int(value(tree, "memory", "i0", "memory.limit_in_bytes")) > 2**60


def test_who_is_killed_may_run_to_its_end(tree):
    tree.add("i0", Limits(cpu=0.01))
    tree.let_run("i0")
    assert value(tree, "cpu", "i0", "cpu.cfs_quota_us") == "-1"
    tree.let_run("nobody")


def test_the_smallest_share_of_a_processor_is_one_the_kernel_takes(tree):
    tree.add("i0", Limits(cpu=0.00001))
    assert value(tree, "cpu", "i0", "cpu.cfs_quota_us") == "1000"


def test_a_limit_that_the_kernel_refuses_names_the_file(tree):
    with pytest.raises(OSError, match="pids.max does not take '-5'"):
        tree.add("i0", Limits(pids=-5))


def test_a_process_moves_itself_and_is_found(tree):
    tree.add("i0", EVERYTHING)
    opened = tree.open("i0")
    joining = f"import os, time\nfor fd in {opened}:\n    os.write(fd, b'0')\nprint('in', flush=True)\ntime.sleep(600)"
    process = subprocess.Popen(["python3", "-IS", "-c", joining], pass_fds=opened, stdout=subprocess.PIPE, text=True)
    for descriptor in opened:
        os.close(descriptor)
    try:
        assert process.stdout.readline() == "in\n"
        assert tree.processes("i0") == tree.processes() == {process.pid}
        assert tree.processes("i1") == set()
        rows = {
            controller: row.split(":", 2)[2]
            for row in Path(f"/proc/{process.pid}/cgroup").read_text().splitlines()
            for controller in row.split(":", 2)[1].split(",")
        }
        assert {name: rows[name] for name in tree.roots} == tree.paths("i0")
        assert tree.remove("i0") is False
        assert tree.remove() is False
        assert all((root / "i0").is_dir() for root in tree.roots.values())
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
    assert cgroups.remove_soon(tree, "i0") is True
    assert not any((root / "i0").exists() for root in tree.roots.values())
    assert tree.remove("i0") is True


def test_a_leaf_that_is_not_there_cannot_be_opened_and_leaks_nothing(tree):
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(FileNotFoundError):
        tree.open("nobody")
    assert len(os.listdir("/proc/self/fd")) == before


def test_want_of_memory_is_known_afterwards(tree):
    tree.add("i0", Limits(memory=16 * 1024**2))
    assert tree.out_of_memory("i0") is False
    assert tree.out_of_memory("nobody") is False
    (opened,) = [os.open(tree.roots["memory"] / "i0" / "tasks", os.O_WRONLY)]
    eating = f"import os\nos.write({opened}, b'0')\nb'x' * (256 * 1024**2)"
    process = subprocess.Popen(["python3", "-IS", "-c", eating], pass_fds=[opened])
    os.close(opened)
    assert process.wait() == -signal.SIGKILL
    assert tree.out_of_memory("i0") is True


def test_a_tree_is_found_again_from_what_was_written_down(tree):
    tree.add("i0", Limits())
    found = cgroups.found({name: str(root) for name, root in tree.roots.items()})
    assert isinstance(found, cgroups.Version1)
    assert found.roots == tree.roots
    assert found.remove() is True
    assert not any(root.exists() for root in tree.roots.values())
    assert found.processes() == set()


def test_strays_are_those_that_are_empty_and_whose_maker_is_gone(pen, tree):
    script = "from aenv.engines.process import cgroups; print(*cgroups.make('stray').roots.values())"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    left = set(map(Path, done.stdout.split()))
    process = subprocess.Popen(["sleep", "600"])
    try:
        others = [root.with_name(f"{cgroups.PREFIX}others") for root in left]
        for other in others:
            other.mkdir()
        try:
            assert left <= set(cgroups.strays())  # others may have left some on this machine
            assert not set(others) & set(cgroups.strays())
        finally:
            for other in others:
                other.rmdir()
        for root in left:
            (root / "cgroup.procs").write_text(str(process.pid))
        assert not left & set(cgroups.strays())
    finally:
        process.kill()
        process.wait()
        for root in left:
            cgroups.remove(root)
    assert all(root.is_dir() for root in tree.roots.values())
    assert not any(root.exists() for root in left)


# Version 2, against a copy


class Kernel:
    """A directory in which making and removing directories does what the kernel does in version 2."""

    def __init__(self, root, monkeypatch, controllers="cpuset cpu io memory pids"):
        self.root = root
        self._mkdir, self._rmdir = os.mkdir, os.rmdir
        monkeypatch.setattr(os, "mkdir", self.mkdir)
        monkeypatch.setattr(os, "rmdir", self.rmdir)
        self.populate(root, controllers)

    def populate(self, path, controllers):
        files = {"cgroup.procs": "", "cgroup.subtree_control": "", "cgroup.controllers": controllers}
        if "memory" in controllers:
            files |= dict.fromkeys(("memory.max", "memory.swap.max", "memory.oom.group"), "max\n")
            files["memory.events"] = "low 0\nhigh 0\nmax 0\noom 0\noom_kill 0\noom_group_kill 0\n"
        if "pids" in controllers:
            files["pids.max"] = "max\n"
        if "cpu" in controllers.split():
            files["cpu.max"] = "max 100000\n"
        for name, text in files.items():
            Path(path, name).write_text(text)

    def mkdir(self, path, *arguments, **options):
        self._mkdir(path, *arguments, **options)
        if self.root in Path(path).parents:
            parent = Path(path).parent
            on = [word.lstrip("+") for word in (parent / "cgroup.subtree_control").read_text().split()]
            self.populate(path, " ".join(on))

    def rmdir(self, path, *arguments, **options):
        if self.root in Path(path).parents:
            if Path(path, "cgroup.procs").read_text() or any(child.is_dir() for child in Path(path).iterdir()):
                raise OSError(errno.EBUSY, "Device or resource busy")
            for file in Path(path).iterdir():
                file.unlink()
        self._rmdir(path, *arguments, **options)


@pytest.fixture
def hierarchy(tmp_path, monkeypatch):
    """Where the only hierarchy is mounted, and we are in ``/user/me`` of it."""
    mounted = tmp_path / "cgroup"
    (mounted / "user" / "me").mkdir(parents=True)
    monkeypatch.setattr(cgroups, "_mounts", lambda: {"": mounted})
    monkeypatch.setattr(cgroups, "_own", lambda: {"": "/user/me"})
    return mounted / "user" / "me"


def test_version_2_switches_controllers_on_level_by_level(hierarchy, monkeypatch):
    Kernel(hierarchy, monkeypatch)
    tree = cgroups.make("x")
    assert isinstance(tree, cgroups.Version2)
    assert tree.roots == {"": hierarchy / GROUP}
    for directory in (hierarchy, hierarchy / GROUP):
        assert (directory / "cgroup.subtree_control").read_text().split() == ["+cpu", "+memory", "+pids"]
    assert cgroups.found({"": str(hierarchy / GROUP)}).version == 2


def test_version_2_leaves_on_what_is_on(hierarchy, monkeypatch):
    Kernel(hierarchy, monkeypatch)
    (hierarchy / "cgroup.subtree_control").write_text("cpu memory pids io")
    cgroups._switch_on(hierarchy)
    assert (hierarchy / "cgroup.subtree_control").read_text() == "cpu memory pids io"
    (hierarchy / "cgroup.subtree_control").write_text("cpu")
    cgroups._switch_on(hierarchy)
    assert (hierarchy / "cgroup.subtree_control").read_text() == "+memory +pids"


def test_version_2_writes_limits(hierarchy, monkeypatch):
    Kernel(hierarchy, monkeypatch)
    tree = cgroups.make("x")
    tree.add("i0", EVERYTHING)
    leaf = hierarchy / GROUP / "i0"
    written = {name: (leaf / name).read_text() for name in ("cpu.max", "memory.max", "memory.swap.max", "pids.max")}
    assert written == {
        "cpu.max": "150000 100000",
        "memory.max": str(64 * 1024**2),
        "memory.swap.max": "0",
        "pids.max": "20",
    }
    assert (leaf / "memory.oom.group").read_text() == "1"
    tree.add("i1", Limits())
    assert (hierarchy / GROUP / "i1" / "memory.max").read_text() == "max\n"
    assert tree.paths("i0") == {"": f"/user/me/{GROUP}/i0"}


def test_version_2_knows_processes_and_want_of_memory(hierarchy, monkeypatch):
    Kernel(hierarchy, monkeypatch)
    tree = cgroups.make("x")
    tree.add("i0", EVERYTHING)
    leaf = hierarchy / GROUP / "i0"
    opened = tree.open("i0")
    assert [os.readlink(f"/proc/self/fd/{descriptor}") for descriptor in opened] == [str(leaf / "cgroup.procs")]
    for descriptor in opened:
        os.write(descriptor, b"4242\n")
        os.close(descriptor)
    assert tree.processes() == {4242}
    assert tree.remove("i0") is False
    assert tree.out_of_memory("i0") is False
    (leaf / "memory.events").write_text("oom 1\noom_kill 1\n")
    assert tree.out_of_memory("i0") is True
    (leaf / "cgroup.procs").write_text("")
    assert tree.remove() is True
    assert not (hierarchy / GROUP).exists()


def test_version_2_is_asked_for_what_files_have_in_memory(hierarchy, monkeypatch):
    Kernel(hierarchy, monkeypatch)
    tree = cgroups.make("x")
    tree.add("i0", EVERYTHING)
    leaf = hierarchy / GROUP / "i0"
    tree.reclaim("i0")
    assert not (leaf / "memory.reclaim").exists()
    (leaf / "memory.stat").write_text("anon 5000\nfile 9000\nshmem 2000\ninactive_file 3000\nactive_file 4000\n")
    (leaf / "memory.reclaim").touch()
    tree.reclaim("i0")
    assert (leaf / "memory.reclaim").read_text() == "7000"


def test_version_2_holds_a_cell_where_its_limits_are(hierarchy, monkeypatch):
    Kernel(hierarchy, monkeypatch)
    tree = cgroups.make("x")
    with pytest.raises(OSError, match=r"Linux 5\.2"):
        Freezer.make(tree)
    for directory in (hierarchy / GROUP, hierarchy / GROUP / "i0"):
        directory.mkdir(exist_ok=True)
        (directory / "cgroup.freeze").write_text("0")
    freezer = Freezer.make(tree)
    assert freezer.roots == {}
    assert freezer.gather("i0") is True
    freezer.hold("i0")
    assert (hierarchy / GROUP / "i0" / "cgroup.freeze").read_text() == "1"
    freezer.let_go("i0")
    assert (hierarchy / GROUP / "i0" / "cgroup.freeze").read_text() == "0"
    freezer.let_go("nobody")
    freezer.remove("i0")
    freezer.close()
    assert (hierarchy / GROUP / "i0").is_dir(), "it is the tree's to remove"


@pytest.mark.parametrize("controllers", ["", "cpu memory", "cpuset io hugetlb"])
def test_version_2_without_controllers_is_refused(hierarchy, monkeypatch, controllers):
    Kernel(hierarchy, monkeypatch, controllers)
    with pytest.raises(OSError, match="has no controller") as caught:
        cgroups.make("x")
    for name in {"cpu", "memory", "pids"} - set(controllers.split()):
        assert name in str(caught.value)
    assert not (hierarchy / GROUP).exists()


def test_version_2_that_may_not_be_delegated_is_refused_and_leaves_nothing(hierarchy, monkeypatch):
    """A group that holds processes cannot have groups with limits below it."""
    Kernel(hierarchy, monkeypatch)
    put = cgroups._put

    def busy(file, text):
        if file == hierarchy / GROUP / "cgroup.subtree_control":
            raise OSError(errno.EBUSY, f"{file} does not take {text!r}: Device or resource busy")
        put(file, text)

    monkeypatch.setattr(cgroups, "_put", busy)
    with pytest.raises(OSError, match="busy"):
        cgroups.make("x")
    assert not (hierarchy / GROUP).exists()


@pytest.fixture
def crowded(hierarchy, monkeypatch):
    """The group above ours, which takes what ours refuses because we are in it."""
    above = hierarchy.parent
    kernel = Kernel(above.parent, monkeypatch)
    for directory in (above, hierarchy):
        kernel.populate(directory, "cpu memory pids")
    put = cgroups._put

    def busy(file, text):
        if file == hierarchy / "cgroup.subtree_control":
            raise OSError(errno.EBUSY, f"{file} does not take {text!r}: Device or resource busy")
        put(file, text)

    monkeypatch.setattr(cgroups, "_put", busy)
    return above


def test_version_2_goes_up_from_a_group_that_holds_processes(crowded):
    tree = cgroups.make("x")
    assert tree.roots == {"": crowded / GROUP}
    tree.add("i0", EVERYTHING)
    assert (crowded / GROUP / "i0" / "pids.max").read_text() == "20"
    assert tree.paths("i0") == {"": f"/user/{GROUP}/i0"}


def test_version_2_strays_are_found_where_they_were_made(crowded):
    left = crowded / f"aenv-{2**22 + 1}-x"
    left.mkdir()
    assert cgroups.strays() == [left]
    cgroups.remove(left)
    assert not left.exists()


def test_no_control_groups_at_all(monkeypatch):
    monkeypatch.setattr(cgroups, "_mounts", dict)
    with pytest.raises(OSError, match="no control groups are mounted"):
        cgroups.make("x")


def test_this_kernels_own_version_2_is_told_apart(monkeypatch):
    mounts = cgroups._mounts()
    if "" not in mounts:
        pytest.skip("this machine has no version 2")
    if {"memory", "pids", "cpu"} <= set((mounts[""] / "cgroup.controllers").read_text().split()):
        pytest.skip("its version 2 has the controllers")
    monkeypatch.setattr(cgroups, "_mounts", lambda: {"": mounts[""]})
    with pytest.raises(OSError, match=f"{mounts['']}.* has no controller"):
        cgroups.make("x")
