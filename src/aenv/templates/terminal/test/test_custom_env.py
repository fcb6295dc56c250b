import custom_env
import pytest

from aenv import Context


@pytest.fixture(autouse=True)
def working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_output_and_return_code():
    assert custom_env.execute_command("echo hello") == {"output": "hello\n", "returncode": 0}
    assert custom_env.execute_command("echo no >&2; exit 3") == {"output": "no\n", "returncode": 3}


def test_a_slow_command_is_ended():
    answer = custom_env.execute_command("echo begun; sleep 60", timeout=0.2)
    assert answer["returncode"] is None
    assert answer["output"].startswith("begun\n")
    assert "ended after 0.2 seconds" in answer["output"]


def test_a_background_process_does_not_hold_the_answer_back():
    assert custom_env.execute_command("sleep 2 & echo done", timeout=30)["output"] == "done\n"


def test_long_output_is_cut():
    answer = custom_env.execute_command("head -c 100000 /dev/zero | tr '\\0' x")
    assert answer["output"].endswith("more bytes]")


def test_reward_looks_at_the_file():
    assert custom_env.file_contains("a.txt", "hello", Context())["score"] == 0.0
    custom_env.execute_command("echo hello > a.txt")
    assert custom_env.file_contains("a.txt", "hello", Context())["score"] == 1.0
    assert custom_env.file_contains("a.txt", "goodbye", Context())["score"] == 0.0
