"use strict";
// Elements and words. Texts of tokens and names come from strangers: they are set as text, never as markup.

const SVG = "http://www.w3.org/2000/svg";
const DRAWN = new Set(["svg", "g", "path", "rect", "line", "text", "title"]);
const CONTROL = /[\u0000-\u001f\u007f]/g;

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
  return text.replaceAll("\n", "↵").replaceAll("\t", "⇥")
    .replace(CONTROL, (sign) => String.fromCharCode(sign === "\u007f" ? 0x2421 : 0x2400 + sign.charCodeAt(0)));
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
