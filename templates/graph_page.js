"use strict";
// Every string of the model reaches the page as text, never as markup.
(() => {
  const stages = JSON.parse(document.getElementById("graph").textContent);
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];
  const sections = all(".stage"), tabs = all(".stages a"), details = document.getElementById("details");
  const search = document.getElementById("search"), hits = document.getElementById("hits");
  const narrow = window.matchMedia("(max-width: 900px)");
  const views = new Map();  // article -> {x, y, scale}
  const here = { stage: -1, block: -1, node: -1 };
  document.documentElement.classList.add("js");

  const make = (tag, text = "", name = "") => {
    const element = document.createElement(tag);
    element.textContent = text;
    if (name) element.className = name;
    return element;
  };
  const article = (stage = here.stage, block = here.block) => all(".block", sections[stage])[block];
  const blockData = (stage = here.stage, block = here.block) => stages[stage].blocks[block];
  const indexOf = (name) => blockData().nodes.findIndex((node) => node.name === name);
  const shapeOf = (node) => (node.shape === null ? node.dtype : `${node.dtype}[${node.shape.join(", ")}]`);
  const drawn = (name, root = article()) => all(".node", root).find((node) => node.dataset.node === name);

  function show(stage, block, node = -1) {
    stage = Math.min(Math.max(stage, 0), stages.length - 1);
    const count = stages[stage].blocks.length;
    block = Math.min(Math.max(block, -1), count - 1);  // -1: the whole model
    Object.assign(here, { stage, block, node: -1 });
    sections.forEach((section, i) => { section.hidden = i !== stage; });
    tabs.forEach((tab, i) => tab.setAttribute("aria-selected", String(i === stage)));
    all(".block", sections[stage]).forEach((one, i) => { one.hidden = i !== block; });
    all(".overview").forEach((one) => { one.hidden = block !== -1; });
    all(".blocks a", sections[stage]).forEach((link) => link.setAttribute("aria-current", String(Number(link.dataset.block) === block)));
    if (block >= 0 && !views.has(article())) start(article());
    choose(node, node >= 0);
    highlight();
  }

  function choose(index, reveal = false) {
    here.node = index;
    all(".chosen, .into, .from").forEach((one) => one.classList.remove("chosen", "into", "from"));
    const place = here.block < 0 ? `s${here.stage}` : `s${here.stage}-b${here.block}`;
    history.replaceState(null, "", index < 0 ? `#${place}` : `#${place}-n${index}`);
    if (index < 0) return details.replaceChildren(make("p", details.dataset.hint, "hint"));
    const node = blockData().nodes[index];
    describe(node);
    for (const wire of all(".wire", article())) {
      if (wire.dataset.target === node.name) wire.classList.add("into");
      if (wire.dataset.source === node.name) wire.classList.add("from");
    }
    // A weight has no box: the operators that read it stand for it.
    const readers = () => blockData().nodes.filter((other) => other.inputs.includes(node.name)).map((other) => other.name);
    const pictures = (drawn(node.name) ? [node.name] : readers()).map((name) => drawn(name)).filter(Boolean);
    for (const picture of pictures) picture.classList.add("chosen");
    if (reveal && pictures.length) bringIn(pictures[0]);
  }

  function describe(node) {
    const users = blockData().nodes.filter((other) => other.inputs.includes(node.name));
    const list = make("dl");
    const row = (word, ...values) => {
      if (!values.length || values[0] === "") return;
      const cell = make("dd");
      values.forEach((value) => cell.append(value));
      list.append(make("dt", word), cell);
    };
    const links = (names) => names.map((name) => {
      const target = blockData().nodes[indexOf(name)];
      const button = make("button", target && target.op === "weight" ? target.fqn || name : name);
      button.type = "button";
      button.addEventListener("click", () => choose(indexOf(name), true));
      return button;
    });
    row("operator", node.op);
    row("type", shapeOf(node));
    row("device", node.device);
    row("FQN", node.fqn);
    row("span", node.span);
    for (const [name, value] of node.attributes) row(name, value);
    row("target", node.target);
    for (const [rule, name] of node.bound) row("bound as", `${name} of ${rule}`);
    row("inputs", ...links(node.inputs));
    row("used by", ...links(users.map((user) => user.name)));
    details.replaceChildren(make("h4", node.name));
    if (node.rule) details.append(make("span", `rule ${node.rule}`, `made rule-${node.colour}`));
    details.append(list);
  }

  // pan and zoom
  function apply(one) {
    const view = views.get(one);
    one.querySelector(".canvas svg").style.transform = `translate(${view.x}px, ${view.y}px) scale(${view.scale})`;
  }
  function sizes(one) {
    const canvas = one.querySelector(".canvas"), box = one.querySelector(".canvas svg").viewBox.baseVal;
    return { width: canvas.clientWidth, height: canvas.clientHeight, inner: box };
  }
  function fit(one) {
    const { width, height, inner } = sizes(one);
    const scale = Math.min(1, width / inner.width, height / inner.height);
    views.set(one, { scale, x: (width - inner.width * scale) / 2, y: Math.max(0, (height - inner.height * scale) / 2) });
    apply(one);
  }
  function start(one) {
    const { width, height, inner } = sizes(one);
    // Below 0.62 the smallest letters are under 7 px: a larger block does not start as a whole.
    const scale = Math.min(1, Math.max(0.62, width / inner.width)), over = width - inner.width * scale;
    const below = height - inner.height * scale, view = { scale, x: over / 2, y: 0 };
    views.set(one, view);
    // The node that a rule made is in view, and with it as much as fits of the data before it.
    const made = one.querySelector('.node[class*=" rule-"]'), first = made || one.querySelector(".node.input, .node");
    if ((over < 0 || below < 0) && first) {
      bringIn(first, one, 0.5, made ? 0.6 : 0.06);
      view.x = over < 0 ? Math.min(0, Math.max(over, view.x)) : over / 2;
      view.y = Math.min(0, Math.max(below, view.y));
    }
    apply(one);
  }
  function zoom(one, factor, x, y) {
    const view = views.get(one), scale = Math.min(4, Math.max(0.08, view.scale * factor));
    view.x = x - ((x - view.x) * scale) / view.scale;
    view.y = y - ((y - view.y) * scale) / view.scale;
    view.scale = scale;
    apply(one);
  }
  function zoomMiddle(factor) {
    const { width, height } = sizes(article());
    zoom(article(), factor, width / 2, height / 2);
  }
  function bringIn(picture, one = article(), across = -1, down = -1) {
    if (one.classList.contains("as-text")) return;
    const view = views.get(one), { width, height, inner } = sizes(one);
    const box = picture.getBBox(), at = picture.transform.baseVal.consolidate().matrix;
    const x = (at.e - inner.x + box.width / 2) * view.scale + view.x;
    const y = (at.f - inner.y + box.height / 2) * view.scale + view.y;
    if (across < 0 && x > 40 && x < width - 40 && y > 40 && y < height - 40) return;
    view.x += width * (across < 0 ? 0.5 : across) - x;
    view.y += height * (down < 0 ? 0.5 : down) - y;
    apply(one);
  }
  for (const canvas of all(".canvas")) {
    const one = canvas.closest(".block");
    let drag = null;
    canvas.addEventListener("pointerdown", (event) => {
      if (event.button !== 0) return;
      drag = { x: event.clientX, y: event.clientY, moved: false };
    });
    canvas.addEventListener("pointermove", (event) => {
      if (!drag) return;
      const dx = event.clientX - drag.x, dy = event.clientY - drag.y;
      if (!drag.moved && Math.hypot(dx, dy) < 4) return;
      if (!drag.moved) canvas.setPointerCapture(event.pointerId);
      canvas.classList.add("dragged");
      const view = views.get(one);
      view.x += dx; view.y += dy;
      drag = { x: event.clientX, y: event.clientY, moved: true };
      apply(one);
    });
    for (const end of ["pointerup", "pointercancel"]) canvas.addEventListener(end, (event) => {
      const node = event.target.closest ? event.target.closest(".node") : null;
      if (end === "pointerup" && drag && !drag.moved && node) choose(indexOf(node.dataset.node));
      drag = null;
      canvas.classList.remove("dragged");
    });
    canvas.addEventListener("wheel", (event) => {
      if (narrow.matches && !event.ctrlKey && !event.metaKey) return;  // the page scrolls, in one column
      event.preventDefault();
      const corner = canvas.getBoundingClientRect(), view = views.get(one);
      if (event.ctrlKey || event.metaKey) {
        zoom(one, Math.exp(-event.deltaY / 300), event.clientX - corner.left, event.clientY - corner.top);
        return;
      }
      view.x -= event.shiftKey ? event.deltaY : event.deltaX;
      view.y -= event.shiftKey ? 0 : event.deltaY;
      apply(one);
    }, { passive: false });
    canvas.addEventListener("focusin", (event) => {
      canvas.scrollTo(0, 0);
      const node = event.target.closest(".node");
      if (node && event.target.matches(":focus-visible")) choose(indexOf(node.dataset.node), true);
    });
  }
  const tools = {
    in: () => zoomMiddle(1.25), out: () => zoomMiddle(0.8), fit: () => fit(article()),
    text: () => {
      const on = article().classList.toggle("as-text");
      article().querySelector("[data-do=text]").setAttribute("aria-pressed", String(on));
    },
  };

  // moving along the data: down to the first user, up to the first drawn input
  function follow(step) {
    const nodes = blockData().nodes;
    if (here.node < 0) return choose(nodes.findIndex((node) => drawn(node.name)), true);
    const node = nodes[here.node];
    const names = step > 0 ? nodes.filter((other) => other.inputs.includes(node.name)).map((other) => other.name) : node.inputs;
    const next = names.find((name) => drawn(name));
    if (next) choose(indexOf(next), true);
  }
  function otherStage(stage) {
    if (stage < 0 || stage >= stages.length || stage === here.stage) return;
    const key = here.block < 0 ? "" : blockData().key, name = here.node < 0 ? "" : blockData().nodes[here.node].name;
    const block = key ? Math.max(0, stages[stage].blocks.findIndex((one) => one.key === key)) : -1;
    const found = stages[stage].blocks[block];
    show(stage, block, found && name ? found.nodes.findIndex((node) => node.name === name) : -1);
  }

  // search
  const wanted = () => search.value.trim().toLowerCase();
  const fits = (node, text) => [node.name, node.op, node.fqn, node.rule, node.device, shapeOf(node)].some((part) => part.toLowerCase().includes(text));
  function highlight() {
    const text = wanted();
    for (const canvas of all(".canvas")) canvas.classList.remove("searched");
    if (!text || here.block < 0) return;
    article().querySelector(".canvas").classList.add("searched");
    const names = new Set(blockData().nodes.filter((node) => fits(node, text)).map((node) => node.name));
    for (const node of all(".node", article())) node.classList.toggle("hit", names.has(node.dataset.node));
  }
  function list() {
    const text = wanted();
    hits.replaceChildren();
    hits.hidden = !text;
    highlight();
    if (!text) return;
    stages[here.stage].blocks.forEach((block, b) => block.nodes.forEach((node, n) => {
      if (hits.childElementCount >= 60 || !fits(node, text)) return;
      const button = make("button", `${node.name} = ${node.op}  ${shapeOf(node)}`), item = make("li");
      button.type = "button";
      button.append(make("small", [block.key, node.fqn, node.rule && `rule ${node.rule}`].filter(Boolean).join(" · ")));
      button.addEventListener("click", () => { hits.hidden = true; show(here.stage, b, n); });
      item.append(button);
      hits.append(item);
    }));
    if (!hits.childElementCount) hits.append(make("li", "nothing found", "none"));
  }
  search.addEventListener("input", list);
  search.addEventListener("focus", () => { hits.hidden = !wanted(); });
  search.closest(".search").addEventListener("keydown", (event) => {
    const buttons = all("button", hits), at = buttons.indexOf(document.activeElement);
    if (event.key === "Escape") { search.value = ""; list(); document.activeElement.blur(); }
    else if (event.key === "Enter" && document.activeElement === search && buttons[0]) buttons[0].click();
    else if (event.key === "ArrowDown" && buttons[at + 1]) { buttons[at + 1].focus(); event.preventDefault(); }
    else if (event.key === "ArrowUp" && at >= 0) { (buttons[at - 1] || search).focus(); event.preventDefault(); }
    event.stopPropagation();
  });

  document.addEventListener("click", (event) => {
    const at = (selector) => event.target.closest(selector);
    if (!at(".search")) hits.hidden = true;
    if (at(".stages a")) { event.preventDefault(); otherStage(Number(at(".stages a").dataset.stage)); }
    else if (at(".blocks a, .opens")) {
      event.preventDefault();
      show(here.stage, Number(at(".blocks a, .opens").dataset.block));
      if (narrow.matches) sections[here.stage].querySelector(".centre").scrollIntoView();
    }
    else if (at("[data-do]")) tools[at("[data-do]").dataset.do]();
    else if (at(".tree li[data-block]")) {
      const line = at(".tree li[data-block]"), part = line.dataset.module;
      const inside = (node) => part && (node.fqn === part || node.fqn.startsWith(`${part}.`));
      const nodes = stages[here.stage].blocks[line.dataset.block].nodes;
      show(here.stage, Number(line.dataset.block), nodes.findIndex(inside));
      if (narrow.matches) sections[here.stage].querySelector(".centre").scrollIntoView();
    }
  });
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const keys = {
      "/": () => search.focus(), "+": tools.in, "=": tools.in, "-": tools.out, "0": tools.fit, t: tools.text,
      "[": () => show(here.stage, here.block - 1), "]": () => show(here.stage, here.block + 1),
      ArrowDown: () => follow(1), ArrowUp: () => follow(-1), Escape: () => choose(-1),
    };
    const digit = Number(event.key);
    if (digit >= 1 && digit <= stages.length) return otherStage(digit - 1);
    const inText = event.target.closest(".listing, .left, .right") && event.key.startsWith("Arrow");
    const node = event.target.closest(".node");
    if ((event.key === "Enter" || event.key === " ") && node) { choose(indexOf(node.dataset.node)); event.preventDefault(); return; }
    const moves = "/[]".includes(event.key);  // also while no block is shown
    if (!keys[event.key] || inText || (here.block < 0 && !moves)) return;
    event.preventDefault();
    keys[event.key]();
  });
  const goTo = (hash) => {
    const found = /^#s(\d+)(?:-b(\d+)(?:-n(\d+))?)?$/.exec(hash);
    const [stage, block, node] = found ? found.slice(1).map((n) => (n === undefined ? -1 : Number(n))) : [stages.length - 1, -1, -1];
    show(stage, block, stages[stage] && stages[stage].blocks[block] && node < stages[stage].blocks[block].nodes.length ? node : -1);
  };
  window.addEventListener("hashchange", () => goTo(location.hash));
  goTo(location.hash);
})();
