"""What the author says is what is given, and the generators go on from where they were."""

from __future__ import annotations

import pytest

from aenv import Environment
from aenv.errors import AEnvError, AuthorError, Invalid, StartFailed, Unsupported
from tests.engines.process.lab import eventually
from tests.rl.bench import Bench
from tests.runtime.saving.support import PAIR, load, put, run, saved, told, written

pytestmark = pytest.mark.asyncio(loop_scope="module")

KINDS = {
    "nothing": ("", "save() -> None:\n    return None", "load() -> None:\n    state['seen'] = 'loaded'", "loaded"),
    "none, untyped": ("", "save():\n    pass", "load(found) -> None:\n    state['seen'] = found", None),
    "not taken": ("", "save() -> int:\n    return 3", "load(ctx: Context) -> None:\n    state['seen'] = 1", 1),
    "dict": ("", "save() -> dict:\n    return {'a': [1, None]}", "load(found: dict):\n    state['seen'] = found",
             {"a": [1, None]}),
    "dict, untyped": ("", "save():\n    return {'a': {'b': 0.1}}", "load(found):\n    state['seen'] = found",
                      {"a": {"b": 0.1}}),
    "list": ("", "save() -> list[int]:\n    return [1, 2]", "load(found: list[int]):\n    state['seen'] = found",
             [1, 2]),
    "text": ("", "save() -> str:\n    return '\\u20ac'", "load(found: str):\n    state['seen'] = found", "\u20ac"),
    "bytes": ("", "save() -> bytes:\n    return b'\\xff\\0'", "load(found: bytes):\n    state['seen'] = found",
              b"\xff\0"),
    "no bytes": ("", "save() -> bytes:\n    return b''", "load(found: bytes):\n    state['seen'] = found", b""),
    "a bytearray": ("", "save():\n    return bytearray(b'x')", "load(found):\n    state['seen'] = found", b"x"),
    "a picture's bytes": ("", "save():\n    return b'\\x89PNG\\r\\n\\x1a\\n'",
                          "load(found):\n    state['seen'] = found", b"\x89PNG\r\n\x1a\n"),
    "dataclass": ("@dataclass\nclass Place:\n    x: int\n    way: list[str]",
                  "save() -> Place:\n    return Place(1, ['a'])",
                  "load(found: Place):\n    state['seen'] = [type(found).__name__, found.x, found.way]",
                  ["Place", 1, ["a"]]),
    "pydantic": ("from pydantic import BaseModel\nclass Place(BaseModel):\n    x: int = 0\n    at: tuple[int, int]",
                 "save() -> Place:\n    return Place(at=(1, 2))",
                 "load(ctx: Context, found: Place):\n    state['seen'] = [type(found).__name__, found.x, found.at]",
                 ["Place", 0, (1, 2)]),
    "context": ("", "save(ctx: Context) -> str:\n    return ctx.env_version",
                "load(found: str, ctx: Context):\n    state['seen'] = [found, ctx.env_version]", ["1.0.0"] * 2),
    "async": ("", "save() -> int:\n    return 1", "load(found: int):\n    state['seen'] = found + 1", 2),
    "a default": ("", "save():\n    return None", "load(found: int | None = 5):\n    state['seen'] = found", None),
    "an alias": ("from typing import Annotated\nfrom pydantic import Field", "save() -> int:\n    return 7",
                 "load(found: Annotated[int, Field(ge=0)]):\n    state['seen'] = found", 7),
    "like content": ("", "save():\n    return [{'type': 'text', 'text': 'x'}]",
                     "load(found):\n    state['seen'] = found", [{"type": "text", "text": "x"}]),
}  # fmt: skip


def paired(more: str, save: str, load: str, asynchronous: str = "") -> str:
    return f"{more}\n\n@register_save\n{asynchronous}def {save}\n\n@register_load\n{asynchronous}def {load}\n"


@pytest.mark.parametrize("kind", KINDS)
async def test_what_was_said_is_what_is_given(bench: Bench, kind: str) -> None:
    more, save, take, seen = KINDS[kind]
    name = written(bench, paired(more, save, take, "async " if kind == "async" else ""))
    async with bench.env(name) as env, bench.env(name) as other:
        await load(other, await saved(env))
        assert await run(other, "out = state['seen']") == seen


@pytest.mark.parametrize(
    ("body", "kind", "message"),
    [
        ("save():\n    return object()", AuthorError, r"^save\(\) returned something that cannot be sent"),
        ("save() -> int:\n    return 'x'", AuthorError, r"^save\(\) is declared to return int, but returned str"),
        ("save():\n    return [float('nan'), object]", AuthorError, r"^save\(\) returned something"),
        ("save():\n    raise Unsupported('it is busy', hint='wait')", Unsupported, "^it is busy$"),
        ("save():\n    raise ValueError('no')", AuthorError, r"^save save\(\) raised ValueError: no$"),
        ("save():\n    raise SystemExit(3)", AuthorError, r"^save save\(\) raised SystemExit: 3$"),
        ("save():\n    raise AEnvError('odd')", AuthorError, r"^save save\(\) raised AEnvError: odd$"),
    ],
)
async def test_what_cannot_be_said_is_told_in_words(
    bench: Bench, body: str, kind: type[AEnvError], message: str
) -> None:
    name = written(bench, paired("from aenv.errors import AEnvError", body, "load(found) -> None:\n    pass"))
    async with bench.env(name) as env:
        with pytest.raises(AEnvError, match=message) as caught:
            await saved(env)
        assert type(caught.value) is kind
        if kind is Unsupported:
            assert caught.value.hint == "wait"
            with pytest.raises(Unsupported, match="and it cannot be saved: it is busy"):
                await env.fork()
        else:
            with pytest.raises(kind, match=message):
                await env.fork()
        assert await bench.alive() == [env.instance_id]
        noted = [call for call in await env.history() if call["kind"] == "save"]
        assert all(call["is_error"] for call in noted)


@pytest.mark.parametrize(
    ("body", "kind", "message"),
    [
        ("load(found):\n    raise ValueError('no')", AuthorError, r"load load\(\) raised ValueError: no"),
        ("load(found):\n    raise Unsupported('not here')", Unsupported, "not here"),
        ("load(found: list):\n    pass", Invalid, "load: argument 'found'"),
    ],
)
async def test_where_loading_fails_nothing_is_left_but_the_one_that_was_saved(
    bench: Bench, body: str, kind: type[AEnvError], message: str
) -> None:
    name = written(bench, paired("", "save() -> int:\n    return 3", body))
    async with bench.env(name) as env:
        await run(env, "state['score'] = 5")
        place = await env.checkpoint()
        for act in (env.fork(3), env.restore(place)):
            with pytest.raises(AEnvError, match=message) as caught:
                await act
            assert type(caught.value) is kind
        assert await env.call_reward() == 5.0
        await eventually("the others to end", lambda: _only(bench, env))
    await bench.empty()


async def _only(bench: Bench, env: Environment) -> bool:
    return await bench.alive() == [env.instance_id]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            "@register_save\ndef save() -> int:\n    return 1",
            r"custom_env\.py:\d+: save\(\) has @register_save, and nothing has @register_load",
        ),
        (
            "@register_load\ndef load() -> None:\n    pass",
            r"load\(\) has @register_load, and nothing has @register_save",
        ),
        (
            f"{PAIR}\n@register_save\ndef another() -> int:\n    return 1",
            r"save 'another' is registered twice: .*custom_env\.py:\d+ and .*custom_env\.py:\d+",
        ),
        (
            paired("", "save():\n    pass", "load(one, two=None):\n    pass"),
            r"custom_env\.py:\d+: load\(\) takes more than one argument",
        ),
        (
            paired("", "save(what):\n    pass", "load(one):\n    pass"),
            r"custom_env\.py:\d+: save\(\) takes an argument",
        ),
    ],
)
async def test_functions_that_do_not_fit_together_are_refused_at_the_start(
    bench: Bench, body: str, message: str
) -> None:
    with pytest.raises(StartFailed, match=message):
        await bench.env(written(bench, body)).initialize()


async def test_an_environment_without_them_says_so(bench: Bench) -> None:
    async with bench.env("words") as env:
        assert (await env.get_env_info())["saves"] is False
        for answer in (await env._fetch("/state"), await put(env, b"")):
            assert isinstance(told(answer), Unsupported)


# Generators


DRAW = """
import random, sys
out = [random.random(), random.gauss(0, 1)]
if "numpy" in sys.modules or {numpy}:
    import numpy
    out += [float(numpy.random.rand()), float(numpy.random.normal())]
"""


@pytest.mark.parametrize("numpy", [False, True])
@pytest.mark.parametrize("seed", [None, 11])
async def test_generators_go_on_from_where_they_were(bench: Bench, seed: int | None, numpy: bool) -> None:
    async with bench.env("box", seed=seed) as env, bench.env("box", seed=seed) as other:
        await run(env, DRAW.format(numpy=numpy))
        content = await saved(env)
        drawn = await run(env, DRAW.format(numpy=numpy))
        assert len(drawn) == (4 if numpy else 2)
        await run(other, DRAW.format(numpy=False))
        for _ in range(2):
            await load(other, content)
            assert await run(other, DRAW.format(numpy=False)) == drawn
        again = [await run(one, DRAW.format(numpy=numpy)) for one in (env, other)]
        assert again[0] == again[1]


async def test_what_loading_draws_changes_no_draw_after_it(bench: Bench) -> None:
    name = written(bench, paired("", "save():\n    return random.random()", "load(found):\n    random.random()"))
    async with bench.env(name) as env:
        async with await env.fork(1, same_random=True) as (sibling,):
            assert len({str(await run(one, DRAW.format(numpy=False))) for one in (env, sibling)}) == 1


async def test_the_seed_of_the_last_reset_is_the_seed(bench: Bench) -> None:
    async with bench.env("box", seed=1) as env:
        await env.reset(seed=2**70)
        async with await env.fork(2, same_random=True) as siblings:
            assert [(await one.call_tool("about")).text for one in (env, *siblings)] == [str(2**70)] * 3
        async with await env.fork(1) as (sibling,):
            assert (await sibling.call_tool("about")).text != str(2**70)
