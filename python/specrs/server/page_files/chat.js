// The conversation: messages, answers, comparisons, keys. What the other files offer is put together here.

const EXAMPLES = [
  ["the second class repeats the first, so drafts are often right", "Write a Python class Queue and a class Stack with the same methods."],
  ["the answer repeats the prompt, which suits drafters that copy", "Repeat this list as JSON, one object with name and price per line:\napples 3, pears 5, plums 12, figs 8, grapes 7, melons 9"],
  ["new sentences are hard to guess", "Explain how a hash table works. Then give a short example in Python."],
  ["lists have a regular form", "Plan three days in Lisbon as a numbered list, with a morning and an evening for each day."],
];

let chat = newChat();
let running = null; // the AbortController of what is written now
const views = new Set(); // of the runs on the page

function newChat() {
  return { id: Date.now().toString(36) + Math.random().toString(36).slice(2, 8), created: new Date().toISOString(), messages: [] };
}

const finalRun = (message) => message.runs.at(-1);

// Whether all runs of an answer have one text.
const sameText = (runs) => runs.every((run) => run.reasoning + run.content === runs[0].reasoning + runs[0].content);

// What a request says: the system prompt and the messages so far, without those that nothing answered.
function said(messages) {
  const system = at("system").value.trim(), all = system ? [{ role: "system", content: system }] : [];
  messages.forEach((message, i) => {
    const next = messages[i + 1];
    if (message.role === "user" && (!next || finalRun(next)?.content)) all.push({ role: "user", content: message.content });
    if (message.role === "assistant" && finalRun(message)?.content) all.push({ role: "assistant", content: finalRun(message).content });
  });
  return all;
}

function compare(runs) {
  const [without, drafted] = runs, speed = (run) => numTokens(run) / run.seconds;
  if (runs.some((run) => run.error || run.finish_reason === "stopped" || !numTokens(run))) return "Not compared: an answer did not end.";
  const texts = runs.map((run) => run.reasoning + run.content), same = sameText(runs);
  let first = 0;
  while (!same && texts[0][first] === texts[1][first]) first += 1;
  const where = same ? "" : ` (from character ${first + 1} on${without.request.temperature > 0 ? "; above temperature 0 each run draws anew" : ""})`;
  return `With drafts: ${(speed(drafted) / speed(without)).toFixed(2)}\u00d7 the speed \u00b7 same text: ${same ? "yes" : "no"}${where}`;
}

class AnswerView {
  constructor(message) {
    this.message = message;
    this.runs = element("div", "runs");
    this.verdict = element("p", "verdict");
    this.verdict.dataset.tip = "Speed: tokens per second with drafts, divided by those without. Drafts never change what the model would write: at temperature 0 the texts are equal.";
    this.verdict.hidden = true;
    this.verdict.tabIndex = 0;
    this.tools = element("div", "tools");
    this.element = element("article", "", element("h2", "", "assistant"), ...(message.compared ? [this.verdict] : []), this.runs, this.tools);
    this.element.classList.toggle("compared", message.compared);
    this.views = message.runs.map((run) => new RunView(run, message.compared));
    for (const view of this.views) {
      views.add(view);
      view.draw(false, true);
      this.runs.append(view.element);
    }
  }

  finish() {
    const { message } = this, index = () => chat.messages.indexOf(message);
    if (message.compared) { this.verdict.textContent = compare(message.runs); this.verdict.hidden = false; }
    const copy = button("Copy", "Copy the answer's text.", () => copyText(copy, finalRun(message).content));
    const retry = button("Retry", "Delete this answer and ask again, with the settings as they are now.", () => {
      if (running || index() < 0) return;
      for (const view of this.views) views.delete(view);
      chat.messages.splice(index());
      this.element.remove();
      respond(message.compared);
    });
    retry.className = "retry";
    const png = button("PNG", "Save this answer as a picture.", () => exportPng(chat.messages[index() - 1].content, message.runs, this.verdict.textContent));
    this.tools.replaceChildren(copy, retry, png);
  }
}

async function copyText(made, text) {
  try { await navigator.clipboard.writeText(text); say(made, "Copied"); }
  catch { say(made, "Not allowed here"); }
}

function showUser(message) {
  const copy = button("Copy", "Copy this message.", () => copyText(copy, message.content));
  at("chat").append(element("article", "user", element("h2", "", "user"), element("div", "text", message.content), element("div", "tools", copy)));
}

// Only the last answer can be asked for again.
function settle() {
  at("empty").hidden = chat.messages.length > 0;
  const all = [...document.querySelectorAll(".retry")];
  for (const retry of all) retry.hidden = retry !== all.at(-1);
}

function open(other) {
  stop();
  chat = other;
  views.clear();
  at("chat").replaceChildren();
  for (const message of chat.messages) {
    if (message.role === "user") showUser(message);
    else {
      const view = new AnswerView(message);
      view.finish();
      at("chat").append(view.element);
    }
  }
  settle();
  hideTip();
  at("main").scrollTop = at("main").scrollHeight;
}

// One frame: first reads where readers are, then writes, then scrolls. So the browser lays the page out once.
function step(run, view, seconds, ended = false) {
  const main = at("main"), follows = [atEnd(main), view.follows];
  view.draw(false, ended, seconds);
  if (run.iterations.length) showFigures(run);
  if (follows[0]) main.scrollTop = main.scrollHeight;
  view.follow(follows[1]);
}

// Draws what came, once a frame, while `going()`.
function animate(run, view, going) {
  const started = performance.now();
  const frame = () => {
    if (!going()) return;
    step(run, view, (performance.now() - started) / 1000);
    requestAnimationFrame(frame);
  };
  requestAnimationFrame(frame);
}

// What runs for an answer: one, or one without and one with drafts.
function plannedRuns(compared) {
  const request = requested(true);
  if (!compared) return [newRun("Answer", request)];
  if (request.num_speculative_tokens === 0) delete request.num_speculative_tokens;
  const seed = Math.floor(Math.random() * 2 ** 31);
  return [newRun("Without drafts", { ...requested(false), seed }), newRun("With drafts", { ...request, seed })];
}

// Answers the last message. A comparison runs with drafts first: a drafter that learns from other answers must not have
// seen the same one. Each of its runs reads the prompt itself, and finds nothing of the other in the prefix cache.
async function respond(compared) {
  const asked = chat, messages = said(asked.messages), message = { role: "assistant", compared, runs: plannedRuns(compared) };
  const view = new AnswerView(message), controller = (running = new AbortController());
  asked.messages.push(message);
  at("chat").append(view.element);
  settle();
  setBusy(true);
  for (const i of compared ? [1, 0] : [0]) {
    const run = message.runs[i], shown = view.views[i];
    if (controller.signal.aborted) break;
    let going = true;
    animate(run, shown, () => going);
    await generate(run, messages, compared ? { cache_salt: String(Math.random()) } : {}, controller.signal, (tokens) => shown.take(tokens));
    going = false;
    step(run, shown, run.seconds, true);
  }
  view.finish();
  saveChat(asked);
  if (running !== controller) return;
  running = null;
  showFigures(finalRun(message));
  if (compared) view.verdict.scrollIntoView({ block: "start" });
  settle();
  setBusy(false);
  if (!locked) at("prompt").focus();
}

function setBusy(busy) {
  for (const name of ["send", "compare"]) at(name).disabled = busy || (name === "compare" && at("k").disabled);
  at("stop").disabled = !busy;
  at("chat").setAttribute("aria-busy", String(busy));
}

function stop() {
  if (!running) return;
  running.abort();
  running = null;
  setBusy(false);
  settle();
}

function send(compared) {
  const content = at("prompt").value;
  if (!content.trim() || running) return;
  at("prompt").value = "";
  chat.messages.push({ role: "user", content });
  showUser(chat.messages.at(-1));
  at("main").scrollTop = at("main").scrollHeight;
  respond(compared);
}

function setPanel(open) {
  document.body.classList.toggle("panel", open);
  at("panel-open").setAttribute("aria-expanded", String(open));
}

at("form").addEventListener("submit", (event) => { event.preventDefault(); send(false); });
at("compare").addEventListener("click", () => send(true));
at("stop").addEventListener("click", stop);
at("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send((event.ctrlKey || event.metaKey) && !at("k").disabled);
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  hideTip();
  if (at("history").matches(":popover-open")) return;
  if (document.body.classList.contains("panel")) setPanel(false);
  else stop();
});
// The iteration before or after another, which may be in another line. `which`: "next" or "previous".
function sibling(span, which) {
  const line = span.parentElement[which + "ElementSibling"];
  const found = span[which + "ElementSibling"] || (line && (which === "next" ? line.firstElementChild : line.lastElementChild));
  return found && found.classList.contains("more") ? sibling(found, which) : found;
}

at("chat").addEventListener("keydown", (event) => {
  const span = event.target.closest(".iteration");
  const next = span && { ArrowRight: sibling(span, "next"), ArrowLeft: sibling(span, "previous") }[event.key];
  if (!next) return;
  event.preventDefault();
  span.tabIndex = -1;
  next.tabIndex = 0;
  next.focus();
});
at("chat").addEventListener("click", (event) => {
  const step = event.target.closest(".step");
  if (!step) return;
  const span = [...views].map((view) => view.writer.spans?.get(iterationOf.get(step))).find(Boolean);
  if (span) { span.scrollIntoView({ block: "center" }); span.focus(); }
});
for (const scroller of ["main", "panel"]) at(scroller).addEventListener("scroll", hideTip);
at("new").addEventListener("click", () => { open(newChat()); at("prompt").focus(); });
at("colours").addEventListener("change", () => { for (const view of views) view.redraw(); });
at("export-json").addEventListener("click", () => exportJson(chat));
at("panel-open").addEventListener("click", () => setPanel(!document.body.classList.contains("panel")));
at("history").addEventListener("beforetoggle", () => listChats(open));
at("forget").addEventListener("click", () => { write("chats", []); listChats(open); });
at("key").addEventListener("change", begin);
for (const name of ["temperature", "top-p"]) at(name).addEventListener("input", () => { at(name + "-shown").value = at(name).value; });

async function begin() {
  await readServer();
  if (!locked) { setPanel(false); at("prompt").focus(); }
}

restoreSettings();
for (const name of ["temperature", "top-p"]) at(name + "-shown").value = at(name).value;
at("examples").append(...EXAMPLES.map(([name, text]) => button(text, `An example: ${name}.`, () => { at("prompt").value = text; at("prompt").focus(); })));
if (savedChats().length) open(savedChats()[0]);
begin().then(watch);
