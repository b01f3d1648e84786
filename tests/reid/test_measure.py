"""Measuring, re-ranking, rank lists: hand-worked values and slow loops."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image, ImageChops

from seps.data.records import Problems
from seps.reid.data import NO_SCENE, FilePicture, Sighting
from seps.reid.measure import absences, describe_all, distances_of, label, rank, removed
from seps.reid.model import ReIdConfig, ReIdModel
from seps.reid.pictures import EMPTY, FRAME, GAP, RIGHT, WRONG, caption, choose, draw_rank_list, show
from seps.reid.rendered import render_dataset
from seps.reid.report import Report, measure, with_matches
from seps.reid.reranking import jaccard, neighbourhoods, reciprocal, rerank

LIGHT = {"kind": "light", "size": [64, 32], "width": 16, "layers": 1, "heads": 2}


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return ReIdModel(ReIdConfig(image_encoder=LIGHT, channels=16, identities=4)).eval()


@pytest.fixture(scope="module")
def dataset():
    return render_dataset(4, 3, 2, size=(64, 32))


def sighting(identity, camera, scene=0) -> Sighting:
    return Sighting(identity, camera, scene, f"{identity}-{camera}-{scene}", {})


def test_absences_are_the_seven_rows_of_the_table():
    rows = [label(each) for each in absences(("rgb", "nir", "tir"))]
    assert rows == ["none", "r", "n", "t", "rn", "rt", "nt"]
    assert label(("depth", "day")) == "depth+day"


def test_distances_by_hand():
    query, gallery = torch.tensor([[1.0, 0.0]]), torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]])
    assert distances_of(query, gallery).tolist() == [[0.0, 1.0, 2.0]]


def test_protocols_by_hand():
    """By camera the nearest picture is removed and the right one is second; by scene it is the other way."""
    query = [sighting(1, 1, 0)]
    gallery = [sighting(1, 1, 5), sighting(2, 2, 0), sighting(1, 2, 0)]
    distances = torch.tensor([[0.1, 0.2, 0.3]])
    assert rank(distances, query, gallery, "camera").mean_average_precision == 50
    assert rank(distances, query, gallery, "scene").mean_average_precision == 100
    assert removed(query[0], gallery, "camera").tolist() == [True, False, False]
    assert removed(query[0], gallery, "scene").tolist() == [False, False, True]


def test_descriptions_do_not_depend_on_the_batch(model, dataset):
    whole = describe_all(model, dataset.query, batch_size=64)
    parts = describe_all(model, dataset.query, batch_size=5)
    for key, vectors in whole.items():
        torch.testing.assert_close(parts[key], vectors, atol=1e-5, rtol=1e-4)


def test_taking_a_modality_away_equals_never_having_had_it(model, dataset):
    found = describe_all(model, dataset.query, absences(("rgb", "nir", "tir")))
    without = [
        Sighting(each.identity, each.camera, each.scene, each.name, {"rgb": each.pictures["rgb"]})
        for each in dataset.query
    ]
    alone = describe_all(model, without)["both", ()]
    torch.testing.assert_close(found["both", ("nir", "tir")], alone)
    assert not torch.allclose(found["both", ()], alone)


def test_measuring_leaves_the_models_mode_alone(model, dataset):
    model.train()
    describe_all(model, dataset.query)
    assert model.training
    model.eval()


def test_the_report_has_every_row_and_names_what_was_left_out(model, dataset, tmp_path):
    figures = measure(model, dataset, "camera", reranked=True)
    assert len(figures) == 7 * 3 + 1 and figures[-1].reranked
    report = Report("people", "test", "camera", 12, 24, tuple(figures), ("x: broken",))
    text = report.to_markdown()
    assert "| nt | both |" in text and "both, re-ranked" in text and "- x: broken" in text
    report.write(tmp_path / "deep" / "folder")
    assert {path.name for path in (tmp_path / "deep" / "folder").iterdir()} == {"report.md", "report.json"}


def test_a_query_without_a_match_is_refused_or_counted(dataset):
    lonely = replace(dataset, query=(*dataset.query, sighting(999, 0)))
    with pytest.raises(ValueError, match="999-0-0: expected a right answer of another camera"):
        with_matches(lonely, "camera", "refuse")
    two = replace(lonely, query=(*lonely.query, sighting(998, 0)))
    with pytest.raises(ValueError, match="found none, and 1 more; broken"):
        with_matches(two, "camera", "refuse")
    kept = with_matches(lonely, "camera", "skip")
    assert kept.query == dataset.query and "999-0-0" in str(kept.problems.items[-1])
    with pytest.raises(ValueError, match="found none"):
        with_matches(replace(dataset, query=(sighting(999, 0),)), "camera", "skip")


def slow_rerank(query_gallery, query_query, gallery_gallery, near, nearest, weight):
    """The method as its paper tells it, one sighting at a time."""
    queries = len(query_gallery)
    whole = np.block([[query_query, query_gallery], [query_gallery.T, gallery_gallery]])
    scaled = whole / whole.max(1, keepdims=True)
    size = len(scaled)
    order = [sorted(range(size), key=lambda j, i=i: (scaled[i, j], j)) for i in range(size)]

    def mutual(one, count):
        return {other for other in order[one][: count + 1] if one in order[other][: count + 1]}

    weights = np.zeros((size, size))
    for one in range(size):
        members = set(mutual(one, near))
        for candidate in mutual(one, near):
            theirs = mutual(candidate, max(1, round(near / 2)))
            if len(theirs & mutual(one, near)) > 2 / 3 * len(theirs):
                members |= theirs
        for member in members:
            weights[one, member] = np.exp(-scaled[one, member])
        weights[one] /= weights[one].sum()
    if nearest > 1:
        weights = np.stack(
            [np.mean([weights[other] for other in order[i][:nearest]], 0) for i in range(size)]
        )
    result = np.zeros(query_gallery.shape)
    for one in range(queries):
        for other in range(size - queries):
            common = np.minimum(weights[one], weights[queries + other]).sum()
            distance = 1 - common / (2 - common)
            result[one, other] = (1 - weight) * distance + weight * scaled[one, queries + other]
    return result


@pytest.mark.parametrize(("near", "nearest", "weight"), [(4, 2, 0.3), (6, 1, 0.0), (20, 6, 0.5), (1, 1, 0.3)])
def test_reranking_agrees_with_a_slow_loop(near, nearest, weight):
    vectors = torch.nn.functional.normalize(torch.randn(22, 5), dim=1)
    query, gallery = vectors[:6], vectors[6:]
    given = [distances_of(query, gallery), distances_of(query, query), distances_of(gallery, gallery)]
    expected = slow_rerank(*(each.numpy() for each in given), near, nearest, weight)
    found = rerank(*given, near, nearest, weight)
    np.testing.assert_allclose(found.numpy(), expected, atol=2e-5)


def test_reranking_joins_what_shares_neighbours():
    """Two tight groups and a query between them that is mutual with one: that group moves to the front."""
    group = torch.tensor([[0.0], [0.1], [0.2], [2.0], [2.1], [2.2]])
    query = torch.tensor([[0.95]])
    given = [torch.cdist(query, group), torch.cdist(query, query), torch.cdist(group, group)]
    assert rerank(*given, near=3, nearest=1, weight=0.1)[0].argsort()[:3].sort().values.tolist() == [0, 1, 2]


def test_reciprocal_neighbours_by_hand():
    order = torch.tensor([[0, 1, 2], [1, 2, 0], [2, 1, 0]])
    # 0 has 1 nearest, but 1 has 2 nearest: only 1 and 2 are mutual.
    assert reciprocal(order, 1).tolist() == [[True, False, False], [False, True, True], [False, True, True]]
    assert bool(neighbourhoods(order, 2).all())


def test_jaccard_by_hand():
    first, second = torch.tensor([[1.0, 0.0], [0.5, 0.5]]), torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    expected = torch.tensor([[0.0, 1.0], [1 - 0.5 / 1.5, 1 - 0.5 / 1.5]])
    torch.testing.assert_close(jaccard(first, second), expected)


def test_reranking_refuses_shapes_that_do_not_fit():
    with pytest.raises(ValueError, match="distances: expected shapes"):
        rerank(torch.rand(2, 3), torch.rand(3, 3), torch.rand(3, 3))
    with pytest.raises(ValueError, match="near, nearest, weight"):
        rerank(torch.rand(2, 3), torch.rand(2, 2), torch.rand(3, 3), near=0)


def test_a_rank_list_shows_right_and_wrong_and_dims_what_was_dropped(model, dataset):
    other = next(each for each in dataset.gallery if each.identity != dataset.query[0].identity)
    same = next(each for each in dataset.gallery if each.identity == dataset.query[0].identity)
    shown = show(model, [dataset.query[0], same, other])
    assert [set(each.pictures) for each in shown] == [{"rgb", "nir", "tir"}] * 3
    sheet = draw_rank_list(shown, torch.tensor([0.1, 0.2]))
    assert isinstance(sheet, Image.Image)
    colours = {colour for _, colour in sheet.getcolors(sheet.width * sheet.height)}
    assert RIGHT in colours and WRONG in colours
    encoded = model.encode({name: torch.zeros(1, 3, 64, 32) for name in ("rgb", "nir", "tir")})
    assert int(model.describe(encoded).slim["nir"].kept.sum()) == 5  # ceil(0.6 * 8)
    picture = np.asarray(shown[0].pictures["nir"], dtype=float).reshape(4, 16, 2, 16, 3).mean((1, 3, 4))
    whole = np.asarray(dataset.query[0].pictures["nir"].open(), dtype=float).reshape(4, 16, 2, 16, 3)
    dimmed = picture / whole.mean((1, 3, 4)) < 0.5
    assert dimmed.sum() == 3


def test_nothing_is_dimmed_where_slimming_has_no_say(dataset):
    config = ReIdConfig(image_encoder=LIGHT, channels=16, features="original")
    (shown,) = show(ReIdModel(config), [dataset.query[0]])
    for name, picture in shown.pictures.items():
        whole = np.asarray(dataset.query[0].pictures[name].open(), dtype=int)
        assert abs(np.asarray(picture, dtype=int) - whole).max() <= 1


def test_a_rank_list_says_who_was_seen_where():
    """Beside the colours of the frames, which not everyone tells apart."""
    distances = torch.tensor([0.125, 0.5])
    assert caption(sighting(258, 1, NO_SCENE), 0, distances) == ("query", "258 c1")
    assert caption(sighting(7, 3, 2), 2, distances) == ("2: 0.50", "7 c3 s2")


def test_a_rank_list_says_what_is_absent(model, dataset):
    """The third row of an answer without its thermal picture: its frame is there, the model saw nothing."""
    query, answer = dataset.query[0], dataset.gallery[0]
    blind = replace(answer, pictures={name: answer.pictures[name] for name in ("rgb", "nir")})
    whole = draw_rank_list(show(model, [query, answer]), torch.tensor([0.1]))
    lame = draw_rank_list(show(model, [query, blind]), torch.tensor([0.1]))
    assert whole.size == lame.size
    bottom = lame.height - GAP - FRAME
    last = (0, bottom - 64, lame.width, bottom)
    left, _, _, _ = ImageChops.difference(whole.crop(last), lame.crop(last)).getbbox()
    middle = (left + 32 // 2, bottom - 64 // 2)
    assert lame.getpixel(middle) == EMPTY != whole.getpixel(middle)
    above = (middle[0], middle[1] - 64 - 2 * FRAME - GAP)
    assert lame.getpixel(above) != EMPTY


def test_an_unreadable_picture_is_refused_or_shown_as_absent(model, dataset, tmp_path):
    (tmp_path / "bad.jpg").write_bytes(b"nothing")
    torn = dict(dataset.query[0].pictures) | {"nir": FilePicture(tmp_path / "bad.jpg")}
    sightings = [replace(dataset.query[0], pictures=torn)]
    with pytest.raises(ValueError, match="bad.jpg"):
        show(model, sightings)
    problems = Problems("skip")
    assert set(show(model, sightings, problems)[0].pictures) == {"rgb", "tir"} and len(problems) == 1


def test_sightings_without_any_picture_that_the_model_knows_are_refused(model):
    with pytest.raises(ValueError, match="sightings: expected pictures of rgb, nir, tir, found none"):
        describe_all(model, [sighting(1, 1)])


def test_queries_are_chosen_by_name_or_spread(dataset):
    assert choose(dataset.query, (), 2) == [dataset.query[0], dataset.query[-1]]
    assert choose(dataset.query, (dataset.query[3].name,), 8) == [dataset.query[3]]
    with pytest.raises(ValueError, match="names: expected queries such as"):
        choose(dataset.query, ("nobody",), 1)
