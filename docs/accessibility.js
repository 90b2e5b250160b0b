// What the theme leaves out for readers with a keyboard or a screen reader: names of the search, a way to tables that
// scroll, and no landmark for each block of code.
"use strict";
window.addEventListener("load", () => {
  const set = (element, attributes) => Object.entries(attributes).forEach((pair) => element.setAttribute(...pair));
  const all = (selector) => [...document.querySelectorAll(selector)];
  all(".md-search").forEach((search) => set(search, { "aria-label": "Search" }));
  all(".md-search__scrollwrap").forEach((found) => set(found, { role: "region", "aria-label": "Search results" }));
  all(".md-code__nav").forEach((buttons) => set(buttons, { role: "none" }));
  all(".md-typeset__scrollwrap").filter((box) => box.scrollWidth > box.clientWidth).forEach((box, at) =>
    set(box, { tabindex: 0, role: "region", "aria-label": `Table ${at + 1}` }));
});
