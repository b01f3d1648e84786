"""The engine gives what inspection gives, on both of its paths, however its work is cut."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from seps import Recipe, SlimHead, Tokens, described, laps, paper, released
from seps.pairwise import engine, native, pack, prepare, score, unpack
from seps.pairwise.engine import block_size
from seps.pairwise.native.calls import select_top
from seps.pairwise.texts import TextSide, Words
from seps.slimming import residual_weights, top_mask

RECIPES = {
    "laps": laps(),
    "released": released(),
    "released_text": released(dense_side="text"),
    "branch": released(detach_selection=False),
    "paper": paper(),
    "paper_text": paper(dense_side="text"),
    "single": paper(aggregation="shared"),
    "plain": paper(dense="none"),
    "described": described(),
    "slimmed": described(description_tokens="slimmed", description_length=9),
    "words_only": paper(directions="word_to_patch", pooling="top"),
    "patches_only": paper(directions="patch_to_word", pooling="mean", affinity="leaky_relu"),
}
SELECTIONS = ("topk", "straight_through", "gumbel_topk", "gates", "soft")


def native_exists():
    return native.library() is not None


@pytest.fixture(params=["plain", "compiled"])
def path(request, monkeypatch):
    """Both ways to compute, where there is a compiler."""
    if request.param == "plain":
        monkeypatch.setenv("SEPS_NATIVE", "off")
    elif not native_exists():
        pytest.skip("no compiler here")
    return request.param


def make(recipe: Recipe, images=4, texts=5, patches=20, channels=16, ragged=True, cls=True, seed=0):
    """A head with moved weights, images with masks, texts of several lengths, a missing description."""
    torch.manual_seed(seed)
    head = SlimHead(recipe, patches, channels)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        for gate in head.slimmer.gates.values():
            gate.threshold.sub_(0.4)  # several patches stay: tokens of one patch would tie
    features = torch.randn(images, patches, channels) + 0.3
    real = Tokens.padded(features, torch.randint(patches // 2, patches + 1, (images,))).mask
    given = {
        "images": Tokens(features, real if ragged else None, torch.randn(images, channels) if cls else None),
        "texts": Tokens.padded(torch.randn(texts, 7, channels), torch.randint(1, 8, (texts,))),
    }
    if recipe.dense != "none":
        count = images if recipe.dense_side == "image" else texts
        lengths = torch.randint(1, 10, (count,))
        lengths[1] = 0
        given["dense"] = Tokens.padded(torch.randn(count, 9, channels), lengths)
    return head, given


def leaves_of(head, given):
    """Everything that receives a gradient, by name."""
    tensors = {f"{name}.features": tokens.features for name, tokens in given.items()}
    if given["images"].cls is not None:
        tensors["images.cls"] = given["images"].cls
    return {
        **{name: tensor.requires_grad_() for name, tensor in tensors.items()},
        **dict(head.named_parameters()),
    }


def run(method, head, given):
    """Scores and gradients of a method, with the same random numbers for every method."""
    leaves = leaves_of(head, given)
    for leaf in leaves.values():
        leaf.grad = None
    torch.manual_seed(3)
    scores = method(**given)
    upstream = torch.randn(scores.shape, generator=torch.Generator().manual_seed(4), dtype=scores.dtype)
    (scores * upstream).sum().backward()
    return scores.detach(), {
        name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad.clone()
        for name, leaf in leaves.items()
    }


def assert_equal_runs(one, other, tolerance=1e-5):
    (expected, gradients), (found, others) = one, other
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance * float(expected.abs().max()))
    largest = max(float(gradient.abs().max()) for gradient in gradients.values())
    for name, gradient in gradients.items():
        # A sum over all pairs that cancels cannot be known better than its terms.
        scale = max(float(gradient.abs().max()), 0.1 * largest)
        assert float((others[name] - gradient).abs().max()) <= tolerance * scale, name


@pytest.mark.parametrize(
    ("name", "mode"),
    [(n, m) for n, m in product(RECIPES, SELECTIONS) if m == "topk" or not RECIPES[n].detach_selection],
)
def test_values_and_gradients_are_those_of_inspection(path, name, mode):
    head, given = make(replace(RECIPES[name], selection=mode), cls=name != "paper")
    head.train()
    assert_equal_runs(run(lambda **g: head.inspect(**g).scores, head, given), run(head, head, given))


@pytest.mark.parametrize("name", RECIPES)
def test_evaluation_is_inspection(path, name):
    head, given = make(RECIPES[name], cls=name != "laps", ragged=name != "plain")
    head.eval()
    with torch.no_grad():
        expected = head.inspect(**given).scores
        torch.testing.assert_close(head(**given), expected, rtol=1e-5, atol=1e-5)
        given.pop("dense", None)
        torch.testing.assert_close(head(**given), head.inspect(**given).scores, rtol=1e-5, atol=1e-5)


def test_double_precision_agrees_to_its_own_rounding():
    head, given = make(RECIPES["paper"])
    head.double().train()
    given = {name: tokens.to(torch.float64) for name, tokens in given.items()}
    assert_equal_runs(run(lambda **g: head.inspect(**g).scores, head, given), run(head, head, given), 1e-11)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_head_in_half_precision_scores_nearly_alike(path, dtype):
    """The kernel reads fp32 numbers, whatever the head's own networks are kept in."""
    head, given = make(RECIPES["paper"])
    head.to(dtype).train()
    scores, gradients = run(head, head, given)
    expected, others = run(lambda **g: head.inspect(**g).scores, head, given)
    torch.testing.assert_close(scores, expected, rtol=0.02, atol=0.02)
    for name, gradient in others.items():
        assert float((gradients[name] - gradient).abs().max()) < 0.05 * float(gradient.abs().max() + 1), name


def test_further_guides_take_part(path):
    head, given = make(RECIPES["paper"])
    guides = {"sound": torch.randn(4, 16), "near": torch.randn(4, 16)}
    with torch.no_grad():
        expected = head.inspect(**given, guides=guides).scores
        torch.testing.assert_close(head(**given, guides=guides), expected, rtol=1e-5, atol=1e-5)
        assert not torch.allclose(head(**given), expected, atol=1e-4)


@pytest.mark.parametrize("name", ["paper_text", "released_text"])
def test_texts_of_which_none_has_dense_text(path, name):
    """Small blocks leave some with nothing but texts that lack it."""
    head, given = make(RECIPES[name])
    given["dense"] = given["dense"].without(torch.tensor([True, True, True, False, True]))
    assert_equal_runs(run(lambda **g: head.inspect(**g).scores, head, given), run(head, head, given))
    found = run(lambda **g: head(**g, budget=1), head, given)
    assert_equal_runs(run(lambda **g: head.inspect(**g).scores, head, given), found)


def test_a_word_said_twice_shares_its_gradient():
    """The compiled backward pass splits a maximum that several words reach, as torch does."""
    if not native_exists():
        pytest.skip("no compiler here")
    head, given = make(replace(RECIPES["plain"], directions="patch_to_word", pooling="mean"))
    features = given["texts"].features
    features[:, 1] = features[:, 0]
    given["texts"] = Tokens.padded(features, [2] * 5)
    words = features.requires_grad_()
    head(**given).sum().backward()
    assert float(words.grad[:, 0].abs().max()) > 0
    torch.testing.assert_close(words.grad[:, 0], words.grad[:, 1])


@pytest.mark.parametrize("frozen", ["images", "texts"])
def test_what_has_no_gradient_leaves_the_others_theirs(path, frozen):
    head, given = make(RECIPES["paper"])

    def gradients(method):
        leaves = {name: tokens.features for name, tokens in given.items() if name != frozen}
        for leaf in leaves.values():
            leaf.requires_grad_().grad = None
        head.zero_grad()
        method(**given).square().sum().backward()
        parameters = {name: each.grad for name, each in head.named_parameters() if each.grad is not None}
        return {**{name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}, **parameters}

    expected, found = gradients(lambda **g: head.inspect(**g).scores), gradients(head)
    assert_equal_runs((torch.ones(()), expected), (torch.ones(()), found))


@pytest.mark.parametrize("mode", ["gumbel_topk", "gates"])
def test_the_budget_changes_nothing_but_the_blocks(path, mode):
    head, given = make(replace(RECIPES["described"], selection=mode), texts=9)
    head.train()
    whole = run(lambda **g: head(**g, budget=2**30), head, given)
    assert_equal_runs(whole, run(lambda **g: head(**g, budget=1), head, given))


def test_blocks_fit_the_budget_and_cover_something(path):
    head, given = make(RECIPES["paper"], images=12, texts=40)
    prepared, texts = prepare(head, given["images"], given["dense"]), TextSide.of(given["texts"])
    sizes = [block_size(head, prepared, texts, budget, "fp32") for budget in (1, 2**16, 2**20, 2**34)]
    areas = [height * width for height, width in sizes]
    assert areas[0] == 1
    assert areas == sorted(areas)
    assert sizes[-1] == (12, 40)


def test_a_budget_is_a_positive_number_of_bytes():
    head, given = make(RECIPES["laps"])
    with pytest.raises(ValueError, match="budget: expected a positive number of bytes, found 0"):
        head(**given, budget=0)


def test_precision_is_one_of_two():
    head, given = make(RECIPES["laps"])
    with pytest.raises(ValueError, match="precision: expected one of fp32, bf16, found 'fp8'"):
        head(**given, precision="fp8")


def test_bf16_selects_alike_and_scores_nearly_alike(path):
    head, given = make(RECIPES["paper"], channels=64, texts=64)
    with torch.no_grad():
        exact, rounded = head(**given), head(**given, precision="bf16")
    assert 0 < float((exact - rounded).abs().max()) < 0.02


@pytest.mark.parametrize("name", ["released", "paper", "described"])
def test_shares_are_the_means_of_the_decisions_with_their_gradient(path, name):
    mode = "topk" if name == "released" else "gates"
    head, given = make(replace(RECIPES[name], selection=mode, description_dropout=0.0))
    head.train()

    def shares_and_gates(shares):
        total = sum(share * factor for share, factor in zip(shares, (1.0, 3.0), strict=False))
        gates = list(head.slimmer.gates.parameters())
        return shares, torch.autograd.grad(total, gates) if gates else ()

    torch.manual_seed(5)
    expected, slopes = shares_and_gates([each.mean() for each in head.inspect(**given).decisions])
    torch.manual_seed(5)
    scores, shares = head.scores_and_shares(**given, budget=2**16)
    found, others = shares_and_gates(shares)
    assert scores.shape == (4, 5)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(others, slopes, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["laps", "released", "paper", "paper_text", "described", "slimmed"])
def test_a_prepared_side_scores_alike_in_any_slicing(path, name):
    head, given = make(RECIPES[name])
    head.eval()
    of_images = given.get("dense") if RECIPES[name].dense_side == "image" else None
    of_texts = given.get("dense") if of_images is None else None
    with torch.no_grad():
        prepared = prepare(head, given["images"], of_images)
        expected = head(**given)
        torch.testing.assert_close(score(head, prepared, given["texts"], of_texts), expected)
        turned = prepared[torch.tensor([3, 1])]
        joined = type(prepared).join([turned, prepared[slice(0, 1)]])
        torch.testing.assert_close(score(head, joined, given["texts"], of_texts), expected[[3, 1, 0]])


@pytest.mark.parametrize("name", ["laps", "released", "paper", "described"])
@pytest.mark.parametrize(("form", "tolerance"), [("fp32", 1e-6), ("fp16", 5e-3), ("int8", 5e-2)])
def test_a_packed_image_ranks_again(path, name, form, tolerance):
    head, given = make(RECIPES[name], channels=32)
    head.eval()
    with torch.no_grad():
        prepared = prepare(head, given["images"], given.get("dense"))
        packed = pack(prepared, form)
        again = score(head, unpack(packed), given["texts"])
        expected = head(**given)
        # A rounded feature may swap two patches at the threshold, so the mean is held, not the worst.
        assert float((again - expected).abs().mean()) <= tolerance * float(expected.abs().mean())
        if form == "fp32":
            torch.testing.assert_close(again, expected, rtol=1e-5, atol=1e-5)
            one = score(head, unpack([packed[2]]), given["texts"])
            torch.testing.assert_close(one, expected[[2]], rtol=1e-5, atol=1e-5)


def test_packed_forms_are_smaller_in_their_order():
    head, given = make(laps(), patches=64, channels=64)
    prepared = prepare(head, given["images"])
    sizes = [sum(map(len, pack(prepared, form))) for form in ("fp32", "fp16", "int8")]
    assert sizes == sorted(sizes, reverse=True)
    with pytest.raises(ValueError, match="form: expected one of fp32, fp16, int8, found 'fp4'"):
        pack(prepared, "fp4")


def test_described_and_undescribed_images_unpack_together(path):
    head, given = make(RECIPES["described"])
    head.eval()
    with torch.no_grad():
        plain = prepare(head, given["images"])
        told = prepare(head, given["images"], given["dense"])
        # The branches of a recipe differ with and without description only where aggregation is dual.
        if set(plain.branches) == set(told.branches):
            mixed = unpack([pack(told, "fp32")[0], pack(plain, "fp32")[2]])
            expected = torch.cat([head(**given)[:1], head(given["images"], given["texts"])[2:3]])
            torch.testing.assert_close(score(head, mixed, given["texts"]), expected, rtol=1e-5, atol=1e-5)


def test_words_pack_without_padding_and_come_back():
    texts = Tokens(torch.randn(3, 4, 8), torch.tensor([[1, 0, 1, 0], [1, 1, 1, 1], [0, 0, 0, 1]]).bool())
    words = Words.pack(texts)
    assert words.features.shape == (7, 8)
    assert words.lengths == (2, 4, 1)
    padded = words.pad(torch.arange(7.0))
    assert padded.tolist() == [[0, 1, 0, 0], [2, 3, 4, 5], [6, 0, 0, 0]]
    assert [len(block) for block in words.split(2)] == [2, 1]


@pytest.mark.parametrize("patches", [1, 15, 16, 17, 196])
def test_the_compiled_selection_is_the_plain_one_ties_included(patches):
    library = native.library()
    if library is None:
        pytest.skip("no compiler here")
    saliency = torch.randn(3, 7, patches).mul(3).round().div(3)  # many ties, zeros of both signs
    mask = torch.rand(3, patches) < 0.8
    mask[:, 0] = True
    keep = (mask.sum(1) + 1) // 2
    decision, residual = select_top(library, saliency, keep, mask, True)
    expected = top_mask(saliency.masked_fill(~mask.unsqueeze(1), -torch.inf), keep)
    assert torch.equal(decision, expected)
    torch.testing.assert_close(residual, residual_weights(saliency, expected, mask))


def test_kept_patches_far_below_a_dropped_one_still_make_tokens(path):
    """The aggregation's exponentials would vanish if they were measured by the dropped patch."""
    head, given = make(laps(), ragged=False)
    with torch.no_grad():
        head.slimmer.scale.fill_(400.0)
        expected = head.inspect(**given).scores
        torch.testing.assert_close(head(**given), expected, rtol=1e-4, atol=1e-4)


def test_autocast_leaves_scores_alone(path):
    head, given = make(RECIPES["paper"])
    expected = head(**given)
    with torch.autocast("cpu", torch.bfloat16):
        found = head(**given)
        found.sum().backward()
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected)


def test_data_parallel_training_gives_every_parameter_its_gradient(path, tmp_path):
    head, given = make(RECIPES["paper"])
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'meet'}", rank=0, world_size=1
    )
    try:
        expected = run(head, head, given)
        wrapped = DistributedDataParallel(head)
        found = run(wrapped, head, given)
        assert_equal_runs(expected, found)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("name", ["plain", "described"])
@pytest.mark.filterwarnings("ignore:.*:UserWarning")
def test_a_compiled_model_may_hold_the_head(path, name):
    head, given = make(replace(RECIPES[name], description_dropout=0.0))
    head.train()
    compiled = torch.compile(head, backend="aot_eager")
    assert_equal_runs(run(head, head, given), run(compiled, head, given))


def test_training_remembers_inputs_not_pairs(path):
    """What autograd keeps does not grow with the number of pairs, but for the scores themselves."""

    def kept(texts):
        head, given = make(RECIPES["laps"], texts=texts)
        head.train()
        given["images"].features.requires_grad_()
        sizes: dict[int, int] = {}

        def note(tensor):
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            scores = head(**given)
        return sum(sizes.values()), scores

    (few, _), (many, _) = kept(8), kept(64)
    words = 64 * 7 * 16 * 4
    assert many - few < 8 * words


def test_tokens_are_built_or_not_and_score_alike(monkeypatch):
    """The kernel has two ways to the same cosines; the numbers of texts and words say which is cheaper."""
    if not native_exists():
        pytest.skip("no compiler here")
    head, given = make(RECIPES["paper"])
    head.eval()
    with torch.no_grad():
        expected = head.inspect(**given).scores
        for ways in (lambda *_: None, lambda _, images, *__: images.values @ images.values.transpose(1, 2)):
            monkeypatch.setattr(engine, "gram_of", ways)
            torch.testing.assert_close(head(**given), expected, rtol=1e-5, atol=1e-5)


def test_few_texts_have_the_tokens_built_and_many_share_a_gram_matrix(path):
    head, given = make(laps(), images=2, texts=64, patches=64, channels=64)
    head.eval()
    prepared = prepare(head, given["images"])
    with torch.no_grad():
        many, one = (TextSide.of(given["texts"][slice(0, count)]) for count in (64, 1))
        assert engine.gram_of(head, prepared, many, "fp32").shape == (2, 64, 64)
        assert (engine.gram_of(head, prepared, one, "fp32") is None) == (path == "compiled")
