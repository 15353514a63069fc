"use strict";
const rows = JSON.parse(document.getElementById("data").textContent);
const filters = document.getElementById("filters");
const list = document.getElementById("list");
const PAGE = 40;
let limit = PAGE;

function element(tag, className, text) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  if (text !== undefined) node.textContent = text;
  return node;
}

function choice(label, options) {
  const select = element("select");
  select.setAttribute("aria-label", label);
  for (const [value, text] of options) {
    const option = element("option", "", text);
    option.value = value;
    select.append(option);
  }
  select.addEventListener("change", () => { limit = PAGE; show(); });
  filters.append(select);
  return select;
}

const distinct = (key) => [...new Set(rows.map((row) => row[key]))];
const model = choice("model", [["", "all models"], ...distinct("model").map((name) => [name, name])]);
const set = choice("set", [["", "all sets"], ...distinct("set").map((name) => [name, name])]);
const kind = choice("verdict", [
  ["", "right and wrong"], ["right", "right"], ["wrong", "wrong"], ["none", "no answer"], ["cut", "cut off"],
  ["unasked", "not asked: too long"],
  ["fooled", "verifier: wrong verdict"], ["limit", "grading hit a limit"],
]);
const search = element("input");
search.type = "search";
search.placeholder = "search in question, answer and response";
search.addEventListener("input", () => { limit = PAGE; show(); });
filters.append(search);
const count = element("span", "muted");
filters.append(count);

function fits(row) {
  if (model.value && row.model !== model.value) return false;
  if (set.value && row.set !== set.value) return false;
  const tests = {
    right: row.correct, wrong: !row.correct, none: row.answer === null, cut: row.asked && !row.finished,
    unasked: !row.asked,
    fooled: row.verdict !== null && row.verdict !== Number(row.correct), limit: row.outcome !== "graded",
  };
  if (kind.value && !tests[kind.value]) return false;
  const words = search.value.trim().toLowerCase();
  return !words || `${row.id}\n${row.question}\n${row.answer}\n${row.gold}\n${row.response}`.toLowerCase().includes(words);
}

function details(title, text) {
  const node = element("details");
  node.append(element("summary", "", title), element("pre", "", text));
  return node;
}

function card(row) {
  const node = element("div", "rollout");
  const head = element("div", "head");
  head.append(element("span", `badge ${row.correct ? "right" : "wrong"}`, row.correct ? "right" : "wrong"));
  head.append(element("span", "", `${row.id} · ${row.model} · ${row.sample} · ${row.num_tokens} tokens`));
  if (!row.finished) head.append(element("span", "badge", "cut off"));
  if (row.outcome !== "graded") head.append(element("span", "badge wrong", `grading: ${row.outcome}`));
  node.append(head, element("div", "question", row.question));
  const steps = element("ol", "steps");
  for (const [text, judgement] of row.steps) {
    const item = element("li", judgement === 1 ? "right" : judgement === -1 ? "wrong" : "");
    item.append(element("span", "text", text));
    const names = { 1: "judged right", "-1": "judged wrong", 0: "not judged" };
    if (judgement !== null && judgement !== undefined) item.append(element("span", "numbers", names[judgement]));
    steps.append(item);
  }
  if (row.steps.length) node.append(steps);
  const facts = element("div", "facts");
  facts.append(element("span", "", `answer: ${row.answer === null ? "none" : row.answer}`));
  facts.append(element("span", "", `gold: ${row.gold}`));
  if (row.verdict !== null) {
    const verdicts = { 1: "right", 0: "wrong", "-1": "none" };
    facts.append(element("span", "", `verifier's verdict: ${verdicts[row.verdict]}`));
  }
  if (row.score !== null) facts.append(element("span", "", `verifier's score: ${row.score.toFixed(2)}`));
  node.append(facts, details("response", row.response));
  if (row.verification) node.append(details("verification", row.verification));
  return node;
}

function show() {
  const fitting = rows.filter(fits);
  count.textContent = `${fitting.length} answers`;
  list.replaceChildren(...fitting.slice(0, limit).map(card));
  if (fitting.length > limit) {
    const more = element("button", "", `show more (${fitting.length - limit} left)`);
    more.addEventListener("click", () => { limit += PAGE; show(); });
    list.append(more);
  }
}

show();
