// Asks the router once a second and shows what it says.

import { bytes, counters, ms, percentile, perToken, phases, running, short, slowest, total, placing, prediction } from "./view.js";
import { gantt, sparkline, topology } from "./charts.js";
import { startChat } from "./chat.js";

const $ = (id) => document.getElementById(id);
const POLL_MS = 1000, POINTS = 120, WINDOW_MS = 60000, SHOWN = 50;

const history = [], rows = new Map(), open = new Set();
let last = null, latest = [], held = false, asked = false, drawn = null, traceUrl = "";

function element(name, properties = {}, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

function headers(admin = false) {
  const key = (admin && sessionStorage.getItem("admin-key")) || sessionStorage.getItem("api-key") || sessionStorage.getItem("admin-key");
  return key ? { Authorization: `Bearer ${key}` } : {};
}

function note(text) {
  $("note").textContent = text;
  setTimeout(() => { if ($("note").textContent === text) $("note").textContent = ""; }, 8000);
}

async function poll() {
  try {
    const response = await fetch("/console/api/state", { headers: headers(), cache: "no-store" });
    if (response.status === 401) {
      status("bad", "the router wants a key");
      if (!asked) askKeys();
    } else if (!response.ok) {
      status("bad", `the router answered ${response.status}`);
    } else {
      show(await response.json());
    }
  } catch {
    status("bad", "no answer from the router");
  }
  setTimeout(poll, document.hidden ? 5 * POLL_MS : POLL_MS);
}

function status(kind, text) {
  if ($("router").textContent !== text) $("router").textContent = text;
  $("router").className = kind;
}

function show(state) {
  const { cluster, requests } = state;
  status(cluster.ready ? "good" : "warn", cluster.ready ? `${cluster.router_id}: ready` : `${cluster.router_id}: not ready, waits for ${cluster.waiting_for}`);
  latest = requests;
  traceUrl = state.trace_url;
  remember(cluster, requests);
  showFigures();
  draw(cluster);
  showWorkers(cluster, state.actions);
  showLinks(cluster);
  if (!held) showRequests();
  showModels(state.models);
}

function draw(cluster) {
  drawn = cluster;
  $("topology").replaceChildren(topology(cluster, Math.max(280, $("topology").clientWidth)));
}

function remember(cluster, requests) {
  const now = performance.now(), sums = counters(cluster);
  const rate = (name) => (last && now > last.now && sums[name] >= last[name] ? ((sums[name] - last[name]) / (now - last.now)) * 1000 : NaN);
  const fresh = requests.filter((request) => !running(request) && request.age_ms - request.timeline.finished_ms < WINDOW_MS);
  const first = fresh.map((request) => request.timeline.first_token_ms).filter(Boolean);
  const each = fresh.map(perToken).filter(Number.isFinite);
  history.push({
    flying: cluster.requests, tokens: rate("generated"), prompts: rate("computed"), moved: rate("moved"),
    first50: percentile(first, 0.5), first95: percentile(first, 0.95), each50: percentile(each, 0.5), each95: percentile(each, 0.95),
    failed: fresh.filter((request) => request.state === "REQUEST_STATE_FAILED").length,
  });
  if (history.length > POINTS) history.shift();
  last = { now, ...sums };
}

function showFigures() {
  const now = history.at(-1), or = (value, text) => (Number.isFinite(value) ? text(value) : "-"), whole = (value) => value.toFixed(0);
  const figures = [
    ["requests in flight", ["flying"], whole(now.flying)],
    ["tokens written per s", ["tokens"], or(now.tokens, whole)],
    ["prompt tokens read per s", ["prompts"], or(now.prompts, whole)],
    ["KV moved per s", ["moved"], or(now.moved, (value) => bytes(Math.round(value)))],
    ["time to first token, p50 and p95", ["first50", "first95"], `${or(now.first50, ms)} / ${or(now.first95, ms)}`],
    ["time per token, p50 and p95", ["each50", "each95"], `${or(now.each50, ms)} / ${or(now.each95, ms)}`],
    ["failed in the last minute", ["failed"], whole(now.failed)],
  ];
  $("figures").replaceChildren(...figures.map(([name, keys, value]) => element("li", {}, element("span", { textContent: name }),
    element("b", { textContent: value }), sparkline(keys.map((key) => history.map((point) => point[key])), POINTS, name))));
}

// Rows by key, so that focus and open menus outlive a refresh.
function table(body, items, key, fill) {
  const old = new Map([...body.children].map((row) => [row.dataset.key, row]));
  items.forEach((item, index) => {
    const row = old.get(key(item)) ?? element("tr");
    row.dataset.key = key(item);
    old.delete(key(item));
    fill(row, item);
    if (body.children[index] !== row) body.insertBefore(row, body.children[index] ?? null);
  });
  for (const row of old.values()) row.remove();
}

function cells(row, texts) {
  texts.forEach((text, index) => {
    const cell = row.children[index] ?? row.appendChild(element("td"));
    if (cell.textContent !== text) cell.textContent = text;
  });
}

const nameOf = (worker) => worker.info?.worker_id ?? worker.address;

function showWorkers(cluster, actions) {
  document.querySelector("th.act").hidden = !actions.length;
  const workers = [...cluster.workers].sort((a, b) => nameOf(a).localeCompare(nameOf(b)));
  table($("workers"), workers, (worker) => worker.address, (row, worker) => {
    const load = worker.load ?? {}, info = worker.info ?? {}, blocks = info.total_blocks ?? 0;
    const free = blocks ? `${blocks - (load.used_blocks ?? 0)} of ${blocks}` : "-";
    cells(row, [info.worker_id || "?", short(load.role ?? info.role ?? "?"), short(worker.state), String(load.running_requests ?? "-"),
      String(load.waiting_requests ?? "-"), free, String(load.held_handoffs ?? "-"), worker.address]);
    row.children[2].className = { ready: "good", starting: "warn", draining: "warn", quiet: "warn" }[short(worker.state)] ?? "bad";
    row.title = [worker.detail, prediction(worker)].filter(Boolean).join("\n");
    if (actions.length && !row.children[8]) row.append(element("td", {}, ...buttons(info.worker_id, actions)));
  });
}

function buttons(worker, actions) {
  const made = [];
  if (actions.includes("Drain")) {
    made.push(element("button", { type: "button", textContent: "Drain", onclick: () =>
      act("Drain", { worker_id: worker }, `Drain ${worker}? It takes no new requests.`) }));
  }
  if (actions.includes("SetRole")) {
    const roles = ["prefill", "decode", "both"].map((role) => element("option", { value: role, textContent: role }));
    const choice = element("select", { ariaLabel: `New role of ${worker}` }, element("option", { value: "", textContent: "role" }), ...roles);
    choice.onchange = async () => {
      const role = choice.value;
      choice.value = "";
      if (role) await act("SetRole", { worker_id: worker, role: `ROLE_${role.toUpperCase()}` }, `Make ${worker} a ${role} worker?`);
    };
    made.push(choice);
  }
  return made;
}

async function act(name, body, question) {
  $("confirm-text").textContent = question;
  if ((await ask($("confirm"))) !== "yes") return;
  const response = await fetch(`/console/api/actions/${name}`, {
    method: "POST", headers: { ...headers(true), "Content-Type": "application/json" }, body: JSON.stringify(body) });
  if (response.ok) return;
  note((await response.json()).error?.message ?? `status ${response.status}`);
  if (response.status === 401 || response.status === 403) askKeys();
}

function showLinks(cluster) {
  table($("links"), cluster.links, (link) => `${link.prefill_worker_id}>${link.decode_worker_id}`, (row, link) => {
    const measured = Number(link.bytes_per_s) > 0;
    cells(row, [link.prefill_worker_id, link.decode_worker_id, short(link.state), measured ? (link.bytes_per_s / 1e9).toFixed(2) : "-",
      measured ? Number(link.latency_ms).toFixed(3) : "-", link.lanes.join(", ") + (link.rdma ? " (RDMA)" : ""), String(link.failures), link.detail]);
  });
  const counts = cluster.handoffs ?? {};
  $("handoffs").textContent = `Hand-offs: ${counts.offered ?? 0} offered, ${counts.receiving ?? 0} receiving, ${counts.received ?? 0} received, `
    + `${counts.released ?? 0} released, ${counts.lost ?? 0} lost. Prompts recomputed on decode: ${cluster.recomputed_prompts}.`;
  $("placing").textContent = placing(cluster);
}

function showRequests() {
  const wanted = $("filter").value, part = $("find").value.trim();
  let shown = latest.filter((request) => (!part || request.request_id.includes(part)) && (!wanted
    || (wanted === "retried" ? request.failed_attempts.length > 0 : request.state === `REQUEST_STATE_${wanted}`)));
  if ($("order").value === "slow") shown = [...shown].sort((a, b) => total(b) - total(a));
  shown = shown.slice(0, SHOWN);
  $("empty").hidden = shown.length > 0;
  const longest = Math.max(1, ...shown.map(total)), list = $("list"), ids = new Set(shown.map((request) => request.request_id));
  for (const [id, row] of rows) if (!ids.has(id)) { row.remove(); rows.delete(id); }
  shown.forEach((request, index) => {
    const row = rows.get(request.request_id) ?? newRow(request.request_id);
    fillRow(row, request, longest);
    if (list.children[index] !== row) list.insertBefore(row, list.children[index] ?? null);
  });
}

function newRow(id) {
  const button = element("button", { type: "button", className: "row" }, ...["id", "state", "gantt", "time", "slow"].map((name) =>
    element("span", { className: name })));
  const row = element("li", {}, button, element("div", { className: "detail", hidden: !open.has(id) }));
  row.id = `request-${id}`;
  button.setAttribute("aria-expanded", String(open.has(id)));
  button.addEventListener("click", () => {
    open.has(id) ? open.delete(id) : open.add(id);
    button.setAttribute("aria-expanded", String(open.has(id)));
    row.lastChild.hidden = !open.has(id);
    showRequests();
  });
  rows.set(id, row);
  return row;
}

function fillRow(row, request, longest) {
  const [id, state, bar, time, slow] = row.firstChild.children, whole = total(request), strokes = phases(request);
  id.textContent = request.request_id;
  id.title = request.request_id;
  state.textContent = short(request.state);
  state.className = `state ${{ finished: "good", running: "", failed: "bad", cancelled: "warn" }[short(request.state)]}`;
  bar.replaceChildren(gantt(strokes, longest));
  time.textContent = ms(whole);
  slow.textContent = slowest(request);
  if (open.has(request.request_id)) row.lastChild.replaceChildren(...details(request, strokes, whole));
}

function details(request, strokes, whole) {
  const body = element("tbody", {}, ...strokes.map((phase) => {
    const row = element("tr");
    cells(row, [phase.name, ms(phase.start), ms(phase.end - phase.start), phase.worker ?? "", phase.note ?? ""]);
    return row;
  }));
  const head = element("tr", {}, ...["stroke", "from", "took", "worker", ""].map((name) => element("th", { textContent: name })));
  const time = request.timeline, each = perToken(request);
  const facts = `prompt ${request.prompt_tokens} tokens, answer ${request.completion_tokens}; first token after `
    + `${time.first_token_ms ? ms(time.first_token_ms) : "-"}${Number.isFinite(each) ? `, then ${ms(each)} a token` : ""}; placed ${time.attempts} time${time.attempts === 1 ? "" : "s"}; `
    + `${time.decode_computed_tokens} prompt tokens computed on decode${request.why ? `; ways by cost: ${request.why}` : ""}`;
  const trace = request.trace_id && (traceUrl
    ? element("a", { href: traceUrl + request.trace_id, target: "_blank", rel: "noopener", textContent: `trace ${request.trace_id}` })
    : `trace ${request.trace_id}`);
  return [element("p", {}, `${request.request_id}: ${facts} `, trace || ""), element("div", {}, gantt(strokes, whole)),
    element("table", {}, element("thead", {}, head), body), ...(request.failure ? [element("p", { className: "bad", textContent: request.failure })] : [])];
}

function showModels(models) {
  const names = [...$("model").options].map((option) => option.value);
  if (names.join() !== models.join()) $("model").replaceChildren(...models.map((name) => element("option", { value: name, textContent: name })));
}

function ask(dialog) {
  return new Promise((resolve) => {
    dialog.returnValue = "";
    dialog.addEventListener("close", () => resolve(dialog.returnValue), { once: true });
    dialog.showModal();
  });
}

async function askKeys() {
  asked = true;
  if ($("keys").open) return;
  $("api-key").value = sessionStorage.getItem("api-key") ?? "";
  $("admin-key").value = sessionStorage.getItem("admin-key") ?? "";
  if ((await ask($("keys"))) !== "save") return;
  for (const name of ["api-key", "admin-key"]) $(name).value ? sessionStorage.setItem(name, $(name).value) : sessionStorage.removeItem(name);
  asked = false;
}

const THEMES = { auto: ["Auto", "as the system has them"], light: ["Light", "light"], dark: ["Dark", "dark"] };

function paint() {
  const theme = localStorage.getItem("theme") ?? "auto";
  const dark = theme === "dark" || (theme === "auto" && matchMedia("(prefers-color-scheme: dark)").matches);
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  $("theme").textContent = THEMES[theme][0];
  $("theme").setAttribute("aria-label", `Colours: ${THEMES[theme][1]}`);
}

$("theme").addEventListener("click", () => {
  const names = Object.keys(THEMES), now = localStorage.getItem("theme") ?? "auto";
  localStorage.setItem("theme", names[(names.indexOf(now) + 1) % names.length]);
  paint();
});
addEventListener("resize", () => { if (drawn) draw(drawn); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", paint);
$("keys-open").addEventListener("click", askKeys);
$("hold").addEventListener("click", () => {
  held = !held;
  $("hold").setAttribute("aria-pressed", String(held));
  if (!held) showRequests();
});
for (const id of ["filter", "order"]) $(id).addEventListener("change", showRequests);
$("find").addEventListener("input", showRequests);
startChat(headers, (id) => { open.add(id); });
paint();
poll();
