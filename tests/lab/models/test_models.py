"""The models: published parameter counts, the shapes of the paper's tables, names that a conversion can point at."""

import fnmatch

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mixnorm
from mixnorm_lab import models
from mixnorm_lab.models import CifarCNN, DenseNet, DigitsCNN, Discriminator, Generator, InceptionV3, ResNet, WideResNet


def parameters(model):
    return sum(p.numel() for p in model.parameters())


def shapes_after(model, x):
    """The output shape of every named module, without the batch."""
    shapes = {}
    for name, module in model.named_modules():
        module.register_forward_hook(lambda _m, _i, y, name=name: shapes.__setitem__(name, tuple(y.shape[1:])))
    model.eval()(x)
    return shapes


def norms_in(model):
    return [name for name, module in model.named_modules() if isinstance(module, nn.BatchNorm2d)]


def backward(model, x):
    """A training step's gradients under a random gradient of the output, which a norm does not cancel."""
    y = model(x)
    y.backward(torch.randn_like(y))
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize(("depth", "millions"), [(40, 1.0), (100, 7.0)])
def test_densenet_has_the_published_number_of_parameters(depth, millions):
    assert round(parameters(DenseNet(depth, 12)) / 1e6, 1) == millions


def test_densenet_40_has_the_parameters_of_the_original():
    assert parameters(DenseNet(40, 12)) == 1_019_722


@pytest.mark.parametrize(("depth", "channels"), [(19, 196), (40, 448)])
def test_densenet_has_the_papers_channels_at_its_last_norm(depth, channels):
    assert DenseNet(depth, 12, 100).last_norm.num_features == channels


def test_densenet_shapes():
    shapes = shapes_after(DenseNet(10, 4, 7), torch.randn(2, 3, 32, 32))
    assert shapes["stem"] == (16, 32, 32)
    assert shapes["block1"] == shapes["transition1.norm"] == (24, 32, 32)
    assert shapes["transition1"] == (24, 16, 16)
    assert shapes["transition2"] == (32, 8, 8)
    assert shapes["last_norm"] == (40, 8, 8)
    assert shapes[""] == (7,)


@pytest.mark.parametrize("depth", [3, 4, 20, 41])
def test_densenet_depth_must_fit_three_blocks(depth):
    with pytest.raises(ValueError, match=r"use \d+ or \d+") as error:
        DenseNet(depth)
    for word in str(error.value).split()[-3::2]:
        DenseNet(int(word))


def test_densenet_keeps_the_memory_format():
    model = DenseNet(7, 4).to(memory_format=torch.channels_last)
    seen = []
    model.last_norm.register_forward_hook(lambda _m, i, _y: seen.append(i[0]))
    model(torch.randn(2, 3, 32, 32).contiguous(memory_format=torch.channels_last))
    assert seen[0].is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    ("name", "classes", "count"),
    [
        ("resnet-18", 100, 11_220_132),
        ("resnet-18", 10, 11_173_962),
        ("resnet-34", 10, 21_282_122),
        ("wide-resnet-16-4", 10, 2_748_890),
        ("wide-resnet-28-10", 10, 36_479_194),
    ],
)
def test_residual_networks_have_the_published_numbers_of_parameters(name, classes, count):
    with torch.device("meta"):
        assert parameters(models.build(name, classes)) == count


def test_resnet_shapes():
    shapes = shapes_after(ResNet(18, 7), torch.randn(2, 3, 32, 32))
    assert shapes["stem"] == shapes["stage1"] == shapes["stage1.0.conv2.norm"] == (64, 32, 32)
    assert shapes["stage2.0.shortcut"] == shapes["stage2"] == (128, 16, 16)
    assert (shapes["stage3"], shapes["stage4"], shapes[""]) == ((256, 8, 8), (512, 4, 4), (7,))


def test_wide_resnet_shapes():
    shapes = shapes_after(WideResNet(10, 2, 7), torch.randn(2, 3, 32, 32))
    assert (shapes["stem"], shapes["stage1"]) == ((16, 32, 32), (32, 32, 32))
    assert shapes["stage2.0.norm1"] == (32, 32, 32)
    assert (shapes["stage2"], shapes["stage3"], shapes[""]) == ((64, 16, 16), (128, 8, 8), (7,))


@pytest.mark.parametrize("depth", [4, 9, 18, 41])
def test_wide_resnet_depth_must_fit_three_stages(depth):
    with pytest.raises(ValueError, match=r"use \d+ or \d+") as error:
        WideResNet(depth)
    for word in str(error.value).split()[-3::2]:
        WideResNet(int(word), 1)


def test_resnet_has_depths_of_its_own():
    with pytest.raises(ValueError, match="use 18 or 34"):
        ResNet(20)


@pytest.mark.parametrize(("name", "sums"), [("resnet-18", 8 + 3), ("wide-resnet-10-1", 0)])
def test_relu_and_sum_are_the_norms_that_a_relu_follows_and_the_others(name, sums):
    """A ReLU follows a norm exactly if to put one there changes nothing."""
    torch.manual_seed(0)
    model = models.build(name, 5).eval()
    for norm in norms_in(model):
        nn.init.normal_(model.get_submodule(norm).bias)
    x = torch.randn(1, 3, 32, 32)
    followed, added = [], []
    with torch.no_grad():
        expected = model(x)
        for norm in norms_in(model):
            handle = model.get_submodule(norm).register_forward_hook(lambda _m, _i, y: y.relu())
            (followed if torch.equal(model(x), expected) else added).append(norm)
            handle.remove()
    assert len(added) == sums
    assert sorted(n for glob in models.last_norms(name, "relu") for n in fnmatch.filter(norms_in(model), glob)) == sorted(
        followed
    )
    assert sorted(n for glob in models.without_relu(name) for n in fnmatch.filter(norms_in(model), glob)) == sorted(added)


@pytest.mark.parametrize("classes", [10, 100])
def test_cifar_cnn_has_the_papers_shapes(classes):
    model = CifarCNN(classes)
    shapes = shapes_after(model, torch.randn(2, 3, 32, 32))
    assert [shapes[f"conv{i}.norm"] for i in range(1, 5)] == [(64, 32, 32), (128, 16, 16), (128, 8, 8), (256, 4, 4)]
    assert [shapes[f"conv{i}"] for i in range(1, 5)] == [(64, 16, 16), (128, 8, 8), (128, 4, 4), (256, 4, 4)]
    assert shapes[""] == (classes,)


def test_cifar_cnn_starts_lecun_normal():
    torch.manual_seed(0)
    model = CifarCNN()
    for conv in (model.conv1, model.conv2, model.conv3, model.conv4):
        fan_in = conv.conv.weight[0].numel()
        assert conv.conv.weight.std().item() * fan_in**0.5 == pytest.approx(1, abs=0.03)


def test_inception_has_the_published_number_of_parameters():
    model = InceptionV3(1000)
    assert parameters(model) - parameters(model.linear) == 21_785_568


def test_inception_has_the_papers_shapes():
    shapes = shapes_after(InceptionV3(100), torch.randn(2, 3, 32, 32))
    assert shapes["stem"] == (192, 32, 32)
    assert [shapes[f"inc1.{i}"] for i in range(3)] == [(256, 15, 15), (288, 15, 15), (288, 15, 15)]
    assert shapes["red1"] == shapes["inc2.0"] == shapes["inc2.3"] == (768, 7, 7)
    assert shapes["red2"] == (1280, 3, 3)
    assert shapes["inc3.0"] == shapes["inc3.1"] == (2048, 3, 3)
    assert shapes[""] == (100,)


def test_inception_averages_before_the_convolution_of_its_fourth_branches():
    """The average is computed behind the convolution; the module says that it is the same, edges included."""
    torch.manual_seed(0)
    branch = InceptionV3().double().inc1[0][3][0]
    x = torch.randn(4, 192, 5, 5, dtype=torch.float64)
    expected = F.relu(branch.norm(branch.conv(F.avg_pool2d(x, 3, stride=1, padding=1))))
    torch.testing.assert_close(branch(x), expected, atol=1e-12, rtol=1e-12)


def test_inception_names_are_the_papers():
    """Its "inc2/0/2/4" is the fifth norm in the third branch of the first layer of the second block."""
    model = InceptionV3()
    assert [len(block) for block in (model.inc1, model.inc2, model.inc3)] == [3, 4, 2]
    assert [len(norms_in(branch)) for branch in model.inc2[0]] == [1, 3, 5, 1]
    assert norms_in(model.inc2[0][2])[4] == "4.norm"
    assert isinstance(model.get_submodule("inc2.0.2.4.norm"), nn.BatchNorm2d)


def test_inceptions_last_norms_are_what_a_layer_puts_out():
    """A layer's output is the ReLU of its branches' last norms side by side, and the max pooling in a reduction."""
    model = InceptionV3().eval()
    for norm in norms_in(model):
        nn.init.normal_(model.get_submodule(norm).bias)
    inputs, outputs = {}, {}
    for name in [*norms_in(model), *(layer.replace("/", ".") for layer in model.layers)]:
        module = model.get_submodule(name)
        module.register_forward_hook(lambda _m, i, _y, name=name: inputs.__setitem__(name, i[0]))
        module.register_forward_hook(lambda _m, _i, y, name=name: outputs.__setitem__(name, y))
    with torch.no_grad():
        model(torch.randn(2, 3, 32, 32))
    assert len(model.layers) == 3 + 4 + 2 + 2
    for layer, norms in model.layers.items():
        name = layer.replace("/", ".")
        parts = [outputs[norm].relu() for norm in norms]
        if layer in ("red1", "red2"):
            parts.append(F.max_pool2d(inputs[name], 3, stride=2))
        assert torch.equal(torch.cat(parts, dim=1), outputs[name]), layer


@pytest.mark.parametrize("name", ["cifar-cnn", "digits-cnn", "densenet-10-4"])
def test_other_layers_have_one_norm(name):
    model = models.build(name, 10)
    for layer, norms in model.layers.items():
        module = model.get_submodule(layer)
        inside = [f"{layer}.{norm}".rstrip(".") for norm in norms_in(module)]
        assert models.last_norms(name, layer) == norms == inside


def test_generator_makes_images_between_minus_one_and_one():
    torch.manual_seed(0)
    generator = Generator()
    shapes = shapes_after(generator, torch.rand(3, generator.latent))
    assert [shapes[f"deconv{i}"] for i in range(1, 5)] == [(256, 8, 8), (128, 16, 16), (64, 32, 32), (3, 32, 32)]
    images = generator.train()(torch.rand(8, generator.latent) * 200 - 100)
    assert images.shape == (8, 3, 32, 32)
    assert images.abs().max() <= 1
    assert images.min() < -0.1
    assert images.max() > 0.1


def test_discriminator_gives_one_number_for_an_image():
    discriminator = Discriminator()
    shapes = shapes_after(discriminator, torch.rand(3, 3, 32, 32))
    sizes = [(64, 32), (128, 16), (128, 16), (256, 8), (256, 8), (512, 4), (512, 4)]
    assert [shapes[f"conv{i}"] for i in range(1, 8)] == [(channels, size, size) for channels, size in sizes]
    assert shapes[""] == ()
    assert norms_in(discriminator) == [f"conv{i}.norm" for i in range(2, 8)]


def test_dcgan_starts_with_deviation_two_hundredths():
    torch.manual_seed(0)
    for model in (Generator(), Discriminator()):
        weights = [p for p in model.parameters() if p.dim() > 1]
        assert len(weights) == {Generator: 5, Discriminator: 8}[type(model)]
        for weight in weights:
            assert weight.std().item() == pytest.approx(0.02, rel=0.1)


def test_the_discriminator_teaches_the_generator():
    generator, discriminator = Generator(16, 32), Discriminator(32)
    F.softplus(-discriminator(generator(torch.rand(8, 16) * 2 - 1))).mean().backward()
    assert all(p.grad.abs().sum() > 0 for p in generator.parameters())


def test_digits_cnn_learns_the_digits():
    digits = pytest.importorskip("sklearn.datasets").load_digits()
    x, y = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16, torch.tensor(digits.target)
    torch.manual_seed(0)
    train, test = torch.randperm(len(x)).split([1437, 360])
    model = DigitsCNN()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=0.005, alpha=0.9)
    for epoch in range(8):
        optimizer.param_groups[0]["lr"] = 0.005 * 0.7**epoch
        for batch in torch.randperm(len(train)).split(64)[:-1]:
            optimizer.zero_grad()
            F.cross_entropy(model(x[train[batch]]), y[train[batch]]).backward()
            optimizer.step()
    model.eval()
    assert (model(x[test]).argmax(1) == y[test]).float().mean() > 0.98


@pytest.mark.parametrize("name", [name for name in models.NAMES if models.input_shape(name) is not None])
def test_every_name_builds_a_classifier(name):
    model = models.build(name, 7).eval()
    with torch.no_grad():
        assert model(torch.randn(2, *models.input_shape(name))).shape == (2, 7)


def test_any_densenet_has_a_name():
    assert parameters(models.build("densenet-10-4", 5)) == parameters(DenseNet(10, 4, 5))
    assert models.last_norms("densenet-10-4", "transition2") == ["transition2.norm"]


def test_any_wide_resnet_has_a_name():
    assert parameters(models.build("wide-resnet-22-2", 5)) == parameters(WideResNet(22, 2, 5))
    assert models.input_shape("wide-resnet-22-2") == (3, 32, 32)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: models.build("cifar-cn", 10), "no model 'cifar-cn': use cifar-cnn$"),
        (lambda: models.build("inceptionv3", 10), "use inception-v3$"),
        (lambda: models.build("densenet-40", 10), "use densenet-40-12"),
        (lambda: models.build("densenet-40-0", 10), "use densenet-40-12"),
        (lambda: models.build("?", 10), "use " + " or ".join(models.NAMES)),
        (lambda: models.build("densenet-20-12", 10), "use 19 or 22"),
        (lambda: models.build("resnet18", 10), "use resnet-18"),
        (lambda: models.build("wide-resnet-18-4", 10), "use 16 or 22"),
        (lambda: models.input_shape("cifar-cn"), "use cifar-cnn$"),
        (lambda: models.last_norms("cifar-cnn", "conv9"), "cifar-cnn has no layer 'conv9': use conv4 or"),
        (lambda: models.last_norms("inception-v3", "inc4/0"), "use inc3/0 or inc2/0 or inc1/0$"),
    ],
)
def test_an_unknown_name_is_answered_with_the_nearest(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("name", "layers", "count"),
    [
        ("cifar-cnn", ["conv3"], 1),
        ("cifar-cnn", ["conv2", "conv3"], 2),
        ("inception-v3", ["red1", "red2"], 4),
        ("inception-v3", ["red1", "red2", "inc3/0"], 10),
        ("inception-v3", ["inc2/0", "inc3/0"], 10),  # the paper counts these: 10 modules
        ("inception-v3", ["inc2/1", "inc3/0"], 10),
        ("densenet-40-12", ["transition1", "transition2", "last_norm"], 3),
    ],
)
def test_the_papers_settings_convert_by_name(name, layers, count):
    model = models.build(name, 10)
    select = [norm for layer in layers for norm in models.last_norms(name, layer)]
    before = norms_in(model)
    mixnorm.convert(model, select, num_components=3)
    converted = [name for name, module in model.named_modules() if isinstance(module, mixnorm.MixtureNorm2d)]
    assert sorted(converted) == sorted(select)
    assert len(converted) == count
    assert len(norms_in(model)) == len(before) - count


def test_inception_trains_with_the_papers_mixture_norms():
    model = InceptionV3()
    mixnorm.convert(model, model.layers["inc2/0"] + model.layers["inc3/0"], num_components=5)
    backward(model, torch.randn(2, 3, 32, 32))
    converted = [module for module in model.modules() if isinstance(module, mixnorm.MixtureNorm2d)]
    assert [int(norm.num_batches_tracked) for norm in converted] == [1] * 10


def test_generator_trains_with_the_papers_mixture_norms():
    generator = mixnorm.convert(Generator(16, 32), ["deconv1.norm", "deconv2.norm"], num_components=3)
    assert norms_in(generator) == ["linear_norm", "deconv3.norm"]
    backward(generator, torch.rand(8, 16) * 2 - 1)


@pytest.mark.parametrize(
    ("model", "select", "count"),
    [
        (CifarCNN, "conv3.*", 1),
        (CifarCNN, "*", 4),
        (lambda: DenseNet(7, 4), "last_norm", 1),
        (lambda: DenseNet(7, 4), ["transition1.norm", "transition2.norm", "last_norm"], 3),
    ],
)
def test_norms_can_be_converted_by_name(model, select, count):
    model = mixnorm.convert(model(), select, num_components=3)
    assert sum(isinstance(m, mixnorm.MixtureNorm2d) for m in model.modules()) == count
    backward(model, torch.randn(4, 3, 32, 32))


@pytest.mark.parametrize("model", [CifarCNN, DenseNet, DigitsCNN, InceptionV3, ResNet, WideResNet, Generator, Discriminator])
def test_the_norm_is_injected(model):
    kinds = {type(m) for m in model(norm=lambda channels: nn.GroupNorm(1, channels)).modules()}
    assert nn.GroupNorm in kinds
    assert nn.BatchNorm2d not in kinds
