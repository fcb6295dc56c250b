"""Stands in for a model, so that the page works with nothing but itself: it knows two apps, and colours."""

import json
import re
from typing import Any

from aenv.models import ToolResult
from aenv.rl import Episode

PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>{title}</title>
<link rel="stylesheet" href="style.css">
<main>
<h1>{title}</h1>
{body}
</main>
<script src="app.js"></script>
</html>
"""
STYLE = """:root { --accent: teal; }
body { font: 18px/1.5 system-ui, sans-serif; display: grid; place-items: center; min-height: 100vh; margin: 0; }
main { text-align: center; }
h1, output { color: var(--accent); }
output { display: block; font-size: 5rem; }
button, input { font: inherit; padding: 0.3em 1em; border-radius: 0.5em; border: 1px solid var(--accent); }
button { background: var(--accent); color: white; cursor: pointer; }
li { text-align: left; cursor: pointer; }
.done { text-decoration: line-through; opacity: 0.5; }
"""
COUNTER = """const shown = document.querySelector("output");
for (const button of document.querySelectorAll("button")) {
  button.onclick = () => { shown.value = Number(shown.value) + Number(button.value); };
}
"""
TASKS = """const list = document.querySelector("ul");
document.querySelector("form").onsubmit = (event) => {
  event.preventDefault();
  const item = document.createElement("li");
  item.textContent = event.target.what.value;
  item.onclick = () => item.classList.toggle("done");
  list.append(item);
  event.target.reset();
};
"""
APPS = {
    "counter": (
        '<output>0</output>\n<button value="-1">less</button> <button value="1">more</button>',
        COUNTER,
    ),
    "to-do": (
        '<form><input name="what" required placeholder="What is to be done?"> <button>add</button></form>\n<ul></ul>',
        TASKS,
    ),
}
COLOURS = ("crimson", "orange", "green", "teal", "blue", "purple", "black")


class Scripted:
    """Answers as an ``OpenAIAgent`` does, with tools called and everything written down."""

    async def answer(self, env: Episode, message: str) -> str:
        env.hear({"role": "user", "content": message})
        said = await self._done(env, message.lower())
        await env.say({"role": "assistant", "content": said}, model="scripted", finish_reason="stop")
        return said

    async def _done(self, env: Episode, message: str) -> str:
        app = next((name for name in APPS if name.replace("-", "") in message.replace("-", "").replace(" ", "")), None)
        colour = next((name for name in COLOURS if name in message), None)
        if app:
            body, script = APPS[app]
            style = STYLE.replace("teal", colour or "teal")
            files = {"index.html": PAGE.format(title=app.capitalize(), body=body), "style.css": style, "app.js": script}
            for path, content in files.items():
                await self._call(env, "write_file", path=path, content=content)
            return f"Here is a {app} app: a page, its style and its script."
        if colour:
            style = await self._call(env, "read_file", path="style.css")
            if style.is_error:
                return "There is no app yet whose colour I could change."
            content = re.sub(r"--accent: \w+", f"--accent: {colour}", style.text)
            await self._call(env, "write_file", path="style.css", content=content)
            return f"It is {colour} now."
        known, colours = " or a ".join(APPS), ", ".join(COLOURS)
        return f"I am a script, and know two apps: ask for a {known} app. I can also make it {colours}."

    async def _call(self, env: Episode, name: str, **arguments: Any) -> ToolResult:
        id = f"call_{len(env.messages)}"
        call = {"id": id, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
        said = {"role": "assistant", "content": None, "tool_calls": [call]}
        await env.say(said, model="scripted", finish_reason="tool_calls")
        result = await env.call_tool(name, arguments, id=id)
        env.hear({"role": "tool", "tool_call_id": id, "content": result.text})
        return result
