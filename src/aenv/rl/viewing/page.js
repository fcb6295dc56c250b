"use strict";
// Shows the episodes of this page. What they say is only ever the text of a node, never a part of the page.

const IMAGES = ["image/png", "image/jpeg", "image/webp", "image/gif"];
const SHOWN_LINES = 30, SHOWN_CHARACTERS = 4000;
const byId = (id) => document.getElementById(id);
const read = (id) => JSON.parse(byId(id).textContent);
const { rows, leftOut } = read("index");
let visible = [], chosen = -1;

// Nodes

// Spelled out, as in a terminal: what would turn the order of what is read, or cannot be seen.
const CONTROL = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]/g;
const plain = (text) => String(text).replaceAll("\r\n", "\n")
  .replace(CONTROL, (found) => `\\u${found.charCodeAt(0).toString(16).padStart(4, "0")}`);

function make(tag, given = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(given)) {
    if (name === "class") node.className = value;
    else if (name === "text") node.textContent = plain(value);
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value);
  }
  node.append(...children.map((child) => (typeof child === "string" ? plain(child) : child)));
  return node;
}

const number = (value) => (Math.abs(value) >= 1e6 ? value.toExponential(2) : String(+value.toFixed(3)));
const seconds = (value) => (typeof value !== "number" ? "" : value >= 100 ? `${value.toFixed(0)} s`
  : value >= 1 ? `${value.toFixed(1)} s` : `${(value * 1000).toFixed(0)} ms`);
const isScored = (row) => row.score !== undefined;
const isObject = (value) => value !== null && typeof value === "object" && !Array.isArray(value);
const json = (value, space) => JSON.stringify(value, null, space) ?? "";
const mean = (some) => some.reduce((sum, row) => sum + row.score, 0) / some.length;

const LOW = rows.filter(isScored).reduce((low, row) => Math.min(low, row.score), Infinity);
const HIGH = rows.filter(isScored).reduce((high, row) => Math.max(high, row.score), -Infinity);

function badge(row) {
  if (!isScored(row)) return make("span", { class: "badge bad", text: row.kind });
  const node = make("span", { class: "badge good", text: number(row.score) });
  node.style.setProperty("--share", HIGH > LOW ? (row.score - LOW) / (HIGH - LOW) : 1);
  return node;
}

// The summary

function summary() {
  const scored = rows.filter(isScored), failed = rows.length - scored.length;
  const fact = (value, name) =>
    make("div", { class: "fact" }, make("b", { text: value }), make("span", { text: name }));
  const kinds = new Map();
  for (const row of rows) if (!isScored(row)) kinds.set(row.kind, (kinds.get(row.kind) ?? 0) + 1);
  const buttons = [...kinds].sort((a, b) => b[1] - a[1]).map(([kind, count]) => make("button", {
    class: "badge bad", type: "button", title: `Show only ${kind}`, text: `${kind} ${count}`,
    onclick: () => { byId("outcome").value = `kind:${kind}`; list(); },
  }));
  byId("summary").append(
    fact(rows.length, "episodes"), fact(scored.length, "scored"), fact(failed, "failed"),
    ...(buttons.length ? [make("div", { class: "kinds" }, ...buttons)] : []),
    ...(scored.length ? [fact(number(mean(scored)), "mean reward of the scored"), histogram(scored)] : []),
    ...(leftOut ? [make("div", { id: "left-out", text: `${leftOut} more episodes were left out of this page` })] : []),
  );
  const options = [["", "all outcomes"], ["scored", "scored"], ["failed", "failed"],
    ...[...kinds.keys()].sort().map((kind) => [`kind:${kind}`, kind])];
  byId("outcome").append(...options.map(([value, text]) => make("option", { value, text })));
}

function histogram(scored) {
  const svg = (tag, given) => {
    const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(given)) node.setAttribute(name, value);
    return node;
  };
  const low = LOW, high = HIGH;
  const bins = new Array(low === high ? 1 : 15).fill(0);
  for (const { score } of scored) {
    bins[Math.min(bins.length - 1, Math.floor((score - low) / (high - low || 1) * bins.length))]++;
  }
  const most = Math.max(...bins), wide = 150 / bins.length;
  const picture = svg("svg", { class: "histogram", viewBox: "0 0 150 40", role: "img",
    "aria-label": `Rewards from ${number(low)} to ${number(high)}` });
  bins.forEach((count, place) => {
    const tall = count ? Math.max(2, 28 * count / most) : 0;
    const bar = svg("rect", { x: place * wide + 1, y: 29 - tall, width: Math.min(wide - 2, 40), height: tall, rx: 1 });
    const from = low + place * (high - low) / bins.length, to = low + (place + 1) * (high - low) / bins.length;
    const title = svg("title", {});
    title.textContent = `${number(from)} to ${number(to)}: ${count}`;
    bar.append(title);
    picture.append(bar);
  });
  const left = svg("text", { x: 0, y: 39 }), right = svg("text", { x: 150, y: 39, "text-anchor": "end" });
  left.textContent = number(low);
  right.textContent = low === high ? "" : number(high);
  picture.append(svg("line", { x1: 0, y1: 29.5, x2: 150, y2: 29.5 }), left, right);
  return picture;
}

// The list

const ORDERS = {  // an episode without a score is after all that have one, whichever way they are sorted
  best: (a, b) => isScored(b) - isScored(a) || (b.score ?? 0) - (a.score ?? 0),
  worst: (a, b) => isScored(b) - isScored(a) || (a.score ?? 0) - (b.score ?? 0),
  longest: (a, b) => (b.seconds ?? 0) - (a.seconds ?? 0),
  shortest: (a, b) => (a.seconds ?? 0) - (b.seconds ?? 0),
};

function matches(row) {
  const words = byId("search").value.toLowerCase().split(/\s+/).filter(Boolean), outcome = byId("outcome").value;
  if (outcome === "scored" && !isScored(row)) return false;
  if (outcome === "failed" && isScored(row)) return false;
  if (outcome.startsWith("kind:") && row.kind !== outcome.slice(5)) return false;
  const text = [row.id, row.env, row.task, row.group, row.kind, row.reason, row.ended, row.text].join("\n");
  return words.every((word) => text.toLowerCase().includes(word));
}

function list() {
  const found = rows.map((row, place) => ({ ...row, place })).filter(matches);
  const order = ORDERS[byId("sort").value];
  if (order) found.sort(order);
  const groups = new Map();
  for (const row of found) {
    const name = byId("grouped").checked ? row.group : "";
    if (!groups.has(name)) groups.set(name, []);
    groups.get(name).push(row);
  }
  const nodes = [];
  visible = [];
  for (const [name, members] of groups) {
    if (byId("grouped").checked) nodes.push(groupHead(name, members));
    for (const row of members) {
      visible.push(row.place);
      nodes.push(item(row, byId("grouped").checked));
    }
  }
  byId("list").replaceChildren(...nodes);
  const of = found.length === rows.length ? "" : ` of ${rows.length}`;
  byId("count").textContent = `${found.length}${of} episodes`;
  mark();
}

function groupHead(name, members) {
  const scored = members.filter(isScored);
  const told = scored.length ? `mean ${number(mean(scored))} of ${scored.length}` : "none scored";
  const named = make("b", { text: name || "no group", title: plain(name) });
  return make("div", { class: "group" }, named, make("span", { text: told }));
}

function item(row, grouped) {
  const named = grouped ? `sample ${row.sample}` : `${row.task || row.id} / ${row.sample}`;
  const more = [`${row.turns} ${row.turns === 1 ? "turn" : "turns"}`, seconds(row.seconds),
    row.ended === "done" ? "" : row.ended || "", row.reason || row.id].filter(Boolean).join(" · ");
  return make("div", { class: "row", role: "option", id: `row-${row.place}`, onclick: () => choose(row.place) },
    make("span", { class: "name", text: named }), badge(row), make("span", { class: "more", text: more }));
}

function mark() {
  for (const node of byId("list").querySelectorAll("[aria-selected=true]")) node.removeAttribute("aria-selected");
  const node = byId(`row-${chosen}`);
  byId("list").removeAttribute("aria-activedescendant");
  if (node) {
    node.setAttribute("aria-selected", "true");
    node.scrollIntoView({ block: "nearest" });
    byId("list").setAttribute("aria-activedescendant", node.id);
  }
}

function choose(place) {
  if (place === chosen || !rows[place]) return;
  overview(false);
  chosen = place;
  mark();
  show(read(`episode-${place}`), rows[place]);
  const hash = `#${encodeURIComponent(rows[place].id)}`;
  if (location.hash !== hash) history.replaceState(null, "", hash);
}

// What a page may tell of all its episodes, as long as none is chosen.
function overview(shown) {
  if (!byId("overview")) return;
  byId("overview").hidden = !shown;
  byId("episode").hidden = shown;
  byId("to-overview").hidden = shown;
  if (shown) {
    chosen = -1;
    mark();
  }
}

function fromAddress() {
  let id = location.hash.slice(1);
  try { id = decodeURIComponent(id); } catch { /* it is taken as it is */ }
  return rows.findIndex((row) => row.id === id);
}

// Values and texts

function text(value, kind = "pre") {
  const whole = plain(value), lines = whole.split("\n");
  const short = lines.slice(0, SHOWN_LINES).join("\n").slice(0, SHOWN_CHARACTERS);
  const node = make(kind === "pre" ? "pre" : "div", kind === "pre" ? {} : { class: kind });
  if (whole.length - short.length < 200) {
    node.textContent = whole;
    return node;
  }
  node.textContent = short;
  const size = `${lines.length.toLocaleString("en")} lines, ${whole.length.toLocaleString("en")} characters`;
  const all = make("button", { class: "more", type: "button", text: `show all: ${size}`, onclick: () => {
    node.textContent = whole;
    all.remove();
  } });
  return make("div", {}, node, all);
}

function image(kind, data) {
  const fits = IMAGES.includes(kind) && /^[A-Za-z0-9+/=\s]+$/.test(data);
  if (!fits) return make("p", { class: "empty", text: `[${kind}]` });
  return make("img", { alt: kind, src: `data:${kind};base64,${data}` });
}

function value(of) {
  if (typeof of === "string") return [text(of)];
  if (!isObject(of)) return [text(json(of, 2))];
  const nodes = [], scalars = [];
  for (const [name, part] of Object.entries(of)) {
    const written = typeof part === "string" ? part : json(part);
    if (written.length <= 60 && !written.includes("\n")) {
      scalars.push(make("div", {}, make("span", { text: name }), make("code", { text: written || '""' })));
    } else {
      nodes.push(make("div", { class: "key", text: name }), text(typeof part === "string" ? part : json(part, 2)));
    }
  }
  return scalars.length ? [make("div", { class: "scalars" }, ...scalars), ...nodes] : nodes;
}

function content(given, kind) {
  if (given === null || given === undefined || given === "") return [];
  if (!Array.isArray(given)) return [text(typeof given === "string" ? given : json(given, 2), kind)];
  return given.map((block) => {
    if (typeof block?.text === "string") return text(block.text, kind);
    if (block?.type === "image") return image(String(block.mimeType), String(block.data ?? ""));
    const url = /^data:(image\/[a-z]+);base64,(.*)$/s.exec(block?.image_url?.url ?? "");
    return url ? image(url[1], url[2]) : make("p", { class: "empty", text: `[${block?.type ?? "content"}]` });
  });
}

// One episode

function show({ trajectory: of, steps }, row) {
  const raw = make("div", { hidden: "" });
  const toggle = make("button", { type: "button", id: "raw", text: "raw JSON", onclick: () => {
    if (!raw.firstChild) raw.append(make("pre", { text: json(of, 2) }));
    raw.hidden = !raw.hidden;
    toggle.setAttribute("aria-pressed", String(!raw.hidden));
  } });
  const under = [of.env, of.group && of.group !== of.task.id ? `group ${of.group}` : "", `sample ${of.sample}`,
    of.seed === null ? "" : `seed ${of.seed}`, of.ended ? `ended: ${of.ended}` : "",
    of.began_at ? new Date(of.began_at * 1000).toISOString().slice(0, 19).replace("T", " ") + " UTC" : "", of.id];
  const facts = [section("Time", ...times(of.seconds ?? {}))];
  if (isScored(row)) facts.unshift(section("Reward", components(of.outcome)));
  const said = steps.flatMap((step) => told(of, step));
  if (![null, undefined].includes(of.observation)) said.unshift(box("observation", value(of.observation)));
  const known = [null, undefined, "", of.messages.at(-1)?.content];
  if (!known.includes(of.answer)) said.push(box("answer", value(of.answer)));
  byId("episode").replaceChildren(
    make("div", { class: "title" }, make("h2", { text: of.task.id || of.id }), badge(row), toggle),
    make("p", { class: "under", text: under.filter(Boolean).join(" · ") }),
    raw,
    ...(of.task.instruction ? [text(of.task.instruction, "instruction")] : []),
    ...(isScored(row) ? [] : [section("", failure(of.outcome))]),
    make("div", { class: "side" }, ...facts),
    ...(of.retried?.length ? [section("Tried before", ...of.retried.map(failure))] : []),
    section("Conversation", ...said),
    ...more(of),
  );
  byId("episode").scrollTop = 0;
}

const section = (name, ...children) => make("section", {}, ...(name ? [make("h3", { text: name })] : []), ...children);

function failure(failed) {
  const turn = failed.turn === undefined || failed.turn === null ? "" : `, turn ${failed.turn + 1}`;
  const how = ` during ${failed.phase}${turn}: ${failed.reason}`;
  return make("div", { class: "failure" }, make("b", { text: failed.kind }), how,
    ...(failed.hint ? [make("div", { class: "empty", text: failed.hint })] : []));
}

function components(outcome) {
  const cell = (name, is) => make(name, is ? { class: "number" } : {});
  const line = (name, values) => make("tr", {}, ...values.map((part, place) => {
    const node = cell(name, place > 0 && place < 4);
    node.textContent = part;
    return node;
  }));
  const body = Object.entries(outcome.components ?? {}).map(([name, part]) => {
    const weight = part.weight ?? 1;
    return line("td", [name, number(part.score), number(weight), number(part.score * weight),
      part.details === undefined || part.details === null ? "" : json(part.details)]);
  });
  return make("table", {}, line("th", ["component", "score", "weight", "gives", ""]), ...body,
    line("td", ["total", "", "", number(outcome.score), ""]));
}

function times(given) {
  const { model = 0, tool = 0, agent = 0 } = given;
  const parts = [["create", given.create], ["reset", given.reset], ["model", model], ["tool", tool],
    ["agent", Math.max(0, agent - model - tool)], ["reward", given.reward], ["release", given.release]]
    .filter(([, spent]) => spent > 0);
  const sum = parts.reduce((total, [, spent]) => total + spent, 0);
  if (!sum) return [make("p", { class: "empty", text: given.total ? `total ${seconds(given.total)}` : "not known" })];
  const bar = make("div", { class: "bar" }), legend = make("div", { class: "legend" });
  for (const [name, spent] of parts) {
    const part = make("i", { class: name, title: `${name} ${seconds(spent)}` });
    part.style.width = `${100 * spent / sum}%`;
    bar.append(part);
    const named = name === "agent" ? "agent, else" : name;
    legend.append(make("span", {}, make("i", { class: name }), `${named} ${seconds(spent)}`));
  }
  if (given.total) legend.append(make("span", { text: `total ${seconds(given.total)}` }));
  return [bar, legend];
}

function box(name, children, facts = []) {
  return make("div", { class: "message" },
    make("header", {}, make("b", { text: name }), ...facts.map((fact) => make("span", { text: fact }))),
    make("div", { class: "body" }, ...children));
}

function told(of, { heard, turn }) {
  const isInstruction = (message) => message.role === "user" && message.content === of.task.instruction;
  const nodes = heard.map((place) => of.messages[place]).filter((message) => !isInstruction(message))
    .map((message) => box(String(message.role ?? "message"), content(message.content, "said")));
  if (turn !== null) nodes.push(turnBox(of, of.turns[turn], turn));
  return nodes;
}

function turnBox(of, turn, place) {
  const calls = turn.calls ?? [], spoken = turn.generation ?? {}, said = of.messages[spoken.message] ?? {};
  const { prompt_tokens: read = "?", completion_tokens: wrote } = spoken;
  const tokens = wrote === undefined ? "" : `${read} + ${wrote} tokens`;
  const facts = [spoken.model, seconds(spoken.seconds), tokens, spoken.finish_reason].filter(Boolean);
  const made = new Set(calls.map((call) => call.id)), asked = Array.isArray(said.tool_calls) ? said.tool_calls : [];
  const notMade = asked.filter((call) => !made.has(call?.id)).map((call) => json(call?.function ?? call));
  const thought = typeof said.reasoning_content === "string" ? said.reasoning_content : "";
  const node = box(`turn ${place + 1}`, [
    ...(thought ? [text(thought, "said thought")] : []),
    ...content(said.content, "said"),
    ...notMade.map((call) => make("p", { class: "empty", text: `asked for, and not called: ${call}` })),
    ...calls.map(callBox),
  ], facts);
  node.className = "turn";
  node.firstChild.append(...Object.entries(turn.rewards ?? {}).map(([name, part]) =>
    make("span", { class: "badge good", text: `${name} ${number(part.score)}` })));
  return node;
}

function callBox(call) {
  const failed = !call.result || call.result.is_error;
  const node = make("details", { class: failed ? "call error" : "call", open: "" },
    make("summary", {}, make("b", { text: call.name }), make("code", { text: json(call.arguments).slice(0, 300) }),
      ...(failed ? [make("span", { class: "badge bad", text: call.result ? "error" : "no result" })] : []),
      make("time", { text: seconds(call.seconds) })),
    ...value(call.arguments));
  if (call.result) {
    const blocks = call.result.content ?? [], structured = call.result.structured;
    const others = blocks.filter((block) => block?.type !== "text");  // the text says again what is structured
    const shown = isObject(structured) ? [...value(structured), ...content(others)]
      : blocks.length ? content(blocks) : value(structured ?? "");
    node.append(make("div", { class: "key", text: "result" }), ...shown);
  }
  return node;
}

function more(of) {
  const found = [], { id, instruction, ...rest } = of.task;
  const versions = Object.entries(of.provenance.versions ?? {}).map(([name, version]) => `${name} ${version}`);
  const facts = Object.entries({ ...of.provenance, versions: versions.join(", ") }).filter(([, fact]) => fact);
  if (of.lineage) facts.push([of.lineage.relation, `from ${of.lineage.parent}`]);
  const lines = facts.flatMap(([name, fact]) =>
    [make("dt", { text: name.replaceAll("_", " ") }), make("dd", {}, make("code", { text: fact }))]);
  if (lines.length) found.push(section("Provenance", make("dl", {}, ...lines)));
  if (Object.keys(rest).length) found.push(section("Task", ...value(rest)));
  if (of.tools?.length) {
    const names = of.tools.map((tool) => tool.function?.name ?? tool.name ?? "?").join(", ");
    found.push(section("Tools", make("details", {}, make("summary", { text: names }), text(json(of.tools, 2)))));
  }
  return found;
}

// What the reader does

function step(by) {
  const at = visible.indexOf(chosen);
  const next = at < 0 ? 0 : Math.min(visible.length - 1, Math.max(0, at + by));
  if (visible.length) choose(visible[next]);
}

document.addEventListener("keydown", (event) => {
  if (event.altKey || event.ctrlKey || event.metaKey || event.target instanceof HTMLSelectElement) return;
  const by = { ArrowDown: 1, ArrowUp: -1 }[event.key];
  if (by) {
    event.preventDefault();
    step(by);
  }
});
byId("filters").addEventListener("input", list);
byId("filters").addEventListener("submit", (event) => event.preventDefault());
addEventListener("hashchange", () => {
  const place = fromAddress();
  if (place >= 0) choose(place);
  else overview(true);
});
summary();
list();
if (byId("overview")) document.querySelector("h1").after(make("a", { id: "to-overview", href: "#", text: "Report" }));
const wanted = fromAddress();
if (wanted >= 0) choose(wanted);
else if (byId("overview")) overview(true);
else if (rows.length) choose(visible[0]);
else byId("episode").replaceChildren(make("p", { class: "empty", text: "There are no episodes here." }));
