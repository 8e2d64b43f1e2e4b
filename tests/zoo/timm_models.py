"""Whole models of timm, one small member of each family: https://huggingface.co/docs/timm."""

import importlib
from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import nn

from tests.zoo.entry import Call, Entry, images, settled
from tests.zoo.torchvision_shim import make_torchvision_importable

# Image size, and what makes the member smaller than it is.
MODELS: dict[str, tuple[int, dict[str, Any]]] = {
    "beit_base_patch16_224": (32, {"img_size": 32, "embed_dim": 24, "depth": 2, "num_heads": 2}),
    "botnet26t_256": (64, {"img_size": 64}),
    "cait_xxs24_224": (32, {"img_size": 32, "embed_dim": 24, "depth": 2, "num_heads": 2}),
    "coat_lite_tiny": (64, {"img_size": 64, "embed_dims": [16, 16, 24, 32], "serial_depths": [1, 1, 1, 1]}),
    "coatnet_nano_rw_224": (64, {"img_size": 64}),
    "convit_tiny": (32, {"img_size": 32, "depth": 3, "local_up_to_layer": 2}),
    "convnext_zepto_rms": (32, {}),
    "convnextv2_atto": (32, {}),
    "cpubone_nano": (64, {}),
    "crossvit_tiny_240": (240, {"depth": [[1, 2, 0], [1, 2, 0]], "embed_dim": [24, 48]}),
    "csatv2": (64, {}),
    "cs3darknet_focus_s": (64, {}),
    "cspnext_tiny": (64, {}),
    "davit_tiny": (64, {"depths": (1, 1), "embed_dims": (16, 32), "num_heads": (2, 4)}),
    "deit_tiny_distilled_patch16_224": (32, {"img_size": 32, "depth": 2}),
    "deit3_small_patch16_224": (32, {"img_size": 32, "depth": 2, "embed_dim": 48}),
    "densenet121": (32, {"growth_rate": 8, "block_config": (2, 2, 2)}),
    "dla46_c": (64, {}),
    "dpn48b": (64, {"k_sec": (1, 1, 1, 1)}),
    "edgenext_xx_small": (64, {}),
    "efficientformer_l1": (224, {"embed_dims": (16, 16, 24, 32)}),
    "efficientformerv2_s0": (64, {"img_size": 64}),
    "efficientnet_b0": (64, {}),
    "efficientvim_m1": (64, {}),
    "efficientvit_b0": (64, {}),
    "efficientvit_m0": (64, {"img_size": 64}),
    "eva02_tiny_patch14_224": (28, {"img_size": 28, "depth": 2}),
    "fasternet_t0": (64, {}),
    "fastvit_t8": (64, {}),
    "fbnetv3_b": (64, {}),
    "gernet_s": (64, {}),
    "ghostnet_050": (64, {}),
    "ghostnetv3_050": (64, {}),
    "hardcorenas_a": (64, {}),
    "hgnetv2_b0": (64, {}),
    "hiera_tiny_224": (64, {"img_size": 64, "embed_dim": 16, "stages": (1, 1, 1, 1)}),
    "hrnet_w18_small": (64, {}),
    "iformer_t": (64, {}),
    "inception_next_atto": (64, {}),
    "lambda_resnet26t": (64, {}),
    "lcnet_050": (64, {}),
    "levit_128s": (64, {"img_size": 64}),
    "lowformer_b0": (64, {}),
    "mambaout_femto": (64, {}),
    "mixnet_s": (64, {}),
    "mnasnet_050": (64, {}),
    "mobilenetv4_conv_small_050": (64, {}),
    "mobilenetv4_hybrid_medium": (64, {}),
    "mobileone_s0": (64, {}),
    "mobilevit_xxs": (64, {}),
    "mobilevitv2_050": (64, {}),
    "naflexvit_base_patch16_gap": (32, {"embed_dim": 24, "depth": 2, "num_heads": 2}),
    "nf_regnet_b0": (64, {}),
    "pit_ti_224": (64, {"img_size": 64}),
    "pvt_v2_b0": (64, {"depths": (1, 1, 1, 1)}),
    "regnetx_002": (64, {}),
    "regnetz_005": (64, {}),
    "repghostnet_050": (64, {}),
    "repvgg_a0": (64, {}),
    "repvit_m0_9": (64, {}),
    "res2net50_26w_4s": (64, {"layers": (1, 1, 1, 1)}),
    "resnest14d": (64, {}),
    "rexnet_100": (64, {}),
    "seresnet50": (64, {"layers": (1, 1, 1, 1)}),
    "sequencer2d_s": (56, {"img_size": 56, "layers": (1, 1, 1, 1)}),
    "shvit_s1": (64, {}),
    "skresnet18": (64, {"layers": (1, 1, 1, 1)}),
    "spnasnet_100": (64, {}),
    "starnet_s050": (64, {}),
    "swiftformer_xs": (64, {}),
    "swin_tiny_patch4_window7_224": (
        64,
        {"img_size": 64, "depths": (1, 2, 1), "embed_dim": 24, "window_size": 4},
    ),
    "swinv2_tiny_window8_256": (64, {"img_size": 64, "depths": (1, 2, 1), "embed_dim": 24, "window_size": 4}),
    "swinv2_cr_tiny_224": (64, {"img_size": 64, "depths": (1, 2, 1, 1), "embed_dim": 24}),
    "test_byobnet": (32, {}),
    "test_coatnet": (64, {"img_size": 64}),
    "test_convnext2": (32, {}),
    "test_efficientnet_evos": (32, {}),
    "test_efficientnet_gn": (32, {}),
    "test_mambaout": (32, {}),
    "test_maxvit": (64, {"img_size": 64}),
    "test_nfnet": (32, {}),
    "test_resnet": (32, {}),
    "test_vit": (32, {"img_size": 32}),
    "test_vit4": (32, {"img_size": 32}),
    "test_vit_relpos": (32, {"img_size": 32}),
    "tiny_vit_5m_224": (64, {"depths": (1, 1, 1, 1), "embed_dims": (16, 32, 40, 80)}),
    "tnt_s_patch16_224": (32, {"img_size": 32, "depth": 2, "embed_dim": 48}),
    "tresnet_m": (64, {"layers": (1, 1, 1, 1)}),
    "twins_pcpvt_small": (64, {"img_size": 64, "depths": (1, 1, 1, 1)}),
    "twins_svt_small": (64, {"img_size": 64, "depths": (1, 1, 2, 1)}),
    "visformer_tiny": (64, {"img_size": 64}),
    "vit_tiny_r_s16_p8_224": (64, {"img_size": 64, "depth": 2}),
    "samvit_base_patch16": (
        64,
        {"img_size": 64, "embed_dim": 24, "depth": 3, "num_heads": 2, "global_attn_indexes": (1,)},
    ),
    "vitamin_small_224": (64, {"img_size": 64, "depth": 2}),
    "ese_vovnet19b_slim_dw": (64, {}),
    "xcit_nano_12_p16_224": (32, {"img_size": 32, "depth": 2, "embed_dim": 32}),
}
MIXER: dict[str, Any] = {"img_size": 32, "num_blocks": 2, "embed_dim": 24}
# Where the members fix the sizes: the module and the class to construct instead, image size and arguments.
CONSTRUCTED: dict[str, tuple[str, str, int, dict[str, Any]]] = {
    "convmixer": ("convmixer", "ConvMixer", 32, {"dim": 24, "depth": 3}),
    "focalnet": ("focalnet", "FocalNet", 64, {"depths": (1, 1, 1, 1), "embed_dim": 16}),
    "gcvit": (
        "gcvit",
        "GlobalContextVit",
        64,
        {"img_size": 64, "depths": (1, 1), "embed_dim": 16, "num_heads": (2, 4), "window_ratio": (16, 16)},
    ),
    "mlp_mixer": ("mlp_mixer", "MlpMixer", 32, MIXER),
    "gmlp": (
        "mlp_mixer",
        "MlpMixer",
        32,
        MIXER | {"mlp_ratio": 4, "block_layer": "SpatialGatingBlock", "mlp_layer": "GatedMlp"},
    ),
    "gmixer": ("mlp_mixer", "MlpMixer", 32, MIXER | {"mlp_layer": "GluMlp"}),
    "resmlp": (
        "mlp_mixer",
        "MlpMixer",
        32,
        MIXER | {"mlp_ratio": 4, "block_layer": "ResBlock", "norm_layer": "Affine"},
    ),
    "nest": (
        "nest",
        "Nest",
        64,
        {"img_size": 64, "embed_dims": (16, 24, 32), "num_heads": (2, 2, 2), "depths": (1, 1, 1)},
    ),
    "poolformer": ("metaformer", "MetaFormer", 64, {"depths": (1, 1, 1, 1), "dims": (16, 16, 24, 32)}),
    "rdnet": (
        "rdnet",
        "RDNet",
        64,
        {
            "growth_rates": (16, 16, 16),
            "num_blocks_list": (1, 1, 1),
            "is_downsample_block": (None, True, True),
        },
    ),
    "volo": (
        "volo",
        "VOLO",
        64,
        {"img_size": 64, "layers": (1, 1, 1, 1), "embed_dims": (16, 32, 32, 32), "num_heads": (2, 2, 2, 2)},
    ),
}
CLASSES = 5


def entries() -> Iterator[Entry]:
    """Members by name, and then those whose constructors take the sizes."""
    for name, (size, arguments) in MODELS.items():
        yield Entry(name, "timm", partial(_created, name, size, arguments))
    for name, constructor in CONSTRUCTED.items():
        yield Entry(name, "timm", partial(_constructed, *constructor))


def _created(name: str, size: int, arguments: dict[str, Any]) -> tuple[nn.Module, Call]:
    make_torchvision_importable()
    import timm

    model = timm.create_model(name, pretrained=False, num_classes=CLASSES, **arguments)
    return settled(model, partial(model, images(size)))


def _constructed(module: str, kind: str, size: int, arguments: dict[str, Any]) -> tuple[nn.Module, Call]:
    make_torchvision_importable()
    family = importlib.import_module(f"timm.models.{module}")
    # A layer is given by its name in the family's module.
    given = {
        key: getattr(family, value) if isinstance(value, str) else value for key, value in arguments.items()
    }
    model = getattr(family, kind)(num_classes=CLASSES, **given)
    return settled(model, partial(model, images(size)))
