// Markdown as elements: headings, lists, quotes, code, tables, emphasis, links. HTML in the text stays text, images are not
// loaded, and a link is one only to http, https or mail. Anything else is shown as it was written.

const MOST_NESTED = 8; // lists and quotes deeper than this stay text
const FENCE = /^( {0,3})(`{3,}|~{3,})([^`]*)$/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])(?: +|$)/;
const HEADING = /^ {0,3}(#{1,6})(?= |$)/;
const RULE = /^ {0,3}(?:(?:- *){3,}|(?:\* *){3,}|(?:_ *){3,})$/;
const DELIMITERS = /^ *\|? *:?-+:? *(?:\| *:?-+:? *)*\|? *$/;

function linkTarget(address) {
  try {
    const url = new URL(address);
    return ["http:", "https:", "mailto:"].includes(url.protocol) ? url.href : null;
  } catch { return null; }
}

// Nodes of a paragraph's text.
function inline(text, depth = 0) {
  const nodes = [], missing = new Set(); // delimiters that do not come again
  let plain = "", i = 0;
  const push = (node, end) => {
    if (plain) nodes.push(plain);
    plain = "";
    nodes.push(node);
    i = end;
  };
  const closing = (mark, from) => {
    const end = missing.has(mark) ? -1 : text.indexOf(mark, from);
    if (end < 0) missing.add(mark);
    return end;
  };
  while (i < text.length) {
    const sign = text[i];
    if (sign === "\\" && /[!-/:-@[-`{-~]/.test(text[i + 1] || "")) { plain += text[i + 1]; i += 2; continue; }
    if (sign === "`") {
      const mark = /^`+/.exec(text.slice(i, i + 32))[0], end = closing(mark, i + mark.length);
      if (end > 0) { push(element("code", "", text.slice(i + mark.length, end).trim()), end + mark.length); continue; }
      plain += mark; i += mark.length; continue;
    }
    const mark = ["**", "__", "~~", "*", "_"].find((mark) => text.startsWith(mark, i));
    const inWord = sign === "_" && /\w/.test(text[i - 1] || "");
    if (mark && depth < MOST_NESTED && !inWord && /\S/.test(text[i + mark.length] || "")) {
      let end = closing(mark, i + mark.length + 1);
      if (mark === "*" && text[end + 1] === "*") end = -1;
      if (end > 0 && /\S/.test(text[end - 1]) && !(sign === "_" && /\w/.test(text[end + mark.length] || ""))) {
        const name = { "**": "strong", __: "strong", "~~": "del", "*": "em", _: "em" }[mark];
        push(element(name, "", ...inline(text.slice(i + mark.length, end), depth + 1)), end + mark.length);
        continue;
      }
      plain += mark; i += mark.length; continue;
    }
    if (sign === "[") {
      const middle = closing("](", i), end = middle < 0 ? -1 : closing(")", middle);
      const target = end < 0 ? null : linkTarget(text.slice(middle + 2, end).split(" ")[0]);
      if (target !== null && middle - i < 500) {
        const link = element("a", "", text.slice(i + 1, middle));
        link.href = target;
        link.title = target;
        link.rel = "noopener noreferrer nofollow";
        link.target = "_blank";
        push(link, end + 1);
        continue;
      }
    }
    plain += sign;
    i += 1;
  }
  if (plain) nodes.push(plain);
  return nodes;
}

function cells(line) {
  return line.trim().replace(/^\|/, "").replace(/\|$/, "").split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
}

function table(lines) {
  const row = (name, line) => element("tr", "", ...cells(line).map((cell) => element(name, "", ...inline(cell))));
  const body = element("tbody", "", ...lines.slice(2).map((line) => row("td", line)));
  return element("div", "table", element("table", "", element("thead", "", row("th", lines[0])), body));
}

// Where the block that begins at line `first` ends, and its element.
function block(lines, first, depth) {
  const line = lines[first], fence = FENCE.exec(line), item = depth < MOST_NESTED && ITEM.exec(line);
  let end = first + 1;
  if (fence) {
    const [, indent, mark] = fence, closes = (other) => other.trim().startsWith(mark) && !other.trim().replaceAll(mark[0], "");
    while (end < lines.length && !closes(lines[end])) end += 1;
    const code = lines.slice(first + 1, end).map((other) => (other.startsWith(indent) ? other.slice(indent.length) : other.trimStart()));
    return [end + 1, element("pre", "", element("code", "", code.join("\n")))];
  }
  if (RULE.test(line)) return [end, element("hr")];
  const heading = HEADING.exec(line);
  if (heading) {
    const text = line.slice(heading[0].length).trim().replace(/ #+$/, "");
    return [end, element("h" + Math.min(6, heading[1].length + 2), "", ...inline(text))];
  }
  if (/^ {0,3}>/.test(line) && depth < MOST_NESTED) {
    while (end < lines.length && /^ {0,3}>/.test(lines[end])) end += 1;
    return [end, element("blockquote", "", ...blocks(lines.slice(first, end).map((other) => other.replace(/^ {0,3}> ?/, "")), depth + 1))];
  }
  if (item) {
    const ordered = /\d/.test(item[2]), list = element(ordered ? "ol" : "ul");
    if (ordered) list.start = parseInt(item[2], 10);
    end = first;
    for (;;) {
      const next = end < lines.length ? ITEM.exec(lines[end]) : null;
      if (!next || RULE.test(lines[end]) || next[1].length > item[1].length + 3 || /\d/.test(next[2]) !== ordered || next[1].length < item[1].length) break;
      const inner = [lines[end].slice(next[0].length)], wide = next[0].length;
      for (end += 1; end < lines.length; end++) {
        const other = lines[end], deep = other.length - other.trimStart().length;
        if (!other.trim()) { if (end + 1 < lines.length && /^ /.test(lines[end + 1])) { inner.push(""); continue; } break; }
        if (deep <= next[1].length && (ITEM.test(other) || HEADING.test(other) || FENCE.test(other))) break;
        if (deep < wide && !lines[end - 1].trim()) break;
        inner.push(other.slice(Math.min(deep, wide)));
      }
      list.append(element("li", "", ...blocks(inner, depth + 1)));
      let after = end;
      while (after < lines.length && !lines[after].trim()) after += 1;
      if (after < lines.length && ITEM.test(lines[after])) end = after;
    }
    return [end, list];
  }
  if (line.includes("|") && first + 1 < lines.length && lines[first + 1].includes("-") && DELIMITERS.test(lines[first + 1])) {
    for (end = first + 2; end < lines.length && lines[end].includes("|");) end += 1;
    return [end, table(lines.slice(first, end))];
  }
  const starts = (other) => !other.trim() || FENCE.test(other) || HEADING.test(other) || /^ {0,3}>/.test(other) || ITEM.test(other);
  while (end < lines.length && !starts(lines[end])) end += 1;
  return [end, element("p", "", ...inline(lines.slice(first, end).join("\n")))];
}

function blocks(lines, depth = 0) {
  const nodes = [];
  for (let i = 0; i < lines.length;) {
    if (!lines[i].trim()) { i += 1; continue; }
    const [end, node] = block(lines, i, depth);
    nodes.push(node);
    i = end;
  }
  return nodes;
}

// How many characters of a text make up blocks that no later text changes: those up to a blank line, outside code, that
// something other than a list's next item follows.
function settled(text) {
  const lines = text.split("\n");
  let mark = null, length = 0, found = 0, blank = false;
  for (const line of lines.slice(0, -1)) {
    const fence = FENCE.exec(line);
    if (mark === null && blank && /^\S/.test(line) && !ITEM.test(line)) found = length;
    if (mark !== null) { if (line.trim().startsWith(mark) && !line.trim().replaceAll(mark[0], "")) mark = null; }
    else if (fence) mark = fence[2];
    blank = !line.trim();
    length += line.length + 1;
  }
  return found;
}

// A text that grows: what is settled stays, the rest is made anew.
class Markdown {
  constructor(into) { this.into = into; this.rest = ""; this.tail = []; }

  append(text) {
    if (!text) return;
    this.rest += text;
    for (const node of this.tail) node.remove();
    const end = settled(this.rest);
    if (end) this.into.append(...blocks(this.rest.slice(0, end).split("\n")));
    this.rest = this.rest.slice(end);
    this.tail = blocks(this.rest.split("\n"));
    this.into.append(...this.tail);
  }
}
