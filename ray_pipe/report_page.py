"""The page around the report: style sheet, a little script for hovering, the shell.

One file, no network: system fonts, inline styles, no library. Light and dark as the reader's
system is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ray_pipe.metrics import to_json
from ray_pipe.report_markup import Markup, join, tag

# Okabe and Ito's colour-blind safe set; arms, times and kinds of bytes do not share hues.
ARM_COLORS = {
    "fp32": "#646f7d",
    "acsgd": "#0072b2",
    "directq": "#d55e00",
}
OTHER_ARM_COLORS = ("#007a5a", "#aa3d84", "#946b00", "#3a9bd1", "#7d5bbe", "#a34a28")

STYLE = """
:root{color-scheme:light dark;--ink:#18202b;--muted:#5b6675;--line:#e1e5ea;--bg:#f6f7f8;
--card:#fff;--accent:#0072b2;--track:#f0f2f4;
--arm-fp32:#646f7d;--arm-acsgd:#0072b2;--arm-directq:#d55e00;--arm-0:#007a5a;--arm-1:#aa3d84;
--arm-2:#946b00;--arm-3:#3a9bd1;--arm-4:#7d5bbe;--arm-5:#a34a28;
--compute:#009e73;--encode:#e69f00;--wire:#b8558c;--wire-back:#dd9cc2;--bubble:#d9dee4;
--forward:#009e73;--backward:#00674b;--update:#7b8694;
--activation:#3d93c9;--gradient:#7d5bbe;--replica:#e69f00;--embedding:#009e73;--control:#98a2ae;
--edge-0:#0072b2;--edge-1:#d55e00;--edge-2:#007a5a;--edge-3:#aa3d84;--edge-4:#946b00;--edge-5:#7d5bbe}
@media (prefers-color-scheme:dark){:root{--ink:#e8ecf1;--muted:#9aa6b5;--line:#2c3541;--bg:#10151b;
--card:#171e26;--accent:#58b4ea;--track:#1f2731;
--arm-fp32:#a4afbd;--arm-acsgd:#58b4ea;--arm-directq:#ff8f45;--arm-0:#38c99a;--arm-1:#e383c0;
--arm-2:#d8ae45;--arm-3:#8fd0f5;--arm-4:#b59cf0;--arm-5:#e08a66;
--compute:#22b98c;--wire:#d573ab;--wire-back:#8f5277;--bubble:#364150;--forward:#22b98c;
--backward:#0f8664;--update:#8793a2;--activation:#58b4ea;--gradient:#a48be6;
--edge-0:#58b4ea;--edge-1:#ff8f45;--edge-2:#38c99a;--edge-3:#e383c0;--edge-4:#d8ae45;--edge-5:#b59cf0}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);
font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
main{max-width:1080px;margin:0 auto;padding:40px 20px 64px}
h1{font-size:clamp(1.5rem,3.2vw,2.1rem);line-height:1.22;letter-spacing:-.018em;
margin:.15em 0 .35em;font-weight:680;text-wrap:balance}
h2{font-size:1.16rem;letter-spacing:-.008em;margin:0 0 .2em}
h3{font-size:.95rem;margin:1.3em 0 .3em}
p{margin:.2em 0 .9em;max-width:76ch}
.kicker{max-width:none;color:var(--muted);font-size:.84rem;letter-spacing:.02em;margin:0}
.kicker b{color:var(--accent)}
.lead{color:var(--muted);font-size:1.04rem}
section{background:var(--card);border:1px solid var(--line);border-radius:12px;
padding:22px 24px 20px;margin:18px 0}
section>p{color:var(--muted);font-size:.92rem}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(190px,1fr));gap:14px;
margin:22px 0 4px}
.card{background:var(--card);border:1px solid var(--line);border-radius:12px;padding:14px 18px}
.card b{display:block;font-size:1.75rem;line-height:1.2;letter-spacing:-.02em;
font-variant-numeric:tabular-nums}
.card span{color:var(--muted);font-size:.86rem}
svg{display:block;width:100%;height:auto;overflow:visible;margin:6px 0 2px}
svg text{font:12px system-ui,-apple-system,"Segoe UI",Roboto,Arial,sans-serif;fill:var(--ink)}
svg .tick{fill:var(--muted);font-variant-numeric:tabular-nums}
svg .strong{fill:var(--ink)}
svg .label{fill:var(--muted);font-size:12px}
svg .name{font-weight:650;font-size:13px}
svg .mark{font-weight:650}
svg .group{font-weight:650;font-size:13px}
svg .halo{paint-order:stroke;stroke:var(--card);stroke-width:4px;stroke-linejoin:round}
svg .in{fill:#fff;font-size:11.5px;font-weight:600;pointer-events:none}
svg .in--encode,svg .in--replica,svg .in--wire-back{fill:#1c1503}
svg .in--bubble{fill:var(--ink)}
svg .grid{stroke:var(--line);stroke-width:1}
svg .axis{stroke:var(--muted);stroke-width:1}
svg .target{stroke:var(--muted);stroke-width:1.2;stroke-dasharray:2 4}
svg .curve{fill:none;stroke-width:2.4;stroke-linejoin:round;stroke-linecap:round}
svg .faint{fill:none;stroke-width:1;opacity:.4}
svg .drop{stroke-width:1.2;stroke-dasharray:3 3}
svg .reached{stroke:var(--card);stroke-width:1.5}
svg .track{fill:var(--track)}
svg .cross{stroke:var(--muted);stroke-width:1}
.scroll{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:.88rem;font-variant-numeric:tabular-nums}
caption{text-align:left;color:var(--muted);font-size:.84rem;padding-bottom:6px}
th,td{padding:7px 6px;text-align:right;border-bottom:1px solid var(--line);white-space:nowrap}
thead th{color:var(--muted);font-weight:600;font-size:.8rem;
vertical-align:bottom;white-space:normal}
th:first-child{text-align:left}
tbody tr:last-child>*{border-bottom:0}
tbody th{font-weight:620}
.arms .best{background:color-mix(in srgb,var(--accent) 9%,transparent)}
.arms thead th{color:var(--ink)}
.arms tbody th{font-weight:500;color:var(--muted)}
.settings td{text-align:left;white-space:normal;overflow-wrap:anywhere}
.settings th{font-weight:500;color:var(--muted)}
.dot{display:inline-block;width:.72em;height:.72em;border-radius:50%;margin-right:.5em}
.missing{color:var(--muted)}
.legend{list-style:none;display:flex;flex-wrap:wrap;gap:4px 18px;padding:0;margin:6px 0;
font-size:.86rem;color:var(--muted)}
.legend i{display:inline-block;width:12px;height:12px;border-radius:3px;margin-right:6px;
vertical-align:-1px}
.grid3{display:grid;grid-template-columns:repeat(auto-fit,minmax(270px,1fr));gap:8px 22px}
.grid3 h4{font-size:.86rem;margin:.6em 0 0;font-weight:600}
.two{display:grid;grid-template-columns:repeat(auto-fit,minmax(340px,1fr));gap:0 36px}
.halves{display:grid;grid-template-columns:minmax(0,1fr);gap:14px 36px}
@media (min-width:1060px){.halves.beside{grid-template-columns:repeat(2,minmax(0,1fr))}}
.switch{display:flex;gap:6px;justify-content:flex-end;margin:-30px 0 8px;font-size:.84rem}
.switch label{border:1px solid var(--line);border-radius:99px;padding:2px 12px;cursor:pointer;
color:var(--muted)}
.pick{position:absolute;opacity:0;pointer-events:none}
.pick:focus-visible~.switch{outline:2px solid var(--accent);outline-offset:3px;border-radius:99px}
.pick.a:checked~.switch .a,.pick.b:checked~.switch .b{background:var(--ink);color:var(--card)}
.pick.a:checked~.view.b,.pick.b:checked~.view.a{display:none}
details{margin-top:10px;font-size:.9rem}
summary{cursor:pointer;color:var(--muted);font-size:.86rem}
pre{background:var(--track);border-radius:8px;padding:12px 14px;overflow-x:auto;font-size:.88rem;
white-space:pre-wrap;overflow-wrap:anywhere;margin:.4em 0 0}
.note{border-left:3px solid var(--encode);padding:2px 0 2px 12px;margin:10px 0}
.empty{color:var(--muted)}
#tip{position:fixed;display:none;pointer-events:none;background:var(--ink);color:var(--card);
border-radius:7px;padding:6px 10px;font-size:.82rem;line-height:1.45;z-index:9;white-space:pre}
footer{color:var(--muted);font-size:.84rem;margin-top:26px}
@media (max-width:900px){main{padding:28px 12px 48px}section{padding:18px 16px}
svg text,svg .label{font-size:13.5px}svg .name,svg .group{font-size:14.5px}
svg .in{font-size:12px}.grid3 svg text,.grid3 svg .label{font-size:12px}}
@media (max-width:620px){
main{padding:22px 10px 40px}section{padding:16px 12px}.switch{margin:0 0 6px}
section{overflow-x:auto}section svg{min-width:600px}.grid3 svg{min-width:0}}
@media print{:root{--bg:#fff}body{font-size:11pt}main{max-width:none;padding:0}
section,.card{border-color:#ccc;break-inside:avoid}.switch,summary{display:none}
svg{break-inside:avoid}.scroll{overflow:visible}table{font-size:7.5pt}th,td{padding:3px 4px}
thead th{font-size:7pt}.grid3{grid-template-columns:repeat(3,1fr)}
.two,.halves.beside{grid-template-columns:1fr 1fr}
.cards{grid-template-columns:repeat(5,1fr)}.card b{font-size:1.3rem}
*{-webkit-print-color-adjust:exact;print-color-adjust:exact}}
"""

# The crosshair: nearest point of each curve to the pointer's time. The page is whole without it.
SCRIPT = """
(function(){var box=document.getElementById('curves');if(!box)return;
var curves=JSON.parse(box.textContent),tip=document.getElementById('tip');
document.querySelectorAll('svg[data-low]').forEach(function(svg){
var cross=svg.querySelector('.cross');if(!cross)return;
var d=svg.dataset,L=+d.left,R=+d.right,lo=+d.low,hi=+d.high;
function hide(){tip.style.display='none';cross.setAttribute('visibility','hidden')}
svg.addEventListener('pointerleave',hide);
svg.addEventListener('pointermove',function(e){
var r=svg.getBoundingClientRect(),x=(e.clientX-r.left)*svg.viewBox.baseVal.width/r.width;
if(x<L||x>R)return hide();
var f=(x-L)/(R-L),t=d.log==='1'?lo*Math.pow(hi/lo,f):lo+f*(hi-lo),out=[t.toFixed(2)+' s'];
curves.forEach(function(c){var p=null;
for(var i=0;i<c.points.length&&c.points[i][0]<=t;i++)p=c.points[i];
if(p)out.push(c.name+'  '+p[1].toFixed(4)+(p===c.points[c.points.length-1]?' (done)':''))});
cross.setAttribute('x1',x);cross.setAttribute('x2',x);cross.setAttribute('visibility','visible');
tip.textContent=out.join('\\n');tip.style.display='block';
var w=tip.offsetWidth;tip.style.left=Math.min(e.clientX+14,innerWidth-w-8)+'px';
tip.style.top=(e.clientY+14)+'px'})})})();
"""


def arm_color(name: str, index: int) -> str:
    """The CSS variable of an arm: known arms keep their colour from run to run."""
    if name in ARM_COLORS:
        return f"--arm-{name}"
    return f"--arm-{index % len(OTHER_ARM_COLORS)}"


def page(*, title: str, body: Sequence[str], curves: Sequence[dict[str, Any]]) -> str:
    """The whole document."""
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="generator", content="ray_pipe"),
        tag("title", title),
        tag("style", Markup(STYLE)),
    )
    # "</" inside JSON would end the script element early.
    embedded = Markup(to_json(list(curves)).replace("<", "\\u003c"))
    scripts = [
        tag("div", id="tip", role="status"),
        tag("script", embedded, id="curves", type="application/json"),
        tag("script", Markup(SCRIPT)),
    ]
    document = tag("html", head, tag("body", tag("main", *body), join(scripts)), lang="en")
    return "<!doctype html>\n" + document + "\n"


def section(title: str, *children: str, explain: str = "") -> Markup:
    """A card with a heading."""
    opening = [tag("h2", title)]
    if explain:
        opening.append(tag("p", explain))
    return tag("section", *opening, *children)


def views(name: str, first: tuple[str, str], second: tuple[str, str]) -> Markup:
    """Two views of one figure with a switch, in CSS alone: (label, markup) each."""
    return tag(
        "div",
        tag("input", type="radio", class_="pick a", name=name, id=f"{name}-a", checked=True),
        tag("input", type="radio", class_="pick b", name=name, id=f"{name}-b"),
        tag(
            "div",
            tag("label", first[0], class_="a", for_=f"{name}-a"),
            tag("label", second[0], class_="b", for_=f"{name}-b"),
            class_="switch",
        ),
        tag("div", first[1], class_="view a"),
        tag("div", second[1], class_="view b"),
    )


def numbers(markup: Markup) -> Markup:
    """The numbers of a figure as a table, folded away; also for those who cannot see it."""
    return tag("details", tag("summary", "The numbers"), markup)
