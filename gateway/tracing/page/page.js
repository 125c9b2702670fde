"use strict";
// The picture: an overview of the whole request above a window of it. The data is T.
const T = JSON.parse(document.getElementById("trace").textContent);
const $ = (id) => document.getElementById(id);
const main = $("request"), fall = $("fall"), map = $("map"), tip = $("tip"), detail = $("detail");
const GUTTER = 84, CHAR = 6.65, END = Math.max(T.seconds, 1e-6), LEAST = Math.min(END, 0.002);
const view = { begin: T.window[0], end: T.window[1] };
let chosen = null, hovered = null; // {kind: "round" | "chain", index}

const escaped = (s) => String(s).replace(/[&<>"]/g, (c) => `&#${c.charCodeAt(0)};`);
const seen = (s) => s.replace(/ /g, "·").replace(/\n/g, "↵").replace(/\t/g, "⇥");
const time = (s) => Math.abs(s) < 0.00995 ? `${(1000 * s).toFixed(1)} ms`
  : Math.abs(s) < 0.9995 ? `${(1000 * s).toFixed(0)} ms` : `${s.toFixed(2)} s`;
const kindOf = (r, i) => i < r.accepted ? "accepted" : r.tested > r.accepted ? "recovered" : "bonus";
const same = (a, b) => a && b && a.kind === b.kind && a.index === b.index;
const get = (at) => at.kind === "round" ? T.rounds[at.index] : T.chains[at.index];
const chips = (r) => [...r.tokens.map((t, i) => [seen(t.text), kindOf(r, i)]), ...r.rejected.map((t) => [seen(t.text), "rejected"])];
const tallest = T.rounds.reduce((most, r) => Math.max(most, r.tokens.length + r.rejected.length), 2);
const ROW = Math.min(16, Math.floor(180 / tallest));
const foot = (r) => Y.targets[r.target] + 10 + ROW * (r.tokens.length + r.rejected.length);
const COLOUR = { accepted: "var(--accepted)", recovered: "var(--plain)", bonus: "var(--plain)", rejected: "var(--rejected)" };

// Rows: which lane a chain is drawn on, so that those that overlap do not hide each other.
const lanes = T.drafts.map((_, draft) => {
  const ends = [];
  for (const c of T.chains.filter((c) => c.draft === draft)) {
    let row = ends.findIndex((end) => end <= c.begin);
    if (row < 0) row = ends.length < 3 ? ends.length : ends.indexOf(Math.min(...ends));
    ends[row] = c.end;
    c.row = row;
  }
  return Math.max(1, ends.length);
});

function layout() {
  const at = { gateway: 34, targets: [], drafts: [] };
  let y = 62;
  for (const _ of T.targets) { at.targets.push(y); y += 16 + tallest * ROW; }
  y += T.drafts.length ? 26 : 0;
  for (const rows of lanes) { at.drafts.push(y); y += rows * 17 + 12; }
  at.height = y + 8;
  return at;
}
const Y = layout();

function scale(width) {
  const k = (width - GUTTER - 14) / (view.end - view.begin);
  return { x: (s) => GUTTER + (s - view.begin) * k, k, left: GUTTER, right: width - 14 };
}

function rect(S, begin, end, y, height, fill, more = "", radius = 2) {
  const a = Math.max(S.left, S.x(begin)), b = Math.min(S.right, S.x(end));
  if (b < a || S.x(end) < S.left || S.x(begin) > S.right) return "";
  return `<rect x="${a.toFixed(1)}" y="${y}" width="${Math.max(1, b - a).toFixed(1)}" height="${height}" rx="${Math.min(radius, (b - a) / 3)}" fill="${fill}" ${more}/>`;
}

function axis(S) {
  const span = view.end - view.begin, most = (S.right - S.left) / 90;
  let step = 1e-6;
  for (let i = 0; span / step > most; i++) step *= [2, 2.5, 2][i % 3];
  const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
  const label = (s) => view.end < 1 ? `${(1000 * s).toFixed(Math.max(0, digits - 3))} ms` : `${s.toFixed(digits)} s`;
  let out = "";
  for (let n = Math.ceil(view.begin / step - 1e-9); n * step <= view.end; n++) {
    const x = S.x(n * step).toFixed(1);
    out += `<line x1="${x}" x2="${x}" y1="22" y2="${Y.height}" stroke="var(--faint)"/>`;
    if (S.x(n * step) < S.right - 30) out += `<text x="${x}" y="14">${label(Math.max(0, n * step))}</text>`;
  }
  return out;
}

function drawRound(S, r) {
  // A bar for the step, and below it what it decided, token by token; what it rejected last.
  if (S.x(r.end) < S.left || S.x(r.begin) > S.right) return "";
  const a = Math.max(S.left, S.x(r.begin)), b = Math.min(S.right, S.x(r.end)), y = Y.targets[r.target];
  const gap = b - a > 5 ? 1 : 0, width = Math.max(.8, b - a - gap), at = a.toFixed(1);
  let out = `<rect x="${at}" y="${y}" width="${width.toFixed(1)}" height="7" fill="var(--steps)"/>`;
  chips(r).forEach(([text, kind], i) => {
    const top = y + 9 + i * ROW, lost = kind === "rejected", room = Math.floor((width - 7) / CHAR);
    out += `<rect x="${(a + (lost ? .5 : 0)).toFixed(1)}" y="${top + (lost ? .5 : 0)}" width="${Math.max(.8, width - lost).toFixed(1)}" height="${ROW - 1 - lost}" `
      + (lost && width > 4 ? 'fill="var(--rejected-tint)" stroke="var(--rejected)" stroke-opacity=".5"/>' : `fill="${COLOUR[kind]}"/>`);
    if (kind === "recovered" && width > 8) out += `<rect x="${at}" y="${top}" width="3" height="${ROW - 1}" fill="var(--rejected)"/>`;
    if (ROW > 11 && (room >= text.length || room > 2)) {
      out += `<text class="word${lost ? " lost" : ""}" x="${(a + 5).toFixed(1)}" y="${top + ROW / 2 + 3}">${escaped(text.length > room ? text.slice(0, room - 1) + "…" : text)}</text>`;
    }
  });
  const height = 9 + ROW * (r.tokens.length + r.rejected.length);
  return group("round", r.index, out + `<rect x="${at}" y="${y - 2}" width="${width.toFixed(1)}" height="${height + 4}" fill="transparent"/>`);
}

function group(kind, index, out) {
  const it = { kind, index }, focus = hovered || chosen;
  const off = focus && !related(focus, it) ? " off" : "";
  const on = same(chosen, it) ? ' style="filter:drop-shadow(0 0 0 1px var(--ink)) drop-shadow(0 0 1px var(--ink))"' : "";
  return `<g class="hit${off}"${on} data-kind="${kind}" data-index="${index}">${out}</g>`;
}

function related(a, b) {
  if (same(a, b)) return true;
  const [r, c] = a.kind === "round" ? [a, b] : [b, a];
  if (r.kind === c.kind) return false;
  return get(r).chains.includes(c.index) || get(c).cause === r.index;
}

function drawLinks(S) {
  const focus = hovered || chosen, shown = T.rounds.filter((r) => r.end >= view.begin && r.begin <= view.end);
  let out = "";
  const arc = (x0, y0, x1, y1, colour, opacity, dash) => {
    if (Math.max(x0, x1) < S.left || Math.min(x0, x1) > S.right) return;
    const bend = (y1 - y0) / 2;
    out += `<path d="M${x0.toFixed(1)} ${y0} C${x0.toFixed(1)} ${y0 + bend} ${x1.toFixed(1)} ${y1 - bend} ${x1.toFixed(1)} ${y1}" fill="none" stroke="${colour}" stroke-width="1.4" stroke-opacity="${opacity}" ${dash}/>`;
  };
  for (const r of shown) for (const index of r.chains) {
    const c = T.chains[index], mine = focus && (same(focus, { kind: "round", index: r.index }) || same(focus, { kind: "chain", index }));
    if (!mine && (focus || shown.length > 160)) continue;
    // What came while the step ran is tested in its last row.
    const late = c.begin >= r.begin, from = Math.min(c.end, late ? r.end : r.begin);
    arc(S.x(from), Y.drafts[c.draft] + c.row * 17, S.x(late ? r.end : r.begin), foot(r), "var(--draft)", mine ? 1 : .5, "");
  }
  for (const c of T.chains) {
    const mine = focus && c.cause !== null && (same(focus, { kind: "chain", index: c.index }) || same(focus, { kind: "round", index: c.cause }));
    if (!mine) continue;
    const r = T.rounds[c.cause];
    arc(S.x(r.end), foot(r), S.x(c.begin), Y.drafts[c.draft] + c.row * 17, "var(--steps)", .9, 'stroke-dasharray="3 3"');
  }
  return out;
}

function draw() {
  const width = fall.clientWidth, S = scale(width);
  let out = axis(S);
  const lane = (name, y) => { out += `<text class="lane" x="16" y="${y}">${escaped(name)}</text>`; };
  lane("gateway", Y.gateway + 12);
  out += rect(S, 0, END, Y.gateway + 4, 8, "var(--gateway)", "", 4);
  if (T.first !== null && T.first >= view.begin && T.first <= view.end) {
    const x = S.x(T.first), flip = x > S.right - 80;
    out += `<line x1="${x}" x2="${x}" y1="${Y.gateway - 1}" y2="${Y.gateway + 17}" stroke="var(--ink)" stroke-width="1.5"/><text x="${x + (flip ? -5 : 5)}" y="${Y.gateway + 1}" text-anchor="${flip ? "end" : "start"}">first token</text>`;
  }
  T.targets.forEach((t, i) => {
    const y = Y.targets[i];
    lane(T.targets.length > 1 ? `target ${i + 1}` : "target", y + 11);
    if (t.sequence) out += rect(S, t.sequence[0], t.sequence[1], y + 2, 3, "var(--line)");
    if (t.sequence && t.prefill) out += rect(S, t.sequence[0], t.prefill[0], y, 7, "var(--queue)");
    if (t.prefill) out += rect(S, t.prefill[0], t.prefill[1], y, 7, "var(--prefill)") + inBar(S, t.prefill, y + 22, `prompt, ${t.prefilled} read`);
  });
  T.drafts.forEach((d, i) => {
    const y = Y.drafts[i], open = d.sequence || d.session;
    lane(T.drafts.length > 1 ? `draft ${i + 1}` : "draft", y + 11);
    if (open) out += rect(S, open[0], open[1], y + 6, 3, "var(--line)");
    if (d.prefill) out += rect(S, d.prefill[0], d.prefill[1], y, 14, "var(--prefill)");
    if (d.lost && d.session && d.session[1] >= view.begin && d.session[1] <= view.end) {
      out += `<text x="${S.x(d.session[1]) + 4}" y="${y + 11}" style="fill:var(--rejected)">lost</text>`;
    }
  });
  out += drawLinks(S);
  for (const c of T.chains) {
    const y = Y.drafts[c.draft] + c.row * 17;
    const bar = rect(S, c.begin, c.end, y, 14, c.used.length ? "var(--draft)" : "var(--queue)", "", 3);
    if (bar) out += group("chain", c.index, bar + rect(S, c.begin - 3 / S.k, c.end + 3 / S.k, y - 3, 20, "transparent"));
  }
  for (const r of T.rounds) out += drawRound(S, r);
  fall.setAttribute("height", Y.height);
  fall.innerHTML = out;
  drawMap();
}

function inBar(S, [begin, end], y, text) {
  const a = Math.max(S.left, S.x(begin)), b = Math.min(S.right, S.x(end));
  return b - a > text.length * 6.9 ? `<text x="${a + 1}" y="${y}">${escaped(text)}</text>` : "";
}

function drawMap() {
  const width = map.clientWidth, k = (width - GUTTER - 14) / END, x = (s) => GUTTER + s * k;
  const most = T.rounds.reduce((m, r) => Math.max(m, r.tokens.length), 2);
  let out = `<text x="16" y="27" style="font:12px var(--sans);fill:var(--mute)">overview</text>`;
  for (const t of T.targets) if (t.prefill) out += `<rect x="${x(t.prefill[0])}" y="26" width="${Math.max(1, (t.prefill[1] - t.prefill[0]) * k)}" height="12" fill="var(--prefill)"/>`;
  for (const r of T.rounds) {
    const height = 30 * Math.max(1, r.tokens.length) / most, w = Math.max(.7, (r.end - r.begin) * k - (T.rounds.length < 300 ? .6 : 0));
    const good = height * (r.tokens.length ? r.accepted / r.tokens.length : 0);
    out += `<rect x="${x(r.begin).toFixed(1)}" y="${(38 - height).toFixed(1)}" width="${w.toFixed(1)}" height="${height.toFixed(1)}" fill="${r.tested > r.accepted ? "var(--rejected)" : "var(--plain)"}" opacity=".75"/>`;
    if (good) out += `<rect x="${x(r.begin).toFixed(1)}" y="${(38 - good).toFixed(1)}" width="${w.toFixed(1)}" height="${good.toFixed(1)}" fill="var(--accepted)"/>`;
  }
  const a = x(view.begin), b = x(view.end);
  out += `<rect x="${GUTTER}" y="0" width="${Math.max(0, a - GUTTER)}" height="44" fill="var(--faint)" opacity=".72"/><rect x="${b}" y="0" width="${Math.max(0, width - b)}" height="44" fill="var(--faint)" opacity=".72"/>`;
  out += `<rect x="${a}" y="1" width="${Math.max(3, b - a)}" height="42" rx="4" fill="none" stroke="var(--ink)" stroke-width="1.3"/>`;
  map.innerHTML = out;
}
