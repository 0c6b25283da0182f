"""Groups of images, such as those of one patient or camera, and splits that never divide a group."""

import re

import numpy as np
from numpy.typing import NDArray

from vitruvian.data.order import IndexArray, permute
from vitruvian.data.sources import Source, Subset, class_sizes, hold_out, ranks_in_class, take
from vitruvian.errors import ConfigError, DataError, argument, nearest, short_repr
from vitruvian.text import plural, printable

GROUP_COLUMN = "group"  # the column of a manifest that is used without being named

# n images, G groups, P parts of a split


def values_by(source: Source, by: str) -> list[str]:
    """For each image the value in the column `by` of its table, or what the regular expression `by` finds in its path.

    Groups in parentheses are joined by a slash; without any, the whole match is the value.

    Raises:
        ConfigError: `by` is neither a column nor a regular expression.
        DataError: A path does not match.
    """
    columns = source.column_names()
    if by in columns:
        return source.column(by)
    if source.remote:
        raise DataError("the paths of remote data are known only after downloading", where=source.name)
    listed = f"the columns are {', '.join(map(printable, columns))}" if columns else ""
    near = nearest(by, columns, 1)
    hint = f"did you mean the column {near[0]!r}?" if near else listed
    try:
        pattern = re.compile(by)
    except re.error as error:
        raise ConfigError(f"{by!r} is neither a column nor a regular expression ({error})", hint=hint) from error
    keys = [source.key(index) for index in range(len(source))]
    matches = [pattern.search(key) for key in keys]
    values = ["/".join(part or "" for part in match.groups()) or match[0] if match else "" for match in matches]
    missing = [key for key, match in zip(keys, matches) if match is None]
    if missing:
        some = f"{len(missing):,} of {len(keys):,} paths do not match"
        what = "no path matches" if len(missing) == len(keys) else some
        raise DataError(f"{what} {by!r}, such as {printable(missing[0])}", where=source.name, hint=hint)
    return values


def group_numbers(source: Source, by: str = "") -> IndexArray | None:
    """The group of each image (n,), from 0; None if `by` is empty and the images have no column `group`.

    Raises:
        DataError: An image has no group, or all images are of one.
    """
    if not by and GROUP_COLUMN not in source.column_names():
        return None
    values = values_by(source, by or GROUP_COLUMN)
    empty = [index for index, value in enumerate(values) if not value.strip()]
    if empty:
        reason = f"{plural(len(empty), 'image', 'has|have')} no group, such as {printable(source.key(empty[0]))}"
        raise DataError(reason, where=source.name, hint="give each image a group, a new one if it belongs to none")
    names, groups = np.unique(np.array(values, object), return_inverse=True)
    if len(names) < 2:
        reason = f"all {len(source):,} images are of one group, {short_repr(names[0])}; at least two are needed"
        raise DataError(reason, where=source.name)
    return groups.astype(np.int64)


def assign_groups(labels: NDArray[np.int32], groups: IndexArray, shares: NDArray[np.float64], seed: int) -> IndexArray:
    """The part (n,) of each image, such that no group is divided and each part has about its share of every class.

    Large groups come first, those of about one size in an order by the seed. Each joins the part in which it increases
    the chi-square distance from the desired counts the least: sum((count - share * total)^2 / (share * total)). There
    must be at least as many groups as parts, and no part stays empty.
    """
    labels, total = labels.astype(np.int64), np.bincount(labels)
    by_group = np.lexsort((labels, groups))
    ends = np.cumsum(np.bincount(groups))
    members = np.split(labels[by_group], ends[:-1])  # the labels in each group, in ascending order
    sizes, shuffled = np.log2(np.diff(ends, prepend=0)), np.random.default_rng(seed).permutation(len(ends))
    counts, filled = np.zeros((len(shares), len(total))), np.zeros(len(shares), np.bool_)
    parts = np.zeros(len(ends), np.int64)
    for left, group in zip(range(len(ends), 0, -1), sorted(shuffled.tolist(), key=lambda g: -int(sizes[g]))):
        classes, added = np.unique(members[group], return_counts=True)
        growth = (added * (2 * counts[:, classes] + added) / total[classes]).sum(axis=1) / shares
        if left <= (~filled).sum():  # the last groups fill the parts that have none
            growth[filled] = np.inf
        part = int(growth.argmin())
        parts[group], filled[part] = part, True
        counts[part, classes] += added
    return parts[groups]


def hold_out_groups(source: Source, share: float, seed: int, by: str = "") -> tuple[Source, Source, str]:
    """Split a source into (train, held out) and describe what is held out: whole groups, or images of each class.

    Args:
        share: Fraction to hold out.
        seed: Decides what is held out.
        by: A column or a regular expression on the path, as for `values_by`; by default the column `group`, if any.
    """
    groups = group_numbers(source, by)
    if groups is None:
        return *hold_out(source, share, seed), f"{share:.0%} of each class, held out"
    if not 0 < share < 1:
        raise ConfigError(f"the share held out, {share}, is not between 0 and 1")
    part = assign_groups(source.strata()[0].astype(np.int32), groups, np.array([1 - share, share]), seed)
    held = f"{len(np.unique(groups[part == 1])):,} of {len(np.unique(groups)):,} groups, held out"
    return *divide(source, part == 1, "held out"), held


def divide(source: Source, chosen: NDArray[np.bool_], name: str) -> tuple[Subset, Subset]:
    """The other samples, and the chosen ones, called `name`."""
    rest = take(source, np.flatnonzero(~chosen), f"{source.name} (without what is {name})")
    return rest, take(source, np.flatnonzero(chosen), f"{source.name} ({name})")


def assign_folds(source: Source, count: int, seed: int, by: str = "") -> IndexArray:
    """The fold (n,) of each image, from 0, for cross-validation in `count` folds.

    Raises:
        ConfigError: There are fewer groups or images than folds.
    """
    strata, strata_count = source.strata()
    labels, groups = strata.astype(np.int64), group_numbers(source, by)
    available = len(source) if groups is None else int(groups.max()) + 1
    if not 2 <= count <= available:
        what = plural(available, "image" if groups is None else "group")
        raise ConfigError(f"{argument('folds', count)} is not between 2 and {what}")
    if groups is not None:
        return assign_groups(labels.astype(np.int32), groups, np.full(count, 1 / count), seed)
    sizes = class_sizes(labels, strata_count)
    position = permute(ranks_in_class(labels, np.zeros_like(sizes)), sizes[labels], seed, stream=labels)
    before = np.cumsum(sizes) - sizes  # a class begins where the one before it ended, so that folds are of equal size
    return (position + before[labels]) % count
