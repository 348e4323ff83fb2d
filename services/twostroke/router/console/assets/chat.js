// The chat box: one conversation, streamed.

const $ = (id) => document.getElementById(id);

export function startChat(headers, onAnswered) {
  let talk = [], stopper = null;
  const say = (role, text) => {
    const line = document.createElement("p");
    line.className = role;
    line.textContent = text;
    $("talk").append(line);
    $("talk").scrollTop = $("talk").scrollHeight;
    return line;
  };
  const busy = (is) => { $("send").disabled = is; $("stop").disabled = !is; };

  $("text").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); $("ask").requestSubmit(); }
  });
  $("stop").addEventListener("click", () => stopper?.abort());
  $("forget").addEventListener("click", () => { stopper?.abort(); talk = []; $("talk").replaceChildren(); $("text").focus(); });
  $("ask").addEventListener("submit", async (event) => {
    event.preventDefault();
    const text = $("text").value.trim();
    if (!text || stopper) return;
    $("text").value = "";
    const own = talk;
    own.push({ role: "user", content: text });
    say("user", text);
    stopper = new AbortController();
    busy(true);
    const line = say("assistant", ""), began = performance.now();
    const answer = { text: "", id: "", usage: null, firstMs: 0 };
    let trouble = "";
    try {
      const response = await fetch("/v1/chat/completions", {
        method: "POST", signal: stopper.signal, headers: { ...headers(), "Content-Type": "application/json" },
        body: JSON.stringify({ model: $("model").value, messages: own, max_tokens: Number($("tokens").value) || 128, stream: true,
          stream_options: { include_usage: true } }),
      });
      if (!response.ok) throw new Error((await response.json()).error?.message ?? `status ${response.status}`);
      for await (const event of events(response.body)) {
        if (event.error) throw new Error(event.error.message);
        answer.id ||= event.id;
        answer.usage = event.usage ?? answer.usage;
        const piece = event.choices?.[0]?.delta?.content ?? "";
        if (piece && !answer.firstMs) answer.firstMs = performance.now() - began;
        answer.text += piece;
        line.textContent = answer.text;
        $("talk").scrollTop = $("talk").scrollHeight;
      }
    } catch (error) {
      trouble = error.name === "AbortError" ? "stopped" : error.message;
    }
    stopper = null;
    busy(false);
    if (answer.text) own.push({ role: "assistant", content: answer.text }); else own.pop();
    say("facts", facts(answer, performance.now() - began, trouble));
    if (answer.id) onAnswered(answer.id);
  });
}

function facts(answer, wholeMs, trouble) {
  const parts = [];
  if (answer.firstMs) parts.push(`first token after ${answer.firstMs.toFixed(0)} ms`);
  if (answer.usage) parts.push(`${answer.usage.completion_tokens} tokens in ${(wholeMs / 1000).toFixed(1)} s`);
  if (trouble) parts.push(trouble);
  if (answer.id) parts.push(answer.id);
  return parts.join("; ");
}

async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) if (line.startsWith("data: ") && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
  }
}
