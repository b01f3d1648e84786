"""The page in a real headless browser."""

import base64
import re

import pytest
from browser import browsing
from serving import COUNT, encoded

from seps.web import Limits


@pytest.fixture(scope="module")
def context(tmp_path_factory):
    with browsing(tmp_path_factory.mktemp("profile")) as context:
        context.set_default_timeout(20_000)
        yield context


@pytest.fixture
def page(context):
    """A page whose every complaint and every foreign request fails the test."""
    page = context.new_page()
    wrong = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on(
        "console",
        lambda message: wrong.append(message.text) if "Content Security Policy" in message.text else None,
    )
    page.on(
        "request",
        lambda request: (
            None
            if re.match(r"(http://127\.0\.0\.1:\d+/|blob:http://127\.0\.0\.1)", request.url)
            else wrong.append(request.url)
        ),
    )
    yield page
    page.close()
    assert not wrong


def until(page, condition):
    """Wait for something; the page's policy lets no test evaluate texts in it."""
    for _ in range(500):
        if condition():
            return
        page.wait_for_timeout(20)
    raise AssertionError("waited in vain")


def search(page, text):
    page.fill("#query", text)
    page.press("#query", "Enter")
    page.wait_for_selector(".mark")


def shows(page):
    """What is drawn over the opened picture."""
    return page.get_attribute("#viewer-layer", "data-shows") or ""


def colours(page):
    """How many pixels of the layer are clear, dimmed and aglow."""
    return page.evaluate(
        """() => {
            const layer = document.getElementById("viewer-layer");
            const data = layer.getContext("2d").getImageData(0, 0, layer.width, layer.height).data;
            const found = { clear: 0, dim: 0, warm: 0 };
            for (let at = 0; at < data.length; at += 4) {
                if (data[at + 3] === 0) found.clear += 1;
                else if (data[at] > 60) found.warm += 1;
                else found.dim += 1;
            }
            return found;
        }"""
    )


def drop(page, data, name="a.png", kind="image/png"):
    """Drag a file over the page and let it fall."""
    page.evaluate(
        """([data, name, kind]) => {
            const bytes = Uint8Array.from(atob(data), (letter) => letter.charCodeAt(0));
            const carried = new DataTransfer();
            carried.items.add(new File([bytes], name, { type: kind }));
            const settings = { dataTransfer: carried, bubbles: true, cancelable: true };
            const event = (what) => new DragEvent(what, settings);
            document.body.dispatchEvent(event("dragenter"));
            window.overlayWasOpen = document.getElementById("drop").classList.contains("open");
            document.body.dispatchEvent(event("dragover"));
            document.body.dispatchEvent(event("drop"));
        }""",
        [base64.b64encode(data).decode(), name, kind],
    )
    assert page.evaluate("window.overlayWasOpen")


def test_search_open_slide_hover_and_leave(page, serve, world):
    page.goto(serve())
    page.wait_for_selector(".card")
    assert page.locator(".card").count() == COUNT
    assert page.inner_text("#size") == f"{COUNT} pictures"
    search(page, world.texts[0])
    expected = world.gallery.search(world.texts[0], 24)
    assert page.locator(".name").all_inner_texts() == [hit.entry.name for hit in expected]
    assert page.locator(".mark").first.inner_text() == f"{expected[0].score:.3f}"
    assert world.texts[0] in page.inner_text("#status")
    assert "?q=" in page.url

    page.locator(".card").first.click()
    page.wait_for_selector("#why:not([hidden])")
    assert page.inner_text("#viewer-name") == expected[0].entry.name
    assert page.input_value("#kept") == "32"
    assert shows(page) == "kept 32"
    seen = colours(page)
    assert seen["clear"] == pytest.approx(seen["dim"], rel=0.05)
    page.focus("#kept")
    page.keyboard.press("Home")
    assert shows(page) == "kept 0"
    assert colours(page)["clear"] == 0
    page.keyboard.press("End")
    assert page.inner_text("#kept-count") == "64 of 64"
    assert colours(page)["dim"] == 0

    word = page.locator("#words button").nth(2)
    word.hover()
    assert shows(page) == f"word {word.inner_text()}"
    assert word.get_attribute("aria-pressed") == "true"
    assert colours(page)["warm"] > 0
    assert page.inner_text("#met")
    page.hover("#viewer-name")
    assert shows(page) == "kept 64"
    page.focus("#ask button")
    page.keyboard.press("Tab")
    assert shows(page).startswith("word ")
    page.locator("#sum summary").click()
    page.wait_for_selector("#sum dd", state="visible")
    numbers = page.locator("#sum dd").all_inner_texts()
    parts = [float(number.replace("−", "-")) for number in numbers]
    assert sum(parts[:-1]) == pytest.approx(parts[-1], abs=0.0006 * len(parts))

    page.locator("#next").click()
    second = expected[1].entry.name
    until(page, lambda: page.inner_text("#viewer-name") == second)
    page.keyboard.press("Escape")
    page.wait_for_selector("#viewer", state="hidden")
    # Back where one came from: the card of the picture shown last.
    assert page.evaluate("document.activeElement.querySelector('.name').textContent") == second
    page.go_back()
    page.wait_for_selector(".mark", state="detached")
    assert page.input_value("#query") == ""


def test_the_keyboard_is_enough(page, serve, world):
    page.goto(serve())
    page.wait_for_selector(".card")
    page.keyboard.press("/")
    page.keyboard.type("red ring")
    page.keyboard.press("Enter")
    page.wait_for_selector(".mark")
    page.keyboard.press("ArrowDown")

    def here():
        return page.evaluate("[...document.querySelectorAll('.card')].indexOf(document.activeElement)")

    columns = page.evaluate(
        "getComputedStyle(document.getElementById('results')).gridTemplateColumns.split(' ').length"
    )
    assert here() == 0
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    assert here() == 1 + columns
    page.keyboard.press("ArrowUp")
    page.keyboard.press("ArrowLeft")
    assert here() == 0
    page.keyboard.press("End")
    assert here() == COUNT - 1
    page.keyboard.press("Home")
    page.keyboard.press("Enter")
    page.wait_for_selector("#why:not([hidden])")
    name = page.inner_text("#viewer-name")
    page.focus("#close")
    page.keyboard.press("ArrowRight")
    assert page.inner_text("#viewer-name") != name
    page.keyboard.press("Escape")
    page.wait_for_selector("#viewer", state="hidden")
    assert here() == 1
    page.keyboard.press("ArrowUp")
    assert page.evaluate("document.activeElement.id") == "query"


def test_focus_comes_back_with_the_viewers_end_not_after_it(page, serve):
    page.goto(serve())
    page.wait_for_selector(".card")
    page.evaluate(
        """() => {
            window.ends = [];
            const cards = () => [...document.querySelectorAll(".card")];
            const viewer = document.getElementById("viewer");
            const note = () => viewer.open || window.ends.push(cards().indexOf(document.activeElement));
            new MutationObserver(note).observe(viewer, { attributeFilter: ["open"] });
        }"""
    )
    for leave in (lambda: page.keyboard.press("Escape"), lambda: page.locator("#close").click()):
        page.locator(".card").first.click()
        page.locator("#next").click()
        leave()
        page.wait_for_selector("#viewer", state="hidden")
    assert page.evaluate("window.ends") == [1, 1]


def test_a_dropped_and_a_pasted_picture_find_themselves(page, serve, world):
    page.goto(serve())
    page.wait_for_selector(".card")
    drop(page, encoded(world.scenes.open(6)))
    page.wait_for_selector(".mark")
    assert page.locator(".name").first.inner_text() == "scene 6.png"
    assert page.locator("#sample").is_visible()
    page.evaluate(
        """(data) => {
            const bytes = Uint8Array.from(atob(data), (letter) => letter.charCodeAt(0));
            const carried = new DataTransfer();
            carried.items.add(new File([bytes], "b.png", { type: "image/png" }));
            document.dispatchEvent(new ClipboardEvent("paste", { clipboardData: carried, bubbles: true }));
        }""",
        base64.b64encode(encoded(world.scenes.open(9))).decode(),
    )
    until(page, lambda: page.locator(".name").all_inner_texts()[:1] == ["scene 9.png"])
    page.locator("#sample button").click()
    page.wait_for_selector("#sample", state="hidden")
    page.set_input_files(
        "#picture", {"name": "c.png", "mimeType": "image/png", "buffer": encoded(world.scenes.open(2))}
    )
    page.wait_for_selector(".mark")
    assert page.locator(".name").first.inner_text() == "scene 2.png"
    # Without words there is nothing to explain until some are typed.
    page.locator(".card").first.click()
    page.wait_for_selector("#similar:enabled")
    assert page.locator("#why").is_hidden()
    page.fill("#ask-text", "small circle")
    page.press("#ask-text", "Enter")
    page.wait_for_selector("#why:not([hidden])")
    assert [text.strip() for text in page.locator("#words button").all_inner_texts()] == ["small", "circle"]
    page.locator("#similar").click()
    page.wait_for_selector("#viewer", state="hidden")


def test_what_goes_wrong_is_said(page, serve, world):
    page.goto(serve(Limits(rate=1, burst=60)))
    page.wait_for_selector(".card")
    drop(page, b"no picture at all")
    page.wait_for_selector("#notice:not([hidden])")
    assert "cannot be read" in page.inner_text("#notice")
    drop(page, b"words", "a.txt", "text/plain")
    assert "no picture" in page.inner_text("#notice")
    page.route("**/search", lambda route: route.abort())
    page.fill("#query", "red")
    page.press("#query", "Enter")
    until(page, lambda: "does not answer" in page.inner_text("#notice"))
    page.unroute("**/search")
    page.locator("#notice button").click()
    page.wait_for_selector(".mark")
    assert page.locator("#notice").is_hidden()
    page.route("**/search", lambda route: route.fulfill(json={"results": [], "milliseconds": 1}))
    page.fill("#query", "nothing at all")
    page.press("#query", "Enter")
    page.wait_for_selector("#notice:not([hidden])")
    assert "Nothing found" in page.inner_text("#notice")
    page.unroute("**/search")


def test_an_empty_query_is_told_what_to_do(page, serve, world):
    """The sentence goes with the first letter, and leaves nothing behind that holds a search back."""
    said = "document.querySelector('#query').validationMessage"
    page.goto(serve())
    page.wait_for_selector(".card")
    page.fill("#query", "   ")
    page.press("#query", "Enter")
    assert "few words" in page.evaluate(said)
    assert page.locator(".mark").count() == 0
    page.fill("#query", "red")
    assert page.evaluate(said) == ""
    page.press("#query", "Enter")
    page.wait_for_selector(".mark")


def test_while_it_waits_it_says_so(page, serve):
    page.goto(serve())
    page.wait_for_selector(".card")
    waiting = []

    def hold(route):
        waiting.append(route)

    page.route("**/search", hold)
    page.fill("#query", "red")
    page.press("#query", "Enter")
    page.wait_for_selector(".skeleton")
    assert page.get_attribute("#results", "aria-busy") == "true"
    assert page.inner_text("#status") == "Searching …"
    waiting[0].continue_()
    page.wait_for_selector(".mark")
    assert page.get_attribute("#results", "aria-busy") == "false"
    assert page.locator(".skeleton").count() == 0


def test_a_closed_gallery_asks_for_its_token(page, serve):
    page.goto(serve(token="sesame"))
    page.wait_for_selector("#door[open]")
    page.fill("#token", "wrong")
    page.press("#token", "Enter")
    until(page, lambda: page.inner_text("#door-notice"))
    page.fill("#token", "sesame")
    page.press("#token", "Enter")
    page.wait_for_selector(".card img:not(.missing)")
    page.reload()
    page.wait_for_selector(".card img:not(.missing)")
    assert page.locator("#door").is_hidden()


def test_a_phone_shows_everything(page, serve, world):
    page.set_viewport_size({"width": 360, "height": 740})
    page.goto(serve())
    search(page, world.texts[1])

    def fits():
        return page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")

    assert fits()
    page.locator(".card").first.click()
    page.wait_for_selector("#why:not([hidden])")
    assert fits()
    for name in ("#close", "#next", "#kept", "#words button", "#ask button"):
        box = page.locator(name).first.bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= 360
        assert box["height"] >= 32
    page.locator("#words button").nth(1).dispatch_event("click")
    assert shows(page).startswith("word ")
    # The picture stays in sight while one scrolls to the words.
    page.locator("#similar").scroll_into_view_if_needed()
    assert page.locator("#viewer-picture").bounding_box()["y"] >= -1


def luminance(colour):
    """Relative luminance (WCAG) of "rgb(r, g, b)"."""
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one, other):
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_both_themes_can_be_read(page, serve, theme):
    page.emulate_media(color_scheme=theme)
    page.goto(serve())
    search(page, "red")
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (luminance(ground) > 0.5) == (theme == "light")
    pairs = page.evaluate(
        """() => ["body", "#status", "#hint", "#go", "#add", ".name", ".mark"].map((name) => {
            const element = document.querySelector(name);
            let under = element;
            const ground = (one) => getComputedStyle(one).backgroundColor;
            while (under.parentElement && ground(under) === "rgba(0, 0, 0, 0)") under = under.parentElement;
            return [name, getComputedStyle(element).color, ground(under)];
        })"""
    )
    assert {
        name: round(contrast(ink, under), 1) for name, ink, under in pairs if contrast(ink, under) < 4.5
    } == {}
    page.locator("#theme").click()
    turned = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (luminance(turned) > 0.5) != (theme == "light")
    page.reload()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == turned
    page.evaluate("localStorage.clear()")


def test_every_control_has_a_name(page, serve):
    page.goto(serve())
    search(page, "red")
    page.locator(".card").first.click()
    page.wait_for_selector("#why:not([hidden])")
    nameless = page.evaluate(
        """() => [...document.querySelectorAll("button, input, canvas, dialog, a, [role=radiogroup]")]
            .filter((each) => !each.hidden)
            .filter((each) => !(each.getAttribute("aria-label") || each.getAttribute("aria-labelledby")
                || each.textContent.trim() || each.labels?.length))
            .map((each) => each.outerHTML)"""
    )
    assert nameless == []
