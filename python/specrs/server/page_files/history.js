// Conversations and settings that survive a reload, in this browser's storage. The API key is never among them.

const MOST_CHATS = 40;
const MOST_CHARACTERS = 2_000_000; // of all conversations as JSON; browsers allow five million
const STORED = { chats: `specrs${base}:chats-1`, settings: `specrs${base}:settings-1` };
const SETTINGS = ["k", "model", "temperature", "top-p", "max-tokens", "system", "colours"];

function read(name, otherwise) {
  try { return JSON.parse(localStorage.getItem(STORED[name])) ?? otherwise; }
  catch { return otherwise; } // no storage, or not what this page wrote
}

function write(name, value) {
  try { localStorage.setItem(STORED[name], JSON.stringify(value)); return true; }
  catch { return false; } // full, or forbidden
}

function savedChats() {
  const chats = read("chats", []);
  return Array.isArray(chats) ? chats.filter((chat) => chat && chat.id && Array.isArray(chat.messages)) : [];
}

// Keeps a conversation as the newest. The oldest go where there are too many; one that is too long alone keeps its texts only.
function saveChat(chat) {
  const chats = [chat, ...savedChats().filter((other) => other.id !== chat.id)].slice(0, MOST_CHATS);
  while (chats.length > 1 && JSON.stringify(chats).length > MOST_CHARACTERS) chats.pop();
  if (JSON.stringify(chats).length > MOST_CHARACTERS) {
    const bare = (run) => ({ ...run, iterations: [] });
    chats[0] = { ...chat, messages: chat.messages.map((message) => (message.runs ? { ...message, runs: message.runs.map(bare) } : message)) };
  }
  while (!write("chats", chats) && chats.length > 1) chats.pop();
}

function listChats(open) {
  const chats = savedChats();
  at("no-chats").hidden = chats.length > 0;
  at("forget").hidden = chats.length === 0;
  at("chats").replaceChildren(...chats.map((chat) => {
    const title = String(chat.messages[0]?.content ?? "").slice(0, 80) || "empty";
    const choose = button(title, "Open this conversation.", () => { at("history").hidePopover(); open(chat); });
    choose.className = "open";
    const remove = button("\u00d7", "Delete this conversation.", () => {
      write("chats", savedChats().filter((other) => other.id !== chat.id));
      listChats(open);
    });
    remove.setAttribute("aria-label", "Delete " + title);
    return element("li", "", choose, remove);
  }));
}

const valueOf = (name) => (at(name).type === "checkbox" ? at(name).checked : at(name).value);
const restored = (name) => read("settings", {})[name];

function restoreSettings() {
  for (const name of SETTINGS.filter((name) => !["k", "model"].includes(name) && restored(name) !== undefined)) {
    if (at(name).type === "checkbox") at(name).checked = restored(name) === true;
    else at(name).value = restored(name);
  }
  for (const name of SETTINGS) at(name).addEventListener("change", () => write("settings", { ...read("settings", {}), [name]: valueOf(name) }));
}
