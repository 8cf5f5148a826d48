"""What all figures share: style, colours, a bits axis whose labels do not collide, saving, inlining.

Colours are those of Okabe and Ito, told apart with any common colour blindness. Every colour is drawn from
``PALETTE`` so that a figure set into a page can follow the page's light or dark theme.
"""

import contextlib
import io
import itertools
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from xml.sax.saxutils import escape

import matplotlib
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

__all__ = [
    "FIGURE_SIZE",
    "PALETTE",
    "SERIES_COLOURS",
    "Drawn",
    "drawing",
    "freeze_layout",
    "hover",
    "inline_svg",
    "new_figure",
    "png_bytes",
    "set_bits_axis",
    "svg_text",
]

PALETTE = {
    "ink": "#1c2430",
    "muted": "#5b6573",
    "line": "#d9dee5",
    "surface": "#fefefe",
    "blue": "#0072b2",
    "orange": "#e69f00",
    "green": "#009e73",
    "purple": "#cc79a7",
    "vermillion": "#d55e00",
    "sky": "#56b4e9",
}
SERIES_COLOURS = ("blue", "orange", "purple", "green", "sky", "vermillion")
FIGURE_SIZE = (5.6, 4.0)  # inches; small, so that the text stays readable on a narrow screen

_STYLE = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9.5,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.labelsize": 9.5,
    "axes.labelcolor": PALETTE["ink"],
    "axes.edgecolor": PALETTE["muted"],
    "axes.facecolor": PALETTE["surface"],
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": PALETTE["line"],
    "grid.linewidth": 0.7,
    "text.color": PALETTE["ink"],
    "text.parse_math": False,
    "xtick.color": PALETTE["muted"],
    "xtick.labelcolor": PALETTE["ink"],
    "xtick.labelsize": 8.5,
    "ytick.color": PALETTE["muted"],
    "ytick.labelcolor": PALETTE["ink"],
    "ytick.labelsize": 8.5,
    "legend.fontsize": 8.5,
    "legend.frameon": False,
    "figure.facecolor": PALETTE["surface"],
    "svg.fonttype": "path",
}
_WIDTH_OF_AXES, _CHARACTER = 0.84, 0.6  # of the figure; of the size of the type
_HOVER = "_semkv_hover"
_NO_METADATA = {"Date": None, "Creator": None, "Format": None, "Type": None}


@dataclass(frozen=True)
class Drawn:
    """A finished figure: file stem, title, text for those who cannot see it, SVG and PNG."""

    name: str
    title: str
    description: str
    svg: str
    png: bytes


@contextlib.contextmanager
def drawing(salt: str) -> Iterator[None]:
    """The style of the figures, whatever the user's matplotlib settings; they are put back at the end.

    ``salt`` seeds the identifiers inside the SVG, which makes its bytes repeatable.
    """
    with matplotlib.rc_context(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"Glyph .* missing from font")
        matplotlib.rcdefaults()
        matplotlib.rcParams.update({**_STYLE, "svg.hashsalt": salt})
        yield


def new_figure(title: str, x_label: str, y_label: str) -> tuple[Figure, Axes]:
    """An empty figure with one pair of axes, drawn off screen; call inside ``drawing``."""
    figure = Figure(figsize=FIGURE_SIZE, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_title(title, loc="left", pad=20)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(True, axis="y")
    return figure, axes


def set_bits_axis(axes: Axes, bits: list[float], labels: list[str], first: list[float]) -> None:
    """Tick every grid point; labels that would collide are turned upright, and thinned where that is not enough.

    ``first`` are the points that keep their labels before all others. Set the limits of the axis before.
    """
    low, high = axes.get_xlim()
    room = _WIDTH_OF_AXES * FIGURE_SIZE[0] * 72 / (high - low)  # points of a page for one bit
    size = _STYLE["xtick.labelsize"]
    gaps = [(after - before) * room for before, after in itertools.pairwise(bits)]
    longest = max((len(label) for label in labels), default=0)
    upright = bool(gaps) and min(gaps) < _CHARACTER * size * (longest + 1)
    need = 1.2 * size if upright else 0.0
    shown: list[float] = []
    for place in sorted(bits, key=lambda value: (value not in first, value % 1 > 1e-9, value)):
        if all(abs(place - other) * room >= need for other in shown):
            shown.append(place)
    kept = [label if place in shown else "" for place, label in zip(bits, labels, strict=True)]
    axes.set_xticks(bits, labels=kept, rotation=90 if upright else 0)


def hover(artist: Artist, words: str) -> None:
    """Let the SVG say ``words`` when the pointer rests on ``artist``."""
    figure = artist.get_figure()
    told = figure.__dict__.setdefault(_HOVER, {})
    artist.set_gid(f"told{len(told)}")
    told[artist.get_gid()] = words


def freeze_layout(figure: Figure) -> None:
    """Lay the figure out once, for all formats it is saved in."""
    figure.get_layout_engine().execute(figure)
    figure.set_layout_engine("none")


def svg_text(figure: Figure) -> str:
    """The settled figure as a stand-alone SVG file: no date, the same bytes each time."""
    buffer = io.StringIO()
    # ``savefig`` would draw twice: once more to lay out what is laid out.
    FigureCanvasSVG(figure).print_svg(buffer, metadata=_NO_METADATA)
    text = buffer.getvalue()
    for gid, words in figure.__dict__.get(_HOVER, {}).items():
        text = text.replace(f'<g id="{gid}">', f'<g id="{gid}">\n<title>{escape(words)}</title>', 1)
    return "\n".join(line.rstrip() for line in text.splitlines()) + "\n"


def png_bytes(figure: Figure) -> bytes:
    """The settled figure as a PNG of 200 dots per inch."""
    buffer = io.BytesIO()
    figure.set_dpi(200)
    FigureCanvasAgg(figure).print_png(buffer, metadata={"Software": None})
    return buffer.getvalue()


def inline_svg(svg: str, name: str, title: str, description: str) -> str:
    """An SVG for the inside of an HTML page: themed by CSS variables, with alternative text, no addresses.

    ``title`` and ``description`` must be escaped already. Identifiers get ``name`` as a prefix, since
    several figures share the page.
    """
    svg = re.sub(r"<!--.*?-->|<metadata>.*?</metadata>|<style.*?</style>", "", svg, flags=re.S)
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = re.sub(r"url\(#", f"url(#{name}-", svg)
    svg = re.sub(r'(?:xlink:)?href="#', f'href="#{name}-', svg)
    for variable, colour in PALETTE.items():
        svg = svg.replace(colour, f"var(--{variable})")
    view_box = re.search(r'viewBox="[^"]*"', svg).group(0)
    head = (
        f'<svg {view_box} role="img" aria-labelledby="{name}-title {name}-description">'
        f'<title id="{name}-title">{title}</title><desc id="{name}-description">{description}</desc>'
    )
    body = svg[svg.index(">", svg.index("<svg")) + 1 :]
    return head + re.sub(r"\n\s*", "\n", body).strip()
