// What one can do with the picture: move, zoom, hover, choose.
function move(begin, end) {
  const span = Math.min(END, Math.max(LEAST, end - begin));
  view.begin = Math.min(Math.max(0, begin), END - span);
  view.end = view.begin + span;
  ask();
}
let asked = false;
function ask() {
  if (asked) return;
  asked = true;
  requestAnimationFrame(() => { asked = false; draw(); });
}
function zoom(factor, around = (view.begin + view.end) / 2) {
  move(around - (around - view.begin) * factor, around + (view.end - around) * factor);
}
function pan(part) {
  const by = (view.end - view.begin) * part;
  move(view.begin + by, view.end + by);
}
function show(it) {
  const { begin, end } = get(it), span = view.end - view.begin;
  if (begin < view.begin || end > view.end) move((begin + end - span) / 2, (begin + end + span) / 2);
}

const chip = (t, kind) => `<span class="t ${kind}">${escaped(seen(t.text))}</span>`;
const roundLink = (i) => `<button type="button" class="link step" data-kind="round" data-index="${i}">round ${i + 1}</button>`;
const chainLink = (i) => `<button type="button" class="link" data-kind="chain" data-index="${i}">proposal ${i + 1}</button>`;
const rows = (pairs) => `<dl>${pairs.filter((p) => p[1] !== "" && p[1] !== null).map(([k, v]) => `<dt>${k}</dt><dd>${v}</dd>`).join("")}</dl>`;

function tellRound(r) {
  const chips = r.tokens.map((t, i) => chip(t, kindOf(r, i)));
  chips.splice(r.accepted, 0, ...r.rejected.map((t) => chip(t, "rejected")));
  const began = T.chains.filter((c) => c.cause === r.index).map((c) => chainLink(c.index));
  return `<h3>Round ${r.index + 1}</h3><p class="words">${chips.join("")}</p>` + rows([
    ["began at", time(r.begin)], ["took", time(r.end - r.begin)],
    ["tested", r.tested], ["accepted", r.tested ? r.accepted : ""],
    ["consumed", r.chains.map((i) => chainLink(i) + (T.chains[i].begin >= r.begin ? "<br>came while it ran" : "")).join("") || (r.unresolved ? "a proposal that is not here" : "no proposal")],
    ["guess waited", r.wait === null ? "" : time(r.wait)], ["its commit began", began.join("")],
    ["stale before it", r.stale || ""], ["position", r.committed],
    ["step", r.step], ["sequences in the step", r.batch], ["rows of the step", r.rows]]);
}
function tellChain(c) {
  return `<h3>Proposal ${c.index + 1}</h3><p class="words">${c.tokens.map((t) => chip(t, "")).join("")}</p>` + rows([
    ["began at", time(c.begin)], ["took", time(c.end - c.begin)],
    ["tokens", c.num], ["consumed by", c.used.map(roundLink).join("") || "nobody"],
    ["caused by", c.cause === null ? "" : roundLink(c.cause)],
    ["held in the draft", c.held === null ? "" : time(c.held)],
    ["position", c.start], ["chain", c.serial], ["draft", T.drafts.length > 1 ? c.draft + 1 : ""]]);
}
function tellRequest() {
  const peer = (name, p) => [T[name].length > 1 ? `${name.slice(0, -1)} ${p.index + 1}` : name.slice(0, -1),
    `${escaped(p.address || "address not known")}${p.reason && p.reason !== "first" ? `<br>${escaped(p.reason.replace("_", " "))}` : ""}${p.lost ? "<br>lost" : ""}`];
  return '<p class="empty">Choose a bar or a token. The request was served by</p>'
    + rows([...T.targets.map((p) => peer("targets", p)), ...T.drafts.map((p) => peer("drafts", p))]);
}
function choose(it, visible = true) {
  chosen = it;
  hovered = null;
  detail.innerHTML = !it ? tellRequest()
    : it.kind === "round" ? tellRound(get(it)) : tellChain(get(it));
  for (const on of document.querySelectorAll("#tokens .on")) on.classList.remove("on");
  if (it && it.kind === "round") {
    for (const t of document.querySelectorAll(`#tokens [data-round="${it.index}"]`)) t.classList.add("on");
  }
  if (it && visible) show(it);
  ask();
}

const of = (event) => {
  const hit = event.target.closest("[data-kind]");
  return hit && { kind: hit.dataset.kind, index: Number(hit.dataset.index) };
};
function hint(event, it) {
  tip.hidden = !it;
  if (!it) return;
  const thing = get(it), texts = thing.tokens.map((t) => seen(t.text));
  tip.innerHTML = it.kind === "round"
    ? `<b>Round ${it.index + 1}</b> · ${time(thing.end - thing.begin)} · ${thing.tested ? `${thing.accepted} of ${thing.tested} accepted` : "nothing to test"}<br><code>${escaped(texts.join(" "))}</code>`
    : `<b>Proposal ${it.index + 1}</b> · ${time(thing.end - thing.begin)} · ${thing.used.length ? `round ${thing.used.map((i) => i + 1).join(", ")}` : "not tested"}<br><code>${escaped(texts.join(" "))}</code>`;
  const { width, height } = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(6, Math.min(innerWidth - width - 8, event.clientX + 14))}px`;
  tip.style.top = `${event.clientY + 18 + height > innerHeight ? event.clientY - height - 12 : event.clientY + 18}px`;
}

let drag = null;
fall.addEventListener("pointerdown", (e) => { drag = { x: e.clientX, begin: view.begin, moved: false, it: of(e) }; });
addEventListener("pointermove", (e) => {
  if (!drag) return;
  const by = e.clientX - drag.x, span = view.end - view.begin;
  if (!drag.moved && Math.abs(by) < 4) return;
  drag.moved = true;
  tip.hidden = true;
  const begin = drag.begin - by * span / (fall.clientWidth - GUTTER - 14);
  move(begin, begin + span);
});
addEventListener("pointerup", () => {
  if (drag && !drag.moved) choose(drag.it, false);
  drag = null;
});
fall.addEventListener("pointermove", (e) => {
  if (drag) return;
  const it = of(e);
  hint(e, it);
  if (!same(it, hovered) && (it || hovered)) { hovered = it; ask(); }
});
fall.addEventListener("pointerleave", () => { tip.hidden = true; if (hovered) { hovered = null; ask(); } });
fall.addEventListener("wheel", (e) => {
  if (e.ctrlKey || e.metaKey) {
    e.preventDefault();
    const part = (e.offsetX - GUTTER) / (fall.clientWidth - GUTTER - 14);
    zoom(Math.exp(Math.max(-40, Math.min(40, e.deltaY)) / 80), view.begin + part * (view.end - view.begin));
  } else if (Math.abs(e.deltaX) > Math.abs(e.deltaY) || e.shiftKey) {
    e.preventDefault();
    pan((e.deltaX || e.deltaY) / fall.clientWidth);
  }
}, { passive: false });
fall.addEventListener("keydown", (e) => {
  const step = { ArrowLeft: -1, ArrowRight: 1 }[e.key];
  if (step && T.rounds.length) {
    const from = chosen && chosen.kind === "round" ? chosen.index + step : T.rounds.findIndex((r) => r.end > view.begin);
    choose({ kind: "round", index: Math.max(0, Math.min(T.rounds.length - 1, from)) });
  } else if (e.key === "+" || e.key === "=") zoom(0.6);
  else if (e.key === "-") zoom(1 / 0.6);
  else if (e.key === "0") move(0, END);
  else if (e.key === "Escape") choose(null);
  else return;
  e.preventDefault();
});
function toMap(e) {
  const box = map.getBoundingClientRect(), at = (e.clientX - box.left - GUTTER) / (box.width - GUTTER - 14) * END;
  const span = view.end - view.begin;
  move(at - span / 2, at + span / 2);
}
map.addEventListener("pointerdown", (e) => { map.setPointerCapture(e.pointerId); toMap(e); });
map.addEventListener("pointermove", (e) => { if (map.hasPointerCapture(e.pointerId)) toMap(e); });
document.querySelector(".tools").addEventListener("click", (e) => {
  const deeds = { left: () => pan(-0.5), right: () => pan(0.5), in: () => zoom(0.6), out: () => zoom(1 / 0.6), fit: () => move(0, END) };
  const deed = deeds[e.target.dataset.do];
  if (deed) deed();
});
detail.addEventListener("click", (e) => { const it = of(e); if (it) choose(it); });
$("tokens").addEventListener("click", (e) => {
  const t = e.target.closest("[data-round]");
  if (t) choose({ kind: "round", index: Number(t.dataset.round) });
});
$("show-rejected").addEventListener("change", (e) => $("tokens").classList.toggle("show-rejected", e.target.checked));
$("theme").addEventListener("click", () => {
  const root = document.documentElement, dark = matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = (root.dataset.theme || (dark ? "dark" : "light")) === "dark" ? "light" : "dark";
});
new ResizeObserver(ask).observe(fall);
choose(null);
draw();
main.dataset.drawn = String(fall.querySelectorAll('[data-kind="round"]').length);
