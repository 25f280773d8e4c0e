"""Shapes, FLOPs and parameter counts against known models and against counting one by one."""

import dataclasses

import pytest

from hexiseq.workload import (
    ModelShape,
    Workload,
    all_pairs,
    attended_pairs,
    attention_flops,
    head_flops,
    linear_flops,
    model_flops,
)

LLAMA3_8B = ModelShape("llama3_8b", 32, 4096, 14336, 32, 8, 128, 128256)


def test_parameters_of_known_models():
    assert LLAMA3_8B.parameters == 8_030_261_248
    smollm = ModelShape("smollm2_135m", 30, 576, 1536, 9, 3, 64, 49152, tied_embeddings=True)
    assert smollm.parameters == 134_515_008


def test_model_flops_pair_by_pair():
    model = ModelShape("m", 2, 8, 12, 4, 2, 2, 10)
    work = Workload(model, 5, "float32", "full", 3, 2, False)
    assert work.tokens_per_step == 30
    forward = 0
    for query in range(5):
        for _ in range(2):  # layers
            matrices = 8 * 2 * (4 + 2 + 2 + 4) + 3 * 8 * 12
            forward += 2 * matrices + sum(4 * 2 for _ in range(query + 1)) * 4
        forward += 2 * 8 * 10
    assert model_flops(work) == 3 * forward * 6
    assert linear_flops(model) == 2 * (8 * 2 * 12 + 3 * 8 * 12)
    assert attention_flops(model, 15) == 120
    assert head_flops(model) == 160


def test_from_hugging_face_keys():
    config = {"num_hidden_layers": 30, "hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9,
              "num_key_value_heads": 3, "vocab_size": 49152, "tie_word_embeddings": True,
              "model_type": "llama"}  # fmt: skip
    shape = ModelShape.from_hf_config(config)
    assert shape == ModelShape("llama", 30, 576, 1536, 9, 3, 64, 49152, True)
    assert ModelShape.from_hf_config({**config, "num_key_value_heads": None}).kv_heads == 9
    assert ModelShape.from_hf_config({**config, "head_dim": 128}, "x").head_dim == 128
    with pytest.raises(ValueError, match="lacks vocab_size"):
        ModelShape.from_hf_config({k: v for k, v in config.items() if k != "vocab_size"})
    with pytest.raises(ValueError, match="set head_dim"):
        ModelShape.from_hf_config({**config, "hidden_size": 577})


def test_pairs_within_a_window_one_by_one():
    for window in (None, 1, 3, 7, 9, 20):
        pairs = sum(1 for q in range(9) for k in range(q + 1) if window is None or q - k < window)
        assert attended_pairs(9, window) == pairs
    mixed = dataclasses.replace(LLAMA3_8B, window=3, full_layers=12)
    assert [(kind.layers, kind.window) for kind in mixed.kinds] == [(20, 3), (12, None)]
    assert all_pairs(mixed, 9) == 20 * attended_pairs(9, 3) + 12 * 45
    assert LLAMA3_8B.kinds == (LLAMA3_8B,)
    work = Workload(mixed, 9, "float32", "none", 1, 1, False)
    full = dataclasses.replace(work, model=LLAMA3_8B)
    assert model_flops(full) - model_flops(work) == 3 * 20 * 32 * 4 * 128 * (45 - attended_pairs(9, 3))


WINDOWS = {
    "mistral": ({"sliding_window": 64}, 64, 0),
    "mistral by default": ({}, 4096, 0),
    "mistral without": ({"sliding_window": None}, None, 0),
    "qwen3": ({"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 2}, 64, 2),
    "qwen3 by types": ({"use_sliding_window": True, "sliding_window": 64,
                        "layer_types": ["full_attention"] + ["sliding_attention"] * 4}, 64, 1),
    "qwen2 switched off": ({"sliding_window": 64}, None, 0),
    "qwen2 in later layers": ({"use_sliding_window": True}, None, 0),
    "phi3 by default": ({}, None, 0),
    "starcoder2": ({"sliding_window": 64}, 64, 0),
    "llama": ({"sliding_window": 64}, None, 0),
    "ministral": ({"layer_types": ["sliding_attention", "full_attention"] * 2 + ["full_attention"]}, 4096, 3),
}  # fmt: skip


@pytest.mark.parametrize("name", WINDOWS)
def test_windows_are_those_of_hugging_face(name):
    from transformers import AutoConfig

    changes, window, full = WINDOWS[name]
    config = {"model_type": name.split()[0], "num_hidden_layers": 5, "hidden_size": 8, "intermediate_size": 8,
              "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 300, "pad_token_id": 0,
              **changes}  # fmt: skip
    shape = ModelShape.from_hf_config(config)
    assert (shape.window, shape.full_layers) == (window, full)
    theirs = AutoConfig.for_model(**config)
    width = getattr(theirs, "sliding_window", None) if config["model_type"] != "llama" else None
    types = getattr(theirs, "layer_types", None) or ["sliding_attention"] * 5
    slides = [width if kind == "sliding_attention" else None for kind in types]
    assert sorted(map(str, slides)) == sorted(map(str, [window] * (5 - full) + [None] * full))


def test_windows_that_make_no_sense():
    for change, message in (
        ({"window": 0}, "window must be a positive integer, got 0"),
        ({"full_layers": 2}, "2 of 32 layers without the window None"),
        ({"window": 5, "full_layers": 32}, "32 of 32 layers without the window 5"),
        ({"window": 5, "full_layers": -1}, "full_layers must be an integer of at least 0, got -1"),
    ):
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(LLAMA3_8B, **change)
    config = {"model_type": "mistral", "num_hidden_layers": 2, "hidden_size": 8, "intermediate_size": 8,
              "num_attention_heads": 2, "vocab_size": 8}  # fmt: skip
    with pytest.raises(ValueError, match="window must be a positive integer, got 'x'"):
        ModelShape.from_hf_config({**config, "sliding_window": "x"})
    with pytest.raises(ValueError, match="layer_types must have an entry for each of 2 layers"):
        ModelShape.from_hf_config({**config, "layer_types": ["full_attention"]})


def test_mistakes_are_named():
    with pytest.raises(ValueError, match="32 query heads are not a multiple of 5 KV heads"):
        dataclasses.replace(LLAMA3_8B, kv_heads=5)
    with pytest.raises(ValueError, match="layers must be a positive integer, got 0"):
        dataclasses.replace(LLAMA3_8B, layers=0)
    work = Workload(LLAMA3_8B, 1024, "bfloat16", "selective", 1, 1, False)
    assert work.element_bytes == 2
    for change, message in (
        ({"seq_len": 1}, "seq_len must be an integer of at least 2"),
        ({"accumulation": 0}, "accumulation"),
        ({"sequences": 1.0}, "sequences"),
        ({"dtype": "fp8"}, "dtype 'fp8'"),
        ({"recompute": "half"}, "recompute 'half'"),
        ({"recompute": "none", "offload": True}, "workload: offload takes layers' inputs to host memory, and with"),
    ):
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(work, **change)


def test_wrong_types_are_named():
    config = {"num_hidden_layers": 2, "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2,
              "vocab_size": 8}  # fmt: skip
    for changed, message in (
        (5, "the config must be a mapping, got 5"),
        ({**config, "hidden_size": "x"}, "hidden_size must be a positive integer, got 'x'"),
        ({**config, "num_attention_heads": [2]}, r"num_attention_heads must be a positive integer, got \[2\]"),
        ({**config, "tie_word_embeddings": "no"}, "tie_word_embeddings must be true or false, got 'no'"),
    ):
        with pytest.raises(ValueError, match=message):
            ModelShape.from_hf_config(changed, "m")
    work = Workload(LLAMA3_8B, 1024, "bfloat16", "selective", 1, 1, False)
    with pytest.raises(ValueError, match="model must be a ModelShape, got 5"):
        dataclasses.replace(work, model=5)
    with pytest.raises(ValueError, match="keep_parameters must be true or false, got 1"):
        dataclasses.replace(work, keep_parameters=1)
    with pytest.raises(ValueError, match="offload must be true or false, got 1"):
        dataclasses.replace(work, offload=1)
    with pytest.raises(ValueError, match="tied_embeddings"):
        dataclasses.replace(LLAMA3_8B, tied_embeddings=1)
