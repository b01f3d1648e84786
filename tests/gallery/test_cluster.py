"""Indexing with Ray Data actors. Starting a cluster takes half a minute: asked for with SEPS_TEST_RAY=1."""

import os

import pytest
from gallery_making import make_folder, make_model

from seps.data.records import Problems
from seps.gallery import Added, Gallery, load_gallery
from seps.gallery.cluster import merge
from seps.gallery.commands import IndexOptions, run_index


def test_accounts_of_blocks_add_up():
    report, counted = Added(skipped=Problems("skip")), []
    block = {"added": 3, "replaced": 1, "unchanged": 0, "skipped": "a.png\0not readable\nb.png\0gone"}
    merge(report, block, counted.append)
    merge(report, {"added": 0, "replaced": 0, "unchanged": 4, "skipped": ""}, counted.append)
    assert (report.added, report.replaced, report.unchanged) == (3, 1, 4)
    assert [str(each) for each in report.skipped] == ["a.png: not readable", "b.png: gone"]
    assert counted == [6, 4]


@pytest.mark.skipif(not os.environ.get("SEPS_TEST_RAY"), reason="SEPS_TEST_RAY=1 starts a cluster")
def test_a_cluster_indexes_what_one_process_does(tmp_path):
    pytest.importorskip("ray.data")
    model, processor = make_model()
    model.save_pretrained(tmp_path / "model")
    processor.save_pretrained(tmp_path / "model")
    paths = make_folder(tmp_path / "photos", 20)
    paths[3].write_bytes(b"broken")
    places = {"photos": str(tmp_path / "photos"), "model": str(tmp_path / "model")}
    run_index(IndexOptions(**places, gallery=str(tmp_path / "one")))
    run_index(IndexOptions(**places, gallery=str(tmp_path / "many"), ray="local", workers=2, commit=4))
    alone = load_gallery(tmp_path / "one")
    together = Gallery.open(tmp_path / "many", alone.model, alone.processor)
    assert len(together) == 19
    for text in ("a red dog", "a boat on the sea"):
        found, expected = together.search(text, k=19), alone.search(text, k=19)
        assert [hit.id for hit in found] == [hit.id for hit in expected]
        assert [hit.score for hit in found] == pytest.approx([hit.score for hit in expected], abs=1e-4)
