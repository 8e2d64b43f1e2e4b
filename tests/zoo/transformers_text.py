"""Text models of transformers: decoders, encoders, and encoders with decoders."""

from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import nn

from tests.zoo.entry import Call, Entry, settled, token_ids
from tests.zoo.transformers_config import SMALL, VOCABULARY, from_config, padding_mask

GROUPED: dict[str, Any] = {"num_key_value_heads": 1, "head_dim": 8}
EXPERTS: dict[str, Any] = GROUPED | {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
ENCODER_DECODER: dict[str, Any] = {
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "decoder_start_token_id": 1,
}
T5: dict[str, Any] = {
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 32,
    "num_layers": 2,
    "num_heads": 2,
    "decoder_start_token_id": 1,
}

LATENT: dict[str, Any] = EXPERTS | {  # attention over compressed keys and values
    "num_key_value_heads": 2,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
MAMBA: dict[str, Any] = {
    "mamba_d_state": 4,
    "mamba_n_heads": 4,
    "mamba_d_head": 8,
    "mamba_d_ssm": 32,
    "mamba_chunk_size": 4,
}

DECODERS: dict[str, dict[str, Any]] = {
    "apertus": GROUPED,
    "arcee": GROUPED,
    "bamba": GROUPED | MAMBA,
    "biogpt": {},
    "bitnet": GROUPED,
    "bloom": {},
    "codegen": {"rotary_dim": 4, "n_embd": 32, "n_head": 4},
    "cohere": GROUPED,
    "cohere2": GROUPED,
    "ctrl": {"dff": 32},
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
    "diffllama": GROUPED | {"num_key_value_heads": 2},
    "doge": GROUPED,
    "dots1": LATENT,
    "ernie4_5": GROUPED,
    "exaone4": GROUPED,
    "falcon": {},
    "falcon_h1": GROUPED | MAMBA,
    "falcon_mamba": {"state_size": 4},
    "gemma": GROUPED,
    "gemma2": GROUPED,
    "gemma3_text": GROUPED,
    "glm": GROUPED,
    "glm4": GROUPED,
    "gpt2": {},
    "gpt_bigcode": {},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2},
    "gpt_neox": {},
    "gpt_oss": EXPERTS,
    "gptj": {"rotary_dim": 4},
    "granite": GROUPED,
    "granitemoe": EXPERTS,
    "helium": GROUPED,
    "hunyuan_v1_dense": GROUPED,
    "jamba": EXPERTS,
    "jetmoe": EXPERTS,
    "lfm2": GROUPED,
    "llama": GROUPED,
    "mamba": {"state_size": 4},
    "mamba2": {"state_size": 4, "num_heads": 4, "head_dim": 8, "n_groups": 2, "chunk_size": 4},
    "minimax": EXPERTS,
    "mistral": GROUPED,
    "mixtral": EXPERTS,
    "mpt": {"d_model": 16, "n_heads": 2, "n_layers": 2, "max_seq_len": 32},
    "nanochat": GROUPED,
    "nemotron": GROUPED,
    "olmo": GROUPED,
    "olmo2": GROUPED,
    "olmoe": EXPERTS,
    "openai-gpt": {},
    "opt": {"ffn_dim": 32, "word_embed_proj_dim": 16},
    "persimmon": {},
    "phi": GROUPED,
    "phi3": GROUPED,
    "phimoe": EXPERTS,
    "qwen2": GROUPED,
    "qwen2_moe": EXPERTS,
    "qwen3": GROUPED,
    "qwen3_moe": EXPERTS,
    "qwen3_next": EXPERTS,
    "recurrent_gemma": {"lru_width": 16, "num_key_value_heads": 1, "num_hidden_layers": 3},
    "rwkv": {"attention_hidden_size": 16},
    "seed_oss": GROUPED,
    "smollm3": GROUPED,
    "stablelm": GROUPED,
    "starcoder2": GROUPED,
    "xglm": {"d_model": 16, "num_layers": 2, "attention_heads": 2, "ffn_dim": 32},
    "xlnet": {"d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 32, "max_position_embeddings": None},
    "xlstm": {},
}
ENCODERS: dict[str, dict[str, Any]] = {
    "albert": {"embedding_size": 8},
    "bert": {},
    "big_bird": {"attention_type": "original_full"},
    "camembert": {},
    "convbert": {"embedding_size": 16},
    "data2vec-text": {},
    "deberta": {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
    "deberta-v2": {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_buckets": 4},
    "distilbert": {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 32},
    "electra": {"embedding_size": 8},
    "ernie": {},
    "esm": {"mask_token_id": 3, "position_embedding_type": "rotary"},
    "eurobert": GROUPED,
    "flaubert": {"emb_dim": 16, "n_layers": 2, "n_heads": 2},
    "fnet": {},
    "funnel": {
        "block_sizes": [1, 1],
        "d_model": 16,
        "n_head": 2,
        "d_head": 8,
        "d_inner": 32,
        "num_hidden_layers": None,
    },
    "ibert": {},
    "layoutlm": {},
    "longformer": {"attention_window": 4},
    "megatron-bert": {},
    "mobilebert": {"embedding_size": 8, "intra_bottleneck_size": 16, "true_hidden_size": 16},
    "modernbert": {},
    "mpnet": {},
    "nomic_bert": {},
    "nystromformer": {"segment_means_seq_len": 7, "num_landmarks": 7},
    "rembert": {"input_embedding_size": 8, "output_embedding_size": 8},
    "roberta": {},
    "roberta-prelayernorm": {},
    "roformer": {"embedding_size": 16},
    "squeezebert": {"embedding_size": 16},
    "xlm": {"emb_dim": 16, "n_layers": 2, "n_heads": 2},
    "xlm-roberta": {},
    "xlm-roberta-xl": {},
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    "yoso": {},
}
ENCODER_DECODERS: dict[str, dict[str, Any]] = {
    "bart": ENCODER_DECODER,
    "bigbird_pegasus": ENCODER_DECODER | {"attention_type": "original_full"},
    "blenderbot": ENCODER_DECODER,
    "blenderbot-small": ENCODER_DECODER,
    "led": ENCODER_DECODER | {"attention_window": 4},
    "longt5": T5,
    "m2m_100": ENCODER_DECODER,
    "marian": ENCODER_DECODER,
    "mbart": ENCODER_DECODER,
    "mt5": T5,
    "mvp": ENCODER_DECODER,
    "nllb-moe": ENCODER_DECODER | {"num_experts": 4, "encoder_sparse_step": 2, "decoder_sparse_step": 2},
    "pegasus": ENCODER_DECODER,
    "pegasus_x": ENCODER_DECODER | {"num_global_tokens": 4, "block_size": 4},
    "plbart": ENCODER_DECODER,
    "switch_transformers": T5
    | {"num_experts": 4, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1},
    "t5": T5,
    "umt5": T5,
}
TASKS = {
    "AutoModelForCausalLM": DECODERS,
    "AutoModelForMaskedLM": ENCODERS,
    "AutoModelForSeq2SeqLM": ENCODER_DECODERS,
}


def entries() -> Iterator[Entry]:
    """Decoders, encoders, and encoders with decoders, each with the head of its pretraining."""
    for task, models in TASKS.items():
        for name, sizes in models.items():
            yield Entry(name, "transformers", partial(_text_model, task, name, sizes))


def _text_model(task: str, name: str, sizes: dict[str, Any]) -> tuple[nn.Module, Call]:
    model = from_config(task, name, SMALL | sizes)
    inputs = {"input_ids": token_ids(VOCABULARY)}
    # Where a window is masked as a whole, softmax gives NaN, whose gradients are nobody's.
    if "attention_window" not in sizes:
        inputs["attention_mask"] = padding_mask()
    if task == "AutoModelForSeq2SeqLM":
        inputs["decoder_input_ids"] = token_ids(VOCABULARY, 5)
    return settled(model, partial(model, **inputs))
