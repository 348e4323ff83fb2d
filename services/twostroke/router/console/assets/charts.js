// Small charts and the picture of the cluster, as SVG.

import { short } from "./view.js";

const SVG = "http://www.w3.org/2000/svg";

export function svg(name, attributes = {}, ...children) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

// Lines of equally spaced values; NaN leaves a gap.
export function sparkline(series, length, label) {
  const top = Math.max(1e-9, ...series.flat().filter(Number.isFinite));
  const lines = series.map((values, index) => {
    let path = "", pen = false;
    values.forEach((value, i) => {
      if (!Number.isFinite(value)) { pen = false; return; }
      const x = ((length - values.length + i) / (length - 1)) * 100, y = 23 - (value / top) * 21;
      path += `${pen ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`;
      pen = true;
    });
    return svg("path", { d: path || "M0 23", class: index ? "spark second" : "spark" });
  });
  return svg("svg", { viewBox: "0 0 100 24", preserveAspectRatio: "none", role: "img", "aria-label": label }, ...lines);
}

export function gantt(phases, whole) {
  const scale = 1000 / Math.max(whole, 1e-6);
  const bars = phases.map((phase) => {
    const width = Math.max((phase.end - phase.start) * scale, 3);
    const bar = svg("rect", { class: phase.kind, x: Math.min(phase.start * scale, 997), y: phase.kind === "handoff" ? 8 : 2, width,
      height: phase.kind === "handoff" ? 12 : 20 });
    bar.append(svg("title", {}, `${phase.name} ${(phase.end - phase.start).toFixed(1)} ms`));
    return bar;
  });
  return svg("svg", { viewBox: "0 0 1000 24", preserveAspectRatio: "none", "aria-hidden": "true" }, ...bars);
}

const BOX = 62, GAP = 14;

// Prefill workers on the left, decode workers on the right, the ways that KV takes between them.
export function topology(cluster, width) {
  const roleOf = (worker) => short(worker.load?.role ?? worker.info?.role ?? "");
  const known = [...cluster.workers].sort((a, b) => (a.info?.worker_id ?? a.address).localeCompare(b.info?.worker_id ?? b.address));
  const decode = known.filter((worker) => roleOf(worker) === "decode");
  const prefill = known.filter((worker) => roleOf(worker) !== "decode");
  const box = Math.min(240, width * 0.38), height = Math.max(prefill.length, decode.length, 1) * (BOX + GAP) + 20;
  const places = new Map(), parts = [];
  const column = (workers, x, title) => {
    parts.push(svg("text", { class: "small", x, y: 12 }, title));
    workers.forEach((worker, index) => {
      const y = 20 + index * (BOX + GAP);
      places.set(worker.info?.worker_id ?? worker.address, { x, y });
      parts.push(card(worker, x, y, box));
    });
  };
  column(prefill, 1, "prefill");
  column(decode, width - box - 1, "decode");
  // Labels stand where each has a line of its own; the table has all of them.
  const many = prefill.length > 1 && decode.length > 1, atSource = prefill.length > 1;
  const lines = cluster.links.flatMap((link) => {
    const from = places.get(link.prefill_worker_id), to = places.get(link.decode_worker_id);
    if (!from || !to || from.x === to.x) return [];
    const x1 = from.x + box, y1 = from.y + BOX / 2, x2 = to.x, y2 = to.y + BOX / 2, middle = (x1 + x2) / 2;
    const line = svg("path", { class: short(link.state), d: `M${x1} ${y1}C${middle} ${y1} ${middle} ${y2} ${x2} ${y2}` });
    line.append(svg("title", {}, linkText(link)));
    if (many) return [line];
    const rate = Number(link.bytes_per_s) ? `${(Number(link.bytes_per_s) / 1e9).toFixed(1)} GB/s` : short(link.state);
    const at = atSource ? { class: "small", x: x1 + 6 } : { class: "small", x: x2 - 6, "text-anchor": "end" };
    const above = (atSource ? y1 : y2) - 6;
    return [line, svg("text", { ...at, y: above }, rate), svg("text", { ...at, y: above + 17 }, (link.lanes[0] ?? "").split("/")[0])];
  });
  const label = `${prefill.length} prefill and ${decode.length} decode workers, ${cluster.links.length} links`;
  return svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label }, ...lines, ...parts);
}

function card(worker, x, y, width) {
  const load = worker.load, blocks = worker.info?.total_blocks ?? 0, used = load?.used_blocks ?? 0;
  const share = blocks ? Math.min(1, used / blocks) : 0;
  const state = short(worker.state);
  return svg("g", { class: state },
    svg("rect", { class: "box", x, y, width, height: BOX, rx: 6 }),
    svg("text", { x: x + 8, y: y + 18 }, worker.info?.worker_id ?? worker.address),
    svg("text", { class: "small", x: x + 8, y: y + 35 },
      state === "ready" ? `${load?.running_requests ?? 0} run, ${load?.waiting_requests ?? 0} wait` : state),
    svg("rect", { class: "kv", x: x + 8, y: y + 42, width: width - 16, height: 4 }),
    svg("rect", { class: "kv used", x: x + 8, y: y + 42, width: (width - 16) * share, height: 4 }),
    svg("text", { class: "small", x: x + 8, y: y + 57 }, blocks ? `KV ${Math.round((1 - share) * 100)}% free` : ""));
}

export function linkText(link) {
  const rate = Number(link.bytes_per_s) ? `, ${(Number(link.bytes_per_s) / 1e9).toFixed(2)} GB/s` : "";
  return `${link.prefill_worker_id} to ${link.decode_worker_id}: ${short(link.state)}${rate} ${link.lanes.join(", ")} ${link.detail}`;
}
