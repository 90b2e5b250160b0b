// The trajectory explorer: which trajectory is shown, and the reader's choices, jumps and keys.

const KINDS = {
  earliest: "Earliest divergence", median: "Median divergence", latest: "Latest divergence",
  exposure: "Longest exposure", agreement: "Longest agreement", lost: "Lost answers",
};
const ALL = -1; // the stratum of all strata
const PAPER = 680; // the width that is printed, in CSS pixels: A4 or Letter within the margins of browsers

class Explorer {
  constructor(data) {
    this.data = data;
    this.rows = new Map();
    const { document: docs, action, replicate } = data.trajectories;
    for (let row = 0; row < data.count; row += 1) this.rows.set(`${docs[row]} ${action[row]} ${replicate[row]}`, row);
    this.stratum = ALL;
    this.compare = false;
    this.overview = new Overview(data.horizon, (t) => this.move(t, true));
    this.score = new Score(data, (t) => this.move(t));
    this.prompt = new PromptView(this);
  }

  find(docAt, action, replicate) {
    return this.rows.get(`${docAt} ${action} ${replicate}`);
  }

  of(column, row = this.row) {
    return this.data.trajectories[column][row];
  }

  /** Rows of this document, or of a single action on it, in the order of actions and replicates. */
  rowsOf(docAt, action = null) {
    const { document: docs, action: actions, replicate } = this.data.trajectories;
    const rows = [];
    for (let row = 0; row < this.data.count; row += 1) {
      if (docs[row] === docAt && (action === null || actions[row] === action)) rows.push(row);
    }
    return rows.sort((a, b) => actions[a] - actions[b] || replicate[a] - replicate[b]);
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

  /** Go where the address says: to a trajectory, or to a jump of an action; else to the first typical trajectory. */
  follow() {
    const requested = new URLSearchParams(location.hash.slice(1).replaceAll("+", "%2B"));
    byId("notice").hidden = true;
    let row;
    if (requested.has("doc")) {
      const docAt = this.data.documents.findIndex((entry) => entry.doc === requested.get("doc"));
      row = this.find(docAt, this.data.actions.indexOf(requested.get("action")), Number(requested.get("replicate") ?? 0));
      if (row === undefined) {
        this.say(`This file does not have replicate ${requested.get("replicate")} of ${requested.get("doc")} under `
          + `${requested.get("action")}. If the store has it, this prints it: ${this.command(requested.get("doc"),
            requested.get("action") ?? "ACTION", requested.get("replicate") ?? 0)}`);
      }
    }
    if (requested.has("jump")) {
      const action = this.data.actions.indexOf(requested.get("action"));
      row = this.data.jumps.find((jump) => jump.kind === requested.get("jump") && jump.stratum === null && jump.action === action)?.to[0];
    }
    this.compare = requested.get("compare") === "1";
    const start = this.data.jumps.find((jump) => jump.kind === "median") ?? this.data.jumps[0];
    this.show(row ?? this.row ?? (start ? start.to[0] : 0), Number(requested.get("t")) || null);
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
    const chosen = this.data.trajectory(row);
    this.shown = [chosen];
    if (this.compare) {
      const beside = this.data.actions.map((_, action) => this.find(docAt, action, chosen.replicate))
        .filter((other) => other !== undefined && other !== row && this.of("reference", other) === chosen.reference);
      this.shown.push(...beside.map((other) => this.data.trajectory(other)));
    }
    this.t = Math.min(Math.max(t ?? chosen.tau ?? 1, 1), this.data.horizon);
    this.drawChoice();
    this.drawJumps();
    this.drawAbout();
    this.draw();
    this.drawPairs();
    this.prompt.show().then(() => this.drawAnswers());
  }

  /** Draw what depends on the width of the window, but for the prompt. */
  draw(width = Math.floor(byId("overview").clientWidth)) {
    this.width = Math.max(width, 200); // a window may have no size for a moment
    this.overview.draw(this.shown, this.width);
    this.score.draw(this.shown, this.width);
    this.score.mark(this.t);
    this.drawHere();
  }

  resize() {
    this.draw();
    this.prompt.drawStrips();
  }

  // ---- Choosing ----

  drawChoice() {
    const { data } = this;
    const fill = (id, options, chosen) => byId(id).replaceChildren(...options.map(([value, text, disabled]) =>
      make("option", { value, selected: value === chosen, disabled }, text)));
    const docAt = this.of("document");
    fill("stratum", [[ALL, "all strata"], ...data.strata.map((name, at) =>
      [at, name, !data.documents.some((entry) => entry.stratum === at)])], this.stratum);
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
    const [chosen] = this.shown;
    const doc = this.data.documents[chosen.document];
    byId("story").replaceChildren(`${chosen.name}: `,
      chosen.tau === null ? `X and Y agree through position ${this.data.horizon}` : `first mismatch at τ = ${chosen.tau}`,
      make("span", { class: "quiet" }, ` · ${doc.doc}, replicate ${chosen.replicate}`));
    const end = (side, at) => at === null ? `${side} does not end` : `${side} ends at ${at}`;
    const parts = [`${chosen.mismatches} of ${this.data.horizon} positions differ${
      chosen.runs.length > 1 ? `, in ${chosen.runs.length} runs` : ""}`];
    if (chosen.agreement) parts.push(`the longest agreement after τ has ${chosen.agreement}`);
    parts.push(`${end("X", chosen.eos_x)}, ${end("Y", chosen.eos_y)}`);
    parts.push(this.data.strata[doc.stratum] + (doc.task ? `, ${doc.task}` : "")
      + (doc.prompt ? `, prompt of ${many(doc.prompt)} tokens` : ""));
    byId("outcome").textContent = `${parts.join("; ")}.`;
    this.drawAnswers();
    byId("command").textContent = this.command(doc.doc, chosen.name, chosen.replicate);
  }

  drawAnswers() {
    const [chosen] = this.shown;
    const doc = this.data.documents[chosen.document];
    const answers = byId("answers");
    answers.hidden = !doc.answers.length;
    const codes = doc.answers.flatMap((answer, at) => {
      const kept = this.prompt.recordWords(at);
      return [at ? ", " : " ", make("code", {}, visible(answer)),
        kept ? make("span", { class: kept === "0%" ? "record-gone" : "quiet" }, ` (record ${kept === "0%" ? "gone" : kept === "100%" ? "kept" : `${kept} kept`})`) : null];
    });
    answers.replaceChildren(doc.answers.length > 1 ? "Answers:" : "Answer:", ...codes.filter((part) => part !== null), ".");
    if (chosen.score_x !== null) {
      const side = (name, score) => [` ${name} is `, make("span", { class: score === 1 ? "right" : "wrong" }, judged(score))];
      const place = chosen.span_first === null ? "" : `, at ${chosen.span_first}–${chosen.span_last}`;
      answers.append(...side("X", chosen.score_x), `${place};`, ...side("Y", chosen.score_y), ".");
    }
  }

  command(doc, action, replicate) {
    return ["kvdrift show", this.data.store || "STORE", doc, action, String(replicate)]
      .map((word, at) => at ? quoted(word) : word).join(" ");
  }

  // ---- The position ----

  move(t, scroll = false) {
    const next = Math.min(Math.max(t, 1), this.data.horizon);
    if (next === this.t) return;
    this.score.mark(next, this.t);
    this.t = next;
    this.drawHere();
    this.prompt.moved();
    if (scroll) this.score.cells[next][0].scrollIntoView({ block: "nearest" });
    clearTimeout(this.waiting);
    this.waiting = setTimeout(() => this.remember(false), 300); // browsers bound how often an address changes
  }

  /** The line below: the chosen position in numbers. */
  drawHere() {
    const { t } = this;
    this.overview.mark(t);
    const [chosen] = this.shown;
    const differs = (pair) => pair.x[t - 1] !== pair.y[t - 1];
    const apart = differs(chosen);
    const run = chosen.runs.find((stretch) => stretch.first <= t && t <= stretch.last);
    const single = this.shown.length === 1; // of several, X is shaded for none, as in the strips
    const text = (token, shaded) => make("code", { class: shaded ? "apart" : null }, this.data.text(token));
    const lag = chosen.tau === null ? "" : t < chosen.tau ? `, ${chosen.tau - t} before τ` : t === chosen.tau ? ", τ" : `, τ + ${t - chosen.tau}`;
    const state = t > chosen.over ? "both have ended" : !apart ? "equal"
      : `different${run.last > run.first ? `, ${t - run.first + 1} of a run of ${run.last - run.first + 1}` : ""}`;
    const parts = [make("b", {}, `t = ${t}`), `${lag}: X `, text(chosen.x[t - 1], single && apart)];
    for (const pair of this.shown) parts.push(single ? ", Y " : `; ${pair.name} `, text(pair.y[t - 1], differs(pair)),
      single ? "" : ` δ ${fixed(pair.delta[t - 1])}`);
    if (single) parts.push(` · ${state} · δ ${fixed(chosen.delta[t - 1])} · f ${fixed(chosen.f[t - 1])}`);
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
        const pair = this.data.trajectory(row);
        const entry = pair.tau === null ? "no τ" : `τ ${pair.tau}`;
        const strip = make("svg", { viewBox: `0 0 ${horizon} 10`, preserveAspectRatio: "none", "aria-hidden": "true" },
          ...bars(pair, horizon, 0, 1, 0, 10));
        if (pair.tau) strip.append(make("line", { class: "tau", x1: pair.tau - 1, x2: pair.tau - 1, y1: 0, y2: 10 }));
        const button = make("button", { type: "button", "data-row": row, "aria-current": row === this.row ? "true" : null },
          make("span", {}, make("span", { class: "unseen" }, `${name}, replicate `), `${pair.replicate} `), strip,
          make("span", {}, entry));
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
    window.addEventListener("beforeprint", () => this.draw(PAPER));
    window.addEventListener("afterprint", () => this.draw());
    window.addEventListener("resize", () => {
      cancelAnimationFrame(this.frame);
      this.frame = requestAnimationFrame(() => { if (Math.floor(byId("overview").clientWidth) !== this.width) this.resize(); });
    });
  }

  sayRule() {
    const { data } = this;
    const all = data.count === data.total;
    byId("rule").textContent = `This file holds ${all ? "all" : `${many(data.count)} of`} ${many(data.total)} trajectories of the `
      + `${data.split} documents under the compared actions${all ? "." : `, chosen by a rule and not by hand: first those that the `
        + "jumps lead to, then the other actions on the same document and replicate, then replicates 0 to 3 of the first document "
        + "of each stratum, of the second, and so on, then replicates 4 to 7 likewise, until the file is full."}`
      + (data.texts ? "" : " The model's tokenizer was not on the machine that wrote this page, so tokens are shown as numbers.");
  }
}

async function start() {
  if (!("DecompressionStream" in window)) {
    throw new Error("this browser cannot decompress its data; Chrome 80, Firefox 113 and Safari 16.4 can, and later ones");
  }
  byId("unpacking").hidden = false;
  const data = await Packed.read();
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
