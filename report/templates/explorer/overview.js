// The overview of the shown trajectories over all positions: where X and Y agree, differ and have ended, δ and f.

/** Where X and Y agree ("base"), differ ("apart"), or have both ended ("over"), as a path for each. */
function bars(pair, horizon, left, unit, top, height) {
  const kind = (t) => t > pair.over ? "over" : pair.x[t - 1] === pair.y[t - 1] ? "base" : "apart";
  const paths = new Map();
  let first = 1;
  for (let t = 1; t <= horizon; t += 1) {
    if (t < horizon && kind(t + 1) === kind(first)) continue;
    const [from, width] = [left + (first - 1) * unit, (t - first + 1) * unit];
    paths.set(kind(first), `${paths.get(kind(first)) ?? ""}M${from.toFixed(2)},${top}h${width.toFixed(2)}v${height}h${(-width).toFixed(2)}z`);
    first = t + 1;
  }
  return [...paths].map(([name, path]) => make("path", { class: name, d: path }));
}

/** A curve of positions first to last as steps; edges[i] is where position first + i begins. */
function steps(values, edges, first, last, height, closed) {
  const level = (t) => (height - 1 - (height - 3) * values[t - 1]).toFixed(2);
  let path = closed ? `M${edges[0]},${height - 1}V${level(first)}` : `M${edges[0]},${level(first)}`;
  for (let t = first; t <= last; t += 1) path += `V${level(t)}H${edges[t - first + 1]}`;
  return closed ? `${path}V${height - 1}Z` : path;
}

class Overview {
  /** ``move`` is called with the position that the reader points at. */
  constructor(horizon, move) {
    Object.assign(this, { horizon, move });
  }

  draw(shown, width) {
    const { horizon } = this;
    const left = 26;
    const unit = (width - left - 8) / horizon;
    const single = shown.length === 1;
    const [bar, lane, gap] = [12, single ? 72 : 30, 8];
    const edges = Array.from({ length: horizon + 1 }, (_, at) => +(left + at * unit).toFixed(2));
    const height = 20 + shown.length * (bar + lane + gap) + 14;
    const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": this.words(shown) });
    this.cursor = make("rect", { class: "cursor", y: 16, width: Math.max(unit, 2), height: height - 32 });
    svg.append(this.cursor);
    shown.forEach((pair, at) => {
      const top = 20 + at * (bar + lane + gap);
      svg.append(this.lane(pair, edges, { top, bar, lane, left, right: width - 8, unit }));
      if (at === 0 && pair.span_first) {
        svg.append(make("line", { class: "answer", x1: edges[pair.span_first - 1], x2: edges[pair.span_last], y1: top - 3, y2: top - 3 }));
      }
    });
    svg.append(...this.labels(shown[0], single, edges, left, width));
    const between = horizon <= 32 ? 8 : 2 ** Math.ceil(Math.log2(horizon / (width > 700 ? 16 : 6)));
    for (let t = between; t <= horizon; t += between) {
      svg.append(make("text", { x: (edges[t - 1] + edges[t]) / 2, y: height - 2, "text-anchor": "middle" }, String(t)));
    }
    const point = (event) => {
      const box = svg.getBoundingClientRect();
      this.move(Math.floor(((event.clientX - box.left) * width / box.width - left) / unit) + 1);
    };
    svg.addEventListener("pointerdown", (event) => { point(event); svg.setPointerCapture(event.pointerId); });
    svg.addEventListener("pointermove", (event) => { if (svg.hasPointerCapture(event.pointerId)) point(event); });
    this.edges = edges;
    byId("overview").replaceChildren(svg);
  }

  lane(pair, edges, { top, bar, lane, left, right, unit }) {
    const { horizon } = this;
    const group = make("g", { style: `--colour: ${pair.colour}` }, ...bars(pair, horizon, left, unit, top, bar),
      make("g", { transform: `translate(0 ${top + bar + 2})` },
        make("path", { class: "axis", d: `M${left},1H${right}M${left},${lane - 1}H${right}` }),
        make("path", { class: "delta", d: steps(pair.delta, edges, 1, horizon, lane, true) }),
        make("path", { class: "f", d: steps(pair.f, edges, 1, horizon, lane, false) }),
        make("text", { x: left - 5, y: 8, "text-anchor": "end" }, "1"),
        make("text", { x: left - 5, y: lane, "text-anchor": "end" }, "0")));
    const end = top + bar + lane + 2;
    for (const eos of new Set([pair.eos_x, pair.eos_y])) {
      if (eos) group.append(make("line", { class: "eos", x1: edges[eos - 1], x2: edges[eos - 1], y1: top, y2: end }));
    }
    if (pair.tau) {
      group.append(make("line", { class: "tau", x1: edges[pair.tau - 1], x2: edges[pair.tau - 1], y1: top - 2, y2: end }));
    }
    return group;
  }

  /** τ and the ends of the first trajectory, as far as they have room beside each other. */
  labels(pair, single, edges, left, width) {
    const labels = [[pair.tau, pair.tau === null ? "" : `τ ${pair.tau}`, "strong"]];
    if (single) {
      const both = pair.eos_x && pair.eos_x === pair.eos_y;
      labels.push([pair.eos_x, both ? "both end" : "X ends", ""], [both ? null : pair.eos_y, "Y ends", ""]);
    }
    const taken = [];
    const elements = [];
    for (const [t, text, kind] of labels) {
      if (t === null) continue;
      const half = 3.4 * text.length;
      const x = Math.min(Math.max(edges[t - 1], left + half), width - half);
      if (taken.some((other) => Math.abs(other - x) < 52)) continue;
      taken.push(x);
      elements.push(make("text", { class: kind, x, y: 11, "text-anchor": "middle" }, text));
    }
    return elements;
  }

  words(shown) {
    return shown.map((pair) => `${pair.name}: ${pair.tau === null ? "no mismatch" : `first mismatch at ${pair.tau}`}, `
      + `${pair.mismatches} of ${this.horizon} positions differ, in ${pair.runs.length} runs`).join("; ");
  }

  mark(t) {
    this.cursor.setAttribute("x", this.edges[t - 1]);
  }
}
