"""What the fixtures really answer: the suite mostly checks shapes, so a pass alone says little."""

import asyncio
import base64
import importlib.util
import inspect
import io
import json
import wave
from collections.abc import AsyncIterator, Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from aenv import Audio, Context, Environment, Image, ToolResult, attach
from aenv.runtime.registry import Mark, collect
from tests.support import serve

HERE = Path(__file__).parent
PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8BQDwAEhQGAhKmMIQAAAABJRU5ErkJggg=="
)
PICTURE = {"type": "image", "data": base64.b64encode(PNG).decode(), "mimeType": "image/png"}
EMBEDDED = {
    "type": "resource",
    "resource": {
        "uri": "test://embedded-resource",
        "mimeType": "text/plain",
        "text": "This is an embedded resource content.",
    },
}
MIXED = [
    {"type": "text", "text": "Multiple content types test:"},
    PICTURE,
    {
        "type": "resource",
        "resource": {
            "uri": "test://mixed-content-resource",
            "mimeType": "application/json",
            "text": '{"test":"data","value":123}',
        },
    },
]
FAILURE = "This tool intentionally returns an error for testing"
PERSON = {
    "name": "Ann",
    "address": {"street": "Main", "city": "Oslo"},
    "contactMethod": "phone",
    "phone": "1",
}
TEXTS = {
    "test_simple_text": "This is a simple text response for testing.",
    "test_tool_with_progress": "Tool with progress executed successfully",
    "test_tool_with_logging": "Tool with logging executed successfully",
    "test_logging_tool": "Logging tool executed successfully",
    "test_streaming_elicitation": "Nothing was asked",
    "test_reconnection": "Reconnection test completed successfully",
}
OTHERS = {
    "test_image_content",
    "test_audio_content",
    "test_embedded_resource",
    "test_multiple_content_types",
    "test_error_handling",
    "json_schema_2020_12_tool",
    "lookup_by_region",
}


def load(env: str) -> tuple[ModuleType, list[Mark]]:
    """A fixture's module and what it registered, without a trace in this process's registry."""
    path = HERE / f"{env}_env" / "src" / "custom_env.py"
    spec = importlib.util.spec_from_file_location(f"conformance_{env}_env", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with collect() as marks:
        spec.loader.exec_module(module)
    return module, marks


@pytest.fixture(scope="module")
def tools() -> ModuleType:
    return load("tools")[0]


@pytest.fixture(scope="module")
def tools_url() -> Iterator[str]:
    with serve(HERE / "tools_env") as url:
        yield url


@pytest.fixture
async def env(tools_url: str) -> AsyncIterator[Environment]:
    async with Environment("conformance-tools", provision=attach(tools_url)) as environment:
        yield environment


def is_silence(data: bytes) -> bool:
    with wave.open(io.BytesIO(data)) as sound:
        frames = sound.readframes(sound.getnframes())
        return sound.getframerate() == 8000 and len(frames) == 80 and set(frames) == {0x80}


# The functions themselves


def called(function: Callable[..., Any], **arguments: Any) -> tuple[Any, list[tuple[str, dict[str, Any]]]]:
    """Call a tool as plain Python: its value, and the notifications it sent."""
    sent: list[tuple[str, dict[str, Any]]] = []
    if "ctx" in inspect.signature(function).parameters:
        arguments["ctx"] = Context(
            name=function.__name__, notify=lambda *message: sent.append(message), progress_token="t"
        )
    value = function(**arguments)
    return (asyncio.run(value) if inspect.isawaitable(value) else value), sent


def test_every_tool_has_an_expected_value() -> None:
    """A tool added to the fixture needs a line here; the first one takes no arguments."""
    names = [mark.name for mark in load("tools")[1]]
    assert set(names) == set(TEXTS) | OTHERS
    assert names[0] == "test_simple_text"


@pytest.mark.parametrize(("name", "text"), TEXTS.items())
def test_text(tools: ModuleType, name: str, text: str) -> None:
    assert called(getattr(tools, name))[0] == text


def test_content(tools: ModuleType) -> None:
    assert called(tools.test_image_content)[0] == Image(PNG, "image/png")
    sound = called(tools.test_audio_content)[0]
    assert isinstance(sound, Audio)
    assert sound.mime_type == "audio/wav"
    assert is_silence(sound.data)
    assert called(tools.test_embedded_resource)[0] == ToolResult(content=[EMBEDDED])
    assert called(tools.test_multiple_content_types)[0] == ToolResult(content=MIXED)


def test_error(tools: ModuleType) -> None:
    with pytest.raises(RuntimeError, match=FAILURE):
        tools.test_error_handling()


def test_arguments(tools: ModuleType) -> None:
    assert tools.json_schema_2020_12_tool(**PERSON) == PERSON
    assert tools.lookup_by_region("eu") == {"region": "eu", "query": "all"}


def test_progress_and_logs(tools: ModuleType) -> None:
    _, sent = called(tools.test_tool_with_progress)
    assert [(name, p["progressToken"], p["progress"], p["total"]) for name, p in sent] == [
        ("notifications/progress", "t", done, 100) for done in (0, 50, 100)
    ]
    _, sent = called(tools.test_tool_with_logging)
    assert [(name, p["level"], p["data"]) for name, p in sent] == [
        ("notifications/message", "info", f"Tool {what}")
        for what in ("execution started", "processing data", "execution completed")
    ]
    _, sent = called(tools.test_logging_tool)
    assert [(name, p["data"]) for name, p in sent] == [("notifications/message", "Log message from the logging tool")]


# The same through a running sandbox


async def test_served_list(env: Environment) -> None:
    listed = {tool["name"].removeprefix("conformance-tools/"): tool for tool in await env.list_tools()}
    assert list(listed) == [mark.name for mark in load("tools")[1]]
    assert all(tool["description"] for tool in listed.values())
    assert listed["json_schema_2020_12_tool"]["inputSchema"] == load("tools")[0].SCHEMA_2020_12
    region = listed["lookup_by_region"]["inputSchema"]["properties"]["region"]
    assert region == {"type": "string", "description": "where to look", "x-mcp-header": "Region"}


@pytest.mark.parametrize(("name", "text"), TEXTS.items())
async def test_served_text(env: Environment, name: str, text: str) -> None:
    result = await env.call_tool(name, {})
    assert result.content == [{"type": "text", "text": text}]
    assert not result.is_error


async def test_served_content(env: Environment) -> None:
    assert (await env.call_tool("test_image_content", {})).content == [PICTURE]
    (sound,) = (await env.call_tool("test_audio_content", {})).content
    assert (sound["type"], sound["mimeType"]) == ("audio", "audio/wav")
    assert is_silence(base64.b64decode(sound["data"]))
    assert (await env.call_tool("test_embedded_resource", {})).content == [EMBEDDED]
    assert (await env.call_tool("test_multiple_content_types", {})).content == MIXED


async def test_served_error(env: Environment) -> None:
    result = await env.call_tool("test_error_handling", {})
    assert result.is_error
    assert FAILURE in result.text


async def test_served_arguments(env: Environment) -> None:
    result = await env.call_tool("json_schema_2020_12_tool", PERSON)
    assert result.structured == PERSON
    assert json.loads(result.text) == PERSON
    result = await env.call_tool("lookup_by_region", {"region": "eu", "query": "a"})
    assert result.structured == {"region": "eu", "query": "a"}
    result = await env.call_tool("lookup_by_region", {})
    assert result.is_error
    assert "region" in result.text


# The SDK's server object, served by the runtime and asked by the SDK's own client


def has_sdk() -> bool:
    try:
        return int(version("mcp").partition(".")[0]) >= 2
    except PackageNotFoundError:
        return False


needs_sdk = pytest.mark.skipif(not has_sdk(), reason="needs the official SDK: pip install 'mcp>=2'")


@pytest.fixture(scope="module")
def full_url() -> Iterator[str]:
    with serve(HERE / "full_env") as url:
        yield url


def client(url: str, mode: str) -> Any:
    """The SDK's client, with a user, a model and a root that always answer the same."""
    from mcp import Client
    from mcp_types import CreateMessageResult, ElicitResult, ListRootsResult, Root, TextContent

    async def user(_: Any, params: Any) -> ElicitResult:
        known = {
            "name": "Alice",
            "color": "blue",
            "ok": True,
            "context": "tests",
            "username": "al",
            "email": "a@b.c",
        }
        fields = params.requested_schema["properties"]
        return ElicitResult(action="accept", content={field: known[field] for field in fields if field in known})

    async def model(_: Any, params: Any) -> CreateMessageResult:
        answer = TextContent(type="text", text=f"Answer to: {params.messages[0].content.text}")
        return CreateMessageResult(role="assistant", content=answer, model="fixed")

    async def roots(_: Any) -> ListRootsResult:
        return ListRootsResult(roots=[Root(uri="file:///work", name="work")])

    return Client(
        f"{url}/mcp", mode=mode, elicitation_callback=user, sampling_callback=model, list_roots_callback=roots
    )


@needs_sdk
@pytest.mark.parametrize(("mode", "revision"), [("legacy", "2025-11-25"), ("auto", "2026-07-28")])
async def test_full_resources_and_prompts(full_url: str, mode: str, revision: str) -> None:
    async with client(full_url, mode) as connected:
        assert connected.protocol_version == revision
        uris = {str(resource.uri) for resource in (await connected.list_resources()).resources}
        assert uris == {"test://static-text", "test://static-binary", "test://watched-resource"}
        (text,) = (await connected.read_resource("test://static-text")).contents
        assert (text.text, text.mime_type) == (
            "This is the content of the static text resource.",
            "text/plain",
        )
        (image,) = (await connected.read_resource("test://static-binary")).contents
        assert (base64.b64decode(image.blob), image.mime_type) == (PNG, "image/png")
        (data,) = (await connected.read_resource("test://template/123/data")).contents
        assert json.loads(data.text) == {"id": "123", "templateTest": True, "data": "Data for ID: 123"}

        prompt = await connected.get_prompt("test_prompt_with_arguments", {"arg1": "hello", "arg2": "world"})
        assert prompt.messages[0].content.text == "Prompt with arguments: arg1='hello', arg2='world'"
        prompt = await connected.get_prompt("test_prompt_with_embedded_resource", {"resourceUri": "test://x"})
        resource, text = (message.content for message in prompt.messages)
        assert (str(resource.resource.uri), resource.resource.text, text.text) == (
            "test://x",
            "Embedded resource content for testing.",
            "Please process the embedded resource above.",
        )
        prompt = await connected.get_prompt("test_prompt_with_image")
        assert base64.b64decode(prompt.messages[0].content.data) == PNG


@needs_sdk
@pytest.mark.parametrize(
    ("name", "arguments", "text"),
    [
        ("test_sampling", {"prompt": "hi"}, "LLM response: Answer to: hi"),
        (
            "test_elicitation",
            {"message": "who?"},
            'User response: action=accept, content={"username": "al", "email": "a@b.c"}',
        ),
        (
            "test_elicitation_sep1034_defaults",
            {},
            'Elicitation completed: action=accept, content={"name": "Alice"}',
        ),
        ("test_elicitation_sep1330_enums", {}, "Elicitation completed: action=accept, content={}"),
    ],
)
async def test_full_asks_during_a_call(full_url: str, name: str, arguments: dict[str, str], text: str) -> None:
    async with client(full_url, "legacy") as connected:
        assert (await connected.call_tool(name, arguments)).content[0].text == text


@needs_sdk
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("elicitation", "Hello, Alice!"),
        ("sampling", "Answer to: What is the capital of France?"),
        ("list_roots", "Roots: file:///work"),
        ("request_state", "state-ok"),
        ("multiple_inputs", "Answer to: Generate a greeting Alice, 1 root(s)"),
        ("multi_round", "Alice likes blue"),
        ("tampered_state", "state accepted"),
        ("capabilities", "Answered: model, user"),
    ],
)
async def test_full_asks_between_calls(full_url: str, name: str, text: str) -> None:
    async with client(full_url, "auto") as connected:
        result = await connected.call_tool(f"test_input_required_result_{name}", {})
        assert result.content[0].text == text


@needs_sdk
async def test_full_prompt_asks_between_calls(full_url: str) -> None:
    async with client(full_url, "auto") as connected:
        prompt = await connected.get_prompt("test_input_required_result_prompt")
        assert prompt.messages[0].content.text == "Use this context: tests"
