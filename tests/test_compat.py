"""The ancestors' names, called as their documents call them."""

import copy
import math
import pickle
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from making import refusal
from seps import SlimHead, Tokens, laps, paper, released
from seps.compat import (
    HRPA,
    SDTPS,
    ContrastiveLoss,
    CrossSparseAggrNet,
    CrossSparseAggrNet_v2,
    DualTokenAggregation,
    HRPA_function,
    MultiModalSDTPS,
    RatioLoss,
    SDTPS_TokenAggregation,
    SDTPS_TokenSparse,
    SEPSLoss,
    TokenAggregation,
    TokenSparse,
    create_seps_model,
    import_state_dict,
    mask_xattn_one_text,
)
from seps.modalities import RGB_NIR_TIR, MultiModalSlimmer, reidentification

SIZES = {"embed_size": 32, "num_patches": 16, "sparse_ratio": 0.5, "aggr_ratio": 0.4}
MODULES = {
    "plain": lambda: CrossSparseAggrNet(**SIZES),
    "paper": lambda: CrossSparseAggrNet(**SIZES, use_paper_version=True),
    "paper, one network": lambda: CrossSparseAggrNet(**SIZES, use_paper_version=True, use_dual_aggr=False),
    "paper, gumbel": lambda: CrossSparseAggrNet(
        **SIZES, use_paper_version=True, use_gumbel_softmax=True, gumbel_tau=0.5, beta=0.2, top_k=3
    ),
    "released": lambda: CrossSparseAggrNet_v2(SimpleNamespace(**SIZES, margin=0.2)),
}
modules = pytest.mark.parametrize("name", MODULES)


def pair_arguments(dense=True):
    images = torch.randn(4, 17, 32)
    captions, lengths = torch.randn(5, 9, 32), torch.tensor([3, 9, 1, 7, 5])
    if not dense:
        return images, captions, lengths
    return images, captions, lengths, torch.randn(5, 14, 32), torch.tensor([14, 6, 8, 1, 9])


def modality_arguments(count=3):
    return [torch.randn(count, 16, 32) for _ in range(3)] + [torch.randn(count, 32) for _ in range(3)]


def close(found, expected, tolerance=1e-6):
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


# The whole


@modules
@pytest.mark.parametrize("dense", [False, True])
def test_a_similarity_in_evaluation_and_masks_beside_it_in_training(name, dense):
    module, arguments = MODULES[name](), pair_arguments(dense)
    similarity = module.eval()(*arguments)
    assert similarity.shape == (4, 5)
    trained, masks = module.train()(*arguments)
    close(trained, similarity)
    assert masks is not None
    several = isinstance(masks, tuple)
    assert several == name.startswith("paper")
    count = 2 if dense and name in ("paper", "paper, gumbel") else 1
    assert len(masks) == count if several else masks.shape == (5, 4, 16)
    for mask in masks if several else [masks]:
        assert mask.shape == (5, 4, 16)
        branches = 2 if dense and not several else 1
        assert mask.sum(-1).eq(8 * branches).all()


@modules
def test_lengths_may_come_in_a_list(name):
    images, captions, lengths, dense, dense_lengths = pair_arguments()
    module = MODULES[name]().eval()
    expected = module(images, captions, lengths, dense, dense_lengths)
    assert torch.equal(
        module(
            img_embs=images,
            cap_embs=captions,
            cap_lens=lengths.tolist(),
            long_cap_embs=dense,
            long_cap_lens=tuple(dense_lengths.tolist()),
        ),
        expected,
    )
    assert torch.equal(module(images, captions, lengths.float(), dense, dense_lengths.float()), expected)


@modules
@pytest.mark.parametrize("dense", [False, True])
def test_the_similarity_is_that_of_a_slim_head(name, dense):
    module, arguments = MODULES[name]().eval(), pair_arguments(dense)
    ratios = {"keep_ratio": 0.5, "aggregate_ratio": 0.4}
    recipe = {
        "plain": released(dense_side="text", detach_selection=False, **ratios),
        "paper": paper(dense_side="text", **ratios),
        "paper, one network": paper(dense_side="text", aggregation="shared", **ratios),
        "paper, gumbel": paper(
            dense_side="text", selection="straight_through", temperature=0.5, mixing=0.2, top_k=3, **ratios
        ),
        "released": released(dense_side="text", **ratios) if dense else laps(**ratios),
    }[name]
    head = SlimHead(recipe, 16, 32).eval()
    head.load_state_dict(import_state_dict(module.state_dict()), strict=True)
    images = Tokens(arguments[0][:, 1:], cls=arguments[0][:, 0])
    texts = [Tokens.padded(*pair) for pair in (arguments[1:3], arguments[3:5]) if pair]
    close(head(images, *texts), module(*arguments), 1e-5)


def test_names_of_the_documents():
    assert SDTPS is CrossSparseAggrNet
    assert SDTPS_TokenSparse is TokenSparse
    assert SDTPS_TokenAggregation is TokenAggregation
    assert HRPA_function is mask_xattn_one_text
    model = create_seps_model(
        embed_size=32, num_patches=16, use_paper_version=True, use_gumbel_softmax=True, gumbel_tau=0.7
    )
    assert isinstance(model, CrossSparseAggrNet)
    similarity, masks = model.train()(*pair_arguments())
    assert similarity.shape == (4, 5)
    assert len(masks) == 2
    assert (
        sum(each.numel() for each in create_seps_model(use_paper_version=True, aggr_ratio=0.5).parameters())
        == 248_452
    )
    assert sum(each.numel() for each in create_seps_model(aggr_ratio=0.5).parameters()) == 58_398


def test_released_without_dense_text_is_the_ancestor_and_does_not_detach():
    module = MODULES["released"]().train()
    for dense in (False, True):
        images, *rest = pair_arguments(dense)
        images.requires_grad_()
        module(images, *rest)[0].sum().backward()
        assert images.grad[:, 0].any()
        assert images.grad[:, 1:].any() != dense


def test_the_plain_switch_teaches_captions_and_not_the_dense_words():
    images, captions, lengths, dense, dense_lengths = pair_arguments()
    for leaf in (images, captions, dense):
        leaf.requires_grad_()
    MODULES["plain"]().train()(images, captions, lengths, dense, dense_lengths)[0].sum().backward()
    assert images.grad[:, 1:].any()
    assert captions.grad.any()
    assert dense.grad is None


def test_the_gumbel_switch_changes_the_gradient():
    arguments, gradients = pair_arguments(), []
    for name in ("paper", "paper, gumbel"):
        torch.manual_seed(0)
        module = CrossSparseAggrNet(**SIZES, use_paper_version=True, use_gumbel_softmax="gumbel" in name)
        module.train()(*arguments)[0].square().sum().backward()
        gradients.append(module.sparse_net_cap.score_predictor[0].weight.grad)
    assert not torch.allclose(*gradients, rtol=1e-2)


# Parts


def test_token_sparse_by_hand():
    tokens = torch.eye(4).unsqueeze(0)
    own, text = torch.tensor([[0.1, 0.4, 0.0, 0.2]]), torch.tensor([[0.0, 0.5, 0.9, 0.1]])
    kept, residual, mask = TokenSparse(4, 0.5)(tokens, own, text)
    assert kept[0].tolist() == [
        tokens[0, 1].tolist(),
        tokens[0, 2].tolist(),
    ]  # scores tie at 0.9: earlier first
    assert mask.tolist() == [[0, 1, 1, 0]]
    weights = torch.tensor([0.1, 0.3]).softmax(0)
    close(residual[0, 0], torch.tensor([weights[0], 0, 0, weights[1]]))


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("gumbel", [False, True])
def test_token_sparse_as_the_paper_has_it(dense, gumbel):
    module = TokenSparse(32, 0.6, use_paper_version=True)
    tokens = torch.randn(3, 10, 32)
    signals = [torch.randn(3, 10) for _ in range(2 + dense)]
    kept, residual, mask = module(tokens, *signals, use_gumbel=gumbel)
    assert kept.shape == (3, 6, 32)
    assert residual.shape == (3, 1, 32)

    def scaled(signal):
        low, high = signal.amin(1, keepdim=True), signal.amax(1, keepdim=True)
        return (signal - low) / (high - low + 1e-8)

    predicted = module.score_predictor(tokens).squeeze(-1)
    score = 0.5 * predicted + 0.25 * (sum(map(scaled, signals[1:])) + 2 * scaled(signals[0]))
    index = score.argsort(1, descending=True)
    close(kept, tokens.gather(1, index[:, :6, None].expand(-1, -1, 32)))
    close(mask, torch.zeros(3, 10).scatter(1, index[:, :6], 1.0))
    weights = score.gather(1, index[:, 6:]).softmax(1)
    close(
        residual[:, 0],
        (weights.unsqueeze(2) * tokens.gather(1, index[:, 6:, None].expand(-1, -1, 32))).sum(1),
    )
    (kept.square().sum() + residual.sum()).backward()
    gradient = module.score_predictor[0].weight.grad
    assert torch.isfinite(gradient).all()


def test_the_noise_of_token_sparse_reaches_the_score_through_the_kept_tokens():
    module, gradients = TokenSparse(32, 0.6, use_paper_version=True), []
    tokens, own, text = torch.randn(3, 10, 32), torch.randn(3, 10), torch.randn(3, 10)
    for gumbel in (False, True):
        module.zero_grad()
        kept, _, _ = module(tokens, own, text, use_gumbel=gumbel)
        kept.square().sum().backward() if kept.requires_grad else None
        gradients.append(module.score_predictor[0].weight.grad)
    assert gradients[0] is None
    assert gradients[1].any()


def test_token_sparse_draws_no_number_without_noise():
    arguments = torch.randn(3, 10, 32), torch.randn(3, 10), torch.randn(3, 10)
    before = torch.get_rng_state()
    TokenSparse(32, 0.6).train()(*arguments)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_parts_stay_finite_in_half_precision(dtype):
    tokens, own, text = (torch.randn(shape).to(dtype) for shape in ((64, 40, 32), (64, 40), (64, 40)))
    sparse = TokenSparse(32, 0.5, use_paper_version=True).to(dtype)
    kept, residual, _ = sparse(tokens, own, text, use_gumbel=True)
    slim = TokenAggregation(32, 4).to(dtype)(kept)
    score = HRPA(32, use_paper_version=True).to(dtype)(
        F.normalize(torch.cat([slim, residual], 1), dim=-1), F.normalize(tokens[:, :5], dim=-1)
    )
    assert (kept.dtype, slim.dtype, score.dtype) == (dtype,) * 3
    score.sum().backward()
    assert torch.isfinite(score).all()
    assert all(torch.isfinite(each.grad).all() for each in sparse.parameters())


def test_an_aggregation_of_nothing_is_nothing():
    slim = TokenAggregation(32, 4)(torch.randn(2, 5, 32), torch.tensor([[0.0] * 5, [1.0] * 5]))
    assert not slim[0].any()
    assert slim[1].any()


def test_aggregations_are_convex_and_heed_the_keep_policy():
    tokens, policy = torch.randn(2, 6, 32), torch.tensor([[1, 1, 0, 1, 0, 0], [0, 1, 0, 0, 1, 1.0]])
    module = TokenAggregation(32, 3)
    logits = module.weight(tokens) * module.scale
    close(module(tokens), logits.softmax(1).transpose(1, 2) @ tokens)
    masked = logits.masked_fill(policy.unsqueeze(2) == 0, -math.inf)
    close(module(tokens, policy), masked.softmax(1).transpose(1, 2) @ tokens)
    dual = DualTokenAggregation(32, 3)
    one = TokenAggregation(32, 3)
    one.load_state_dict(
        {"scale": dual.scale} | {f"weight.{k}": v for k, v in dual.weight_sparse.state_dict().items()}
    )
    close(dual(tokens), one(tokens))
    close(dual(tokens, mask_sparse=policy), one(tokens, policy))
    two = TokenAggregation(32, 3)
    two.load_state_dict(
        {"scale": dual.scale} | {f"weight.{k}": v for k, v in dual.weight_dense.state_dict().items()}
    )
    other = torch.randn(2, 5, 32)
    close(dual(tokens, other, policy), one(tokens, policy) + two(other))
    assert TokenAggregation(32, 3, dim_ratio=0.5).weight[1].out_features == 16


def test_hrpa_for_one_text():
    patches, words = F.normalize(torch.randn(3, 6, 32), dim=-1), F.normalize(torch.randn(3, 4, 32), dim=-1)
    cosines = words @ patches.transpose(1, 2)
    leaky = F.leaky_relu(cosines, 0.1)

    def both(table):
        return table.amax(2).mean(1) + table.amax(1).mean(1)

    assert mask_xattn_one_text(patches, words).shape == (3, 1)
    close(mask_xattn_one_text(patches, words)[:, 0], both(leaky))
    close(mask_xattn_one_text(patches, words, scan=False)[:, 0], both(cosines))
    close(mask_xattn_one_text(patches, words, i2t=False)[:, 0], leaky.amax(2).mean(1))
    mask = torch.tensor([1, 1, 1, 1, 0, 0.0]).expand(3, -1)
    close(mask_xattn_one_text(patches, words, mask)[:, 0], both(leaky[:, :, :4]))
    module = HRPA(32, top_k=5, use_paper_version=True, scan=False)
    assert module(patches, words).shape == (3, 1)
    top = [each.sort(1, descending=True).values for each in (cosines.amax(2), cosines.amax(1))]
    learned = sum(module.relevance_mlp(F.pad(each, (0, 5))[:, :5])[:, 0] for each in top)
    close(module(patches, words)[:, 0], both(cosines) + learned)


# Losses


def test_golden_total(golden):
    meta, case = golden("losses")
    loss = SEPSLoss(
        meta["margin"], meta["rho"], meta["ratio_weight"], True, meta["lambda_sparse"], meta["lambda_dense"]
    )
    total, align, ratio = loss(case["in.scores"], (case["in.ds"], case["in.dd"]), case["in.img_ids"])
    for found, name in ((total, "total"), (align, "align"), (ratio, "ratio")):
        torch.testing.assert_close(found, case[f"out.{name}"], rtol=1e-5, atol=1e-8)


def test_the_switches_of_the_losses():
    scores = torch.randn(4, 4)
    loss = ContrastiveLoss(0.2)
    everything = loss(scores)
    loss.max_violation_on()
    hardest = loss(scores)
    assert hardest < everything
    loss.max_violation_off()
    close(loss(scores), everything)
    whole = SEPSLoss()
    whole.set_max_violation()
    close(whole(scores, torch.full((4, 4, 8), 0.5))[0], hardest)
    close(whole(scores, torch.full((4, 4, 8), 1.0))[0], hardest + 2 * 0.25)
    assert RatioLoss(0.5)([torch.ones(3), torch.zeros(3)]).item() == pytest.approx(0.5)
    assert RatioLoss(0.5)(torch.ones(3)).item() == pytest.approx(0.25)


# Three modalities


@pytest.mark.parametrize("gumbel", [False, True])
def test_three_modalities_guide_each_other(gumbel):
    module = MultiModalSDTPS(32, 16, 0.6, 0.4, use_gumbel=gumbel).train()
    arguments = modality_arguments()
    before = module(*arguments)
    assert [tuple(each.shape) for each in before] == [(3, 4, 32)] * 3 + [(3, 16)] * 3
    assert all(mask.sum(1).eq(10).all() for mask in before[3:])
    arguments[3] = torch.randn(3, 32)
    after = module.eval()(*arguments)
    # The RGB global guides the other modalities as well as its own.
    assert all(not torch.allclose(one, two) for one, two in zip(before[:3], after[:3], strict=True))


def test_counts_of_re_identification():
    module = MultiModalSDTPS(32)
    enhanced = module(*[torch.randn(2, 128, 32) for _ in range(3)], *[torch.randn(2, 32) for _ in range(3)])
    assert enhanced[0].shape == (2, 31, 32)
    assert enhanced[3].sum(1).eq(77).all()


# Life of the modules


@pytest.mark.parametrize("name", [*MODULES, "modalities"])
def test_modules_survive_copying_pickling_and_their_state_dict(name):
    modalities = name == "modalities"
    build = (lambda: MultiModalSDTPS(32, 16)) if modalities else MODULES[name]
    arguments = modality_arguments() if modalities else pair_arguments()
    module = build().eval()

    def run(one):
        found = one(*arguments)
        return found[0] if modalities else found

    expected = run(module)
    twins = [copy.deepcopy(module), pickle.loads(pickle.dumps(module))]
    for assign in (False, True):
        fresh = build().eval()
        run(fresh)
        other = {key: value.clone() + 0.1 for key, value in module.state_dict().items()}
        fresh.load_state_dict(other, assign=assign)
        assert not torch.allclose(run(fresh), expected, atol=1e-4)
        fresh.load_state_dict(module.state_dict(), strict=True, assign=assign)
        twins.append(fresh)
    for twin in twins:
        close(run(twin), expected)
    assert set(dict(module.named_parameters())) == set(module.state_dict())
    with torch.no_grad():
        for parameter in twins[0].parameters():
            parameter.add_(0.1)
    close(run(module), expected)
    assert not torch.allclose(run(twins[0]), expected, atol=1e-4)


@pytest.mark.parametrize("name", [*MODULES, "modalities"])
def test_modules_move_to_double_precision(name):
    if name == "modalities":
        module, arguments = MultiModalSDTPS(32, 16).eval(), modality_arguments()
        expected = module(*arguments)[0]
        found = module.to(torch.float64)(*[each.double() for each in arguments])[0]
    else:
        module, arguments = MODULES[name]().eval(), pair_arguments()
        expected = module(*arguments)
        found = module.double()(*[each.double() if each.is_floating_point() else each for each in arguments])
    assert found.dtype == torch.float64
    close(found.float(), expected, 1e-5)


def test_an_optimiser_of_the_registered_parameters_teaches_the_module():
    module, arguments = MODULES["paper"]().train(), pair_arguments()
    optimiser = torch.optim.SGD(module.parameters(), lr=0.1)
    before = module(*arguments)[0].sum()
    before.backward()
    optimiser.step()
    assert module(*arguments)[0].sum() < before


# Import of state dicts


def test_import_renames_every_weight_and_leaves_the_spare_predictor_out():
    state = import_state_dict(CrossSparseAggrNet(**SIZES, use_paper_version=True).state_dict())
    SlimHead(paper(keep_ratio=0.5, aggregate_ratio=0.4), 16, 32).load_state_dict(state, strict=True)
    single = CrossSparseAggrNet(**SIZES, use_paper_version=True, use_dual_aggr=False).state_dict()
    assert "sparse_net_long.score_predictor.0.weight" in single
    assert not [key for key in import_state_dict(single) if ".dense" in key]


def test_import_renames_the_weights_of_three_modalities():
    module, arguments = MultiModalSDTPS(32, 16).eval(), modality_arguments()
    own = MultiModalSlimmer(RGB_NIR_TIR, reidentification(), 16, 32).eval()
    own.load_state_dict(import_state_dict(module.state_dict()), strict=True)
    tokens = dict(zip(RGB_NIR_TIR, map(Tokens, arguments[:3]), strict=True))
    found = own(tokens, dict(zip(RGB_NIR_TIR, arguments[3:], strict=True)))
    for one, other in zip(found.values(), module(*arguments)[:3], strict=True):
        close(one, other)


def test_import_refuses_what_it_does_not_know():
    assert refusal(lambda: import_state_dict({"img_enc.weight": torch.zeros(1)})) == (
        "state: expected names that begin with sparse_net_cap, sparse_net_long, aggr_net, hrpa, "
        "or a modality's rgb_sparse, rgb_aggr, found 'img_enc.weight'"
    )


# Bad input


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            {"img_embs": torch.zeros(4, 20, 32)},
            "img_embs: expected 16 patches, or one token more with CLS first, found 20",
        ),
        (
            {"img_embs": torch.zeros(4, 17, 8)},
            "img_embs: expected shape (batch, tokens, 32), found (4, 17, 8)",
        ),
        (
            {"img_embs": torch.zeros(0, 17, 32)},
            "img_embs: expected shape (batch, tokens, 32), found (0, 17, 32)",
        ),
        ({"img_embs": torch.full((4, 17, 32), math.nan)}, "img_embs: expected finite features, found NaN"),
        ({"cap_embs": torch.zeros(5, 9, 8)}, "cap_embs: expected shape (batch, tokens, 32), found (5, 9, 8)"),
        ({"cap_embs": torch.full((5, 9, 32), math.nan)}, "cap_embs: expected finite features, found NaN"),
        ({"cap_lens": torch.tensor([3, 10, 1, 7, 5])}, "cap_lens: expected 1 to 9, found 1 to 10"),
        ({"cap_lens": torch.tensor([3, 0, 1, 7, 5])}, "cap_lens: expected 1 to 9, found 0 to 7"),
        ({"cap_lens": [3, 2.5, 1, 7, 5]}, "cap_lens: expected whole numbers, found [3.0, 2.5"),
        ({"cap_lens": None}, "cap_lens: expected a whole number for each row, found None"),
        ({"img_embs": [1.0]}, "img_embs: expected shape (batch, tokens, 32), found list"),
        (
            {"img_embs": torch.ones(4, 17, 32).long()},
            "img_embs: expected floating-point numbers, found torch",
        ),
        ({"cap_lens": torch.tensor([3, 9])}, "cap_lens: expected one for each of 5 rows, found 2"),
        (
            {"long_cap_lens": None},
            "long_cap_embs, long_cap_lens: expected both or neither, found one of them",
        ),
        (
            {"long_cap_embs": torch.zeros(5, 14)},
            "long_cap_embs: expected shape (batch, tokens, 32), found (5, 14)",
        ),
        ({"long_cap_lens": torch.tensor([15] * 5)}, "long_cap_lens: expected 0 to 14, found 15 to 15"),
        (
            {"long_cap_embs": torch.zeros(4, 14, 32), "long_cap_lens": torch.tensor([14] * 4)},
            "long_cap_embs: expected one for each of 5 texts, found 4",
        ),
    ],
)
def test_the_whole_refuses_what_does_not_fit_by_its_own_names(change, sentence):
    names = ("img_embs", "cap_embs", "cap_lens", "long_cap_embs", "long_cap_lens")
    for build in MODULES.values():
        arguments = dict(zip(names, pair_arguments(), strict=True)) | change
        assert refusal(lambda build=build, given=arguments: build()(**given)).startswith(sentence)


@pytest.mark.parametrize(
    ("build", "sentence"),
    [
        (
            lambda: TokenSparse(32)(torch.zeros(2, 5, 8), torch.zeros(2, 5), torch.zeros(2, 5)),
            "tokens: expected shape (batch, tokens, 32), found (2, 5, 8)",
        ),
        (
            lambda: TokenSparse(32)(torch.zeros(2, 5, 32), torch.zeros(2, 5), torch.zeros(2, 4)),
            "attention_y: expected shape (2, 5), found (2, 4)",
        ),
        (
            lambda: TokenAggregation(32)(torch.zeros(2, 5, 32), torch.zeros(2, 4)),
            "keep_policy: expected shape (2, 5), found (2, 4)",
        ),
        (
            lambda: TokenAggregation(32)(torch.zeros(2, 5, 8)),
            "x: expected shape (batch, tokens, 32), found (2, 5, 8)",
        ),
        (
            lambda: DualTokenAggregation(32)(torch.zeros(2, 5, 32), torch.zeros(2, 5, 8)),
            "tokens_dense: expected shape (batch, tokens, 32), found (2, 5, 8)",
        ),
        (
            lambda: mask_xattn_one_text(torch.zeros(2, 5, 32), torch.zeros(2, 5, 8)),
            "cap_i_expand: expected shape (batch, tokens, 32), found (2, 5, 8)",
        ),
        (
            lambda: mask_xattn_one_text(torch.zeros(2, 5, 32), torch.zeros(2, 3, 32), torch.zeros(2, 4)),
            "img_mask: expected shape (2, 5), found (2, 4)",
        ),
        (
            lambda: MultiModalSDTPS(32)(*modality_arguments()[:3], *[torch.zeros(3, 8)] * 3),
            "RGB_global: expected shape (3, 32), found (3, 8)",
        ),
        (
            lambda: MultiModalSDTPS(32)(*[torch.zeros(3, 16, 8)] * 3, *modality_arguments()[3:]),
            "RGB_cash: expected shape (batch, tokens, 32), found (3, 16, 8)",
        ),
        (
            lambda: MultiModalSDTPS(32)(
                *modality_arguments()[:2], torch.full((3, 16, 32), math.nan), *modality_arguments()[3:]
            ),
            "TI_cash: expected finite features, found NaN or infinity in item 0",
        ),
        (
            lambda: CrossSparseAggrNet(sparse_ratio=1.5),
            "sparse_ratio: expected above 0 and at most 1, found 1.5",
        ),
        (lambda: CrossSparseAggrNet(aggr_ratio=0), "aggr_ratio: expected above 0 and at most 1, found 0"),
        (lambda: CrossSparseAggrNet(gumbel_tau=0), "gumbel_tau: expected above 0 and finite, found 0"),
        (lambda: CrossSparseAggrNet(top_k=0), "top_k: expected at least 1, found 0"),
        (lambda: MultiModalSDTPS(32, beta=-1), "beta: expected at least 0 and finite, found -1"),
        (
            lambda: CrossSparseAggrNet_v2(SimpleNamespace(embed_size=32, num_patches=16)),
            "opt: expected embed_size, num_patches, sparse_ratio, aggr_ratio, "
            "found no sparse_ratio, aggr_ratio",
        ),
        (
            lambda: TokenSparse(32)(torch.full((2, 5, 32), math.nan), torch.zeros(2, 5), torch.zeros(2, 5)),
            "tokens: expected finite features, found NaN or infinity in item 0",
        ),
        (
            lambda: TokenSparse(32)(torch.zeros(2, 5, 32), torch.zeros(2, 5), torch.full((2, 5), math.inf)),
            "attention_y: expected finite features, found NaN or infinity in item 0",
        ),
        (
            lambda: TokenSparse(32)(torch.zeros(2, 5, 32), *[torch.zeros(2, 5)] * 2, gumbel_tau=0.0),
            "gumbel_tau: expected above 0 and finite, found 0.0",
        ),
        (lambda: TokenSparse(32, 2.0), "sparse_ratio: expected above 0 and at most 1, found 2.0"),
        (lambda: TokenSparse(2, use_paper_version=True), "embed_dim: expected at least 4, found 2"),
        (lambda: TokenAggregation(32, 0), "keeped_patches: expected at least 1, found 0"),
        (lambda: TokenAggregation(3, 4), "dim, dim_ratio: expected a product of at least 1, found 3 and 0.2"),
        (
            lambda: TokenAggregation(32)(torch.full((2, 5, 32), math.nan)),
            "x: expected finite features, found NaN or infinity in item 0",
        ),
        (lambda: HRPA(32, 0), "top_k: expected at least 1, found 0"),
        (
            lambda: mask_xattn_one_text(torch.zeros(2, 5, 32), torch.zeros(3, 4, 32)),
            "cap_i_expand: expected the text once for each of 2 images, found 3",
        ),
        (
            lambda: mask_xattn_one_text(torch.full((2, 5, 32), math.nan), torch.zeros(2, 4, 32)),
            "img_embs: expected finite features, found NaN or infinity in item 0",
        ),
        (
            lambda: MultiModalSDTPS(32)(
                torch.zeros(3, 16, 32), torch.zeros(2, 16, 32), *modality_arguments()[2:]
            ),
            "NI_cash: expected 3 samples as RGB_cash, found 2",
        ),
        (
            lambda: MultiModalSDTPS(32)(None, *modality_arguments()[1:]),
            "RGB_cash: expected shape (batch, tokens, 32), found NoneType",
        ),
        (
            lambda: SEPSLoss()(torch.zeros(3, 3), None),
            "score_mask: expected one mask, or one of each branch, found 0",
        ),
        (
            lambda: ContrastiveLoss()(torch.zeros(3, 3), torch.tensor([1, 2])),
            "img_ids: expected 3 of them, found 2",
        ),
        (
            lambda: RatioLoss()([torch.zeros(1)] * 3),
            "score_mask: expected one mask, or one of each branch, found 3",
        ),
        (
            lambda: ContrastiveLoss()(torch.zeros(2, 3)),
            "scores: expected a square batch (B, B), found (2, 3)",
        ),
    ],
)
def test_parts_refuse_what_does_not_fit(build, sentence):
    assert refusal(build) == sentence
