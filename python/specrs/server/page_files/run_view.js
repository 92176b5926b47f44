// One run on the page: clock, folded reasoning, text, timeline. What came is appended; nothing that stands is made again.

const STEPS_PER_BLOCK = 64; // of a timeline, so that one more step lays out one block

const atEnd = (scroller) => scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < 60;

// How many characters of a run's text are reasoning; null while its first characters may become a <think>.
function reasoningEnd(run, ended) {
  if (run.reasoning) return run.reasoning.length;
  const start = run.content.trimStart();
  if (start.startsWith("<think>")) {
    const end = run.content.indexOf("</think>");
    return end < 0 ? run.content.length : end + "</think>".length;
  }
  return !ended && "<think>".startsWith(start) ? null : 0;
}

// Text whose tokens have the colour of who wrote them: a span for each iteration, in it one for the accepted drafts and one
// for the model's token. Each line is an element, so that the browser lays out the last line only; an iteration that goes
// on in the next line goes on in a span of class `more` there.
class Coloured {
  constructor(reasoning, content) {
    Object.assign(this, { reasoning, content, tokens: [], text: "", length: 0, spans: new WeakMap(), last: null });
  }

  append(tokens, text, end, ended) {
    this.tokens.push(...tokens);
    const placed = place(this.tokens, this.text + text, ended);
    for (const group of placed.groups) {
      const writers = new Set(group.tokens.map((token) => token.writer)), writer = writers.size === 1 ? [...writers][0] : "both";
      const into = this.length < end ? this.reasoning : this.content;
      for (const piece of group.text.split(/(?<=\n)/)) this.add(piece, writer, this.spanFor(group.tokens.at(-1).iteration, into));
      this.length += group.text.length;
    }
    this.tokens = placed.tokens;
    this.text = placed.text;
    if (!ended) return;
    const cut = Math.max(0, end - this.length);
    this.reasoning.append(this.text.slice(0, cut));
    this.content.append(this.text.slice(cut));
  }

  add(text, writer, span) {
    const part = span.lastElementChild;
    if (!iterationOf.get(span).num_draft_tokens) { span.classList.add(writer); span.append(text); }
    else if (part && part.className === writer) part.append(text);
    else span.append(element("span", writer, text));
  }

  // The span that an iteration's next text belongs into.
  spanFor(iteration, into) {
    const { last } = this, first = into.firstElementChild === null, ends = last !== null && last.textContent.endsWith("\n");
    if (last !== null && iterationOf.get(last) === iteration && into.contains(last) && !ends) return last;
    const more = this.spans.has(iteration) && into.contains(this.spans.get(iteration)), span = (this.last = element("span", more ? "iteration more" : "iteration"));
    iterationOf.set(span, iteration);
    if (!more) {
      this.spans.set(iteration, span);
      span.tabIndex = first ? 0 : -1;
    }
    if (first || ends) into.append(element("div", "line", span));
    else into.lastElementChild.append(span);
    return span;
  }
}

// The same text as Markdown, without colours.
class Formatted {
  constructor(reasoning, content) { this.parts = [new Markdown(reasoning), new Markdown(content)]; this.length = 0; }

  append(tokens, text, end) {
    const cut = Math.max(0, Math.min(text.length, end - this.length));
    this.parts[0].append(text.slice(0, cut));
    this.parts[1].append(text.slice(cut));
    this.length += text.length;
  }
}

// A column for each iteration: the model's own token, then accepted drafts, then rejected ones.
class Timeline {
  constructor(run) {
    this.run = run;
    this.element = element("div", "timeline");
    this.element.setAttribute("role", "img");
    this.numSteps = this.rows = 0;
    this.totals = { drafted: 0, rejected: 0, tokens: 0 };
    this.caption = element("p", "caption");
  }

  draw() {
    const fresh = this.run.iterations.slice(this.numSteps);
    for (const iteration of fresh) {
      if (this.numSteps++ % STEPS_PER_BLOCK === 0) this.element.append(element("span", "steps"));
      const step = element("i", "step"), blocks = this.element.lastElementChild;
      iterationOf.set(step, iteration);
      step.style.setProperty("--a", numAccepted(iteration));
      step.style.setProperty("--r", iteration.rejected.length);
      blocks.append(step);
      blocks.style.setProperty("--count", blocks.childElementCount);
      this.totals.drafted += iteration.num_draft_tokens;
      this.totals.rejected += iteration.rejected.length;
      if (iteration.num_draft_tokens >= this.rows) this.element.style.setProperty("--rows", (this.rows = iteration.num_draft_tokens + 1));
    }
    if (!fresh.length) return;
    const { drafted, rejected } = this.totals, steps = `${this.numSteps} iteration${this.numSteps === 1 ? "" : "s"}`;
    this.caption.textContent = drafted ? `${steps}: ${drafted} tokens drafted, ${drafted - rejected} accepted, ${rejected} rejected` : `${steps}: nothing drafted`;
    this.element.setAttribute("aria-label", "Timeline of " + this.caption.textContent);
  }
}

class RunView {
  constructor(run, compared) {
    this.run = run;
    this.pending = [];
    this.clock = element("p", "clock");
    this.summary = element("summary", "", "Reasoning");
    this.reasoning = element("div");
    this.fold = element("details", "reasoning", this.summary, this.reasoning);
    this.text = element("div");
    this.body = element("div", "body", this.fold, this.text);
    this.timeline = new Timeline(run);
    this.fault = element("p", "error");
    this.element = element("section", "run", ...(compared ? [element("h3", "", run.title), this.clock] : []), this.body, this.timeline.element,
      this.timeline.caption, ...(compared ? [] : [this.clock]), this.fault);
    if (compared) {
      this.body.tabIndex = 0; // it scrolls
      this.body.setAttribute("role", "group");
      this.body.setAttribute("aria-label", "Text " + run.title.toLowerCase());
    }
    this.redraw();
  }

  // From the beginning, in the way that the page shows text now.
  redraw() {
    const coloured = at("colours").checked, name = coloured ? "text" : "markdown";
    for (const part of [this.reasoning, this.text]) { part.replaceChildren(); part.className = name; }
    this.writer = new (coloured ? Coloured : Formatted)(this.reasoning, this.text);
    this.drawn = 0;
    this.pending = tokensOf(this.run);
    this.draw(true, this.ended);
  }

  take(tokens) { this.pending.push(...tokens); }

  // What has come since the last time. `seconds`: the clock of a run that goes on. Only writes: `follow` scrolls afterwards.
  draw(anew, ended = false, seconds = this.run.seconds) {
    const { run } = this;
    this.ended = ended;
    this.element.classList.toggle("busy", !ended);
    this.tell(seconds);
    this.fault.textContent = run.error || "";
    this.fault.hidden = !run.error;
    const end = reasoningEnd(run, ended), text = run.reasoning + run.content;
    if (end === null || !(anew || ended || this.pending.length || text.length > this.drawn)) return;
    this.writer.append(this.pending, text.slice(this.drawn), end, ended);
    this.pending = [];
    this.drawn = text.length;
    this.fold.hidden = end === 0;
    this.summary.textContent = `Reasoning, ${end} characters`;
    this.timeline.draw();
  }

  // Whether a reader is at the end of what scrolls, and so wants to stay there.
  get follows() { return atEnd(this.body); }

  follow(follows) {
    if (follows) this.body.scrollTop = this.body.scrollHeight;
    this.timeline.element.scrollLeft = this.timeline.element.scrollWidth;
  }

  tell(seconds) {
    const tokens = numTokens(this.run);
    if (this.ended && !tokens && !this.run.finish_reason) { this.clock.replaceChildren("not run yet"); return; }
    const parts = [element("b", "", seconds.toFixed(this.ended ? 2 : 1) + " s"), element("span", "dot", " \u00b7 "), `${tokens} tokens`];
    if (seconds > 0 && tokens) parts.push(` \u00b7 ${(tokens / seconds).toFixed(1)} tokens/s`);
    const told = parts.map((part) => part.textContent ?? part).join("");
    if (told !== this.told) this.clock.replaceChildren(...parts);
    this.told = told;
  }
}
