"""The frame of the page and its style sheet."""

STYLE = """
:root { color-scheme: light dark;
  --ink: #1f2430; --muted: #5f6673; --line: #e3e6eb; --paper: #ffffff; --card: #f6f7f9 }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e7ec; --muted: #9aa2b1; --line: #30363f; --paper: #14171c; --card: #1c2027 }
  figure img { filter: invert(1) hue-rotate(180deg) }
}
body { margin: 0 auto; padding: 2rem 1.25rem 4rem; max-width: 1060px; font: 15px/1.5 system-ui, sans-serif;
  background: var(--paper); color: var(--ink) }
h1 { font-size: 1.5rem; margin: 0 0 .5rem; overflow-wrap: anywhere }
h2 { font-size: 1.1rem; margin: 2.25rem 0 .5rem }
.headline { font-size: 1.15rem; margin: .25rem 0 }
.note, figcaption, footer { color: var(--muted); font-size: .87rem }
.note { max-width: 48rem }
.scroll { overflow-x: auto }
table { border-collapse: collapse; font-size: .92rem }
th, td { padding: .35rem 1.1rem .35rem 0; border-bottom: 1px solid var(--line); text-align: left;
  vertical-align: top }
th { font-weight: 600; white-space: nowrap }
.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap }
.samples { width: 100% }
table:not(.samples) td { white-space: nowrap }
.text { font: .85rem ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere }
.figures { display: grid; gap: 1.5rem 1.25rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 460px), 1fr)) }
figure { margin: 0; min-width: 0 }
figure.wide { grid-column: 1 / -1 }
figure img { max-width: 100%; height: auto; display: block }
figcaption { margin-top: .35rem }
figcaption b { color: var(--ink) }
details { margin-top: 2.25rem }
summary { cursor: pointer; font-weight: 600 }
pre { background: var(--card); padding: 1rem; overflow-x: auto; font-size: .82rem; border-radius: 6px }
footer { margin-top: 2rem }
"""

PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
{body}
</body>
</html>
"""
