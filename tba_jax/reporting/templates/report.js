"use strict";
// Draws the charts of the page from the JSON in #data over trainer steps or time, and shows the samples that the reader chooses.
// What a run wrote becomes text of the page and never markup.
(function () {
  const data = JSON.parse(document.getElementById("data").textContent);
  const plain = { gridcolor: "#e8e8ee", linecolor: "#b5b5c0", zeroline: false, automargin: true };

  function add(parent, tag, text, name) {
    const made = parent.appendChild(document.createElement(tag));
    if (text !== undefined) made.textContent = text;
    if (name) made.className = name;
    return made;
  }

  function draw(chart, axis) {
    const traces = chart.traces.map(function (trace) {
      return trace.x_by ? Object.assign({}, trace, { x: trace.x_by[axis], x_by: undefined }) : trace;
    });
    const layout = Object.assign({
      font: { family: "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif", size: 12, color: "#22222c" },
      margin: { t: 12, r: 16, b: 44, l: 62 }, hovermode: "closest", height: chart.height,
      legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0 },
    }, chart.layout);
    layout.xaxis = Object.assign({}, plain, layout.xaxis);
    layout.yaxis = Object.assign({}, plain, layout.yaxis);
    if (chart.axes) {
      layout.xaxis.title = { text: axis === "time" ? data.time_title : "trainer step" };
      layout.shapes = (data.resumes[axis] || []).map(function (x) {
        return { type: "line", x0: x, x1: x, y0: 0, y1: 1, yref: "paper", line: { color: "#8a8a96", width: 1, dash: "dash" } };
      });
    }
    Plotly.react(chart.place, traces, layout, { responsive: true, displaylogo: false, displayModeBar: false });
  }

  data.charts.forEach(function (chart) {
    const box = add(document.querySelector("[data-section=" + chart.section + "]"), "div", undefined, chart.wide ? "chart wide" : "chart");
    add(box, "h3", chart.title);
    add(box, "p", chart.told, "told");
    chart.place = add(box, "div");
    draw(chart, "step");
  });
  document.querySelectorAll("input[name=axis]").forEach(function (input) {
    input.addEventListener("change", function () {
      data.charts.filter(function (chart) { return chart.axes; }).forEach(function (chart) { draw(chart, input.value); });
    });
  });

  const named = {};
  const prompts = {};
  data.samples.forEach(function (sample) {
    sample.response = sample.tokens.map(function (token) { return token[0]; }).join("");
    named[sample.name] = sample;
    prompts[sample.query] = sample.prompt;
  });
  const field = function (id) { return document.getElementById(id); };
  const titles = { worst: "lowest rewards", best: "highest rewards", disagreeing: "best and worst of the queries that differ most", random: "random", steps: "by policy step" };
  const option = function (select, value, text) { add(select, "option", text).value = value; };
  Object.keys(data.groups).forEach(function (group) { option(field("group"), group, titles[group]); });
  option(field("group"), "", "all of these");
  option(field("query"), "", "any");
  Object.keys(prompts).sort(function (a, b) { return prompts[a] < prompts[b] ? -1 : 1; }).forEach(function (query) {
    option(field("query"), query, prompts[query].slice(-60) + " · " + query.slice(0, 6));
  });

  function colour(token) {
    if (field("colour").value === "step") return "rgba(44, 127, 184, " + (0.08 + 0.5 * Math.max(0, token[2]) / Math.max(1, data.newest)) + ")";
    if (token[1] === null || Math.abs(token[1]) < 0.05) return "";
    return "rgba(" + (token[1] > 0 ? "226, 99, 60, " : "79, 140, 202, ") + Math.min(1, 0.12 + 0.3 * Math.abs(token[1])) + ")";
  }

  function figures(sample) {
    const number = function (value) { return value === null ? "not finite" : value.toFixed(3); };
    const steps = sample.oldest === sample.newest ? "policy step " + sample.newest : "policy steps " + sample.oldest + " to " + sample.newest;
    const drawn = sample.draws === 0 ? "no step has drawn it" : "trained at step" + (sample.draws > 1 ? "s " : " ") + sample.steps.join(", ") +
      (sample.draws > sample.steps.length ? " … (" + sample.draws + " times in all)" : "");
    const parts = sample.parts.length > 1 ? [sample.parts.map(function (part) { return part[0] + " " + number(part[1]); }).join(", ")] : [];
    return ["reward " + number(sample.reward)].concat(parts, [
      sample.length + " tokens" + (sample.finished ? "" : ", cut"),
    ], sample.turns ? [sample.turns] : [], [
      steps + (sample.mounted ? " of a mounted run" : ""),
      "Σ log π_θ/π_ref " + (sample.ratio === null ? "not scored" : number(sample.ratio) + " nats"), drawn]);
  }

  function show() {
    const group = field("group").value, query = field("query").value, step = field("step").value.trim(), text = field("text").value.toLowerCase();
    const rows = (group ? data.groups[group].map(function (name) { return named[name]; }) : data.samples).filter(function (sample) {
      return (!query || sample.query === query) && (!step || sample.steps.indexOf(Number(step)) >= 0) &&
        (sample.prompt + "\n" + sample.response + "\n" + sample.name).toLowerCase().indexOf(text) >= 0;
    });
    field("count").textContent = rows.length + " of " + data.samples.length + " rows.";
    field("rows").textContent = "";
    rows.forEach(function (sample) {
      const card = add(field("rows"), "article", undefined, "sample");
      const facts = add(card, "div", undefined, "facts");
      add(facts, "b", sample.name);
      figures(sample).forEach(function (told) { add(facts, "span", told); });
      add(card, "p", "query " + sample.query, "label");
      add(card, "div", sample.prompt, "prompt");
      add(card, "p", "response", "label");
      const tokens = add(card, "div", undefined, "tokens");
      sample.tokens.forEach(function (token) {
        const shown = add(tokens, "span", token[0], "tok");
        if (token[2] < 0) { // nobody drew it
          shown.classList.add("said");
          shown.title = "of the environment: not trained on";
          return;
        }
        shown.style.background = colour(token);
        shown.title = "log π_θ/π_ref " + token[1] + " nats, policy step " + token[2];
      });
      if (sample.more) add(card, "p", "… and " + sample.more + " more tokens", "told");
      add(add(card, "p", "To generate it again: ", "label"), "code", sample.again);
    });
  }
  ["group", "query", "step", "text", "colour"].forEach(function (id) {
    field(id).addEventListener("input", show);
    field(id).addEventListener("change", show);
  });
  show();
})();
