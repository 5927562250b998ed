"use strict";
// The controls of the page: shows the recorded run of a setting, or, between two sizes of micro-batch, the line
// between their runs.  "#stage=3&micro-batch=2" behind the address sets them.
(() => {
  const form = document.getElementById("what-if");
  if (!form) return;
  const read = (id) => JSON.parse(document.getElementById(id).textContent);
  const { points } = read("plan");
  const { device, colours } = read("scale");
  const SIZE = "micro-batch";
  const given = points[0].setting;
  const slider = document.getElementById(SIZE);
  const sizes = slider ? slider.dataset.values.split(",").map(Number) : [given[SIZE]];
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  const total = (point) => point.segments + point.constants;

  // As `format_bytes` of units.py.
  function bytes(amount) {
    let unit = 0;
    for (; Math.abs(amount) >= 1023.95 && unit < units.length - 1; unit++) amount /= 1024;
    return `${amount.toFixed(unit ? 1 : 0)} ${units[unit]}`;
  }

  function seconds(amount) {
    if (!amount) return "0 ms";
    return amount >= 1 ? `${amount.toPrecision(3)} s` : `${(1000 * amount).toPrecision(3)} ms`;
  }

  function chosen() {
    const setting = { ...given, [SIZE]: slider ? sizes[Number(slider.value)] : given[SIZE] };
    for (const choice of form.querySelectorAll("input[type=radio]:checked")) {
      setting[choice.name] = typeof given[choice.name] === "number" ? Number(choice.value) : choice.value;
    }
    return setting;
  }

  // Returns the run of a setting and where it is from; without a run, only the latter.
  function found(setting) {
    const like = points.filter((p) => Object.keys(given).every((k) => k === SIZE || p.setting[k] === setting[k]));
    const own = like.find((point) => point.setting[SIZE] === setting[SIZE]);
    if (own && own.refused) return { from: `Refused: ${own.refused}.` };
    if (own) return { point: own, from: "Recorded: this run was run dry." };
    const runs = like.filter((point) => !point.refused).sort((a, b) => a.setting[SIZE] - b.setting[SIZE]);
    const next = runs.findIndex((point) => point.setting[SIZE] > setting[SIZE]);
    if (next > 0) return between(runs[next - 1], runs[next], setting);
    return { from: "Not recorded: settings other than the micro-batch are recorded one at a time. Plan this run to see it." };
  }

  function between(low, high, setting) {
    const [from, to] = [low.setting[SIZE], high.setting[SIZE]];
    const line = (a, b) => Math.round(a + ((b - a) * (setting[SIZE] - from)) / (to - from));
    const names = Object.keys({ ...low.at_peak, ...high.at_peak });
    const at_peak = Object.fromEntries(names.map((n) => [n, line(low.at_peak[n] || 0, high.at_peak[n] || 0)]));
    const point = { ...low, setting, at_peak, seconds: null };
    for (const name of ["segments", "constants", "host", "sent", "across"]) point[name] = line(low[name], high[name]);
    const same = low.part === high.part && low.rank === high.rank && String(low.place) === String(high.place);
    const why = same
      ? "both have their peak at the same place, where memory is linear in the micro-batch"
      : "their peaks are at different places, so this is an estimate";
    return { point, from: `Computed: on the line between the recorded micro-batches ${from} and ${to}; ${why}.` };
  }

  function bar(point) {
    const parts = [...Object.keys(colours).map((name) => [name, point.at_peak[name] || 0, colours[name]])];
    const tensors = parts.reduce((sum, part) => sum + part[1], 0);
    parts.push(["rounding and fragments", point.segments - tensors, "var(--line)"]);
    parts.push(["constants", point.constants, "var(--soft)"]);
    const widest = Math.max(...points.filter((other) => !other.refused).map(total), total(point));
    const isFar = device > 2.5 * widest;
    const most = 1.02 * (isFar ? widest : Math.max(device, widest));
    const x = (amount) => (1060 * amount) / most;
    let at = 0;
    const drawn = parts.filter((part) => part[1] > 0).map(([name, amount, colour]) => {
      const place = `x="${x(at).toFixed(1)}" y="6" width="${x(amount).toFixed(1)}" height="28"`;
      at += amount;
      return `<rect ${place} style="fill:${colour}"><title>${name.replaceAll("_", " ")}: ${bytes(amount)}</title></rect>`;
    });
    const limit = isFar ? "" : `<path d="M${x(device).toFixed(1)} 0V40" stroke="#d1495b" stroke-width="3"/>`;
    const label = `${bytes(total(point))} needed of a device's ${bytes(device)}`;
    const far = isFar ? ", far beyond this bar" : ", the red line";
    const words = `<figcaption>${bytes(total(point))} needed. A device has ${bytes(device)}${far}.</figcaption>`;
    return `<svg viewBox="0 0 1060 40" role="img" aria-label="${label}">${drawn.join("")}${limit}</svg>${words}`;
  }

  function rows(point) {
    const own = points[0];
    const names = Object.keys(colours).filter((name) => own.at_peak[name] || (point && point.at_peak[name]));
    const figures = names.map((name) => [name.replaceAll("_", " "), (p) => p.at_peak[name] || 0, bytes]);
    const tensors = (p) => Object.values(p.at_peak).reduce((a, b) => a + b, 0);
    figures.push(["rounding and fragments", (p) => p.segments - tensors(p), bytes]);
    figures.push(["constants, stated", (p) => p.constants, bytes], ["in all", total, bytes]);
    figures.push(["host memory of a node", (p) => p.host, bytes], ["sent by a rank in a step", (p) => p.sent, bytes]);
    figures.push(["of them between nodes", (p) => p.across, bytes], ["a step, modelled", (p) => p.seconds, seconds]);
    return figures.map(([name, of, shown]) => {
      const cell = (amount, text) => `<td class="figure"><data value="${amount}">${text}</data></td>`;
      const [before, now] = [of(own), point ? of(point) : null];
      const none = '<td class="figure">-</td>';
      const sign = now > before ? "+" : now < before ? "−" : "";
      const rest = now === null ? none + none : cell(now, shown(now)) + cell(now - before, sign + shown(Math.abs(now - before)));
      return `<tr><th scope="row">${name}</th>${cell(before, shown(before))}${rest}</tr>`;
    });
  }

  function show() {
    const setting = chosen();
    const { point, from } = found(setting);
    if (slider) {
      slider.setAttribute("aria-valuetext", String(setting[SIZE]));
      form.querySelector("output").textContent = setting[SIZE];
    }
    const left = point ? device - total(point) : 0;
    const room = left >= 0 ? `A device has room: ${bytes(left)} are left.` : `It does not fit: a device lacks ${bytes(-left)}.`;
    const where = point ? `\nMost is needed by rank ${point.rank}: ${[point.part, ...point.place].filter(Boolean).join(", ")}.` : "";
    document.getElementById("status").textContent = point ? `${room} ${from}${where}` : from;
    document.getElementById("drawn").innerHTML = point ? bar(point) : "";
    document.getElementById("figures").innerHTML = rows(point).join("");
    return setting;
  }

  function set(words) {
    for (const [name, value] of new URLSearchParams(words)) {
      if (name === SIZE && slider && sizes.includes(Number(value))) slider.value = sizes.indexOf(Number(value));
      for (const choice of form.querySelectorAll("input[type=radio]")) {
        if (choice.name === name) choice.checked = choice.value === value;
      }
    }
  }

  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("input", () => window.location.replace(`#${new URLSearchParams(show())}`));
  window.addEventListener("hashchange", () => { set(window.location.hash.slice(1)); show(); });
  form.hidden = false;
  set(window.location.hash.slice(1));
  show();
})();
