// A conversation as JSON, an answer as a picture.

const PICTURE = { width: 1000, margin: 32, line: 24, font: "15px ui-monospace, monospace", scale: 2, mostLines: 300 };

function save(blob, name) {
  const link = element("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

function exportJson(chat) {
  const whole = { format: "specrs-chat-1", exported: new Date().toISOString(), system: at("system").value, ...chat };
  save(new Blob([JSON.stringify(whole, null, 1)], { type: "application/json" }), "specrs-chat.json");
}

// What is drawn, top down: lines of parts `{text, colour, back, x}`, or the steps of a timeline.
class Picture {
  constructor() { this.context = element("canvas").getContext("2d"); this.context.font = PICTURE.font; this.ops = []; this.y = PICTURE.margin; }

  colour(name) { return getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim(); }

  line(parts, height = PICTURE.line) { this.ops.push({ y: this.y, parts, height }); this.y += height; }

  // Parts one after another, with a new line where one does not fit or says so.
  flow(parts) {
    const right = PICTURE.width - PICTURE.margin;
    let line = [], x = PICTURE.margin, numLines = 0;
    const end = () => { if (numLines++ < PICTURE.mostLines) this.line(line); line = []; x = PICTURE.margin; };
    for (const { text, ...style } of parts) {
      for (const [piece] of text.matchAll(/\n|[^\n]/gu)) {
        if (piece === "\n") { end(); continue; }
        const shown = piece === "\t" ? "    " : piece, width = this.context.measureText(shown).width;
        if (x + width > right) end();
        line.push({ text: shown, x, width, ...style });
        x += width;
      }
    }
    if (line.length) end();
    if (numLines > PICTURE.mostLines) this.line([{ text: "\u2026", x: PICTURE.margin, colour: "soft" }]);
  }

  words(text, colour = "fg") { this.flow([{ text, colour }]); }

  timeline(iterations) {
    const most = Math.max(1, ...iterations.map((one) => one.num_draft_tokens + 1)), cell = Math.min(6, 60 / most);
    const step = Math.min(8, (PICTURE.width - 2 * PICTURE.margin) / iterations.length);
    this.ops.push({ y: this.y + 6, iterations, most, cell, step });
    this.y += most * cell + 16;
  }

  paint() {
    const { canvas } = this.context, { scale, width, margin } = PICTURE;
    canvas.width = width * scale;
    canvas.height = (this.y + margin) * scale;
    const context = this.context;
    const fill = (name, x, y, w, h) => { context.fillStyle = this.colour(name); context.fillRect(x, y, w, h); };
    context.scale(scale, scale);
    context.font = PICTURE.font;
    context.textBaseline = "middle";
    fill("bg", 0, 0, width, this.y + margin);
    for (const op of this.ops) {
      for (const { x, width: wide, back } of op.parts || []) if (back) fill(back, x, op.y + 2, wide + 0.5, op.height - 4);
      for (const { text, x, colour } of op.parts || []) { context.fillStyle = this.colour(colour); context.fillText(text, x, op.y + op.height / 2); }
      (op.iterations || []).forEach((one, i) => {
        const x = margin + i * op.step, wide = Math.max(0.5, op.step - 1);
        let bottom = op.y + op.most * op.cell;
        const bar = (name, count) => { fill(name, x, bottom - count * op.cell, wide, count * op.cell); bottom -= count * op.cell; };
        bar("target-step", 1);
        bar("draft-step", numAccepted(one));
        bar("rejected-step", one.rejected.length);
      });
    }
    return new Promise((done) => canvas.toBlob(done, "image/png"));
  }
}

// An answer with its prompt, and each run's clock, coloured text and timeline.
async function exportPng(prompt, runs, verdict) {
  const picture = new Picture();
  picture.words(prompt, "soft");
  for (const [i, run] of runs.entries()) {
    picture.y += 12;
    picture.words(`${run.title}: ${run.seconds.toFixed(2)} s, ${numTokens(run)} tokens in ${run.iterations.length} iterations`);
    const placed = place(tokensOf(run), run.reasoning + run.content, true);
    const backOf = (group) => (new Set(group.tokens.map((token) => token.writer)).size === 1 ? group.tokens[0].writer : "both");
    const last = i === runs.length - 1 || !sameText(runs); // one text is drawn once
    if (last) picture.flow([...placed.groups.map((group) => ({ text: group.text, back: backOf(group), colour: "fg" })), { text: placed.text, colour: "fg" }]);
    if (run.iterations.length) picture.timeline(run.iterations);
  }
  if (verdict) { picture.y += 8; picture.words(verdict); }
  picture.y += 8;
  picture.flow([{ text: " accepted draft ", back: "draft", colour: "fg" }, { text: "  " }, { text: " model ", back: "target", colour: "fg" }].map((part) => ({ colour: "soft", ...part })));
  save(await picture.paint(), "specrs-answer.png");
}
