"""A server object of the official SDK with everything the suite asks for beyond tools.

Resources, templates, prompts, completion, sampling, elicitation and requests that need more input. The names
and texts are the suite's; `server` is what the runtime finds and serves at /mcp.
"""

import base64
import json
from typing import Any

from mcp.server import MCPServer
from mcp.server.mcpserver import Context, UserMessage
from mcp.shared.exceptions import MCPError
from mcp_types import (
    MISSING_REQUIRED_CLIENT_CAPABILITY,
    Completion,
    CompletionArgument,
    CompletionContext,
    CreateMessageRequest,
    CreateMessageRequestParams,
    CreateMessageResult,
    ElicitRequest,
    ElicitRequestFormParams,
    ElicitResult,
    EmbeddedResource,
    EmptyResult,
    ImageContent,
    InputRequest,
    InputRequiredResult,
    ListRootsRequest,
    ListRootsResult,
    PromptReference,
    ResourceTemplateReference,
    SamplingMessage,
    SubscribeRequestParams,
    TextContent,
    TextResourceContents,
    UnsubscribeRequestParams,
)

PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8BQDwAEhQGAhKmMIQAAAABJRU5ErkJggg=="
)
"""One red pixel."""

server = MCPServer("conformance-full", version="1.0.0", log_level="WARNING")

# Resources


@server.resource("test://static-text", mime_type="text/plain")
def static_text() -> str:
    """A text that never changes."""
    return "This is the content of the static text resource."


@server.resource("test://static-binary", mime_type="image/png")
def static_binary() -> bytes:
    """An image that never changes."""
    return PNG


@server.resource("test://watched-resource", mime_type="text/plain")
def watched() -> str:
    """A resource that clients subscribe to."""
    return "Watched resource content."


@server.resource("test://template/{id}/data", mime_type="application/json")
def template(id: str) -> str:
    """Data made from the id in the URI."""
    return json.dumps({"id": id, "templateTest": True, "data": f"Data for ID: {id}"})


subscribed: set[str] = set()
"""URIs subscribed to with the 2025-11-25 methods, which the high-level server leaves to its user."""


async def subscribe(_: Any, params: SubscribeRequestParams) -> EmptyResult:
    """Remember that a URI is watched."""
    subscribed.add(str(params.uri))
    return EmptyResult()


async def unsubscribe(_: Any, params: UnsubscribeRequestParams) -> EmptyResult:
    """Forget a watched URI."""
    subscribed.discard(str(params.uri))
    return EmptyResult()


server._lowlevel_server.add_request_handler("resources/subscribe", SubscribeRequestParams, subscribe)
server._lowlevel_server.add_request_handler("resources/unsubscribe", UnsubscribeRequestParams, unsubscribe)

# Prompts and completion


@server.prompt()
def test_simple_prompt() -> str:
    """A prompt without arguments."""
    return "This is a simple prompt for testing."


@server.prompt()
def test_prompt_with_arguments(arg1: str, arg2: str) -> str:
    """A prompt with two arguments."""
    return f"Prompt with arguments: arg1='{arg1}', arg2='{arg2}'"


@server.prompt()
def test_prompt_with_embedded_resource(resourceUri: str) -> list[UserMessage]:
    """A prompt that carries a resource."""
    resource = TextResourceContents(
        uri=resourceUri, mime_type="text/plain", text="Embedded resource content for testing."
    )
    return [
        UserMessage(EmbeddedResource(type="resource", resource=resource)),
        UserMessage("Please process the embedded resource above."),
    ]


@server.prompt()
def test_prompt_with_image() -> list[UserMessage]:
    """A prompt that carries an image."""
    image = ImageContent(type="image", data=base64.b64encode(PNG).decode(), mime_type="image/png")
    return [UserMessage(image), UserMessage("Please analyze the image above.")]


@server.completion()
async def complete(
    ref: PromptReference | ResourceTemplateReference,
    argument: CompletionArgument,
    context: CompletionContext | None,
) -> Completion:
    """Words that start with what was typed so far."""
    del ref, context
    values = [word for word in ("paris", "park", "party", "test", "testing") if word.startswith(argument.value)]
    return Completion(values=values, total=len(values), has_more=False)


# Asking the client during a call (2025-11-25)


async def _elicit(ctx: Context, message: str, properties: dict[str, Any], required: list[str]) -> ElicitResult:
    schema = {"type": "object", "properties": properties, "required": required}
    return await ctx.session.elicit_form(message, schema, related_request_id=ctx.request_id)


@server.tool()
async def test_sampling(prompt: str, ctx: Context) -> str:
    """Ask the client's model."""
    message = SamplingMessage(role="user", content=TextContent(type="text", text=prompt))
    result = await ctx.session.create_message([message], max_tokens=100, related_request_id=ctx.request_id)
    return f"LLM response: {_text(result)}"


@server.tool()
async def test_elicitation(message: str, ctx: Context) -> str:
    """Ask the user for two fields."""
    properties = {
        "username": {"type": "string", "description": "User's response"},
        "email": {"type": "string", "description": "User's email address"},
    }
    result = await _elicit(ctx, message, properties, ["username", "email"])
    return f"User response: action={result.action}, content={json.dumps(result.content)}"


@server.tool()
async def test_elicitation_sep1034_defaults(ctx: Context) -> str:
    """Ask with a default for every primitive type."""
    properties = {
        "name": {"type": "string", "description": "User name", "default": "John Doe"},
        "age": {"type": "integer", "description": "User age", "default": 30},
        "score": {"type": "number", "description": "User score", "default": 95.5},
        "status": {
            "type": "string",
            "description": "User status",
            "enum": ["active", "inactive", "pending"],
            "default": "active",
        },
        "verified": {"type": "boolean", "description": "Verification status", "default": True},
    }
    result = await _elicit(ctx, "Please review and update the form fields with defaults", properties, [])
    return f"Elicitation completed: action={result.action}, content={json.dumps(result.content)}"


@server.tool()
async def test_elicitation_sep1330_enums(ctx: Context) -> str:
    """Ask with all five shapes of an enumeration."""
    options = ["option1", "option2", "option3"]
    titled = [{"const": f"value{n}", "title": f"{word} Option"} for n, word in enumerate(("First", "Second"), 1)]
    properties: dict[str, Any] = {
        "untitledSingle": {"type": "string", "enum": options},
        "titledSingle": {"type": "string", "oneOf": titled},
        "legacyEnum": {
            "type": "string",
            "enum": ["opt1", "opt2", "opt3"],
            "enumNames": ["Option One", "Option Two", "Option Three"],
        },
        "untitledMulti": {"type": "array", "items": {"type": "string", "enum": options}},
        "titledMulti": {"type": "array", "items": {"anyOf": titled}},
    }
    result = await _elicit(ctx, "Please select options from the enum fields", properties, [])
    return f"Elicitation completed: action={result.action}, content={json.dumps(result.content)}"


# Requests that need more input (2026-07-28)


def _ask(message: str, **fields: str) -> ElicitRequest:
    properties = {name: {"type": kind} for name, kind in fields.items()}
    schema = {"type": "object", "properties": properties, "required": list(fields)}
    return ElicitRequest(params=ElicitRequestFormParams(message=message, requested_schema=schema))


def _sample(text: str, max_tokens: int = 100) -> CreateMessageRequest:
    message = SamplingMessage(role="user", content=TextContent(type="text", text=text))
    return CreateMessageRequest(params=CreateMessageRequestParams(messages=[message], max_tokens=max_tokens))


def _field(ctx: Context, key: str, field: str) -> Any:
    """One field of an accepted answer, or None when that answer is not there."""
    answer = (ctx.input_responses or {}).get(key)
    if isinstance(answer, ElicitResult) and answer.action == "accept":
        return (answer.content or {}).get(field)
    return None


def _text(result: CreateMessageResult | None) -> str | None:
    content = result.content if result is not None else None
    return content.text if isinstance(content, TextContent) else None


def _sampled(ctx: Context, key: str) -> str | None:
    answer = (ctx.input_responses or {}).get(key)
    return _text(answer) if isinstance(answer, CreateMessageResult) else None


def _roots(ctx: Context, key: str) -> list[str] | None:
    answer = (ctx.input_responses or {}).get(key)
    return [str(root.uri) for root in answer.roots] if isinstance(answer, ListRootsResult) else None


@server.tool()
async def test_input_required_result_elicitation(ctx: Context) -> str | InputRequiredResult:
    """Ask for a name, then greet."""
    name = _field(ctx, "user_name", "name")
    if name is None:
        return InputRequiredResult(input_requests={"user_name": _ask("What is your name?", name="string")})
    return f"Hello, {name}!"


@server.tool()
async def test_input_required_result_sampling(ctx: Context) -> str | InputRequiredResult:
    """Ask the client's model, then repeat its answer."""
    answer = _sampled(ctx, "capital_question")
    if answer is None:
        return InputRequiredResult(input_requests={"capital_question": _sample("What is the capital of France?")})
    return answer


@server.tool()
async def test_input_required_result_list_roots(ctx: Context) -> str | InputRequiredResult:
    """Ask for the client's roots, then name them."""
    roots = _roots(ctx, "client_roots")
    if roots is None:
        return InputRequiredResult(input_requests={"client_roots": ListRootsRequest()})
    return f"Roots: {', '.join(roots)}"


@server.tool()
async def test_input_required_result_request_state(ctx: Context) -> str | InputRequiredResult:
    """Ask for a confirmation and check that the state came back."""
    if ctx.request_state is None or _field(ctx, "confirm", "ok") is None:
        return InputRequiredResult(
            input_requests={"confirm": _ask("Please confirm", ok="boolean")}, request_state="asked"
        )
    return "state-ok" if ctx.request_state == "asked" else "state-lost"


@server.tool()
async def test_input_required_result_multiple_inputs(ctx: Context) -> str | InputRequiredResult:
    """Ask the user, the model and for roots in one round."""
    name = _field(ctx, "user_name", "name")
    greeting = _sampled(ctx, "greeting")
    roots = _roots(ctx, "client_roots")
    if name is None or greeting is None or roots is None:
        requests: dict[str, InputRequest] = {
            "user_name": _ask("What is your name?", name="string"),
            "greeting": _sample("Generate a greeting", 50),
            "client_roots": ListRootsRequest(),
        }
        return InputRequiredResult(input_requests=requests, request_state="three")
    return f"{greeting} {name}, {len(roots)} root(s)"


@server.tool()
async def test_input_required_result_multi_round(ctx: Context) -> str | InputRequiredResult:
    """Ask twice; the state of the second round holds the first answer."""
    state = json.loads(ctx.request_state or "{}")
    name = state.get("name") or _field(ctx, "step1", "name")
    if name is None:
        return InputRequiredResult(
            input_requests={"step1": _ask("Step 1: What is your name?", name="string")},
            request_state=json.dumps({"round": 1}),
        )
    color = _field(ctx, "step2", "color")
    if color is None:
        return InputRequiredResult(
            input_requests={"step2": _ask("Step 2: What is your favorite color?", color="string")},
            request_state=json.dumps({"round": 2, "name": name}),
        )
    return f"{name} likes {color}"


@server.tool()
async def test_input_required_result_tampered_state(ctx: Context) -> str | InputRequiredResult:
    """Ask with a sealed state; the SDK refuses one that was changed."""
    if _field(ctx, "confirm", "ok") is None:
        return InputRequiredResult(
            input_requests={"confirm": _ask("Please confirm", ok="boolean")}, request_state="sealed"
        )
    return "state accepted"


@server.tool()
async def test_input_required_result_capabilities(ctx: Context) -> str | InputRequiredResult:
    """Ask only what the client says it can answer."""
    capabilities = ctx.client_capabilities
    requests: dict[str, InputRequest] = {}
    if capabilities is not None and capabilities.sampling is not None:
        requests["model"] = _sample("Say hello")
    if capabilities is not None and capabilities.elicitation is not None:
        requests["user"] = _ask("What is your name?", name="string")
    answered = set(ctx.input_responses or ())
    if not requests or answered >= set(requests):
        return f"Answered: {', '.join(sorted(answered))}"
    return InputRequiredResult(input_requests=requests)


@server.prompt()
async def test_input_required_result_prompt(ctx: Context) -> str | InputRequiredResult:
    """A prompt that asks for its context."""
    context = _field(ctx, "user_context", "context")
    if context is None:
        question = _ask("What context should the prompt use?", context="string")
        return InputRequiredResult(input_requests={"user_context": question})
    return f"Use this context: {context}"


# Diagnostics of the stateless revision


@server.tool()
async def test_missing_capability(ctx: Context) -> str:
    """Refuse a client that cannot sample."""
    capabilities = ctx.client_capabilities
    if capabilities is None or capabilities.sampling is None:
        raise MCPError(
            MISSING_REQUIRED_CLIENT_CAPABILITY,
            "This tool needs the sampling capability",
            {"requiredCapabilities": {"sampling": {}}},
        )
    return "The client can sample."


@server.tool()
async def test_streaming_elicitation(ctx: Context) -> str | InputRequiredResult:
    """Stream progress, then ask for input as a result and never as a request on the stream."""
    await ctx.report_progress(1, 2)
    if _field(ctx, "user_name", "name") is None:
        return InputRequiredResult(input_requests={"user_name": _ask("What is your name?", name="string")})
    return "done"


@server.tool()
async def test_logging_tool(ctx: Context) -> str:
    """Log one message, which only a client that asked for logs receives."""
    await ctx.session.send_log_message("info", "Log message from the logging tool", related_request_id=ctx.request_id)
    return "Logged."


@server.tool()
async def test_trigger_tool_change(ctx: Context) -> str:
    """Tell subscribers that the list of tools changed."""
    await ctx.notify_tools_changed()
    return "Tool list change announced."


@server.tool()
async def test_trigger_prompt_change(ctx: Context) -> str:
    """Tell subscribers that the list of prompts changed."""
    await ctx.notify_prompts_changed()
    return "Prompt list change announced."
