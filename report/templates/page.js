// Tables that sort by a click on a column's head, and folds that open for a link, or all at once. The page is readable
// without this script.
(function () {
  "use strict";
  var UNITS = {B: 1, KiB: 1024, MiB: 1048576, GiB: 1073741824, TiB: 1099511627776, s: 1, min: 60, h: 3600};

  // The sort key of a cell: its number in its unit, or its text; null for a dash, which comes last.
  function key(cell) {
    var first = cell.firstChild && cell.firstChild.nodeType === 3 ? cell.firstChild.data : cell.textContent;
    var text = first.trim();
    if (text === "" || text === "–") { return null; }
    var number = /^[−-]?[\d,]*\.?\d+/.exec(text);
    if (!number) { return text.toLowerCase(); }
    var unit = /^\s*([A-Za-z]+)/.exec(text.slice(number[0].length));
    return Number(number[0].replace("−", "-").replace(/,/g, "")) * (unit && UNITS[unit[1]] || 1);
  }

  function compare(a, b) {
    if (typeof a === typeof b) { return a < b ? -1 : a > b ? 1 : 0; }
    return typeof a === "number" ? -1 : 1;
  }

  // Sort the rows of each body of a table; "none" brings back the order of the page. Headings of groups stay on top.
  function sort(table, column, order) {
    Array.prototype.forEach.call(table.tBodies, function (body) {
      var rows = body.originalRows || (body.originalRows = Array.prototype.slice.call(body.rows));
      var heads = rows.filter(function (row) { return row.cells.length === 1; });
      var data = rows.filter(function (row) { return row.cells.length > 1; });
      if (order !== "none") {
        data = data.map(function (row) { return {row: row, key: key(row.cells[column])}; }).sort(function (a, b) {
          if (a.key === null || b.key === null) { return (a.key === null) - (b.key === null); }
          return order === "ascending" ? compare(a.key, b.key) : compare(b.key, a.key);
        }).map(function (entry) { return entry.row; });
      }
      heads.concat(data).forEach(function (row) { body.appendChild(row); });
    });
    Array.prototype.forEach.call(table.tHead.rows[0].cells, function (head, place) {
      head.setAttribute("aria-sort", place === column ? order : "none");
    });
  }

  var NEXT = {none: "ascending", ascending: "descending", descending: "none"};
  document.querySelectorAll("table:not(.glance)").forEach(function (table) {
    var longest = Math.max.apply(null, Array.prototype.map.call(table.tBodies, function (body) { return body.rows.length; }));
    if (!table.tHead || longest < 2) { return; }
    Array.prototype.forEach.call(table.tHead.rows[0].cells, function (head, column) {
      var button = document.createElement("button");
      button.type = "button";
      while (head.firstChild) { button.appendChild(head.firstChild); }
      head.appendChild(button);
      head.setAttribute("aria-sort", "none");
      button.addEventListener("click", function () { sort(table, column, NEXT[head.getAttribute("aria-sort")]); });
    });
  });

  // A box that scrolls sideways can be reached and scrolled by keyboard; other boxes are no tab stops.
  function reach() {
    document.querySelectorAll(".scroll").forEach(function (box) {
      if (box.scrollWidth > box.clientWidth) { box.tabIndex = 0; } else { box.removeAttribute("tabindex"); }
    });
  }
  window.addEventListener("resize", reach);
  document.addEventListener("toggle", reach, true);
  reach();

  // A row of the first screen, under the pointer or with the focus, stands out in the figure, and a mark in the rows.
  document.querySelectorAll("tr[data-figure]").forEach(function (row) {
    var parts = document.querySelectorAll('[id^="' + row.dataset.figure + '"]');
    if (!parts.length) { return; }
    var together = [row, parts[0].ownerSVGElement].concat(Array.prototype.slice.call(parts));
    function show(on) {
      return function () { together.forEach(function (element) { element.toggleAttribute("data-on", on); }); };
    }
    [row].concat(Array.prototype.slice.call(parts)).forEach(function (element) {
      element.addEventListener("pointerenter", show(true));
      element.addEventListener("pointerleave", show(false));
    });
    row.addEventListener("focusin", show(true));
    row.addEventListener("focusout", show(false));
  });

  // Of the reasons for badges one is open, until a click elsewhere or Escape.
  document.addEventListener("click", function (event) {
    document.querySelectorAll(".badge[open]").forEach(function (badge) {
      if (!badge.contains(event.target)) { badge.open = false; }
    });
  });
  document.addEventListener("keydown", function (event) {
    if (event.key === "Escape") { document.querySelectorAll(".badge[open]").forEach(function (badge) { badge.open = false; }); }
  });

  // On a phone a tap shows a figure so large that its text is read with ease; the styles say how large, and where.
  document.querySelectorAll("figure svg").forEach(function (figure) {
    figure.addEventListener("click", function () {
      figure.closest("figure").classList.toggle("large");
      reach();
    });
  });

  // The page of an unfinished study reloads itself until the reader stops it.
  var reloading = document.getElementById("reloading");
  if (reloading) {
    reloading.hidden = false;
    setInterval(function () { if (reloading.control.checked) { location.reload(); } }, 30000);
  }

  function open(element) {
    for (; element; element = element.parentElement) {
      if (element.tagName === "DETAILS") { element.open = true; }
    }
  }
  function follow() {
    var target = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
    if (target) { open(target); target.scrollIntoView(); }
  }
  window.addEventListener("hashchange", follow);
  follow();

  // A print has the open folds and the definitions, since a link cannot open them on paper.
  var closed = [];
  window.addEventListener("beforeprint", function () {
    closed = Array.prototype.slice.call(document.querySelectorAll("details[data-print]:not([open])"));
    closed.forEach(function (fold) { fold.open = true; });
  });
  window.addEventListener("afterprint", function () {
    closed.forEach(function (fold) { fold.open = false; });
  });

  document.querySelectorAll(".unfold").forEach(function (button) {
    var opens = button.textContent, all = false;
    button.hidden = false;
    button.addEventListener("click", function () {
      all = !all;
      document.querySelectorAll("details:not(.badge)").forEach(function (fold) { fold.open = all; });
      button.textContent = all ? "Close all sections that fold" : opens;
    });
  });
})();
