"""Images: any mode becomes the RGB a person sees, and every fault names its file."""

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from seps.data.images import (
    View,
    augment_image,
    evaluate_image,
    evaluation_box,
    names_side,
    open_image,
    random_box,
    to_image,
    to_tensor,
)


def _pixel(image: Image.Image, x: int = 0, y: int = 0) -> tuple[int, ...]:
    value = image.getpixel((x, y))
    assert isinstance(value, tuple)
    return value


def test_exif_orientation_is_applied(tmp_path: Path) -> None:
    image = Image.new("RGB", (20, 10), "white")
    exif = Image.Exif()
    exif[0x0112] = 6
    image.save(tmp_path / "turned.jpg", exif=exif)
    assert open_image(tmp_path / "turned.jpg").size == (10, 20)


@pytest.mark.parametrize(
    ("image", "suffix", "expected"),
    [
        (Image.new("CMYK", (4, 4), (0, 255, 255, 0)), "jpg", (255, 0, 0)),
        (Image.new("L", (4, 4), 90), "png", (90, 90, 90)),
        (Image.new("1", (4, 4), 1), "png", (255, 255, 255)),
        (Image.new("RGBA", (4, 4), (255, 0, 0, 0)), "png", (255, 255, 255)),
        (Image.new("RGBA", (4, 4), (0, 0, 0, 51)), "png", (204, 204, 204)),
        (Image.new("LA", (4, 4), (0, 51)), "png", (204, 204, 204)),
        (Image.new("RGB", (4, 4), (9, 80, 200)).quantize(4), "png", (9, 80, 200)),
        (Image.fromarray(np.full((4, 4), 25700, np.uint16)), "png", (100, 100, 100)),
        (Image.fromarray(np.full((4, 4), 0.4, np.float32)), "tiff", (102, 102, 102)),
        (Image.fromarray(np.full((4, 4), 200, np.int32)), "tiff", (200, 200, 200)),
    ],
)
def test_every_mode_becomes_what_a_person_sees(
    tmp_path: Path, image: Image.Image, suffix: str, expected: tuple[int, ...]
) -> None:
    image.save(tmp_path / f"image.{suffix}")
    opened = open_image(tmp_path / f"image.{suffix}")
    assert opened.mode == "RGB"
    np.testing.assert_allclose(_pixel(opened), expected, atol=3 if suffix == "jpg" else 1)


def test_a_transparent_palette_lies_over_white(tmp_path: Path) -> None:
    image = Image.new("P", (4, 4), 1)
    image.putpalette([0, 0, 0, 200, 30, 30])
    image.save(tmp_path / "palette.png", transparency=1)
    assert _pixel(open_image(tmp_path / "palette.png")) == (255, 255, 255)


def test_of_an_animation_the_first_frame_is_read(tmp_path: Path) -> None:
    frames = [Image.new("RGB", (4, 4), colour) for colour in ("red", "blue")]
    frames[0].save(tmp_path / "moving.gif", save_all=True, append_images=frames[1:])
    assert _pixel(open_image(tmp_path / "moving.gif")) == (255, 0, 0)


@pytest.mark.parametrize("suffix", ["jpg", "png", "gif", "webp"])
def test_a_truncated_file_is_named(tmp_path: Path, suffix: str) -> None:
    noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)
    whole = tmp_path / f"whole.{suffix}"
    Image.fromarray(noise).save(whole)
    cut = tmp_path / f"cut.{suffix}"
    cut.write_bytes(whole.read_bytes()[: whole.stat().st_size // 2])
    with pytest.raises(ValueError, match=rf"cut\.{suffix}: not a readable image \("):
        open_image(cut)


def test_other_faults_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none\.png: there is no such image file"):
        open_image(tmp_path / "none.png")
    (tmp_path / "text.png").write_text("not a picture")
    with pytest.raises(ValueError, match=r"text\.png: not a readable image"):
        open_image(tmp_path / "text.png")
    with pytest.raises(ValueError, match=r"upload: not a readable image"):
        open_image(io.BytesIO(b""), name="upload")
    Image.new("RGB", (20, 10)).save(tmp_path / "big.png")
    with pytest.raises(ValueError, match=r"big\.png: 20x10 is more than the 199 pixels allowed"):
        open_image(tmp_path / "big.png", most_pixels=199)
    assert open_image(tmp_path / "big.png", most_pixels=200).size == (20, 10)


@given(
    st.binary(max_size=200),
    st.sampled_from([b"", b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff\xe0", b"GIF89a", b"BM"]),
)
def test_any_bytes_give_an_image_or_one_sentence(tail: bytes, head: bytes) -> None:
    try:
        found = open_image(io.BytesIO(head + tail), name="bytes").mode
    except ValueError as error:
        found = str(error)
    assert found == "RGB" or (found.startswith("bytes: ") and "\n" not in found)


def test_evaluation_box_by_hand() -> None:
    assert evaluation_box(200, 100, View(50, 50)) == (0, 0, 200, 100)
    assert evaluation_box(200, 100, View(50, 50, fit="crop")) == (50, 0, 150, 100)
    assert evaluation_box(200, 100, View(50, 50, fit="crop", crop_share=0.5)) == (75, 25, 125, 75)
    assert evaluation_box(100, 100, View(50, 25, fit="crop")) == (25, 0, 75, 100)


@given(st.integers(1, 300), st.integers(1, 300), st.integers(0, 2**32), st.floats(0.05, 1))
def test_random_box_lies_inside_and_has_its_share(width: int, height: int, seed: int, low: float) -> None:
    view = View(24, 24, scale=(low, 1.0))
    left, top, right, bottom = random_box(width, height, view, np.random.default_rng(seed))
    assert 0 <= left < right <= width
    assert 0 <= top < bottom <= height
    area = (right - left) * (bottom - top) / (width * height)
    assert area <= 1 + 1e-9
    if right - left < width and bottom - top < height:
        assert area >= low - 1e-6


def test_a_random_box_has_the_proportions_of_its_view() -> None:
    view = View(height=10, width=20, scale=(0.25, 0.25), ratio=(1.0, 1.0))
    left, top, right, bottom = random_box(200, 100, view, np.random.default_rng(0))
    assert (right - left, bottom - top) == pytest.approx((100, 50))


def test_normalisation_by_hand_and_back() -> None:
    view = View(2, 3, mean=(0.5, 0.25, 0.0), std=(0.5, 0.25, 1.0))
    image = Image.new("RGB", (3, 2), (255, 0, 51))
    pixels = to_tensor(image, view)
    assert pixels.shape == (3, 2, 3)
    torch.testing.assert_close(pixels[:, 0, 0], torch.tensor([1.0, -1.0, 0.2]))
    assert _pixel(to_image(pixels, view)) == (255, 0, 51)
    assert to_image(pixels, view).size == (3, 2)


def _halves() -> Image.Image:
    values = np.zeros((16, 16, 3), np.uint8)
    values[:, :8] = 255
    return Image.fromarray(values)


def test_augmentation_follows_its_generator_alone() -> None:
    first, again, other = (
        augment_image(_halves(), View(8, 8), np.random.default_rng(seed)) for seed in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_no_mirror_where_a_text_names_a_side() -> None:
    still = View(8, 8, scale=(1.0, 1.0), ratio=(1.0, 1.0))

    def lit_side(view: View, *texts: str) -> set[bool]:
        found = [augment_image(_halves(), view, np.random.default_rng(i), texts) for i in range(20)]
        return {bool(pixels[0, 0, 0] > pixels[0, 0, -1]) for pixels in found}

    assert lit_side(still, "a bright half") == {True, False}
    assert lit_side(still, "a bright half", "It is on the LEFT.") == {True}
    assert lit_side(View(8, 8, scale=(1.0, 1.0), ratio=(1.0, 1.0), flip="never")) == {True}
    assert lit_side(View(8, 8, scale=(1.0, 1.0), ratio=(1.0, 1.0), flip="always"), "left") == {True, False}
    assert not names_side("a bright lefty")


def test_evaluation_is_deterministic_and_squashes() -> None:
    pixels = evaluate_image(Image.new("RGB", (40, 10), (255, 255, 255)), View(8, 6))
    assert pixels.shape == (3, 8, 6)
    torch.testing.assert_close(pixels, torch.ones(3, 8, 6))


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"height": 0}, "positive size, not 0x224"),
        ({"std": (0.0, 1.0, 1.0)}, "std must be positive"),
        ({"crop_share": 1.5}, r"crop_share must lie in \(0, 1\], not 1.5"),
        ({"scale": (0.9, 0.5)}, "scale must be 0 < low <= high <= 1"),
        ({"ratio": (0.0, 1.0)}, "ratio must be 0 < low <= high"),
        ({"fit": "stretch"}, "fit must be 'squash' or 'crop', not 'stretch'"),
        ({"flip": "maybe"}, "flip must be 'never', 'unsided' or 'always'"),
    ],
)
def test_a_view_that_cannot_be_is_refused(settings: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        View(**settings)  # type: ignore[arg-type]
