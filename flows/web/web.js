(() => {
  const root = document.documentElement;
  const stored = (name) => { try { return JSON.parse(localStorage.getItem(name)); } catch { return null; } };
  const store = (name, value) => { try { localStorage.setItem(name, JSON.stringify(value)); } catch { /* a private window */ } };
  const dark = () => (root.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  if (stored("puna-theme")) root.dataset.theme = stored("puna-theme");
  document.getElementById("theme").addEventListener("click", () => {
    root.dataset.theme = dark() ? "light" : "dark";
    store("puna-theme", root.dataset.theme);
  });

  // Times in the reader's own zone.
  const times = (inside) => inside.querySelectorAll("time").forEach((one) => {
    one.title = one.textContent + " UTC";
    one.textContent = new Date(one.dateTime).toLocaleString([], { day: "numeric", month: "short", hour: "2-digit", minute: "2-digit" });
  });
  times(document);

  // A page about running work is fetched again after a change; open sections and ticked boxes stay as they are.
  const main = document.getElementById("content");
  let busy = false;
  const refresh = async () => {
    if (busy) return;
    busy = true;
    try {
      const answer = await fetch(location.href);
      if (!answer.ok) return;
      const fresh = new DOMParser().parseFromString(await answer.text(), "text/html").getElementById("content");
      const open = [...main.querySelectorAll("details")].map((one) => one.open);
      const ticked = new Set([...main.querySelectorAll("input:checked")].map((one) => one.value));
      main.replaceChildren(...fresh.childNodes);
      main.querySelectorAll("details").forEach((one, n) => { if (open[n]) one.open = true; });
      main.querySelectorAll("input[type=checkbox]").forEach((one) => { one.checked = ticked.has(one.value); });
      times(main);
      if (!fresh.dataset.live && source) source.close();
    } finally { busy = false; }
  };
  const source = main.dataset.live ? new EventSource(main.dataset.live) : null;
  if (source) source.addEventListener("message", refresh);

  // SQL: send with Ctrl+Enter; list earlier statements.
  const ask = document.getElementById("ask");
  if (ask) {
    const box = ask.querySelector("textarea");
    const asked = stored("puna-asked") || [];
    if ("answered" in ask.dataset) store("puna-asked", [box.value, ...asked.filter((one) => one !== box.value)].slice(0, 30));
    for (const one of stored("puna-asked") || []) {
      const link = document.createElement("a");
      link.href = "/puna/sql?q=" + encodeURIComponent(one);
      link.textContent = one;
      const item = document.createElement("li");
      item.append(link);
      document.getElementById("asked").append(item);
    }
    box.addEventListener("keydown", (event) => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) ask.submit(); });
    // A click on a statement on this page runs it; its URL alone only fills the box.
    main.addEventListener("click", (event) => {
      const link = event.target.closest('a[href^="/puna/sql?q="]');
      if (!link || event.ctrlKey || event.metaKey || event.shiftKey) return;
      event.preventDefault();
      box.value = new URL(link.href).searchParams.get("q");
      ask.submit();
    });
  }

  // Forms for thresholds and runs: the view follows the fields.
  const rules = document.getElementById("rules");
  const replayed = document.querySelector("form[data-from]");
  let later;
  if (replayed) {
    const outcome = document.getElementById("outcome");
    let latest = 0, timer;
    const replay = async () => {
      const mine = ++latest;
      outcome.classList.add("stale");
      let answer, words;
      try {
        const fields = new URLSearchParams(new FormData(replayed));
        answer = replayed.method === "post" ? await fetch(replayed.dataset.from, { method: "POST", body: fields })
          : await fetch(replayed.dataset.from + "?" + fields);
        words = await answer.text();
      } catch {  // the server is away
        if (mine === latest) timer = setTimeout(replay, 2000);
        return;
      }
      if (mine !== latest) return;
      const found = new DOMParser().parseFromString(words, "text/html");
      outcome.replaceChildren(...(answer.ok ? found.body : found.getElementById("content")).childNodes);
      outcome.classList.remove("stale");
    };
    later = () => { clearTimeout(timer); timer = setTimeout(replay, 120); };
    if (!rules) {
      replayed.addEventListener("input", later);
      // Fields that were filled in before this script loaded, or before the reader went back.
      const changed = (one) => one.multiple ? [...one.options].some((option) => option.selected !== option.defaultSelected)
        : one.options ? one.selectedIndex !== Math.max(0, [...one.options].findIndex((option) => option.defaultSelected))
        : one.type === "submit" ? false
        : ["checkbox", "radio"].includes(one.type) ? one.checked !== one.defaultChecked : one.value !== one.defaultValue;
      addEventListener("pageshow", () => { if ([...replayed.elements].some(changed)) later(); });
      if ("now" in replayed.dataset) later();
    }
  }
  if (rules) {
    const mark = (card) => card.classList.toggle("moved", Math.abs(card.querySelector("[type=number]").value - card.querySelector("[type=range]").dataset.was) > 1e-9);
    for (const card of rules.querySelectorAll(".slider")) {
      const range = card.querySelector("[type=range]"), written = card.querySelector("[type=number]");
      range.addEventListener("input", () => { written.value = range.value; mark(card); later(); });
      written.addEventListener("input", () => { range.value = written.value; mark(card); later(); });
      mark(card);
    }
    rules.addEventListener("reset", (event) => {
      event.preventDefault();
      for (const card of rules.querySelectorAll(".slider")) {
        const was = card.querySelector("[type=range]").dataset.was;
        card.querySelector("[type=range]").value = was;
        card.querySelector("[type=number]").value = was;
        mark(card);
      }
      later();
    });
  }

  // Chat: the answer is shown as it is streamed.
  const chat = document.getElementById("chat");
  if (chat) {
    const talk = document.getElementById("talk"), box = chat.querySelector("textarea");
    let messages = [];
    const show = (role, words) => {
      const one = document.createElement("div");
      one.className = "said " + role;
      one.textContent = words;
      talk.append(one);
      return one;
    };
    const send = async (event) => {
      event.preventDefault();
      const words = box.value.trim(), button = chat.querySelector("button.main");
      if (!words || button.disabled) return;
      box.value = "";
      button.disabled = true;
      const own = messages;  // "New chat" begins another list, which this answer is no part of
      own.push({ role: "user", content: words });
      show("user", words);
      const shown = show("assistant", "…");
      let said = "";
      try {
        const answer = await fetch("/puna/chat/say", {
          method: "POST", headers: { "content-type": "application/json" },
          body: JSON.stringify({ model: chat.model.value, messages: own }),
        });
        if (!answer.ok) {
          const page = new DOMParser().parseFromString(await answer.text(), "text/html");
          throw new Error(page.querySelector(".alarm")?.textContent || answer.statusText);
        }
        const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
        for (let piece; !(piece = await reader.read()).done;) { said += piece.value; shown.textContent = said; }
        own.push({ role: "assistant", content: said });
        if (!said) shown.textContent = "(empty answer)";
      } catch (error) {
        shown.classList.add("wrong");
        shown.textContent = error.message;
        own.pop();
        if (own === messages && !box.value) box.value = words;
      }
      button.disabled = false;
      box.focus();
    };
    chat.addEventListener("submit", send);
    box.addEventListener("keydown", (event) => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) send(event); });
    document.getElementById("new").addEventListener("click", () => { messages = []; talk.replaceChildren(); box.focus(); });
  }
})();
