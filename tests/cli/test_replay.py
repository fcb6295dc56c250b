"""``aenv replay`` on episodes that were recorded a moment ago."""

import asyncio
import random

import msgspec
import pytest

from aenv.rl import Task, Writer, read, rollout
from aenv.rl.files import line_of
from aenv.rl.trajectory import Failed, Turn

EPISODES, AT_ONCE = 100, 16
COMMANDS = (
    "echo {word} >> notes.txt; cat notes.txt",
    "for i in $(seq {number}); do mkdir -p {word}/$i; done; find {word} | sort",
    "cd /tmp && pwd && export SEEN={number}",
    'echo "$SEEN in $PWD" | tee seen.txt | wc -c',
    "python3 -c 'print({number} ** 50)' || echo {number}",
    "cat missing-{word}",
    "printf %s {word} | sha256sum; false",
)


async def terminal(env, task):
    drawn = random.Random(env.sample_seed)
    for _ in range(drawn.randint(3, 6)):
        command = drawn.choice(COMMANDS).format(word=drawn.choice(["ada", "bob", "eve"]), number=drawn.randint(1, 9))
        await env.call_tool("execute_command", {"command": command})
    await env.call_tool("write_file", {"path": "done.txt", "content": str(drawn.random())})
    return text(await env.call_tool("read_file", {"path": "done.txt"}))


def text(result):
    return result.raise_for_error().text


async def record(path):
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(seed):
        task = Task(id=f"task-{seed}", reward={"checks": [{"kind": "file_exists", "path": "notes.txt"}]})
        async with gate:
            return await rollout("mini-terminal", terminal, task, seed)

    with Writer(path) as writer:
        for trajectory in await asyncio.gather(*(one(seed) for seed in range(EPISODES))):
            assert trajectory.ok, trajectory.outcome
            writer.write(trajectory)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A directory with a hundred episodes of a terminal, no two with the same commands."""
    folder = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name in ("AENV_SYSTEM_URL", "DUMMY_INSTANCE_IP"):
            patch.delenv(name, raising=False)
        asyncio.run(record(folder / "trajectories.jsonl"))
    return folder


def written(path, *trajectories):
    path.write_bytes(b"".join(map(line_of, trajectories)))
    return path


def corrupted(trajectory, step):
    """With one character of one result changed."""
    turns = msgspec.convert(msgspec.to_builtins(trajectory.turns), list[Turn])
    call = turns[step].calls[0]
    structured = {**call.result.structured, "stdout": call.result.structured["stdout"] + "!"}
    result = msgspec.structs.replace(call.result, structured=structured)
    turns[step].calls[0] = msgspec.structs.replace(call, result=result)
    return msgspec.structs.replace(trajectory, turns=turns)


def test_a_hundred_episodes_are_reproduced(aenv, run):
    recorded = list(read(run / "trajectories.jsonl"))
    assert len({str([call.arguments for call in trajectory.calls]) for trajectory in recorded}) == EPISODES
    assert {trajectory.reward for trajectory in recorded} == {0.0, 1.0}
    answer = aenv("replay", run, "-o", "json")
    assert answer.code == 0, answer.err
    assert {name: answer.data[name] for name in ("same", "differs", "failed", "left_out")} == {
        "same": EPISODES,
        "differs": 0,
        "failed": 0,
        "left_out": 0,
    }
    assert [one["id"] for one in answer.data["episodes"]] == [trajectory.id for trajectory in recorded]
    assert [one["steps"] for one in answer.data["episodes"]] == [len(trajectory.calls) for trajectory in recorded]


def test_a_corrupted_step_is_caught_at_that_step(aenv, run, here):
    first, second, third, *_ = read(run / "trajectories.jsonl")
    written(here / "file.jsonl", first, corrupted(second, 2), third)
    answer = aenv("replay", "file.jsonl", "-o", "json")
    assert answer.code == 1
    assert [one["verdict"] for one in answer.data["episodes"]] == ["same", "differs", "same"]
    difference = answer.data["episodes"][1]["difference"]
    assert (difference["step"], difference["turn"], difference["what"]) == (2, 2, "observation")
    assert difference["path"] == "structured.stdout"
    assert difference["expected"] == difference["found"] + "!"
    answer = aenv("replay", "file.jsonl", "--index", 1)
    assert answer.code == 1
    assert "differs  3      step 2, turn 2, observation execute_command at structured.stdout: expected" in answer.out
    assert "error: 1 did not come out the same" in answer.err
    assert "could not be replayed" not in answer.err


def test_who_is_chosen(aenv, run, here):
    first, second, third, *_ = read(run / "trajectories.jsonl")
    written(here / "trajectories.jsonl", first, second, third)
    answer = aenv("replay", ".", "--id", third.id, "--index", 0, "-o", "json")
    assert [one["id"] for one in answer.data["episodes"]] == [first.id, third.id]
    answer = aenv("replay", ".", "--id", "nobody")
    assert (answer.code, "no trajectory nobody" in answer.err) == (1, True)
    answer = aenv("replay", ".", "--index", 3)
    assert (answer.code, "no trajectory at 3" in answer.err) == (1, True)


def test_an_episode_that_cannot_be_replayed_is_told_from_one_that_differs(aenv, run, here):
    first, second, *_ = read(run / "trajectories.jsonl")
    gone = msgspec.structs.replace(second.provenance, env="mini-terminal@99.0.0")
    written(here / "file.jsonl", first, msgspec.structs.replace(second, provenance=gone))
    answer = aenv("replay", "file.jsonl")
    assert answer.code == 1
    assert "failed   0      not_found during create" in answer.out
    assert "error: 1 could not be replayed" in answer.err
    assert "did not come out the same" not in answer.err
    assert aenv("replay", "file.jsonl", "--env", "mini-terminal").code == 0


def test_episodes_that_never_began_are_left_out(aenv, run, here):
    first, second, *_ = read(run / "trajectories.jsonl")
    lost = Failed(kind="start_failed", phase="create", reason="no room")
    written(here / "file.jsonl", first, msgspec.structs.replace(second, outcome=lost, turns=[]))
    answer = aenv("replay", "file.jsonl", "-o", "json")
    assert (answer.code, answer.data["same"], answer.data["left_out"]) == (0, 1, 1)
    answer = aenv("replay", "file.jsonl", "--index", 1)
    assert (answer.code, "no episode to replay: 1 failed before" in answer.err) == (1, True)


def test_a_reward_that_is_not_wanted_is_not_taken(aenv, run, here):
    first, *_ = read(run / "trajectories.jsonl")
    components = {"reward": msgspec.structs.replace(first.outcome.components["reward"], details={"score": 0.5})}
    wrong = msgspec.structs.replace(first.outcome, score=0.5, components=components)
    written(here / "file.jsonl", msgspec.structs.replace(first, outcome=wrong))
    answer = aenv("replay", "file.jsonl")
    assert (answer.code, "reward reward at score: expected 0.5" in answer.out) == (1, True)
    assert aenv("replay", "file.jsonl", "--no-reward").code == 0


@pytest.mark.parametrize(
    ("content", "message"), [(None, "there is no file"), ("{}\n", "no schema"), ("", "no episode to replay")]
)
def test_what_is_no_file_of_episodes(aenv, here, content, message):
    if content is not None:
        (here / "file.jsonl").write_text(content)
    answer = aenv("replay", "file.jsonl")
    assert (answer.code, answer.out) == (1, "")
    assert message in answer.err
