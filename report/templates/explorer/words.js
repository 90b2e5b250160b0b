"use strict";
// Elements and words. Texts of tokens and names come from strangers: they are set as text, never as markup.

const SVG = "http://www.w3.org/2000/svg";
const DRAWN = new Set(["svg", "g", "path", "rect", "line", "text", "title"]);
const CONTROL = /[\u0000-\u001f\u007f]/g;
const INVISIBLE = /^(?:\p{Cf}|[\ufe00-\ufe0f])+$/u;
const BYTE = /\\x[89A-F][0-9A-F]/g; // of a token that is no character by itself
const SIGN = /[\udc80-\udcff]/gu; // such a byte as one sign
const CHARACTER = /[\udcc2-\udcdf][\udc80-\udcbf]|[\udce0-\udcef][\udc80-\udcbf]{2}|[\udcf0-\udcf4][\udc80-\udcbf]{3}/gu;

const byId = (id) => document.getElementById(id);

function make(tag, attributes = {}, ...children) {
  const element = DRAWN.has(tag) ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

function visible(text) {
  if (text === "") return "∅";
  if (INVISIBLE.test(text)) return Array.from(text, (sign) => `U+${sign.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}`).join("");
  return text.replaceAll("\n", "↵").replaceAll("\t", "⇥")
    .replace(CONTROL, (sign) => String.fromCharCode(sign === "\u007f" ? 0x2421 : 0x2400 + sign.charCodeAt(0)));
}

/** The texts of tokens with the characters put together that several share, as schema/token_texts.py does it. */
function wholeTexts(texts) {
  const hex = (sign) => (sign.charCodeAt(0) - 0xdc00).toString(16).toUpperCase();
  const whole = texts.map((text) => text.replace(BYTE, (byte) => String.fromCharCode(0xdc00 + parseInt(byte.slice(2), 16))));
  const ends = [];
  for (const text of whole) ends.push((ends[ends.length - 1] ?? 0) + text.length);
  let last = 0;
  for (const found of whole.join("").matchAll(CHARACTER)) {
    while (ends[last] <= found.index) last += 1;
    const first = last;
    while (ends[last] < found.index + found[0].length) last += 1;
    if (first === last) continue; // the token's text has these letters and digits themselves
    try {
      const character = decodeURIComponent(found[0].replace(SIGN, (sign) => `%${hex(sign)}`));
      whole[last] = whole.slice(first, last + 1).join("").replace(found[0], character);
      whole.fill("", first, last);
    } catch { /* bytes that make no character */ }
  }
  return whole.map((text) => text.replace(SIGN, (sign) => `\\x${hex(sign)}`));
}

const many = (number) => number.toLocaleString("en-US");
const fixed = (value) => value !== 0 && value < 0.00005 ? value.toExponential(1) : value.toFixed(4);
const quoted = (word) => /^[\w./:@%+,=-]+$/.test(word) ? word : `'${word.replaceAll("'", "'\\''")}'`;

function percent(share) {
  const rounded = Math.round(100 * share);
  return share > 0 && rounded === 0 ? "under 1%" : share < 1 && rounded === 100 ? "over 99%" : `${rounded}%`;
}

function judged(score) {
  if (score === null) return "";
  return score === 1 ? "right" : score === 0 ? "wrong" : `${Math.round(100 * score)}% right`;
}
