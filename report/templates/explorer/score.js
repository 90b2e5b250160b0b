// The tokens of the shown trajectories by position, X above each Y, with δ and f below, in as many lines as they take.

const PADDING = 11; // of a token's cell, in CSS pixels, with its rounding
const LEAST_WIDTH = 21;

class Score {
  /** ``move`` is called with the position that the reader clicks at. */
  constructor(data, move) {
    Object.assign(this, { data, move });
    this.measure = document.createElement("canvas").getContext("2d");
    this.measure.font = '12.5px ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace';
    this.measured = new Map(); // widths by text
  }

  widthOf(text) {
    if (!this.measured.has(text)) this.measured.set(text, Math.ceil(this.measure.measureText(text).width) + PADDING);
    return this.measured.get(text);
  }

  /** How the tokens of a stream are shown. */
  textsOf(tokens) {
    const whole = this.data.whole(tokens);
    return Array.from(tokens, (token, at) => this.data.shown(token, whole[at]));
  }

  draw(shown, width) {
    Object.assign(this, { shown, narrow: width < 600 });
    this.texts = new Map([shown[0].x, ...shown.map((pair) => pair.y)].map((tokens) => [tokens, this.textsOf(tokens)]));
    const label = this.narrow ? 26 : Math.min(150, 18 + Math.max(...shown.map((pair) =>
      Math.ceil(this.measure.measureText(pair.name).width))));
    const room = width - label - 2;
    const { horizon } = this.data;
    this.cells = Array.from({ length: horizon + 1 }, () => []);
    const systems = [];
    let first = 1;
    while (first <= horizon) {
      const widths = [];
      let sum = 0;
      for (let t = first; t <= horizon; t += 1) {
        const needed = Math.min(room, Math.max(LEAST_WIDTH, this.widthOf(this.texts.get(shown[0].x)[t - 1]),
          ...shown.map((pair) => this.widthOf(this.texts.get(pair.y)[t - 1]))));
        if (sum + needed > room) break;
        widths.push(needed);
        sum += needed;
      }
      systems.push(this.system(first, widths, label));
      first += widths.length;
    }
    byId("score").replaceChildren(...systems);
  }

  system(first, widths, label) {
    const { shown } = this;
    const last = first + widths.length - 1;
    const edges = [0];
    for (const width of widths) edges.push(edges[edges.length - 1] + width);
    const total = edges[edges.length - 1];
    const positions = widths.map((_, at) => first + at);
    const [chosen] = shown;
    const single = shown.length === 1;
    const ticks = make("tr", { class: "ticks" }, make("th", { scope: "row" }, make("span", { class: "unseen" }, "position")),
      ...positions.map((t) => make("td", { "data-t": t, class: t === chosen.tau ? "tau" : null },
        t === chosen.tau ? "τ" : t === 1 || t % 10 === 0 ? String(t) : "")));
    const rows = [ticks, this.tokens("X", chosen.x, chosen.eos_x, positions, (t) =>
      [chosen.span_first && t >= chosen.span_first && t <= chosen.span_last ? "answer" : "",
        ...(single ? [t === chosen.tau ? "tau-at" : "", chosen.x[t - 1] !== chosen.y[t - 1] ? "apart" : ""] : [])], "x", null)];
    for (const pair of shown) {
      rows.push(this.tokens(pair.name, pair.y, pair.eos_y, positions, (t) =>
        [pair.x[t - 1] !== pair.y[t - 1] ? "apart" : "", t === pair.tau ? "tau-at" : ""], "y", pair.colour));
      rows.push(this.lane(pair, edges, first, last, total));
    }
    const columns = [label, ...widths].map((width) => make("col", { style: `width: ${width}px` }));
    return make("table", { style: `width: ${label + total}px`, "aria-label": `Positions ${first} to ${last}` },
      make("colgroup", {}, ...columns), make("tbody", {}, ...rows));
  }

  tokens(name, stream, eos, positions, kinds, side, colour) {
    const title = name === "X" ? "reference X" : `${this.data.other} Y, ${name}`;
    const short = this.narrow && side === "y";
    const single = this.shown.length === 1;
    const head = make("th", { scope: "row", title, style: colour ? `--colour: ${colour}` : null },
      colour && !(short && single) ? make("span", { class: "swatch" }) : null,
      short ? make("span", { class: single ? null : "unseen" }, single ? "Y" : name) : name);
    return make("tr", { class: side }, head, ...positions.map((t) => {
      const ended = eos !== null && t >= eos ? (t === eos ? "eos" : "after") : "";
      const cell = make("td", { class: [...kinds(t), ended].filter(Boolean).join(" ") || null, "data-t": t },
        this.texts.get(stream)[t - 1]);
      this.cells[t].push(cell);
      return cell;
    }));
  }

  lane(pair, edges, first, last, total) {
    const height = this.shown.length > 1 ? 30 : this.narrow ? 40 : 58;
    const svg = make("svg", { width: total, height, viewBox: `0 0 ${total} ${height}`, role: "img",
      "aria-label": `delta and f, positions ${first} to ${last}` },
      make("path", { class: "axis", d: `M0,1H${total}M0,${height - 1}H${total}` }),
      make("path", { class: "delta", d: steps(pair.delta, edges, first, last, height, true) }),
      make("path", { class: "f", d: steps(pair.f, edges, first, last, height, false) }));
    if (pair.tau >= first && pair.tau <= last) {
      const x = edges[pair.tau - first] + 1;
      svg.append(make("line", { class: "tau", x1: x, x2: x, y1: 0, y2: height }));
    }
    svg.addEventListener("click", (event) => {
      const x = event.clientX - svg.getBoundingClientRect().left;
      this.move(first + Math.max(0, edges.findLastIndex((edge) => edge <= x)));
    });
    return make("tr", { class: "lane", style: `--colour: ${pair.colour}` }, make("th", { scope: "row" }, "δ f"),
      make("td", { colspan: last - first + 1 }, svg));
  }

  /** Mark a position in place of another one. */
  mark(t, before = null) {
    if (before !== null) for (const cell of this.cells[before]) cell.classList.remove("here");
    for (const cell of this.cells[t]) cell.classList.add("here");
  }
}
