import urllib.request

import custom_env
import pytest

from aenv import Context, ToolError


@pytest.fixture(autouse=True)
def app(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    custom_env.begin(Context())
    yield
    custom_env.end()


def shown(path=""):
    with urllib.request.urlopen(f"http://127.0.0.1:{custom_env.preview()['port']}/{path}") as answer:
        return answer.read().decode()


def test_what_is_written_is_served():
    custom_env.write_file("index.html", "<p>one</p>")
    assert shown() == "<p>one</p>"
    custom_env.write_file("index.html", "<p>two</p>")
    assert shown() == "<p>two</p>"


def test_the_reward_is_the_share_of_what_the_page_needs():
    assert custom_env.complete()["score"] == 0.0
    page = '<script src="js/a.js"></script><link href="./b.css"><a href="https://example.org/c">d</a><a href="#e">f</a>'
    custom_env.write_file("index.html", page)
    assert custom_env.complete() == {"score": pytest.approx(1 / 3), "missing": ["b.css", "js/a.js"]}
    custom_env.write_file("js/a.js", "")
    custom_env.run("touch b.css")
    assert custom_env.complete() == {"score": 1.0, "missing": []}


@pytest.mark.parametrize("path", ["../x", "/etc/passwd", "", "a\0b", ".", "link/x"])
def test_nothing_outside_is_touched(path, tmp_path):
    custom_env.run(f"ln -s {tmp_path} link")
    for tool in (custom_env.read_file, custom_env.delete_file, lambda path: custom_env.write_file(path, "x")):
        with pytest.raises(ToolError):
            tool(path)


def test_what_a_command_made_of_the_files_ends_neither_the_view_nor_the_score():
    custom_env.write_file("a.js", "1")
    custom_env.run("ln -s a.js b.js; ln -s /etc/passwd c.js; ln -s gone d.js; ln -s /etc/passwd index.html")
    assert custom_env.files() == {"a.js": "1", "b.js": "1"}
    assert custom_env.complete() == {"score": 0.0, "missing": ["index.html"]}


def test_bounds():
    with pytest.raises(ToolError, match="larger"):
        custom_env.write_file("a", "x" * 300_000)
    custom_env.run("for n in $(seq 100); do echo > $n; done")
    with pytest.raises(ToolError, match="the most"):
        custom_env.write_file("a", "x")
    custom_env.empty()
    assert custom_env.list_files() == []


def test_commands_end_and_their_output_is_bounded():
    assert custom_env.run("echo a >&2; exit 3") == {"exit_code": 3, "output": "a\n"}
    assert custom_env.run("sleep 600 & sleep 600", timeout=0.2)["exit_code"] != 0
    assert len(custom_env.run("yes")["output"]) == custom_env.MOST_PRINTED
