// The panel: figures of the answer that is written, and of the server.

let last = null; // the server's counters a second ago

function showFigures(run) {
  const tokens = numTokens(run), figures = run.speculation;
  at("tokens").textContent = tokens;
  at("speed").textContent = run.seconds > 0 ? (tokens / run.seconds).toFixed(1) : "-";
  at("first").textContent = run.first_seconds === null ? "-" : run.first_seconds.toFixed(2) + " s";
  const steps = figures ? figures.num_spec_steps : 0, histogram = figures ? figures.acceptance_histogram : [];
  at("length").textContent = figures ? figures.mean_acceptance_length.toFixed(2) : "-";
  at("mean-k").textContent = steps ? (figures.num_draft_tokens / steps).toFixed(2) : "-";
  if (at("positions").childElementCount !== 2 * Math.max(0, histogram.length - 1)) addPositions(histogram.length - 1);
  at("positions").querySelectorAll("dd").forEach((value, i) => {
    const share = steps ? histogram.slice(i + 1).reduce((a, b) => a + b, 0) / steps : 0;
    value.firstElementChild.value = share;
    value.lastElementChild.textContent = String(Math.round(100 * share)).padStart(3, "\u2007") + " %";
  });
}

// A row for each position of a draft.
function addPositions(most) {
  const rows = [];
  for (let i = 1; i <= most; i++) {
    const term = button("Position " + i, `Share of iterations in which draft token ${i} was accepted. It counts only if all drafts before it were accepted, too.`);
    term.className = "term";
    rows.push(element("dt", "", term), element("dd", "", element("meter"), " ", element("span")));
  }
  at("positions").replaceChildren(...rows);
}

function metrics(text) {
  const found = {};
  for (const line of text.split("\n")) {
    const parts = /^vllm:([a-z0-9_]+)(\{.*\})? (\S+)$/.exec(line);
    if (parts) found[parts[1]] = (found[parts[1]] || 0) + Number(parts[3]);
  }
  return found;
}

async function watch() {
  try {
    if (!document.hidden && !locked) {
      const reply = await ask("/metrics");
      if (reply.ok) {
        const now = metrics(await reply.text()), time = performance.now();
        at("running").textContent = now.num_requests_running;
        at("waiting").textContent = now.num_requests_waiting;
        at("kv").textContent = (100 * now.kv_cache_usage_perc).toFixed(1) + " %";
        if (last) {
          const grown = (name) => now[name + "_total"] - last.now[name + "_total"];
          at("rate").textContent = ((1000 * grown("generation_tokens")) / (time - last.time)).toFixed(1);
          const drafts = grown("spec_decode_num_drafts");
          if (drafts > 0) {
            at("rate-length").textContent = (1 + grown("spec_decode_num_accepted_tokens") / drafts).toFixed(2);
            at("rate-k").textContent = (grown("spec_decode_num_draft_tokens") / drafts).toFixed(2);
          }
        }
        last = { now, time };
      }
    }
  } catch { at("running").textContent = "no answer"; }
  setTimeout(watch, 1000);
}

// Fills the menus of models and of K from what the server says about itself.
async function readServer() {
  const reply = await ask("/server_info");
  if (!reply.ok && reply.status !== 503) return; // 503: one of several models, which is not loaded yet
  const speculative = reply.ok ? (await reply.json()).speculative_config : null, most = speculative ? speculative.max_num_speculative_tokens : 0;
  const counts = Array.from({ length: most + 1 }, (_, k) => String(k)), own = speculative && String(speculative.num_speculative_tokens);
  if (own === "auto") counts.unshift("auto");
  const wanted = restored("k");
  at("k").replaceChildren(...counts.map((k) => new Option(k)));
  at("k").value = counts.includes(wanted) ? wanted : counts.includes(own) ? own : "0";
  at("k").disabled = at("compare").disabled = most === 0;
  const models = (await (await ask("/v1/models")).json()).data, model = restored("model");
  at("model").replaceChildren(...models.map(({ id, parent }) => new Option(parent ? `${id} (adapter of ${parent})` : id, id)));
  if (models.some(({ id }) => id === model)) at("model").value = model;
}
