"""The page's style sheet: one column, both colour schemes, paper, and narrow screens."""

# every drawing names its colours by these variables, so that light and dark are decided here alone
_LIGHT = """--paper:#fff;--ink:#16191d;--quiet:#59616b;--rule:#d9dde2;--card:#f5f6f8;--link:#0a58a6;
--good:#0b6b4a;--bad:#a8320c;--open:#6b5200;
--blue:#0072b2;--orange:#e69f00;--green:#009e73;--red:#d55e00;--sky:#56b4e9;--purple:#b8609a;--yellow:#c4b000;--grey:#868e98"""
_DARK = """--paper:#14171b;--ink:#e8eaed;--quiet:#a3abb5;--rule:#343a42;--card:#1d2126;--link:#7db8f0;
--good:#4fd0a0;--bad:#ff9166;--open:#e5c45a;
--blue:#4da3e0;--orange:#f0b440;--green:#2fc295;--red:#f2844a;--sky:#8fd0f5;--purple:#dc93c2;--yellow:#e6da5c;--grey:#8d959f"""
_NAMES = ("ink", "quiet", "blue", "orange", "green", "red", "sky", "purple", "yellow", "grey", "good", "bad", "open")

COLOURS = f"""
:root{{{_LIGHT};color-scheme:light dark}}
@media (prefers-color-scheme:dark){{:root{{{_DARK}}}}}
"""
DRAWING = f"""
svg text{{font-size:12px;font-family:inherit;paint-order:stroke;
 stroke:var(--paper);stroke-width:3px;stroke-linejoin:round}}
svg .bold{{font-weight:600}}
{"".join(f".f-{name}{{fill:var(--{name})}}.s-{name}{{stroke:var(--{name});fill:none}}" for name in _NAMES)}
.grid{{stroke:var(--rule);stroke-width:1;fill:none}}.axis{{stroke:var(--quiet);stroke-width:1;fill:none}}
.line{{stroke-width:2;stroke-linejoin:round;stroke-linecap:round}}.line.faint{{stroke-width:1;opacity:.4}}
.line.dashed{{stroke-width:1.5;stroke-dasharray:5 4}}
.moment{{stroke-width:1;stroke-dasharray:2 3;opacity:.9}}
.shade{{opacity:.2}}.shade2{{opacity:.55}}.layer{{stroke:var(--paper);stroke-width:.6}}
.bar{{stroke:var(--paper);stroke-width:1}}.range{{opacity:.5}}.hatch{{stroke-width:1.2}}
.whisker{{stroke-width:2}}.ring{{stroke-width:2}}.cross{{stroke-width:2.4}}.dot{{stroke:var(--paper);stroke-width:1}}
"""
STYLE = f"""{COLOURS}*{{box-sizing:border-box}}
body{{margin:0 auto;max-width:940px;padding:24px 32px 64px;background:var(--paper);color:var(--ink);
 font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif;font-variant-numeric:tabular-nums;
 overflow-wrap:anywhere}}
h1{{font-size:1.7rem;line-height:1.2;margin:0 0 .5rem}}
h2{{font-size:1.25rem;margin:2.4rem 0 .6rem;padding-bottom:.25rem;border-bottom:1px solid var(--rule)}}
h3{{font-size:1.02rem;margin:0 0 .7rem;line-height:1.35}}
a{{color:var(--link)}}
.kind,.about{{margin:0 0 .2rem;color:var(--quiet);font-size:.9rem}}
.verdict{{font-size:1.12rem;line-height:1.45;margin:.4rem 0 1.2rem;padding:.1rem 0 .1rem .9rem;
 border-left:4px solid var(--open)}}
.verdict.good{{border-color:var(--good)}}.verdict.bad{{border-color:var(--bad)}}
.numbers{{display:grid;grid-template-columns:repeat(3,1fr);gap:12px;
 list-style:none;margin:0 0 1.2rem;padding:0}}
.numbers li{{background:var(--card);border-radius:8px;padding:12px 14px}}
.numbers b{{display:block;font-size:1.5rem;line-height:1.25}}
.numbers span{{display:block;font-weight:600;font-size:.92rem}}
.numbers small{{color:var(--quiet);font-size:.84rem;line-height:1.35;display:block;margin-top:.15rem}}
.cautions h2{{font-size:1rem;margin:0;border:0;padding:0}}
.cautions ul{{margin:.3rem 0 0;padding-left:1.2rem}}.cautions li{{margin:.25rem 0}}
nav ul{{display:flex;flex-wrap:wrap;gap:4px 16px;list-style:none;padding:0;margin:1.4rem 0 0;font-size:.92rem}}
figure{{margin:1.4rem 0 2.2rem}}
figcaption,.missing{{color:var(--quiet);font-size:.88rem;margin:.5rem 0 .4rem}}
.missing{{font-style:italic}}
.beside{{display:flex;flex-wrap:wrap;gap:20px}}.beside>*{{flex:1 1 330px}}
svg.drawing{{display:block;width:100%;height:auto;margin:0 0 10px}}
.narrow{{display:none}}
details{{margin:.3rem 0}}summary{{cursor:pointer;color:var(--link);font-size:.88rem}}
.scroll{{overflow-x:auto;margin:.5rem 0 1rem;max-width:100%}}
@media screen and (min-width:1180px){{figure .scroll,.scroll{{max-width:none;margin-left:-110px;margin-right:-110px}}}}
table{{border-collapse:collapse;font-size:.86rem;line-height:1.4;width:100%}}
caption{{text-align:left;font-weight:600;padding:.3rem 0}}
th,td{{text-align:left;vertical-align:top;padding:5px 12px 5px 0;border-bottom:1px solid var(--rule);overflow-wrap:break-word}}
th{{font-weight:600;color:var(--quiet);white-space:normal}}
td.number{{text-align:right;white-space:nowrap}}
details table{{width:auto}}td.says{{min-width:12rem}}
.word{{font-weight:600;white-space:nowrap}}.short{{white-space:nowrap}}
.word.good{{color:var(--good)}}.word.bad{{color:var(--bad)}}.word.open{{color:var(--open)}}.word.quiet{{color:var(--quiet)}}
code{{font:.9em ui-monospace,"DejaVu Sans Mono",monospace}}
pre{{background:var(--card);border-radius:6px;padding:10px 12px;font:.85rem/1.5 ui-monospace,"DejaVu Sans Mono",monospace;
 white-space:pre-wrap;margin:.4rem 0 1rem}}
.codetitle{{margin:.8rem 0 0;font-weight:600;font-size:.9rem}}
footer{{margin-top:3rem;color:var(--quiet);font-size:.85rem;border-top:1px solid var(--rule)}}
{DRAWING}@media (max-width:640px){{body{{padding:16px 16px 48px}}h1{{font-size:1.4rem}}
 .numbers{{grid-template-columns:1fr}}.wide{{display:none}}.narrow{{display:block}}
 details table,table{{font-size:.82rem}}}}
@media print{{:root{{{_LIGHT}}}body{{max-width:none;padding:0;font-size:11pt}}nav{{display:none}}
 figure,.numbers,pre{{break-inside:avoid}}h2,h3{{break-after:avoid}}.wide{{display:block}}.narrow{{display:none}}
 .scroll{{overflow:visible}}details:not([open]){{display:none}}a{{color:inherit;text-decoration:none}}}}
"""
