(() => {
  const root = document.documentElement;
  const dark = () => (root.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  document.getElementById("theme").addEventListener("click", () => { root.dataset.theme = dark() ? "light" : "dark"; });

  const links = new Map([...document.querySelectorAll("nav a")].map((link) => [link.hash.slice(1), link]));
  const parts = [...links.keys()].map((name) => document.getElementById(name));
  const mark = () => {
    const here = parts.filter((part) => part.getBoundingClientRect().top < 100).pop() || parts[0];
    links.forEach((link, name) => { if (name === here.id) link.setAttribute("aria-current", "true"); else link.removeAttribute("aria-current"); });
  };
  addEventListener("scroll", mark, { passive: true });
  mark();

  const graph = document.getElementById("graph");
  if (!graph) return;
  const edges = [...graph.querySelectorAll(".edge")];
  const nodes = new Map([...graph.querySelectorAll(".node")].map((node) => [node.dataset.key, node]));
  const light = (key) => {
    graph.classList.toggle("pointed", key !== null);
    nodes.forEach((node, name) => node.classList.toggle("lit", name === key));
    for (const edge of edges) {
      const touches = edge.dataset.from === key || edge.dataset.to === key;
      edge.classList.toggle("lit", touches);
      if (touches) {
        nodes.get(edge.dataset.from).classList.add("lit");
        nodes.get(edge.dataset.to).classList.add("lit");
      }
    }
  };
  nodes.forEach((node, key) => {
    node.addEventListener("pointerenter", () => light(key));
    node.addEventListener("pointerleave", () => light(null));
  });
})();
