"""Recipe files: those of the package by name, others by path, and changes to them from a command line."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from vitruvian.errors import ConfigError, FileError, UnknownNameError, argument, short_repr
from vitruvian.files import parse_toml, read_bytes
from vitruvian.training.recipe import Recipe

OWNED = {"augment.image_size": "image_size", "augment.mean": "view.mean", "augment.std": "view.std"}
"""Settings of training views that follow from others."""

OTHER_NAMES = {
    "lr": "rate learning_rate lr_max max_lr base_lr lr0 blr",
    "lrs": "rates learning_rates",
    "min_lr": "end_rate end_lr lr_min lr_end eta_min final_lr",
    "warmup": "warmup_steps warmup_epochs warmup_ratio lr_warmup_epochs lr_warmup_steps warmup_lr",
    "cooldown": "cooldown_epochs cooldown_steps",
    "schedule": "sched scheduler lr_scheduler lr_schedule lr_scheduler_type",
    "optimizer": "opt optim optimiser",
    "betas": "opt_betas adam_beta1 adam_beta2 beta1 beta2",
    "weight_decay": "wd decay l2",
    "weight_decay_on": "decay_on",
    "decouple_lr (the opposite)": "decay_times_rate",
    "layer_decay": "lr_decay layer_lr_decay layerwise_lr_decay llrd",
    "grad_clip": "clip clip_grad clip_grad_norm gradient_clip gradient_clip_val max_grad_norm",
    "grad_accum_steps": "accumulate grad_accum gradient_accumulation_steps accumulate_grad_batches accum_iter",
    "grad_checkpointing": "checkpoint_activations gradient_checkpointing activation_checkpointing",
    "batch_size (images in a step over all processes)": "batch bs train_batch_size per_device_train_batch_size",
    "epochs": "num_epochs num_train_epochs max_epochs n_epochs",
    "steps": "max_steps num_steps iterations iters total_steps",
    "loss=bce": "bce_loss",
    "label_smoothing": "smoothing label_smoothing_factor smooth",
    "teacher": "teacher_model teacher_path teacher_model_name_or_path",
    "distillation (logits, token or features)": "distillation_type",
    "distillation_weight": "distillation_alpha kd_weight kd_alpha",
    "distillation_temperature": "distillation_tau kd_temperature",
    "precision (float32, bfloat16 or float16)": "amp amp_dtype fp16 bf16 dtype mixed_precision",
    "compile": "torchcompile torch_compile",
    "average=ema": "ema model_ema",
    "ema_decay": "average_decay model_ema_decay",
    "polyak_start": "average_start",
    "patch_drop": "drop_tokens patch_drop_rate token_drop",
    "architecture.dropout": "drop drop_rate dropout dropout_rate hidden_dropout_prob",
    "architecture.attention_dropout": "attn_drop attn_drop_rate attention_probs_dropout_prob",
    "architecture.drop_path": "drop_path drop_path_rate stochastic_depth stochastic_depth_prob "
    "architecture.stochastic_depth architecture.drop_path_rate",
    "architecture.tome_r": "tome_r tome token_merging merge_tokens",
    "image_size": "img_size input_size resolution train_crop_size val_crop_size size",
    "model": "arch model_name",
    "weights": "pretrained finetune checkpoint initial_checkpoint model_name_or_path",
    "workers": "num_workers dataloader_num_workers j",
    "seed": "random_seed random_state",
    "aug_repeats": "repeats ra_reps repeated_aug",
    "max_train_samples": "images pictures",
    "val_fraction": "hold_out holdout val_split validation_split train_val_split",
    "eval_every (in epochs)": "evaluate_every eval_steps eval_interval eval_freq",
    "eval_batch_size": "evaluate_batch_size val_batch_size validation_batch_size per_device_eval_batch_size",
    "log_every": "log_interval logging_steps print_freq",
    "checkpoint_steps": "save_steps save_interval save_every",
    "keep_checkpoints": "save_total_limit checkpoint_hist",
    "patience": "early_stopping early_stopping_patience",
    "monitor": "eval_metric metric_for_best_model",
    "final=best": "load_best_model_at_end",
    "augment.mixup_alpha": "mixup mixup_alpha",
    "augment.cutmix_alpha": "cutmix cutmix_alpha",
    "augment.random_erasing": "reprob random_erase random_erasing erasing augment.erasing",
    "augment.hflip": "hflip hflip_prob flip augment.flip",
    "augment.scale": "scale crop_area augment.crop_area",
    "augment.ratio": "ratio crop_ratio augment.crop_ratio",
    "augment.rand_augment": "aa auto_augment autoaugment randaugment rand_augment augment.randaugment_layers",
    "augment.rand_augment_magnitude": "magnitude augment.randaugment_magnitude",
    "augment.color_jitter": "color_jitter jitter augment.jitter",
    "augment.mixup_prob": "mixup_prob augment.mix_probability",
    "augment.padding and augment.padding_mode": "augment.pad augment.pad_with",
}
"""Settings, and what timm, transformers, torchvision and earlier recipes call them."""


def recipe_names() -> list[str]:
    """The recipes that the package carries."""
    folder = files("vitruvian") / "recipes"
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def read_recipe(name: str | Path) -> Recipe:
    """The recipe of this name, or in this TOML file."""
    return recipe_from(read_table(name), str(name))


def read_table(name: str | Path, above: tuple[str, ...] = ()) -> dict[str, Any]:
    """What a recipe file says, on top of what the recipe that it names as `base` says."""
    text = str(name)
    if text.endswith(".toml"):
        content = read_bytes(Path(name), raises=ConfigError)
    elif text in recipe_names():
        content = (files("vitruvian") / "recipes" / f"{text}.toml").read_bytes()
    else:
        raise UnknownNameError("recipe", text, recipe_names(), see="(see `vit train --recipes`)")
    table = parse_toml(content, text, raises=ConfigError)
    base = table.pop("base", None)
    if base is None:
        return table
    if not isinstance(base, str) or base in (*above, text):
        raise ConfigError(f"{text}: base={short_repr(base)} is not another recipe")
    return merged(read_table(base, (*above, text)), table)


def recipe_from(table: Mapping[str, Any], where: str) -> Recipe:
    try:
        for key, value in table.items():
            refuse_other_name(key)
            for inner in value if isinstance(value, Mapping) else ():
                refuse_other_name(f"{key}.{inner}")
        return Recipe.from_json(table)
    except ConfigError as error:
        if not where:
            raise
        raise error.replace(where=where) from error


def refuse_other_name(key: str) -> None:
    """Answer a name that a setting has elsewhere with the one that it has here."""
    known = {field.name for field in dataclasses.fields(Recipe)}
    plain = key.strip().lower().replace("-", "_")
    if key in known:
        return
    for name, others in OTHER_NAMES.items():
        if plain in others.split():
            raise ConfigError(f"unknown setting {key!r}: here it is {name}")
    if plain in known:
        raise ConfigError(f"unknown setting {key!r}: here it is {plain}")


def changed(recipe: Recipe, changes: Iterable[str]) -> Recipe:
    """The recipe after changes such as `epochs=20` or `augment.hflip=0`."""
    table, changes = recipe.to_json(), list(changes)
    if keys_of(changes) >= {"epochs", "steps"}:
        raise ConfigError(f"give {argument('epochs')} or {argument('steps')}, not both")
    for change in changes:
        key, sign, text = change.partition("=")
        key = key.strip()
        if not sign or not key:
            raise ConfigError(f"{change!r} is not of the form KEY=VALUE")
        if key in OWNED:
            raise ConfigError(f"{key} follows from {OWNED[key]}: set that")
        table = merged(table, nested(key, parsed(text.strip())))
        if key in ("epochs", "steps"):
            table["steps" if key == "epochs" else "epochs"] = 0
    return recipe_from(table, "")


def keys_of(changes: Iterable[str]) -> set[str]:
    """The settings that changes such as `epochs=20` are about."""
    return {change.partition("=")[0].strip() for change in changes}


def parsed(text: str) -> Any:
    """The value that a text means in TOML; what means nothing there is the text itself."""
    try:
        return parse_toml(f"value = {text}", "")["value"]
    except FileError:
        return text


def nested(key: str, value: Any) -> dict[str, Any]:
    """`a.b` and a value as {"a": {"b": value}}."""
    for part in reversed(key.split(".")):
        value = {part: value}
    assert isinstance(value, dict)
    return value


def merged(table: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A table with changes, inner tables merged in the same way."""
    result = dict(table)
    for key, value in changes.items():
        both = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
        result[key] = merged(result[key], value) if both else value
    return result


def to_toml(table: Mapping[str, Any], path: str = "") -> str:
    """Nested tables of numbers, texts and lists as TOML; None is left out."""
    own = {key: value for key, value in table.items() if value is not None and not isinstance(value, Mapping)}
    lines = [f"{key} = {toml_value(value)}" for key, value in own.items()]
    for key, value in table.items():
        if isinstance(value, Mapping) and value:
            name = f"{path}{key}"
            lines += ["", f"[{name}]", to_toml(value, f"{name}.").rstrip("\n")]
    return "\n".join(lines) + "\n"


def toml_value(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml_value, value))}]"
    if isinstance(value, str):  # JSON writes a character beyond 16 bits as two, which TOML does not read
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value) if isinstance(value, float) else json.dumps(value)
