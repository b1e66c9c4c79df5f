"use strict";
// Draws the charts of the page from the JSON in #data, and switches them between two axes: trainer steps and time.
(function () {
  const data = JSON.parse(document.getElementById("data").textContent);
  const axisNames = { step: "trainer step", time: data.time_title };
  const plots = [];
  let axis = "step";

  function base(figure) {
    const layout = Object.assign({}, figure.layout);
    const plain = { gridcolor: "#e8e8ee", linecolor: "#b5b5c0", zeroline: false, automargin: true };
    layout.xaxis = Object.assign({}, plain, layout.xaxis || {});
    layout.yaxis = Object.assign({}, plain, layout.yaxis || {});
    layout.margin = Object.assign({ t: 12, r: 16, b: 44, l: 62 }, layout.margin || {});
    layout.font = { family: "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif", size: 12, color: "#22222c" };
    layout.paper_bgcolor = "#ffffff";
    layout.plot_bgcolor = "#ffffff";
    layout.hovermode = layout.hovermode || "closest";
    layout.legend = layout.legend || { orientation: "h", y: 1.02, yanchor: "bottom", x: 0 };
    layout.height = figure.height;
    return layout;
  }

  function on(figure) {
    const layout = base(figure);
    const traces = figure.traces.map(function (trace) {
      const shown = Object.assign({}, trace);
      if (trace.x_by) {
        shown.x = trace.x_by[axis];
        delete shown.x_by;
      }
      return shown;
    });
    if (figure.axes) {
      layout.xaxis.title = { text: axisNames[axis] };
      layout.shapes = (data.again[axis] || []).map(function (x) {
        return { type: "line", x0: x, x1: x, y0: 0, y1: 1, yref: "paper", line: { color: "#8a8a96", width: 1, dash: "dash" } };
      });
    }
    return { traces: traces, layout: layout };
  }

  function draw(id) {
    const figure = data.figures[id];
    const made = on(figure);
    Plotly.react(document.getElementById(id), made.traces, made.layout, { responsive: true, displaylogo: false, displayModeBar: false, scrollZoom: !!figure.scroll });
  }

  Object.keys(data.figures).forEach(function (id) {
    if (document.getElementById(id)) {
      draw(id);
      plots.push(id);
    }
  });

  document.querySelectorAll("input[name=axis]").forEach(function (input) {
    input.addEventListener("change", function () {
      axis = input.value;
      plots.filter(function (id) { return data.figures[id].axes; }).forEach(draw);
    });
  });

  document.querySelectorAll("input[name=colour]").forEach(function (input) {
    input.addEventListener("change", function () {
      document.getElementById("coloured").className = "samples by-" + input.value;
    });
  });
})();
