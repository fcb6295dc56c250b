"""Every page of the documentation does what it says, and its links lead somewhere."""

import os
import re
import subprocess
import sys
from contextlib import ExitStack

import pytest

from aenv.cli import COMMANDS
from tests import daemons
from tests.daemons.stack import stack
from tests.deploy import site as sites
from tests.docs.doc_pages import PAGES, ROOT, RUN, Containers, Reader, blocks, environment
from tests.platform.support import new_home

MARKDOWN = [*PAGES, ROOT / "ARCHITECTURE.md", ROOT / "CHANGELOG.md", ROOT / "examples/01-hello/README.md"]
_LINK = re.compile(r"(?<!!)\[[^\]]+\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
_CODE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def name(page):
    return str(page.relative_to(ROOT))


def needs(page):
    return {block.comment for block in blocks(page)}


def grouped(page):
    """The page, with all others that need the cluster in the same process."""
    marks = [pytest.mark.xdist_group("kubernetes")] if "needs cluster" in needs(page) else []
    return pytest.param(page, id=name(page), marks=marks)


@pytest.mark.parametrize("page", [grouped(page) for page in PAGES])
def test_the_page_does_what_it_says(page, tmp_path, monkeypatch, request):
    folder = tmp_path / "reader"
    folder.mkdir()
    runnable = [block for block in blocks(page) if block.language in RUN]
    with ExitStack() as held, new_home() as home:
        containers, lacking = containers_for(needs(page), request, held)
        site, missing = site_for(needs(page), request, held)
        monkeypatch.chdir(folder)
        environment(monkeypatch, home)
        reader = Reader(page, monkeypatch, containers, site)
        assert reader.read() >= len(runnable) - reader.left
    if lacking or missing:
        pytest.skip(f"done, but for what needs containers or a cluster: {lacking or missing}")


def site_for(needs, request, held):
    """What a deployment of the page becomes, in whose network the page is then read; and why there is none."""
    if "needs cluster" not in needs:
        return None, ""
    try:
        cluster = request.getfixturevalue("breakable")
        images = sites.images(request.getfixturevalue("dockerd"), request.getfixturevalue("node_registry"))
    except pytest.skip.Exception as exc:
        return None, str(exc)
    held.enter_context(cluster.entered())
    return held.enter_context(sites.planned(cluster, images)), ""


def containers_for(needs, request, held):
    """The daemon that a page needs, with what it needs there; and why that is not all to be had."""
    found = None
    try:
        if needs & {"needs docker", "needs compose"}:
            address = request.getfixturevalue("dockerd")
            found = Containers(address, os.environ.get("AENV_TEST_BASE_IMAGE") or daemons.base_image(address))
        if "needs compose" in needs:
            found = found._replace(stack=held.enter_context(stack(address)))
    except pytest.skip.Exception as exc:  # what needs none is carried out all the same
        return found, str(exc)
    return found, ""


def anchors(page):
    text = _CODE.sub("", page.read_text(encoding="utf-8"))
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in _HEADING.findall(text)}


@pytest.mark.parametrize("page", MARKDOWN, ids=name)
def test_links_lead_somewhere(page):
    text = _CODE.sub("", page.read_text(encoding="utf-8"))
    for link in _LINK.findall(text):
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{name(page)} links to {link}, which is not there"
        if anchor:
            assert anchor in anchors(target), f"{name(page)} links to {link}; headings: {sorted(anchors(target))}"


def test_every_page_is_in_the_index():
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    linked = {(ROOT / "docs" / link).resolve() for link in _LINK.findall(index)}
    pages = {page for page in PAGES if page.is_relative_to(ROOT / "docs") and page.name != "README.md"}
    assert pages <= linked


def test_only_commands_that_exist_are_shown():
    for page in MARKDOWN:
        for command in re.findall(r"(?:^|`)aenv ([a-z][a-z-]*)", page.read_text(encoding="utf-8"), re.MULTILINE):
            assert command in COMMANDS, f"{name(page)} shows 'aenv {command}'"


def test_every_make_target_of_the_table_exists():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    shown = re.findall(r"^\| `make ([a-z-]+)` \|", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), re.MULTILINE)
    phony = re.search(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)
    assert phony is not None
    assert sorted(shown) == sorted(set(phony[1].split()) - {"help", "clean"})


def test_the_prose_is_plain():
    for page in MARKDOWN:
        text = page.read_text(encoding="utf-8")
        odd = sorted({character for character in text if ord(character) > 0x2FFF})
        assert not odd, f"{name(page)} has {odd}"


def test_the_example_runs(tmp_path, monkeypatch):
    environment(monkeypatch, tmp_path)
    found = subprocess.run(
        [sys.executable, "episode.py"],
        cwd=ROOT / "examples" / "01-hello",
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    assert found.stdout.splitlines()[-1] == "2 episodes, mean score 0.678"
    assert found.stdout.count("found True") == 2
    assert found.stdout.count("tool error: ValueError") == 1
    assert found.stderr == ""


def test_the_example_has_the_shape_of_a_new_project(tmp_path):
    from aenv.project import scaffold

    made = {path.relative_to(tmp_path / "hello") for path in scaffold("hello", tmp_path)}
    example = ROOT / "examples" / "01-hello"
    tracked = {
        path.relative_to(example)
        for path in example.rglob("*")
        if path.is_file() and not {"__pycache__", ".pytest_cache"} & set(path.parts)
    }
    assert {str(path) for path in tracked - made} == {"episode.py"}
    assert made <= tracked
    for same in ("Dockerfile", "requirements.txt", "test/conftest.py"):
        assert (example / same).read_text() == (tmp_path / "hello" / same).read_text()


def test_the_examples_own_tests_pass_against_a_live_sandbox(tmp_path, monkeypatch):
    environment(monkeypatch, tmp_path)
    found = subprocess.run(
        [sys.executable, "-c", "import sys; from aenv.cli import main; sys.exit(main(['test']))"],
        cwd=ROOT / "examples" / "01-hello",
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert found.returncode == 0, found.stdout + found.stderr
    assert "6 passed" in found.stdout
