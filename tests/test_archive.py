"""A project as an archive: what is packed, what is unpacked, and what is refused."""

from __future__ import annotations

import gzip
import io
import json
import os
import random
import stat
import tarfile
import tempfile
import tracemalloc
import zlib
from collections.abc import Iterable, Iterator
from itertools import chain, repeat
from pathlib import Path
from typing import Any, BinaryIO

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from aenv import project
from aenv.errors import AEnvError, Conflict, Invalid, InvalidConfig, TooLarge
from aenv.project import archive

MINIMAL = {"name": "demo", "version": "1.2.3", "buildConfig": {}, "deployConfig": {}}
CONFIG = json.dumps(MINIMAL).encode()


@pytest.fixture
def root(tmp_path):
    folder = tmp_path / "demo"
    folder.mkdir()
    return folder


def put(root, config):
    (root / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    return root


# Packing


def names_in(package):
    with tarfile.open(fileobj=io.BytesIO(package)) as archive:
        return archive.getnames()


def test_the_same_files_give_the_same_bytes(tmp_path):
    packages = []
    for number, parent in enumerate((tmp_path / "one", tmp_path / "two")):
        project.scaffold("a", parent)
        for file in (parent / "a").rglob("*"):
            os.utime(file, (number, number))
        (parent / "a" / "README.md").chmod(0o600 if number else 0o644)
        packages.append(project.pack(project.read(parent / "a")))
    assert packages[0] == packages[1]
    assert project.digest(packages[0]).startswith("sha256:")
    assert len(project.digest(packages[0])) == 71
    with tarfile.open(fileobj=io.BytesIO(packages[0])) as archive:
        members = archive.getmembers()
    assert [member.name for member in members] == sorted(member.name for member in members)
    assert {(member.mtime, member.uid, member.gid, member.uname) for member in members} == {(0, 0, 0, "")}


def test_private_files_caches_and_ignored_ones_are_left_out(root):
    put(root, MINIMAL)
    (root / ".aenvignore").write_text("# mine\n\n*.log\n!keep.log\ndata/\n/top.txt\ndocs/*.md\n")
    kept = ["a.py", "keep.log", "sub/top.txt", "sub/datafile", "docs/a.txt", "deep/docs/b.md", "data.txt"]
    left = [
        *(
            ".env",
            ".env.local",
            "sub/.env",
            "src/prod.env",
            ".ssh/id_ed25519",
            "keys/id_rsa",
            "home/.aws/credentials",
            ".netrc",
            ".git/config",
            ".venv/bin/python",
            "src/__pycache__/a.pyc",
            "a.pyc",
        ),
        *("x.log", "sub/x.log", "data/x", "sub/data/y", "top.txt", "docs/a.md", ".pytest_cache/x"),
    ]
    for name in kept + left:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    assert sorted(names_in(project.pack(project.read(root)))) == sorted([*kept, ".aenvignore", "config.json"])


def test_links_stay_inside(root, tmp_path):
    put(root, MINIMAL)
    (root / "sub").mkdir()
    (root / "sub" / "link").symlink_to(root / "config.json")
    (root / "folder").symlink_to(root / "sub", target_is_directory=True)
    package = project.pack(project.read(root))
    with tarfile.open(fileobj=io.BytesIO(package)) as archive:
        links = {member.name: member.linkname for member in archive.getmembers() if member.issym()}
    assert links == {"sub/link": "../config.json", "folder": "sub"}
    (tmp_path / "secret").write_text("x")
    (root / "out").symlink_to(tmp_path / "secret")
    with pytest.raises(Invalid, match="the link out leaves the project"):
        project.pack(project.read(root))
    (root / ".aenvignore").write_text("out\n")
    assert "out" not in names_in(project.pack(project.read(root)))
    (root / "nowhere").symlink_to("missing")
    with pytest.raises(Invalid, match="points to nothing"):
        project.pack(project.read(root))


def test_a_pipe_is_refused(root):
    os.mkfifo(put(root, MINIMAL) / "pipe")
    with pytest.raises(Invalid, match="pipe is neither a file nor a link"):
        project.pack(project.read(root))


def test_a_project_that_is_too_large_says_what_is_large(root):
    put(root, MINIMAL)
    (root / "weights.bin").write_bytes(b"x" * 3_000_000)
    with pytest.raises(TooLarge, match=r"2\.9 MiB of files; 1\.0 MiB is the most") as caught:
        project.pack(project.read(root), limit=1024 * 1024)
    assert "weights.bin (2.9 MiB)" in caught.value.hint


def test_an_executable_stays_one(root):
    put(root, MINIMAL)
    (root / "go.sh").write_text("#!/bin/sh\n")
    (root / "go.sh").chmod(0o700)
    package = project.pack(project.read(root))
    with tarfile.open(fileobj=io.BytesIO(gzip.decompress(package))) as archive:
        assert {member.name: member.mode for member in archive.getmembers()} == {
            "config.json": 0o644,
            "go.sh": 0o755,
        }


def test_what_could_not_be_unpacked_is_not_packed(root):
    put(root, MINIMAL)

    def refused(match, error=Invalid, **options):
        with pytest.raises(error, match=match):
            project.pack(project.read(root), **options)

    (root / "a.txt").write_text("")
    (root / "A.txt").write_text("")
    refused("the entry 'a.txt' and 'A.txt' are one path")
    (root / "A.txt").rename(root / "line\nbreak")
    refused(r"the entry 'line\\nbreak' has a control character")
    (root / "line\nbreak").unlink()
    odd = os.fsencode(root) + b"/\xff"
    with open(odd, "w"):
        refused(r"the entry '\\udcff' is not UTF-8")
    os.unlink(odd)
    (root / ".env").write_text("SECRET=1")
    (root / "link").symlink_to(".env")
    refused("the link 'link' points to nothing in the archive: '.env'")
    (root / "link").unlink()
    (root / "link").symlink_to("link")
    refused("the link link points to nothing")
    (root / "link").unlink()
    refused("the entry 'config.json' is one too many; 1 is the most", TooLarge, most_files=1)
    (root / ".aenvignore").write_text("config.json\n")
    refused(r"the archive would have no config\.json")


def test_a_config_that_is_too_large_is_not_packed(root):
    put(root, {**MINIMAL, "description": "x" * archive.MAX_CONFIG})
    with pytest.raises(TooLarge, match=r"config\.json has 1\.0 MiB"):
        project.pack(project.read(root))


# Unpacking


def entry(name: str, content: bytes = b"", *, type: bytes = tarfile.REGTYPE, **fields: Any) -> bytes:
    """One entry as a tar has it. PAX headers are written where they are given or needed."""
    info = tarfile.TarInfo(name)
    info.type = type
    info.size = len(content)
    for field, value in fields.items():
        setattr(info, field, value)
    return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape") + content + bytes(-len(content) % 512)


def raw(name: bytes, content: bytes = b"", type: bytes = b"0") -> bytes:
    """One entry with a name that is written as it is."""
    block = bytearray(entry("x" * len(name), content, type=type)[:512])
    block[: len(name)] = name
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block) + content + bytes(-len(content) % 512)


def link(name: str, target: str) -> bytes:
    return entry(name, type=tarfile.SYMTYPE, linkname=target)


def folder(name: str, **fields: Any) -> bytes:
    return entry(name, type=tarfile.DIRTYPE, **fields)


def pax(records: bytes, **fields: Any) -> bytes:
    return entry("pax", records, type=tarfile.XHDTYPE, **fields)


CONFIG_ENTRY = entry("config.json", CONFIG)
END = bytes(1024)


def zipped(*entries: bytes) -> bytes:
    return gzip.compress(b"".join(entries) + END, mtime=0)


def snapshot(folder: Path) -> dict[str, Any]:
    """Every path below a folder: a link's target, a file's mode and content, a directory's mode."""
    found: dict[str, Any] = {}
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink():
            found[name] = os.readlink(path)
        else:
            found[name] = (stat.S_IMODE(path.stat().st_mode), path.read_bytes() if path.is_file() else None)
    return found


def refused(data: bytes | BinaryIO, place: Path, error: type[AEnvError] = Invalid, **options: Any) -> str:
    """Why an archive is refused. Nothing is left of it."""
    before = snapshot(place)
    with pytest.raises(error) as caught:
        archive.unpack(data, place / "new", **options)
    assert snapshot(place) == before
    assert type(caught.value) is error
    return caught.value.message


def test_what_was_packed_is_unpacked(root, tmp_path):
    put(root, MINIMAL)
    (root / "src" / "deep").mkdir(parents=True)
    (root / "src" / "deep" / "tööl.py").write_text("x = 1\n")
    (root / "src" / ("long" * 40)).write_bytes(bytes(range(256)) * 1000)
    (root / "go.sh").write_text("#!/bin/sh\n")
    (root / "go.sh").chmod(0o700)
    (root / "here").symlink_to("src/deep")
    (root / "src" / "top").symlink_to("..")
    (root / "src" / "deep" / "chain").symlink_to("../../here/tööl.py")
    package = project.pack(project.read(root))
    old = os.umask(0o077)
    try:
        archive.unpack(package, tmp_path / "new")
    finally:
        os.umask(old)
    found = snapshot(tmp_path / "new")
    assert found.keys() == snapshot(root).keys()
    assert found["src"] == found["src/deep"] == (0o755, None)
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o755
    assert found["go.sh"] == (0o755, b"#!/bin/sh\n")
    assert found["src/deep/tööl.py"] == (0o644, b"x = 1\n")
    assert (found["here"], found["src/top"], found["src/deep/chain"]) == ("src/deep", "..", "tööl.py")
    assert project.pack(project.read(tmp_path / "new")) == package
    assert sorted(os.listdir(tmp_path)) == ["demo", "new"]


def test_a_stream_is_as_good_as_bytes(tmp_path):
    class Dripping(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            return super().read(min(size or 0, 7))

    archive.unpack(Dripping(zipped(CONFIG_ENTRY, entry("a", b"x" * 100_000))), tmp_path / "new")
    assert (tmp_path / "new" / "a").read_bytes() == b"x" * 100_000


def test_what_another_tar_writes_is_unpacked(tmp_path):
    times = {"mtime": "1.5", "path": "kept/" + "x" * 200, "SCHILY.xattr.user.a": "b", "comment": "c"}
    archive.unpack(
        zipped(
            entry("late/file", b"1"),
            folder("late/", mode=0o700),
            folder("empty", mode=0o2777, uname="somebody", uid=1000),
            entry("x", b"2", pax_headers=times),
            raw(b"old", b"3", b"\0"),
            CONFIG_ENTRY,
        ),
        tmp_path / "new",
    )
    found = snapshot(tmp_path / "new")
    assert found["late"] == found["empty"] == (0o755, None)
    assert found["kept/" + "x" * 200] == (0o644, b"2")
    assert (found["late/file"], found["old"]) == ((0o644, b"1"), (0o644, b"3"))


@pytest.mark.parametrize(
    ("mode", "kept"), [(0o4755, 0o755), (0o2644, 0o644), (0o1777, 0o755), (0o000, 0o644), (0o077, 0o644)]
)
def test_a_file_has_one_of_two_modes(tmp_path, mode, kept):
    archive.unpack(zipped(CONFIG_ENTRY, entry("a", mode=mode)), tmp_path / "new")
    assert stat.S_IMODE((tmp_path / "new" / "a").stat().st_mode) == kept


PATHS = [
    ("/etc/passwd", "is an absolute path"),
    ("//a", "is an absolute path"),
    ("C:/a", "is an absolute path"),
    ("c:a", "is an absolute path"),
    ("..", "leaves the project"),
    ("../a", "leaves the project"),
    ("a/../../b", "leaves the project"),
    ("a/..", "leaves the project"),
    ("a\\b", "has a backslash"),
    ("..\\a", "has a backslash"),
    ("a\nb", "has a control character"),
    ("\x1b[2J", "has a control character"),
    ("a\x7f", "has a control character"),
    ("a\x85", "has a control character"),
    (".", "is not written plainly"),
    ("./a", "is not written plainly"),
    ("a//b", "is not written plainly"),
    ("a/./b", "is not written plainly"),
    ("a/", "is not written plainly"),
    ("\udcff", "is not UTF-8"),
    ("a/\udcc3", "is not UTF-8"),
    ("x" * 256, "has a name that is too long"),
    ("é" * 128, "has a name that is too long"),
    ("/".join(["x" * 204] * 6), "has a name that is too long"),
    ("/".join("x" * 65), "has a name that is too long"),
]


@pytest.mark.parametrize(("path", "reason"), PATHS, ids=[ascii(path)[:20] for path, _ in PATHS])
def test_a_path_that_is_refused(tmp_path, path, reason):
    written = raw(path.encode(errors="surrogateescape")) if len(path) < 100 else entry(path)
    message = refused(zipped(CONFIG_ENTRY, written), tmp_path)
    assert message.startswith(f"the entry {path[:100]!r}"[:-1])
    assert reason in message


def test_a_path_in_pax_records_is_checked_as_well(tmp_path):
    for record, reason in ((b"12 path=a\0b\n", "control"), (b"12 path=../\n", "leaves"), (b"11 path=\xff\n", "UTF-8")):
        record = b"%d %s" % (len(record.partition(b" ")[2]) + 3, record.partition(b" ")[2])
        assert reason in refused(zipped(CONFIG_ENTRY, pax(record), entry("a")), tmp_path)


def test_the_longest_names_are_taken(tmp_path):
    deep = "/".join(["d"] * 63 + ["x" * 255])
    archive.unpack(zipped(CONFIG_ENTRY, entry(deep, b"1")), tmp_path / "new")
    assert (tmp_path / "new" / deep).read_bytes() == b"1"


@pytest.mark.parametrize(
    ("entries", "reason"),
    [
        ([entry("a"), entry("a")], "the entry 'a' is there twice"),
        ([folder("a"), folder("a/")], "the entry 'a' is there twice"),
        ([entry("a/b"), entry("a")], "the entry 'a' is there twice"),
        ([entry("a/b"), link("a", ".")], "the entry 'a' is there twice"),
        ([entry("a"), folder("a")], "the entry 'a' is there twice"),
        ([CONFIG_ENTRY], "the entry 'config.json' is there twice"),
        ([entry("a"), entry("A")], "the entry 'A' and 'a' are one path on some file systems"),
        ([entry("d/a"), entry("D/b")], "the entry 'D/b' and 'd' are one path"),
        ([entry("d/a"), link("D", ".")], "the entry 'D' and 'd' are one path"),
        ([entry("d/e/a"), entry("d/E")], "the entry 'd/E' and 'd/e' are one path"),
        ([entry("\u00e9"), entry("e\u0301")], "are one path"),
        ([entry("\u00c9"), entry("e\u0301")], "are one path"),
        ([entry("stra\u00dfe"), entry("STRASSE")], "are one path"),
        ([entry("a"), entry("a/b")], "the entry 'a/b' is below a file"),
        ([link("a", "."), entry("a/b")], "the entry 'a/b' is below a link"),
        ([link("a", "/tmp"), entry("a/b")], "the entry 'a/b' is below a link"),
        ([link("a", "."), folder("a/b/c")], "the entry 'a/b/c' is below a link"),
    ],
)
def test_a_place_that_is_taken(tmp_path, entries, reason):
    assert reason in refused(zipped(CONFIG_ENTRY, *entries), tmp_path)


@pytest.mark.parametrize(
    ("name", "target", "reason"),
    [
        ("a", "/etc/passwd", "is absolute"),
        ("a", "..", "leaves the project"),
        ("a", "../new/config.json", "leaves the project"),
        ("d/a", "../../etc", "leaves the project"),
        ("a", "d/../../etc", "leaves the project"),
        ("a", "d/../config.json", "is not written plainly"),
        ("a", "./config.json", "is not written plainly"),
        ("a", "config.json/", "is not written plainly"),
        ("a", "", "is not written plainly"),
        ("a", "nothing", "points to nothing"),
        ("a", "Config.json", "points to nothing"),
        ("a", "config.json/b", "points to nothing"),
        ("a", "\u00ff", "points to nothing"),
        ("a", "a", "leads to another link"),
        ("a", "b", "leads to another link"),
        ("a", "b/f", "leads to another link"),
        ("a", "x" * 1025, "has a target that is too long"),
    ],
)
def test_a_link_that_is_refused(tmp_path, name, target, reason):
    message = refused(zipped(CONFIG_ENTRY, link(name, target), entry("d/f"), link("b", "d")), tmp_path)
    assert message.startswith(f"the link {name!r} {reason}")


def test_links_through_links_do_not_climb_out(tmp_path):
    """By its text alone, z stays inside; by way of the other link it would not."""
    climbing = [entry("d/e/x"), link("d/e/up", "../.."), link("z", "d/e/up/..")]
    assert "the link 'z'" in refused(zipped(CONFIG_ENTRY, *climbing), tmp_path)


def test_a_link_may_lead_to_what_comes_later(tmp_path):
    archive.unpack(zipped(link("d/a", "../config.json"), link("b", "."), CONFIG_ENTRY), tmp_path / "new")
    assert (tmp_path / "new" / "d" / "a").read_bytes() == CONFIG
    assert stat.S_IMODE((tmp_path / "new" / "d").stat().st_mode) == 0o755


@pytest.mark.parametrize(
    ("written", "reason"),
    [
        (entry("a", type=tarfile.LNKTYPE, linkname="config.json"), "the entry 'a' is a hard link"),
        (entry("a", type=tarfile.CHRTYPE), "the entry 'a' is a device"),
        (entry("a", type=tarfile.BLKTYPE), "the entry 'a' is a device"),
        (entry("a", type=tarfile.FIFOTYPE), "the entry 'a' is a pipe"),
        (entry("a", type=tarfile.GNUTYPE_SPARSE), "the entry 'a' is a sparse file"),
        (entry("a", pax_headers={"GNU.sparse.major": "1"}), "the entry 'a' is a sparse file"),
        (entry("a", pax_headers={"size": "5"}), "the entry 'a' has a second size in its PAX header"),
        (entry("a", pax_headers={"hdrcharset": "BINARY"}), "the entry 'a' is not UTF-8"),
        (entry("a", type=tarfile.CONTTYPE), "of a kind that no project has (b'7')"),
        (entry("a", b"x", type=tarfile.GNUTYPE_LONGNAME), "of a kind that no project has (b'L')"),
        (entry("a", b"x", type=tarfile.XGLTYPE), "of a kind that no project has (b'g')"),
        (entry("a", type=b"V"), "of a kind that no project has (b'V')"),
        (entry("a", b"x", type=tarfile.DIRTYPE), "the entry 'a' cannot have 1 bytes"),
        (entry("a", b"x", type=tarfile.SYMTYPE, linkname="."), "the entry 'a' cannot have 1 bytes"),
        (pax(b"9 path=b\n") + pax(b"9 path=c\n"), "the entry 'b' is of a kind that no project has (b'x')"),
    ],
)
def test_a_kind_that_is_refused(tmp_path, written, reason):
    assert reason in refused(zipped(CONFIG_ENTRY, written, entry("b")), tmp_path)


def test_a_size_below_nothing(tmp_path):
    block = bytearray(entry("a"))
    block[124:136] = b"\xff" * 11 + b"\0"
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    assert "the entry 'a' cannot have -256 bytes" in refused(zipped(CONFIG_ENTRY, bytes(block)), tmp_path)


@pytest.mark.parametrize(
    "records",
    [b"path=a\n", b"99 path=a\n", b"9 path=a", b"11 path=a\n", b"0 path=a\n", b"9" * 5000, b"5 a=\n\n", b"\0" * 512],
    ids=lambda records: ascii(records)[:16],
)
def test_pax_records_that_are_damaged(tmp_path, records):
    message = refused(zipped(CONFIG_ENTRY, pax(records), entry("a")), tmp_path)
    assert message == "the PAX header after 'config.json' is damaged"


def test_pax_records_that_belong_to_nothing(tmp_path):
    assert "something follows" in refused(zipped(CONFIG_ENTRY, pax(b"9 path=a\n")), tmp_path)


# Limits


class Endless(io.RawIOBase):
    """A gzip stream without an end, and how much of it was asked for."""

    def __init__(self, pieces: Iterable[bytes], header: bytes = b"\x1f\x8b\x08\0\0\0\0\0\0\xff") -> None:
        self._pieces = chain([header], pieces)
        self._held = b""
        self.taken = 0

    def read(self, size: int = -1) -> bytes:
        while len(self._held) < size:
            self._held += next(self._pieces)
        found, self._held = self._held[:size], self._held[size:]
        self.taken += size
        return found


def deflated(pieces: Iterable[bytes]) -> Iterator[bytes]:
    packer = zlib.compressobj(wbits=-15)
    for piece in pieces:
        yield packer.compress(piece) + packer.flush(zlib.Z_SYNC_FLUSH)


HUGE = entry("bomb", size=8 * 1024**3 - 1)
ENTRIES = [entry(f"d{number}/" * 20 + "f") for number in range(50)]
NOISE = random.Random(0).randbytes(1 << 16)
BOMBS = {
    "a file": ([CONFIG_ENTRY, HUGE], bytes(1 << 20), "with the entry 'bomb', the files have"),
    "files": ([CONFIG_ENTRY, *ENTRIES], bytes(1 << 20), "is one too many; 50 is the most"),
    "a PAX header": ([pax(b"", size=10**9)], bytes(1 << 20), "has 1000000000 bytes"),
    "noise": ([HUGE], NOISE, "with the entry 'bomb', the files have"),
}


@pytest.mark.parametrize("name", BOMBS)
def test_an_endless_archive_stops_early_in_little_memory(tmp_path, name):
    start, piece, reason = BOMBS[name]
    source = Endless(deflated(chain(start, repeat(piece))))
    tracemalloc.start()
    try:
        message = refused(source, tmp_path, TooLarge, limit=1 << 20, most_files=50)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert reason in message
    assert source.taken < 3 << 20
    assert peak < 8 << 20


@pytest.mark.parametrize(("flags", "piece"), [(b"\0", b"\0\0\0\xff\xff"), (b"\x08", b"x")], ids=["blocks", "name"])
def test_an_endless_stream_that_holds_nothing_stops_early(tmp_path, flags, piece):
    source = Endless(repeat(piece * 1000), b"\x1f\x8b\x08" + flags + b"\0\0\0\0\0\xff")
    message = refused(source, tmp_path, TooLarge, limit=1 << 20, most_files=50)
    assert message == "the archive is larger than all that it may hold"
    assert source.taken < 3 << 20


def test_an_end_without_an_end_stops_early(tmp_path):
    source = Endless(deflated(chain([CONFIG_ENTRY], repeat(bytes(1 << 16)))))
    assert refused(source, tmp_path) == "something follows the end of the archive"
    assert source.taken < 1 << 20


def test_many_names_cost_bounded_memory(tmp_path):
    """As many links as there may be, with the longest targets and names."""
    folders = ("x" * 250 + "/") * 3
    names = (link(f"{folders}{n:04}" + "\U0001f600" * 60, "x" * 1020 + "\U0001f600") for n in range(2000))
    data = zipped(CONFIG_ENTRY, *names)
    tracemalloc.start()
    try:
        refused(io.BytesIO(data), tmp_path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2000 * 6 * 1024


def test_limits_are_met_exactly(tmp_path):
    data = zipped(CONFIG_ENTRY, entry("d/a", b"x" * 1000), link("b", "d/a"))
    archive.unpack(data, tmp_path / "new", limit=len(CONFIG) + 1000, most_files=4)
    (tmp_path / "other").mkdir()
    message = refused(data, tmp_path / "other", TooLarge, limit=len(CONFIG) + 999, most_files=4)
    assert message == "with the entry 'd/a', the files have more than 0.0 MiB"
    message = refused(data, tmp_path / "other", TooLarge, most_files=3)
    assert message == "the entry 'b' is one too many; 3 is the most"


# Damage


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "truncated"),
        (b"PK\x03\x04", "not gzip, or damaged"),
        (b"".join([CONFIG_ENTRY, END]), "not gzip, or damaged"),
        (gzip.compress(b"", mtime=0), "truncated"),
        (gzip.compress(b"x" * 2000, mtime=0), "the archive is damaged after its start"),
        (gzip.compress(CONFIG_ENTRY, mtime=0), "truncated"),
        (gzip.compress(CONFIG_ENTRY + bytes(512), mtime=0), "truncated"),
        (gzip.compress(CONFIG_ENTRY + entry("a", size=5), mtime=0), "truncated"),
        (zipped(CONFIG_ENTRY, b"x" * 512), "the archive is damaged after 'config.json': "),
        (zipped(CONFIG_ENTRY) + b"x", "something follows"),
        (zipped(CONFIG_ENTRY) + bytes(10), "something follows"),
        (zipped(CONFIG_ENTRY) + zipped(entry("a")), "something follows"),
        (zipped(CONFIG_ENTRY) + bytes(100_000), "something follows"),
        (zipped(CONFIG_ENTRY, END, entry("a")), "something follows"),
        (zipped(CONFIG_ENTRY, bytes(512), entry("a")), "something follows"),
        (zipped(CONFIG_ENTRY, bytes(1 << 17)), "something follows"),
        (zipped(CONFIG_ENTRY)[:-8] + bytes(8), "not gzip, or damaged"),
    ],
    ids=range(17),
)
def test_damage_is_seen(tmp_path, data, reason):
    assert reason in refused(data, tmp_path)


def test_every_cut_is_seen(tmp_path):
    data = zipped(CONFIG_ENTRY, entry("a", b"abc" * 100), link("b", "a"))
    for end in range(len(data)):
        assert refused(data[:end], tmp_path) == "the archive is truncated"


WHOLE = zipped(CONFIG_ENTRY, entry("d/a", random.Random(1).randbytes(600), mode=0o755), link("b", "d/a"))


@given(st.integers(0, len(WHOLE) - 1), st.integers(1, 255))
def test_a_changed_byte_is_seen_or_changes_nothing(place: int, change: int) -> None:
    data = bytearray(WHOLE)
    data[place] ^= change
    with tempfile.TemporaryDirectory() as made:
        archive.unpack(WHOLE, Path(made, "whole"))
        try:
            archive.unpack(bytes(data), Path(made, "new"))
        except Invalid:
            assert os.listdir(made) == ["whole"]
        else:
            assert snapshot(Path(made, "new")) == snapshot(Path(made, "whole"))


@given(st.data())
def test_a_changed_tar_is_refused_or_stays_inside(data: st.DataObject) -> None:
    tar = bytearray(gzip.decompress(WHOLE))
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(tar) - 1))
        tar[place] = data.draw(st.sampled_from(b"\0/.x70125\xff"))
    for start in data.draw(st.lists(st.sampled_from(range(0, len(tar) - 512, 512)), unique=True)):
        tar[start + 148 : start + 156] = b" " * 8
        tar[start + 148 : start + 156] = b"%06o\0 " % sum(tar[start : start + 512])
    with tempfile.TemporaryDirectory() as made:
        try:
            archive.unpack(gzip.compress(bytes(tar), 1), Path(made, "new"))
        except Invalid:
            assert os.listdir(made) == []
        else:
            inside(Path(made, "new"))


# Content


def test_an_archive_without_a_config(tmp_path):
    for written in (b"", entry("a"), entry("sub/config.json", CONFIG), entry("Config.json", CONFIG)):
        assert refused(zipped(written), tmp_path) == "the archive has no config.json"
    assert refused(zipped(folder("config.json")), tmp_path) == "the archive has no config.json"
    assert refused(zipped(link("config.json", ".")), tmp_path) == "the archive has no config.json"


def test_a_config_that_does_not_read(tmp_path, monkeypatch):
    for place in (tmp_path, Path("/")):
        monkeypatch.chdir(place)
        message = refused(zipped(entry("config.json", b'{"name": "-",\n"version": "1"}')), tmp_path, InvalidConfig)
        assert [line.split(" ")[:2] for line in message.splitlines()] == [
            ["config.json:1:", "name"],
            ["config.json:2:", "version"],
        ]
        assert refused(zipped(entry("config.json", b"{")), tmp_path, InvalidConfig).startswith("config.json:1:")
        assert refused(zipped(entry("config.json", b"\xff")), tmp_path, InvalidConfig).startswith("config.json is not")


def test_a_config_that_is_too_large(tmp_path):
    large = entry("c", b" " * (archive.MAX_CONFIG + 1))
    assert "config.json has 1.0 MiB" in refused(zipped(large, link("config.json", "c")), tmp_path, TooLarge)


# The place


@pytest.mark.parametrize("make", [Path.mkdir, Path.touch, lambda path: path.symlink_to("nowhere")])
def test_a_place_that_is_there_is_left_alone(tmp_path, make):
    make(tmp_path / "new")
    assert refused(zipped(CONFIG_ENTRY), tmp_path, Conflict) == f"{tmp_path / 'new'} is there already"


def test_a_place_that_somebody_else_takes_meanwhile(tmp_path):
    class Racing(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            (tmp_path / "new").mkdir(exist_ok=True)
            (tmp_path / "new" / "theirs").touch()
            return super().read(size)

    with pytest.raises(Conflict, match="is there already"):
        archive.unpack(Racing(zipped(CONFIG_ENTRY)), tmp_path / "new")
    assert snapshot(tmp_path).keys() == {"new", "new/theirs"}


def test_a_place_that_cannot_be_written(tmp_path):
    with pytest.raises(AEnvError, match="missing/new cannot be written: No such file or directory"):
        archive.unpack(zipped(CONFIG_ENTRY), tmp_path / "missing" / "new")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), KeyboardInterrupt()])
def test_a_source_that_fails_leaves_nothing(tmp_path, error):
    class Failing(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            if self.tell():
                raise error
            return super().read(10)

    with pytest.raises((AEnvError, KeyboardInterrupt)) as caught:
        archive.unpack(Failing(WHOLE), tmp_path / "new")
    if isinstance(error, OSError):
        assert str(caught.value) == "the archive cannot be read: Input/output error"
    assert os.listdir(tmp_path) == []


# Whatever comes


def inside(made: Path) -> None:
    """Nothing in a directory leads out of it, and nothing has rights that it should not have."""
    for path in made.rglob("*"):
        assert path.resolve(strict=True).is_relative_to(made.resolve())
        if not path.is_symlink():
            assert path.is_file() or path.is_dir()
            assert stat.S_IMODE(path.stat().st_mode) in ((0o755,) if path.is_dir() else (0o644, 0o755))
            assert path.stat().st_nlink == 1 or path.is_dir()


PARTS = st.sampled_from(["a", "b", "c", "A", "d", "..", ".", "", "config.json"])
NASTY = st.lists(PARTS, min_size=1, max_size=4).map("/".join)
PLAIN = st.lists(st.sampled_from("abcd"), min_size=1, max_size=3).map("/".join)
HOSTILE = st.one_of(
    st.builds(entry, PLAIN, st.binary(max_size=5)),
    st.builds(link, PLAIN, NASTY),
    st.builds(folder, PLAIN, mode=st.integers(0, 0o7777)),
    st.builds(entry, NASTY, mode=st.integers(0, 0o7777)),
)


@settings(max_examples=300)
@given(st.lists(HOSTILE, max_size=5))
@example([entry("d/a"), link("b", "d"), link("c/a", "../d/a")])
def test_a_hostile_archive_is_refused_or_stays_inside(entries: list[bytes]) -> None:
    with tempfile.TemporaryDirectory() as made:
        Path(made, "outside").write_text("secret")
        try:
            archive.unpack(zipped(CONFIG_ENTRY, *entries), Path(made, "new"))
        except Invalid:
            assert os.listdir(made) == ["outside"]
        else:
            assert sorted(os.listdir(made)) == ["new", "outside"]
            inside(Path(made, "new"))
        assert Path(made, "outside").read_text() == "secret"


NAMES = st.text("abc .-é漢😀", min_size=1, max_size=40).filter(lambda name: name not in (".", ".."))
"""No two of them are one on any file system, and none is left out of an archive."""
FILES = st.tuples(st.binary(max_size=1000), st.booleans())
TREES = st.dictionaries(
    NAMES, st.recursive(FILES, lambda below: st.dictionaries(NAMES, below, min_size=1, max_size=3), max_leaves=8)
)


def written(root: Path, tree: dict[str, Any]) -> Iterator[Path]:
    for name, value in tree.items():
        path = root / name
        if isinstance(value, dict):
            path.mkdir()
            path.chmod(0o755)
            yield from written(path, value)
        else:
            path.write_bytes(value[0])
            path.chmod(0o755 if value[1] else 0o644)
        yield path


@given(TREES, st.data())
def test_what_is_unpacked_is_what_was_packed(tree: dict[str, Any], data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as made:
        before, after = Path(made, "before"), Path(made, "after")
        before.mkdir()
        (put(before, MINIMAL) / "config.json").chmod(0o644)
        paths = [before / "config.json", *written(before, tree)]
        for number in range(data.draw(st.integers(0, 3))):
            place, target = data.draw(st.sampled_from(paths)), data.draw(st.sampled_from([before, *paths]))
            (place.parent / f"link{number}").symlink_to(os.path.relpath(target, place.parent))
        package = project.pack(project.read(before))
        archive.unpack(package, after)
        assert snapshot(after) == snapshot(before)
        assert project.pack(project.read(after)) == package


def test_an_ignore_file_that_lists_itself_changes_nothing(root, tmp_path):
    put(root, MINIMAL)
    (root / ".aenvignore").write_text(".aenvignore\n!.env\n*.log\n")
    (root / ".env").write_text("A=1")
    (root / "a.log").write_text("")
    package = project.pack(project.read(root))
    assert names_in(package) == [".aenvignore", ".env", "config.json"]
    archive.unpack(package, tmp_path / "new")
    assert project.pack(project.read(tmp_path / "new")) == package
