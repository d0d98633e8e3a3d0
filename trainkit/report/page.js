// The read-out of the charts, by pointer and by keys. Numbers are those of the curves' own data-x and data-y.
"use strict";
(() => {
  const SVG = "http://www.w3.org/2000/svg";
  const numbers = (text) => text.split(" ").map(Number);

  function nearest(sorted, x) {
    let low = 0, high = sorted.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (sorted[middle] < x) low = middle + 1; else high = middle;
    }
    return low > 0 && x - sorted[low - 1] <= sorted[low] - x ? low - 1 : low;
  }

  class Chart {
    constructor(svg) {
      this.svg = svg;
      this.plot = numbers(svg.dataset.plot);
      this.range = numbers(svg.dataset.range);
      this.series = [...svg.querySelectorAll(".series")].map((group) => ({
        name: group.dataset.name, colour: group.classList[1],
        x: numbers(group.dataset.x), y: numbers(group.dataset.y), text: group.dataset.y.split(" "), at: group.dataset.x.split(" "),
      }));
      this.stops = [...new Set(this.series.flatMap((item) => item.x))].sort((a, b) => a - b);
      this.box = document.createElement("div");
      this.box.className = "readout";
      this.box.hidden = true;
      svg.parentNode.append(this.box);
      this.cursor = document.createElementNS(SVG, "g");
      this.cursor.setAttribute("class", "cursor");
      svg.append(this.cursor);
      svg.setAttribute("tabindex", "0");
      svg.setAttribute("role", "slider");
      svg.setAttribute("aria-valuemin", this.stops[0]);
      svg.setAttribute("aria-valuemax", this.stops[this.stops.length - 1]);
      this.tell(this.stops[this.stops.length - 1], false);
    }

    toX(x) {
      const [left, right] = this.plot, scale = this.scale("x");
      const low = scale(this.range[0]), high = scale(this.range[1]);
      return left + (scale(x) - low) / (high - low) * (right - left);
    }

    fromX(at) {
      const [left, right] = this.plot, [low, high] = this.range, share = (at - left) / (right - left);
      return this.isLog("x") ? low * (high / low) ** share : low + share * (high - low);
    }

    isLog(axis) {
      return (this.svg.dataset.log || "").includes(axis);
    }

    scale(axis) {
      return this.isLog(axis) ? Math.log10 : Number;
    }

    toY(y) {
      const [, , top, bottom] = this.plot, scale = this.scale("y");
      const low = scale(this.range[2]), high = scale(this.range[3]);
      return bottom - (scale(y) - low) / (high - low) * (bottom - top);
    }

    // Be at the stop that is nearest to x; shown or only told to who listens.
    tell(x, show = true) {
      const at = this.stops[nearest(this.stops, x)], words = [], rows = [];
      const near = this.isLog("x") ? at / 100 : (this.range[1] - this.range[0]) / 100;
      this.at = at;
      this.cursor.replaceChildren();
      const add = (name, attributes) => {
        const element = document.createElementNS(SVG, name);
        for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
        this.cursor.append(element);
      };
      if (show) add("path", { d: `M${this.toX(at)} ${this.plot[2]}V${this.plot[3]}` });
      let name = String(at);
      for (const item of this.series) {
        const place = nearest(item.x, at), off = Math.abs(item.x[place] - at);
        if (item.x[place] === at) name = item.at[place];
        if (at < item.x[0] - near || at > item.x[item.x.length - 1] + near) continue;  // it had not begun, or is over
        const value = off > near ? `${item.text[place]} (${item.at[place]})` : item.text[place];
        rows.push([item, value, item.y[place]]);
        words.push(`${item.name} ${value}`);
        if (show) add("circle", { cx: this.toX(item.x[place]), cy: this.toY(item.y[place]), r: 4, class: item.colour });
      }
      const title = `${this.svg.dataset.x} ${name}`;
      this.below = rows.length > 0 && rows.every(([item, , y]) => this.toY(y) < (this.plot[2] + this.plot[3]) / 2);
      this.svg.setAttribute("aria-valuenow", at);
      this.svg.setAttribute("aria-valuetext", `${title}: ${words.join(", ")}`);
      if (show) this.write(title, rows);
      this.box.hidden = !show;
    }

    write(title, rows) {
      const head = document.createElement("b");
      head.textContent = title;
      const lines = rows.map(([item, value]) => {
        const line = document.createElement("div"), swatch = document.createElement("span");
        const name = document.createElement("span"), number = document.createElement("span");
        swatch.className = `swatch ${item.colour}`;
        name.textContent = item.name;
        number.textContent = value;
        number.className = "value";
        line.append(swatch, name, number);
        return line;
      });
      this.box.replaceChildren(head, ...lines);
      this.box.hidden = false;
      const share = this.toX(this.at) / this.svg.viewBox.baseVal.width;  // the side where the cursor is not
      this.box.style.left = share > 0.5 ? "" : `${100 * share + 3}%`;
      this.box.style.right = share > 0.5 ? `${100 * (1 - share) + 3}%` : "";
      this.box.style.top = this.below ? "auto" : "";  // and away from the curves, where they are all at the top
      this.box.style.bottom = this.below ? "20%" : "";
    }

    hide() {
      this.cursor.replaceChildren();
      this.box.hidden = true;
    }

    // Where a key leads from here; undefined for a key that leads nowhere.
    by(key) {
      const last = this.stops.length - 1, here = nearest(this.stops, this.at), page = Math.max(1, Math.round(last / 10));
      const to = {
        ArrowLeft: here - 1, ArrowDown: here - 1, ArrowRight: here + 1, ArrowUp: here + 1,
        PageDown: here - page, PageUp: here + page, Home: 0, End: last,
      }[key];
      return to === undefined ? undefined : this.stops[Math.min(last, Math.max(0, to))];
    }
  }

  const charts = [...document.querySelectorAll("figure.chart svg")].map((svg) => new Chart(svg));
  for (const chart of charts) {
    const group = charts.filter((other) => other.svg.dataset.group === chart.svg.dataset.group);
    const tell = (x) => group.forEach((other) => other.tell(x));
    const hide = () => group.forEach((other) => other.hide());
    chart.svg.addEventListener("pointermove", (event) => {
      const box = chart.svg.getBoundingClientRect();
      tell(chart.fromX((event.clientX - box.left) / box.width * chart.svg.viewBox.baseVal.width));
    });
    chart.svg.addEventListener("pointerleave", () => { if (document.activeElement !== chart.svg) hide(); });
    chart.svg.addEventListener("focus", () => tell(chart.at));
    chart.svg.addEventListener("blur", hide);
    chart.svg.addEventListener("keydown", (event) => {
      if (event.key === "Escape") { hide(); return; }
      const x = chart.by(event.key);
      if (x === undefined || event.ctrlKey || event.altKey || event.metaKey) return;
      event.preventDefault();
      tell(x);
    });
  }
  addEventListener("beforeprint", () => {
    charts.forEach((chart) => chart.hide());
    document.querySelectorAll("details").forEach((item) => { item.open = true; });
  });
})();
