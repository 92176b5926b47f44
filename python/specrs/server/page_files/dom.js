// Elements, buttons, tooltips. Text of a model or a user only ever becomes a text node.

const at = (id) => document.getElementById(id);

function element(name, className, ...children) {
  const made = document.createElement(name);
  if (className) made.className = className;
  made.append(...children);
  return made;
}

function button(text, tip, act) {
  const made = element("button", "", text);
  made.type = "button";
  made.dataset.tip = tip;
  if (act) made.addEventListener("click", act);
  return made;
}

// Says in the button itself what it did, until the pointer or the focus leaves it.
function say(made, text) {
  const before = made.textContent, events = new AbortController();
  const restore = () => { made.textContent = before; events.abort(); };
  made.textContent = text;
  for (const name of ["pointerleave", "blur"]) made.addEventListener(name, restore, { signal: events.signal });
}

const visible = (string) => string.replace(/\n/g, "\u21b5").replace(/\t/g, "\u21e5");
const numAccepted = (iteration) => iteration.num_draft_tokens - iteration.rejected.length;
const iterationOf = new WeakMap(); // of a text's span and of a timeline's step

function describe(iteration) {
  const strings = (name, all) => all.map((string) => element("span", name, visible(string)));
  const { num_draft_tokens: drafted, accepted, rejected, target, ms } = iteration;
  const said = drafted ? `${drafted} drafted, ${numAccepted(iteration)} accepted, ${rejected.length} rejected`
    : "Nothing was drafted: the model wrote this alone.";
  return [
    element("p", "", said),
    element("p", "text", ...strings("draft", accepted), ...strings("rejected", rejected), ...strings("target", target)),
    element("p", "hint", `after ${(ms / 1000).toFixed(2)} s`),
  ];
}

function showTip(target, late, ...content) {
  hideTip();
  const tip = at("tip");
  tip.replaceChildren(...content);
  tip.className = late ? "late" : "";
  tip.showPopover();
  target.setAttribute("aria-describedby", "tip");
  const box = target.getClientRects()[0] || target.getBoundingClientRect(), below = box.bottom + 6;
  tip.style.left = Math.max(8, Math.min(box.left, innerWidth - tip.offsetWidth - 8)) + "px";
  tip.style.top = (below + tip.offsetHeight > innerHeight ? Math.max(8, box.top - tip.offsetHeight - 6) : below) + "px";
}

function hideTip() {
  if (!at("tip").matches(":popover-open")) return; // scrolling asks for it once a frame
  at("tip").hidePopover();
  for (const target of document.querySelectorAll("[aria-describedby=tip]")) target.removeAttribute("aria-describedby");
}

function tipFor(event) {
  const target = event.target.closest && event.target.closest("[data-tip], .iteration, .step");
  if (!target) hideTip();
  else if (iterationOf.has(target)) showTip(target, false, ...describe(iterationOf.get(target)));
  else showTip(target, event.type === "mouseover" && !target.matches(".term"), target.dataset.tip);
}

document.addEventListener("mouseover", tipFor);
document.addEventListener("click", (event) => { if (event.target.closest(".term")) tipFor(event); });
document.addEventListener("focusin", (event) => {
  if (event.target.matches(":focus-visible") && !event.target.matches("textarea")) tipFor(event);
});
document.addEventListener("focusout", (event) => { if (event.target.getAttribute("aria-describedby") === "tip") hideTip(); });
document.addEventListener("input", hideTip);
document.addEventListener("mouseleave", hideTip);
