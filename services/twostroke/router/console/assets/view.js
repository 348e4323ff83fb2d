// From the router's answer to what is shown. No DOM, no network.

export const short = (name) => name.replace(/^[A-Z]+_STATE_|^ROLE_/, "").toLowerCase();

export function ms(value) {
  if (value >= 10000) return `${(value / 1000).toFixed(1)} s`;
  return value >= 100 ? `${value.toFixed(0)} ms` : `${value.toFixed(1)} ms`;
}

export function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) { value /= 1024; unit += 1; }
  return `${unit ? value.toFixed(1) : value} ${units[unit]}`;
}

export function percentile(values, share) {
  if (!values.length) return NaN;
  const sorted = [...values].sort((a, b) => a - b);
  return sorted[Math.min(sorted.length - 1, Math.ceil(share * sorted.length) - 1)];
}

export const running = (request) => request.state === "REQUEST_STATE_RUNNING";

export function total(request) {
  return running(request) ? request.age_ms : Math.max(request.timeline.finished_ms, ...phases(request).map((p) => p.end));
}

// The strokes of a request as {kind, name, start, end, worker, note}, in milliseconds since the router got it. They
// overlap where KV moves while prefill still computes.
export function phases(request) {
  const time = request.timeline, now = running(request) ? request.age_ms : time.finished_ms, found = [];
  let start = 0;
  request.failed_attempts.forEach((attempt, index) => {
    const placed = Math.max(attempt.placed_ms, start);
    if (placed > start) found.push({ kind: "queue", name: "place", start, end: placed });
    found.push({ kind: "failed", name: `attempt ${index + 1}`, start: placed, end: attempt.failed_ms,
      worker: [attempt.prefill_worker_id, attempt.decode_worker_id].filter(Boolean).join(", "), note: attempt.reason });
    start = attempt.failed_ms;
  });
  const answeredBefore = request.failed_attempts.length && time.first_token_ms && time.first_token_ms <= start;
  const decoding = time.decode_started_ms > start ? time.decode_started_ms : 0;
  if (answeredBefore) {
    // A later attempt computes the prompt again; the first token is the first attempt's.
    found.push({ kind: "prefill", name: "prefill again", start, end: decoding || now, worker: time.prefill_worker_id });
  } else if (!time.first_token_ms) {
    found.push({ kind: "queue", name: running(request) ? "queue or prefill" : "queue", start, end: Math.max(now, start) });
  } else {
    const began = Math.max(time.prefill_started_ms, start);
    found.push({ kind: "queue", name: "queue", start, end: began });
    found.push({ kind: "prefill", name: "prefill", start: began, end: time.prefill_finished_ms, worker: time.prefill_worker_id });
    const together = time.prefill_worker_id === time.decode_worker_id;
    if (decoding && !together) {
      found.push({ kind: "handoff", name: "hand-off", start: Math.min(time.prefill_finished_ms, decoding), end: decoding,
        note: `${bytes(Number(time.transferred_bytes))} for ${time.transferred_tokens} tokens` });
    } else if (!decoding && now > time.prefill_finished_ms) {
      found.push({ kind: "handoff", name: "hand-off", start: time.prefill_finished_ms, end: now });
    }
  }
  if (decoding) found.push({ kind: "decode", name: "decode", start: decoding, end: Math.max(now, decoding), worker: time.decode_worker_id });
  return found;
}

// The stroke that took longest, with its share of the whole.
export function slowest(request) {
  const whole = total(request), found = phases(request);
  if (!found.length || whole <= 0) return "";
  const worst = found.reduce((a, b) => (b.end - b.start > a.end - a.start ? b : a));
  return `${worst.name} ${ms(worst.end - worst.start)}, ${Math.round(((worst.end - worst.start) / whole) * 100)}%`;
}

// Milliseconds per token after the first; NaN where there is none.
export function perToken(request) {
  const time = request.timeline, tokens = request.completion_tokens;
  return tokens > 1 && !running(request) ? (time.finished_ms - time.first_token_ms) / (tokens - 1) : NaN;
}

// Sums over workers that only grow, while none of them restarts.
export function counters(cluster) {
  const sum = (name) => cluster.workers.reduce((all, worker) => all + Number(worker.load?.[name] ?? 0), 0);
  return { generated: sum("generated_tokens"), computed: sum("computed_prompt_tokens"), moved: sum("kv_received_bytes") };
}

// What a router expects of a worker's steps.
export function prediction(worker) {
  const steps = worker.steps;
  if (!steps || !Number(steps.observed)) return "";
  return `a step with one answer ${ms(steps.decode_ms)}, a prompt token ${steps.prefill_token_us.toFixed(1)} us, `
    + `error ${Math.round((steps.error ?? 0) * 100)}% after ${steps.observed} steps`;
}

// The ways that are open, and what the controller of roles found.
export function placing(cluster) {
  const ways = (cluster.ways ?? []).join(", ") || "none", advice = cluster.role_advice;
  return `Ways open: ${ways}. KV blocks known in prefix caches: ${cluster.known_blocks ?? 0}.` + (advice ? ` Roles: ${advice.why}.` : "");
}
