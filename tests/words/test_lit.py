"""LiT: a ViT and a BERT in one npz file, against formulas written independently in NumPy."""

import numpy as np
import pytest
import torch

import vitruvian as vt
from vitruvian.errors import CheckpointError
from vitruvian.weights.load import load
from vitruvian.weights.zero_shot import embed_texts, load_text, with_words

D, H, MLP, E, PATCH, SIDE = 128, 2, 48, 24, 8, 16  # 64 channels per head, as in BERT
PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "cat", "dog", "##s", "photo", "of", ",", "cafe"]
TOKENS = {
    "A cat": [2, 4, 5],
    "photo of dogs, CATS": [2, 8, 9, 6, 7, 10, 5, 7],
    "café zebra": [2, 11, 1],
    "dog " * 30: [2, *[6] * 15],
    "": [2],
}


def lit_arrays(prefix="params/", image_head=True, in_heads=False):
    rng = np.random.default_rng(0)
    arrays = {f"{prefix}t": np.array([2.5])}

    def dense(name, *shape, bias=None):
        arrays[f"{prefix}{name}/kernel"] = rng.normal(0, np.prod(shape[:-1]) ** -0.5, shape)
        arrays[f"{prefix}{name}/bias"] = rng.normal(0, 0.2, bias or shape[-1])

    def norm(name, width=D):
        arrays[f"{prefix}{name}/scale"] = rng.normal(1, 0.2, width)
        arrays[f"{prefix}{name}/bias"] = rng.normal(0, 0.2, width)

    dense("img/embedding", PATCH, PATCH, 3, D)
    arrays[f"{prefix}img/cls"] = rng.normal(size=(1, 1, D))
    arrays[f"{prefix}img/Transformer/posembed_input/pos_embedding"] = rng.normal(size=(1, 5, D))
    block = "img/Transformer/encoderblock_0"
    for name in ("LayerNorm_0", "LayerNorm_2"):
        norm(f"{block}/{name}")
    for part in ("query", "key", "value"):
        dense(f"{block}/MultiHeadDotProductAttention_1/{part}", D, H, D // H, bias=(H, D // H))
    dense(f"{block}/MultiHeadDotProductAttention_1/out", H, D // H, D)
    dense(f"{block}/MlpBlock_3/Dense_0", D, MLP)
    dense(f"{block}/MlpBlock_3/Dense_1", MLP, D)
    norm("img/Transformer/encoder_norm")
    if image_head:
        dense("img/head", D, E)
    bert = "txt/BertEncoder_0"
    for kind, rows in (("token", len(PIECES)), ("position", 512), ("segment", 2)):
        arrays[f"{prefix}{bert}/embedder/embedders_{kind}_ids/embedding"] = rng.normal(size=(rows, D))
    norm(f"{bert}/layer_norm")
    for i in range(2):
        layer = f"{bert}/encoder_block/layer_sequence/layers_{i}"
        for part in ("query", "key", "value"):
            shape, bias = ((D, H, D // H), (H, D // H)) if in_heads else ((D, D), None)
            dense(f"{layer}/attention_block/attention_layer/{part}", *shape, bias=bias)
        dense(f"{layer}/attention_block/dense_layer", *((H, D // H, D) if in_heads else (D, D)))
        norm(f"{layer}/attention_block/layer_norm")
        dense(f"{layer}/mlp_block/mlp/dense_layer", D, MLP)
        dense(f"{layer}/mlp_block/dense_layer", MLP, D)
        norm(f"{layer}/mlp_block/layer_norm")
    dense("txt/head", D, E if image_head else D)
    return {name: np.asarray(array, np.float32) for name, array in arrays.items()}


def gelu(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


class Reference:
    """The towers in float64, from the arrays of the file."""

    def __init__(self, arrays, prefix="params/"):
        self.arrays = {name.removeprefix(prefix): array.astype(np.float64) for name, array in arrays.items()}

    def dense(self, x, name):
        kernel = self.arrays[f"{name}/kernel"].reshape(x.shape[-1], -1)
        return x @ kernel + self.arrays[f"{name}/bias"].reshape(-1)

    def norm(self, x, name, eps):
        x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + eps)
        return x * self.arrays[f"{name}/scale"] + self.arrays[f"{name}/bias"]

    def attend(self, x, name, real):
        q, k, v = (self.dense(x, f"{name}/{part}").reshape(len(x), H, -1) for part in ("query", "key", "value"))
        logits = np.einsum("nhk,mhk->hnm", q, k) / np.sqrt(D // H)
        logits = np.where(real, logits, -np.inf)
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        return np.einsum("hnm,mhk->nhk", weights / weights.sum(-1, keepdims=True), v).reshape(len(x), -1)

    def text(self, tokens):
        bert, tokens = "txt/BertEncoder_0", np.array(tokens + [0] * (16 - len(tokens)))
        tables = {
            kind: self.arrays[f"{bert}/embedder/embedders_{kind}_ids/embedding"]
            for kind in ("token", "position", "segment")
        }
        x = tables["token"][tokens] + tables["position"][:16] + tables["segment"][0]
        x = self.norm(x, f"{bert}/layer_norm", 1e-12)
        for i in range(2):
            layer = f"{bert}/encoder_block/layer_sequence/layers_{i}"
            attended = self.attend(x, f"{layer}/attention_block/attention_layer", tokens != 0)
            x = self.norm(
                x + self.dense(attended, f"{layer}/attention_block/dense_layer"),
                f"{layer}/attention_block/layer_norm",
                1e-12,
            )
            hidden = gelu(self.dense(x, f"{layer}/mlp_block/mlp/dense_layer"))
            x = self.norm(
                x + self.dense(hidden, f"{layer}/mlp_block/dense_layer"), f"{layer}/mlp_block/layer_norm", 1e-12
            )
        z = self.dense(x[0], "txt/head")
        return z / np.linalg.norm(z)

    def image(self, pixels):  # (SIDE, SIDE, 3)
        grid = SIDE // PATCH
        patches = pixels.reshape(grid, PATCH, grid, PATCH, 3).transpose(0, 2, 1, 3, 4).reshape(grid * grid, -1)
        x = np.concatenate([self.arrays["img/cls"][0], self.dense(patches, "img/embedding")])
        x = x + self.arrays["img/Transformer/posembed_input/pos_embedding"][0]
        block = "img/Transformer/encoderblock_0"
        attention = f"{block}/MultiHeadDotProductAttention_1"
        y = self.attend(self.norm(x, f"{block}/LayerNorm_0", 1e-6), attention, True)
        x = x + self.dense(y, f"{attention}/out")
        y = gelu(self.dense(self.norm(x, f"{block}/LayerNorm_2", 1e-6), f"{block}/MlpBlock_3/Dense_0"))
        x = x + self.dense(y, f"{block}/MlpBlock_3/Dense_1")
        z = self.norm(x, "img/Transformer/encoder_norm", 1e-6)[0]
        z = self.dense(z, "img/head") if "img/head/kernel" in self.arrays else z
        return z / np.linalg.norm(z)


CASES = [{}, {"image_head": False}, {"prefix": ""}, {"in_heads": True}]


@pytest.fixture(params=CASES, ids=str)
def lit(request, tmp_path):
    arrays = lit_arrays(**request.param)
    np.savez(tmp_path / "LiT.npz", **arrays)
    (tmp_path / "vocab.txt").write_text("\n".join(PIECES) + "\n")
    return tmp_path / "LiT.npz", Reference(arrays, request.param.get("prefix", "params/"))


def test_texts_are_word_pieces_of_a_bert(lit):
    path, reference = lit
    tokens, _ = load_text(path).tokenizer(list(TOKENS))
    assert tokens.tolist() == [ids + [0] * (16 - len(ids)) for ids in TOKENS.values()]
    expected = np.stack([reference.text(ids) for ids in TOKENS.values()])
    np.testing.assert_allclose(embed_texts(path, list(TOKENS)).numpy(), expected, atol=1e-5)


def test_zero_shot_logits_are_the_scaled_cosines_of_both_towers(lit):
    path, reference = lit
    labels = ["A cat", "photo of dogs, CATS", "café zebra"]
    model = with_words(vt.load(path), labels)
    pixels = np.random.default_rng(1).normal(size=(2, SIDE, SIDE, 3))
    with torch.no_grad():
        logits = model(torch.from_numpy(pixels).float().permute(0, 3, 1, 2)).numpy()
    texts = np.stack([reference.text(TOKENS[label]) for label in labels])
    expected = np.exp(2.5) * np.stack([reference.image(image) for image in pixels]) @ texts.T
    np.testing.assert_allclose(logits, expected, atol=2e-4)  # float32 cosines times 12
    assert model.meta.preprocess.fit == "squash"


def test_a_zero_shot_classifier_is_saved_and_loaded(tmp_path):
    np.savez(tmp_path / "LiT.npz", **lit_arrays())
    (tmp_path / "vocab.txt").write_text("\n".join(PIECES))
    model = with_words(vt.load(tmp_path / "LiT.npz"), ["cat", "dog"])
    vt.save(model, tmp_path / "native")
    again, pixels = load(tmp_path / "native"), torch.randn(1, 3, SIDE, SIDE)
    with torch.no_grad():
        torch.testing.assert_close(again(pixels), model(pixels))  # another memory layout, so other float32 sums


def test_a_missing_vocabulary_is_one_line(tmp_path):
    np.savez(tmp_path / "LiT.npz", **lit_arrays())
    with pytest.raises(CheckpointError, match=r"no tokenizer: texts need .*vocab\.txt \(BERT\)"):
        load_text(tmp_path / "LiT.npz")
