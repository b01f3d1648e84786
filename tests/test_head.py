import copy
import pickle
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from making import RECIPES, make_case, make_dense, make_head, make_images, make_words, refusal
from seps import SlimHead, Tokens, described, laps, paper, released
from seps.losses import hinge
from seps.slimming import unit

NAN = float("nan")
few = settings(max_examples=5)  # for every recipe
names = pytest.mark.parametrize("name", RECIPES)


def close(found, expected, tolerance=1e-5):
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


# What comes out


@names
def test_scores_are_images_by_texts_and_inspection_agrees(name):
    recipe = RECIPES[name]
    images, texts, dense = make_case(recipe)
    head = make_head(recipe)
    scores, seen = head(images, texts, dense), head.inspect(images, texts, dense)
    assert scores.shape == (4, 5)
    close(scores, seen.scores)
    assert tuple(seen.branches) == recipe.branches
    for tokens in seen.tokens.values():
        assert tokens.shape[2:] == (1 + head.slimmer.tokens + 1, 32)
        close(tokens.norm(dim=-1), torch.ones(tokens.shape[:-1]))
    for branch in seen.branches.values():
        assert branch.kept.sum(-1).eq(8).all()
        kept = branch.indices(1, 2)
        assert branch.kept[1, min(2, branch.kept.shape[1] - 1)].nonzero().squeeze(1).tolist() == sorted(
            kept.tolist()
        )
        close(branch.aggregation.sum(-1), torch.ones(branch.aggregation.shape[:-1]))
        close(branch.residual.sum(-1), torch.ones(branch.residual.shape[:-1]))
    assert (seen.word_scores is not None) == (recipe.dense == "matched")
    close(seen.scores, seen.patch_scores + (0 if seen.word_scores is None else seen.word_scores))


def test_the_plain_call_returns_a_matrix_in_training_too():
    images, texts, dense = make_case(paper())
    assert isinstance(make_head(paper()).train()(images, texts, dense), torch.Tensor)


# Invariances


@names
@few
@given(st.integers(0, 3), st.integers(0, 3), st.integers(0, 3), st.sampled_from([0.0, NAN, 1e6]))
def test_padding_changes_nothing_whatever_it_holds(name, patches, words, dense_words, filling):
    recipe = RECIPES[name]
    images, texts, dense = make_case(recipe)
    head = make_head(recipe)
    plain = head(images, texts, dense)

    def pad(tokens, count):
        if tokens is None:
            return None
        mask = torch.arange(tokens.features.shape[1] + count) < tokens.lengths.unsqueeze(1)
        features = torch.nn.functional.pad(tokens.features, (0, 0, 0, count))
        return Tokens(features.masked_fill(~mask.unsqueeze(-1), filling), mask, tokens.cls)

    close(head(pad(images, patches), pad(texts, words), pad(dense, dense_words)), plain)


@names
def test_padding_that_is_not_a_number_stays_out_of_the_gradient(name):
    recipe = RECIPES[name]
    images, texts, dense = make_case(recipe)
    images = Tokens.padded(images.features.clone(), [16, 12, 9, 1])
    leaves = []
    for tokens in (images, texts, dense):
        if tokens is not None:
            tokens.features[~tokens.mask] = NAN
            leaves.append((tokens, tokens.features.requires_grad_()))
    head = make_head(recipe).train()
    head(images, texts, dense).sum().backward()
    for tokens, leaf in leaves:
        if leaf.grad is not None:
            assert torch.isfinite(leaf.grad).all()
            assert not leaf.grad[~tokens.mask].any()
    assert all(torch.isfinite(each.grad).all() for each in head.parameters() if each.grad is not None)


@names
@few
@given(
    count=st.integers(1, 4),
    patches=st.integers(1, 24),
    channels=st.integers(5, 40),
    cls=st.booleans(),
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    keep_ratio=st.floats(0.02, 1.0),
    top_k=st.integers(1, 9),
    size=st.sampled_from([1e-3, 1.0, 1e3]),
    seed=st.integers(0, 2**16),
)
def test_scores_of_any_shape_depend_on_no_order_and_no_block(
    name, count, patches, channels, cls, lengths, keep_ratio, top_k, size, seed
):
    torch.manual_seed(seed)
    recipe = replace(RECIPES[name], keep_ratio=keep_ratio, top_k=top_k)
    images = make_images(count, patches, channels, cls)
    images = Tokens(size * images.features, cls=images.cls)
    texts = make_words(lengths, channels)
    dense = make_dense(recipe, count, len(lengths), channels)
    head = make_head(recipe, patches, channels)
    scores = head(images, texts, dense)
    assert torch.isfinite(scores).all()
    close(head.inspect(images, texts, dense).scores, scores, 1e-4)
    close(head(images, texts, dense, budget=1), scores, 1e-4)
    order, words = torch.randperm(patches), torch.randperm(max(lengths))
    images = Tokens(images.features[:, order], cls=images.cls)
    texts = Tokens(texts.features[:, words], texts.mask[:, words])
    close(head(images, texts, dense), scores, 1e-4)


@names
@few
@given(seed=st.integers(0, 2**16))
def test_the_order_of_patches_does_not_matter(name, seed):
    torch.manual_seed(seed)
    recipe = RECIPES[name]
    images, texts, dense = make_case(recipe)
    order = torch.randperm(16)
    head = make_head(recipe)
    shuffled = Tokens(images.features[:, order], cls=images.cls)
    close(head(shuffled, texts, dense), head(images, texts, dense), 1e-4)


@names
@few
@given(st.integers(0, 4), st.integers(0, 5))
def test_a_batch_may_be_split_anywhere(name, image, text):
    recipe = RECIPES[name]
    images, texts, dense = make_case(recipe)
    head = make_head(recipe)
    of_images = recipe.dense_side == "image"

    def score(rows, columns):
        some = None if dense is None else dense[rows if of_images else columns]
        return head(images[rows], texts[columns], some)

    whole = head(images, texts, dense)
    for rows in (slice(0, image), slice(image, 4)):
        for columns in (slice(0, text), slice(text, 5)):
            if whole[rows, columns].numel():
                close(score(rows, columns), whole[rows, columns])


@names
def test_images_without_a_mask_equal_images_whose_every_patch_is_real(name):
    recipe = RECIPES[name]
    images, texts, dense = make_case(recipe)
    head = make_head(recipe)
    masked = Tokens(images.features, torch.ones(4, 16).bool(), images.cls)
    close(head(masked, texts, dense), head(images, texts, dense))


@names
def test_the_length_of_a_vector_does_not_matter_but_to_the_learned_score(name):
    recipe = RECIPES[name]
    images, texts, dense = make_case(recipe)
    head = make_head(recipe)
    longer = Tokens(3 * texts.features, texts.mask)
    close(head(images, longer, dense), head(images, texts, dense))


# Hard cases


@names
@pytest.mark.parametrize(
    "case",
    [
        "one image",
        "one word",
        "one patch",
        "all kept",
        "identical patches",
        "zeros",
        "opposite",
        "huge",
        "tiny",
    ],
)
def test_hard_cases_stay_finite_in_value_and_gradient(name, case):
    recipe = replace(RECIPES[name], keep_ratio=1.0) if case == "all kept" else RECIPES[name]
    images, texts, dense = make_case(recipe, patches=1 if case == "one patch" else 16)
    if case == "one image":
        images = images[:1]
        dense = dense[:1] if dense is not None and recipe.dense_side == "image" else dense
    elif case == "one word":
        texts = make_words([1] * 5)
        dense = None if dense is None else make_words([1] * len(dense))
    elif case == "identical patches":
        images = Tokens(images.features[:, :1].expand(-1, 16, -1).contiguous(), cls=images.cls)
    elif case in ("zeros", "huge", "tiny"):
        factor = {"zeros": 0.0, "huge": 1e15, "tiny": 1e-15}[case]
        images = Tokens(images.features * factor, cls=images.cls * factor)
        texts = Tokens(texts.features * factor, texts.mask)
        dense = None if dense is None else Tokens(dense.features * factor, dense.mask)
    elif case == "opposite":
        texts = Tokens(-images.features[:, :1].expand(4, 3, -1).contiguous())
        dense = make_dense(recipe, 4, 4)
    for tokens in (images, texts):
        tokens.features.requires_grad_()
    head = make_head(recipe, images.features.shape[1])
    assert torch.isfinite(head(images, texts, dense)).all()
    head.train()(images, texts, dense).sum().backward()
    leaves = [images.features, texts.features, *head.parameters()]
    assert all(torch.isfinite(leaf.grad).all() for leaf in leaves if leaf.grad is not None)


@names
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_in_scores_in_full_precision_out(name, dtype):
    recipe = RECIPES[name]
    images, texts, dense = make_case(recipe)
    images, texts = images.to(dtype), texts.to(dtype)
    dense = None if dense is None else dense.to(dtype)
    head = make_head(recipe)
    scores = head(images, texts, dense)
    assert scores.dtype == torch.float32
    wide = [None if each is None else each.to(torch.float32) for each in (images, texts, dense)]
    close(scores, head(*wide))
    # A head in half precision keeps selection and scores in full; its networks alone are coarse.
    coarse = copy.deepcopy(head).to(dtype)
    assert torch.isfinite(coarse(images, texts, dense)).all()
    coarse.train()(images, texts, dense).sum().backward()
    assert all(torch.isfinite(each.grad).all() for each in coarse.parameters() if each.grad is not None)


@names
def test_autocast_changes_nothing(name):
    recipe = RECIPES[name]
    images, texts, dense = make_case(recipe)
    head = make_head(recipe)
    with torch.autocast("cpu", torch.bfloat16):
        inside = head(images, texts, dense)
    close(inside, head(images, texts, dense))


# Gradients to the patches


def patch_gradients(recipe):
    """Gradient of the hinge with respect to the patches, and which patches any text keeps."""
    images, texts, dense = make_case(recipe)
    images.features.requires_grad_()
    images.cls.requires_grad_()
    texts = texts[:4]
    if dense is not None:
        dense = dense[:4]
    head = make_head(replace(recipe, description_dropout=0.0)).train()
    seen = head.inspect(images, texts, dense)
    kept = torch.stack([branch.kept.any(1) for branch in seen.branches.values()]).any(0)
    hinge(head(images, texts, dense), negatives="all", margin=2.0).backward()
    return images.features.grad, images.cls.grad, kept


def test_released_gives_kept_patches_no_gradient_and_every_other_recipe_gives_every_one():
    for name, recipe in RECIPES.items():
        patches, cls, kept = patch_gradients(recipe)
        assert cls.abs().amax(1).gt(0).all(), name
        if recipe.detach_selection:
            assert patches is None or not patches.any(), name
        else:
            assert patches[kept].abs().amax(1).gt(0).all(), name
    assert {name for name, recipe in RECIPES.items() if recipe.detach_selection} == {
        "released",
        "released, published protocol",
    }


def test_without_a_cls_token_the_released_selection_teaches_the_encoder_nothing():
    images, texts, dense = make_case(released(), cls=False)
    images.features.requires_grad_()
    make_head(released()).train()(images, texts, dense).sum().backward()
    assert images.features.grad is None or not images.features.grad.any()


# Dense text


@pytest.mark.parametrize("name", [name for name, each in RECIPES.items() if each.dense != "none"])
def test_dense_text_touches_the_item_it_hangs_on_and_no_other(name):
    recipe = RECIPES[name]
    images, texts, dense = make_case(recipe)
    head = make_head(recipe)
    before = head(images, texts, dense)
    features = dense.features.clone()
    features[2] = torch.randn_like(features[2])
    moved = (head(images, texts, Tokens(features, dense.mask)) - before).abs() > 1e-6
    if recipe.dense_side == "image":
        assert moved[2].any()
        assert not moved[[0, 1, 3]].any()
    else:
        assert moved[:, 2].any()
        assert not moved[:, [0, 1, 3, 4]].any()


def test_on_the_text_side_the_answer_leaks_and_on_the_image_side_it_cannot():
    """In the published protocol the right image's description is part of the query, whatever the caption."""
    channels, count = 32, 24
    torch.manual_seed(1)
    concepts = torch.randn(count, channels)
    images = Tokens(torch.randn(count, 16, channels) + 0.8 * concepts.unsqueeze(1))
    dense = Tokens(torch.randn(count, 12, channels) + 3 * concepts.unsqueeze(1))
    captions = make_words([6] * count)  # they say nothing of the images

    def hits(side):
        head = SlimHead(released(dense_side=side), 16, channels).eval()
        return (head(images, captions, dense).argmax(0) == torch.arange(count)).float().mean()

    assert hits("text") > 0.9
    assert hits("image") < 0.3


def described_batch(seed, images=24, captions=24):
    """Patches, captions and descriptions that share a concept each."""
    torch.manual_seed(seed)
    concepts = torch.randn(images, 32)
    patches = Tokens(torch.randn(images, 16, 32) + concepts.unsqueeze(1))
    words = Tokens(torch.randn(captions, 8, 32) + concepts[:captions].unsqueeze(1))
    return patches, words, Tokens(torch.randn(images, 20, 32) + concepts.unsqueeze(1))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("tokens", ["words", "slimmed"])
def test_an_image_without_a_description_ranks_fairly_from_the_start(seed, tokens):
    images, texts, dense = described_batch(seed)
    head = SlimHead(described(description_tokens=tokens, description_length=20), 16, 32).eval()
    absent = torch.rand(len(images)) < 0.5
    with torch.no_grad():
        whole = head(images, texts, dense)
        mixed = head(images, texts, dense.without(absent))
    close(mixed[~absent], whole[~absent])
    drift = (mixed[absent].mean() - whole[absent].mean()).abs()
    assert drift < whole.std()


def test_training_with_dropped_descriptions_closes_the_gap():
    head = SlimHead(described(), 16, 32)
    with torch.no_grad():  # a description's term that lies far from where its stand-in starts
        head.description.aligner.relevance[-1].bias += 1.5

    def fairness():
        """How far scores move where descriptions go, in spreads; how many of those images are found."""
        images, texts, dense = described_batch(100)
        absent = torch.arange(len(images)) % 2 == 0
        head.eval()
        with torch.no_grad():
            whole, mixed = head(images, texts, dense), head(images, texts, dense.without(absent))
        drift = (mixed[absent].mean() - whole[absent].mean()).abs() / whole.std()
        return drift, (mixed.argmax(0) == torch.arange(len(images)))[absent].float().mean()

    drift, found = fairness()
    assert drift > 4
    assert found < 0.2
    optimiser = torch.optim.Adam(head.parameters(), lr=0.01)
    for step in range(40):
        scores = head.train()(*described_batch(step, 16, 16))
        optimiser.zero_grad()
        hinge(scores).backward()
        optimiser.step()
    drift, found = fairness()
    assert drift < 1
    assert found > 0.9


@pytest.mark.parametrize(
    "name", ["paper", "paper, one network", "released", "described", "described, slimmed"]
)
@pytest.mark.parametrize("guided", [False, True])
def test_an_image_whose_description_is_empty_equals_one_without_any(name, guided):
    recipe = RECIPES[name]
    images, texts, dense = make_case(recipe)
    head = make_head(recipe)
    guides = {"sound": torch.randn(4, 32)} if guided else None
    empty = head(images, texts, dense.without(torch.tensor([False, True, False, True])), guides)
    none = head(images, texts, None, guides)
    whole = head(images, texts, dense, guides)
    close(empty[[1, 3]], none[[1, 3]])
    close(empty[[0, 2]], whole[[0, 2]])
    close(head(images, texts, dense.without(torch.ones(4).bool()), guides), none)
    assert (whole - none).abs().min() > 1e-6


def test_descriptions_are_dropped_in_training_alone():
    images, texts, dense = make_case(described())
    head = make_head(described(description_dropout=0.5))
    close(head(images, texts, dense), head(images, texts, dense))
    head.train()
    drawn = torch.stack([head(images, texts, dense) for _ in range(12)])
    without, whole = head.eval()(images, texts), head(images, texts, dense)
    dropped = (drawn - without).abs().amax(2) < 1e-5
    kept = (drawn - whole).abs().amax(2) < 1e-5
    assert (dropped ^ kept).all()
    assert 0.2 < dropped.float().mean() < 0.8


def test_the_weight_of_the_description_starts_at_one_and_stays_above_zero():
    description = SlimHead(described(), 16, 32).description
    assert description.weight.item() == pytest.approx(1)
    with torch.no_grad():
        description.raw_weight.fill_(-20.0)
    assert description.weight > 0


def test_the_matched_score_is_the_patches_plus_the_weighted_words():
    images, texts, dense = make_case(described())
    head = make_head(described())
    seen = head.inspect(images, texts, dense)
    words, own = texts.features[1][texts.mask[1]], dense.features[3][dense.mask[3]]
    met = head.description.aligner(words, own, None)
    close(seen.word_scores[3, 1], head.description.weight * met)


# Further guides


@names
def test_a_further_guide_moves_its_image_alone(name):
    recipe = RECIPES[name]
    images, texts, dense = make_case(recipe)
    head = make_head(recipe)
    sound = torch.randn(4, 32)
    before = head.inspect(images, texts, dense, {"sound": sound})
    sound = sound.clone()
    sound[1] = torch.randn(32)
    after = head.inspect(images, texts, dense, {"sound": sound})
    for branch, other in zip(before.branches.values(), after.branches.values(), strict=True):
        moved = (branch.saliency - other.saliency).abs().amax((1, 2)) > 1e-6
        assert moved.tolist() == [False, True, False, False]
    close(head(images, texts, dense, {"sound": sound}), after.scores)
    assert not torch.allclose(head(images, texts, dense), after.scores)


# Bad input


def given_to(head, images=None, texts=None, dense=None, guides=None):
    return refusal(
        lambda: head(
            make_images() if images is None else images,
            make_words() if texts is None else texts,
            dense,
            guides,
        )
    )


def test_what_does_not_fit_is_refused_with_a_sentence():
    head, described_head = make_head(paper()), make_head(described())
    broken = make_images()
    broken.features[2, 3, 4] = NAN
    assert given_to(head, broken) == "images: expected finite features, found NaN or infinity in item 2"
    assert given_to(head, Tokens(make_images().features, cls=torch.full((4, 32), NAN))) == (
        "images: expected finite features, found NaN or infinity in item 0"
    )
    words = make_words()
    words.features[1, 0] = float("inf")
    assert given_to(head, texts=words) == "texts: expected finite features, found NaN or infinity in item 1"
    dense = make_words([3] * 4)
    dense.features[3, 0] = NAN
    assert given_to(head, dense=dense) == "dense: expected finite features, found NaN or infinity in item 3"
    assert given_to(head, make_images(channels=16)) == "images: expected 32 channels, found 16"
    assert given_to(head, texts=make_words(channels=8)) == "texts: expected 32 channels, found 8"
    assert given_to(head, dense=make_words([3] * 4, 8)) == "dense: expected 32 channels, found 8"
    assert given_to(head, texts=make_words([3, 0, 2])) == (
        "texts: expected at least one real token each, found none in item 1"
    )
    assert given_to(head, Tokens.padded(make_images().features, [4, 4, 4, 0])) == (
        "images: expected at least one real token each, found none in item 3"
    )
    assert given_to(head, dense=make_words()) == "dense: expected one for each of the 4 images, found 5"
    assert given_to(make_head(paper(dense_side="text")), dense=make_words([3] * 4)) == (
        "dense: expected one for each of the 5 texts, found 4"
    )
    assert given_to(make_head(laps()), dense=make_words([3] * 4)) == (
        "dense: expected none, since the recipe has dense='none', found dense text"
    )
    assert given_to(described_head, guides={"sound": torch.zeros(4, 8)}) == (
        "guides['sound']: expected shape (4, 32), found shape (4, 8)"
    )
    assert given_to(described_head, guides={"sound": torch.full((4, 32), NAN)}) == (
        "guides['sound']: expected finite numbers, found NaN or infinity"
    )
    assert given_to(described_head, guides={"sound": [0.0] * 32}) == (
        "guides['sound']: expected shape (4, 32), found list"
    )
    assert given_to(described_head, guides=torch.zeros(4, 32)) == (
        "guides: expected vectors by name, found shape (4, 32)"
    )


def test_guides_that_would_turn_the_learned_score_are_refused():
    head, images, words = make_head(paper(dense="none")), make_images(), make_words()
    guides = {str(number): torch.randn(4, 32) for number in range(4)}
    sentence = "mixing: expected at most 0.2 with 5 guides, so that the learned score keeps its sign (eq. 3)"
    for score in (head, head.inspect):
        assert refusal(lambda score=score: score(images, words, None, guides)).startswith(sentence)
    three = dict(list(guides.items())[:3])
    close(head(images, words, None, three), head.inspect(images, words, None, three).scores)
    make_head(laps())(images, words, None, guides)  # raw cosines add up, however many


@pytest.mark.parametrize("name", ["images", "texts", "dense"])
def test_a_bare_tensor_is_no_token_set(name):
    head = make_head(paper())
    bare = {name: torch.randn(4, 6, 32)}
    assert given_to(head, **bare) == f"{name}: expected Tokens, found shape (4, 6, 32)"
    given = {"images": make_images(), "texts": make_words()} | bare
    assert refusal(lambda: head.inspect(**given)) == f"{name}: expected Tokens, found shape (4, 6, 32)"


# Life of the module


@names
def test_a_head_survives_copying_pickling_and_its_state_dict(name):
    recipe = RECIPES[name]
    images, texts, dense = make_case(recipe)
    head = make_head(recipe)
    scores = head(images, texts, dense)
    twins = [copy.deepcopy(head), pickle.loads(pickle.dumps(head))]
    for assign in (False, True):
        fresh = SlimHead(recipe, 16, 32).eval()
        fresh.load_state_dict(head.state_dict(), assign=assign)
        twins.append(fresh)
    for twin in twins:
        close(twin(images, texts, dense), scores)
    with torch.no_grad():
        for parameter in twins[0].parameters():
            parameter.add_(1.0)
    close(head(images, texts, dense), scores)


@names
def test_double_precision_all_the_way(name):
    recipe = RECIPES[name]
    images, texts, dense = make_case(recipe)
    head = make_head(recipe)
    wide = [None if each is None else each.to(torch.float64) for each in (images, texts, dense)]
    scores = copy.deepcopy(head).to(torch.float64)(*wide)
    assert scores.dtype == torch.float64
    close(scores.float(), head(images, texts, dense))


def test_unit_tokens_of_a_cls_stay_the_cls():
    images, texts, dense = make_case(laps())
    tokens = make_head(laps()).inspect(images, texts, dense).tokens["sparse"]
    close(tokens[:, :, 0], unit(images.cls).unsqueeze(1).expand(-1, 5, -1))
