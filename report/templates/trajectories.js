// The trajectory explorer. Everything that it shows is in the page: a manifest and arrays of numbers, as
// report/explorer/packing.py writes them. Texts of tokens and names come from strangers: they are set as text, never as
// markup. Positions t count from 1.

const SVG = "http://www.w3.org/2000/svg";
const KINDS = {
  earliest: "Earliest divergence", median: "Median divergence", latest: "Latest divergence",
  exposure: "Longest exposure", agreement: "Longest agreement", lost: "Lost answers",
};
const PADDING = 11; // of a token's cell, in CSS pixels, with its rounding
const LEAST_WIDTH = 21;
const ALL = -1; // the stratum of all strata

const byId = (id) => document.getElementById(id);

function make(tag, attributes = {}, ...children) {
  const drawn = ["svg", "g", "path", "rect", "line", "text", "title"].includes(tag);
  const element = drawn ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

// ---- What the page holds ----

async function unpacked(id) {
  const text = atob(byId(id).textContent);
  const bytes = Uint8Array.from(text, (character) => character.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).arrayBuffer();
}

async function load() {
  const data = JSON.parse(new TextDecoder().decode(await unpacked("manifest")));
  const bytes = new Uint8Array(await unpacked("arrays"));
  const count = data.trajectories.document.length;
  let place = 0;
  const numbers = (rows, size) => { // bytes of a number stand apart, the lowest first
    const length = rows * data.horizon;
    const found = new Uint32Array(length);
    for (let byte = 0; byte < size; byte += 1) {
      for (let at = 0; at < length; at += 1) found[at] += bytes[place + at] * 2 ** (8 * byte);
      place += length;
    }
    return found;
  };
  const size = data.tokens.length <= 65536 ? 2 : 4;
  const [x, y] = [numbers(data.references, size), numbers(count, size)];
  const [delta, f] = [numbers(count, 4), numbers(count, 4)];
  for (let at = 0; at < f.length; at += 1) f[at] ^= delta[at];
  return { ...data, count, x, y, delta: new Float32Array(delta.buffer), f: new Float32Array(f.buffer) };
}

/** A trajectory by its number, with its streams and what follows from them. */
function trajectory(data, row) {
  const values = {};
  for (const [name, column] of Object.entries(data.trajectories)) values[name] = column[row];
  const own = (all, at) => all.subarray(at * data.horizon, (at + 1) * data.horizon);
  const [x, y] = [own(data.x, values.reference), own(data.y, row)];
  const over = values.eos_x && values.eos_y ? Math.max(values.eos_x, values.eos_y) : data.horizon;
  const runs = [];
  for (let t = 1; t <= data.horizon; t += 1) {
    if (x[t - 1] === y[t - 1]) continue;
    const last = runs[runs.length - 1];
    if (last && last.last === t - 1) last.last = t;
    else runs.push({ first: t, last: t });
  }
  return { ...values, row, x, y, over, runs, delta: own(data.delta, row), f: own(data.f, row),
    name: data.actions[values.action], colour: `var(--c${values.action % 6})` };
}

// ---- Words ----

const CONTROL = /[\u0000-\u001f\u007f]/g;

function visible(text) {
  if (text === "") return "∅";
  return text.replaceAll("\n", "↵").replaceAll("\t", "⇥")
    .replace(CONTROL, (sign) => String.fromCharCode(sign === "\u007f" ? 0x2421 : 0x2400 + sign.charCodeAt(0)));
}

const many = (number) => number.toLocaleString("en-US");
const fixed = (value) => value !== 0 && value < 0.00005 ? value.toExponential(1) : value.toFixed(4);
const quoted = (word) => /^[\w./:@%+,=-]+$/.test(word) ? word : `'${word.replaceAll("'", "'\\''")}'`;

function judged(score) {
  if (score === null) return "";
  return score === 1 ? "right" : score === 0 ? "wrong" : `${Math.round(100 * score)}% right`;
}

// ---- The page ----

class Explorer {
  constructor(data) {
    this.data = data;
    this.rows = new Map();
    const { document: docs, action, replicate } = data.trajectories;
    for (let row = 0; row < data.count; row += 1) this.rows.set(`${docs[row]} ${action[row]} ${replicate[row]}`, row);
    this.stratum = ALL;
    this.compare = false;
    this.turns = new Map(); // how often each jump to several trajectories was taken
    this.texts = data.tokens.map((token, at) => visible(data.texts ? data.texts[at] : String(token)));
    this.measure = document.createElement("canvas").getContext("2d");
    this.measure.font = '12.5px ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace';
    this.measured = new Map();
    this.prompt = new PromptView(this);
  }

  find(docAt, action, replicate) {
    return this.rows.get(`${docAt} ${action} ${replicate}`);
  }

  of(column, row = this.row) {
    return this.data.trajectories[column][row];
  }

  /** Rows of this document, or of one of its actions, in the order of actions and replicates. */
  rowsOf(docAt, action = null) {
    const { document: docs, action: actions, replicate } = this.data.trajectories;
    const found = [];
    for (let row = 0; row < this.data.count; row += 1) {
      if (docs[row] === docAt && (action === null || actions[row] === action)) found.push(row);
    }
    return found.sort((a, b) => actions[a] - actions[b] || replicate[a] - replicate[b]);
  }

  documents() {
    return this.data.documents.map((_, at) => at)
      .filter((at) => this.stratum === ALL || this.data.documents[at].stratum === this.stratum);
  }

  // ---- Where we are ----

  fragment() {
    const doc = this.data.documents[this.of("document")].doc;
    const parts = { doc, action: this.data.actions[this.of("action")], replicate: this.of("replicate") };
    if (this.compare) parts.compare = 1;
    if (this.t !== (this.shown[0].tau ?? 1)) parts.t = this.t;
    return `#${Object.entries(parts).map(([name, value]) => `${name}=${encodeURIComponent(value)}`).join("&")}`;
  }

  /** Go where the address says; where it names nothing, to the first jump's trajectory that is typical. */
  follow() {
    const asked = new URLSearchParams(location.hash.slice(1).replaceAll("+", "%2B"));
    byId("notice").hidden = true;
    let row;
    if (asked.has("doc")) {
      const docAt = this.data.documents.findIndex((one) => one.doc === asked.get("doc"));
      row = this.find(docAt, this.data.actions.indexOf(asked.get("action")), Number(asked.get("replicate") ?? 0));
      if (row === undefined) {
        this.say(`This file does not have replicate ${asked.get("replicate")} of ${asked.get("doc")} under `
          + `${asked.get("action")}. If the store has it, this prints it: ${this.command(asked.get("doc"),
            asked.get("action") ?? "ACTION", asked.get("replicate") ?? 0)}`);
      }
    }
    this.compare = asked.get("compare") === "1";
    const start = this.data.jumps.find((jump) => jump.kind === "median") ?? this.data.jumps[0];
    this.show(row ?? this.row ?? (start ? start.to[0] : 0), Number(asked.get("t")) || null);
    this.remember(false);
  }

  say(text) {
    byId("notice").textContent = text;
    byId("notice").hidden = false;
  }

  remember(push) {
    clearTimeout(this.waiting);
    const fragment = this.fragment();
    if (location.hash === fragment) return;
    if (push) location.hash = fragment;
    else history.replaceState(null, "", fragment);
  }

  go(row) {
    if (row === undefined || row === null) return;
    byId("notice").hidden = true;
    this.show(row, null);
    this.remember(true);
  }

  /** Show a trajectory, at position t, or at τ. */
  show(row, t) {
    this.row = row;
    const docAt = this.of("document");
    if (this.stratum !== ALL && this.data.documents[docAt].stratum !== this.stratum) this.stratum = ALL;
    const own = trajectory(this.data, row);
    this.shown = [own];
    if (this.compare) {
      const beside = this.data.actions.map((_, action) => this.find(docAt, action, own.replicate))
        .filter((other) => other !== undefined && other !== row && this.of("reference", other) === own.reference);
      this.shown.push(...beside.map((other) => trajectory(this.data, other)));
    }
    this.t = Math.min(Math.max(t ?? own.tau ?? 1, 1), this.data.horizon);
    this.drawChoice();
    this.drawJumps();
    this.drawAbout();
    this.draw();
    this.drawPairs();
    this.prompt.show().then(() => this.drawAnswers());
  }

  /** Draw what depends on the width of the window. */
  draw() {
    this.width = Math.max(Math.floor(byId("overview").clientWidth), 200); // a window may have no size for a moment
    this.drawOverview();
    this.drawScore();
    this.mark();
    this.prompt.draw();
  }

  // ---- Choosing ----

  drawChoice() {
    const { data } = this;
    const fill = (id, options, chosen) => byId(id).replaceChildren(...options.map(([value, text, disabled]) =>
      make("option", { value, selected: value === chosen, disabled }, text)));
    const docAt = this.of("document");
    fill("stratum", [[ALL, "all strata"], ...data.strata.map((name, at) =>
      [at, name, !data.documents.some((one) => one.stratum === at)])], this.stratum);
    fill("document", this.documents().map((at) => [at, data.documents[at].doc]), docAt);
    fill("action", data.actions.map((name, at) => [at, name, !this.rowsOf(docAt, at).length]), this.of("action"));
    fill("replicate", this.rowsOf(docAt, this.of("action")).map((row) => [row, String(this.of("replicate", row))]), this.row);
    byId("compare").checked = this.compare;
    for (const button of document.querySelectorAll("[data-step]")) {
      const options = byId(button.dataset.step).options;
      const next = byId(button.dataset.step).selectedIndex + Number(button.dataset.by);
      button.disabled = next < 0 || next >= options.length;
    }
  }

  choose(id) {
    const value = Number(byId(id).value);
    if (id === "replicate") this.go(value);
    if (id === "document") this.toDocument(value);
    if (id === "action") this.toAction(value);
    if (id === "stratum") {
      this.stratum = value;
      const documents = this.documents();
      if (documents.includes(this.of("document"))) this.show(this.row, this.t);
      else this.toDocument(documents[0]);
    }
  }

  toDocument(docAt) {
    const [action, replicate] = [this.of("action"), this.of("replicate")];
    this.go(this.find(docAt, action, replicate) ?? this.rowsOf(docAt, action)[0] ?? this.rowsOf(docAt)[0]);
  }

  toAction(action) {
    const docAt = this.of("document");
    this.go(this.find(docAt, action, this.of("replicate")) ?? this.rowsOf(docAt, action)[0]);
  }

  step(id, by) {
    const select = byId(id);
    const next = select.selectedIndex + by;
    if (next < 0 || next >= select.options.length) return;
    select.selectedIndex = next;
    this.choose(id);
  }

  setCompare(compare) {
    this.compare = compare;
    this.show(this.row, this.t);
    this.remember(true);
  }

  drawJumps() {
    const stratum = this.stratum === ALL ? null : this.stratum;
    this.jumps = Object.keys(KINDS).map((kind) => this.data.jumps.find((jump) =>
      jump.kind === kind && jump.stratum === stratum && jump.action === this.of("action")));
    const buttons = Object.entries(KINDS).map(([kind, label], at) => {
      const jump = this.jumps[at];
      const button = make("button", { type: "button", "data-jump": kind, disabled: !jump,
        "aria-current": jump && jump.to.includes(this.row) ? "true" : null, title: `key ${at + 1}` }, label);
      if (jump && kind === "lost") {
        const turn = jump.to.indexOf(this.row);
        const here = jump.to.length < jump.total ? `${many(jump.to.length)} here, of ${many(jump.total)}` : many(jump.total);
        button.append(make("small", {}, turn < 0 ? ` ${here}` : ` ${many(turn + 1)} of ${here}`));
      }
      button.addEventListener("click", () => this.jump(at));
      return button;
    });
    const where = this.stratum === ALL ? "all strata" : this.data.strata[this.stratum];
    byId("jumps").replaceChildren(make("span", { class: "quiet" },
      `Jump, of ${this.data.actions[this.of("action")]} in ${where}:`), ...buttons);
  }

  jump(at) {
    const jump = this.jumps[at];
    if (!jump) return;
    this.go(jump.to[(jump.to.indexOf(this.row) + 1) % jump.to.length]);
    document.querySelector(`[data-jump="${Object.keys(KINDS)[at]}"]`).focus({ preventScroll: true });
  }

  // ---- What happens in it ----

  drawAbout() {
    const [own] = this.shown;
    const doc = this.data.documents[own.document];
    byId("story").replaceChildren(`${own.name}: `,
      own.tau === null ? `X and Y agree through position ${this.data.horizon}` : `first mismatch at τ = ${own.tau}`,
      make("span", { class: "quiet" }, ` · ${doc.doc}, replicate ${own.replicate}`));
    const end = (side, at) => at === null ? `${side} does not end` : `${side} ends at ${at}`;
    const parts = [`${own.mismatches} of ${this.data.horizon} positions differ${
      own.runs.length > 1 ? `, in ${own.runs.length} runs` : ""}`];
    if (own.agreement) parts.push(`the longest agreement after τ has ${own.agreement}`);
    parts.push(`${end("X", own.eos_x)}, ${end("Y", own.eos_y)}`);
    parts.push(this.data.strata[doc.stratum] + (doc.task ? `, ${doc.task}` : "")
      + (doc.prompt ? `, prompt of ${many(doc.prompt)} tokens` : ""));
    byId("outcome").textContent = `${parts.join("; ")}.`;
    this.drawAnswers();
    byId("command").textContent = this.command(doc.doc, own.name, own.replicate);
  }

  drawAnswers() {
    const [own] = this.shown;
    const doc = this.data.documents[own.document];
    const answers = byId("answers");
    answers.hidden = !doc.answers.length;
    const codes = doc.answers.flatMap((answer, at) => {
      const kept = this.prompt.recordWords(at);
      return [at ? ", " : " ", make("code", {}, visible(answer)),
        kept ? make("span", { class: kept === "0%" ? "record-gone" : "quiet" }, ` (record ${kept === "0%" ? "gone" : kept === "100%" ? "kept" : `${kept} kept`})`) : null];
    });
    answers.replaceChildren(doc.answers.length > 1 ? "Answers:" : "Answer:", ...codes.filter((part) => part !== null), ".");
    if (own.score_x !== null) {
      const side = (name, score) => [` ${name} is `, make("span", { class: score === 1 ? "right" : "wrong" }, judged(score))];
      const place = own.span_first === null ? "" : `, at ${own.span_first}–${own.span_last}`;
      answers.append(...side("X", own.score_x), `${place};`, ...side("Y", own.score_y), ".");
    }
  }

  command(doc, action, replicate) {
    return ["kvdrift show", this.data.store || "STORE", doc, action, String(replicate)]
      .map((word, at) => at ? quoted(word) : word).join(" ");
  }

  /** Stretches of one kind: X and Y agree ("base"), differ ("apart"), or have both ended ("over"). */
  stretches(one) {
    const found = [];
    for (let t = 1; t <= this.data.horizon; t += 1) {
      const kind = t > one.over ? "over" : one.x[t - 1] === one.y[t - 1] ? "base" : "apart";
      const last = found[found.length - 1];
      if (last && last.kind === kind) last.last = t;
      else found.push({ kind, first: t, last: t });
    }
    return found;
  }

  bars(one, left, unit, top, height) {
    return this.stretches(one).map(({ kind, first, last }) => make("rect", { class: kind, x: left + (first - 1) * unit, y: top,
      width: (last - first + 1) * unit, height }));
  }

  /** Curves of positions first to last as steps; edges[i] is where position first + i begins. */
  steps(values, edges, first, last, height, closed) {
    const level = (t) => (height - 1 - (height - 3) * values[t - 1]).toFixed(2);
    let path = closed ? `M${edges[0]},${height - 1}V${level(first)}` : `M${edges[0]},${level(first)}`;
    for (let t = first; t <= last; t += 1) path += `V${level(t)}H${edges[t - first + 1]}`;
    return closed ? `${path}V${height - 1}Z` : path;
  }

  drawOverview() {
    const { horizon } = this.data;
    const left = 26;
    const unit = (this.width - left - 8) / horizon;
    const single = this.shown.length === 1;
    const [bar, lane, gap] = [12, single ? 72 : 30, 8];
    const edges = Array.from({ length: horizon + 1 }, (_, at) => +(left + at * unit).toFixed(2));
    const height = 20 + this.shown.length * (bar + lane + gap) + 14;
    const svg = make("svg", { viewBox: `0 0 ${this.width} ${height}`, role: "img", "aria-label": this.words() });
    this.cursor = make("rect", { class: "cursor", y: 16, width: Math.max(unit, 2), height: height - 32 });
    svg.append(this.cursor);
    this.shown.forEach((one, at) => {
      const top = 20 + at * (bar + lane + gap);
      const group = make("g", { style: `--colour: ${one.colour}` }, ...this.bars(one, left, unit, top, bar));
      const curves = make("g", { transform: `translate(0 ${top + bar + 2})` },
        make("path", { class: "axis", d: `M${left},1H${this.width - 8}M${left},${lane - 1}H${this.width - 8}` }),
        make("path", { class: "delta", d: this.steps(one.delta, edges, 1, horizon, lane, true) }),
        make("path", { class: "f", d: this.steps(one.f, edges, 1, horizon, lane, false) }),
        make("text", { x: left - 5, y: 8, "text-anchor": "end" }, "1"),
        make("text", { x: left - 5, y: lane, "text-anchor": "end" }, "0"));
      group.append(curves);
      const end = top + bar + lane + 2;
      for (const eos of new Set([one.eos_x, one.eos_y])) {
        if (eos) group.append(make("line", { class: "eos", x1: edges[eos - 1], x2: edges[eos - 1], y1: top, y2: end }));
      }
      if (one.tau) {
        group.append(make("line", { class: "tau", x1: edges[one.tau - 1], x2: edges[one.tau - 1], y1: top - 2, y2: end }));
      }
      if (at === 0 && one.span_first) {
        group.append(make("line", { class: "answer", x1: edges[one.span_first - 1], x2: edges[one.span_last], y1: top - 3, y2: top - 3 }));
      }
      svg.append(group);
    });
    const [first] = this.shown;
    const labels = [[first.tau, first.tau === null ? "" : `τ ${first.tau}`, "strong"]];
    if (single) {
      const both = first.eos_x && first.eos_x === first.eos_y;
      labels.push([first.eos_x, both ? "both end" : "X ends", ""], [both ? null : first.eos_y, "Y ends", ""]);
    }
    let taken = [];
    for (const [t, text, kind] of labels) {
      if (t === null) continue;
      const half = 3.4 * text.length;
      const x = Math.min(Math.max(edges[t - 1], left + half), this.width - half);
      if (taken.some((other) => Math.abs(other - x) < 52)) continue;
      taken.push(x);
      svg.append(make("text", { class: kind, x, y: 11, "text-anchor": "middle" }, text));
    }
    const between = horizon <= 32 ? 8 : 2 ** Math.ceil(Math.log2(horizon / (this.width > 700 ? 16 : 6)));
    for (let t = between; t <= horizon; t += between) {
      svg.append(make("text", { x: (edges[t - 1] + edges[t]) / 2, y: height - 2, "text-anchor": "middle" }, String(t)));
    }
    const point = (event) => {
      const box = svg.getBoundingClientRect();
      this.move(Math.floor(((event.clientX - box.left) * this.width / box.width - left) / unit) + 1, true);
    };
    svg.addEventListener("pointerdown", (event) => { point(event); svg.setPointerCapture(event.pointerId); });
    svg.addEventListener("pointermove", (event) => { if (svg.hasPointerCapture(event.pointerId)) point(event); });
    this.edges = edges;
    byId("overview").replaceChildren(svg);
  }

  words() {
    return this.shown.map((one) => `${one.name}: ${one.tau === null ? "no mismatch" : `first mismatch at ${one.tau}`}, `
      + `${one.mismatches} of ${this.data.horizon} positions differ, in ${one.runs.length} runs`).join("; ");
  }

  // ---- Tokens ----

  widthOf(token) {
    if (!this.measured.has(token)) {
      this.measured.set(token, Math.ceil(this.measure.measureText(this.texts[token]).width) + PADDING);
    }
    return this.measured.get(token);
  }

  drawScore() {
    const label = this.width < 600 ? 26 : Math.min(150, 18 + Math.max(...this.shown.map((one) =>
      Math.ceil(this.measure.measureText(one.name).width))));
    const room = this.width - label - 2;
    const { horizon } = this.data;
    this.cells = Array.from({ length: horizon + 1 }, () => []);
    const systems = [];
    let first = 1;
    while (first <= horizon) {
      const widths = [];
      let sum = 0;
      for (let t = first; t <= horizon; t += 1) {
        const own = Math.min(room, Math.max(LEAST_WIDTH, this.widthOf(this.shown[0].x[t - 1]),
          ...this.shown.map((one) => this.widthOf(one.y[t - 1]))));
        if (sum + own > room) break;
        widths.push(own);
        sum += own;
      }
      systems.push(this.system(first, widths, label));
      first += widths.length;
    }
    byId("score").replaceChildren(...systems);
  }

  system(first, widths, label) {
    const last = first + widths.length - 1;
    const edges = [0];
    for (const width of widths) edges.push(edges[edges.length - 1] + width);
    const total = edges[edges.length - 1];
    const positions = widths.map((_, at) => first + at);
    const [own] = this.shown;
    const single = this.shown.length === 1;
    const ticks = make("tr", { class: "ticks" }, make("th", { scope: "row" }, make("span", { class: "unseen" }, "position")),
      ...positions.map((t) => make("td", { "data-t": t, class: t === own.tau ? "tau" : null },
        t === own.tau ? "τ" : t === 1 || t % 10 === 0 ? String(t) : "")));
    const rows = [ticks, this.tokens("X", own.x, own.eos_x, positions, (t) =>
      [own.span_first && t >= own.span_first && t <= own.span_last ? "answer" : "",
        ...(single ? [t === own.tau ? "tau-at" : "", own.x[t - 1] !== own.y[t - 1] ? "apart" : ""] : [])], "x", null)];
    for (const one of this.shown) {
      rows.push(this.tokens(one.name, one.y, one.eos_y, positions, (t) =>
        [one.x[t - 1] !== one.y[t - 1] ? "apart" : "", t === one.tau ? "tau-at" : ""], "y", one.colour));
      rows.push(this.lane(one, edges, first, last, total));
    }
    const columns = [label, ...widths].map((width) => make("col", { style: `width: ${width}px` }));
    return make("table", { style: `width: ${label + total}px`, "aria-label": `Positions ${first} to ${last}` },
      make("colgroup", {}, ...columns), make("tbody", {}, ...rows));
  }

  tokens(name, stream, eos, positions, kinds, side, colour) {
    const title = name === "X" ? "reference X" : `${this.data.other} Y, ${name}`;
    const short = this.width < 600 && side === "y";
    const single = this.shown.length === 1;
    const head = make("th", { scope: "row", title, style: colour ? `--colour: ${colour}` : null },
      colour && !(short && single) ? make("span", { class: "swatch" }) : null,
      short ? make("span", { class: single ? null : "unseen" }, single ? "Y" : name) : name);
    return make("tr", { class: side }, head, ...positions.map((t) => {
      const ended = eos !== null && t >= eos ? (t === eos ? "eos" : "after") : "";
      const text = this.texts[stream[t - 1]];
      const cell = make("td", { class: [...kinds(t), ended].filter(Boolean).join(" ") || null, "data-t": t }, text);
      this.cells[t].push(cell);
      return cell;
    }));
  }

  lane(one, edges, first, last, total) {
    const height = this.shown.length > 1 ? 30 : this.width < 600 ? 40 : 58;
    const svg = make("svg", { width: total, height, viewBox: `0 0 ${total} ${height}`, role: "img",
      "aria-label": `delta and f, positions ${first} to ${last}` },
      make("path", { class: "axis", d: `M0,1H${total}M0,${height - 1}H${total}` }),
      make("path", { class: "delta", d: this.steps(one.delta, edges, first, last, height, true) }),
      make("path", { class: "f", d: this.steps(one.f, edges, first, last, height, false) }));
    if (one.tau >= first && one.tau <= last) {
      const x = edges[one.tau - first] + 1;
      svg.append(make("line", { class: "tau", x1: x, x2: x, y1: 0, y2: height }));
    }
    svg.addEventListener("click", (event) => {
      const x = event.clientX - svg.getBoundingClientRect().left;
      this.move(first + Math.max(0, edges.findLastIndex((edge) => edge <= x)));
    });
    return make("tr", { class: "lane", style: `--colour: ${one.colour}` }, make("th", { scope: "row" }, "δ f"),
      make("td", { colspan: last - first + 1 }, svg));
  }

  // ---- The position ----

  move(t, scroll = false) {
    const next = Math.min(Math.max(t, 1), this.data.horizon);
    if (next === this.t) return;
    for (const cell of this.cells[this.t]) cell.classList.remove("here");
    this.t = next;
    this.mark();
    this.prompt.moved();
    if (scroll) this.cells[next][0].scrollIntoView({ block: "nearest" });
    clearTimeout(this.waiting);
    this.waiting = setTimeout(() => this.remember(false), 300); // browsers bound how often an address changes
  }

  mark() {
    const { t } = this;
    for (const cell of this.cells[t]) cell.classList.add("here");
    this.cursor.setAttribute("x", this.edges[t - 1]);
    const [own] = this.shown;
    const differs = (one) => one.x[t - 1] !== one.y[t - 1];
    const apart = differs(own);
    const run = own.runs.find((one) => one.first <= t && t <= one.last);
    const single = this.shown.length === 1; // of several, X is shaded for none, as in the strips
    const text = (token, shaded) => make("code", { class: shaded ? "apart" : null }, this.texts[token]);
    const lag = own.tau === null ? "" : t < own.tau ? `, ${own.tau - t} before τ` : t === own.tau ? ", τ" : `, τ + ${t - own.tau}`;
    const state = t > own.over ? "both have ended" : !apart ? "equal"
      : `different${run.last > run.first ? `, ${t - run.first + 1} of a run of ${run.last - run.first + 1}` : ""}`;
    const parts = [make("b", {}, `t = ${t}`), `${lag}: X `, text(own.x[t - 1], single && apart)];
    for (const one of this.shown) parts.push(single ? ", Y " : `; ${one.name} `, text(one.y[t - 1], differs(one)),
      single ? "" : ` δ ${fixed(one.delta[t - 1])}`);
    if (single) parts.push(` · ${state} · δ ${fixed(own.delta[t - 1])} · f ${fixed(own.f[t - 1])}`);
    byId("here").replaceChildren(...parts);
  }

  toRun(by) {
    const begins = this.shown[0].runs.map((run) => run.first);
    const next = by > 0 ? begins.find((t) => t > this.t) : begins.findLast((t) => t < this.t);
    if (next !== undefined) this.move(next, true);
  }

  // ---- All pairs of the document ----

  drawPairs() {
    const { horizon } = this.data;
    const docAt = this.of("document");
    const parts = this.data.actions.map((name, action) => {
      const rows = this.rowsOf(docAt, action);
      if (!rows.length) return null;
      const buttons = rows.map((row) => {
        const one = trajectory(this.data, row);
        const strip = make("svg", { viewBox: `0 0 ${horizon} 10`, preserveAspectRatio: "none", "aria-hidden": "true" },
          ...this.bars(one, 0, 1, 0, 10));
        if (one.tau) strip.append(make("line", { class: "tau", x1: one.tau - 1, x2: one.tau - 1, y1: 0, y2: 10 }));
        const button = make("button", { type: "button", "data-row": row, "aria-current": row === this.row ? "true" : null,
          "aria-label": `${name}, replicate ${one.replicate}, ${one.tau === null ? "no mismatch" : `τ = ${one.tau}`}` },
          make("span", {}, String(one.replicate)), strip, make("span", {}, one.tau === null ? "none" : `τ ${one.tau}`));
        button.addEventListener("click", () => {
          this.go(row);
          document.querySelector(`[data-row="${row}"]`).focus({ preventScroll: true });
        });
        return button;
      });
      return make("div", { style: `--colour: var(--c${action % 6})` }, make("h3", {}, make("span", { class: "swatch" }), name), ...buttons);
    });
    byId("pairs").replaceChildren(...parts.filter(Boolean));
  }

  // ---- The user's hands ----

  press(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || byId("help").open) return;
    if (event.target instanceof HTMLSelectElement || event.target.id === "wanted") return;
    const actions = this.data.actions.length;
    const keys = {
      ArrowLeft: () => event.shiftKey ? this.toRun(-1) : this.move(this.t - 1, true),
      ArrowRight: () => event.shiftKey ? this.toRun(1) : this.move(this.t + 1, true),
      ArrowUp: () => this.step("replicate", -1), ArrowDown: () => this.step("replicate", 1),
      "[": () => this.step("document", -1), "]": () => this.step("document", 1),
      a: () => {
        for (let by = 1; by < actions; by += 1) {
          const action = (this.of("action") + by) % actions;
          if (this.rowsOf(this.of("document"), action).length) return this.toAction(action);
        }
        return undefined;
      },
      c: () => this.setCompare(!this.compare), t: () => this.move(this.shown[0].tau ?? this.t, true),
      r: () => this.prompt.toRecord(), "/": () => byId("wanted").focus(),
      Home: () => this.move(1, true), End: () => this.move(this.data.horizon, true), "?": () => byId("help").showModal(),
    };
    for (let at = 0; at < Object.keys(KINDS).length; at += 1) keys[String(at + 1)] = () => this.jump(at);
    if (!Object.hasOwn(keys, event.key)) return;
    event.preventDefault();
    keys[event.key]();
  }

  listen() {
    this.prompt.listen();
    for (const id of ["stratum", "document", "action", "replicate"]) byId(id).addEventListener("change", () => this.choose(id));
    for (const button of document.querySelectorAll("[data-step]")) {
      button.addEventListener("click", () => this.step(button.dataset.step, Number(button.dataset.by)));
    }
    byId("choice").addEventListener("submit", (event) => event.preventDefault());
    byId("compare").addEventListener("change", () => this.setCompare(byId("compare").checked));
    byId("help-button").addEventListener("click", () => byId("help").showModal());
    byId("score").addEventListener("click", (event) => {
      const cell = event.target.closest("[data-t]");
      if (cell) this.move(Number(cell.dataset.t));
    });
    document.addEventListener("keydown", (event) => this.press(event));
    window.addEventListener("hashchange", () => { if (location.hash !== this.fragment()) this.follow(); });
    window.addEventListener("resize", () => {
      cancelAnimationFrame(this.frame);
      this.frame = requestAnimationFrame(() => { if (Math.floor(byId("overview").clientWidth) !== this.width) this.draw(); });
    });
  }

  sayRule() {
    const { data } = this;
    const all = data.count === data.total;
    byId("rule").textContent = `This file holds ${all ? "all" : `${many(data.count)} of`} ${many(data.total)} trajectories of the `
      + `${data.split} documents under the compared actions${all ? "." : `, chosen by a rule and not by hand: first those that the `
        + "jumps lead to, then the other actions on the same document and replicate, then replicates 0 to 3 of the first document "
        + "of each stratum, of the second, and so on, then replicates 4 to 7 likewise, until the file is full."}`
      + (data.texts ? "" : " The model's tokenizer was not where this page was written, so tokens are numbers.");
  }
}

async function start() {
  if (!("DecompressionStream" in window)) {
    throw new Error("this browser cannot decompress its data; Chrome 80, Firefox 113 and Safari 16.4 can, and later ones");
  }
  byId("unpacking").hidden = false;
  const data = await load();
  if (!data.count) throw new Error("there is no trajectory to show");
  const explorer = new Explorer(data);
  byId("main").hidden = false;
  explorer.sayRule();
  explorer.follow();
  explorer.listen();
  byId("unpacking").hidden = true;
}

start().catch((error) => {
  byId("unpacking").hidden = true;
  byId("notice").textContent = `This page cannot be shown: ${error.message}.`;
  byId("notice").hidden = false;
});
