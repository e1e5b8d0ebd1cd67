// What the page knows, and how values read: pure, touches no page. Nodes are rows of the server by name.

const COLUMNS = [["directory", "router", "local"], ["prefill", "trainer"], ["coordinator"], ["decode", "rollout", "expert"]];
const MAKERS = new Set(["decode", "local", "rollout"]); // routers count the tokens of an answer at its end
const WHOLE = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

// Compare names as people do: node-9 before node-10. Made once, since making it takes longer than many comparisons.
export const byName = new Intl.Collator("en", { numeric: true }).compare;

// Apply a change of the server: fields of nodes, nodes that are gone.
export function apply(nodes, change) {
  for (const name of change.gone ?? []) nodes.delete(name);
  for (const [name, fields] of Object.entries(change.set ?? {})) nodes.set(name, { ...nodes.get(name), ...fields });
}

// Return the roles that are there, in columns from those who ask to those who answer; roles of tomorrow come last.
export function columnsOf(nodes) {
  const byRole = new Map();
  for (const [name, row] of nodes) {
    if (!byRole.has(row.role)) byRole.set(row.role, []);
    byRole.get(row.role).push(name);
  }
  const known = new Set(COLUMNS.flat());
  const others = [...byRole.keys()].filter((role) => !known.has(role)).sort();
  return [...COLUMNS, others]
    .map((roles) => roles.filter((role) => byRole.has(role)).map((role) => ({ role, names: byRole.get(role).sort(byName) })))
    .filter((lanes) => lanes.length);
}

// Return all rails, the fastest first, and those who wait for somebody, the longest first.
export function edgesOf(nodes) {
  const rails = [], waits = [];
  for (const [from, row] of nodes) {
    for (const [to, [rate, provider, flying, state]] of Object.entries(row.rails)) {
      rails.push({ from, to, rate: rate ?? 0, provider, flying, state });
    }
    for (const [to, count] of Object.entries(row.on)) {
      const since = row.waits.filter((wait) => wait[4].includes(to)).map((wait) => wait[5]);
      waits.push({ from, to, count, seconds: Math.max(0, ...since) });
    }
  }
  rails.sort((a, b) => b.rate - a.rate || b.flying - a.flying);
  waits.sort((a, b) => b.seconds - a.seconds);
  return { rails, waits };
}

const sum = (rows, field) => {
  const known = rows.map((row) => row[field]).filter((value) => value !== null && value !== undefined);
  return known.length ? known.reduce((a, b) => a + b, 0) : null;
};

// Return the figures of the whole cluster: name, value, remark, and how full it is where that makes sense.
export function totalsOf(nodes, rails) {
  const rows = [...nodes.values()];
  const ready = rows.filter((row) => row.state === "ready").length;
  const routers = rows.filter((row) => row.role === "router" || row.role === "local");
  const first = routers.map((row) => row.first).filter(Boolean);
  const pages = rows.map((row) => row.pages).filter(Boolean);
  const [held, free, late] = [0, 1, 2].map((at) => pages.reduce((all, each) => all + each[at], 0));
  const versions = rows.map((row) => row.version).filter((version) => version !== null);
  const behind = Math.max(0, ...rows.map((row) => row.behind ?? 0));
  const busy = rails.filter((rail) => rail.rate > 0);
  const figures = [["Nodes", number(rows.length), ready === rows.length ? "all ready" : `${rows.length - ready} not ready`]];
  if (routers.length) {
    figures.push(["Requests", number(sum(routers, "requests")), `${number(sum(routers, "answered") ?? 0)} answered/s`]);
    const worst = (at) => Math.max(...first.map((each) => each[at]));
    figures.push(["First token", first.length ? duration(worst(0)) : "–", first.length ? `99 % within ${duration(worst(1))}` : "none lately"]);
  }
  const tokens = sum(rows.filter((row) => MAKERS.has(row.role)), "tokens");
  if (tokens !== null) figures.push(["Tokens", `${number(tokens)}/s`, "generated"]);
  if (rails.length) figures.push(["Rails", bytes(sum(rails, "rate"), "/s"), `${busy.length} of ${rails.length} busy`]);
  if (pages.length) figures.push(["Pages held", number(held), `${number(free)} free${late ? `, ${number(late)} in quarantine` : ""}`, held / Math.max(1, held + free + late)]);
  if (versions.length) figures.push(["Weights", `v${Math.max(...versions)}`, behind ? `up to ${number(behind)} behind` : "nobody behind"]);
  return figures;
}

const UNITS = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];

// Three digits and a decimal unit, as the command line writes them.
export function bytes(value, suffix = "") {
  if (value === null || value === undefined) return "";
  for (const [factor, unit] of UNITS) if (value >= factor) return `${three(value / factor)} ${unit}B${suffix}`;
  return `${three(value)} B${suffix}`;
}

export function number(value) {
  if (value === null || value === undefined) return "";
  if (value >= 1e6) return `${three(value / 1e6)} M`;
  return value >= 100 ? WHOLE.format(value) : three(value);
}

export function duration(seconds) {
  if (seconds >= 3600) return `${three(seconds / 3600)} h`;
  if (seconds >= 60) return `${three(seconds / 60)} min`;
  return seconds >= 1 ? `${three(seconds)} s` : `${three(seconds * 1000)} ms`;
}

const three = (value) => String(Number(value.toPrecision(3)));
