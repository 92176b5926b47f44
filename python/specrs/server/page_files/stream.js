// Requests, and the record of a run: what one answer asked for, its text, and what each iteration drafted and wrote.

const base = location.pathname.replace(/\/$/, "");
let locked = false; // the server wants a key that the page does not have

async function ask(path, options = {}) {
  const key = at("key").value, headers = key ? { Authorization: "Bearer " + key } : {};
  const reply = await fetch(base + path, { ...options, headers: { ...headers, ...options.headers } });
  locked = reply.status === 401;
  if (locked) {
    at("key-label").hidden = false;
    document.body.classList.add("panel");
    at("key").focus();
  }
  return reply;
}

async function* events(reply) {
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    buffer += value;
    const whole = buffer.split("\n\n");
    buffer = whole.pop();
    for (const event of whole) if (event !== "data: [DONE]") yield JSON.parse(event.slice(6));
  }
}

// What the settings ask for. `drafts` false: none, whatever K is set.
function requested(drafts) {
  const asked = { temperature: Number(at("temperature").value), top_p: Number(at("top-p").value), max_tokens: Number(at("max-tokens").value) };
  if (at("model").value) asked.model = at("model").value;
  if (!drafts) asked.num_speculative_tokens = 0;
  else if (!at("k").disabled && at("k").value !== "auto") asked.num_speculative_tokens = Number(at("k").value);
  return asked;
}

function newRun(title, request) {
  return { title, request, reasoning: "", content: "", iterations: [], seconds: 0, first_seconds: null, speculation: null, finish_reason: null, error: null };
}

function numTokens(run) {
  return run.iterations.reduce((sum, one) => sum + one.accepted.length + one.target.length, 0);
}

// The tokens of a run, as far as it has come. `writer`: whose token it is.
function tokensOf(run) {
  return run.iterations.flatMap((iteration) => [
    ...iteration.accepted.map((string) => ({ string, writer: "draft", iteration })),
    ...iteration.target.map((string) => ({ string, writer: "target", iteration })),
  ]);
}

// Adds the tokens of chunks to a run. A draft may be reported one chunk before its tokens.
class Recorder {
  constructor(run) { this.run = run; this.count = 0; this.drafted = new Map(); }

  take(strings, drafts, ms) {
    for (const draft of drafts) {
      const end = draft.start + draft.num_accepted_draft_tokens;
      const iteration = { ms, num_draft_tokens: draft.num_draft_tokens, accepted: [], rejected: draft.rejected_token_strs, target: [] };
      for (let i = draft.start; i <= end; i++) this.drafted.set(i, { iteration, writer: i < end ? "draft" : "target" });
    }
    return strings.map((string) => {
      const index = this.count++, plain = { iteration: { ms, num_draft_tokens: 0, accepted: [], rejected: [], target: [] }, writer: "target" };
      const { iteration, writer } = this.drafted.get(index) || plain;
      this.drafted.delete(index);
      if (this.run.iterations.at(-1) !== iteration) this.run.iterations.push(iteration);
      iteration[writer === "draft" ? "accepted" : "target"].push(string);
      return { string, writer, iteration };
    });
  }
}

// Streams one answer into `run`, and hands each chunk's tokens to `take`. Mutates the run; errors end in it.
async function generate(run, messages, salt, signal, take) {
  const recorder = new Recorder(run), started = performance.now();
  const body = {
    ...run.request, ...salt, messages, stream: true, per_request_spec_decode_metrics: "continuous", return_token_strs: true, return_drafts: true,
  };
  try {
    const reply = await ask("/v1/chat/completions", { method: "POST", body: JSON.stringify(body), headers: { "Content-Type": "application/json" }, signal });
    if (!reply.ok) throw new Error((await reply.json()).error.message);
    for await (const chunk of events(reply)) {
      if (chunk.error) throw new Error(chunk.error.message);
      const ms = Math.round(performance.now() - started);
      run.seconds = ms / 1000;
      for (const choice of chunk.choices) {
        run.reasoning += choice.delta.reasoning ?? choice.delta.reasoning_content ?? "";
        run.content += choice.delta.content ?? "";
        run.finish_reason = choice.finish_reason;
        const tokens = recorder.take(choice.token_strs || [], choice.drafts || [], ms);
        if (tokens.length && run.first_seconds === null) run.first_seconds = run.seconds;
        take(tokens);
      }
      run.speculation = (chunk.metrics && chunk.metrics.speculative_decoding) || run.speculation;
    }
  } catch (fault) {
    if (fault.name === "AbortError") run.finish_reason = "stopped";
    else run.error = fault.message;
  }
}

// Which tokens the text so far is made of: groups of tokens with their common text, and what is left of both. A token with
// a replacement character is a part of a character, whose text is there when a whole token follows, or at the end. Special
// tokens have no text.
function place(tokens, text, ended) {
  const groups = [], part = (token) => token.string.includes("\ufffd");
  let first = 0;
  while (first < tokens.length) {
    const string = tokens[first].string;
    if (!part(tokens[first])) {
      const found = text.startsWith(string) ? string : text.startsWith(string.trimStart()) ? string.trimStart() : null;
      if (found === null && !ended && string.startsWith(text)) break;
      if (found) groups.push({ tokens: [tokens[first]], text: found });
      text = text.slice((found || "").length);
      first += 1;
      continue;
    }
    let next = first;
    while (next < tokens.length && part(tokens[next])) next += 1;
    const end = next < tokens.length ? text.indexOf(tokens[next].string) : -1;
    if (end < 0 && !ended) break;
    const cut = end < 0 ? text.length : end;
    if (cut) groups.push({ tokens: tokens.slice(first, next), text: text.slice(0, cut) });
    text = text.slice(cut);
    first = next;
  }
  return { groups, tokens: tokens.slice(first), text };
}
