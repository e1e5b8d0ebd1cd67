// The cluster drawn: a tile for each node, in lanes by role, over lines for rails and waits. Texts are text, never markup.

import { bytes, number } from "./state.js";

const MOST_CARDS = 8, MOST_CHIPS = 30, MOST_LINES = 160, MOST_QUIET = 60, MOST_LABELS = 12, CROWD = 32;
export const LATE_S = 10; // of a wait that is worth a look
const SVG = "http://www.w3.org/2000/svg";
const stage = document.getElementById("stage"), svg = document.getElementById("lines"), columns = document.getElementById("columns");
const labels = document.createElementNS(SVG, "g");
const tiles = new Map(), lines = new Map();
let shape = "", places = new Map();

export function element(kind, className, text) {
  const made = document.createElement(kind);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

export function put(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

function set(node, name, value) {
  if (node.getAttribute(name) !== value) node.setAttribute(name, value);
}

// Put a tile for each node into its lane; tiles that stay are kept, so that focus does.
export function arrange(wanted, onSelect) {
  const now = JSON.stringify(wanted);
  if (now === shape) return false;
  shape = now;
  const living = new Set();
  columns.replaceChildren(...wanted.map((lanes) => {
    const column = element("div", "column");
    const most = Math.max(...lanes.map((lane) => lane.names.length));
    column.style.flexGrow = String(Math.min(4, Math.max(1, Math.sqrt(most / 8))));
    column.append(...lanes.map(({ role, names }) => {
      const lane = element("section", "lane");
      const title = element("h3", "", role);
      title.append(element("span", "count", String(names.length)));
      const list = element("ul", "tiles");
      list.dataset.size = names.length <= MOST_CARDS ? "card" : names.length <= MOST_CHIPS ? "chip" : "dot";
      list.append(...names.map((name) => {
        living.add(name);
        if (!tiles.has(name)) tiles.set(name, tileOf(name, onSelect));
        return tiles.get(name).item;
      }));
      lane.append(title, list);
      return lane;
    }));
    return column;
  }));
  for (const name of tiles.keys()) if (!living.has(name)) tiles.delete(name);
  return true;
}

function tileOf(name, onSelect) {
  const item = element("li"), button = element("button", "tile");
  button.type = "button";
  button.append(element("span", "name", name), element("span", "state"), element("span", "facts"), element("span", "fill"));
  button.addEventListener("click", () => onSelect(name));
  item.append(button);
  const [, state, facts, fill] = button.children;
  return { item, button, state, facts, fill };
}

// Show what changed of one node on its tile.
export function show(name, row, selected) {
  const tile = tiles.get(name);
  const facts = [];
  if (row.requests) facts.push(`${number(row.requests)} req`);
  if (row.tokens) facts.push(`${number(row.tokens)} tok/s`);
  if (row.version !== null) facts.push(`v${row.version}${row.behind ? ` (−${number(row.behind)})` : ""}`);
  if (row.sent) facts.push(bytes(row.sent, "/s"));
  put(tile.state, row.state === "ready" ? "" : row.state);
  put(tile.facts, facts.join(" · ") || (row.state === "ready" ? "idle" : row.note));
  set(tile.button, "data-state", row.state);
  set(tile.button, "aria-pressed", String(selected === name));
  set(tile.button, "aria-label", `${name}, ${row.role}, ${row.state}${facts.length ? `, ${facts.join(", ")}` : ""}`);
  set(tile.button, "title", `${name}: ${row.note || facts.join(" · ") || row.state}`);
  const [held, free, late] = row.pages ?? [0, 0, 0];
  tile.fill.style.width = `${(100 * held) / Math.max(1, held + free + late)}%`;
  tile.fill.hidden = row.pages === null;
}

// Read where tiles are: once for each new arrangement or size, since it makes the browser lay the page out.
export function measure() {
  const origin = stage.getBoundingClientRect();
  set(svg, "viewBox", `0 0 ${origin.width} ${origin.height}`);
  places = new Map([...tiles].map(([name, { button, item }]) => {
    const box = button.getBoundingClientRect(), lane = item.parentNode.getBoundingClientRect();
    return [name, { left: box.left - origin.left, right: box.right - origin.left, top: box.top - origin.top,
      bottom: box.bottom - origin.top, x: (box.left + box.right) / 2 - origin.left, y: (box.top + box.bottom) / 2 - origin.top,
      laneLeft: lane.left, laneRight: lane.right }];
  }));
}

// Draw the lines; returns how many rails are left out.
export function connect({ rails, waits }, selected) {
  const there = rails.filter((rail) => places.has(rail.from) && places.has(rail.to));
  const mine = (line) => selected !== null && (line.from === selected || line.to === selected);
  const busy = there.filter((rail) => rail.rate > 0 || mine(rail)).slice(0, MOST_LINES);
  const drawn = there.length <= MOST_QUIET ? there : busy;
  const waiting = waits.filter((wait) => places.has(wait.from) && places.has(wait.to));
  const dashed = waiting.length <= MOST_QUIET ? waiting : waiting.filter((wait) => wait.seconds >= LATE_S || mine(wait)).slice(0, MOST_QUIET);
  const crowd = drawn.length > CROWD && selected === null;
  svg.classList.toggle("crowd", crowd);
  const most = Math.max(1, ...drawn.map((rail) => rail.rate));
  const living = new Set();
  for (const wait of dashed) {
    line(living, `wait ${wait.from} ${wait.to}`, wait, wait.seconds >= LATE_S ? "wait late" : "wait", 1.5, selected, mine(wait), true);
  }
  for (const rail of drawn) {
    const width = rail.rate > 0 ? 1.5 + (crowd ? 1 : 4) * Math.sqrt(rail.rate / most) : 1;
    const kind = rail.state === "lost" ? "rail lost" : rail.rate > 0 ? "rail" : "rail idle";
    line(living, `rail ${rail.from} ${rail.to}`, rail, kind, width, selected, mine(rail), false);
  }
  if (!crowd) label(living, drawn.filter((rail) => rail.rate > 0 && (selected === null || mine(rail))));
  for (const [key, made] of lines) {
    if (!living.has(key)) {
      made.remove();
      lines.delete(key);
    }
  }
  return there.length - drawn.length;
}

function made(living, key, kind) {
  living.add(key);
  if (!lines.has(key)) {
    lines.set(key, document.createElementNS(SVG, kind));
    (kind === "text" ? labels : svg).append(lines.get(key));
    svg.append(labels); // above all lines
  }
  return lines.get(key);
}

function line(living, key, { from, to }, kind, width, selected, isMine, isWait) {
  const path = made(living, key, "path");
  const [a, b, c, d] = curve(places.get(from), places.get(to), isWait).map(([x, y]) => `${x.toFixed(1)} ${y.toFixed(1)}`);
  set(path, "d", `M${a}C${b} ${c} ${d}`);
  set(path, "class", selected !== null && !isMine ? `${kind} dim` : kind);
  set(path, "stroke-width", width.toFixed(1));
}

// Return the four points of a curve from the side of one tile to the side of another: across columns, or down where they
// stand above each other. Waits and rails of one pair lie beside each other.
function curve(a, b, isWait) {
  const by = isWait ? 5 : -5;
  if (a.laneRight <= b.laneLeft || b.laneRight <= a.laneLeft) {
    const right = a.x < b.x, x1 = right ? a.right : a.left, x2 = right ? b.left : b.right, bend = (x2 - x1) / 2;
    return [[x1, a.y + by], [x1 + bend, a.y + by], [x2 - bend, b.y + by], [x2, b.y + by]];
  }
  const down = a.y < b.y, y1 = down ? a.bottom : a.top, y2 = down ? b.top : b.bottom, bend = (y2 - y1) / 2;
  return [[a.x + by, y1], [a.x + by, y1 + bend], [b.x + by, y2 - bend], [b.x + by, y2]];
}

// Return the point of a curve at this share of the way; by hand, since asking a path makes the browser lay the page out.
function pointOf(points, share) {
  const weights = [(1 - share) ** 3, 3 * share * (1 - share) ** 2, 3 * share ** 2 * (1 - share), share ** 3];
  return [0, 1].map((axis) => points.reduce((sum, point, index) => sum + weights[index] * point[axis], 0));
}

// Write rates beside few lines, where they touch no tile and no other rate.
function label(living, rails) {
  const taken = [...places.values()];
  for (const rail of rails.slice(0, MOST_LABELS)) {
    const points = curve(places.get(rail.from), places.get(rail.to), false), text = bytes(rail.rate, "/s"), half = 4 * text.length;
    for (const share of [0.5, 0.3, 0.7]) {
      const [x, y] = pointOf(points, share);
      const box = { left: x - half, right: x + half, top: y - 9, bottom: y + 9 };
      if (taken.some((other) => box.left < other.right && other.left < box.right && box.top < other.bottom && other.top < box.bottom)) continue;
      taken.push(box);
      const node = made(living, `text ${rail.from} ${rail.to}`, "text");
      set(node, "x", x.toFixed(1));
      set(node, "y", (y + 4).toFixed(1));
      put(node, text);
      break;
    }
  }
}
