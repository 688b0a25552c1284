"""A canvas for the pictures of the documentation: SVG that takes its colours from the surrounding page.

In a page, the pictures follow the theme, light or dark; opened as separate files, they are light.
"""

from xml.sax.saxutils import escape

__all__ = ["Canvas"]

# The variables belong to the theme, furo; each is followed by the colour to use without a theme.
STYLE = """
.mn-picture {{ display: block; width: 100%; max-width: {width}px; height: auto; margin: 1.2em auto;
  font-family: var(--font-stack, "DejaVu Sans", Helvetica, Arial, sans-serif); }}
.mn-picture text {{ fill: var(--color-foreground-primary, #1c2024); font-size: 13px; }}
.mn-picture text.soft {{ fill: var(--color-foreground-secondary, #5a6270); }}
.mn-picture text.small {{ font-size: 11.5px; }}
.mn-picture text.bold {{ font-weight: 600; }}
.mn-picture text.code {{ font-family: var(--font-stack--monospace, "DejaVu Sans Mono", monospace); font-size: 12px; }}
.mn-picture .line {{ fill: none; stroke: var(--color-foreground-secondary, #5a6270); stroke-width: 1.5; }}
.mn-picture .head {{ fill: var(--color-foreground-secondary, #5a6270); }}
.mn-picture .dashed {{ stroke-dasharray: 5 4; }}
.mn-picture .panel {{ fill: var(--color-background-secondary, #f7f8fa);
  stroke: var(--color-background-border, #d9dde3); stroke-width: 1; }}
.mn-picture .plain {{ fill: var(--color-background-primary, #ffffff);
  stroke: var(--color-foreground-secondary, #5a6270); stroke-width: 1.2; }}
.mn-picture .blue {{ fill: #4a90e2; stroke: #4a90e2; }}
.mn-picture .orange {{ fill: #e08a2e; stroke: #e08a2e; }}
.mn-picture .green {{ fill: #3fa864; stroke: #3fa864; }}
.mn-picture .purple {{ fill: #9b72d8; stroke: #9b72d8; }}
.mn-picture .red {{ fill: #dc5a5a; stroke: #dc5a5a; }}
.mn-picture .tint {{ fill-opacity: 0.22; stroke-width: 1.4; }}
.mn-picture path.blue, .mn-picture path.orange, .mn-picture path.green,
.mn-picture path.purple, .mn-picture path.red {{ fill: none; stroke-width: 1.8; }}
"""


class Canvas:
    """Collects shapes; positions and lengths are in pixels, from the upper left corner.

    Args:
        name: The picture's name, unique among those on one page.
        title: A description in one sentence, for readers who cannot see it.
        width: Its width.
        height: Its height.
    """

    def __init__(self, name: str, title: str, width: int, height: int) -> None:
        self._name = name
        self._shapes: list[str] = []
        self._markers: dict[str, str] = {}
        self._head = (
            f'<svg class="mn-picture" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
            f'aria-labelledby="{name}-title">\n<title id="{name}-title">{escape(title)}</title>\n'
            f"<style>{STYLE.format(width=width)}</style>\n"
        )

    def box(self, x: float, y: float, width: float, height: float, style: str = "panel", radius: float = 6) -> None:
        """Draw a rectangle with round corners."""
        self._shapes.append(
            f'<rect class="{style}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius:g}"/>'
        )

    def text(self, x: float, y: float, words: str, style: str = "", anchor: str = "middle") -> None:
        """Write a line of text; ``y`` is its middle."""
        self._shapes.append(
            f'<text class="{style}" x="{x:g}" y="{y + 4.5:g}" text-anchor="{anchor}">{escape(words)}</text>'
        )

    def labelled(self, x: float, y: float, width: float, height: float, words: str, style: str, text: str = "") -> None:
        """Draw a rectangle with a line of text in its middle."""
        self.box(x, y, width, height, style)
        self.text(x + width / 2, y + height / 2, words, text)

    def arrow(self, *points: tuple[float, float], style: str = "line", is_open: bool = False) -> None:
        """Draw a line through points, with a head at its end unless it is open."""
        steps = " L ".join(f"{x:g} {y:g}" for x, y in points)
        self._path(f"M {steps}", style, is_open)

    def curve(self, start: tuple[float, float], end: tuple[float, float], bend: float, style: str = "line") -> None:
        """Draw an arc with a head, that bends up (negative) or down by some pixels."""
        (x0, y0), (x1, y1) = start, end
        self._path(f"M {x0:g} {y0:g} C {x0:g} {y0 + bend:g} {x1:g} {y1 + bend:g} {x1:g} {y1:g}", style, False)

    def _path(self, steps: str, style: str, is_open: bool) -> None:
        colour = style.split()[0]
        marker = "" if is_open else f' marker-end="url(#{self._name}-{colour})"'
        if not is_open:
            head = "head" if colour == "line" else colour
            self._markers[colour] = (
                f'<marker id="{self._name}-{colour}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" '
                f'markerHeight="8" markerUnits="userSpaceOnUse" orient="auto"><polygon class="{head}" '
                'stroke-width="0" points="0,0.5 8,4 0,7.5"/></marker>'
            )
        self._shapes.append(f'<path class="{style}" d="{steps}"{marker}/>')

    def svg(self) -> str:
        """Return the picture as a file's text."""
        definitions = f"<defs>{''.join(self._markers.values())}</defs>\n" if self._markers else ""
        return self._head + definitions + "\n".join(self._shapes) + "\n</svg>\n"
