"""The same numbers as the ancestors' own code, and as slow loops written from the equations."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from making import RECIPES, make_case, make_head, relative_error
from seps import SlimHead, Tokens, compat, laps, paper, released
from seps.modalities import RGB_NIR_TIR, MultiModalSlimmer, reidentification
from seps.recipe import Recipe

KINDS = (
    "laps",
    "released",
    "switch_code_sparse",
    "switch_code_dense",
    "paper_sparse",
    "paper_dense",
    "paper_single",
)
CASES = [f"{kind}_{encoder}" for kind in KINDS for encoder in ("vit", "swin")]
TOLERANCE = 1e-5


def assert_same_gradient(found: Tensor | None, expected: Tensor, scale: float = 0.0) -> None:
    """Equal to 1e-5 of the largest expected number, or of scale where that is larger."""
    found = torch.zeros_like(expected) if found is None else found
    largest = max(float(expected.abs().max()), scale, 1e-6)
    assert float((found - expected).abs().max()) <= TOLERANCE * largest


def assert_same_gradients(found: dict[str, Tensor | None], expected: dict[str, Tensor]) -> None:
    """Every gradient of a set; one that rounding dominates is held to the largest of the set."""
    assert found.keys() == expected.keys()
    whole = max(float(gradient.abs().max()) for gradient in expected.values())
    for name, gradient in expected.items():
        # A softmax does not see a constant, so the last bias before it has no gradient but rounding; and a
        # single number is a sum over everything, whose terms cancel (the ancestors' are off by 1e-4 as well).
        rounded = name.endswith(".3.bias") or gradient.numel() == 1
        assert_same_gradient(found[name], gradient, whole if rounded else 0.0)


# The ancestors' golden numbers


def part(case: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in case.items() if name.startswith(prefix)}


def compat_module(meta: dict) -> nn.Module:
    sizes = {
        "embed_size": meta["embed_size"],
        "num_patches": meta["num_patches"],
        "sparse_ratio": meta["sparse_ratio"],
        "aggr_ratio": meta["aggr_ratio"],
    }
    if meta["recipe"] in ("laps", "released"):
        return compat.CrossSparseAggrNet_v2(SimpleNamespace(**sizes))
    return compat.CrossSparseAggrNet(
        use_paper_version=meta["recipe"] == "paper",
        use_dual_aggr=meta.get("dual_aggregation", True),
        beta=meta.get("beta", 0.25),
        top_k=meta.get("top_k", 5),
        **sizes,
    )


def native_recipe(meta: dict) -> Recipe:
    ratios = {"keep_ratio": meta["sparse_ratio"], "aggregate_ratio": meta["aggr_ratio"]}
    if meta["recipe"] == "laps":
        return laps(**ratios)
    if meta["recipe"] == "paper":
        aggregation = "dual" if meta.get("dual_aggregation", True) else "shared"
        learned = {"mixing": meta["beta"], "top_k": meta["top_k"], "aggregation": aggregation}
        return paper(dense_side="text", **learned, **ratios)
    return released(dense_side="text", detach_selection=meta["recipe"] == "released", **ratios)


def leaves(case: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        name: case[f"in.{name}"].clone().requires_grad_()
        for name in ("img", "cap", "dense")
        if f"in.{name}" in case
    }


@pytest.mark.parametrize("name", CASES)
def test_golden_numbers_through_the_ancestors_names(golden, name):
    meta, case = golden(name)
    module = compat_module(meta)
    module.load_state_dict(part(case, "w."), strict=True)
    assert sum(each.numel() for each in module.parameters()) == meta["n_params"]
    inputs = leaves(case)
    arguments = [inputs["img"], inputs["cap"], case["in.cap_lens"]]
    if "dense" in inputs:
        arguments += [inputs["dense"], case["in.dense_lens"]]
    similarity = module.eval()(*arguments)
    assert relative_error(similarity, case["out.sims_eval"]) <= TOLERANCE
    similarity, masks = module.train()(*arguments)
    assert relative_error(similarity, case["out.sims_train"]) <= TOLERANCE
    found = list(masks) if isinstance(masks, tuple) else [masks]
    expected = list(part(case, "out.mask").values())
    assert len(found) == len(expected)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    (similarity * case["in.upstream"]).sum().backward()
    for key, leaf in inputs.items():
        assert_same_gradient(leaf.grad, case[f"grad.{key}"])
    found = {key: parameter.grad for key, parameter in module.named_parameters()}
    assert_same_gradients(found, part(case, "grad.w."))


@pytest.mark.parametrize("name", CASES)
def test_golden_numbers_through_the_native_names(golden, name):
    meta, case = golden(name)
    head = SlimHead(native_recipe(meta), meta["num_patches"], meta["embed_size"])
    missing, unexpected = head.load_state_dict(compat.import_state_dict(part(case, "w.")), strict=False)
    assert not unexpected
    dense_weights = [key for key in head.state_dict() if ".dense." in key]
    assert missing == [] or (not meta["dense"] and missing == dense_weights)
    inputs = leaves(case)
    images = Tokens(inputs["img"])
    if meta["cls"]:
        images = Tokens(inputs["img"][:, 1:], cls=inputs["img"][:, 0])
    texts, dense = Tokens.padded(inputs["cap"], case["in.cap_lens"]), None
    if "dense" in inputs:
        # The switchable module's plain version computes the dense words without a gradient.
        quiet = meta["recipe"].startswith("switch")
        features = inputs["dense"].detach() if quiet else inputs["dense"]
        dense = Tokens.padded(features, case["in.dense_lens"])
    with torch.no_grad():
        assert relative_error(head.eval()(images, texts, dense), case["out.sims_eval"]) <= TOLERANCE
    seen = head.train().inspect(images, texts, dense)
    assert relative_error(seen.scores, case["out.sims_train"]) <= TOLERANCE
    masks = [decision.transpose(0, 1) for decision in seen.decisions]
    masks = masks if meta["recipe"] == "paper" else [torch.stack(masks).sum(0)]
    for mask, expected in zip(masks, part(case, "out.mask").values(), strict=True):
        assert torch.equal(mask, expected)
    (head(images, texts, dense) * case["in.upstream"]).sum().backward()
    for key, leaf in inputs.items():
        assert_same_gradient(leaf.grad, case[f"grad.{key}"])
    expected = compat.import_state_dict(part(case, "grad.w."))
    found = {key: parameter.grad for key, parameter in head.named_parameters() if key in expected}
    assert_same_gradients(found, expected)


def run_ancestor(meta: dict, weights: dict[str, Tensor], tokens: list[Tensor], anchors: list[Tensor]):
    module = compat.MultiModalSDTPS(
        meta["embed_dim"], meta["num_patches"], meta["sparse_ratio"], meta["aggr_ratio"], beta=meta["beta"]
    )
    module.load_state_dict(weights, strict=True)
    found = module(*tokens, *anchors)
    return module, found[:3], found[3:]


def run_native(meta: dict, weights: dict[str, Tensor], tokens: list[Tensor], anchors: list[Tensor]):
    recipe = reidentification(
        keep_ratio=meta["sparse_ratio"], aggregate_ratio=meta["aggr_ratio"], mixing=meta["beta"]
    )
    module = MultiModalSlimmer(RGB_NIR_TIR, recipe, meta["num_patches"], meta["embed_dim"])
    module.load_state_dict(compat.import_state_dict(weights), strict=True)
    patches = dict(zip(RGB_NIR_TIR, map(Tokens, tokens), strict=True))
    seen = module.inspect(patches, dict(zip(RGB_NIR_TIR, anchors, strict=True))).values()
    return module, [each.tokens for each in seen], [each.decision for each in seen]


@pytest.mark.parametrize("run", [run_ancestor, run_native])
def test_golden_numbers_of_three_modalities(golden, run):
    meta, case = golden("reid_sdtps")
    tokens = [case[f"in.tokens.{name}"].requires_grad_() for name in RGB_NIR_TIR]
    anchors = [case[f"in.global.{name}"].requires_grad_() for name in RGB_NIR_TIR]
    module, enhanced, masks = run(meta, part(case, "w."), tokens, anchors)
    assert sum(each.numel() for each in module.parameters()) == meta["n_params"]
    for name, found, mask in zip(RGB_NIR_TIR, enhanced, masks, strict=True):
        assert list(found.shape) == meta["shape"]
        assert relative_error(found, case[f"out.enhanced.{name}"]) <= TOLERANCE
        assert torch.equal(mask, case[f"out.mask.{name}"])
    upstream = [case[f"in.upstream.{name}"] for name in RGB_NIR_TIR]
    sum((found * each).sum() for found, each in zip(enhanced, upstream, strict=True)).backward()
    for name, patches, anchor in zip(RGB_NIR_TIR, tokens, anchors, strict=True):
        assert_same_gradient(patches.grad, case[f"grad.tokens.{name}"])
        assert_same_gradient(anchor.grad, case[f"grad.global.{name}"])
    expected = part(case, "grad.w.")
    if run is run_native:
        expected = compat.import_state_dict(expected)
    assert_same_gradients({key: each.grad for key, each in module.named_parameters()}, expected)


# Slow loops: one image, one text, one patch at a time, as the equations are printed


def cosine(one: Tensor, other: Tensor) -> Tensor:
    if not other.any():  # the residual token where nothing was dropped
        return other.sum()
    return one @ other / (one.norm() * other.norm())


def scaled(signal: Tensor) -> Tensor:
    return (signal - signal.min()) / (signal.max() - signal.min() + 1e-8)


def feed(network: nn.Sequential, vector: Tensor) -> Tensor:
    """Linear, GELU, Linear, with a layer norm before or a sigmoid behind where the network has one."""
    weights = [layer for layer in network if isinstance(layer, (nn.Linear, nn.LayerNorm))]
    if isinstance(weights[0], nn.LayerNorm):
        norm = weights.pop(0)
        spread = (vector - vector.mean()).square().mean().add(norm.eps).sqrt()
        vector = (vector - vector.mean()) / spread * norm.weight + norm.bias
    first, second = weights
    result = second.weight @ F.gelu(first.weight @ vector + first.bias) + second.bias
    return result.sigmoid() if isinstance(network[-1], nn.Sigmoid) else result


def slow_saliency(
    head: SlimHead, branch: str, patches: Tensor, anchor: Tensor, guides: list[Tensor]
) -> Tensor:
    """Equations 1 to 3. patches (N,C) -> (N,)"""
    still = patches.detach()
    own = torch.stack([cosine(patch, anchor.detach()) for patch in still])
    signals = [torch.stack([cosine(patch, guide.detach()) for patch in still]) for guide in guides]
    if head.recipe.scoring == "sum":
        return sum(signals, start=own)
    predicted = torch.cat([feed(head.slimmer.predictors[branch], patch) for patch in patches])
    mixing = head.recipe.mixing
    share = 1 - max(2, len(guides)) * mixing
    return share * predicted + mixing * sum(map(scaled, signals), start=2 * scaled(own))


def slow_slim(
    slimmer: nn.Module, branch: str, patches: Tensor, saliency: Tensor
) -> tuple[list[Tensor], Tensor]:
    """Equation 4 by gathering: the aggregated tokens and the residual token of one branch."""
    recipe = slimmer.recipe
    keep = max(1, math.ceil(len(patches) * recipe.keep_ratio))
    order = saliency.argsort(descending=True)
    kept, dropped = order[:keep], order[keep:]
    network = slimmer.networks[branch if recipe.aggregation == "dual" else "shared"]
    logits = torch.stack([feed(network, patches[index]) for index in kept]) * slimmer.scale.view(())
    tokens = [
        sum(weight * patches[index] for weight, index in zip(weights, kept, strict=True))
        for weights in logits.softmax(0).T
    ]
    if len(dropped) == 0:
        return tokens, torch.zeros_like(patches[0])
    weights = saliency[dropped].softmax(0)
    return tokens, sum(weight * patches[index] for weight, index in zip(weights, dropped, strict=True))


def slow_align(aligner: nn.Module, words: Tensor, tokens: list[Tensor]) -> Tensor:
    """Equation 5 for one image and one text."""
    recipe = aligner.recipe
    table = torch.stack([torch.stack([cosine(word, token) for token in tokens]) for word in words])
    if recipe.affinity == "leaky_relu":
        table = torch.where(table > 0, table, 0.1 * table)
    score = 0.0
    for maxima in (table.max(1).values, table.max(0).values):
        score = score + maxima.mean()
        if recipe.pooling != "mean":
            largest = maxima.sort(descending=True).values[: recipe.top_k]
            largest = torch.cat([largest, largest.new_zeros(recipe.top_k - len(largest))])
            score = score + feed(aligner.relevance, largest)[0]
    return score


def slow_score(
    head: SlimHead, patches: Tensor, cls: Tensor | None, words: Tensor, dense: Tensor | None
) -> Tensor:
    """The score of one image and one text. patches (N,C), cls (C,), words (M,C), dense (D,C)"""
    recipe, anchor = head.recipe, patches.mean(0)
    whole = patches.detach() if recipe.detach_selection else patches
    first = [] if cls is None else [cls]
    sparse_guide = words.mean(0)
    if recipe.dense == "branch":
        score = 0.0
        own_words = dense if recipe.dense_side == "text" else words
        for guide, met in ((sparse_guide, words), (dense.mean(0), own_words)):
            saliency = slow_saliency(head, "shared", whole, anchor, [guide])
            tokens, residual = slow_slim(head.slimmer, "shared", whole, saliency)
            score = score + slow_align(head.aligner, met, [*first, *tokens, residual])
        return score
    guides = [sparse_guide] if dense is None else [sparse_guide, dense.mean(0)]
    branches = [
        slow_slim(head.slimmer, name, whole, slow_saliency(head, name, whole, anchor, guides))
        for name in (recipe.branches if dense is not None else ("sparse",))
    ]
    tokens = [sum(column) for column in zip(*(tokens for tokens, _ in branches), strict=True)]
    residual = sum(residual for _, residual in branches) / len(branches)
    score = slow_align(head.aligner, words, [*first, *tokens, residual])
    if recipe.dense != "matched":
        return score
    own = head.description
    weight = own.raw_weight.exp().add(1).log()
    if dense is None:
        return score + weight * (own.absent_scale * score + own.absent_shift)
    evidence = list(dense)
    if own.slimmer is not None:
        helper = SimpleNamespace(recipe=own.slimmer.recipe, slimmer=own.slimmer)
        saliency = slow_saliency(helper, "sparse", dense, dense.mean(0), [anchor])
        tokens, residual = slow_slim(own.slimmer, "sparse", dense, saliency)
        evidence = [*tokens, residual]
    return score + weight * slow_align(own.aligner, words, evidence)


def rows(tokens: Tokens | None, count: int) -> list[Tensor | None]:
    """Real tokens of each item; None where it has none."""
    if tokens is None:
        return [None] * count
    lengths = tokens.lengths.tolist()
    return [each[:length] if length else None for each, length in zip(tokens.features, lengths, strict=True)]


def slow_scores(head: SlimHead, images: Tokens, texts: Tokens, dense: Tokens | None) -> Tensor:
    of_images = head.recipe.dense_side == "image"
    described = rows(dense, len(images) if of_images else len(texts))
    table = [
        slow_score(
            head,
            images.features[image],
            None if images.cls is None else images.cls[image],
            words,
            described[image if of_images else text],
        )
        for image in range(len(images))
        for text, words in enumerate(rows(texts, len(texts)))
    ]
    return torch.stack(table).view(len(images), len(texts))


SIZES = {
    "vit": {"count": 3, "patches": 14, "channels": 20, "cls": True},
    "swin": {"count": 2, "patches": 9, "channels": 33, "cls": False},
    "all kept": {"count": 2, "patches": 5, "channels": 16, "cls": False},
}


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("size", SIZES)
def test_slow_loops_give_the_same_scores_and_gradients(name, size):
    recipe = replace(RECIPES[name], keep_ratio=1.0) if size == "all kept" else RECIPES[name]
    torch.manual_seed(sum(map(ord, name + size)))
    images, texts, dense = make_case(recipe, **SIZES[size])
    images, texts = images.to(torch.float64), texts.to(torch.float64)
    dense = None if dense is None else dense.to(torch.float64)
    if recipe.dense == "matched":
        dense = dense.without(torch.arange(len(dense)) == 1)
    head = make_head(recipe, SIZES[size]["patches"], SIZES[size]["channels"]).double()
    given = {"images": images.features, "cls": images.cls, "texts": texts.features}
    given |= {} if dense is None else {"dense": dense.features}
    parts = {key: leaf.requires_grad_() for key, leaf in given.items() if leaf is not None}
    parts |= dict(head.named_parameters())
    fast, slow = head(images, texts, dense), slow_scores(head, images, texts, dense)
    torch.testing.assert_close(fast, slow, rtol=1e-9, atol=1e-9)
    upstream = torch.randn_like(fast)
    found, expected = (
        torch.autograd.grad((scores * upstream).sum(), list(parts.values()), allow_unused=True)
        for scores in (fast, slow)
    )
    for key, one, other in zip(parts, found, expected, strict=True):
        zeros = torch.zeros_like(parts[key])
        one, other = (zeros if each is None else each for each in (one, other))
        torch.testing.assert_close(
            one, other, rtol=1e-6, atol=1e-9, msg=lambda text, key=key: f"{key}: {text}"
        )
