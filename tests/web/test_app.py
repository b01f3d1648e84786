"""The service's answers: right, refused in one sentence, and to each client its own."""

import io
import re
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from PIL import Image
from serving import COUNT, encoded
from starlette.testclient import TestClient

from seps.gallery import Gallery
from seps.web import Limits, make_app

FREE = Limits(rate=1e6, burst=1e6)
ABSENT = "0" * 16


@pytest.fixture
def client(world):
    with TestClient(make_app(world.gallery, FREE), base_url="http://localhost") as client:
        yield client


def limited(world, **limits):
    return TestClient(
        make_app(world.gallery, Limits(**{"rate": 1e6, "burst": 1e6} | limits)), base_url="http://localhost"
    )


def error_of(response, status):
    """The sentence of a refusal, which stands alone and says nothing of the machine."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert list(response.json()) == ["error"]
    sentence = response.json()["error"]
    assert sentence
    assert "\n" not in sentence
    assert "Traceback" not in sentence
    return sentence


def test_a_text_is_answered_as_the_gallery_answers_it(client, world):
    for text in world.texts[:3]:
        found = client.post("/search", json={"text": text, "k": 5}).json()["results"]
        expected = world.gallery.search(text, 5)
        assert [each["id"] for each in found] == [hit.id for hit in expected]
        assert [each["score"] for each in found] == pytest.approx([hit.score for hit in expected], abs=1e-4)


def test_a_picture_finds_itself(client, world):
    for index in (0, 4):
        files = {"picture": ("a.png", encoded(world.scenes.open(index)))}
        found = client.post("/search", files=files, data={"k": "3"}).json()["results"]
        assert len(found) == 3
        assert found[0]["id"] == world.ids[index]
        assert found[0]["score"] == pytest.approx(1, abs=1e-2)


def test_filters_choose_among_tags_and_days(client, world):
    def count(**filters):
        return len(client.post("/search", json={"text": "red", "k": 100, **filters}).json()["results"])

    day = world.gallery.entry(world.ids[0]).taken.date().isoformat()
    assert count(tags=["drawn"]) == count(since=day, until=day) == COUNT
    assert count(tags=["drawn", "sea"]) == count(until="1999-12-31") == count(since="2999-01-01") == 0
    # A value is a value, however it is written.
    assert count(tags=["x') OR ('a' = 'a"]) == 0


def test_pictures_are_served_whole_small_and_not_again(client, world):
    whole = client.get(f"/images/{world.ids[0]}")
    small = client.get(f"/images/{world.ids[0]}?thumbnail")
    for response in (whole, small):
        assert response.headers["content-type"] == "image/jpeg"
        assert Image.open(io.BytesIO(response.content)).size == (160, 160)
        again = client.get(response.url, headers={"If-None-Match": response.headers["etag"]})
        assert again.status_code == 304
        assert not again.content
    assert small.content == world.gallery.thumbnail(world.ids[0])
    assert whole.content != small.content


def test_a_listing_shows_pictures_without_their_places(client, world):
    shown = client.get("/images?count=5").json()["pictures"]
    assert len({each["id"] for each in shown} & set(world.ids)) == 5
    assert not {"path", "folder"} & set(shown[0])


def test_an_explanation_is_the_librarys(client, world):
    from seps.explanation import explain_stored

    asked = {"id": world.ids[1], "text": world.texts[1]}
    overlay = client.get("/explain", params=asked).json()
    expected = explain_stored(world.gallery, world.ids[1], world.texts[1]).overlay()
    assert overlay["score"] == pytest.approx(expected["score"], abs=1e-4)
    assert [word["text"] for word in overlay["words"]] == [word["text"] for word in expected["words"]]
    assert overlay["branches"]["sparse"]["order"] == expected["branches"]["sparse"]["order"]
    figure = client.get("/explain", params={**asked, "format": "png"})
    assert Image.open(io.BytesIO(figure.content)).format == "PNG"


@pytest.fixture
def own(world, tmp_path):
    """An empty gallery that a test may fill."""
    gallery = Gallery.create(tmp_path / "own", world.gallery.model, world.gallery.processor)
    with TestClient(make_app(gallery, FREE), base_url="http://localhost") as client:
        yield client, gallery


def test_an_added_picture_is_found_at_once(own, world):
    client, gallery = own
    file = ("../../etc/cat.png", encoded(world.scenes.open(3)))
    given = {"description": "a pink moon", "tags": ["night", "sky"]}
    stored = client.post("/images", files={"picture": file}, data=given)
    assert stored.status_code == 201
    assert stored.json()["name"] == "cat.png"
    found = client.post("/search", json={"text": "pink moon", "tags": ["night"]}).json()["results"]
    assert [each["id"] for each in found] == [stored.json()["id"]]
    assert found[0]["description"] == "a pink moon"
    again = client.post("/images", files={"picture": file}, data=given)
    assert (again.status_code, again.json()["known"]) == (200, True)
    assert len(gallery) == client.get("/gallery").json()["pictures"] == 1


def test_an_empty_gallery_finds_nothing(own):
    client, _ = own
    assert client.post("/search", json={"text": "anything"}).json()["results"] == []
    assert client.get("/images").json()["pictures"] == []


@pytest.mark.parametrize("text", ["", "   ", "\u2028", "a " * 91, "a" * 2001])
def test_a_text_that_says_nothing_or_too_much_is_refused(client, text):
    error_of(client.post("/search", json={"text": text}), 422)


@pytest.mark.parametrize("text", ["🙂🙂", "אדום", "\u202e red", "\0", "' OR 1=1 --", '"(', "😶‍🌫️ " * 40, "*"])
def test_strange_texts_are_answered(client, text):
    assert len(client.post("/search", json={"text": text}).json()["results"]) == COUNT


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{", 400),
        (b"\xff\xfe", 400),
        (b"[" * 20000, 400),
        (b"[]", 422),
        (b"null", 422),
        (b"{}", 422),
        (b'{"text": 5}', 422),
        (b'{"text": "\\ud800"}', 422),
        (b'{"text": "a", "k": 0}', 422),
        (b'{"text": "a", "k": 101}', 422),
        (b'{"text": "a", "k": 1e99}', 422),
        (b'{"text": "a", "where": "true"}', 422),
        (b'{"text": "a", "since": "2024-02-30"}', 422),
        (b'{"text": "a", "since": "2024-02-02", "until": "2024-02-01"}', 422),
    ],
)
def test_a_body_that_is_not_as_expected_is_refused(client, body, status):
    error_of(client.post("/search", content=body, headers={"Content-Type": "application/json"}), status)


def bomb(width, height):
    """A small file that claims to be a large picture."""
    return encoded(Image.new("1", (width, height)))


@pytest.mark.parametrize("place", ["/search", "/images"])
@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"not a picture", id="text"),
        pytest.param(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", id="program"),
        pytest.param(encoded(Image.new("RGB", (40, 40)), "JPEG")[:300], id="truncated"),
        pytest.param(bomb(9000, 9000), id="bomb"),
        pytest.param(bomb(30000, 30000), id="larger bomb"),
    ],
)
def test_what_is_no_picture_is_refused(client, world, place, data):
    error_of(client.post(place, files={"picture": ("a.png", data)}), 422)
    assert len(world.gallery) == COUNT


@pytest.mark.parametrize("mode", ["L", "CMYK", "RGBA", "I;16", "P", "1"])
def test_every_kind_of_picture_is_taken(client, mode):
    kind = "TIFF" if mode in ("CMYK", "I;16") else "PNG"
    files = {"picture": ("a", encoded(Image.new(mode, (1, 1)), kind))}
    assert len(client.post("/search", files=files).json()["results"]) == COUNT


def test_a_form_without_a_picture_is_refused(client):
    error_of(client.post("/search", data={"k": "3"}, files={"other": b"x"}), 422)
    error_of(client.post("/search", data={"picture": "text"}, files={"other": b"x"}), 422)
    broken = {"Content-Type": "multipart/form-data; boundary=x"}
    error_of(client.post("/search", content=b"--x\r\nbroken", headers=broken), 422)
    error_of(client.post("/search", content=b"", headers={"Content-Type": "multipart/form-data"}), 400)


def test_other_types_addresses_and_methods_are_refused(client, world):
    error_of(client.post("/search", content=b"red", headers={"Content-Type": "text/plain"}), 415)
    error_of(client.post("/images", content=b"red", headers={"Content-Type": "text/plain"}), 415)
    error_of(client.delete(f"/images/{world.ids[0]}"), 405)
    for address in ("/images/..%2f..%2fetc%2fpasswd", "/static/../app.py", "/static/..%2fapp.py", "/nothing"):
        assert error_of(client.get(address), 404)
    for address in ("/images/x", "/images?count=0", f"/explain?id={ABSENT}", "/explain?id=x&text=a"):
        error_of(client.get(address), 422)
    for address in (f"/images/{ABSENT}", f"/images/{ABSENT}?thumbnail", f"/explain?id={ABSENT}&text=a"):
        assert world.gallery.location not in error_of(client.get(address), 404)


def test_bodies_are_limited_declared_or_not(world):
    with limited(world, upload_bytes=50_000, body_bytes=1000) as client:
        large = b'{"text": "' + b"a" * 2000 + b'"}'
        kind = {"Content-Type": "application/json"}
        error_of(client.post("/search", content=large, headers=kind), 413)
        error_of(client.post("/search", content=iter([large[:900], large[900:]]), headers=kind), 413)
        error_of(client.post("/search", files={"picture": ("a", b"x" * 60_000)}), 413)
        error_of(client.post("/search", files={"picture": ("a", b"x" * 50_500)}), 413)


def test_a_client_that_asks_too_often_waits(world):
    with limited(world, rate=1, burst=3) as client:
        answers = [client.post("/search", json={"text": "red"}) for _ in range(5)]
        assert [answer.status_code for answer in answers][:3] == [200] * 3
        assert "ask again" in error_of(answers[-1], 429)
        assert int(answers[-1].headers["retry-after"]) >= 1
        assert client.get("/healthz").status_code == 200


def test_more_than_is_taken_on_is_refused_and_the_rest_answered(world, monkeypatch):
    """With the search held, the queue fills; what was accepted is answered once it goes on."""
    with limited(world, queue=2, batch=1, collect_seconds=0) as client:
        held, begun = threading.Event(), threading.Event()
        search = world.gallery.search

        def slow(*args, **kwargs):
            begun.set()
            held.wait(20)
            return search(*args, **kwargs)

        monkeypatch.setattr(world.gallery, "search", slow)

        def ask(_):
            return client.post("/search", json={"text": "red", "k": 1})

        with ThreadPoolExecutor(8) as pool:
            first = pool.submit(ask, 0)
            assert begun.wait(10)
            others = [pool.submit(ask, number) for number in range(7)]
            refused = []
            while len(refused) < 5:
                refused = [each.result() for each in others if each.done()]
            held.set()
            answers = [each.result() for each in (first, *others)]
    statuses = sorted(answer.status_code for answer in answers)
    assert statuses == [200] * 3 + [503] * 5
    busy = next(answer for answer in answers if answer.status_code == 503)
    assert "busy" in error_of(busy, 503)
    assert busy.headers["retry-after"] == "1"


def test_each_client_gets_the_answer_to_its_own_question(serve, world):
    """Texts, pictures and different k at once: batched together, never mixed up."""
    address = serve()
    texts = [world.scenes[index].captions[each] for index in range(0, COUNT, 2) for each in (0, 1)]
    expected = {text: [hit.id for hit in world.gallery.search(text, 3)] for text in texts}

    def ask_all(shift):
        with httpx.Client(base_url=address, timeout=60) as client:
            for place in range(3):
                text = texts[(place * 5 + shift) % len(texts)]
                k = 2 + (place + shift) % 2
                found = client.post("/search", json={"text": text, "k": k}).json()["results"]
                assert [each["id"] for each in found] == expected[text][:k]
                index = (place + shift) % COUNT
                files = {"picture": ("a.png", encoded(world.scenes.open(index)))}
                own = client.post("/search", files=files, data={"k": 1}).json()["results"]
                assert [each["id"] for each in own] == [world.ids[index]]
        return shift

    with ThreadPoolExecutor(8) as pool:
        assert sorted(pool.map(ask_all, range(8))) == list(range(8))
    with httpx.Client(base_url=address) as client:
        text = client.get("/metrics").text
    batches = int(re.search(r"seps_search_batch_size_count (\d+)", text)[1])
    asked = float(re.search(r"seps_search_batch_size_sum (\S+)", text)[1])
    assert asked == 8 * 6
    assert batches < asked


def test_a_token_closes_all_but_the_page(world):
    app = make_app(world.gallery, FREE, token="open sesame")
    with TestClient(app, base_url="http://localhost") as client:
        for address in ("/gallery", "/metrics", "/images", f"/images/{world.ids[0]}", "/nothing"):
            response = client.get(address)
            error_of(response, 401)
            assert response.headers["www-authenticate"] == "Bearer"
        for wrong in ("open", "Bearer", "Bearer open", "Basic open sesame", "Bearer café"):
            headers = {"Authorization": wrong.encode()}
            error_of(client.post("/search", json={"text": "a"}, headers=headers), 401)
        for address in ("/", "/static/app.js", "/healthz", "/docs", "/openapi.json"):
            assert client.get(address).status_code == 200
        right = {"Authorization": "Bearer open sesame"}
        assert client.get("/gallery", headers=right).status_code == 200
        assert "HTTPBearer" in client.get("/openapi.json").text


def test_guessing_the_token_is_slow(world):
    app = make_app(world.gallery, Limits(rate=1, burst=3), token="secret")
    with TestClient(app, base_url="http://localhost") as client:
        tries = [client.get("/gallery", headers={"Authorization": f"Bearer {n}"}) for n in range(5)]
    assert [each.status_code for each in tries] == [401] * 3 + [429] * 2


def test_other_sites_and_names_are_refused(client):
    asked = {"json": {"text": "red"}}
    error_of(client.post("/search", **asked, headers={"Origin": "http://evil.example"}), 403)
    error_of(client.post("/search", **asked, headers={"Origin": "null"}), 403)
    assert client.post("/search", **asked, headers={"Origin": "http://localhost"}).status_code == 200
    for host in ("evil.example", "[", "", "a]b"):
        error_of(client.get("/gallery", headers={"Host": host}), 400)
    assert client.get("/gallery", headers={"Host": "127.0.0.1:8000"}).status_code == 200


def test_a_service_that_only_reads_takes_no_pictures(world):
    with TestClient(make_app(world.gallery, FREE, read_only=True), base_url="http://localhost") as client:
        assert client.get("/gallery").json()["additions"] is False
        error_of(client.post("/images", files={"picture": ("a", encoded(world.scenes.open(0)))}), 403)


def test_every_answer_carries_its_protection(client, world):
    for address in ("/", "/docs", "/static/app.js", f"/images/{world.ids[0]}", "/nothing", "/gallery"):
        headers = client.get(address).headers
        assert headers["x-content-type-options"] == "nosniff"
        assert "default-src 'none'" in headers["content-security-policy"]
        assert "unsafe-inline" not in headers["content-security-policy"].partition("style-src")[0]
        assert headers["referrer-policy"] == "no-referrer"


def test_a_defect_is_one_sentence_too(world, monkeypatch, caplog):
    app = make_app(world.gallery, FREE)
    monkeypatch.setattr(world.gallery, "search", lambda *_: 1 / 0)
    with TestClient(app, base_url="http://localhost") as client:
        sentence = error_of(client.post("/search", json={"text": "red"}), 500)
        assert "division" not in sentence
        assert "ZeroDivisionError" in caplog.text
        assert 'route="/search",status="500"' in client.get("/metrics").text


def test_metrics_count_by_route(client, world):
    for _ in range(3):
        client.get(f"/images/{world.ids[0]}?thumbnail")
    client.get("/made/up/by/a/client")
    text = client.get("/metrics").text
    assert 'seps_requests_total{method="GET",route="/images/{id}",status="200"} 3' in text
    assert 'seps_request_seconds_count{route="/images/{id}"} 3' in text
    assert "made" not in text
    assert "seps_search_queue 0" in text


def test_the_documents_need_no_network(client):
    page = client.get("/docs").text
    for address in re.findall(r'(?:src|href)="([^"]+)"', page):
        assert address.startswith("/")
        assert client.get(address).status_code == 200


def test_the_page_asks_nobody_else(client):
    for name in ("index.html", "style.css", "app.js", "api.js", "grid.js", "viewer.js", "overlay.js"):
        text = client.get(f"/static/{name}").text
        foreign = set(re.findall(r"https?://[^\s\"')]+|url\([^)]*\)|@import", text))
        assert foreign <= {"http://www.w3.org/2000/svg"}
