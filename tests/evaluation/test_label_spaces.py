"""Which outputs mean which classes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from vitruvian.catalog import imagenet_ids, imagenet_labels
from vitruvian.errors import DataError
from vitruvian.evaluation.label_spaces import label_space, read_ids


def outputs(classes, **model):
    return [group[0] for group in label_space(classes, **model).outputs]


def test_folders_named_by_word_net_ids_mean_imagenets_outputs_and_the_others_do_not_compete():
    classes = ["n02123045", "n01440764", "n15075141"]  # as in ImageNet-A and ImageNet-R
    space = label_space(classes, labels=None, total=1000)
    assert space.outputs == ((281,), (0,), (999,))
    assert space.classes == ("tabby", "tench", "toilet tissue")
    assert (space.about, space.competing, space.total) == ("WordNet ids", 3, 1000)
    logits = torch.zeros(1, 1000)
    logits[0, [5, 0]] = torch.tensor([9.0, 1.0])  # a class that the data does not have is ahead
    assert space.project(logits).tolist() == [[0.0, 1.0, 0.0]]
    assert (space.rank_among_all(logits, np.array([1])) < 1).tolist() == [False]


@pytest.mark.parametrize("form", ["{}", "{:03d}"])
def test_folders_named_by_numbers_count_by_value_however_they_are_sorted(form):
    classes = sorted(form.format(number) for number in range(1000))  # "0", "1", "10", "100", ... as strings sort
    assert outputs(classes, labels=None, total=1000) == [int(name) for name in classes]
    assert label_space(classes, labels=None, total=1000).about == "ImageNet's class numbers"


def test_folders_named_by_imagenets_names_are_known_in_any_spelling():
    assert outputs(["Great_White_Shark", "tench"], labels=None, total=1000) == [2, 0]
    assert outputs(["crane (bird)", "crane (machine)"], labels=None, total=1000) == [134, 517]


def test_a_head_of_1000_other_classes_is_not_taken_for_imagenets():
    with pytest.raises(DataError, match="2 of 2 classes of the data are not among the model's 1000"):
        label_space(["n01440764", "n02123045"], labels=[f"plant {i}" for i in range(1000)], total=1000)


def test_a_head_with_imagenets_long_names_is_imagenets():
    long = [f"{name}, something else" for name in imagenet_labels()]
    assert outputs(["n02123045", "n01440764"], labels=long, total=1000) == [281, 0]


def test_the_models_own_labels_come_first_whatever_their_order():
    assert outputs(["cat", "dog"], labels=["dog", "bird", "cat"], total=3) == [2, 0]
    assert outputs(["1", "0"], labels=["1", "0"], total=2) == [0, 1]  # labels, not numbers of outputs
    assert outputs(["Golden_Retriever", "pug"], labels=["pug", "golden retriever"], total=2) == [1, 0]


def test_a_model_without_labels_takes_numbers_or_as_many_classes_in_their_order():
    assert outputs(["2", "0"], labels=None, total=3) == [2, 0]
    space = label_space(["cat", "dog"], labels=None, total=2)
    assert space.outputs == ((0,), (1,))
    assert space.about == "their order, as the model has no labels"
    with pytest.raises(
        DataError, match=r"2 of 2 classes of the data are not among the model's 3, such as 'cat', 'dog'"
    ):
        label_space(["cat", "dog"], labels=None, total=3)


def test_two_folders_of_one_class_are_refused():
    with pytest.raises(DataError, match="two classes of the data are the same by ImageNet's class numbers; merge"):
        label_space(["7", "007"], labels=None, total=1000)


def large_head():
    """Ids of 21,843 outputs, ImageNet-1k's among them in another order."""
    others = [f"n{99_000_000 + number}" for number in range(21_843 - 1000)]
    return [*others[:500], *reversed(imagenet_ids()), *others[500:]]


def test_a_21k_head_answers_for_imagenet_1k_through_its_word_net_ids():
    ids = large_head()
    for classes in (imagenet_ids()[:3], ["0", "1", "2"], ["tench", "goldfish", "great_white_shark"]):
        assert outputs(classes, labels=None, total=21_843, ids=ids) == [1499, 1498, 1497]
    space = label_space(["0", "1"], labels=None, total=21_843, ids=ids)
    logits = torch.zeros(1, 21_843)
    logits[0, [3, 1495]] = torch.tensor([9.0, 5.0])  # output 3 is no class of ImageNet-1k
    assert space.imagenet_predictions(logits).tolist() == [4]


def test_a_21k_head_without_ids_says_what_is_needed():
    with pytest.raises(DataError, match=r"21843 outputs have no names; pass a file with one WordNet id per line"):
        label_space(list(imagenet_ids()), labels=None, total=21_843)


def test_numbers_are_not_taken_for_the_outputs_of_a_21k_head():
    with pytest.raises(DataError, match="pass a file with one WordNet id per line"):
        label_space([f"{number:03d}" for number in range(1000)], labels=None, total=21_843)


def test_a_file_of_ids_is_checked(tmp_path):
    path = tmp_path / "ids.txt"
    path.write_text("n00000001 one\nn00000002\n\n")
    assert read_ids(path, 2) == ("n00000001", "n00000002")
    with pytest.raises(DataError, match=r"2 WordNet ids, but the model has 3 outputs"):
        read_ids(path, 3)
    path.write_text("n00000001\ntench\n")
    with pytest.raises(DataError, match=r"'tench' is not a WordNet id such as n01440764"):
        read_ids(path, 2)
    with pytest.raises(DataError, match="cannot be read: No such file"):
        read_ids(tmp_path / "none.txt", 2)


def test_a_class_of_several_outputs_takes_the_best_of_them():
    groups = {"clock": (409, 530), "chair": (423,), "air freshener": ()}
    space = label_space(["air freshener", "chair", "clock"], labels=None, total=1000, groups=groups)
    assert space.classes == ("chair", "clock")
    assert space.labels.tolist() == [-1, 0, 1]
    logits = torch.zeros(2, 1000)
    logits[0, 530], logits[0, 423], logits[1, 409] = 2.0, 1.0, -1.0
    assert space.project(logits).tolist() == [[1.0, 2.0], [0.0, 0.0]]
    assert (space.rank_among_all(logits, np.array([1, 1])) < 1).tolist() == [True, False]
    flat = torch.zeros(1, space.total)  # equal logits rank in the order of the outputs
    assert space.rank_among_all(flat, np.array([1])).tolist() == [min(space.outputs[1])]
    assert space.rank_among_all(logits, np.array([1, 1])).tolist() == [
        0,
        529,
    ]  # 530 outputs before 530, one of them lower


def test_a_mapping_to_imagenet_wants_its_classes_and_known_folders():
    with pytest.raises(DataError, match="needs a model with its 1000 classes; this one has 0 of them"):
        label_space(["chair"], labels=None, total=7, groups={"chair": (423,)})
    with pytest.raises(DataError, match="the mapping has none of the 1 classes, such as 'sofa'"):
        label_space(["sofa"], labels=None, total=1000, groups={"chair": (423,)})
