"""Whole models of torchvision, by its constructors: https://docs.pytorch.org/vision/stable/models.html."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tests.zoo.entry import SAMPLES, Call, Entry, images, settled
from tests.zoo.torchvision_shim import make_torchvision_importable

CLASSES = 5


def entries() -> Iterator[Entry]:
    """Families whose smallest member is small, and then those whose constructors take the sizes."""
    for name, (size, arguments) in BY_NAME.items():
        yield Entry(name, "torchvision", partial(_named, name, size, arguments))
    for name, make in BY_SIZES.items():
        yield Entry(name, "torchvision", partial(_made, make))


# ---------------------------------------------------------------------- smallest members: image size, arguments

BY_NAME: dict[str, tuple[int, dict[str, Any]]] = {
    "efficientnet_b0": (32, {}),
    "googlenet": (32, {"aux_logits": False, "init_weights": False}),
    "mnasnet0_5": (32, {}),
    "mobilenet_v2": (32, {"width_mult": 0.5}),
    "mobilenet_v3_small": (32, {}),
    "mobilenet_v3_large": (32, {}),
    "regnet_x_400mf": (32, {}),
    "regnet_y_400mf": (32, {}),
    "shufflenet_v2_x0_5": (32, {}),
    "squeezenet1_0": (32, {}),
    "squeezenet1_1": (32, {}),
    "lraspp_mobilenet_v3_large": (32, {"weights_backbone": None}),
}


def _named(name: str, size: int, arguments: dict[str, Any]) -> tuple[nn.Module, Call]:
    make_torchvision_importable()
    from torchvision.models import get_model

    model = get_model(name, weights=None, num_classes=CLASSES, **arguments)
    return settled(model, partial(model, images(size)))


# ---------------------------------------------------------------------- smaller than any member

Made = tuple[nn.Module, tuple[Tensor, ...]]


def _made(make: Callable[[Any], Made]) -> tuple[nn.Module, Call]:
    make_torchvision_importable()
    from torchvision import models

    model, inputs = make(models)
    return settled(model, partial(model, *inputs))


def videos(frames: int = 8, size: int = 32) -> Tensor:
    return torch.randn(SAMPLES, 3, frames, size, size, dtype=torch.double)


def _alexnet(models: Any) -> Made:
    model = models.AlexNet(num_classes=CLASSES)
    model.classifier = nn.Linear(256 * 6 * 6, CLASSES)  # in place of 55 million parameters
    return model, (images(64),)


def _vgg(models: Any, batch_norm: bool) -> Made:
    layers = models.vgg.make_layers([16, "M", 32, "M", 64, 64, "M"], batch_norm=batch_norm)
    with torch.device("meta"):
        model = models.VGG(layers, num_classes=CLASSES)
    # In place of 120 million parameters, which are never made.
    model.classifier = nn.Linear(64 * 7 * 7, CLASSES)
    return model, (images(),)


def _resnet(models: Any, bottleneck: bool, **arguments: Any) -> Made:
    block = models.resnet.Bottleneck if bottleneck else models.resnet.BasicBlock
    return models.ResNet(block, [1, 1, 1, 1], num_classes=CLASSES, **arguments), (images(),)


def _densenet(models: Any) -> Made:
    return models.DenseNet(8, (2, 3, 2), 16, num_classes=CLASSES), (images(),)


def _convnext(models: Any) -> Made:
    stages = [models.convnext.CNBlockConfig(*stage) for stage in ((16, 24, 2), (24, 32, 2), (32, None, 1))]
    return models.ConvNeXt(stages, num_classes=CLASSES), (images(),)


def _efficientnet_v2(models: Any) -> Made:
    fused, plain = models.efficientnet.FusedMBConvConfig, models.efficientnet.MBConvConfig
    stages = [fused(1, 3, 1, 16, 16, 2), fused(4, 3, 2, 16, 24, 2), plain(4, 3, 2, 24, 32, 2)]
    return models.EfficientNet(stages, 0.0, num_classes=CLASSES, last_channel=64), (images(),)


def _swin(models: Any, version: int) -> Made:
    swin = models.swin_transformer
    parts = (
        {}
        if version == 1
        else {"block": swin.SwinTransformerBlockV2, "downsample_layer": swin.PatchMergingV2}
    )
    model = models.SwinTransformer([2, 2], 16, [2, 2], [2, 4], [4, 4], num_classes=CLASSES, **parts)
    return model, (images(),)


def _maxvit(models: Any) -> Made:
    model = models.MaxVit((32, 32), 16, 4, [16, 32], [1, 1], 8, 0.0, num_classes=CLASSES)
    return model, (images(),)


def _vit(models: Any) -> Made:
    return models.VisionTransformer(32, 8, 2, 2, 16, 32, num_classes=CLASSES), (images(),)


def _video_resnet(models: Any, factored: bool) -> Made:
    video = models.video.resnet
    convolution, stem = (
        (video.Conv2Plus1D, video.R2Plus1dStem) if factored else (video.Conv3DSimple, video.BasicStem)
    )
    model = video.VideoResNet(video.BasicBlock, [convolution] * 4, [1, 1, 1, 1], stem, num_classes=CLASSES)
    return model, (videos(4, 16),)


def _s3d(models: Any) -> Made:
    model = models.video.S3D(num_classes=CLASSES)
    model.avgpool = nn.AdaptiveAvgPool3d(1)  # a window of seven pixels is more than a small clip leaves
    return model, (videos(8, 32),)


def _mvit(models: Any) -> Made:
    setting = [
        models.video.mvit.MSBlockConfig(1, 16, 16, [3, 3, 3], [3, 3, 3], [1, 1, 1], [1, 2, 2]),
        models.video.mvit.MSBlockConfig(2, 16, 32, [3, 3, 3], [3, 3, 3], [1, 2, 2], [1, 1, 1]),
        models.video.mvit.MSBlockConfig(2, 32, 32, [3, 3, 3], [3, 3, 3], [1, 1, 1], [1, 1, 1]),
    ]
    model = models.video.MViT((32, 32), 4, setting, True, True, True, True, num_classes=CLASSES)
    return model, (videos(4),)


def _swin3d(models: Any) -> Made:
    swin = models.video.swin_transformer
    model = swin.SwinTransformer3d([2, 4, 4], 16, [2, 2], [2, 4], [2, 4, 4], num_classes=CLASSES)
    return model, (videos(4),)


def _deeplab(models: Any) -> Made:
    segmentation = models.segmentation
    backbone = models._utils.IntermediateLayerGetter(
        models.mobilenet_v3_small().features, {"12": "out", "4": "aux"}
    )
    head, auxiliary = segmentation.deeplabv3.DeepLabHead(576, CLASSES), segmentation.fcn.FCNHead(40, CLASSES)
    return segmentation.DeepLabV3(backbone, head, auxiliary), (images(64),)


def _pyramid(models: Any) -> Made:
    make = models.detection.backbone_utils.mobilenet_backbone
    return make(backbone_name="mobilenet_v3_large", weights=None, fpn=True, trainable_layers=6), (images(64),)


BY_SIZES: dict[str, Callable[[Any], Made]] = {
    "alexnet": _alexnet,
    "vgg": partial(_vgg, batch_norm=False),
    "vgg_bn": partial(_vgg, batch_norm=True),
    "resnet_basic": partial(_resnet, bottleneck=False),
    "resnet_bottleneck": partial(_resnet, bottleneck=True, width_per_group=32),
    "resnext": partial(_resnet, bottleneck=True, groups=32, width_per_group=2),
    "densenet": _densenet,
    "convnext": _convnext,
    "efficientnet_v2": _efficientnet_v2,
    "swin": partial(_swin, version=1),
    "swin_v2": partial(_swin, version=2),
    "maxvit": _maxvit,
    "vit": _vit,
    "video_resnet": partial(_video_resnet, factored=False),
    "video_r2plus1d": partial(_video_resnet, factored=True),
    "s3d": _s3d,
    "mvit": _mvit,
    "swin3d": _swin3d,
    "deeplabv3": _deeplab,
    "feature_pyramid": _pyramid,
}
