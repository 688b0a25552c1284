// How the search orders its results. The numbers in the table are Sphinx's own; `score` adds three rules.
var Scorer = {
  score: ([docname, title, anchor, description, score, filename, kind]) => {
    const query = (new URLSearchParams(window.location.search).get("q") || "").toLowerCase();
    const words = query.split(/[^\p{L}\p{N}_]+/u).filter((word) => word.length > 2);
    // A heading that contains the whole query, such as an error message.
    if (kind === "title") score += 10;
    // A page that is about one of the words. All headings of a page count the same to Sphinx.
    if (kind === "text" && words.some((word) => title.toLowerCase().includes(word))) score += 5;
    // Pages that explain come before the reference, and both before the reasons for decisions.
    if (docname.startsWith("api/")) score -= 2;
    if (docname.startsWith("decisions/")) score -= 8;
    return score;
  },
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
