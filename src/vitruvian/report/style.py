"""The look of every page: one stylesheet for light and dark screens, wide and narrow ones."""

from __future__ import annotations

from vitruvian.report.color import COLORS, INK, LINE, PAPER, SOFT

LIGHT = f"""
:root {{
  color-scheme: light dark;
  --back: {PAPER}; --card: #f6f7f9; --text: {INK}; --soft: {SOFT}; --line: {LINE};
  --right: 0 114 178; --wrong: 213 94 0; --hurts: #c62828; --look: #9a5b00; --fine: #2e7d32;
  {" ".join(f"--c{number}: {color};" for number, color in enumerate(COLORS))}
}}
""".lstrip()

REST = """
@media (prefers-color-scheme: dark) {
  :root {
    --back: #14161a; --card: #1d2026; --text: #e7e9ec; --soft: #9ba3af; --line: #343a44;
    --right: 66 160 224; --wrong: 240 128 48; --hurts: #ff8a80; --look: #ffb74d; --fine: #81c784;
    --c0: #56b4e9; --c1: #f08030; --c2: #2fc59a; --c3: #e08fbd; --c4: #e6b84a; --c5: #a9c7e8;
  }
}
* { box-sizing: border-box; }
body { font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif; margin: 0 auto;
  max-width: 68rem; padding: 2rem 1.25rem 4rem; background: var(--back); color: var(--text); overflow-wrap: anywhere; }
h1 { font-size: 1.75rem; line-height: 1.2; margin: 0; letter-spacing: -.01em; }
h2 { font-size: 1.25rem; line-height: 1.3; margin: 0 0 .25rem; }
h3 { font-size: 1rem; line-height: 1.4; margin: 1.5rem 0 0; }
section { margin-top: 2.75rem; }
p { margin: 0 0 1rem; max-width: 46rem; }
.soft { color: var(--soft); } small, .small { font-size: .875rem; }
.scroll { overflow-x: auto; margin-top: .75rem; }
.scroll.tall { max-height: 34rem; overflow-y: auto; border: 1px solid var(--line); border-radius: 8px; }
.columns { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); gap: 1.25rem; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(9rem, 1fr)); gap: .75rem; margin: 1.5rem 0 0; }
.tile { background: var(--card); border-radius: 10px; padding: .75rem 1rem; }
.tile b { display: block; font-size: 1.375rem; line-height: 1.3; font-weight: 600; white-space: nowrap;
  font-variant-numeric: tabular-nums; }
.tile span { color: var(--soft); font-size: .875rem; }
.notice { border-left: 4px solid var(--c1); background: var(--card); border-radius: 0 8px 8px 0;
  padding: .6rem 1rem; margin: 1rem 0 0; max-width: none; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
table.plain { width: 100%; font-size: .9375rem; }
.plain th, .plain td { text-align: left; vertical-align: top; padding: .35rem .75rem;
  border-bottom: 1px solid var(--line); }
.plain th { font-weight: 600; color: var(--soft); font-size: .8125rem; overflow-wrap: normal; }
.plain thead th { position: sticky; top: 0; background: var(--back); box-shadow: inset 0 -1px var(--line); }
.plain tbody tr:last-child > * { border-bottom: 0; }
.plain .number { text-align: right; white-space: nowrap; width: 1%; padding-left: 1.25rem; }
.plain td:not(.number) { min-width: 7.5rem; } .plain th.number { white-space: normal; }
.facts { columns: 2 22rem; column-gap: 2rem; margin: .75rem 0 0; font-size: .9375rem; }
.facts div { display: grid; grid-template-columns: minmax(0, 2fr) minmax(0, 3fr); gap: .75rem; break-inside: avoid;
  border-bottom: 1px solid var(--line); padding: .3rem 0; }
.facts dt { color: var(--soft); } .facts dd { margin: 0; }
.bar { display: inline-block; vertical-align: middle; width: 6rem; height: .5rem; margin-left: .6rem;
  border-radius: 4px; background: var(--line); overflow: hidden; }
.bar i { display: block; height: 100%; background: rgb(var(--right)); }
.heat { font-size: .8125rem; }
.heat td { width: 2.1rem; min-width: 2.1rem; height: 2.1rem; padding: 0 .15rem; text-align: center;
  white-space: nowrap;
  border: 1px solid var(--back); }
.heat th { font-weight: 400; }
.heat tbody th { text-align: right; padding: 0 .5rem 0 0; position: sticky; left: 0; background: var(--back); }
.heat .name { display: block; max-width: 10rem; overflow: hidden; text-overflow: ellipsis; white-space: nowrap; }
.heat thead .name { writing-mode: vertical-rl; transform: rotate(180deg); max-width: none; max-height: 8rem;
  margin: 0 auto .4rem; }
.heat .short .name { writing-mode: horizontal-tb; transform: none; }
.heat .axis { color: var(--soft); text-align: left; padding-bottom: .35rem; }
.heat .strong { color: #fff; } .heat .none { color: var(--soft); opacity: .55; }
.map { display: block; width: min(100%, 32rem); height: auto; margin-top: .75rem;
  image-rendering: pixelated; border: 1px solid var(--line); }
.overlays { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 15rem), 1fr)); gap: 1rem;
  margin: .75rem 0 1rem; align-items: start; }
img.whole { max-width: 100%; height: auto; border-radius: 8px; } .overlays img.whole { width: 100%; }
.gallery { display: grid; grid-template-columns: repeat(auto-fill, minmax(9rem, 1fr)); gap: 1rem; margin-top: .75rem; }
figure { margin: 0; min-width: 0; } figcaption { font-size: .875rem; line-height: 1.35; padding-top: .4rem; }
.frame { display: flex; align-items: center; justify-content: center; aspect-ratio: 1; overflow: hidden;
  background: var(--card); border-radius: 8px; color: var(--soft); font-size: .875rem; }
.frame img { width: 100%; height: 100%; object-fit: contain; }
.frame img.tiny { image-rendering: pixelated; }
.hurts { color: var(--hurts); } .look { color: var(--look); } .fine { color: var(--fine); }
.examples { display: flex; flex-wrap: wrap; gap: 1rem; margin-top: .5rem; }
.example { border: 1px solid var(--line); border-radius: 8px; padding: .5rem; max-width: 100%; }
.example > div { display: flex; gap: .5rem; } .example figure { width: 9rem; } .example p { margin: .25rem 0 0; }
.legend { display: flex; flex-wrap: wrap; gap: .1rem 1rem; font-size: .875rem; color: var(--soft); }
.legend svg { width: 1.6rem; height: .75rem; margin-right: .4rem; vertical-align: middle; }
.chart { background: var(--card); border-radius: 10px; padding: .9rem 1rem .6rem; }
.chart h3 { font-size: 1rem; margin: 0; }
.chart > svg { display: block; width: 100%; height: auto; margin-top: .35rem; }
.chart text { font-size: 12.5px; } .chart .grid { stroke: var(--line); stroke-width: 1; }
.chart polyline, .legend polyline { fill: none; stroke-width: 2; stroke-linejoin: round; stroke-linecap: round; }
@media (max-width: 30rem) {
  .chart text { font-size: 16px; } .chart { padding: .8rem .75rem .5rem; }
  .plain th, .plain td, .plain .number { padding: .35rem .4rem; } .plain td:not(.number) { min-width: 6rem; }
  .bar { width: 4rem; }
}
""".strip()

STYLE = LIGHT + REST
