"""Why a picture got its score for a text: what was kept, who met whom, and parts that add up."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from seps.data.images import evaluation_box
from seps.data.text import WordTokenizer, split_words
from seps.explanation.meeting import Meeting, meet
from seps.gallery import Gallery
from seps.model import SepsModel, SepsProcessor
from seps.slimming import Branch, token_weights, unit
from seps.tokens import Tokens

_NO_WORD = -1


@dataclass(frozen=True)
class Choice:
    """What one branch chose: saliency (N,), and which patches it kept, order by falling saliency (N,)."""

    saliency: Tensor
    kept: Tensor
    order: Tensor

    @classmethod
    def of(cls, branch: Branch) -> Choice:
        """The choice of a branch for the one image and the one text it was asked about."""
        saliency = branch.saliency[0, 0]
        return cls(saliency, branch.kept[0, 0], saliency.argsort(descending=True, stable=True))


@dataclass(frozen=True)
class Word:
    """A word of the query: what it adds to the score, where it looked and what it met.

    map (N,): what each patch adds to the word's best cosine, summed over its pieces; token, the slim token
    it met, with the affinity; description, the description's word it met, with the affinity.
    """

    text: str
    share: float
    map: Tensor
    token: tuple[str, float]
    description: tuple[str, float] | None = None


@dataclass(frozen=True)
class Explanation:
    """A score and everything it is made of.

    The words' shares and the terms add up to the score. grid (rows, columns) of the patches; box, the part
    of the picture the encoder sees, as fractions (left, top, right, bottom); choices of the branches by
    name; words of the query; terms, what belongs to no single word; token_maps (J,N), the weights of which
    the slim tokens are made, by their names; meetings, the alignments taken apart.
    """

    text: str
    score: float
    grid: tuple[int, int]
    box: tuple[float, float, float, float]
    choices: Mapping[str, Choice]
    words: tuple[Word, ...]
    terms: Mapping[str, float]
    token_maps: Mapping[str, Tensor]
    meetings: tuple[Meeting, ...]
    dense: str | None = None

    @property
    def total(self) -> float:
        """The sum of all parts."""
        return sum(word.share for word in self.words) + sum(self.terms.values())

    def overlay(self) -> dict[str, Any]:
        """The layer a page lays over the picture: plain numbers and texts, ready for JSON."""
        return {
            "text": self.text,
            "score": round(self.score, 5),
            "grid": list(self.grid),
            "box": [round(edge, 5) for edge in self.box],
            "branches": {
                name: {
                    "saliency": numbers(choice.saliency),
                    "order": choice.order.tolist(),
                    "kept": int(choice.kept.sum()),
                }
                for name, choice in self.choices.items()
            },
            "words": [
                {
                    "text": word.text,
                    "share": round(word.share, 5),
                    "map": numbers(word.map),
                    "token": {"name": word.token[0], "affinity": round(word.token[1], 4)},
                    "description": None
                    if word.description is None
                    else {"word": word.description[0], "affinity": round(word.description[1], 4)},
                }
                for word in self.words
            ],
            "tokens": [{"name": name, "map": numbers(values)} for name, values in self.token_maps.items()],
            "terms": {name: round(value, 5) for name, value in self.terms.items()},
            "description": self.dense,
        }

    def to_json(self) -> str:
        """The overlay as JSON."""
        return json.dumps(self.overlay(), ensure_ascii=False)


def numbers(values: Tensor) -> list[float]:
    """Values as short plain numbers."""
    return [round(value, 4) for value in values.tolist()]


def explain(
    model: SepsModel, processor: SepsProcessor, image: Image.Image, text: str, dense: str | None = None
) -> Explanation:
    """Why the model gives a picture this score for a text; dense is its dense text, if there is one."""
    device = next(model.parameters()).device
    with torch.inference_mode():
        images = model.encode_images(processor.images([image]).to(device))
        tokens = (
            None if dense is None or model.recipe.dense == "none" else read_dense(model, processor, dense)
        )
    return explain_tokens(model, processor, images, text, image.size, tokens, dense)


def explain_stored(gallery: Gallery, id: str, text: str) -> Explanation:  # noqa: A002 - the column's name
    """Why a picture of a gallery got its score for a text, from the tokens it is scored with."""
    stored = gallery.stored(id)
    size = (stored.entry.width, stored.entry.height)
    return explain_tokens(
        gallery.model, gallery.processor, stored.images, text, size, stored.dense, stored.entry.description
    )


def read_dense(model: SepsModel, processor: SepsProcessor, dense: str) -> Tokens:
    """The words of a dense text. -> (1,D,C)"""
    device = next(model.parameters()).device
    read = processor.texts([dense], model.recipe.description_length)
    return model.encode_texts(read["ids"].to(device), read["mask"].to(device))


@torch.inference_mode()
def explain_tokens(
    model: SepsModel,
    processor: SepsProcessor,
    images: Tokens,
    text: str,
    size: tuple[int, int],
    dense: Tokens | None = None,
    dense_text: str | None = None,
) -> Explanation:
    """The same from tokens at hand; size (width, height) of the picture. images (1,N,C), dense (1,D,C)"""
    if not text.strip():
        raise ValueError("text: expected something to explain, found an empty text")
    if model.training:
        raise ValueError("model: expected one in evaluation mode (model.eval()), found it in training")
    device = images.features.device
    read = processor.texts([text])
    texts = model.encode_texts(read["ids"].to(device), read["mask"].to(device))
    seen = model.head.inspect(images, texts, dense)
    score = model.score(images, texts, dense)[0, 0].item()
    query, places = query_words(processor, text, read, texts)
    described = () if dense is None else dense_words(processor, dense_text or "", dense)
    meetings, terms = take_apart(model, images, texts, dense, seen, query, described)
    own = [meeting for meeting in meetings if meeting.words == query]
    foreign = {f"{m.name} text": float(m.shares.sum()) for m in meetings if m.words != query}
    terms = {**foreign, **terms}
    width, height = size
    left, top, right, bottom = evaluation_box(width, height, processor.view)
    branches = {name: branch for name, branch in seen.branches.items() if takes_part(branch)}
    return Explanation(
        text,
        score,
        model.image_encoder.grid,
        (left / width, top / height, right / width, bottom / height),
        {name: Choice.of(branch) for name, branch in branches.items()},
        gather_words(own, places, query, images, texts),
        {name: value for name, value in terms.items() if value},
        token_maps(meetings),
        tuple(meetings),
        dense_text if dense is not None else None,
    )


def takes_part(branch: Branch) -> bool:
    """Whether a branch has a say in the one pair it was asked about."""
    return branch.present is None or bool(branch.present.all())


def take_apart(
    model: SepsModel,
    images: Tokens,
    texts: Tokens,
    dense: Tokens | None,
    seen: Any,
    query: tuple[str, ...],
    described: tuple[str, ...],
) -> tuple[list[Meeting], dict[str, float]]:
    """The alignments of a pair and the terms that belong to no word."""
    head, recipe = model.head, model.recipe
    meetings: list[Meeting] = []
    terms: dict[str, float] = {}
    groups = [[n] for n in seen.branches] if recipe.dense == "branch" else [list(seen.branches)]
    for group in groups:
        branches = [seen.branches[name] for name in group]
        if not takes_part(branches[0]):
            continue
        words = head.branch_words(group[0], texts, dense)
        labels = query if words is texts else described
        tokens = seen.tokens[group[0]][0, 0]
        maps = patch_maps(model, images, branches)
        names = token_names(len(tokens), len(maps))
        vectors = unit(real_words(words))
        name = "patches" if group[0] == "sparse" else group[0]
        meetings.append(meet(name, labels, names, vectors @ tokens.T, head.aligner, maps=maps))
    if head.description is not None:
        weight = float(head.description.weight)
        if dense is not None and bool(dense.present[0]):
            evidence = head.description.evidence(images, dense)
            facts = real_words(evidence)
            names = described if len(described) == len(facts) else token_names(len(facts), len(facts))
            cosines = unit(real_words(texts)) @ unit(facts).T
            meetings.append(meet("description", query, names, cosines, head.description.aligner, weight))
        else:
            terms["no description"] = weight * float(head.description.absent(seen.patch_scores)[0, 0])
    for meeting in meetings:
        for side, value in zip(("words", "tokens"), meeting.relevance, strict=True):
            terms[f"{meeting.name}: relevance of {side}"] = value
    pooled = None if model.global_term is None else model.global_term.weight
    if pooled is not None:
        terms["global vectors"] = float(pooled * model.global_scores(images, texts)[0, 0])
    return meetings, terms


def patch_maps(model: SepsModel, images: Tokens, branches: Sequence[Branch]) -> Tensor:
    """Weights over the patches of aggregated and residual tokens, over their length. -> (J+1,N)"""
    weights = token_weights(branches)[0, 0]
    values = model.head.slimmer.prepare(images).features[0]
    length = (weights @ values).norm(dim=1, keepdim=True)
    return torch.where(length > 0, weights / length, torch.zeros_like(weights))


def token_names(count: int, mapped: int) -> tuple[str, ...]:
    """What the slim tokens are called: CLS where there is one, numbers, and the residual one."""
    numbered = tuple(str(number) for number in range(1, mapped))
    return (*(("CLS",) if count > mapped else ()), *numbered, "rest")


def real_words(tokens: Tokens) -> Tensor:
    """The real tokens of the only item. (1,M,C) -> (m,C)"""
    return tokens.features[0] if tokens.mask is None else tokens.features[0][tokens.mask[0]]


def query_words(
    processor: SepsProcessor, text: str, read: Mapping[str, Tensor], texts: Tokens
) -> tuple[tuple[str, ...], list[int]]:
    """The text of each real token, and the word it belongs to."""
    mask = read["mask"][0] if texts.mask is None else texts.mask[0].cpu()
    ids, words = read["ids"][0][mask].tolist(), read["words"][0][mask].tolist()
    return tuple(token_texts(processor, text, ids, words)), words


def dense_words(processor: SepsProcessor, text: str, dense: Tokens) -> tuple[str, ...]:
    """The text of each real token of a description; numbers where the text is not known."""
    count = int(dense.lengths[0])
    if text:
        read = processor.texts([text], None)
        inside = read["words"][0] != _NO_WORD
        ids, words = read["ids"][0][inside].tolist(), read["words"][0][inside].tolist()
        found = token_texts(processor, text, ids, words)
        if len(found) >= count:
            return tuple(found[:count])
    return tuple(str(number) for number in range(1, count + 1))


def token_texts(processor: SepsProcessor, text: str, ids: Sequence[int], words: Sequence[int]) -> list[str]:
    """What each token stands for."""
    if isinstance(processor.tokenizer, WordTokenizer):
        spoken = [text[start:end] for _, start, end in split_words(text)]
        vocabulary = processor.tokenizer.vocabulary
        return [
            spoken[word] if 0 <= word < len(spoken) else vocabulary[number]
            for number, word in zip(ids, words, strict=True)
        ]
    pieces = processor.tokenizer.tokenizer.convert_ids_to_tokens(list(ids))
    return [str(piece).removeprefix("##").removeprefix("▁").removeprefix("Ġ") for piece in pieces]


def gather_words(
    meetings: Sequence[Meeting],
    places: Sequence[int],
    pieces: Sequence[str],
    images: Tokens,
    texts: Tokens,
) -> tuple[Word, ...]:
    """The query's words, the pieces of each put together."""
    values, vectors = images.features[0], unit(real_words(texts))
    shares = torch.stack([meeting.shares for meeting in meetings]).sum(0)
    looking = [meeting for meeting in meetings if meeting.maps is not None]
    maps = torch.stack([word_maps(meeting, values, vectors) for meeting in looking]).sum(0)
    facts = next((meeting for meeting in meetings if meeting.name == "description"), None)
    groups: list[list[int]] = []
    for place, word in enumerate(places):
        if groups and word != _NO_WORD and places[groups[-1][-1]] == word:
            groups[-1].append(place)
        else:
            groups.append([place])
    return tuple(
        Word(
            "".join(pieces[place] for place in group),
            float(shares[group].sum()),
            maps[group].sum(0),
            strongest(looking[0], group),
            None if facts is None else strongest(facts, group),
        )
        for group in groups
    )


def word_maps(meeting: Meeting, values: Tensor, vectors: Tensor) -> Tensor:
    """What each patch adds to the cosine of each word with its best token; CLS has no patches. -> (M,N)"""
    if meeting.maps is None:
        raise ValueError(f"meeting: expected one with patches, found {meeting.name!r}")
    offset = len(meeting.tokens) - len(meeting.maps)
    best = meeting.best_tokens - offset
    weights = meeting.maps[best.clamp(min=0)] * (best >= 0).unsqueeze(1)
    return weights * (vectors @ values.T)


def strongest(meeting: Meeting, group: Sequence[int]) -> tuple[str, float]:
    """The token that the pieces of a word met best, and how strongly."""
    affinity = meeting.affinity[list(group)].amax(0)
    place = int(affinity.argmax())
    return meeting.tokens[place], float(affinity[place])


def token_maps(meetings: Sequence[Meeting]) -> dict[str, Tensor]:
    """The weights over the patches of every slim token, each adding up to one, by name."""
    found: dict[str, Tensor] = {}
    for meeting in meetings:
        if meeting.maps is None:
            continue
        names = meeting.tokens[len(meeting.tokens) - len(meeting.maps) :]
        for name, weights in zip(names, meeting.maps, strict=True):
            total = weights.sum()
            key = name if meeting.name == "patches" else f"{meeting.name} {name}"
            found[key] = weights / total if total > 0 else weights
    return found
