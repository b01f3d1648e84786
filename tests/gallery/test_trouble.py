"""Killed writers, many writers and readers at once, a full disk: nothing is lost, torn or left about."""

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from gallery_making import make_folder, make_gallery, make_model, picture_bytes

from seps.gallery import Gallery, Picture
from seps.gallery.store import Store

HERE = Path(__file__).parent
WRITERS, READERS, ROUNDS = 4, 8, 3


def run_beside(code, *arguments):
    """A fresh interpreter that can make models and pictures."""
    environment = {
        **os.environ,
        "PYTHONPATH": f"{HERE}:{HERE.parents[1] / 'src'}",
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


WRITE = """
import sys
from concurrent.futures import ThreadPoolExecutor
from gallery_making import make_model, picture_bytes
from seps.gallery import Gallery, Picture
place, numbers, rounds = sys.argv[1], sys.argv[2].split(), int(sys.argv[3])

model = make_model()

def write(number):
    gallery = Gallery.open(place, *model)
    for turn in range(rounds):
        shared = [Picture(picture_bytes(1000 + turn), name="shared", description=f"a red dog {turn}")]
        own = [Picture(picture_bytes(2000 + 100 * number + turn), name=f"own {number}", description="a boat")]
        doomed = Picture(picture_bytes(3000 + 100 * number + turn), name="doomed")
        gallery.add([*shared, *own, doomed])
        gallery.remove([doomed.id])
        if number == 0:
            gallery.compact()

with ThreadPoolExecutor(len(numbers)) as pool:
    list(pool.map(write, map(int, numbers)))
"""


def read_until(gallery, over):
    """Search again and again; -> how often. Each reader has a handle of its own."""
    own = Gallery.open(gallery.location, gallery.model, gallery.processor)
    turns = 0
    while turns < 2 or not over.is_set():
        for hits in own.search(["a red dog", "a boat"], k=100):
            ids = [hit.id for hit in hits]
            assert len(ids) == len(set(ids)), "a picture was found twice"
            assert len(ids) >= 6, "a picture that was there before is missing"
            assert all(hit.entry.width == 48 for hit in hits)
        assert len(own.search("a boat", k=3, exact=True)) == 3
        assert own.thumbnail(ids[0])
        turns += 1
    return turns


def test_four_writers_and_eight_readers_lose_and_tear_nothing(tmp_path):
    """Two processes of two writers each, and eight readers here, each with its own handle."""
    gallery = make_gallery(tmp_path, 6)
    over, failures = threading.Event(), []
    writers = [run_beside(WRITE, gallery.location, numbers, ROUNDS) for numbers in ("0 1", "2 3")]
    with ThreadPoolExecutor(READERS) as pool:
        readers = [pool.submit(read_until, gallery, over) for _ in range(READERS)]
        for each in writers:
            error = each.communicate(timeout=300)[1]
            failures += [error] if each.returncode else []
        over.set()
        assert all(reader.result() >= 2 for reader in readers)
    assert not failures
    names = [row["name"] for batch in gallery.store.scan(["name"]) for row in batch.to_pylist()]
    assert names.count("shared") == ROUNDS
    assert [names.count(f"own {number}") for number in range(WRITERS)] == [ROUNDS] * WRITERS
    assert names.count("doomed") == 0
    assert len(names) == 6 + ROUNDS * (1 + WRITERS)


BUSY = """
import sys
from gallery_making import make_model, picture_bytes
from seps.gallery import Gallery, Pace, Picture
gallery = Gallery.open(sys.argv[1], *make_model())
print("begin", flush=True)
for turn in range(10_000):
    if sys.argv[2] == "add":
        pictures = [Picture(picture_bytes(10_000 + 8 * turn + i), name=f"batch {turn}") for i in range(8)]
        gallery.add(pictures, Pace(commit=8))
        print(turn, flush=True)
    else:
        gallery.add([Picture(picture_bytes(10_000 + turn), name=f"batch {turn}")])
        gallery.compact()
        print(turn, flush=True)
"""


@pytest.mark.parametrize(("work", "size"), [("add", 8), ("compact", 1)])
def test_a_killed_writer_leaves_whole_commits(tmp_path, work, size):
    gallery = make_gallery(tmp_path, 3)
    writer = run_beside(BUSY, gallery.location, work)
    told = 0
    for line in writer.stdout:
        told = told if line.startswith("begin") else int(line) + 1
        if told >= 2:
            break
    time.sleep(0.02 if work == "compact" else 0.05)
    writer.send_signal(signal.SIGKILL)
    writer.communicate()
    again = Gallery.open(gallery.location, *make_model())
    names = [row["name"] for batch in again.store.scan(["name"]) for row in batch.to_pylist()]
    counts = {name: names.count(name) for name in names if name.startswith("batch")}
    assert all(count == size for count in counts.values()), counts
    assert len(counts) >= told, "a commit the writer spoke of is gone"
    assert len(again.search("dog", k=100)) == len(names)
    assert again.add([Picture(picture_bytes(5))]).added == 1
    again.compact()
    assert len(again) == len(names) + 1
    assert not list(Path(gallery.location).rglob(".tmp*"))


def test_indexing_goes_on_where_it_was_killed(tmp_path):
    code = """
import sys
from pathlib import Path
from gallery_making import make_model
from seps.gallery import Gallery, Pace
gallery = Gallery.open(sys.argv[1], *make_model())
gallery.add(sorted(Path(sys.argv[2]).glob("*.png")), Pace(batch=4, commit=4),
            advance=lambda count: print(count, flush=True))
"""
    gallery = Gallery.create(tmp_path / "gallery", *make_model())
    paths = make_folder(tmp_path / "photos", 40)
    writer = run_beside(code, gallery.location, tmp_path / "photos")
    committed = 0
    for line in writer.stdout:
        committed += int(line)
        if committed >= 8:
            break
    writer.send_signal(signal.SIGKILL)
    writer.communicate()
    held = len(gallery)
    assert committed <= held <= 40
    assert held % 4 == 0
    report = gallery.add(paths)
    assert (report.unchanged, report.added) == (held, 40 - held)


def test_strays_are_swept_by_the_next_writer(tmp_path):
    gallery = make_gallery(tmp_path, 3)
    stray = Path(gallery.location) / "images.lance" / "data" / ".tmp_0123"
    stray.write_bytes(b"half a file")
    orphan = Path(gallery.location) / "images.lance" / "data" / ("0" * 24 + "1" * 24 + ".lance")
    orphan.write_bytes(b"a fragment that was never committed")
    gallery.add([Picture(picture_bytes(9))])
    assert not stray.exists()
    gallery.compact()
    assert not orphan.exists()
    assert len(gallery.search("dog", k=10)) == 4


def test_a_gallery_killed_while_it_was_made_can_be_made_again(tmp_path):
    (tmp_path / "g" / "images.lance" / "data").mkdir(parents=True)
    (tmp_path / "g" / ".lock").touch()
    with pytest.raises(ValueError, match="expected a gallery, found a folder without one"):
        Gallery.open(tmp_path / "g")
    gallery = Gallery.create(tmp_path / "g", *make_model())
    assert gallery.add(make_folder(tmp_path / "photos", 2)).added == 2


@pytest.fixture
def tiny_disk(tmp_path):
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=900k", "tmpfs", str(place)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("mounting a small disk is not permitted here")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_full_disk_is_one_sentence_and_the_gallery_stays_whole(tmp_path, tiny_disk):
    gallery = Gallery.create(tiny_disk / "gallery", *make_model())
    assert gallery.add(make_folder(tmp_path / "few", 3)).added == 3
    many = [Picture(picture_bytes(number) + os.urandom(40_000)) for number in range(30)]
    with pytest.raises(OSError, match="nothing was written, no space left on device") as caught:
        gallery.add(many)
    assert "\n" not in str(caught.value)
    again = Gallery.open(gallery.location, *make_model())
    assert len(again) == 3
    assert len(again.search("dog")) == 3
    Store.open(gallery.location).sweep()
    assert gallery.add([Picture(picture_bytes(77))]).added == 1


def test_threads_may_share_a_gallery(tmp_path):
    gallery = make_gallery(tmp_path, 12)
    texts = ["a red dog", "a boat", "sea", "two cat"]
    alone = {text: [hit.id for hit in gallery.search(text)] for text in texts}
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda turn: (texts[turn % 4], gallery.search(texts[turn % 4])), range(32)))
    assert all([hit.id for hit in hits] == alone[text] for text, hits in found)
