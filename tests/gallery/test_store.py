"""Rows by number, and versions that are held still."""

import pytest
from gallery_making import make_folder, make_gallery

from seps.gallery.store import ROW


@pytest.fixture
def gallery(tmp_path):
    return make_gallery(tmp_path, 12)


def test_rows_come_in_the_order_they_were_asked_for(gallery):
    still = gallery.store.still()
    rows = [row for batch in still.scan([ROW]) for row in batch.column(ROW).to_pylist()]
    some = [rows[7], rows[2], rows[11]]
    found = still.take(some, ["name"])
    assert found.column(ROW).to_pylist() == some
    names = dict(zip(rows, still.take(rows, ["name"]).column("name").to_pylist(), strict=True))
    assert found.column("name").to_pylist() == [names[row] for row in some]
    nothing = still.take([], ["name"])
    assert nothing.num_rows == 0
    assert nothing.schema.names == [ROW, "name"]


def test_a_version_held_still_outlives_what_writers_do(gallery, tmp_path):
    """Row numbers found in it go on meaning the same rows, though these are removed and moved."""
    still = gallery.store.still()
    rows = [row for batch in still.scan([ROW]) for row in batch.column(ROW).to_pylist()]
    ids = still.take(rows, ["id"]).column("id").to_pylist()
    assert gallery.remove(ids[:5]) == 5
    gallery.add(make_folder(tmp_path / "more", 3))
    gallery.compact()
    assert still.take(rows, ["id"]).column("id").to_pylist() == ids
    assert still.count() == 12


def test_the_newest_version_is_held(gallery):
    first = gallery.store.still()
    assert gallery.store.still() is first
    assert first.count() == 12
    gallery.remove(where="NOT described")
    second = gallery.store.still()
    assert second is not first
    assert second.count() == len(gallery) == 8
