"""The published weights as their own projects list them, a table for each.

Where the rows come from: the checkpoint lists of google-research/vision_transformer, big_transfer and big_vision, the
configurations inside timm 1.0.30 and torchvision 0.29, and the model cards on Hugging Face.
"""

from __future__ import annotations

IN21K = "ImageNet-21k"
IN1K = "ImageNet"
BOTH = "ImageNet-21k, then ImageNet"
ZERO_HEAD = "ImageNet-21k; its head is zero"

GOOGLE: dict[str, tuple[str, int, int, str]] = {
    # path in the bucket vit_models: variant, image size, classes, note
    "imagenet21k/ViT-B_16": ("ViT-B/16", 224, 21843, ZERO_HEAD),
    "imagenet21k/ViT-B_32": ("ViT-B/32", 224, 21843, ZERO_HEAD),
    "imagenet21k/ViT-L_16": ("ViT-L/16", 224, 21843, ZERO_HEAD),
    "imagenet21k/ViT-L_32": ("ViT-L/32", 224, 21843, ZERO_HEAD),
    "imagenet21k/ViT-H_14": ("ViT-H/14", 224, 21843, ZERO_HEAD),
    "imagenet21k/R50+ViT-B_16": ("R50+ViT-B/16", 224, 21843, ZERO_HEAD),
    "imagenet21k+imagenet2012/ViT-B_16-224": ("ViT-B/16", 224, 1000, BOTH),
    "imagenet21k+imagenet2012/ViT-B_16": ("ViT-B/16", 384, 1000, BOTH),
    "imagenet21k+imagenet2012/ViT-B_32": ("ViT-B/32", 384, 1000, BOTH),
    "imagenet21k+imagenet2012/ViT-L_16-224": ("ViT-L/16", 224, 1000, BOTH),
    "imagenet21k+imagenet2012/ViT-L_16": ("ViT-L/16", 384, 1000, BOTH),
    "imagenet21k+imagenet2012/ViT-L_32": ("ViT-L/32", 384, 1000, BOTH),
    "imagenet21k+imagenet2012/R50+ViT-B_16": ("R50+ViT-B/16", 384, 1000, BOTH),
    "augreg/B_8-i21k-300ep-lr_0.001-aug_medium2-wd_0.1-do_0.0-sd_0.0": ("ViT-B/8", 224, 21843, IN21K),
    "sam/ViT-B_16": ("ViT-B/16", 224, 1000, f"{IN1K}, sharpness-aware"),
    "sam/ViT-B_32": ("ViT-B/32", 224, 1000, f"{IN1K}, sharpness-aware"),
}

AUGREG: dict[str, tuple[str, str, str, int, str]] = {
    # short name: variant, settings of the recommended pre-training, of its fine-tuning, that one's size and top-1
    "Ti_16": ("ViT-Ti/16", "aug_none-wd_0.03-do_0.0-sd_0.0", "lr_0.03", 384, "78.22%"),
    "S_32": ("ViT-S/32", "aug_none-wd_0.1-do_0.0-sd_0.0", "lr_0.01", 384, "79.58%"),
    "S_16": ("ViT-S/16", "aug_light1-wd_0.03-do_0.0-sd_0.0", "lr_0.03", 384, "83.73%"),
    "B_32": ("ViT-B/32", "aug_light1-wd_0.1-do_0.0-sd_0.0", "lr_0.01", 384, "83.59%"),
    "B_16": ("ViT-B/16", "aug_medium1-wd_0.1-do_0.0-sd_0.0", "lr_0.03", 384, "85.49%"),
    "B_8": ("ViT-B/8", "aug_medium1-wd_0.1-do_0.0-sd_0.0", "lr_0.01", 224, ""),
    "L_16": ("ViT-L/16", "aug_strong1-wd_0.1-do_0.0-sd_0.0", "lr_0.01", 384, "85.59%"),
    "R_Ti_16": ("R+ViT-Ti/16", "aug_none-wd_0.03-do_0.0-sd_0.0", "lr_0.03", 384, "75.40%"),
    "R26_S_32": ("R26+ViT-S/32", "aug_light1-wd_0.1-do_0.0-sd_0.0", "lr_0.01", 384, "83.85%"),
    "R50_L_32": ("R50+ViT-L/32", "aug_medium1-wd_0.1-do_0.1-sd_0.1", "lr_0.01", 384, "85.99%"),
}

GOOGLE_ALIASES: dict[str, tuple[str, ...]] = {
    # name: what vit_jax calls it as `--config.model`, what big_vision calls it
    "imagenet21k/ViT-B_16": ("ViT-B_16",),
    "imagenet21k/ViT-B_32": ("ViT-B_32",),
    "imagenet21k/ViT-L_16": ("ViT-L_16",),
    "imagenet21k/ViT-L_32": ("ViT-L_32",),
    "imagenet21k/ViT-H_14": ("ViT-H_14",),
    "imagenet21k/R50+ViT-B_16": ("R50+ViT-B_16",),
    "imagenet21k+imagenet2012/ViT-B_16-224": ("ViT-B_16-224",),
    "imagenet21k+imagenet2012/ViT-L_16-224": ("ViT-L_16-224",),
    "augreg/Ti_16-i21k": ("howto-i21k-Ti/16",),
    "augreg/S_32-i21k": ("howto-i21k-S/32",),
    "augreg/S_16-i21k": ("howto-i21k-S/16",),
    "augreg/B_32-i21k": ("howto-i21k-B/32",),
    "augreg/B_16-i21k": ("howto-i21k-B/16",),
    "augreg/B_8-i21k-300ep-lr_0.001-aug_medium2-wd_0.1-do_0.0-sd_0.0": ("howto-i21k-B/8",),
    "augreg/L_16-i21k": ("howto-i21k-L/16",),
}

BIG_VISION: dict[str, tuple[str, str, int, str]] = {
    # big_vision's own short name: variant, path in the bucket big_vision, image size, note
    "i1k-s16-90ep": ("ViT-S/16", "vit_s16_i1k_90ep", 224, f"{IN1K}, 90 epochs; 76.5% top-1"),
    "i1k-s16-150ep": ("ViT-S/16", "vit_s16_i1k_150ep", 224, f"{IN1K}, 150 epochs; 78.5% top-1"),
    "i1k-s16-300ep": ("ViT-S/16", "vit_s16_i1k_300ep", 224, f"{IN1K}, 300 epochs; 80.0% top-1"),
    "deit3_S_224_1k": ("DeiT-III-S/16", "zoo/deit3/bv_deit_3_small_224_1k", 224, IN1K),
    "deit3_S_224_21k": ("DeiT-III-S/16", "zoo/deit3/bv_deit_3_small_224_21k", 224, BOTH),
    "deit3_S_384_1k": ("DeiT-III-S/16", "zoo/deit3/bv_deit_3_small_384_1k", 384, IN1K),
    "deit3_S_384_21k": ("DeiT-III-S/16", "zoo/deit3/bv_deit_3_small_384_21k", 384, BOTH),
    "deit3_B_224_1k": ("DeiT-III-B/16", "zoo/deit3/bv_deit_3_base_224_1k", 224, IN1K),
    "deit3_B_224_21k": ("DeiT-III-B/16", "zoo/deit3/bv_deit_3_base_224_21k", 224, BOTH),
    "deit3_B_384_1k": ("DeiT-III-B/16", "zoo/deit3/bv_deit_3_base_384_1k", 384, IN1K),
    "deit3_B_384_21k": ("DeiT-III-B/16", "zoo/deit3/bv_deit_3_base_384_21k", 384, BOTH),
    "deit3_L_224_1k": ("DeiT-III-L/16", "zoo/deit3/bv_deit_3_large_224_1k", 224, IN1K),
    "deit3_L_224_21k": ("DeiT-III-L/16", "zoo/deit3/bv_deit_3_large_224_21k", 224, BOTH),
    "deit3_L_384_1k": ("DeiT-III-L/16", "zoo/deit3/bv_deit_3_large_384_1k", 384, IN1K),
    "deit3_L_384_21k": ("DeiT-III-L/16", "zoo/deit3/bv_deit_3_large_384_21k", 384, BOTH),
}

TIMM_TAGS: dict[str, tuple[int, str]] = {
    # tag: classes, note
    "augreg2_in21k_ft_in1k": (1000, f"{BOTH}, fine-tuned anew by timm"),
    "augreg_in21k_ft_in1k": (1000, BOTH),
    "orig_in21k_ft_in1k": (1000, f"{BOTH}; the paper's own"),
    "augreg_in1k": (1000, IN1K),
    "sam_in1k": (1000, f"{IN1K}, sharpness-aware"),
    "fb_in1k": (1000, IN1K),
    "fb_in22k_ft_in1k": (1000, BOTH),
    "augreg_in21k": (21843, IN21K),
    "orig_in21k": (0, f"{IN21K}; the paper's own, without head"),
    "dino": (0, f"{IN1K} without labels"),
    "lvd142m": (0, "LVD-142M without labels"),
}

TIMM: dict[str, tuple[str, ...]] = {
    # variant: names; the first of each architecture is what its name without tag means in timm
    "ViT-Ti/16": (
        "vit_tiny_patch16_224.augreg_in21k_ft_in1k",
        "vit_tiny_patch16_384.augreg_in21k_ft_in1k",
        "vit_tiny_patch16_224.augreg_in21k",
    ),
    "ViT-S/32": (
        "vit_small_patch32_224.augreg_in21k_ft_in1k",
        "vit_small_patch32_384.augreg_in21k_ft_in1k",
        "vit_small_patch32_224.augreg_in21k",
    ),
    "ViT-S/16": (
        "vit_small_patch16_224.augreg_in21k_ft_in1k",
        "vit_small_patch16_384.augreg_in21k_ft_in1k",
        "vit_small_patch16_224.augreg_in1k",
        "vit_small_patch16_384.augreg_in1k",
        "vit_small_patch16_224.augreg_in21k",
    ),
    "ViT-B/32": (
        "vit_base_patch32_224.augreg_in21k_ft_in1k",
        "vit_base_patch32_384.augreg_in21k_ft_in1k",
        "vit_base_patch32_224.augreg_in1k",
        "vit_base_patch32_384.augreg_in1k",
        "vit_base_patch32_224.sam_in1k",
        "vit_base_patch32_224.augreg_in21k",
        "vit_base_patch32_224.orig_in21k",
    ),
    "ViT-B/16": (
        "vit_base_patch16_224.augreg2_in21k_ft_in1k",
        "vit_base_patch16_224.augreg_in21k_ft_in1k",
        "vit_base_patch16_384.augreg_in21k_ft_in1k",
        "vit_base_patch16_224.orig_in21k_ft_in1k",
        "vit_base_patch16_384.orig_in21k_ft_in1k",
        "vit_base_patch16_224.augreg_in1k",
        "vit_base_patch16_384.augreg_in1k",
        "vit_base_patch16_224.sam_in1k",
        "vit_base_patch16_224.augreg_in21k",
        "vit_base_patch16_224.orig_in21k",
    ),
    "ViT-B/8": (
        "vit_base_patch8_224.augreg2_in21k_ft_in1k",
        "vit_base_patch8_224.augreg_in21k_ft_in1k",
        "vit_base_patch8_224.augreg_in21k",
    ),
    "ViT-L/32": ("vit_large_patch32_384.orig_in21k_ft_in1k", "vit_large_patch32_224.orig_in21k"),
    "ViT-L/16": (
        "vit_large_patch16_224.augreg_in21k_ft_in1k",
        "vit_large_patch16_384.augreg_in21k_ft_in1k",
        "vit_large_patch16_224.augreg_in21k",
        "vit_large_patch16_224.orig_in21k",
    ),
    "ViT-H/14": ("vit_huge_patch14_224.orig_in21k",),
    "R+ViT-Ti/16": (
        "vit_tiny_r_s16_p8_224.augreg_in21k_ft_in1k",
        "vit_tiny_r_s16_p8_384.augreg_in21k_ft_in1k",
        "vit_tiny_r_s16_p8_224.augreg_in21k",
    ),
    "R26+ViT-S/32": (
        "vit_small_r26_s32_224.augreg_in21k_ft_in1k",
        "vit_small_r26_s32_384.augreg_in21k_ft_in1k",
        "vit_small_r26_s32_224.augreg_in21k",
    ),
    "R50+ViT-B/16": ("vit_base_r50_s16_384.orig_in21k_ft_in1k", "vit_base_r50_s16_224.orig_in21k"),
    "R50+ViT-L/32": (
        "vit_large_r50_s32_224.augreg_in21k_ft_in1k",
        "vit_large_r50_s32_384.augreg_in21k_ft_in1k",
        "vit_large_r50_s32_224.augreg_in21k",
    ),
    "DeiT-Ti/16": ("deit_tiny_patch16_224.fb_in1k",),
    "DeiT-S/16": ("deit_small_patch16_224.fb_in1k",),
    "DeiT-B/16": ("deit_base_patch16_224.fb_in1k", "deit_base_patch16_384.fb_in1k"),
    "DeiT-Ti/16-distilled": ("deit_tiny_distilled_patch16_224.fb_in1k",),
    "DeiT-S/16-distilled": ("deit_small_distilled_patch16_224.fb_in1k",),
    "DeiT-B/16-distilled": ("deit_base_distilled_patch16_224.fb_in1k", "deit_base_distilled_patch16_384.fb_in1k"),
    "DeiT-III-S/16": (
        "deit3_small_patch16_224.fb_in1k",
        "deit3_small_patch16_384.fb_in1k",
        "deit3_small_patch16_224.fb_in22k_ft_in1k",
        "deit3_small_patch16_384.fb_in22k_ft_in1k",
    ),
    "DeiT-III-M/16": ("deit3_medium_patch16_224.fb_in1k", "deit3_medium_patch16_224.fb_in22k_ft_in1k"),
    "DeiT-III-B/16": (
        "deit3_base_patch16_224.fb_in1k",
        "deit3_base_patch16_384.fb_in1k",
        "deit3_base_patch16_224.fb_in22k_ft_in1k",
        "deit3_base_patch16_384.fb_in22k_ft_in1k",
    ),
    "DeiT-III-L/16": (
        "deit3_large_patch16_224.fb_in1k",
        "deit3_large_patch16_384.fb_in1k",
        "deit3_large_patch16_224.fb_in22k_ft_in1k",
        "deit3_large_patch16_384.fb_in22k_ft_in1k",
    ),
    "DeiT-III-H/14": ("deit3_huge_patch14_224.fb_in1k", "deit3_huge_patch14_224.fb_in22k_ft_in1k"),
    "DINO-S/16": ("vit_small_patch16_224.dino",),
    "DINO-S/8": ("vit_small_patch8_224.dino",),
    "DINO-B/16": ("vit_base_patch16_224.dino",),
    "DINO-B/8": ("vit_base_patch8_224.dino",),
    "DINOv2-S/14": ("vit_small_patch14_dinov2.lvd142m", "vit_small_patch14_reg4_dinov2.lvd142m"),
    "DINOv2-B/14": ("vit_base_patch14_dinov2.lvd142m", "vit_base_patch14_reg4_dinov2.lvd142m"),
    "DINOv2-L/14": ("vit_large_patch14_dinov2.lvd142m", "vit_large_patch14_reg4_dinov2.lvd142m"),
    "DINOv2-g/14": ("vit_giant_patch14_dinov2.lvd142m", "vit_giant_patch14_reg4_dinov2.lvd142m"),
}

SWAG = "Instagram hashtags, then all of it on ImageNet"
SWAG_LINEAR = "Instagram hashtags, then the head alone on ImageNet"

TORCHVISION: dict[str, tuple[str, str, int, str]] = {
    # torchvision's own name: variant, file, image size, note; the first of each model is what its bare name means
    "ViT_B_16_Weights.IMAGENET1K_V1": ("ViT-B/16", "vit_b_16-c867db91.pth", 224, IN1K),
    "ViT_B_16_Weights.IMAGENET1K_SWAG_E2E_V1": ("ViT-B/16", "vit_b_16_swag-9ac1b537.pth", 384, SWAG),
    "ViT_B_16_Weights.IMAGENET1K_SWAG_LINEAR_V1": ("ViT-B/16", "vit_b_16_lc_swag-4e70ced5.pth", 224, SWAG_LINEAR),
    "ViT_B_32_Weights.IMAGENET1K_V1": ("ViT-B/32", "vit_b_32-d86f8d99.pth", 224, IN1K),
    "ViT_L_16_Weights.IMAGENET1K_V1": ("ViT-L/16", "vit_l_16-852ce7e3.pth", 224, IN1K),
    "ViT_L_16_Weights.IMAGENET1K_SWAG_E2E_V1": ("ViT-L/16", "vit_l_16_swag-4f3808c9.pth", 512, SWAG),
    "ViT_L_16_Weights.IMAGENET1K_SWAG_LINEAR_V1": ("ViT-L/16", "vit_l_16_lc_swag-4d563306.pth", 224, SWAG_LINEAR),
    "ViT_L_32_Weights.IMAGENET1K_V1": ("ViT-L/32", "vit_l_32-c7638314.pth", 224, IN1K),
    "ViT_H_14_Weights.IMAGENET1K_SWAG_E2E_V1": ("ViT-H/14", "vit_h_14_swag-80465313.pth", 518, SWAG),
    "ViT_H_14_Weights.IMAGENET1K_SWAG_LINEAR_V1": ("ViT-H/14", "vit_h_14_lc_swag-c1eb923e.pth", 224, SWAG_LINEAR),
}

LVD = "LVD-142M without labels"
LVD_LINEAR = "LVD-142M without labels, then a head on ImageNet"

PAIRS = "images with their texts; the image tower"
LVD = "1.7 billion images without labels; 4 registers; asks for consent"

HUGGING_FACE: dict[str, tuple[str, int, int, str]] = {
    # repository: variant, image size, classes, note
    "google/vit-base-patch16-224": ("ViT-B/16", 224, 1000, BOTH),
    "google/vit-base-patch16-384": ("ViT-B/16", 384, 1000, BOTH),
    "google/vit-base-patch32-384": ("ViT-B/32", 384, 1000, BOTH),
    "google/vit-large-patch16-224": ("ViT-L/16", 224, 1000, BOTH),
    "google/vit-large-patch16-384": ("ViT-L/16", 384, 1000, BOTH),
    "google/vit-large-patch32-384": ("ViT-L/32", 384, 1000, BOTH),
    "google/vit-base-patch16-224-in21k": ("ViT-B/16", 224, 0, IN21K),
    "google/vit-base-patch32-224-in21k": ("ViT-B/32", 224, 0, IN21K),
    "google/vit-large-patch16-224-in21k": ("ViT-L/16", 224, 0, IN21K),
    "google/vit-large-patch32-224-in21k": ("ViT-L/32", 224, 0, IN21K),
    "google/vit-huge-patch14-224-in21k": ("ViT-H/14", 224, 0, IN21K),
    "facebook/deit-tiny-patch16-224": ("DeiT-Ti/16", 224, 1000, IN1K),
    "facebook/deit-small-patch16-224": ("DeiT-S/16", 224, 1000, IN1K),
    "facebook/deit-base-patch16-224": ("DeiT-B/16", 224, 1000, IN1K),
    "facebook/deit-base-patch16-384": ("DeiT-B/16", 384, 1000, IN1K),
    "facebook/deit-tiny-distilled-patch16-224": ("DeiT-Ti/16-distilled", 224, 1000, IN1K),
    "facebook/deit-small-distilled-patch16-224": ("DeiT-S/16-distilled", 224, 1000, IN1K),
    "facebook/deit-base-distilled-patch16-224": ("DeiT-B/16-distilled", 224, 1000, IN1K),
    "facebook/deit-base-distilled-patch16-384": ("DeiT-B/16-distilled", 384, 1000, IN1K),
    "openai/clip-vit-base-patch32": ("CLIP-B/32", 224, 0, PAIRS),
    "openai/clip-vit-base-patch16": ("CLIP-B/16", 224, 0, PAIRS),
    "openai/clip-vit-large-patch14": ("CLIP-L/14", 224, 0, PAIRS),
    "openai/clip-vit-large-patch14-336": ("CLIP-L/14", 336, 0, PAIRS),
    **{f"google/siglip-base-patch16-{side}": ("SigLIP-B/16", side, 0, PAIRS) for side in (224, 256, 384, 512)},
    **{f"google/siglip-large-patch16-{side}": ("SigLIP-L/16", side, 0, PAIRS) for side in (256, 384)},
    "microsoft/beit-base-patch16-224": ("BEiT-B/16", 224, 1000, BOTH),
    "microsoft/beit-base-patch16-384": ("BEiT-B/16", 384, 1000, BOTH),
    "microsoft/beit-large-patch16-224": ("BEiT-L/16", 224, 1000, BOTH),
    "facebook/dinov3-vits16-pretrain-lvd1689m": ("DINOv3-S/16", 224, 0, LVD),
    "facebook/dinov3-vitb16-pretrain-lvd1689m": ("DINOv3-B/16", 224, 0, LVD),
    "facebook/dinov3-vitl16-pretrain-lvd1689m": ("DINOv3-L/16", 224, 0, LVD),
    "facebook/vit-mae-base": ("ViT-B/16", 224, 0, f"{IN1K} without labels, masked"),
    "facebook/vit-mae-large": ("ViT-L/16", 224, 0, f"{IN1K} without labels, masked"),
    "facebook/vit-mae-huge": ("ViT-H/14", 224, 0, f"{IN1K} without labels, masked"),
    "facebook/vit-msn-small": ("ViT-S/16", 224, 0, f"{IN1K} without labels"),
    "facebook/vit-msn-base": ("ViT-B/16", 224, 0, f"{IN1K} without labels"),
    "facebook/dino-vits16": ("DINO-S/16", 224, 0, f"{IN1K} without labels"),
    "facebook/dino-vits8": ("DINO-S/8", 224, 0, f"{IN1K} without labels"),
    "facebook/dino-vitb16": ("DINO-B/16", 224, 0, f"{IN1K} without labels"),
    "facebook/dino-vitb8": ("DINO-B/8", 224, 0, f"{IN1K} without labels"),
    **{
        f"facebook/dinov2-{registers}{word}{head}": (f"DINOv2-{size}/14", 518, classes, data + extra)
        for word, size in (("small", "S"), ("base", "B"), ("large", "L"), ("giant", "g"))
        for registers, extra in (("", ""), ("with-registers-", "; 4 registers"))
        for head, classes, data in (("", 0, LVD), ("-imagenet1k-1-layer", 1000, LVD_LINEAR))
    },
}

DINO: dict[str, tuple[str, str, int, str]] = {
    # name in torch.hub: variant, path at dl.fbaipublicfiles.com, image size, note
    "dino_vits16": ("DINO-S/16", "dino/dino_deitsmall16_pretrain/dino_deitsmall16_pretrain", 224, IN1K),
    "dino_vits8": ("DINO-S/8", "dino/dino_deitsmall8_pretrain/dino_deitsmall8_pretrain", 224, IN1K),
    "dino_vitb16": ("DINO-B/16", "dino/dino_vitbase16_pretrain/dino_vitbase16_pretrain", 224, IN1K),
    "dino_vitb8": ("DINO-B/8", "dino/dino_vitbase8_pretrain/dino_vitbase8_pretrain", 224, IN1K),
    "dinov2_vits14": ("DINOv2-S/14", "dinov2/dinov2_vits14/dinov2_vits14_pretrain", 518, "LVD-142M"),
    "dinov2_vitb14": ("DINOv2-B/14", "dinov2/dinov2_vitb14/dinov2_vitb14_pretrain", 518, "LVD-142M"),
    "dinov2_vitl14": ("DINOv2-L/14", "dinov2/dinov2_vitl14/dinov2_vitl14_pretrain", 518, "LVD-142M"),
    "dinov2_vitg14": ("DINOv2-g/14", "dinov2/dinov2_vitg14/dinov2_vitg14_pretrain", 518, "LVD-142M"),
    "dinov2_vits14_reg": ("DINOv2-S/14", "dinov2/dinov2_vits14/dinov2_vits14_reg4_pretrain", 518, "LVD-142M"),
    "dinov2_vitb14_reg": ("DINOv2-B/14", "dinov2/dinov2_vitb14/dinov2_vitb14_reg4_pretrain", 518, "LVD-142M"),
    "dinov2_vitl14_reg": ("DINOv2-L/14", "dinov2/dinov2_vitl14/dinov2_vitl14_reg4_pretrain", 518, "LVD-142M"),
    "dinov2_vitg14_reg": ("DINOv2-g/14", "dinov2/dinov2_vitg14/dinov2_vitg14_reg4_pretrain", 518, "LVD-142M"),
}

BIT: dict[str, tuple[str, int, int, str]] = {
    # path in the bucket bit_models: variant, image size, classes, note
    **{f"BiT-S-{size}": (f"BiT-{size}", 224, 1000, IN1K) for size in ("R50x1", "R101x1", "R50x3", "R101x3", "R152x4")},
    **{
        f"BiT-M-{size}{tuning}": (f"BiT-{size}", side, classes, note)
        for size in ("R50x1", "R101x1", "R50x3", "R101x3", "R152x2", "R152x4")
        for tuning, side, classes, note in (("", 224, 21843, IN21K), ("-ILSVRC2012", 480, 1000, BOTH))
    },
    "distill/R50x1_160": ("BiT-R50x1", 160, 1000, f"{IN1K}, distilled from R152x2; 80.5% top-1"),
    "distill/R50x1_224": ("BiT-R50x1", 224, 1000, f"{IN1K}, distilled from R152x2; 82.8% top-1"),
    "distill/R152x2_T_224": ("BiT-R152x2", 224, 1000, f"{BOTH}; 83.0% top-1"),
    "distill/R152x2_T_384": ("BiT-R152x2", 384, 1000, f"{BOTH}; 84.3% top-1"),
}
