// The prompt of the shown document: a strip for each action, and its text, folded but for records and chosen tokens.

const AROUND = 12; // tokens that stand open on both sides of a record and of a chosen token
const OPENED = 400; // tokens that a click on a fold opens at most
const OPEN_AT_FIRST = 1000; // tokens around the first records; more stay folded
const FEWEST_FOLDED = 8;
const SHADES = 20; // of a strip
const MOST_BUTTONS = 12; // of records

class PromptView {
  constructor(explorer) {
    this.explorer = explorer;
    this.unpacked = new Map(); // by the prompt's place in the manifest
    this.held = null;
  }

  /** Show the prompt of the explorer's document; it is unpacked once. */
  async show() {
    const { data } = this.explorer;
    const document = this.explorer.of("document");
    const place = data.prompts.findIndex((entry) => entry.document === document);
    if (place < 0) {
      this.held = null;
      byId("prompt").hidden = true;
      byId("prompt-note").textContent = data.prompts.length
        ? `This document’s prompt is not in this file, which has the prompts of ${many(data.prompts.length)} of ${many(data.documents.length)} documents: first the documents that jumps lead to, then the first documents of each stratum, up to 1.5 MB.`
        : data.stored
          ? "The store’s prompts are too long for this file, which has 1.5 MB for them; kvdrift show prints the records of the answers."
          : "The store has no prompts: it was written without them, or store_prompts = false is in its study file.";
      return;
    }
    if (!this.unpacked.has(place)) this.unpacked.set(place, await data.prompt(place));
    if (this.explorer.of("document") !== document) return; // another one was chosen meanwhile
    if (this.held !== this.unpacked.get(place)) {
      this.held = this.unpacked.get(place);
      this.at = null;
      this.open = this.openAtFirst();
      this.matches = [];
      byId("wanted").value = "";
      byId("found").textContent = "";
      this.drawButtons();
    }
    byId("prompt").hidden = false;
    this.draw();
  }

  /** The surroundings of the first records: prompts may state an answer in thousands of places. */
  openAtFirst() {
    const stretches = [];
    let room = OPEN_AT_FIRST;
    for (const { first, last } of this.held.records) {
      const stretch = [first - AROUND, last + AROUND];
      room -= stretch[1] - stretch[0] + 1;
      if (room < 0 && stretches.length) break;
      stretches.push(stretch);
    }
    return stretches;
  }

  /** The entries kept by an action after the last counted step up to position t; null for an engine. */
  keptBy(action) {
    return this.held.kept.findLast((kept) => kept.action === action && kept.step <= this.explorer.t) ?? null;
  }

  /** The kept entries of the chosen action, if it removes any; else null. */
  shading() {
    const kept = this.keptBy(this.explorer.shown[0].action);
    return kept && !kept.whole ? kept : null;
  }

  /** Which counted steps are shown: the prompt is drawn again where they change. */
  steps() {
    return this.explorer.shown.map((pair) => this.keptBy(pair.action)?.step ?? "").join();
  }

  /** The position t has changed. */
  moved() {
    if (this.held && this.drawnSteps !== this.steps()) this.draw();
  }

  draw() {
    this.drawnSteps = this.steps();
    this.drawNote();
    this.drawStrips();
    this.drawText();
    this.drawHere();
  }

  drawNote() {
    const [chosen] = this.explorer.shown;
    const kept = this.keptBy(chosen.action);
    const { entries, records } = this.held;
    const parts = [`${many(entries)} tokens`];
    if (this.held.turns.length) parts[0] += ` in ${many(this.held.turns.length)} turns`;
    if (!kept) parts.push(`${chosen.name} decodes in an engine, which does not report the entries that it keeps`);
    else if (kept.whole) parts.push(`${chosen.name} removes no entry, so nothing is shaded`);
    else {
      parts.push(`${chosen.name} has ${percent(kept.share(1, entries))} of the entries${
        kept.step ? ` after token ${kept.step}, over its streams` : ""}; ${many(kept.gone)} tokens are gone in all layers and heads`);
      const lost = records.filter(({ first, last }) => kept.share(first, last) === 0).length;
      if (records.length === 1) parts.push(`the answer’s record is ${lost ? "gone" : "not gone"}`);
      else if (records.length) parts.push(`of ${many(records.length)} records of answers ${lost ? many(lost) : "none"} ${lost === 1 ? "is" : "are"} gone`);
    }
    byId("prompt-note").textContent = `${parts.join("; ")}.`;
  }

  /** The kept share of an answer's record, for the line about answers: that of the least kept piece. */
  recordWords(answer) {
    const kept = this.held && this.shading();
    if (!kept) return "";
    const pieces = new Map();
    for (const { answer: of, piece, first, last } of this.held.records) {
      if (of === answer) pieces.set(piece, Math.max(pieces.get(piece) ?? 0, kept.share(first, last)));
    }
    return pieces.size ? percent(Math.min(...pieces.values())) : "";
  }

  // ---- Strips ----

  drawStrips() {
    if (!this.held) return;
    byId("strips").replaceChildren(...this.explorer.shown.map((pair) => this.strip(pair)));
  }

  strip(pair) {
    const { entries, records } = this.held;
    const { width, shown } = this.explorer;
    const kept = this.keptBy(pair.action);
    const height = 22;
    const svg = make("svg", { viewBox: `0 0 ${width} ${height + 8}`, width, height: height + 8, role: "img",
      style: `--colour: ${pair.colour}`, "aria-label": `${pair.name}: the prompt, ${entries} tokens; shaded by what is kept` },
      make("rect", { class: "strip-ground", x: 0, y: 6, width, height }));
    if (kept && !kept.whole) svg.append(...this.shades(kept, width, height));
    const x = (p) => (p - 1) / entries * width;
    const marks = records.map(({ first, last }) => `M${x(first).toFixed(1)},0h${Math.max(2, x(last + 1) - x(first)).toFixed(1)}v5H${x(first).toFixed(1)}z`);
    if (marks.length) svg.append(make("path", { class: "record", d: marks.join("") }));
    if (this.at) svg.append(make("rect", { class: "strip-at", x: x(this.at) - 1, y: 2, width: 2, height: height + 6 }));
    svg.addEventListener("click", (event) => {
      const box = svg.getBoundingClientRect();
      this.choose(Math.min(entries, Math.floor((event.clientX - box.left) / box.width * entries) + 1));
    });
    const share = !kept ? "decodes in an engine" : kept.whole ? "removes no entry" : `${percent(kept.share(1, entries))} of the entries`;
    const label = shown.length > 1 ? make("p", {}, make("b", {}, pair.name), ` · ${share}`) : null;
    return make("div", { class: "strip" }, label, svg);
  }

  /** The kept shares along the prompt, a column for each pixel, as a path for each shade. */
  shades(kept, width, height) {
    const { entries } = this.held;
    const bins = Math.min(entries, Math.floor(width));
    const level = (bin) => {
      const [first, last] = [Math.floor(bin * entries / bins) + 1, Math.floor((bin + 1) * entries / bins)];
      return Math.round(SHADES * kept.share(first, last));
    };
    const paths = new Map();
    let [begin, now] = [0, level(0)];
    for (let bin = 1; bin <= bins; bin += 1) {
      const next = bin < bins ? level(bin) : null;
      if (next === now) continue;
      const [from, to] = [begin, bin].map((edge) => (edge / bins * width).toFixed(2));
      paths.set(now, `${paths.get(now) ?? ""}M${from},6H${to}v${height}H${from}z`);
      [begin, now] = [bin, next];
    }
    paths.delete(0);
    return [...paths].map(([shade, path]) => make("path", { class: "strip-kept", d: path, opacity: shade / SHADES }));
  }

  // ---- Text ----

  /** Stretches that stand open, rising and apart. */
  openStretches() {
    const { entries } = this.held;
    const wanted = [...this.open, [1, AROUND], [entries - AROUND + 1, entries]]
      .map(([from, to]) => [Math.max(1, from), Math.min(entries, to)]).sort((a, b) => a[0] - b[0]);
    const ranges = [];
    for (const [from, to] of wanted) {
      const last = ranges[ranges.length - 1];
      if (last && from <= last[1] + FEWEST_FOLDED) last[1] = Math.max(last[1], to);
      else ranges.push([from, to]);
    }
    return ranges;
  }

  drawText() {
    const parts = [];
    let next = 1;
    const kept = this.shading();
    for (const [from, to] of this.openStretches()) {
      parts.push(...this.folds(next, from - 1, kept));
      const matches = this.matches.filter(([first, last]) => first <= to && last >= from);
      for (let p = from; p <= to; p += 1) parts.push(...this.labels(p), this.token(p, kept, matches));
      next = to + 1;
    }
    parts.push(...this.folds(next, this.held.entries, kept));
    byId("prompt").style.setProperty("--colour", this.explorer.shown[0].colour);
    byId("prompt-text").replaceChildren(...parts);
  }

  /** The role of the turn that begins at a position, if any. */
  labels(p) {
    return this.held.turns.filter(({ first }) => first === p).map(({ role }) => make("span", { class: "turn" }, role));
  }

  /** The folds of some positions, one for each turn. */
  folds(first, last, kept) {
    const begins = this.held.turns.map((turn) => turn.first).filter((begin) => first < begin && begin <= last);
    const bounds = first <= last ? [first, ...begins, last + 1] : [];
    return bounds.slice(0, -1).flatMap((begin, at) => {
      const end = bounds[at + 1];
      const tokens = Array.from({ length: Math.min(end - begin, FEWEST_FOLDED) }, (_, more) => this.token(begin + more, kept, []));
      return [...this.labels(begin), ...(end - begin < FEWEST_FOLDED ? tokens : [this.fold(begin, end - 1, kept)])];
    });
  }

  fold(first, last, kept) {
    const parts = [`${many(last - first + 1)} tokens`];
    if (kept) parts.push(`${percent(kept.share(first, last))} kept`);
    const records = this.held.records.filter((record) => record.first <= last && record.last >= first).length;
    if (records) parts.push(`${many(records)} ${records === 1 ? "record" : "records"}`);
    return make("button", { type: "button", class: "fold", "data-first": first, "data-last": last }, `… ${parts.join(", ")} …`);
  }

  token(p, kept, matches) {
    const { held } = this;
    const share = kept?.share(p);
    const match = matches.some(([first, last]) => first <= p && p <= last);
    const names = ["token", share === 0 ? "gone" : "", held.recordAt(p) ? "of-record" : "",
      held.whole[p - 1] ? "" : "part", match ? "match" : "", p === this.at ? "at" : ""];
    return make("span", { class: names.filter(Boolean).join(" "), "data-p": p,
      style: share ? `--share: ${Math.round(100 * share)}%` : null }, held.shown(p));
  }

  /** Choose a token: it stands open, and what each layer keeps of it is shown. */
  choose(p, stretch = [p, p]) {
    this.at = p;
    this.open.push([stretch[0] - AROUND, stretch[1] + AROUND]);
    this.draw();
    byId("prompt-text").querySelector(`[data-p="${p}"]`)?.scrollIntoView({ block: "nearest" });
  }

  drawHere() {
    const { explorer, held, at: p } = this;
    if (!p) {
      const shows = this.keptBy(explorer.shown[0].action) ? "which layers keep it" : "its place";
      byId("prompt-here").replaceChildren(make("span", { class: "quiet" }, `A click on a token shows ${shows}.`));
      return;
    }
    const record = held.recordAt(p);
    const turn = held.turnAt(p);
    const line = make("p", {}, make("b", {}, `position ${many(p)} of ${many(held.entries)}: `),
      make("code", {}, explorer.data.text(held.token(p))),
      turn ? `, in a turn of ${turn.role}` : "",
      record ? `, of the record of answer ${record.answer + 1}` : "");
    const rows = explorer.shown.map((pair) => this.layers(pair, p)).filter(Boolean);
    byId("prompt-here").replaceChildren(line, ...rows);
  }

  layers(pair, p) {
    const kept = this.keptBy(pair.action);
    if (!kept) return null;
    const cells = Array.from({ length: kept.groups }, (_, group) => {
      const share = kept.ofGroup(group, p);
      const [from, to] = [kept.bounds[group], kept.bounds[group + 1] - 1];
      return make("span", { class: share === 0 ? "layer gone" : "layer", style: `--share: ${Math.round(100 * share)}%` },
        make("small", {}, from === to ? String(from) : `${from}–${to}`), ` ${percent(share)}`);
    });
    return make("p", { class: "layers", style: `--colour: ${pair.colour}` }, make("b", {}, pair.name),
      ` has ${percent(kept.share(p))} of the token’s entries; by layer: `, ...cells);
  }

  // ---- Records and search ----

  drawButtons() {
    const answers = [...new Set(this.held.records.map((record) => record.answer))].sort((a, b) => a - b);
    const buttons = answers.slice(0, MOST_BUTTONS).map((answer) => {
      const button = make("button", { type: "button" }, `answer ${answer + 1}`);
      button.addEventListener("click", () => this.toRecord(this.held.records.filter((record) => record.answer === answer)));
      return button;
    });
    byId("record-buttons").replaceChildren(...(buttons.length ? [make("span", { class: "quiet" }, "Record of"), ...buttons] : []));
  }

  /** Go to the next of some records after the chosen token. */
  toRecord(records = this.held?.records ?? []) {
    if (!records.length) return;
    const next = records.find((record) => record.first > (this.at ?? 0)) ?? records[0];
    this.choose(next.first, [next.first, next.last]);
  }

  /** Go to the next place of the wanted text; case and white space do not count. */
  find() {
    if (!this.held) return;
    const wanted = this.compared(byId("wanted").value);
    this.matches = wanted ? this.places(wanted) : [];
    if (!this.matches.length) {
      byId("found").textContent = wanted ? "not in the prompt" : "";
      this.draw();
      return;
    }
    const next = this.matches.findIndex(([first]) => first > (this.at ?? 0));
    const at = next < 0 ? 0 : next;
    byId("found").textContent = `${many(at + 1)} of ${many(this.matches.length)}`;
    this.choose(this.matches[at][0], this.matches[at]);
  }

  /** A text as the search compares it: without case and white space; if tokens are numbers, each number whole. */
  compared(text) {
    if (this.explorer.data.texts) return searched(text);
    return (text.match(/\S+/g) ?? []).map((token) => `,${token},`).join("");
  }

  /** First and last tokens of each occurrence of a text. */
  places(wanted) {
    const { held } = this;
    if (held.plain === undefined) { // the whole prompt, and the character at which each token ends
      held.plain = "";
      held.ends = held.whole.map((text) => {
        held.plain += this.compared(text);
        return held.plain.length;
      });
    }
    const ranges = [];
    let token = 0;
    for (let at = held.plain.indexOf(wanted); at >= 0; at = held.plain.indexOf(wanted, at + wanted.length)) {
      while (held.ends[token] <= at) token += 1;
      let first = token;
      while (first && !held.whole[first - 1]) first -= 1; // the tokens before have the beginning of its character
      let last = token;
      while (held.ends[last] < at + wanted.length) last += 1;
      ranges.push([first + 1, last + 1]);
    }
    return ranges;
  }

  listen() {
    byId("prompt-text").addEventListener("click", (event) => {
      const fold = event.target.closest(".fold");
      const token = event.target.closest("[data-p]");
      if (fold) {
        const first = Number(fold.dataset.first);
        this.open.push([first, Math.min(Number(fold.dataset.last), first + OPENED - 1)]);
        this.draw();
      } else if (token) {
        this.at = Number(token.dataset.p);
        this.open.push([this.at, this.at]);
        this.draw();
      }
    });
    byId("prompt-search").addEventListener("submit", (event) => {
      event.preventDefault();
      this.find();
    });
  }
}

const searched = (text) => text.toLowerCase().replace(/\s+/g, "");
