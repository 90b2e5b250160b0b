"use strict";
// The prompt of the document that the explorer shows, as report/explorer/prompts.py packs it: a strip for each action, and
// its text, folded where no record is. Positions count from 1. What trajectories.js defines is used when it is called.

const AROUND = 12; // tokens that stand open on both sides of a record and of a chosen token
const OPENED = 400; // tokens that a click on a fold opens at most
const FEWEST_FOLDED = 8;
const MOST_BUTTONS = 12; // of records

class PromptView {
  constructor(explorer) {
    this.explorer = explorer;
    this.unpacked = new Map(); // by the prompt's place in the manifest
    this.document = null;
  }

  get own() {
    return this.held;
  }

  /** Show the prompt of the explorer's document; it is unpacked once. */
  async show() {
    const { data } = this.explorer;
    const docAt = this.explorer.of("document");
    const place = data.prompts.findIndex((one) => one.document === docAt);
    const asked = this.document = docAt;
    if (place < 0) {
      this.held = null;
      byId("prompt").hidden = true;
      byId("prompt-note").textContent = data.prompts.length
        ? `This document’s prompt is not in this file, which has those of ${many(data.prompts.length)} of ${many(data.documents.length)} documents: those that jumps lead to, then the first ones of each stratum, until they take 1.5 MB.`
        : "The store has no prompts: it was written without them, or store_prompts = false is in its study file.";
      return;
    }
    if (!this.unpacked.has(place)) this.unpacked.set(place, await this.unpack(place));
    if (this.document !== asked) return; // another one was chosen meanwhile
    const changed = this.held !== this.unpacked.get(place);
    this.held = this.unpacked.get(place);
    if (changed) {
      this.at = null;
      this.open = this.held.records.map(({ first, last }) => [first - AROUND, last + AROUND]);
      this.matches = [];
      byId("wanted").value = "";
      byId("found").textContent = "";
      this.drawButtons();
    }
    byId("prompt").hidden = false;
    this.draw();
  }

  async unpack(place) {
    const { data } = this.explorer;
    const said = data.prompts[place];
    const bytes = new Uint8Array(await unpacked(`prompt${place}`));
    const { entries } = said;
    const size = data.tokens.length <= 65536 ? 2 : 4;
    const tokens = new Uint32Array(entries);
    for (let byte = 0; byte < size; byte += 1) {
      for (let at = 0; at < entries; at += 1) tokens[at] += bytes[byte * entries + at] * 2 ** (8 * byte);
    }
    let begin = size * entries;
    const kept = said.kept.map(([action, step, groups]) => {
      const shares = bytes.subarray(begin, begin + groups * entries);
      begin += groups * entries;
      const mean = new Float32Array(entries);
      for (let at = 0; at < entries; at += 1) {
        for (let group = 0; group < groups; group += 1) mean[at] += shares[group * entries + at] / 255 / groups;
      }
      return { action, step, groups, shares, mean, whole: mean.every((share) => share > 0.9999) };
    });
    const records = said.records.map(([answer, piece, first, last]) => ({ answer, piece, first, last }))
      .sort((a, b) => a.first - b.first);
    return { tokens, entries, kept, records, ofRecord: this.recordPlaces(records, entries) };
  }

  recordPlaces(records, entries) {
    const places = new Int16Array(entries + 2).fill(-1);
    records.forEach((record, at) => places.fill(at, record.first, record.last + 1));
    return places;
  }

  /** What is left under an action after the last counted step up to position t; null of an engine. */
  keptBy(action) {
    const own = this.held.kept.filter((one) => one.action === action && one.step <= this.explorer.t);
    return own.length ? own[own.length - 1] : null;
  }

  /** The share of an action that keeps a stretch of positions. */
  shareOf(kept, first, last) {
    let sum = 0;
    for (let p = first; p <= last; p += 1) sum += kept.mean[p - 1];
    return sum / (last - first + 1);
  }

  /** Which counted steps are shown: the prompt is drawn again where they change. */
  steps() {
    return this.held ? this.explorer.shown.map((one) => this.keptBy(one.action)?.step ?? "").join() : "";
  }

  /** The position t has changed. */
  moved() {
    if (this.held && this.drawnSteps !== this.steps()) this.draw();
  }

  draw() {
    if (!this.held) return;
    this.drawnSteps = this.steps();
    this.drawNote();
    this.drawStrips();
    this.drawText();
    this.drawHere();
  }

  drawNote() {
    const [own] = this.explorer.shown;
    const kept = this.keptBy(own.action);
    const { entries, records } = this.held;
    const parts = [`${many(entries)} tokens`];
    if (!kept) parts.push(`${own.name} decodes in an engine, which does not say what it keeps`);
    else if (kept.whole) parts.push(`${own.name} removes no entry, so nothing is shaded`);
    else {
      const gone = kept.mean.reduce((sum, share) => sum + (share === 0), 0);
      parts.push(`${own.name} has ${percent(this.shareOf(kept, 1, entries))} of the entries${
        kept.step ? ` after token ${kept.step}, over its streams` : ""}; ${many(gone)} tokens are gone in all layers and heads`);
      const lost = records.filter(({ first, last }) => this.shareOf(kept, first, last) === 0).length;
      if (records.length) parts.push(`of ${many(records.length)} records of answers ${lost ? many(lost) : "none"} ${lost === 1 ? "is" : "are"} gone`);
    }
    byId("prompt-note").textContent = `${parts.join("; ")}.`;
  }

  /** A table of records for the line about answers: the record's text, and what is kept of it. */
  recordWords(answer) {
    if (!this.held) return "";
    const kept = this.keptBy(this.explorer.shown[0].action);
    const own = this.held.records.filter((record) => record.answer === answer);
    if (!kept || kept.whole || !own.length) return "";
    const pieces = new Map();
    for (const { piece, first, last } of own) {
      pieces.set(piece, Math.max(pieces.get(piece) ?? 0, this.shareOf(kept, first, last)));
    }
    return percent(Math.min(...pieces.values()));
  }

  // ---- Strips ----

  drawStrips() {
    const { explorer } = this;
    byId("strips").replaceChildren(...explorer.shown.map((one) => this.strip(one)));
  }

  strip(one) {
    const { entries, records } = this.held;
    const { width } = this.explorer;
    const kept = this.keptBy(one.action);
    const height = 22;
    const svg = make("svg", { viewBox: `0 0 ${width} ${height + 8}`, width, height: height + 8, role: "img",
      style: `--colour: ${one.colour}`, "aria-label": `${one.name}: the prompt, ${entries} tokens; shaded by what is kept` });
    svg.append(make("rect", { class: "strip-ground", x: 0, y: 6, width, height }));
    const x = (p) => (p - 1) / entries * width;
    if (kept && !kept.whole) {
      const bins = Math.min(entries, Math.floor(width));
      let begin = 0;
      let level = -1;
      const flush = (end) => {
        if (level > 0) svg.append(make("rect", { class: "strip-kept", x: begin / bins * width, y: 6,
          width: (end - begin) / bins * width, height, opacity: (level / 20).toFixed(2) }));
      };
      for (let bin = 0; bin < bins; bin += 1) {
        const [first, last] = [Math.floor(bin * entries / bins) + 1, Math.floor((bin + 1) * entries / bins)];
        const now = Math.round(20 * this.shareOf(kept, first, Math.max(first, last)));
        if (now === level) continue;
        flush(bin);
        [begin, level] = [bin, now];
      }
      flush(bins);
    }
    for (const { first, last } of records) {
      svg.append(make("rect", { class: "record", x: x(first), y: 0, width: Math.max(2, x(last + 1) - x(first)), height: 5 }));
    }
    if (this.at) svg.append(make("rect", { class: "strip-at", x: x(this.at) - 1, y: 2, width: 2, height: height + 6 }));
    svg.addEventListener("click", (event) => {
      const box = svg.getBoundingClientRect();
      this.choose(Math.min(entries, Math.floor((event.clientX - box.left) / box.width * entries) + 1));
    });
    const share = !kept ? "decodes in an engine" : kept.whole ? "removes no entry" : `${percent(this.shareOf(kept, 1, entries))} of the entries`;
    const label = this.explorer.shown.length > 1 ? make("p", {}, make("b", {}, one.name), ` · ${share}`) : null;
    return make("div", { class: "strip" }, label, svg);
  }

  // ---- Text ----

  /** Stretches that stand open, rising and apart. */
  openStretches() {
    const { entries } = this.held;
    const wanted = [...this.open, [1, AROUND], [entries - AROUND + 1, entries]];
    const found = [];
    for (const [from, to] of wanted.map(([a, b]) => [Math.max(1, a), Math.min(entries, b)]).sort((a, b) => a[0] - b[0])) {
      const last = found[found.length - 1];
      if (last && from <= last[1] + FEWEST_FOLDED) last[1] = Math.max(last[1], to);
      else found.push([from, to]);
    }
    return found;
  }

  drawText() {
    const parts = [];
    let next = 1;
    const [own] = this.explorer.shown;
    const kept = this.keptBy(own.action);
    for (const [from, to] of this.openStretches()) {
      if (from > next) parts.push(this.fold(next, from - 1, kept));
      for (let p = from; p <= to; p += 1) parts.push(this.token(p, kept));
      next = to + 1;
    }
    if (next <= this.held.entries) parts.push(this.fold(next, this.held.entries, kept));
    byId("prompt-text").style.setProperty("--colour", own.colour);
    byId("prompt-text").replaceChildren(...parts);
  }

  fold(first, last, kept) {
    const share = kept && !kept.whole ? `, ${percent(this.shareOf(kept, first, last))} kept` : "";
    const button = make("button", { type: "button", class: "fold", "data-first": first, "data-last": last },
      `… ${many(last - first + 1)} tokens${share} …`);
    return button;
  }

  token(p, kept) {
    const { explorer, held } = this;
    const share = kept && !kept.whole ? kept.mean[p - 1] : null;
    const record = held.ofRecord[p];
    const match = this.matches.some(([first, last]) => first <= p && p <= last);
    const names = ["token", share === 0 ? "gone" : "", record >= 0 ? "of-record" : "", match ? "match" : "", p === this.at ? "at" : ""];
    return make("span", { class: names.filter(Boolean).join(" "), "data-p": p,
      style: share ? `--share: ${Math.round(100 * share)}%` : null }, explorer.texts[held.tokens[p - 1]]);
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
      const told = this.keptBy(explorer.shown[0].action) ? "which layers keep it" : "its place";
      byId("prompt-here").replaceChildren(make("span", { class: "quiet" }, `A click on a token shows ${told}.`));
      return;
    }
    const record = held.records[held.ofRecord[p]];
    const line = make("p", {}, make("b", {}, `position ${many(p)} of ${many(held.entries)}: `),
      make("code", {}, explorer.texts[held.tokens[p - 1]]),
      record ? `, of the record of answer ${record.answer + 1}` : "");
    const rows = explorer.shown.map((one) => this.layers(one, p)).filter(Boolean);
    byId("prompt-here").replaceChildren(line, ...rows);
  }

  layers(one, p) {
    const kept = this.keptBy(one.action);
    if (!kept) return null;
    const { entries } = this.held;
    const layers = this.explorer.data.layers;
    const bound = (group) => Math.floor(group * layers / kept.groups);
    const cells = Array.from({ length: kept.groups }, (_, group) => {
      const share = kept.shares[group * entries + p - 1] / 255;
      const [from, to] = [bound(group), bound(group + 1) - 1];
      return make("span", { class: share === 0 ? "layer gone" : "layer", style: `--share: ${Math.round(100 * share)}%` },
        make("small", {}, from === to ? String(from) : `${from}–${to}`), ` ${percent(share)}`);
    });
    return make("p", { class: "layers", style: `--colour: ${one.colour}` }, make("b", {}, one.name),
      ` has ${percent(kept.mean[p - 1])} of the token’s entries; by layer: `, ...cells);
  }

  // ---- Records and search ----

  drawButtons() {
    const answers = [...new Set(this.held.records.map((record) => record.answer))].sort((a, b) => a - b);
    byId("record-buttons").replaceChildren(...answers.slice(0, MOST_BUTTONS).map((answer) => {
      const button = make("button", { type: "button" }, `answer ${answer + 1}`);
      button.addEventListener("click", () => this.toRecord(this.held.records.filter((record) => record.answer === answer)));
      return button;
    }));
  }

  /** Go to the next of some records after the chosen token. */
  toRecord(records = this.held?.records ?? []) {
    if (!records.length) return;
    const next = records.find((record) => record.first > (this.at ?? 0)) ?? records[0];
    this.choose(next.first, [next.first, next.last]);
  }

  find() {
    if (!this.held) return;
    const plain = (text) => text.toLowerCase().replace(/\s+/g, "");
    const { explorer, held } = this;
    const wanted = plain(byId("wanted").value);
    if (!wanted) {
      this.matches = [];
      byId("found").textContent = "";
      this.draw();
      return;
    }
    if (held.plain === undefined) { // the text without white space, and the character at which each token ends
      held.plain = "";
      const texts = explorer.data.texts ?? explorer.data.tokens.map(String);
      held.ends = Array.from(held.tokens, (token) => {
        held.plain += plain(texts[token]);
        return held.plain.length;
      });
    }
    this.matches = [];
    let token = 0;
    for (let at = held.plain.indexOf(wanted); at >= 0; at = held.plain.indexOf(wanted, at + wanted.length)) {
      while (held.ends[token] <= at) token += 1;
      let last = token;
      while (held.ends[last] < at + wanted.length) last += 1;
      this.matches.push([token + 1, last + 1]);
    }
    if (!this.matches.length) {
      byId("found").textContent = "not in the prompt";
      this.draw();
      return;
    }
    const next = this.matches.findIndex(([first]) => first > (this.at ?? 0));
    const at = next < 0 ? 0 : next;
    byId("found").textContent = `${many(at + 1)} of ${many(this.matches.length)}`;
    this.choose(this.matches[at][0], this.matches[at]);
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

function percent(share) {
  const rounded = Math.round(100 * share);
  return share > 0 && rounded === 0 ? "under 1%" : share < 1 && rounded === 100 ? "over 99%" : `${rounded}%`;
}
