"""An explanation drawn as one picture: what was kept, where every word looked, what adds up to the score."""

from __future__ import annotations

import colorsys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from seps.explanation.building import Explanation, Word

MOST_WORDS = 24
MOST_TOKENS = 12
_SCALE = 2
_BACKGROUND, _INK, _QUIET, _LINE = (250, 250, 247), (28, 30, 34), (112, 116, 124), (222, 222, 216)
_POSITIVE, _NEGATIVE = (38, 110, 178), (196, 78, 60)
# From the transparent to the brightest: dark violet, magenta, orange, pale yellow.
_HEAT = np.array(
    [(40, 11, 84), (101, 21, 110), (187, 55, 84), (249, 142, 8), (252, 255, 164)], dtype=np.float64
)


@dataclass(frozen=True)
class Sheet:
    """Measures of the drawing in pixels: a large tile, a small one, the space between."""

    large: int = 235 * _SCALE
    small: int = 110 * _SCALE
    gap: int = 14 * _SCALE
    margin: int = 28 * _SCALE
    width: int = 1040 * _SCALE


def font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """The face that comes with Pillow."""
    return ImageFont.load_default(size * _SCALE)


def heat(values: np.ndarray) -> np.ndarray:
    """Values from 0 to 1 as colours. (...,) -> (...,3)"""
    places = np.clip(values, 0, 1) * (len(_HEAT) - 1)
    low = np.minimum(places.astype(int), len(_HEAT) - 2)
    share = (places - low)[..., None]
    return _HEAT[low] * (1 - share) + _HEAT[low + 1] * share


def scaled(values: Tensor, positive: bool = False) -> np.ndarray:
    """Values stretched to 0..1; positive keeps zero at zero."""
    numbers = values.detach().cpu().double().numpy()
    low = 0.0 if positive else float(numbers.min())
    span = float(numbers.max()) - low
    return np.clip((numbers - low) / span, 0, 1) if span > 0 else np.zeros_like(numbers)


def laid_over(picture: Image.Image, found: Explanation, values: np.ndarray) -> Image.Image:
    """The picture in grey under a smooth map of its patches, as strong as the map is high."""
    part = seen_part(picture, found)
    size = (part[2] - part[0], part[3] - part[1])
    plane = Image.fromarray((values.reshape(found.grid) * 255).astype(np.uint8)).resize(
        size, Image.Resampling.BICUBIC
    )
    strength = np.asarray(plane, dtype=np.float64) / 255
    grey = np.asarray(picture.convert("L").convert("RGB"), dtype=np.float64) * 0.75 + 50
    view = grey[part[1] : part[3], part[0] : part[2]]
    share = (0.15 + 0.75 * strength)[..., None]
    view[:] = view * (1 - share) + heat(strength) * share
    return Image.fromarray(np.clip(grey, 0, 255).astype(np.uint8))


def with_dropped(picture: Image.Image, found: Explanation, kept: Tensor) -> Image.Image:
    """The picture with every dropped patch faded."""
    part = seen_part(picture, found)
    size = (part[2] - part[0], part[3] - part[1])
    cells = Image.fromarray(kept.cpu().numpy().reshape(found.grid).astype(np.uint8) * 255)
    mask = Image.new("L", picture.size, 0)
    mask.paste(cells.resize(size, Image.Resampling.NEAREST), part[:2])
    faded = Image.blend(
        picture.convert("L").convert("RGB"), Image.new("RGB", picture.size, _BACKGROUND), 0.82
    )
    return Image.composite(picture, faded, mask)


def seen_part(picture: Image.Image, found: Explanation) -> tuple[int, int, int, int]:
    """The part of the picture the encoder saw, in pixels."""
    width, height = picture.size
    left, top, right, bottom = found.box
    return (
        round(left * width),
        round(top * height),
        max(round(right * width), round(left * width) + 1),
        max(round(bottom * height), round(top * height) + 1),
    )


class Canvas:
    """A sheet that grows downwards."""

    def __init__(self, sheet: Sheet) -> None:
        self.sheet = sheet
        self.image = Image.new("RGB", (sheet.width, 200 * _SCALE), _BACKGROUND)
        self.y = sheet.margin

    @property
    def pen(self) -> ImageDraw.ImageDraw:
        """What draws on the sheet as it is now."""
        return ImageDraw.Draw(self.image)

    def room(self, height: int) -> int:
        """Make room below; -> where it begins."""
        top = self.y
        self.y += height
        if self.y + self.sheet.margin > self.image.height:
            taller = Image.new("RGB", (self.sheet.width, self.y + 400 * _SCALE), _BACKGROUND)
            taller.paste(self.image)
            self.image = taller
        return top

    def heading(self, text: str) -> None:
        """A line that names what follows."""
        top = self.room(30 * _SCALE)
        self.pen.text((self.sheet.margin, top + 4 * _SCALE), text, _QUIET, font(12))

    def tiles(self, pictures: Sequence[tuple[Image.Image, str, str]], side: int) -> None:
        """Pictures in rows, each over two lines of text."""
        step = side + self.sheet.gap
        per_row = max(1, (self.sheet.width - 2 * self.sheet.margin + self.sheet.gap) // step)
        for start in range(0, len(pictures), per_row):
            row = pictures[start : start + per_row]
            tallest = max(picture.height for picture, _, _ in row)
            top = self.room(tallest + 40 * _SCALE)
            for column, (picture, title, note) in enumerate(row):
                left = self.sheet.margin + column * step
                self.image.paste(picture, (left, top))
                below = top + tallest + 3 * _SCALE
                self.pen.text((left, below), shortened(title, side, 12), _INK, font(12))
                self.pen.text((left, below + 15 * _SCALE), shortened(note, side, 10), _QUIET, font(10))

    def finish(self) -> Image.Image:
        """The sheet cut to what is on it."""
        return self.image.crop((0, 0, self.sheet.width, self.y + self.sheet.margin // 2))


def shortened(text: str, width: int, size: int) -> str:
    """A text that fits a width."""
    face = font(size)
    if face.getlength(text) <= width:
        return text
    while text and face.getlength(text + "…") > width:
        text = text[:-1]
    return text + "…"


def wrapped(text: str, width: int, size: int, most: int) -> list[str]:
    """A text in lines that fit a width, at most so many."""
    face, lines = font(size), [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if face.getlength(longer) <= width or not lines[-1]:
            lines[-1] = longer
        else:
            lines.append(word)
    if len(lines) > most:
        lines = [*lines[: most - 1], " ".join(lines[most - 1 :])]
    return [shortened(line, width, size) for line in lines]


def draw(found: Explanation, picture: Image.Image) -> Image.Image:
    """The whole figure of an explanation over its picture."""
    sheet = Sheet()
    canvas = Canvas(sheet)
    _draw_title(canvas, found)
    view = fitted(picture, sheet.large)
    _draw_choices(canvas, found, view)
    small = fitted(picture, sheet.small)
    _draw_words(canvas, found, small)
    _draw_tokens(canvas, found, small)
    _draw_sum(canvas, found)
    return canvas.finish()


def fitted(picture: Image.Image, side: int) -> Image.Image:
    """The picture as large as fits a square, small ones enlarged."""
    scale = side / max(picture.size)
    width, height = (max(1, round(edge * scale)) for edge in picture.size)
    return picture.convert("RGB").resize((width, height), Image.Resampling.LANCZOS)


def _draw_title(canvas: Canvas, found: Explanation) -> None:
    sheet = canvas.sheet
    score = f"{found.score:.3f}"
    inner = sheet.width - 2 * sheet.margin - int(font(26).getlength(score)) - sheet.gap
    lines = wrapped(found.text, inner, 20, 3)
    top = canvas.room(len(lines) * 26 * _SCALE + 6 * _SCALE)
    for number, line in enumerate(lines):
        canvas.pen.text((sheet.margin, top + number * 26 * _SCALE), line, _INK, font(20))
    canvas.pen.text((sheet.width - sheet.margin, top - 4 * _SCALE), score, _POSITIVE, font(26), anchor="ra")
    if found.dense:
        for line in wrapped(found.dense, sheet.width - 2 * sheet.margin, 11, 2):
            canvas.pen.text((sheet.margin, canvas.room(16 * _SCALE)), line, _QUIET, font(11))
    canvas.room(10 * _SCALE)


def _draw_choices(canvas: Canvas, found: Explanation, view: Image.Image) -> None:
    tiles = [(view, "picture", f"{found.grid[0]} by {found.grid[1]} patches")]
    for name, choice in list(found.choices.items())[:2]:
        count = f"{int(choice.kept.sum())} of {len(choice.kept)} patches kept"
        saliency = laid_over(view, found, scaled(choice.saliency))
        if len(found.choices) == 1:
            tiles.append((saliency, "saliency", "how much every patch matters"))
        else:
            saliency = with_dropped(saliency, found, choice.kept)
        title = "kept" if len(found.choices) == 1 else f"kept by the {name} guidance"
        tiles.append((with_dropped(view, found, choice.kept), title, count))
        if len(found.choices) > 1 and name == "sparse":
            tiles.insert(
                1, (laid_over(view, found, scaled(choice.saliency)), "saliency", "of the sparse guidance")
            )
    canvas.tiles(tiles, canvas.sheet.large)


def _draw_words(canvas: Canvas, found: Explanation, small: Image.Image) -> None:
    shown = strongest_words(found.words, MOST_WORDS)
    more = len(found.words) - len(shown)
    canvas.heading(
        "where every word looked" + (f" (the strongest {len(shown)}; {more} more)" if more else "")
    )
    # One scale for all words, so that a word that met nothing stays dark.
    top = max((float(word.map.max()) for word in shown), default=0.0) or 1.0
    tiles = []
    for word in shown:
        strength = (word.map / top).clamp(0, 1).cpu().double().numpy()
        note = f"token {word.token[0]} · {word.token[1]:.2f}"
        if word.description is not None:
            note = f"“{word.description[0]}” {word.description[1]:.2f} · {word.token[1]:.2f}"
        tiles.append((laid_over(small, found, strength), f"{word.text}  {word.share:+.3f}", note))
    canvas.tiles(tiles, canvas.sheet.small)


def strongest_words(words: Sequence[Word], most: int) -> list[Word]:
    """The words that add most, in the order of the text."""
    ranked = sorted(range(len(words)), key=lambda place: -words[place].share)[:most]
    return [words[place] for place in sorted(ranked)]


def _draw_tokens(canvas: Canvas, found: Explanation, small: Image.Image) -> None:
    """The tokens words met, most met first, as the patches they are made of."""
    met = dict.fromkeys(found.token_maps, 0)
    for word in found.words:
        if word.token[0] in met:
            met[word.token[0]] += 1
    names = sorted(met, key=lambda name: -met[name])[:MOST_TOKENS]
    canvas.heading(f"aggregated tokens ({len(names)} of {len(met)})")
    tiles = []
    for name in names:
        title = "rest of the patches" if name.endswith("rest") else f"token {name}"
        count = met[name]
        note = f"met by {count} word{'' if count == 1 else 's'}" if count else "met by no word first"
        tiles.append((laid_over(small, found, scaled(found.token_maps[name], positive=True)), title, note))
    canvas.tiles(tiles, canvas.sheet.small)


def _draw_sum(canvas: Canvas, found: Explanation) -> None:
    """One bar a part, each beginning where the one before ended: the last ends at the score."""
    canvas.heading("what adds up to the score")
    parts = [(word.text, word.share, True) for word in found.words]
    parts += [(name, value, False) for name, value in found.terms.items()]
    ends = np.cumsum([0.0, *(value for _, value, _ in parts)])
    low, high = min(0.0, float(ends.min())), max(float(ends.max()), 1e-9)
    label, number = 250 * _SCALE, 70 * _SCALE
    left = canvas.sheet.margin + label
    span = canvas.sheet.width - canvas.sheet.margin - number - left
    height = 17 * _SCALE

    def at(value: float) -> float:
        return left + (value - low) / (high - low) * span

    for place, (name, value, of_word) in enumerate(parts):
        top = canvas.room(height)
        begin, end = sorted((at(float(ends[place])), at(float(ends[place + 1]))))
        colour = (_POSITIVE if of_word else _tinted(_POSITIVE)) if value >= 0 else _NEGATIVE
        pen, middle = canvas.pen, top + height // 2
        pen.line([(at(0.0), top), (at(0.0), top + height)], _LINE, _SCALE)
        pen.rectangle([begin, top + 3 * _SCALE, max(end, begin + _SCALE), top + height - 3 * _SCALE], colour)
        pen.text(
            (left - 10 * _SCALE, middle),
            shortened(name, label - 10 * _SCALE, 11),
            _INK,
            font(11),
            anchor="rm",
        )
        pen.text(
            (canvas.sheet.width - canvas.sheet.margin, middle), f"{value:+.4f}", _QUIET, font(11), anchor="rm"
        )
    top = canvas.room(26 * _SCALE)
    canvas.pen.line(
        [
            (canvas.sheet.margin, top + 3 * _SCALE),
            (canvas.sheet.width - canvas.sheet.margin, top + 3 * _SCALE),
        ],
        _LINE,
        _SCALE,
    )
    middle = top + 15 * _SCALE
    canvas.pen.text((left - 10 * _SCALE, middle), "score", _INK, font(12), anchor="rm")
    canvas.pen.text(
        (canvas.sheet.width - canvas.sheet.margin, middle), f"{found.score:.4f}", _INK, font(12), anchor="rm"
    )


def _tinted(colour: tuple[int, int, int]) -> tuple[int, int, int]:
    hue, light, saturation = colorsys.rgb_to_hls(*(part / 255 for part in colour))
    red, green, blue = colorsys.hls_to_rgb(hue, min(1.0, light + 0.22), saturation * 0.7)
    return round(red * 255), round(green * 255), round(blue * 255)
