// The data of the page: a manifest, arrays of numbers and prompts, as report/explorer/page.py writes them. Numbers are
// decoded when they are shown, so opening the page costs little more for longer prompts. Positions count from 1.

async function unpacked(id) {
  const text = atob(byId(id).textContent);
  const bytes = new Uint8Array(text.length);
  for (let at = 0; at < text.length; at += 1) bytes[at] = text.charCodeAt(at);
  const plain = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Uint8Array(await new Response(plain).arrayBuffer());
}

/** Numbers first to end - 1 of an array that is grouped by bytes, the lowest byte of every number first. */
function numbers(bytes, first, end) {
  const length = bytes.all.length / bytes.size;
  const values = new Uint32Array(end - first);
  for (let byte = 0; byte < bytes.size; byte += 1) {
    for (let at = first; at < end; at += 1) values[at - first] |= bytes.all[byte * length + at] << (8 * byte);
  }
  return values;
}

class Packed {
  constructor(manifest, arrays) {
    Object.assign(this, manifest);
    this.count = this.trajectories.document.length;
    this.tokenSize = this.tokens.length <= 65536 ? 2 : 4;
    let begin = 0;
    const array = (rows, size) => {
      const all = arrays.subarray(begin, begin + rows * this.horizon * size);
      begin += all.length;
      return { all, size };
    };
    this.x = array(this.references, this.tokenSize);
    this.y = array(this.count, this.tokenSize);
    this.delta = array(this.count, 4);
    this.f = array(this.count, 4);
  }

  static async read() {
    const manifest = JSON.parse(new TextDecoder().decode(await unpacked("manifest")));
    return new Packed(manifest, await unpacked("arrays"));
  }

  /** A token's text alone, with bytes that are no character by themselves in hexadecimal; its number without a tokenizer. */
  plain(token) {
    return this.texts ? this.texts[token] : String(this.tokens[token]);
  }

  /** The same text with signs for invisible characters. */
  text(token) {
    return visible(this.plain(token));
  }

  /** The text of successive tokens, in a piece for each token. */
  whole(tokens) {
    return wholeTexts(Array.from(tokens, (token) => this.plain(token)));
  }

  /** A token as it is shown among others: its piece of the whole text, or its bytes if a later token completes them. */
  shown(token, piece) {
    return visible(piece || this.plain(token));
  }

  /** A trajectory by its number, with its streams, and its runs of mismatches and its end, derived from them. */
  trajectory(row) {
    const values = {};
    for (const [name, column] of Object.entries(this.trajectories)) values[name] = column[row];
    const { horizon } = this;
    const streamOf = (array, at) => numbers(array, at * horizon, (at + 1) * horizon);
    const [x, y] = [streamOf(this.x, values.reference), streamOf(this.y, row)];
    const [delta, f] = [streamOf(this.delta, row), streamOf(this.f, row)];
    for (let at = 0; at < horizon; at += 1) f[at] ^= delta[at];
    const over = values.eos_x && values.eos_y ? Math.max(values.eos_x, values.eos_y) : horizon;
    const runs = [];
    for (let t = 1; t <= horizon; t += 1) {
      if (x[t - 1] === y[t - 1]) continue;
      const last = runs[runs.length - 1];
      if (last && last.last === t - 1) last.last = t;
      else runs.push({ first: t, last: t });
    }
    return { ...values, row, x, y, over, runs, delta: new Float32Array(delta.buffer), f: new Float32Array(f.buffer),
      name: this.actions[values.action], colour: `var(--c${values.action % 6})` };
  }

  /** The prompt at a place of the manifest's list. */
  async prompt(place) {
    return new PackedPrompt(this, this.prompts[place], await unpacked(`prompt${place}`));
  }
}

/** A prompt: its tokens, the records of its answers in their order, its turns, and what actions keep. */
class PackedPrompt {
  constructor(data, entry, bytes) {
    this.data = data;
    this.entries = entry.entries;
    let begin = data.tokenSize * entry.entries;
    this.tokens = { all: bytes.subarray(0, begin), size: data.tokenSize };
    this.kept = entry.kept.map(([action, step, bounds]) => {
      const shares = bytes.subarray(begin, begin + bounds.length * entry.entries);
      begin += shares.length;
      return new Kept(action, step, [...bounds, data.layers], shares, entry.entries);
    });
    this.records = entry.records.map(([answer, piece, first, last]) => ({ answer, piece, first, last }))
      .sort((a, b) => a.first - b.first);
    this.turns = entry.turns.map(([role, first]) => ({ role, first }));
    this.places = new Int32Array(entry.entries + 1).fill(-1); // of each position the record that has it
    this.records.forEach(({ first, last }, at) => this.places.fill(at, first, last + 1));
  }

  token(p) {
    return numbers(this.tokens, p - 1, p)[0];
  }

  /** The whole prompt's text, in a piece for each token; made on the first use. */
  get whole() {
    this.pieces ??= this.data.whole(numbers(this.tokens, 0, this.entries));
    return this.pieces;
  }

  /** The text of the token at a position as it is shown. */
  shown(p) {
    return this.data.shown(this.token(p), this.whole[p - 1]);
  }

  /** The turn that has a position; undefined of a prompt that no chat template wrote. */
  turnAt(p) {
    return this.turns.findLast(({ first }) => first <= p);
  }

  /** The record that has a position; undefined if none has. */
  recordAt(p) {
    return this.records[this.places[p]];
  }
}

/** What an action keeps of a prompt after a counted step: of each group of layers a share of the entries by position. */
class Kept {
  constructor(action, step, bounds, shares, entries) {
    Object.assign(this, { action, step, bounds, shares, entries, groups: bounds.length - 1 });
  }

  /** The share of a group's entries at a position. */
  ofGroup(group, p) {
    return this.shares[group * this.entries + p - 1] / 255;
  }

  /** Sums up to each position of shares times layers, as whole numbers of 255ths; made on the first use. */
  get sums() {
    if (!this.summed) {
      this.summed = new Float64Array(this.entries + 1);
      for (let group = 0; group < this.groups; group += 1) {
        const layers = this.bounds[group + 1] - this.bounds[group];
        for (let p = 1; p <= this.entries; p += 1) this.summed[p] += layers * this.shares[group * this.entries + p - 1];
      }
      for (let p = 1; p <= this.entries; p += 1) this.summed[p] += this.summed[p - 1];
    }
    return this.summed;
  }

  /** The share of the entries of some positions, over all layers. */
  share(first, last = first) {
    const all = 255 * this.bounds[this.groups] * (last - first + 1);
    return (this.sums[last] - this.sums[first - 1]) / all;
  }

  get whole() {
    return this.share(1, this.entries) === 1;
  }

  /** How many positions have no entry left. */
  get gone() {
    let count = 0;
    for (let p = 1; p <= this.entries; p += 1) count += this.sums[p] === this.sums[p - 1];
    return count;
  }
}
