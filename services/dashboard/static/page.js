// The page: receives moments of the cluster from /events and shows them. Hidden, it stops looking after a while.

import { arrange, connect as drawLines, element, LATE_S, measure, put, show } from "./drawing.js";
import { apply, byName, bytes, columnsOf, duration, edgesOf, number, totalsOf } from "./state.js";

const HIDDEN_MS = 10_000, AGAIN_MS = 2_000, MOST_EVENTS = 60, MOST_ROWS = 12, MOST_MEASURES = 200;
const at = (id) => document.getElementById(id);
const nodes = new Map(), tableRows = new Map(), changed = new Set(), events = [], fresh = [];
let source = null, hiding = 0, selected = null, measures = 0;

function connect() {
  source?.close();
  source = new EventSource("/events");
  source.addEventListener("snapshot", (event) => take(JSON.parse(event.data), true));
  source.addEventListener("change", (event) => take(JSON.parse(event.data), false));
  source.addEventListener("error", () => {
    link("silent", "reconnecting");
    if (source.readyState === EventSource.CLOSED) setTimeout(connect, AGAIN_MS);
  });
}

function link(state, text) {
  at("link").dataset.state = state;
  put(at("link"), text);
}

// Take a moment; it is drawn with the next frame, together with others that came until then: a slow browser skips moments.
function take(moment, whole) {
  if (whole) {
    nodes.clear();
    events.length = 0;
  }
  const set = whole ? moment.nodes : moment.set ?? {};
  apply(nodes, { set, gone: moment.gone });
  events.push(...moment.events);
  events.splice(0, events.length - MOST_EVENTS);
  if (!whole) fresh.push(...moment.events);
  if (changed.size === 0) requestAnimationFrame(draw);
  changed.add(""); // no node, but a frame is on its way
  for (const name of Object.keys(set)) changed.add(name);
  link("ready", "live");
}

function draw() {
  const start = performance.now();
  if (selected !== null && !nodes.has(selected)) selected = null;
  render([...changed].filter((name) => nodes.has(name)));
  renderEvents(fresh.splice(0));
  changed.clear();
  performance.measure("apply", { start });
  if (++measures % MOST_MEASURES === 0) performance.clearMeasures("apply");
}

function render(names) {
  const edges = edgesOf(nodes);
  const moved = arrange(columnsOf(nodes), select);
  for (const name of moved ? nodes.keys() : names) show(name, nodes.get(name), selected);
  if (moved) measure();
  lines(edges);
  renderTotals(totalsOf(nodes, edges.rails));
  renderTable(names);
  renderRails(edges.rails);
  renderWaits();
  renderUpdates();
  renderDetail();
}

function lines(edges) {
  const left = drawLines(edges, selected);
  at("undrawn").hidden = left === 0;
  put(at("undrawn"), left ? `The slower ${number(left)} rails are not drawn; choose a node to see its own.` : "");
}

function select(name) {
  selected = selected === name ? null : name;
  render([...nodes.keys()]);
}

// Make a list as long as `items` and fill each of its children.
function fill(list, items, make, update) {
  while (list.children.length > items.length) list.lastChild.remove();
  while (list.children.length < items.length) list.append(make());
  items.forEach((item, index) => update(list.children[index], item));
}

function renderTotals(figures) {
  fill(at("totals"), figures, () => {
    const figure = element("div");
    figure.append(element("dt"), element("dd", "value"), element("dd", "remark"), element("dd", "meter"));
    figure.lastChild.append(element("span"));
    return figure;
  }, (figure, [name, value, remark, share]) => {
    [name, value, remark].forEach((text, index) => put(figure.children[index], text));
    figure.lastChild.hidden = share === undefined;
    figure.lastChild.firstChild.style.width = `${100 * (share ?? 0)}%`;
  });
}

function cellsOf(name, row) {
  const pages = row.pages ? `${number(row.pages[0])} of ${number(row.pages[0] + row.pages[1] + row.pages[2])}` : "";
  const version = row.version === null ? "" : `${row.version}${row.behind ? ` (${number(row.behind)} behind)` : ""}`;
  const sent = row.sent === null ? "" : bytes(row.sent, "/s");
  return [name, row.role, row.state, number(row.requests), number(row.tokens), sent, pages, version, number(row.waiting || null)];
}

function renderTable(names) {
  const body = at("nodes").querySelector("tbody");
  for (const [name, row] of tableRows) {
    if (!nodes.has(name)) {
      row.remove();
      tableRows.delete(name);
    }
  }
  for (const name of names) {
    let row = tableRows.get(name);
    if (row === undefined) {
      row = element("tr");
      row.dataset.name = name;
      const head = element("th");
      head.scope = "row";
      row.append(head, ...Array.from({ length: 8 }, (_, index) => element("td", index > 1 ? "n" : "")));
      row.children[2].append(element("span", "pill"));
      tableRows.set(name, row);
      const next = [...body.children].find((other) => byName(other.dataset.name, name) > 0);
      body.insertBefore(row, next ?? null);
      row.hidden = !matches(name);
    }
    const texts = cellsOf(name, nodes.get(name));
    texts.forEach((text, index) => put(index === 2 ? row.children[2].firstChild : row.children[index], text));
    row.children[2].firstChild.dataset.state = texts[2];
  }
}

function matches(name) {
  const wanted = at("filter").value.trim().toLowerCase();
  return !wanted || `${name} ${nodes.get(name)?.role} ${nodes.get(name)?.state}`.toLowerCase().includes(wanted);
}

function renderRails(rails) {
  const busy = rails.filter((rail) => rail.rate > 0), shown = (busy.length ? busy : rails).slice(0, MOST_ROWS);
  at("rails").hidden = rails.length === 0;
  put(at("rails").querySelector(".quiet"), `${number(shown.length)} of ${number(rails.length)}, the fastest first`);
  fill(at("rails").querySelector("tbody"), shown, () => {
    const row = element("tr");
    row.append(...[0, 1, 2, 3, 4].map((index) => element("td", index > 2 ? "n" : "")));
    return row;
  }, (row, rail) => {
    const texts = [rail.from, rail.to, rail.provider, rail.state === "lost" ? "lost" : bytes(rail.rate, "/s"), number(rail.flying)];
    texts.forEach((text, index) => put(row.children[index], text));
  });
}

function waitsOf(rows) {
  const waits = rows.flatMap(([name, row]) => row.waits.map((wait) => [name, ...wait]));
  return waits.sort((a, b) => b[6] - a[6]);
}

function renderWaits() {
  const waits = waitsOf([...nodes]), all = [...nodes.values()].reduce((count, row) => count + row.waiting, 0);
  put(at("waiting"), all > MOST_ROWS ? `${MOST_ROWS} of ${number(all)}, the longest first` : "");
  listWaits(at("waits"), waits.slice(0, MOST_ROWS), "Nobody waits for anything.");
}

function listWaits(list, waits, nothing) {
  list.dataset.nothing = waits.length ? "" : nothing;
  fill(list, waits, () => {
    const item = element("li", "waiting"), bar = element("progress");
    item.append(element("strong"), element("span", "for"), element("span", "quiet"), bar);
    return item;
  }, (item, [name, what, goal, have, need, missing, seconds]) => {
    put(item.children[0], name);
    put(item.children[1], `${what}: ${goal}${missing.length ? ` from ${missing.join(", ")}` : ""}`);
    put(item.children[2], `${number(have)} of ${number(need)} · ${duration(seconds)}`);
    item.dataset.late = String(seconds >= LATE_S);
    item.lastChild.max = Math.max(1, need);
    item.lastChild.value = Math.min(have, Math.max(1, need));
    item.lastChild.setAttribute("aria-label", `${what}: ${number(have)} of ${number(need)}`);
  });
}

function renderUpdates() {
  const found = [...nodes].flatMap(([name, row]) => row.updates.map((update) => [name, update]));
  found.sort((a, b) => b[1].version - a[1].version);
  at("updates").hidden = found.length === 0;
  fill(at("updates").querySelector("ul"), found.slice(0, MOST_ROWS), () => {
    const item = element("li", "update"), bar = element("span", "stages");
    bar.append(...["prepare", "write", "verify", "decide"].map((name) => element("span", name, name)));
    item.append(element("strong"), element("span", "pill"), element("span", "for"), bar);
    return item;
  }, (item, [name, update]) => {
    put(item.children[0], `v${update.version}`);
    put(item.children[1], update.outcome);
    item.children[1].dataset.state = update.outcome;
    const took = `${update.receivers} receivers in ${duration(update.seconds)}, ${bytes(update.sent)}`;
    put(item.children[2], `${update.reason || took}, by ${name} at ${clock(update.at)}`);
    item.lastChild.hidden = update.outcome !== "committed";
    update.stages.forEach((seconds, index) => {
      item.lastChild.children[index].style.flexGrow = String(seconds);
      item.lastChild.children[index].title = `${item.lastChild.children[index].className}: ${duration(seconds)}`;
    });
  });
}

function renderDetail() {
  at("detail").hidden = selected === null;
  if (selected === null) return;
  const row = nodes.get(selected), [, role, state, ...cells] = cellsOf(selected, row);
  const names = ["Requests", "Tokens/s", "Sent", "Pages held", "Version", "Waits"];
  const rails = Object.entries(row.rails).slice(0, MOST_ROWS).map(([peer, [rate, provider, , how]]) => `${peer}: ${how === "lost" ? "lost" : bytes(rate, "/s")} over ${provider}`);
  const waits = row.waits.slice(0, 5).map(([what, goal, have, need, missing, seconds]) => `${what}: ${goal}, ${number(have)} of ${number(need)}${missing.length ? ` from ${missing.join(", ")}` : ""}, ${duration(seconds)}`);
  const facts = [["Role", role], ["State", row.note ? `${state}: ${row.note}` : state], ...names.map((name, index) => [name, cells[index]]), ["Rails to", rails.join("\n")], ["Waits for", waits.join("\n")]];
  put(at("h-detail"), selected);
  fill(at("detail").querySelector("dl"), facts.filter(([, text]) => text), () => {
    const fact = element("div");
    fact.append(element("dt"), element("dd"));
    return fact;
  }, (fact, [name, text]) => {
    put(fact.firstChild, name);
    put(fact.lastChild, text);
  });
}

const TIME = new Intl.DateTimeFormat("en-GB", { timeStyle: "medium" });
const clock = (seconds) => TIME.format(seconds * 1000);

function renderEvents(unseen) {
  at("events").dataset.nothing = events.length ? "" : "Nothing has happened yet.";
  fill(at("events"), [...events].reverse(), () => {
    const item = element("li", "event");
    item.append(element("time"), element("span", "pill"), element("strong"), element("span", "for"));
    return item;
  }, (item, event) => {
    [clock(event.at), event.kind, event.node, event.text].forEach((text, index) => put(item.children[index], text));
    item.children[1].dataset.state = event.kind;
  });
  if (unseen.length) put(at("announce"), unseen.slice(-3).map((event) => `${event.node} ${event.kind}`).join(", "));
}

at("filter").addEventListener("input", () => {
  for (const [name, row] of tableRows) row.hidden = !matches(name);
});
at("close").addEventListener("click", () => select(selected));
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && selected !== null) select(selected);
});
document.addEventListener("visibilitychange", () => {
  clearTimeout(hiding);
  if (document.hidden) {
    hiding = setTimeout(() => {
      source?.close();
      source = null;
      link("waiting", "paused");
    }, HIDDEN_MS);
  } else if (source === null) connect();
});
new ResizeObserver(() => {
  measure();
  lines(edgesOf(nodes));
}).observe(at("stage"));
connect();
