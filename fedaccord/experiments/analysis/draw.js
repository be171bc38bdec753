// Fills a chart from what the reader chose; its arguments are those of Curves.chart
const columns = Math.max(1, Math.floor((window.innerWidth - 60) / entry.width))
if (columns < legend.ncols) {  // a phone
  const rows = (columns) => Math.ceil(entry.number / columns)
  plot.height += 24 * (rows(columns) - rows(legend.ncols))
  legend.ncols = columns
}

const metric = y.value, cost = x.value
const line = {xs: [], ys: [], color: [], dash: [], width: [], alpha: [], label: [], group: []}
const band = {xs: [], ys: [], color: []}
const heights = []  // of the drawn points after round 0, the untrained model
for (const g of groups.active) {
  const data = stores[g].data, [label, color, dash] = looks[g]
  const [raw, smooth, low, high] = parts.map((part) => data[part + " " + metric] ?? [])
  const there = [...raw.keys()].filter((i) => isFinite(raw[i]))
  if (!there.length) continue
  const pick = (values) => there.map((i) => values[i])
  const at = pick(data[cost]), rounds = pick(data.round)
  const afterwards = (values) => {
    const trained = values.filter((_, k) => rounds[k] > 0)
    return trained.length ? trained : values
  }
  for (const [kind, ys] of [[1, smooth], [0, raw]]) {  // the legend shows the first
    if (!kinds.active.includes(kind)) continue
    line.xs.push(at)
    line.ys.push(pick(ys))
    heights.push(afterwards(pick(ys)))
    line.color.push(color)
    line.dash.push(dash)
    line.width.push(kind ? 2 : 1)
    line.alpha.push(kind ? 1 : 0.3)
    line.label.push(label + (kind ? ", smoothed" : ""))
    line.group.push(label)
  }
  if (kinds.active.includes(2) && low.length) {
    band.xs.push([...at, ...[...at].reverse()])
    band.ys.push([...pick(low), ...pick(high).reverse()])
    heights.push(afterwards(pick(low)), afterwards(pick(high)))
    band.color.push(color)
  }
}
lines.data = line
bands.data = band

const isLog = {x: axes.active >= 2, y: axes.active % 2 == 1}
const names = {x: costs[cost], y: titles[metric]}
const drawn = {x: line.xs, y: heights}
for (const way of ["x", "y"]) {
  const log = isLog[way], range = plot[way + "_range"]
  const place = log ? Math.log : (v) => v, back = log ? Math.exp : (v) => v
  const places = drawn[way].flatMap((each) => [...each].map(place)).filter(isFinite)
  const low = places.reduce((a, b) => Math.min(a, b), places[0] ?? 0)
  const high = places.reduce((a, b) => Math.max(a, b), places[0] ?? 0)
  const margin = 0.05 * (high - low) || 0.5
  const start = back(low - margin), end = back(high + margin)
  sides[way].forEach((axis, i) => {
    axis.visible = i == log
    axis.axis_label = names[way]
  })
  grids[way].axis = sides[way][+log]
  plot[way + "_scale"] = scales[way][+log]
  range.setv({start, end, reset_start: start, reset_end: end})
}
