"""The report as one HTML file that needs no other: the tables, and the best and worst queries in pictures."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Callable, Sequence
from functools import cache
from html import escape
from pathlib import Path

from PIL import Image
from torch import Tensor

from seps.data.records import Source, written_beside
from seps.metrics import rank_queries

THUMBNAIL = 160
SHOWN = 3
STYLE = """
:root { --ink: #1c1f24; --paper: #fff; --line: #d8dce2; --soft: #59616d; --right: #2a7d4f }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e8eb; --paper: #15181c; --line: #333a42; --soft: #9aa3ae; --right: #6cc596 }
}
body { font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem;
  color: var(--ink); background: var(--paper) }
h1 { overflow-wrap: anywhere }
table { border-collapse: collapse; margin: 1rem 0; display: block; max-width: 100%; overflow-x: auto }
td, th { padding: .3rem .7rem; text-align: right; border-bottom: 1px solid var(--line) }
td:first-child, th:first-child { text-align: left }
.query { display: flex; flex-wrap: wrap; gap: 1rem; padding: .8rem 0; border-bottom: 1px solid var(--line) }
.query > :first-child { flex: 0 0 14rem }
.query > ol { flex: 1 1 20rem; margin: 0 }
figure { margin: 0; width: 10rem }
img { width: 10rem; border-radius: 4px }
figcaption, .rank { font-size: .85rem; color: var(--soft) }
.right { color: var(--right) }
.right img { outline: 3px solid var(--right) }
"""


def write_page(
    path: Path,
    report: str,
    scores: Tensor,
    owners: Tensor,
    source: Source,
    indices: Sequence[int],
    examples: int,
) -> None:
    """The report in Markdown and the queries behind it as HTML. scores (B,T), owners (T,), indices (B)"""

    @cache
    def picture(row: int) -> str:
        return data_address(source.open(indices[row]))

    captions = [caption for index in indices for caption in source[index].captions]
    of_images, of_texts = rank_queries(scores, owners)
    parts = [report_html(report)]
    for title, hardest in (("Worst", True), ("Best", False)):
        parts.append(f"<h2>{title} text queries</h2>")
        parts += [
            text_query(text, captions, int(of_texts[text]), scores, owners, picture)
            for text in extremes(of_texts, scores[owners, range(len(owners))], examples, hardest)
        ]
        parts.append(f"<h2>{title} image queries</h2>")
        parts += [
            image_query(image, captions, int(of_images[image]), scores, owners, picture)
            for image in extremes(of_images, scores.amax(1), examples, hardest)
        ]
    title = report.split("\n", maxsplit=1)[0].lstrip("# ")
    with written_beside(path) as file:
        file.write(
            f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f"<style>{STYLE}</style></head>\n<body>\n" + "\n".join(parts) + "\n</body></html>\n"
        )


def extremes(ranks: Tensor, scores: Tensor, count: int, hardest: bool) -> list[int]:
    """Queries with the highest or lowest rank, among equals those of the highest score. ranks (Q,)"""
    places = [place for place, rank in enumerate(ranks.tolist()) if rank > 0]
    values, found = scores.tolist(), ranks.tolist()
    places.sort(key=lambda place: (-found[place] if hardest else found[place], -values[place]))
    return places[:count]


def text_query(
    text: int,
    captions: Sequence[str],
    rank: int,
    scores: Tensor,
    owners: Tensor,
    picture: Callable[[int], str],
) -> str:
    """A caption, the first images found, and the right one if it is not among them."""
    own = int(owners[text])
    order = scores[:, text].argsort(descending=True, stable=True).tolist()
    shown = [(place + 1, row) for place, row in enumerate(order[:SHOWN])]
    if own not in order[:SHOWN]:
        shown.append((rank, own))
    figures = [
        f'<figure{right(row == own)}><img src="{picture(row)}" alt="">'
        f"<figcaption>{place}{' (right)' if row == own else ''}</figcaption></figure>"
        for place, row in shown
    ]
    return (
        f'<div class="query"><div>{escape(captions[text])}<div class="rank">rank {rank}</div></div>'
        f"{''.join(figures)}</div>"
    )


def image_query(
    image: int,
    captions: Sequence[str],
    rank: int,
    scores: Tensor,
    owners: Tensor,
    picture: Callable[[int], str],
) -> str:
    """A picture and the first captions found."""
    order = scores[image].argsort(descending=True, stable=True).tolist()[: 2 * SHOWN]
    items = [f"<li{right(int(owners[text]) == image)}>{escape(captions[text])}</li>" for text in order]
    return (
        f'<div class="query"><figure><img src="{picture(image)}" alt="">'
        f"<figcaption>rank {rank}</figcaption></figure><ol>{''.join(items)}</ol></div>"
    )


def right(is_right: bool) -> str:
    """The mark of a right answer."""
    return ' class="right"' if is_right else ""


def data_address(image: Image.Image) -> str:
    """A thumbnail inside the address itself."""
    small = image.convert("RGB")
    small.thumbnail((2 * THUMBNAIL, 2 * THUMBNAIL))
    written = io.BytesIO()
    small.save(written, "JPEG", quality=80)
    return "data:image/jpeg;base64," + base64.b64encode(written.getvalue()).decode()


def report_html(report: str) -> str:
    """The few forms of Markdown that a report uses: headings, tables, paragraphs."""
    parts: list[str] = []
    for block in re.split(r"\n\s*\n", report.strip()):
        lines = block.split("\n")
        if lines[0].startswith("#"):
            level = len(lines[0]) - len(lines[0].lstrip("#"))
            parts.append(f"<h{level}>{escape(lines[0].lstrip('# '))}</h{level}>")
        elif lines[0].startswith("|"):
            rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
            head = "".join(f"<th>{escape(cell)}</th>" for cell in rows[0])
            body = "".join(
                "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows[2:]
            )
            parts.append(f"<table><tr>{head}</tr>{body}</table>")
        else:
            parts.append(f"<p>{escape(block)}</p>")
    return "\n".join(parts)
