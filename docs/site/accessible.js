// Names and focus that the theme's own parts lack. It builds some of them late, and takes the focus of code
// away again, so every change of the page is looked at.
function complete() {
  document.querySelector(".md-search")?.setAttribute("aria-label", "Search");
  for (const region of document.querySelectorAll(".md-typeset__scrollwrap, .md-typeset pre > code, picture")) {
    if (region.tabIndex < 0) region.tabIndex = 0;
  }
  // A table's corner heads nothing: it is a cell.
  for (const corner of document.querySelectorAll("th:empty:not([role])")) corner.setAttribute("role", "cell");
}
complete();
// A docstring names what kind a name is of, for another program.
for (const name of document.querySelectorAll("code")) {
  const before = name.previousSibling;
  if (before?.nodeType === Node.TEXT_NODE) before.data = before.data.replace(/:[a-z]+:$/, "");
}
new MutationObserver(complete).observe(document.body, {childList: true, subtree: true, attributeFilter: ["tabindex"]});
