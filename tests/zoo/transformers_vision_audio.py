"""Models of transformers for images, sound, video and time series, and for several of these at once."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tests.zoo.entry import SAMPLES, Call, Entry, images, settled, token_ids
from tests.zoo.transformers_config import SMALL, VOCABULARY, from_config
from tests.zoo.transformers_text import ENCODER_DECODER

IMAGE: dict[str, Any] = SMALL | {
    "image_size": 32,
    "patch_size": 8,
    "num_labels": 5,
    "max_position_embeddings": None,
}
STAGES: dict[str, Any] = {
    "initializer_range": 0.2,
    "num_labels": 5,
    "image_size": 32,
    "depths": [1, 1, 1, 1],
    "hidden_sizes": [8, 8, 16, 16],
}
WAVES: dict[str, Any] = SMALL | {
    "conv_dim": [8, 8],
    "conv_kernel": [5, 3],
    "conv_stride": [4, 2],
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "max_position_embeddings": None,
}

# Of each architecture, the auto class and the sizes.
OF_IMAGES: dict[str, tuple[str, dict[str, Any]]] = {
    "beit": ("AutoModelForImageClassification", IMAGE),
    "bit": ("AutoModelForImageClassification", STAGES | {"embedding_size": 8, "num_groups": 4}),
    "blip_vision_model": ("BlipVisionModel", IMAGE),
    "clip_vision_model": ("AutoModel", IMAGE),
    "convnext": ("AutoModelForImageClassification", STAGES),
    "convnextv2": ("AutoModelForImageClassification", STAGES),
    "data2vec-vision": ("AutoModelForImageClassification", IMAGE),
    "deit": ("DeiTForImageClassification", IMAGE),
    "dinov2": ("AutoModelForImageClassification", IMAGE),
    "dinov2_with_registers": ("AutoModelForImageClassification", IMAGE),
    "dinov3_vit": ("AutoModel", IMAGE),
    "dpt": (
        "DPTForSemanticSegmentation",
        IMAGE
        | {
            "num_hidden_layers": 4,
            "backbone_out_indices": [0, 1, 2, 3],
            "neck_hidden_sizes": [8, 8, 8, 8],
            "fusion_hidden_size": 8,
        },
    ),
    "focalnet": (
        "AutoModelForImageClassification",
        {"image_size": 32, "embed_dim": 8, "depths": [1, 1], "num_labels": 5},
    ),
    "glpn": (
        "AutoModelForDepthEstimation",
        {
            "image_size": 64,
            "hidden_sizes": [8, 8, 16, 16],
            "depths": [1, 1, 1, 1],
            "num_attention_heads": [1, 1, 2, 2],
            "decoder_hidden_size": 8,
        },
    ),
    "groupvit_vision_model": (
        "GroupViTVisionModel",
        IMAGE
        | {
            "depths": [1, 1, 1],
            "num_group_tokens": [8, 4, 0],
            "num_output_groups": [8, 4, 0],
            "hidden_size": 16,
        },
    ),
    "hiera": (
        "AutoModelForImageClassification",
        {
            "image_size": [32, 32],
            "embed_dim": 8,
            "depths": [1, 1, 1],
            "num_heads": [1, 2, 2],
            "masked_unit_size": [8, 8],
            "num_query_pool": 2,
            "num_labels": 5,
        },
    ),
    "ijepa": ("AutoModelForImageClassification", IMAGE),
    "levit": (
        "LevitForImageClassification",
        {
            "image_size": 64,
            "hidden_sizes": [16, 16, 24],
            "num_attention_heads": [2, 2, 2],
            "depths": [1, 1, 1],
            "key_dim": [8, 8, 8],
            "num_labels": 5,
        },
    ),
    "mobilenet_v1": (
        "AutoModelForImageClassification",
        {"image_size": 32, "depth_multiplier": 0.25, "num_labels": 5},
    ),
    "mobilenet_v2": (
        "AutoModelForImageClassification",
        {"image_size": 32, "depth_multiplier": 0.25, "num_labels": 5},
    ),
    "mobilevit": (
        "AutoModelForImageClassification",
        {
            "image_size": 64,
            "initializer_range": 0.2,
            "hidden_sizes": [16, 16, 16],
            "neck_hidden_sizes": [8, 8, 8, 8, 8, 8, 16],
            "num_labels": 5,
        },
    ),
    "owlvit_vision_model": ("OwlViTVisionModel", IMAGE),
    "poolformer": ("AutoModelForImageClassification", STAGES),
    "pvt": (
        "AutoModelForImageClassification",
        STAGES | {"image_size": 64, "num_attention_heads": [1, 1, 2, 2]},
    ),
    "pvt_v2": (
        "AutoModelForImageClassification",
        STAGES | {"image_size": 64, "num_attention_heads": [1, 1, 2, 2]},
    ),
    "regnet": ("AutoModelForImageClassification", STAGES | {"embedding_size": 8, "groups_width": 4}),
    "resnet": ("AutoModelForImageClassification", STAGES | {"embedding_size": 8}),
    "segformer": (
        "AutoModelForSemanticSegmentation",
        {
            "initializer_range": 0.2,
            "hidden_sizes": [8, 8, 16, 16],
            "depths": [1, 1, 1, 1],
            "num_attention_heads": [1, 1, 2, 2],
            "decoder_hidden_size": 8,
            "num_labels": 5,
        },
    ),
    "siglip_vision_model": ("AutoModel", IMAGE),
    "swiftformer": (
        "AutoModelForImageClassification",
        {"image_size": 64, "depths": [1, 1, 1, 1], "embed_dims": [8, 8, 16, 16], "num_labels": 5},
    ),
    "swin": (
        "AutoModelForImageClassification",
        {
            "image_size": 32,
            "embed_dim": 8,
            "depths": [2, 1],
            "num_heads": [1, 2],
            "window_size": 4,
            "num_labels": 5,
        },
    ),
    "swinv2": (
        "AutoModelForImageClassification",
        {
            "image_size": 32,
            "embed_dim": 8,
            "depths": [2, 1],
            "num_heads": [1, 2],
            "window_size": 4,
            "num_labels": 5,
        },
    ),
    "vit": ("AutoModelForImageClassification", IMAGE),
    "vit_msn": ("AutoModelForImageClassification", IMAGE),
    "vitdet": ("AutoModel", IMAGE | {"window_size": 2, "window_block_indices": [0]}),
    "yolos": ("AutoModelForObjectDetection", IMAGE | {"image_size": [32, 32], "num_detection_tokens": 4}),
}
OF_SOUND: dict[str, tuple[str, dict[str, Any]]] = {
    "data2vec-audio": ("AutoModelForCTC", WAVES),
    "hubert": ("AutoModelForCTC", WAVES),
    "sew": ("AutoModelForCTC", WAVES | {"squeeze_factor": 2}),
    "sew-d": ("AutoModelForCTC", WAVES | {"squeeze_factor": 2, "position_buckets": 4}),
    "unispeech": ("AutoModelForCTC", WAVES),
    "unispeech-sat": ("AutoModelForCTC", WAVES),
    "wav2vec2": ("AutoModelForCTC", WAVES),
    "wav2vec2-conformer": ("AutoModelForCTC", WAVES),
    "wavlm": ("AutoModelForCTC", WAVES | {"num_buckets": 8}),
}


def _waves() -> dict[str, Tensor]:
    return {"input_values": torch.randn(SAMPLES, 200, dtype=torch.double)}


def _pixels(size: int) -> dict[str, Tensor]:
    return {"pixel_values": images(size)}


def _series() -> dict[str, Tensor]:
    return {"past_values": torch.randn(SAMPLES, 16, 2, dtype=torch.double)}


def _features(name: str, *shape: int) -> dict[str, Tensor]:
    return {name: torch.randn(SAMPLES, *shape, dtype=torch.double)}


def _spoken(*shape: int) -> dict[str, Tensor]:
    return _features("input_features", *shape) | {"decoder_input_ids": token_ids(VOCABULARY, 5)}


def _text() -> dict[str, Tensor]:
    return {"input_ids": token_ids(VOCABULARY)}


def _boxes() -> dict[str, Tensor]:
    return _text() | {"bbox": torch.randint(0, 10, (SAMPLES, 7, 4)).sort(-1).values}


def _looked_at() -> dict[str, Tensor]:
    return _text() | _pixels(32)


VIDEO: dict[str, Any] = IMAGE | {"num_frames": 4, "tubelet_size": 2}
SPEECH: dict[str, Any] = SMALL | ENCODER_DECODER
SERIES: dict[str, Any] = {
    "num_input_channels": 2,
    "context_length": 16,
    "patch_length": 4,
    "patch_stride": 4,
    "prediction_length": 4,
    "d_model": 16,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "num_layers": 2,
    "ffn_dim": 32,
}
# Architecture: the auto class, the sizes, and what the forward takes.
OTHERS: dict[str, tuple[str, dict[str, Any], Callable[[], dict[str, Tensor]]]] = {
    "audio-spectrogram-transformer": (
        "AutoModelForAudioClassification",
        IMAGE | {"max_length": 32, "num_mel_bins": 16, "frequency_stride": 8, "time_stride": 8},
        partial(_features, "input_values", 32, 16),
    ),
    "wav2vec2-bert": (
        "AutoModelForCTC",
        WAVES | {"feature_projection_input_dim": 16},
        partial(_features, "input_features", 12, 16),
    ),
    "whisper": (
        "AutoModelForSpeechSeq2Seq",
        SPEECH | {"num_mel_bins": 8, "max_source_positions": 10},
        partial(_spoken, 8, 20),
    ),
    "speech_to_text": (
        "AutoModelForSpeechSeq2Seq",
        SPEECH | {"input_feat_per_channel": 8, "conv_channels": 16},
        partial(_spoken, 24, 8),
    ),
    "videomae": ("AutoModelForVideoClassification", VIDEO, partial(_features, "pixel_values", 4, 3, 32, 32)),
    "vivit": (
        "AutoModelForVideoClassification",
        VIDEO | {"tubelet_size": [2, 8, 8]},
        partial(_features, "pixel_values", 4, 3, 32, 32),
    ),
    "timesformer": (
        "AutoModelForVideoClassification",
        VIDEO,
        partial(_features, "pixel_values", 4, 3, 32, 32),
    ),
    "patchtst": ("PatchTSTForPrediction", SERIES, _series),
    "patchtsmixer": ("PatchTSMixerForPrediction", SERIES, _series),
    "clip_text_model": ("AutoModel", SMALL, _text),
    "siglip_text_model": ("SiglipTextModel", SMALL, _text),
    "lilt": ("AutoModel", SMALL | {"hidden_size": 24, "channel_shrink_ratio": 2}, _boxes),
    "vilt": ("AutoModel", IMAGE | {"max_position_embeddings": 32}, _looked_at),
}


def entries() -> Iterator[Entry]:
    """Images, sound, and what takes several inputs or inputs of its own."""
    for name, (task, sizes) in OF_IMAGES.items():
        size = sizes.get("image_size", 32)
        size = size if isinstance(size, int) else size[0]
        yield Entry(name, "transformers", partial(_model, task, name, sizes, partial(_pixels, size)))
    for name, (task, sizes) in OF_SOUND.items():
        yield Entry(name, "transformers", partial(_model, task, name, sizes, _waves))
    for name, (task, sizes, inputs) in OTHERS.items():
        yield Entry(name, "transformers", partial(_model, task, name, sizes, inputs))


def _model(
    task: str, name: str, sizes: dict[str, Any], inputs: Callable[[], dict[str, Tensor]]
) -> tuple[nn.Module, Call]:
    model = from_config(task, name, sizes)
    return settled(model, partial(model, **inputs()))
