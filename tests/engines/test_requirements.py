"""Reading a project's requirements: what this interpreter has, what can never be, and what has changed."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import packaging
import pytest

from aenv.engines.process import requirements
from aenv.errors import Invalid
from tests.engines import packages

AGE = 1_000_000_000


def write(root, text, name="requirements.txt"):
    file = root / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return root


def read(root, *, trusted=False):
    return requirements.read(root, trusted)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\n  # only a comment\n\n",
        "packaging",
        "Packaging >= 20, != 20.3  # with a comment",
        f"packaging=={packaging.__version__}",
        "packaging>=20 ; python_version >= '3'",
        "no-such-package ; python_version < '3'",
        "packag\\\ning>=20",
        "aenvironment>=0.1",
        "aenv",
        "aenvironment @ git+https://example.com/aenvironment.git",
        "./aenvironment-9.9-py3-none-any.whl",
        "packaging --hash=sha256:00",
        "--index-url https://example.com/simple\npackaging",
        "pytest\n-c bounds.txt",
        "\ufeffpackaging",
    ],
)
def test_what_the_interpreter_has_is_satisfied(tmp_path, text):
    write(tmp_path, "packaging>=20\nno-such-package==1\n", "bounds.txt")
    assert read(write(tmp_path, text)).satisfied


@pytest.mark.parametrize(
    "text",
    [
        "no-such-package",
        "packaging<1",
        "packaging==1.*",
        "packaging @ https://example.com/packaging-99.0-py3-none-any.whl",
        "https://example.com/packaging-99.0-py3-none-any.whl",
        "-r https://example.com/more.txt",
        "packaging\n-c bounds.txt",
    ],
)
def test_what_it_lacks_is_not(tmp_path, text):
    write(tmp_path, "packaging<1", "bounds.txt")
    found = read(write(tmp_path, text))
    assert not found.satisfied
    assert found.lines


@pytest.mark.skipif(find_spec("mcp") is None, reason="mcp is not installed")
def test_an_extra_of_ours_stands_for_its_packages(tmp_path):
    found = read(write(tmp_path, "aenvironment[mcp]\nno-such-package"))
    assert [line for line in found.lines if line.startswith("mcp")]
    assert not any("aenv" in line for line in found.lines)
    assert read(write(tmp_path / "b", "aenvironment[mcp]")).satisfied


@pytest.mark.skipif(find_spec("email_validator") is not None, reason="email-validator is installed")
def test_an_extra_counts(tmp_path):
    assert read(write(tmp_path / "a", "pydantic")).satisfied
    assert not read(write(tmp_path / "b", "pydantic[email]")).satisfied


def test_files_are_included_once_each_from_where_they_are(tmp_path):
    write(tmp_path, "-r sets/a.txt\n--requirement=sets/b.txt\nfirst-package")
    write(tmp_path, "a-package\n-rb.txt", "sets/a.txt")
    write(tmp_path, "b-package\n-r a.txt\n-c ../bounds.txt", "sets/b.txt")
    write(tmp_path, "c-package<2", "bounds.txt")
    found = read(tmp_path)
    assert found.lines == ("a-package", "b-package", "first-package")
    assert found.constraints == ("c-package<2",)
    assert found.number == 3


def test_local_files_get_their_full_address(tmp_path):
    vendor = tmp_path / "a folder"
    path = packages.wheel(vendor, "thing", "1.0")
    write(tmp_path, f"./a folder/{path.name}\n--find-links './a folder'\n-f /elsewhere")
    found = read(tmp_path)
    assert found.lines == (
        f"thing @ {path.as_uri()}",
        f"--find-links {vendor.as_uri()}",
        "--find-links /elsewhere",
    )
    write(tmp_path, f"thing[more] @ file:a%20folder/{path.name} ; python_version > '3'")
    assert read(tmp_path).lines == (f"thing[more] @ {path.as_uri()}",)


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("# first\n-r ../outside.txt", "requirements.txt:2: ../outside.txt is outside the project"),
        ("-r /etc/hostname", "requirements.txt:1: /etc/hostname is outside the project"),
        ("-c link.txt", "requirements.txt:1: link.txt is outside the project"),
        ("../thing-1.0-py3-none-any.whl", "requirements.txt:1: ../thing-1.0-py3-none-any.whl is outside the project"),
        ("-r missing.txt", "requirements.txt:1: missing.txt is not there"),
        ("./missing-1.0-py3-none-any.whl", "is not there"),
        ("packaging\npackaging = 20", "requirements.txt:2: packaging = 20 cannot be read"),
        ("--find-links 'open", "requirements.txt:1: --find-links 'open cannot be read"),
        ("--find-links", "requirements.txt:1: --find-links cannot be read"),
        ("pydantic==1.10.2", "requirements.txt:1: pydantic==1.10.2 cannot be, since a sandbox needs pydantic>="),
    ],
)
def test_what_can_never_be_installed_is_told_with_its_line(tmp_path, text, place):
    (tmp_path / "outside.txt").write_text("packaging\n")
    packages.wheel(tmp_path, "thing", "1.0")
    root = tmp_path / "project"
    root.mkdir()
    (root / "link.txt").symlink_to(tmp_path / "outside.txt")
    with pytest.raises(Invalid) as caught:
        read(write(root, text))
    assert place in str(caught.value)
    assert caught.value.hint


@pytest.mark.parametrize(
    "text",
    [
        "-e .",
        ".",
        "./package",
        "thing @ file:package",
        "package.tar.gz",
        "git+https://example.com/thing.git",
        "-e git+https://example.com/thing.git#egg=thing",
        "https://example.com/thing-1.0.tar.gz",
        "thing\n--no-binary thing",
        "--no-binary :all:",
        "--index-url https://example.com/${HOME}/simple",
    ],
)
def test_only_the_trusted_may_ask_for_what_runs_or_tells_something_here(tmp_path, text):
    (tmp_path / "package").mkdir()
    (tmp_path / "package.tar.gz").touch()
    write(tmp_path, text)
    with pytest.raises(Invalid) as caught:
        read(tmp_path)
    assert "requirements.txt:" in str(caught.value)
    assert caught.value.hint
    read(tmp_path, trusted=True)


def test_an_editable_source_is_installed_as_a_copy(tmp_path):
    (tmp_path / "package").mkdir()
    found = read(write(tmp_path, "-e ./package[extra]"), trusted=True)
    assert found.lines == (f"{tmp_path / 'package'}[extra]",)


def test_files_that_are_no_text_are_refused(tmp_path):
    (tmp_path / "requirements.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(Invalid, match="UTF-8"):
        read(tmp_path)
    (tmp_path / "requirements.txt").unlink()
    (tmp_path / "requirements.txt").mkdir()
    with pytest.raises(Invalid, match="not a list of requirements"):
        read(tmp_path)


def test_what_was_read_is_remembered_until_one_of_its_files_changes(tmp_path):
    write(tmp_path, "-r more.txt\n./vendor/thing-1.0-py3-none-any.whl\n--find-links vendor")
    more = write(tmp_path, "packaging", "more.txt") / "more.txt"
    vendor = tmp_path / "vendor"
    thing = packages.wheel(vendor, "thing", "1.0")
    files = [tmp_path / "requirements.txt", more, thing, vendor]
    for file in files:
        os.utime(file, (AGE, AGE))
    assert requirements.remembered(tmp_path, False) is None
    first = read(tmp_path)
    assert requirements.remembered(tmp_path, False) is first
    assert requirements.remembered(tmp_path, True) is None
    for number, file in enumerate(files, 1):
        os.utime(file, (AGE + number, AGE + number))
        assert requirements.remembered(tmp_path, False) is None, file
        assert read(tmp_path) == first


def test_the_content_says_what_is_in_local_files_and_not_where_they_are(tmp_path):
    roots = [tmp_path / name for name in "abc"]
    for root, body in zip(roots, ("one = 1", "one = 1", "two = 2"), strict=True):
        packages.wheel(root / "vendor", "thing", "1.0", {"more.py": body})
        for file in (root / "vendor").iterdir():  # an archive holds the time of its members
            file.write_bytes(body.encode())
        write(root, "./vendor/thing-1.0-py3-none-any.whl")
    same, again, other = (read(root).content for root in roots)
    assert same == again != other


def test_a_project_without_requirements_loads_no_parser(tmp_path):
    code = """
import asyncio, sys
from pathlib import Path
from aenv.engines.process.venvs import interpreter_for
for root in sys.argv[1:]:
    assert asyncio.run(interpreter_for(Path(root))).executable == sys.executable
assert "packaging" not in sys.modules
"""
    blank = write(tmp_path / "blank", "# nothing\n\n")
    without = tmp_path / "without"
    without.mkdir()
    subprocess.run([sys.executable, "-c", code, str(blank), str(without)], check=True)


def test_a_sandbox_is_spared_what_only_the_command_line_needs():
    names = {text.partition(">")[0] for text in requirements.of_runtime()}
    assert {"msgspec", "pydantic", "httptools"} <= names
    assert not {"click", "packaging"} & names
    assert not any("extra" in text for text in requirements.of_runtime())


def test_only_the_interpreters_own_directories_count(monkeypatch, tmp_path):
    info = tmp_path / "somewhere_else-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: somewhere-else\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert str(tmp_path) not in requirements.own_directories()
    assert any(Path(packaging.__file__).is_relative_to(entry) for entry in requirements.own_directories())
    assert not read(write(tmp_path / "project", "somewhere-else")).satisfied


def test_what_comes_alone_is_kept_apart(tmp_path):
    write(tmp_path, "--pre\nno-such-package", "requirements-no-deps.txt")
    found = read(tmp_path)
    assert not found.satisfied, "also without requirements.txt"
    assert (found.lines, found.alone, found.number) == ((), ("--pre", "no-such-package"), 1)
    beside = read(write(tmp_path, "no-such-package"))
    assert (beside.lines, beside.alone) == (("no-such-package",), ("--pre", "no-such-package"))
    assert beside.content != found.content
    assert requirements.remembered(tmp_path, False) is beside
    write(tmp_path, "packaging", "requirements-no-deps.txt")
    assert requirements.remembered(tmp_path, False) is None
    assert read(write(tmp_path, "packaging")).satisfied
    with pytest.raises(Invalid, match=r"requirements-no-deps\.txt:1: x== cannot be read"):
        read(write(tmp_path, "x==", "requirements-no-deps.txt"))
