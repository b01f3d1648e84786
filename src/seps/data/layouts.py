"""Readers of the layouts in which image-text data lies about: one function, `read`, that recognises them."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

from seps.data.records import Broken, Collection, Problems, Record

logger = logging.getLogger(__name__)

CAPTIONS_AN_IMAGE = 5
SAME_SPLIT = {"val": "dev", "validation": "dev", "valid": "dev"}
EVERY_SPLIT = "all"

T = TypeVar("T")


def read(
    folder: str | PathLike[str],
    split: str = EVERY_SPLIT,
    limit: int | None = None,
    broken: Broken = "refuse",
    captions_per_image: int | None = None,
    dense: str | PathLike[str] | None = None,
    images: str | PathLike[str] | None = None,
    restval_trains: bool = True,
) -> Collection:
    """The records of one split of a data folder (or of its captions.jsonl or dataset_*.json).

    `broken` refuses or skips broken lines and missing images; `captions_per_image` keeps the first so many
    captions of an image (5 in COCO's published protocol); `dense` is a JSONL of descriptions and `images` the
    folder of the pictures, where they are not found by themselves; `restval_trains` counts Karpathy's
    restval images as train.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be at least 1, not {limit}")
    if captions_per_image is not None and captions_per_image < 1:
        raise ValueError(f"captions_per_image must be at least 1, not {captions_per_image}")
    place = Path(folder)
    if not place.exists():
        raise ValueError(f"{place}: there is no such data folder")
    problems = Problems(broken)
    base = None if images is None else _existing(Path(images), "image folder")
    split = SAME_SPLIT.get(split, split)
    layout, file = recognise(place)
    if layout == "plain":
        found = _read_plain(file, split, base, problems)
    elif layout == "karpathy":
        found = _read_karpathy(file, split, base, restval_trains, problems)
    else:
        found = _read_lines(file, split, base, problems)
    if dense is not None:
        found = _with_dense(found, _existing(Path(dense), "dense text file"), problems)
    sound = _first(_present(_unique(found, problems), problems), limit)
    records = tuple(replace(record, captions=record.captions[:captions_per_image]) for record in sound)
    if not records:
        skipped = f", {problems.summary()}" if problems else ""
        raise ValueError(f"{place}: split {split!r} is empty{skipped}")
    if problems:
        logger.warning("%s: %s", place, problems.summary())
    return Collection(records, layout, problems)


def recognise(place: Path) -> tuple[str, Path]:
    """Which layout lies in a folder: ("plain" | "karpathy" | "lines", the file or folder to read)."""
    if place.is_file():
        if place.suffix == ".jsonl":
            return "plain", place
        if place.suffix == ".json":
            return "karpathy", place
        raise ValueError(f"{place}: expected a folder, a captions .jsonl or a Karpathy dataset .json")
    if (place / "captions.jsonl").is_file():
        return "plain", place / "captions.jsonl"
    datasets = sorted(place.glob("dataset*.json"))
    if len(datasets) > 1:
        names = ", ".join(path.name for path in datasets)
        raise ValueError(f"{place}: several Karpathy files ({names}), name the one to read")
    if datasets:
        return "karpathy", datasets[0]
    for inner in (place, place / "precomp"):
        if any(inner.glob("*_caps.txt")) or any(inner.glob("*_ids.txt")):
            return "lines", inner
    raise ValueError(
        f"{place}: no known layout; looked for captions.jsonl, dataset*.json, "
        "and SPLIT_caps.txt with SPLIT_ids.txt here or in precomp/"
    )


def read_jsonl(path: Path, problems: Problems, check: Callable[[Any], T]) -> Iterator[tuple[int, T | None]]:
    """(line number, checked value) of every line of a JSONL; a broken line is met and gives None."""
    for number, line in _lines(path):
        try:
            yield number, check(json.loads(line.decode("utf-8")))
        except UnicodeDecodeError:
            problems.meet(f"{path}:{number}", "not UTF-8 text")
            yield number, None
        except json.JSONDecodeError as error:
            problems.meet(f"{path}:{number}", f"not valid JSON ({error.msg} at column {error.colno})")
            yield number, None
        except (_UnfitError, RecursionError) as error:
            problems.meet(f"{path}:{number}", str(error))
            yield number, None


class _UnfitError(Exception):
    """A value that is not what its layout promises; its message completes the sentence."""


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Numbered lines; only line feeds part them, and blank ones at the end do not count."""
    lines = path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n")
    while lines and not lines[-1].strip():
        lines.pop()
    for number, line in enumerate(lines, start=1):
        yield number, line.strip()


def _existing(path: Path, what: str) -> Path:
    if not path.exists():
        raise ValueError(f"{path}: there is no such {what}")
    return path


def _first(records: Iterable[Record], limit: int | None) -> Iterator[Record]:
    for number, record in enumerate(records, start=1):
        yield record
        if number == limit:
            return


def _unique(records: Iterable[Record], problems: Problems) -> Iterator[Record]:
    """Two records of one image would count as each other's negatives: the second is met as a problem."""
    seen: dict[Path, str] = {}
    for record in records:
        if record.image in seen:
            problems.meet(record.source, f"image {record.image.name} stands already at {seen[record.image]}")
            continue
        seen[record.image] = record.source
        yield record


def _present(records: Iterable[Record], problems: Problems) -> Iterator[Record]:
    for record in records:
        if record.image.is_file():
            yield record
        else:
            problems.meet(record.source, f"image {record.image} is missing")


def _texts(value: Any, what: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not value or not all(isinstance(text, str) for text in value):
        raise _UnfitError(f"expected {what} as a non-empty list of texts, found {_brief(value)}")
    texts = tuple(text.strip() for text in value)
    if not all(texts):
        raise _UnfitError(f"caption {texts.index('') + 1} of {len(texts)} is empty")
    return texts


def json_object(entry: Any) -> dict[str, Any]:
    """A check for `read_jsonl`: the line holds an object."""
    if not isinstance(entry, dict):
        raise _UnfitError(f"expected a JSON object, found {_brief(entry)}")
    return entry


def _field(entry: Any, name: str) -> str:
    value = json_object(entry).get(name)
    if not isinstance(value, str) or not value.strip():
        raise _UnfitError(f"expected {name!r} as a non-empty text, found {_brief(value)}")
    return value.strip()


def _brief(value: Any) -> str:
    if value is None:
        return "nothing"
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."


def _check_given(file: Path, split: str, given: int, splits: set[str]) -> None:
    if not given and splits:
        raise ValueError(f"{file}: split {split!r} is empty; its splits: {', '.join(sorted(splits))}")


def _read_plain(file: Path, split: str, base: Path | None, problems: Problems) -> Iterator[Record]:
    """captions.jsonl: one object a line with image, captions, and optionally dense and split."""
    folder = base or file.parent
    splits: set[str] = set()
    given = 0

    def check(entry: Any) -> tuple[str, tuple[str, ...], str | None, str | None]:
        image = _field(entry, "image")
        dense = entry.get("dense")
        if dense is not None and not isinstance(dense, str):
            raise _UnfitError(f"expected 'dense' as a text, found {_brief(dense)}")
        part = None if entry.get("split") is None else _field(entry, "split")
        return image, _texts(entry.get("captions"), "'captions'"), (dense or "").strip() or None, part

    for number, checked in read_jsonl(file, problems, check):
        if checked is None:
            continue
        image, captions, dense, own = checked
        part = SAME_SPLIT.get(own or EVERY_SPLIT, own or EVERY_SPLIT)
        splits.add(part)
        if split in (EVERY_SPLIT, part):
            given += 1
            yield Record(folder / image, captions, dense, part, image, f"{file}:{number}")
    _check_given(file, split, given, splits)


def _read_karpathy(
    file: Path, split: str, base: Path | None, restval_trains: bool, problems: Problems
) -> Iterator[Record]:
    """dataset_*.json: {"images": [{"filename", "split", "sentences": [{"raw"}], "filepath"?}]}."""
    try:
        content = json.loads(file.read_bytes().decode("utf-8-sig"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{file}: not valid JSON ({error})") from None
    entries = content.get("images") if isinstance(content, dict) else None
    if not isinstance(entries, list) or not entries:
        raise ValueError(f"{file}: expected an object with a non-empty list 'images'")
    names = dict(SAME_SPLIT, restval="train") if restval_trains else SAME_SPLIT
    candidates = [base] if base else [file.parent / "images", file.parent / "flickr30k-images", file.parent]
    folder: Path | None = None
    splits: set[str] = set()
    given = 0
    for number, entry in enumerate(entries, start=1):
        where = f"{file}:images[{number - 1}]"
        try:
            part = _field(entry, "split")
            part = names.get(part, part)
            splits.add(part)
            if split not in (EVERY_SPLIT, part):
                continue
            given += 1
            name = Path(entry.get("filepath") or "") / _field(entry, "filename")
            sentences = entry.get("sentences")
            raw = [_field(item, "raw") for item in sentences] if isinstance(sentences, list) else sentences
            captions = _texts(raw, "'sentences'")
        except _UnfitError as error:
            problems.meet(where, str(error))
            continue
        if folder is None:
            folder = _base_of(name, candidates)
        image_id = str(entry.get("cocoid", entry.get("imgid", name)))
        yield Record((folder or candidates[0]) / name, captions, None, part, image_id, where)
    _check_given(file, split, given, splits)


def _base_of(name: Path, candidates: list[Path]) -> Path | None:
    """The first folder in which a picture of that name lies."""
    return next((folder for folder in candidates if (folder / name).is_file()), None)


def _read_lines(inner: Path, split: str, base: Path | None, problems: Problems) -> Iterator[Record]:
    """SPLIT_ids.txt and SPLIT_caps.txt (five lines an image), id_mapping.json, f30k_/coco_SPLIT.jsonl."""
    splits = sorted(path.name.removesuffix("_caps.txt") for path in inner.glob("*_caps.txt"))
    if split == EVERY_SPLIT:
        for part in splits:
            yield from _read_lines(inner, part, base, problems)
        return
    stem = next((own for own in splits if SAME_SPLIT.get(own, own) == split), split)
    captions_file, ids_file = inner / f"{stem}_caps.txt", inner / f"{stem}_ids.txt"
    for file in (captions_file, ids_file):
        if not file.is_file():
            here = ", ".join(splits) or "none"
            raise ValueError(f"{file}: missing, split {split!r} needs it; splits with captions: {here}")
    lines = list(_lines(captions_file))
    if len(lines) % CAPTIONS_AN_IMAGE:
        raise ValueError(f"{captions_file}: {len(lines)} captions are not a multiple of {CAPTIONS_AN_IMAGE}")
    ids = _image_ids(ids_file, len(lines) // CAPTIONS_AN_IMAGE, captions_file)
    mapping_file, mapping = _read_mapping(inner)
    dense = _dense_of_split(inner, stem, len(ids), problems)
    outer = mapping_file.parent
    candidates = [base] if base else [outer / "images", outer / "flickr30k-images", outer]
    folder: Path | None = None
    for i, (number, image_id) in enumerate(ids):
        first = i * CAPTIONS_AN_IMAGE
        if image_id not in mapping:
            problems.meet(f"{ids_file}:{number}", f"image id {image_id} is not in {mapping_file.name}")
            continue
        source = f"{captions_file}:{first + 1}"
        captions = []
        for number, line in lines[first : first + CAPTIONS_AN_IMAGE]:
            text = line.decode("utf-8", errors="replace")
            if not text or "\ufffd" in text:
                what = "the caption is empty" if not text else "the caption is not UTF-8 text"
                problems.meet(f"{captions_file}:{number}", what)
                continue
            captions.append(text)
        if captions:
            name = Path(mapping[image_id])
            folder = folder or _base_of(name, candidates)
            image = (folder or candidates[0]) / name
            yield Record(image, tuple(captions), dense[i], split, image_id, source)


def _image_ids(file: Path, images: int, captions_file: Path) -> list[tuple[int, str]]:
    """(line, id) of every image of a split, whether the file has a line an image or a line a caption."""
    ids = [line.decode("ascii", errors="replace") for _, line in _lines(file)]
    if len(ids) == images:
        return list(enumerate(ids, start=1))
    if len(ids) == images * CAPTIONS_AN_IMAGE:
        groups = [ids[i : i + CAPTIONS_AN_IMAGE] for i in range(0, len(ids), CAPTIONS_AN_IMAGE)]
        for i, group in enumerate(groups):
            if len(set(group)) > 1:
                raise ValueError(
                    f"{file}:{i * CAPTIONS_AN_IMAGE + 1}: with a line a caption, five lines in a row must "
                    f"hold one image id, found {', '.join(dict.fromkeys(group))}"
                )
        return [(i * CAPTIONS_AN_IMAGE + 1, group[0]) for i, group in enumerate(groups)]
    raise ValueError(
        f"{file}: {len(ids)} ids fit neither the {images} images nor the "
        f"{images * CAPTIONS_AN_IMAGE} captions of {captions_file.name}"
    )


def _read_mapping(inner: Path) -> tuple[Path, dict[str, str]]:
    places = [inner / "id_mapping.json", inner.parent / "id_mapping.json"]
    file = next((path for path in places if path.is_file()), None)
    if file is None:
        raise ValueError(f"{inner}: there are image ids but no id_mapping.json here or one folder up")
    try:
        content = json.loads(file.read_bytes().decode("utf-8-sig"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{file}: not valid JSON ({error})") from None
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in content.values()):
        raise ValueError(f"{file}: expected an object that maps image ids to file names")
    return file, content


def _dense_of_split(inner: Path, stem: str, images: int, problems: Problems) -> list[str | None]:
    """The descriptions of a split in image order; all None where the split has no file of them."""
    names = [f"{data}_{stem}.jsonl" for data in ("f30k", "coco")]
    file = next((p for folder in (inner, inner.parent) for n in names if (p := folder / n).is_file()), None)
    if file is None:
        return [None] * images
    texts = [text for _, text in read_jsonl(file, problems, lambda entry: _field(entry, "text"))]
    if len(texts) > images:
        raise ValueError(f"{file}: {len(texts)} descriptions for {images} images, expected one line an image")
    if len(texts) < images:
        what = f"{len(texts)} descriptions for {images} images, expected one line an image"
        problems.meet(f"{file}:{len(texts) + 1}", what)
    return texts + [None] * (images - len(texts))


def _with_dense(records: Iterable[Record], file: Path, problems: Problems) -> Iterator[Record]:
    """Descriptions from a JSONL of {"text", "image"}, joined by image name; without names, by image order."""

    def check(entry: Any) -> tuple[str | None, str]:
        text = _field(entry, "text")
        return (_field(entry, "image") if "image" in entry else None), text

    records = list(records)
    skipped = len(problems)
    lines = [entry for _, entry in read_jsonl(file, problems, check)]
    named: dict[str, dict[Path, str]] = {}
    for entry in lines:
        if entry is not None and entry[0] is not None:
            named.setdefault(Path(entry[0]).name, {})[Path(entry[0])] = entry[1]
    anonymous = sum(entry is not None and entry[0] is None for entry in lines)
    if named and anonymous:
        raise ValueError(f"{file}: {anonymous} of {len(lines)} lines lack the 'image' that the others have")
    if not named and skipped:
        raise ValueError(
            f"{file}: its lines name no 'image', and their order is lost once records are skipped"
        )
    for i, record in enumerate(records):
        if named:
            text = _description_of(record.image, named.get(record.image.name, {}))
        else:
            entry = lines[i] if i < len(lines) else None
            text = entry[1] if entry is not None else None
        if text is None and (named or i >= len(lines)):
            problems.meet(record.source, f"image {record.image.name} has no description in {file.name}")
        yield replace(record, dense=text or record.dense)


def _description_of(image: Path, named: Mapping[Path, str]) -> str | None:
    """Among descriptions of pictures with the same file name: that of the longest path the image's ends with.

    Where none fits, folders are named otherwise than where the description was written: one alone is taken.
    """
    fitting = [path for path in named if image.parts[-len(path.parts) :] == path.parts]
    if fitting:
        return named[max(fitting, key=lambda path: len(path.parts))]
    return next(iter(named.values())) if len(named) == 1 else None
