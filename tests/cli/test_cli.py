"""What holds for every command."""

import subprocess
import sys
from pathlib import Path

import click
import pytest

from aenv.cli import COMMANDS, cli, output
from aenv.errors import AEnvError, InvalidConfig, NotFound

ROOT = Path(__file__).parent.parent.parent


def every_command(command=cli, path=()):
    yield path, command
    if isinstance(command, click.Group):
        ctx = click.Context(command)
        for name in command.list_commands(ctx):
            yield from every_command(command.get_command(ctx, name), (*path, name))


ALL = list(every_command())


def test_help_loads_nothing_heavy():
    code = (
        "import sys; from aenv.cli import main; code = main(['--help'])\n"
        "heavy = {'rich', 'msgspec', 'asyncio', 'pydantic', 'uvicorn', 'aenv.config', 'aenv.project'}\n"
        "sys.exit(code or ', '.join(heavy & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert all(name in done.stdout for name in COMMANDS)


def test_the_console_script_and_its_version():
    script = Path(sys.executable).parent / "aenv"
    done = subprocess.run([script, "--version"], capture_output=True, text=True)
    assert done.stdout.startswith("aenv ")


@pytest.mark.parametrize(("path", "command"), ALL, ids=[" ".join(path) or "aenv" for path, _ in ALL])
def test_help_has_an_example_and_every_leaf_takes_output(aenv, path, command):
    answer = aenv(*path, "--help")
    assert (answer.code, answer.err) == (0, "")
    assert "Example" in answer.out
    assert f"aenv {' '.join(path)}".strip() in answer.out.split("Example")[1]
    if not isinstance(command, click.Group) and path != ("instance", "shell"):  # which prints what a shell does
        assert "-o, --output [table|json" in answer.out


def test_the_summary_of_a_command_is_the_first_line_of_its_help():
    helps = {path[0]: command.help.splitlines()[0] for path, command in ALL if len(path) == 1}
    assert helps == {name: summary for name, (_, summary) in COMMANDS.items()}


def test_the_reference_is_up_to_date():
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "cli_reference.py", "--check"], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["rnu"], "did you mean 'aenv run'?"),
        (["config", "shw"], "did you mean 'aenv config show'?"),
        (["frobnicate"], "run 'aenv --help'"),
        (["version", "extra"], "run 'aenv version --help'"),
        (["init"], "run 'aenv init --help'"),
        (["run", "--port", "99999"], "run 'aenv run --help'"),
        (["run", "some-project"], "run 'aenv run --help'"),
        (["version", "-o", "xml"], "run 'aenv version --help'"),
    ],
)
def test_wrong_usage(aenv, arguments, hint):
    answer = aenv(*arguments)
    assert (answer.code, answer.out) == (2, "")
    assert answer.err.startswith("error: ")
    assert f"hint: {hint}\n" in answer.err


@pytest.mark.parametrize("arguments", [[], ["config"]])
def test_no_command_shows_the_help(aenv, arguments):
    answer = aenv(*arguments)
    assert (answer.code, answer.out) == (2, "")
    assert answer.err.startswith("Usage: aenv")


@pytest.fixture
def failing(monkeypatch):
    """Makes ``aenv version`` raise."""

    def install(exc):
        def fail():
            raise exc

        monkeypatch.setattr("platform.python_version", fail)

    return install


@pytest.mark.parametrize(
    ("exc", "code", "err"),
    [
        (NotFound("it is gone", hint="look elsewhere"), 1, "error: it is gone\nhint: look elsewhere\n"),
        (InvalidConfig("a:1: wrong\na:2: wrong too"), 3, "error: a:1: wrong\n  a:2: wrong too\n"),
        (AEnvError(""), 1, "error: \n"),
        (
            FileNotFoundError(2, "No such file", "x"),
            1,
            "error: x: No such file\n",
        ),
        (ValueError("odd"), 1, "error: unexpected ValueError: odd\nhint: run it again as 'aenv --debug ...'"),
        (KeyboardInterrupt(), 130, "error: interrupted\n"),
    ],
)
def test_failures_have_an_exit_code_and_no_traceback(aenv, failing, exc, code, err):
    failing(exc)
    answer = aenv("version")
    assert (answer.code, answer.out) == (code, "")
    assert answer.err.lstrip().startswith(err)
    assert "Traceback" not in answer.err


@pytest.mark.parametrize("how", ["option", "variable"])
def test_debug_shows_the_traceback(aenv, failing, monkeypatch, how):
    failing(ValueError("odd"))
    if how == "variable":
        monkeypatch.setenv("AENV_DEBUG", "1")
    answer = aenv(*(["--debug"] if how == "option" else []), "version")
    assert answer.code == 1
    assert "Traceback (most recent call last)" in answer.err
    monkeypatch.setenv("AENV_DEBUG", "0")
    assert "Traceback" not in aenv("version").err


def test_a_closed_pipe_is_no_crash():
    done = subprocess.run(
        f"{sys.executable} -c 'from aenv.cli import main; main()' --help | head -c 1",
        shell=True,
        capture_output=True,
    )
    assert b"Traceback" not in done.stderr


def test_tables_align_and_cells_go_on_below(capsys):
    output.show_table(["a", "status", "b"], [["x", "ok", "one\ntwo"], ["long", "fail", ""]])
    assert capsys.readouterr().out == (
        "A     STATUS  B\n"
        "x     ok      one\n"
        "              two\n"
        "long  fail\n"
    )  # fmt: skip


class Terminal:
    """A stdout that says it is a terminal."""

    def __init__(self):
        self.text = ""

    def isatty(self):
        return True

    def write(self, text):
        self.text += text

    def flush(self):
        pass


@pytest.mark.parametrize(("no_color", "coloured"), [(None, True), ("", True), ("1", False)])
def test_no_color_is_honoured(monkeypatch, no_color, coloured):
    monkeypatch.setattr("sys.stdout", terminal := Terminal())
    monkeypatch.delenv("NO_COLOR", raising=False)
    if no_color is not None:
        monkeypatch.setenv("NO_COLOR", no_color)
    output.show_table(["status"], [["ok"]])
    assert ("\x1b[" in terminal.text) is coloured


def test_a_full_disk_is_told_with_the_file_and_loses_nothing(tmp_path):
    """A limit on the size of files fails a write half-way, as a full disk does."""
    import resource
    import subprocess
    import sys

    def full() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))

    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "README.md").write_text("my own words")
    command = [
        sys.executable,
        "-c",
        "import sys; from aenv.cli import main; sys.exit(main())",
        "init",
        "mine",
        "--force",
    ]
    ended = subprocess.run(command, cwd=tmp_path, preexec_fn=full, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert "cannot be written: File too large" in ended.stderr
    assert (tmp_path / "mine" / "README.md").read_text() == "my own words"
    assert [path.name for path in (tmp_path / "mine").iterdir() if path.name.endswith(".tmp")] == []
