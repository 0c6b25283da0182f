"""What a caller may know, want and get wrong when loading weights."""

from __future__ import annotations

import pytest
import torch
from checkpoints import TOLERANCE, expected, largest_difference, path_of
from safetensors.torch import load_file, save_file

from vitruvian import create_model
from vitruvian.catalog import imagenet_labels
from vitruvian.config import ViTConfig
from vitruvian.errors import CheckpointError, ConfigError, UnknownNameError, VitruvianError
from vitruvian.model.build import build
from vitruvian.weights import hub
from vitruvian.weights.load import load
from vitruvian.weights.save import convert, save


def changed(tmp_path, name="timm_vit", *, without=(), **more):
    """A copy of a timm fixture without some tensors and with others."""
    tensors = {key: tensor for key, tensor in load_file(path_of(name)).items() if key not in without}
    save_file(tensors | {key.replace("__", "."): tensor for key, tensor in more.items()}, tmp_path / "w.safetensors")
    return tmp_path / "w.safetensors"


def test_a_loaded_model_answers_and_can_be_trained():
    model = load(path_of("timm_vit"), num_heads=4)
    assert not model.training
    assert all(parameter.requires_grad and not parameter.is_meta for parameter in model.parameters())


def test_training_in_place_leaves_the_file_alone():
    before = path_of("timm_vit").read_bytes()
    model = load(path_of("timm_vit"), num_heads=4)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    assert path_of("timm_vit").read_bytes() == before


class TestHeads:
    @pytest.mark.parametrize(("width", "heads"), [(192, 3), (384, 6), (1280, 16)])
    def test_published_widths_have_their_heads(self, width, heads, tmp_path):
        config = ViTConfig(image_size=16, patch_size=16, depth=1, width=width, mlp_dim=8, num_heads=1, num_classes=2)
        save(build(config), tmp_path / "w.safetensors", "timm")
        assert load(tmp_path / "w.safetensors", family="timm").config.num_heads == heads

    def test_an_unusual_width_asks_for_heads(self):
        with pytest.raises(
            CheckpointError, match=r"does not state the number of heads, .* has width 32; pass num_heads="
        ):
            load(path_of("timm_vit"))

    @pytest.mark.parametrize("name", ["google_vit", "huggingface_vit"])
    def test_heads_that_contradict_the_file_are_refused(self, name):
        with pytest.raises(CheckpointError, match="heads=8 contradicts the file, which has 4 heads"):
            load(path_of(name), num_heads=8)

    def test_heads_that_do_not_divide_the_width_are_refused(self):
        with pytest.raises(CheckpointError, match="width=32 is not divisible by num_heads=5"):
            load(path_of("timm_vit"), num_heads=5)


class TestGrid:
    def test_positions_that_are_no_square_list_the_possible_grids(self):
        with pytest.raises(CheckpointError, match=r"32 positions are not a square .*one of 2x16, 4x8, 8x4, 16x2"):
            load(path_of("timm_oblong"), num_heads=4)

    def test_an_image_size_with_exactly_that_many_patches_settles_the_grid(self):
        model = load(path_of("timm_oblong"), num_heads=4, image_size=(32, 64))
        assert model.config.grid == (4, 8)
        assert largest_difference(model, "timm_oblong") < TOLERANCE

    def test_a_grid_that_does_not_fit_is_refused(self):
        with pytest.raises(CheckpointError, match="a grid of 5x5 does not fit the 32 positions in the file"):
            load(path_of("timm_oblong"), num_heads=4, grid=(5, 5))

    def test_a_grid_that_contradicts_a_file_that_says_it_is_refused(self):
        with pytest.raises(CheckpointError, match=r"grid=\(2, 8\) contradicts the file, which says 4x4"):
            load(path_of("huggingface_vit"), grid=(2, 8))

    def test_a_class_token_without_position_gives_way_to_the_image_size_asked_for(self, tmp_path):
        """25 rows are 5x5 patches alone, as DeiT-III has them, or a class token and 4x6 patches."""
        path = changed(tmp_path, pos_embed=torch.zeros(1, 25, 32))
        assert load(path, num_heads=4).config.grid == (5, 5)
        assert load(path, num_heads=4, image_size=(32, 48)).config.cls_pos_embed
        assert not load(path, num_heads=4, image_size=(40, 40)).config.cls_pos_embed
        assert load(path, num_heads=4, grid=(4, 6)).config.grid == (4, 6)

    def test_a_square_number_of_positions_may_be_another_grid(self):
        assert load(path_of("timm_vit"), num_heads=4, grid=(2, 8)).config.image_size == (16, 64)

    def test_the_grid_is_stored_with_native_weights(self, tmp_path):
        save(load(path_of("timm_oblong"), num_heads=4, grid=(4, 8)), tmp_path / "native")
        model = load(tmp_path / "native", image_size=(64, 32))
        assert largest_difference(load(tmp_path / "native"), "timm_oblong") < TOLERANCE
        assert model.config.grid == (8, 4)


class TestSize:
    def test_the_evaluation_view_follows_the_image_size(self):
        view = load(path_of("torchvision_vit"), num_heads=4, image_size=(64, 32)).meta.preprocess
        assert (view.image_size, view.scaled_size) == ((64, 32), (72, 36))

    def test_another_patch_size_keeps_the_image_and_resizes_the_grid(self):
        model = load(path_of("google_vit"), patch_size=16)
        assert (model.config.image_size, model.config.grid) == ((32, 32), (2, 2))
        assert model.embed.patch.weight.shape == (32, 3, 16, 16)

    def test_a_larger_patch_answers_an_enlarged_image_like_the_old_one(self):
        """The law of the pseudo-inverse: exact where the patch grows with the image."""
        model, large = load(path_of("google_vit")), load(path_of("google_vit"), patch_size=16, image_size=64)
        pixels = torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(0))
        big = torch.nn.functional.interpolate(pixels, (16, 16), mode="bilinear", align_corners=True)
        assert torch.allclose(large.embed.patches(big), model.embed.patches(pixels), atol=1e-4)

    @pytest.mark.parametrize("positions", ["learned_2d", "relative", "sincos", "none"])
    def test_every_sort_of_positions_takes_another_size(self, positions, tmp_path):
        shape = {
            "image_size": 32,
            "patch_size": 8,
            "depth": 1,
            "width": 32,
            "mlp_dim": 32,
            "num_heads": 4,
            "num_classes": 2,
        }
        model = build(ViTConfig(**shape, pos_embed=positions), seed=1).eval()
        model.head.weight.data.normal_(generator=torch.Generator().manual_seed(0))
        save(model, tmp_path / "native")
        pixels = torch.randn(1, 3, 48, 64, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            assert torch.allclose(load(tmp_path / "native", image_size=(48, 64))(pixels), model(pixels), atol=1e-6)

    def test_an_image_that_patches_do_not_divide_is_refused(self):
        with pytest.raises(CheckpointError, match="image of 33x33 pixels is not divisible by the patch of 8"):
            load(path_of("timm_vit"), num_heads=4, image_size=33)


class TestHead:
    def test_another_number_of_classes_gives_a_head_of_zeros_without_labels(self):
        model = load(path_of("huggingface_vit"), num_classes=3)
        assert model.head.weight.shape == (3, 32)
        assert not model.head.weight.any()
        assert model.meta.labels is None

    def test_the_same_number_of_classes_keeps_the_head(self):
        model = load(path_of("huggingface_vit"), num_classes=10)
        assert largest_difference(model, "huggingface_vit") < TOLERANCE
        assert model.meta.labels[3] == "class_3"

    def test_a_new_head_of_the_same_size_can_be_asked_for(self):
        model = load(path_of("huggingface_vit"), head="new")
        assert model.config.num_classes == 10
        assert not model.head.weight.any()
        assert model.meta.labels is None

    def test_a_new_head_replaces_the_pre_logits_layer_too(self):
        assert load(path_of("google_vit")).config.representation_size == 24
        assert load(path_of("google_vit"), num_classes=3).config.representation_size == 0

    def test_without_a_head_the_pre_logits_layer_gives_the_features(self):
        assert load(path_of("google_vit"), num_classes=0)(torch.zeros(1, 3, 32, 32)).shape == (1, 24)

    def test_both_heads_of_a_distilled_model_are_new(self):
        model = load(path_of("timm_deit_distilled"), num_heads=4, num_classes=3)
        assert not model.head.weight.any()
        assert not model.head_dist.weight.any()

    def test_a_new_head_where_there_was_none_needs_its_size(self):
        with pytest.raises(CheckpointError, match="head='new' needs num_classes="):
            load(path_of("timm_headless"), num_heads=4, head="new")
        assert load(path_of("timm_headless"), num_heads=4, num_classes=3).head.weight.shape == (3, 32)

    @pytest.mark.parametrize(
        ("option", "text"),
        [
            ({"head": "fresh"}, "'keep' or 'new'"),
            ({"num_classes": -1}, "num_classes=-1"),
            ({"num_classes": 10**12}, "num_classes=1000000000000 is not between 0 and 1000000"),
            ({"patch_size": 0}, "patch_size=0"),
        ],
    )
    def test_impossible_wishes_are_refused(self, option, text):
        with pytest.raises(VitruvianError, match=text):
            load(path_of("google_vit"), **option)

    def test_labels_can_be_given_and_must_fit(self):
        assert load(path_of("google_vit_gap"), labels=list("abcdefg")).meta.labels == tuple("abcdefg")
        with pytest.raises(CheckpointError, match="2 labels were given for a head of 7 classes"):
            load(path_of("google_vit_gap"), labels=["a", "b"])


class TestNames:
    def test_names_not_used_and_not_found_are_both_listed_with_their_number(self, tmp_path):
        path = changed(tmp_path, without=["blocks.1.mlp.fc2.bias", "norm.bias"], surprise__weight=torch.ones(1))
        with pytest.raises(CheckpointError) as caught:
            load(path, num_heads=4)
        assert str(caught.value) == (
            f"{path}: names do not fit a timm model of this shape: "
            "2 not found: blocks.1.mlp.fc2.bias, norm.bias; 1 not used: surprise.weight"
        )

    def test_long_lists_are_cut_but_counted(self, tmp_path):
        extra = {f"extra{i}": torch.ones(1) for i in range(20)}
        with pytest.raises(CheckpointError, match=r"20 not used: .* and 15 more"):
            load(changed(tmp_path, **extra), num_heads=4)

    def test_a_part_of_query_key_value_that_is_missing_is_named(self, tmp_path):
        folder = tmp_path / "hf"
        folder.mkdir()
        for name in ("config.json", "preprocessor_config.json"):
            (folder / name).write_bytes((path_of("huggingface_vit") / name).read_bytes())
        tensors = load_file(path_of("huggingface_vit") / "model.safetensors")
        del tensors["vit.encoder.layer.0.attention.attention.key.weight"]
        save_file(tensors, folder / "model.safetensors")
        with pytest.raises(CheckpointError, match=r"1 not found: encoder.layer.0.attention.attention.key.weight"):
            load(folder)

    def test_missing_positions_are_named_as_the_file_would(self, tmp_path):
        with pytest.raises(CheckpointError, match="1 not found: pos_embed; 0 not used: none"):
            load(changed(tmp_path, without=["pos_embed"]), num_heads=4)

    def test_a_block_that_is_missing_from_a_huggingface_folder_is_noticed(self, tmp_path):
        folder = tmp_path / "hf"
        folder.mkdir()
        (folder / "config.json").write_bytes((path_of("huggingface_vit") / "config.json").read_bytes())
        tensors = load_file(path_of("huggingface_vit") / "model.safetensors")
        save_file({n: t for n, t in tensors.items() if ".layer.1." not in n}, folder / "model.safetensors")
        with pytest.raises(CheckpointError, match=r"16 not found: encoder.layer.1"):
            load(folder)

    def test_a_wrong_shape_names_the_array(self, tmp_path):
        with pytest.raises(CheckpointError, match=r"'norm.bias' has shape \(31,\) .* the model expects \(32,\)"):
            load(changed(tmp_path, norm__bias=torch.zeros(31)), num_heads=4)

    def test_whole_numbers_are_not_weights(self, tmp_path):
        with pytest.raises(CheckpointError, match=r"'norm.bias' has dtype torch.int64"):
            load(changed(tmp_path, norm__bias=torch.zeros(32, dtype=torch.int64)), num_heads=4)

    def test_the_same_array_under_two_names_is_refused(self, tmp_path):
        scale = torch.ones(32)
        path = changed(tmp_path, "timm_deit3", blocks__0__gamma_1=scale)
        with pytest.raises(CheckpointError, match="stored twice"):
            load(path, num_heads=4)


class TestSource:
    def test_names_of_no_family_are_said_to_be_so(self, tmp_path):
        save_file({"layer1.weight": torch.ones(2)}, tmp_path / "w.safetensors")
        with pytest.raises(CheckpointError, match=r"'layer1.weight', ...\) belong to no known family: google, "):
            load(tmp_path / "w.safetensors")

    def test_a_family_that_the_file_is_not_of_is_refused(self):
        with pytest.raises(CheckpointError, match=r"not torchvision weights: 'conv_proj.weight' is missing"):
            load(path_of("timm_vit"), family="torchvision")

    def test_an_unknown_family_is_answered_with_the_nearest(self):
        with pytest.raises((UnknownNameError, CheckpointError), match="unknown family 'tim'; did you mean timm"):
            load(path_of("timm_vit"), family="tim")

    @pytest.mark.parametrize("source", ["./missing.npz", "/nowhere/at/all"])
    def test_a_path_that_does_not_exist_is_not_looked_up(self, source, monkeypatch):
        monkeypatch.setattr(hub, "resolve_source", lambda name: pytest.fail("asked the hub"))
        with pytest.raises(CheckpointError, match="no such file or folder"):
            load(source)

    def test_a_published_name_is_asked_of_the_hub(self, monkeypatch):
        monkeypatch.setattr(hub, "resolve_source", lambda name: path_of("google_vit") if name == "a/name" else None)
        assert largest_difference(load("a/name"), "google_vit") < TOLERANCE
        assert load("a/name").meta.origin.startswith("google weights from a/name;")

    def test_a_bad_size_is_a_setting_error(self):
        with pytest.raises(ConfigError, match="image_size"):
            load(path_of("google_vit"), image_size=(1, 2, 3))

    def test_expected_pairs_exist_for_every_size(self):
        assert [pixels.shape[-1] for pixels, _ in expected("timm_vit")] == [32, 64, 48]


class TestStateDict:
    """What `torch.save(model.state_dict(), "mine.pth")` wrote."""

    def saved(self, path):
        model = create_model(
            "ViT-Ti/16", depth=1, width=16, mlp_dim=32, num_heads=2, patch_size=8, image_size=16, num_classes=3
        )
        torch.nn.init.normal_(model.head.weight)
        torch.save(model.state_dict(), path)
        return model.eval()

    def test_a_state_dict_loads_with_its_settings(self, tmp_path):
        model = self.saved(tmp_path / "mine.pth")
        again = load(tmp_path / "mine.pth", config=model.config.replace(num_classes=10, image_size=8))
        pixels = torch.randn(2, 3, 16, 16)
        assert torch.equal(again(pixels), model(pixels))
        assert again.config == model.config

    def test_without_them_the_error_asks_for_what_arrays_do_not_tell(self, tmp_path):
        self.saved(tmp_path / "mine.pth")
        with pytest.raises(CheckpointError, match=r"arrays do not determine heads, GELU and epsilon; .*pass config="):
            load(tmp_path / "mine.pth")
        with pytest.raises(CheckpointError, match="depth is 12, the tensors have 1"):
            convert(tmp_path / "mine.pth", tmp_path / "folder", to="native", config="ViT-Ti/16")

    def test_settings_of_another_shape_are_refused(self, tmp_path):
        self.saved(tmp_path / "mine.pth")
        with pytest.raises(CheckpointError, match="depth is 12, the tensors have 1"):
            load(tmp_path / "mine.pth", config="ViT-Ti/16")

    def test_a_file_that_describes_itself_takes_no_settings(self, tmp_path):
        model = self.saved(tmp_path / "mine.pth")
        save(model, tmp_path / "native")
        for path in (tmp_path / "native", path_of("timm_vit")):
            with pytest.raises(CheckpointError, match="config= is for files that do not state"):
                load(path, config=model.config)


class TestLabels:
    CONFIG = ViTConfig(image_size=16, patch_size=16, num_classes=1000, depth=1, width=192, mlp_dim=8, num_heads=3)

    @pytest.mark.parametrize(("num_classes", "first"), [(1000, "tench"), (1001, None)])
    def test_a_published_head_of_1000_classes_has_imagenets_names(self, tmp_path, num_classes, first):
        assert load(path_of("timm_vit"), num_heads=4).meta.labels is None
        save(build(self.CONFIG.replace(num_classes=num_classes)), tmp_path / "w.npz", "google")
        labels = load(tmp_path / "w.npz", family="google").meta.labels
        assert (labels and labels[0]) == first

    def test_they_are_the_models_labels(self, tmp_path):
        head = {"head__weight": torch.zeros(1000, 32), "head__bias": torch.zeros(1000)}
        path = changed(tmp_path, without=("head.weight", "head.bias"), **head)
        assert load(path, num_heads=4).meta.labels == imagenet_labels()
        assert load(path, num_heads=4, head="new").meta.labels is None

    def test_a_huggingface_folder_without_names_has_none(self, tmp_path):
        save(build(self.CONFIG), tmp_path / "folder", "huggingface")
        assert load(tmp_path / "folder", family="huggingface").meta.labels is None


@pytest.mark.parametrize("kind", ["learned", "learned_2d", "factorized"])
def test_positions_of_every_layer_follow_another_image_size(tmp_path, kind):
    config = {"depth": 2, "width": 16, "mlp_dim": 16, "num_heads": 2, "patch_size": 8, "num_classes": 3}
    model = create_model("ViT-Ti/16", image_size=32, pos_embed=kind, pos_embed_at="every_layer", **config).eval()
    torch.nn.init.normal_(model.head.weight)
    save(model, tmp_path / "model")
    pixels = torch.randn(1, 3, 48, 64)
    # the loaded model has the resampled tables, the other one resamples them in its forward pass
    torch.testing.assert_close(load(tmp_path / "model", image_size=(48, 64))(pixels), model(pixels))
